"""Parses a client's JSON into a Call. Checks only the fields that the front-end needs; the engine checks the rest."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec
import numpy as np
from msgspec import Raw

from llmserve.api.bodies import (
    OPTIONS,
    PROMPTS_MAX,
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    read_body,
    strings_of,
    too_many,
    value_of,
)
from llmserve.deadline_settings import SLO_MS_MAX
from llmserve.errors import BadRequest
from llmserve.headers import PREDICTED_HEADER, RECEIPT_HEADER, SLO_HEADER, STREAM_CHARS_MAX, STREAM_HEADER
from llmserve.request import Call
from predictor.prompt import Prompt

FORWARDED_HEADERS = ("x-request-id", "traceparent", "tracestate")  # vLLM names answers and spans by these headers
FORWARDED_CHARS_MAX = 256
OPENING_CHARS = 8192
OPTIONS_BYTES_MAX = 1024  # of stream_options, which are parsed and written again
THREAD_BYTES = 256 << 10  # a larger body is parsed in a thread

# ---- prompts -------------------------------------------------------------------------------------------------------


class ReadPrompt(msgspec.Struct):
    """What a Call has of the prompt.

    prompt   input of the length predictor
    opening  its first OPENING_CHARS, in the order of the engine's template, to compare prefixes
    chars    characters of all its texts; ids : number of its token ids; prompts : each has its own answers
    """

    prompt: Prompt
    opening: str
    chars: int
    ids: int = 0
    prompts: int = 1


def _read_chat(body: ChatBody, stops: tuple[str, ...], output_tokens_max: int | None) -> ReadPrompt:
    """The predictor gets the last user turn, the system prompt, and the length of all other turns in characters."""
    texts = [message.text for message in body.messages]
    roles = [message.role for message in body.messages]
    question, rules = _last(roles, "user") % len(roles), max(_last(roles, "system"), _last(roles, "developer"))
    text, system = texts[question], texts[rules] if rules not in (-1, question) else ""
    chars = sum(map(len, texts))
    tools = body.tools_count
    prompt = Prompt(
        text,
        body.model,
        system,
        chars - len(text) - len(system),
        stops,
        tools=tools,
        format=body.format,
        output_tokens_max=output_tokens_max,
    )
    lines = [bytes(memoryview(body.tools)[:OPENING_CHARS]).decode(errors="replace")] if tools else []
    for role, content in zip(roles, texts, strict=True):
        lines += (role, content)
    return ReadPrompt(prompt, _first_characters(lines), chars)


def _last(roles: list[str], role: str) -> int:
    """The place of the last message of this role; -1 without one."""
    return len(roles) - 1 - roles[::-1].index(role) if role in roles else -1


def _read_completion(body: CompletionBody, stops: tuple[str, ...], output_tokens_max: int | None) -> ReadPrompt:
    data = bytes(body.prompt)
    if b'"' in data:
        value = strings_of("prompt", body.prompt, PROMPTS_MAX, "prompts")
        texts = [value] if isinstance(value, str) else value or []
        text, opening, ids, prompts = " ".join(texts), _first_characters(texts), 0, max(1, len(texts))
    else:
        ids, prompts, opening = _token_ids(data)
        text = ""
    prompt = Prompt(text, body.model, stop=stops, output_tokens_max=output_tokens_max)
    return ReadPrompt(prompt, opening, len(text), ids, prompts)


def _token_ids(prompt: bytes) -> tuple[int, int, str]:
    """(token ids, prompts, opening in decimal digits) of a list of integers, or of a list of such lists.

    The prompt is valid JSON without a string. So with digits, signs and commas removed, exactly its brackets remain;
    between two inner lists stands a comma only. Raises BadRequest for anything else.
    """
    compact = prompt.translate(None, b" \t\r\n")
    brackets = compact.translate(None, b"0123456789-,")
    prompts = len(brackets) // 2 - 1
    flat = brackets == b"[]"
    nested = prompts > 0 and brackets == b"[" + prompts * b"[]" + b"]" and compact.count(b"],[") == prompts - 1
    if not flat and not (nested and compact.startswith(b"[[") and compact.endswith(b"]]")):
        message = "expected text, a list of texts, a list of token ids, or a list of lists of token ids"
        raise BadRequest(f"`prompt`: {message}", param="prompt", code="invalid_value")
    if prompts > PROMPTS_MAX:
        raise too_many("prompt", PROMPTS_MAX, "prompts")
    ids = compact.count(b",") + 1 - compact.count(b"[]")
    opening = compact[: 2 * OPENING_CHARS].translate(None, b"[]").replace(b",", b"\n")[:OPENING_CHARS]
    return ids, 1 if flat else prompts, opening.decode()


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


# ---- the call ------------------------------------------------------------------------------------------------------


class CallParser:
    """Parses bodies; large ones in a thread, one at a time, so that they cannot hold the event loop.

    prompt_chars_max : characters, or token ids, of a prompt.  choices_max : answers of one request
    """

    def __init__(self, *, prompt_chars_max: int, choices_max: int) -> None:
        self._prompt_chars_max, self._choices_max = prompt_chars_max, choices_max
        self._gate = asyncio.Lock()

    def is_large(self, data: bytes) -> bool:
        return len(data) > THREAD_BYTES

    def parse(self, path: str, data: bytes, headers: Mapping[str, str]) -> Call:
        """As parse_call."""
        return parse_call(
            path, data, prompt_chars_max=self._prompt_chars_max, choices_max=self._choices_max, headers=headers
        )

    async def parse_large(self, path: str, data: bytes, headers: Mapping[str, str]) -> Call:
        """As parse_call, in a thread."""
        async with self._gate:
            return await asyncio.to_thread(self.parse, path, data, headers)


def parse_call(
    path: str,
    data: bytes,
    *,
    prompt_chars_max: int,
    choices_max: int = PROMPTS_MAX,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Call:
    """Parse a request. headers: the client's, with lower-case names. Raises BadRequest, naming the field."""
    body = read_body(path, data)
    output_tokens_max = _output_tokens_max(body)
    read = _read(body, output_tokens_max)
    if read.chars > prompt_chars_max:
        raise _too_long(body, read.chars, "characters", prompt_chars_max)
    if read.ids > prompt_chars_max:  # a token has one character at least
        raise _too_long(body, read.ids, "token ids", prompt_chars_max)
    choices, ids, least = (body.n or 1) * read.prompts, read.ids, body.output_tokens_certain
    if choices > choices_max:
        raise _too_many_choices(body, read, choices_max)
    if body.truncate_prompt_tokens:
        ids = 0
    stream = bool(body.stream)
    options = _options(body, stream=stream)
    usage_added = stream and not (options is not None and options.include_usage)
    return Call(
        path=path,
        body=_with_usage(data, body.stream_options) if usage_added else data,
        prompt=read.prompt,
        stream=stream,
        usage_added=usage_added,
        choices=choices,
        output_tokens_max=output_tokens_max,
        output_tokens_min=body.output_tokens_min(output_tokens_max),
        slo_s=_positive(SLO_HEADER, headers.get(SLO_HEADER), most=SLO_MS_MAX, scale=1e-3),
        predicted_tokens=_positive(PREDICTED_HEADER, headers.get(PREDICTED_HEADER), most=2.0**31),
        opening=read.opening,
        prompt_ids=read.ids,
        tokens_min=ids + choices * least,
        context_min=math.ceil(ids / read.prompts) + least,
        headers=_forwarded(headers),
        stream_name=_stream_name(headers.get(STREAM_HEADER)),
        tier=body.service_tier or "",
        priority=body.priority or 0,
        receipt=_flag(RECEIPT_HEADER, headers.get(RECEIPT_HEADER)),
    )


