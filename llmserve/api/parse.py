"""Parses a client's JSON into a Call. Checks only the fields that the front-end needs; the engine checks the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain, takewhile
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from llmserve.deadline_settings import SLO_MS_MAX
from llmserve.errors import BadRequest
from llmserve.headers import PREDICTED_HEADER, SLO_HEADER, STREAM_CHARS_MAX, STREAM_HEADER
from llmserve.request import Call
from predictor.prompt import Prompt

FORWARDED_HEADERS = ("x-request-id", "traceparent", "tracestate")  # vLLM names answers and spans by these headers
FORWARDED_CHARS_MAX = 256
OPENING_CHARS = 8192

Item = TypeVar("Item")
# Validation of a list stops at the first wrong item: reporting all errors of a large body would take seconds.
Several = Annotated[list[Item], Field(fail_fast=True)]
Positive = Annotated[StrictInt, Field(ge=1, lt=2**31)]
NotNegative = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _AnyFields(BaseModel):
    model_config = ConfigDict(extra="allow")


class StreamOptions(_AnyFields):
    include_usage: StrictBool | None = None


class Message(_AnyFields):
    role: StrictStr
    content: StrictStr | Several[dict[str, Any]] | None = None


class Body(_AnyFields):
    """The common fields of chat and plain completions. Other fields are forwarded to the engine without a check."""

    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: Positive | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    stop: StrictStr | Several[StrictStr] | None = None
    seed: StrictInt | None = None
    min_tokens: Any = None  # min_tokens and ignore_eos are extensions of vLLM, which checks both
    ignore_eos: Any = None

    @property
    def output_tokens_min(self) -> int | None:
        """The answer's least length in tokens. With ignore_eos an answer ends only at its limit."""
        if self.ignore_eos is True:
            return self.output_tokens_max
        return self.min_tokens if isinstance(self.min_tokens, int) and 0 < self.min_tokens < 2**31 else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> int:
        return 1

    @property
    def prompt_ids(self) -> int:
        """Number of tokens of a prompt in the form of token ids."""
        return 0

    @property
    def prompt_chars(self) -> int:
        """Number of characters of the whole prompt."""
        raise AssertionError("each kind of body has its own prompt")

    def to_predict(self) -> Prompt:
        raise AssertionError("each kind of body has its own prompt")

    def opening(self) -> str:
        """Return the first OPENING_CHARS of the prompt, in the order of the engine's template, to compare prefixes."""
        raise AssertionError("each kind of body has its own prompt")


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Positive | None = None
    tools: Any = None
    response_format: Any = None

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def prompt_chars(self) -> int:
        return sum(len(_text(message.content)) for message in self.messages)

    def to_predict(self) -> Prompt:
        """Return the predictor's input: the last user turn, the system prompt, and the rest's length in characters."""
        question = self._last("user") or self.messages[-1]
        system = self._last("system", "developer")
        text, rules = _text(question.content), _text(system.content) if system and system is not question else ""
        history = self.prompt_chars - len(text) - len(rules)
        form = self.response_format.get("type") if isinstance(self.response_format, dict) else None
        return Prompt(
            text,
            self.model,
            rules,
            history,
            self.stops,
            tools=len(self.tools) if isinstance(self.tools, list) else 0,
            format=form if isinstance(form, str) else "",
            output_tokens_max=self.output_tokens_max,
        )

    def opening(self) -> str:
        tools = self.tools if isinstance(self.tools, list) else []
        return _first_characters(
            chain(
                (json.dumps(tool, separators=(",", ":")) for tool in tools),
                chain.from_iterable((message.role, _text(message.content)) for message in self.messages),
            )
        )

    def _last(self, *roles: str) -> Message | None:
        return next((message for message in reversed(self.messages) if message.role in roles), None)


class CompletionBody(Body):
    prompt: StrictStr | Several[StrictStr] | Several[StrictInt] | Several[Several[StrictInt]]
    max_tokens: NotNegative | None = None  # 0 together with `echo` requests the prompt's own log probabilities

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_tokens if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def prompt_chars(self) -> int:
        return len(self._prompt_text())

    @property
    def prompt_ids(self) -> int:
        if isinstance(self.prompt, str):
            return 0
        return sum(isinstance(part, int) if not isinstance(part, list) else len(part) for part in self.prompt)

    @property
    def prompts(self) -> int:
        """Number of prompts in this body, each with its own answers."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return len(self.prompt) if several else 1

    def to_predict(self) -> Prompt:
        return Prompt(self._prompt_text(), self.model, stop=self.stops, output_tokens_max=self.output_tokens_max)

    def opening(self) -> str:
        """Return the first OPENING_CHARS; token ids are written as decimal digits."""
        if isinstance(self.prompt, str):
            return self.prompt[:OPENING_CHARS]
        flat = chain.from_iterable((part,) if isinstance(part, str | int) else part for part in self.prompt)
        return _first_characters(str(part) for part in flat)

    def _prompt_text(self) -> str:
        """Return the prompt's text; "" for prompts in the form of token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        return " ".join(part for part in self.prompt if isinstance(part, str))


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content or [] if isinstance(part.get("text"), str))


