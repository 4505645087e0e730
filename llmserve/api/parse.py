"""From a client's JSON to a Call. Only what the front-end itself needs is checked; the engine judges the rest."""

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

FORWARDED_HEADERS = ("x-request-id", "traceparent", "tracestate")  # vLLM names answers and spans by them
FORWARDED_CHARS_MAX = 256
OPENING_CHARS = 8192

Item = TypeVar("Item")
# Lists stop at their first wrong item: telling all of a large body's errors would take seconds.
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
    """What chat and plain completions share; fields not named here go to the engine unseen."""

    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: Positive | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    stop: StrictStr | Several[StrictStr] | None = None
    seed: StrictInt | None = None
    min_tokens: Any = None  # this and the next are vLLM's: it judges them
    ignore_eos: Any = None

    @property
    def output_tokens_min(self) -> int | None:
        """With ignore_eos an answer ends at its limit only."""
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
        """Tokens of a prompt that came as token ids."""
        return 0

    @property
    def prompt_chars(self) -> int:
        """Characters of everything that the engine reads."""
        raise AssertionError("each kind of body has its own prompt")

    def to_predict(self) -> Prompt:
        raise AssertionError("each kind of body has its own prompt")

    def opening(self) -> str:
        """The first OPENING_CHARS of it, in the order in which an engine reads it, for finding equal beginnings."""
        raise AssertionError("each kind of body has its own prompt")


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Positive | None = None
    tools: Any = None

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def prompt_chars(self) -> int:
        return sum(len(_text(message.content)) for message in self.messages)

    def to_predict(self) -> Prompt:
        """The last user turn is what the answer answers; the system prompt says how; the rest only counts."""
        asked = self._last("user") or self.messages[-1]
        system = self._last("system", "developer")
        text, rules = _text(asked.content), _text(system.content) if system and system is not asked else ""
        history = self.prompt_chars - len(text) - len(rules)
        return Prompt(text, self.model, rules, history, self.stops)

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
    max_tokens: NotNegative | None = None  # none at all asks, with `echo`, what the model makes of the prompt itself

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
        """Prompts in this body, each with its own answers."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return len(self.prompt) if several else 1

    def to_predict(self) -> Prompt:
        return Prompt(self._prompt_text(), self.model, stop=self.stops)

    def opening(self) -> str:
        """Of token ids, their digits."""
        if isinstance(self.prompt, str):
            return self.prompt[:OPENING_CHARS]
        flat = chain.from_iterable((part,) if isinstance(part, str | int) else part for part in self.prompt)
        return _first_characters(str(part) for part in flat)

    def _prompt_text(self) -> str:
        """The prompt's text; prompts given as token ids have none."""
        if isinstance(self.prompt, str):
            return self.prompt
        return " ".join(part for part in self.prompt if isinstance(part, str))


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content or [] if isinstance(part.get("text"), str))


def _first_characters(parts: Iterable[str]) -> str:
    """The first OPENING_CHARS of all parts, a line each; takes no more parts than that needs."""
    taken: list[str] = []
    left = OPENING_CHARS
    for part in parts:
        if left <= 0:
            break
        taken.append(part[:left])
        left -= len(part) + 1
    return "\n".join(taken)


BODIES: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


def parse_call(
    path: str, data: bytes, *, prompt_chars_max: int, headers: Mapping[str, str] = MappingProxyType({})
) -> Call:
    """headers: the client's, found by lower-case names. Raises BadRequest naming the field."""
    try:
        body = BODIES[path].model_validate_json(data)
    except ValidationError as error:
        raise _bad_request(error) from None
    if body.prompt_chars > prompt_chars_max:
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        raise BadRequest(
            f"the prompt has {body.prompt_chars:,} characters; at most {prompt_chars_max:,} are taken",
            param=field,
            code="context_length_exceeded",
        )
    stream = bool(body.stream)
    usage_asked = body.stream_options is not None and bool(body.stream_options.include_usage)
    if body.stream_options is not None and not stream:
        raise BadRequest("stream_options is only for stream = true", param="stream_options")
    usage_added = stream and not usage_asked
    return Call(
        path=path,
        body=_ask_for_usage(data, body.stream_options is not None) if usage_added else data,
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
    """Those of the client's that its engine may see. Too long or unprintable ones are left out."""
    found = [(name, headers.get(name)) for name in FORWARDED_HEADERS]
    return tuple([(name, value) for name, value in found if value and _is_plain(value)])


def _is_plain(value: str) -> bool:
    return len(value) <= FORWARDED_CHARS_MAX and value.isascii() and value.isprintable()


def _ask_for_usage(data: bytes, has_options: bool) -> bytes:
    """The body with stream_options.include_usage = true; every other byte stays unless options are there already.

    vLLM heeds continuous_usage_stats only beside include_usage: what was of no effect stays so.
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
    """OpenAI's words for the first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['msg']}")
    # A union's branch adds its own type's name to the location: the field is what comes before it.
    location = takewhile(lambda part: part not in ("str", "int") and not str(part).startswith("list["), first["loc"])
    param = ".".join(str(part) for part in location) or None
    if first["type"] == "missing":
        return BadRequest(f"`{param}` is required", param=param, code="missing_required_parameter")
    what = f"`{param}`" if param else "the body"
    return BadRequest(f"{what}: {first['msg']}", param=param, code="invalid_value")