def _output_tokens_max(body: ChatBody | CompletionBody) -> int | None:
    """The client's limit of each answer, in tokens."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return None if body.max_tokens is None else max(1, body.max_tokens)


def _read(body: ChatBody | CompletionBody, output_tokens_max: int | None) -> ReadPrompt:
    stops = body.stops()
    if isinstance(body, ChatBody):
        return _read_chat(body, stops, output_tokens_max)
    return _read_completion(body, stops, output_tokens_max)


def _too_long(body: ChatBody | CompletionBody, count: int, unit: str, most: int) -> BadRequest:
    return BadRequest(
        f"the prompt has {count:,} {unit}; at most {most:,} are allowed",
        param="messages" if isinstance(body, ChatBody) else "prompt",
        code="context_length_exceeded",
    )


def _too_many_choices(body: Body, read: ReadPrompt, most: int) -> BadRequest:
    n = body.n or 1
    param = "n" if n > 1 else "prompt"
    return BadRequest(
        f"`{param}`: {n:,} answers to each of {read.prompts:,} prompts are more than {most:,} in all",
        param=param,
        code="invalid_value",
    )


def _options(body: Body, *, stream: bool) -> StreamOptions | None:
    raw = body.stream_options
    if not raw:
        return None
    if len(memoryview(raw)) > OPTIONS_BYTES_MAX:
        raise BadRequest(
            f"`stream_options`: more than {OPTIONS_BYTES_MAX:,} bytes", param="stream_options", code="invalid_value"
        )
    options: StreamOptions | None = value_of("stream_options", OPTIONS, raw)
    if options is not None and not stream:
        raise BadRequest("stream_options is only allowed with stream = true", param="stream_options")
    return options


def _with_usage(data: bytes, options: Raw) -> bytes:
    """Return the body with stream_options.include_usage = true; all other bytes stay the same.

    options : the view of the field in `data`; empty if absent.
    vLLM ignores continuous_usage_stats without include_usage. The field is removed, so that it stays without effect.
    """
    if not options:
        start = data.index(b"{") + 1
        return data[:start] + b'"stream_options":{"include_usage":true},' + data[start:]
    changed = {**(json.loads(bytes(options)) or {}), "include_usage": True}
    changed.pop("continuous_usage_stats", None)
    start = _address(options) - _address(data)
    return data[:start] + json.dumps(changed).encode() + data[start + len(memoryview(options)) :]


def _address(view: bytes | Raw) -> int:
    """Where the bytes lie in memory."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


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


def _flag(header: str, text: str | None) -> bool:
    if text not in (None, "true", "false"):
        raise BadRequest(f"the header {header} must be true or false", param=header, code="invalid_value")
    return text == "true"


def _forwarded(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the client's headers that are sent to the engine. Too long or unprintable headers are dropped."""
    return tuple([(name, value) for name in FORWARDED_HEADERS if (value := headers.get(name)) and _is_plain(value)])


def _is_plain(value: str) -> bool:
    return len(value) <= FORWARDED_CHARS_MAX and value.isascii() and value.isprintable()


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