def _first_characters(parts: Iterable[str]) -> str:
    """Join the parts with newlines and return the first OPENING_CHARS. Reads no more parts than necessary."""
    lines: list[str] = []
    remaining = OPENING_CHARS
    for part in parts:
        if remaining <= 0:
            break
        lines.append(part[:remaining])
        remaining -= len(part) + 1
    return "\n".join(lines)


BODIES: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


def parse_call(
    path: str, data: bytes, *, prompt_chars_max: int, headers: Mapping[str, str] = MappingProxyType({})
) -> Call:
    """Parse a request. headers: the client's, with lower-case names. Raises BadRequest, naming the field."""
    try:
        body = BODIES[path].model_validate_json(data)
    except ValidationError as error:
        raise _bad_request(error) from None
    if body.prompt_chars > prompt_chars_max:
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        raise BadRequest(
            f"the prompt has {body.prompt_chars:,} characters; at most {prompt_chars_max:,} are allowed",
            param=field,
            code="context_length_exceeded",
        )
    stream = bool(body.stream)
    usage_requested = body.stream_options is not None and bool(body.stream_options.include_usage)
    if body.stream_options is not None and not stream:
        raise BadRequest("stream_options is only allowed with stream = true", param="stream_options")
    usage_added = stream and not usage_requested
    return Call(
        path=path,
        body=_with_usage(data, body.stream_options is not None) if usage_added else data,
        prompt=body.to_predict(),
        stream=stream,
        usage_added=usage_added,
        choices=(body.n or 1) * body.prompts,
        output_tokens_max=body.output_tokens_max,
        output_tokens_min=body.output_tokens_min,
        slo_s=_positive(SLO_HEADER, headers.get(SLO_HEADER), most=SLO_MS_MAX, scale=1e-3),
        predicted_tokens=_positive(PREDICTED_HEADER, headers.get(PREDICTED_HEADER), most=2.0**31),
        opening=body.opening(),
        prompt_ids=body.prompt_ids,
        headers=_forwarded(headers),
        stream_name=_stream_name(headers.get(STREAM_HEADER)),
    )


def _stream_name(text: str | None) -> str:
    if text is None:
        return ""
    if len(text) > STREAM_CHARS_MAX or not text.isascii() or not text.isprintable():
        raise BadRequest(
            f"the header {STREAM_HEADER} must be printable ASCII, at most {STREAM_CHARS_MAX} characters",
            param=STREAM_HEADER,
            code="invalid_value",
        )
    return text


def _forwarded(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the client's headers that are sent to the engine. Too long or unprintable headers are dropped."""
    candidates = [(name, headers.get(name)) for name in FORWARDED_HEADERS]
    return tuple([(name, value) for name, value in candidates if value and _is_plain(value)])


def _is_plain(value: str) -> bool:
    return len(value) <= FORWARDED_CHARS_MAX and value.isascii() and value.isprintable()


def _with_usage(data: bytes, has_options: bool) -> bytes:
    """Return the body with stream_options.include_usage = true. Without stream_options, all other bytes stay the same.

    vLLM ignores continuous_usage_stats without include_usage. The field is removed, so that it stays without effect.
    """
    if not has_options and b'"stream_options"' not in data:
        start = data.index(b"{") + 1
        return data[:start] + b'"stream_options":{"include_usage":true},' + data[start:]
    fields = json.loads(data)
    options = {**(fields.get("stream_options") or {}), "include_usage": True}
    options.pop("continuous_usage_stats", None)
    fields["stream_options"] = options
    return json.dumps(fields).encode()


def _positive(header: str, text: str | None, most: float, scale: float = 1.0) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise BadRequest(
            f"the header {header} must be a positive number, at most {most:g}", param=header, code="invalid_value"
        )
    return value * scale


def _bad_request(error: ValidationError) -> BadRequest:
    """Return the first validation error in OpenAI's format."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['msg']}")
    # For a union, pydantic appends the type's name to the location. The field is the part before the type's name.
    location = takewhile(lambda part: part not in ("str", "int") and not str(part).startswith("list["), first["loc"])
    param = ".".join(str(part) for part in location) or None
    if first["type"] == "missing":
        return BadRequest(f"`{param}` is required", param=param, code="missing_required_parameter")
    subject = f"`{param}`" if param else "the body"
    return BadRequest(f"{subject}: {first['msg']}", param=param, code="invalid_value")
