"""The JSON bodies of clients: the fields that are read, as typed values, and errors that name the wrong field.

A body of 16 MiB may hold four million values, and Python objects for all of them would hold the event loop for
seconds. So a value becomes an object only if it is read, and lists are counted while they are read. A field is read in
every spelling that engines take; what cannot be read is the engine's affair, unless a limit depends on it.
"""

from __future__ import annotations

import re
import threading
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Raw

from llmserve.errors import BadRequest
from llmserve.gateway.shaping import settings_of
from llmserve.settings.load import flag_of
from llmserve.wire.json_text import NESTING_MAX, Scalar, count_of, fault_of, is_too_deep, readable_numbers, truth_of

T = TypeVar("T")


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one body may hold at most; see the settings of the same names."""

    prompt_chars_max: int = 1_000_000
    choices_max: int = 128
    messages_max: int = 8192
    tools_max: int = 1024
    stops_max: int = 64


class _Made(threading.local):
    """How many objects of each type the decoding in progress may still make: a list too long is not read to its end.

    limits : of the body that this thread reads
    """

    def __init__(self) -> None:
        self.limits = BodyLimits()
        self.left: dict[type, int] = {}


_made = _Made()


class Counted(msgspec.Struct):
    """An item of a list in `field`. Raises BadRequest at the item after the last one allowed.

    setting : with the number of items allowed
    """

    field: ClassVar[str] = "messages"
    setting: ClassVar[str] = "messages_max"
    plural: ClassVar[str]

    def __post_init__(self) -> None:
        left, kind = _made.left, type(self)
        count = left.get(kind)
        if count is None:
            count = getattr(_made.limits, self.setting)
        if not count:
            raise too_many(self.field, self.plural, self.setting)
        left[kind] = count - 1


class Part(Counted):
    plural = "content parts in the messages"
    text: Raw = Raw()
    image_url: Raw = Raw()
    video_url: Raw = Raw()
    audio_url: Raw = Raw()
    input_audio: Raw = Raw()
    file: Raw = Raw()

    @property
    def medium(self) -> Raw:
        """What is no text: an image, a sound, a file, or where it is; empty for a text."""
        return self.image_url or self.input_audio or self.video_url or self.audio_url or self.file


class Message(Counted):
    plural = "messages"
    role: str | None = None
    content: str | Part | list[Part | str] | None = None
    tool_call_id: Raw = Raw()

    @property
    def media(self) -> list[Raw]:
        """What the message has besides its text."""
        content = self.content
        parts = content if isinstance(content, list) else [content]
        return [medium for part in parts if isinstance(part, Part) and (medium := part.medium)]

    @property
    def text(self) -> str:
        content = self.content
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) else [] if content is None else [content]
        texts = [part if isinstance(part, str) else value_or_none(_TEXT, part.text) for part in parts]
        return " ".join([text for text in texts if text is not None])


class Tool(Counted):
    field = "tools"
    setting = "tools_max"
    plural = "tools"


class ResponseFormat(msgspec.Struct):
    type: str = ""


class StreamOptions(msgspec.Struct):
    include_usage: Scalar = None


class Asked(msgspec.Struct, kw_only=True):
    """A request for an answer. Other fields are forwarded to the engine without a check.

    A Raw field is a view of the body, and empty when the field is absent. The last fields are SESSION_FIELDS.
    model : None: the only one that there is
    """

    model: str | None = None
    stream: Scalar = None
    metadata: Raw = Raw()
    nvext: Raw = Raw()
    program_id: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    session_id: Raw = Raw()
    session_params: Raw = Raw()

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream. Raises BadRequest."""
        stream = self.stream
        if stream is None or stream is True or stream is False:
            return bool(stream)
        streams = truth_of(stream)
        if streams is None:
            raise unreadable("stream", "neither true nor false, and the form of the answer depends on it")
        return streams


SESSION_FIELDS = ("metadata", "nvext", "program_id", "prompt_cache_key", "session_id", "session_params")
"""Those that may hold a session's id, see llmserve/programs/sources.py."""


class Levelled(Asked, kw_only=True):
    """A request that may step back or forward; see shares.py."""

    service_tier: Scalar = None
    priority: Scalar = None

    @property
    def tier(self) -> str:
        return self.service_tier if isinstance(self.service_tier, str) else ""

    @property
    def level(self) -> int:
        """The `priority`. Raises BadRequest."""
        if self.priority is None:
            return 0
        level = count_of(self.priority)
        if level is None:
            raise unreadable("priority", "no whole number, and the client's share depends on it")
        return level


class Body(Levelled, kw_only=True):
    """The common fields of chat and plain completions.

    min_tokens, ignore_eos and truncate_prompt_tokens are extensions of vLLM, which checks them.
    prompt_field : the field with the prompt
    """

    prompt_field: ClassVar[str]
    previous_response_id: ClassVar[str] = ""
    n: Scalar = None
    stream_options: Raw = Raw()
    max_tokens: Scalar = None
    stop: Raw = Raw()
    min_tokens: Raw = Raw()
    ignore_eos: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()

    @property
    def answers(self) -> int:
        """The answers to each prompt. Raises BadRequest."""
        if self.n is None:
            return 1
        n = count_of(self.n)
        if n is None:
            raise unreadable("n", "no whole number, and the limit of answers (--choices-max) depends on it")
        return max(1, n)

    def output_tokens_min(self, most: int | None) -> int | None:
        """The answer's least length in tokens. With ignore_eos an answer ends only at its limit. most : that limit"""
        if self.ignore_eos and truth_of(value_or_none(_SCALAR, self.ignore_eos)):
            return most
        return self._min_tokens or None if self.min_tokens else None

    @property
    def _min_tokens(self) -> int:
        return max(0, count_of(value_or_none(_SCALAR, self.min_tokens)) or 0)

    @property
    def output_tokens_max(self) -> int | None:
        """The client's limit of each answer."""
        return limit_of(self.max_tokens)

    @property
    def output_tokens_certain(self) -> int:
        """Tokens that each answer has at least. vLLM cuts max_tokens to the context, but refuses such min_tokens."""
        least = self._min_tokens if self.min_tokens else 0
        return least or (0 if self.max_tokens is not None and count_of(self.max_tokens) == 0 else 1)

    @property
    def truncates(self) -> bool:
        """Whether the engine cuts the prompt to fit."""
        raw = self.truncate_prompt_tokens
        return bool(raw) and bool(count_of(value_or_none(_SCALAR, raw)))

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises BadRequest."""
        return stops_of("stop", self.stop)


class ChatBody(Body, kw_only=True):
    prompt_field = "messages"
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Scalar = None
    tools: Raw = Raw()
    response_format: Raw = Raw()
    reasoning_effort: Raw = Raw()
    reasoning: Raw = Raw()  # of OpenRouter
    thinking: Raw = Raw()  # of DeepSeek
    tool_choice: Raw = Raw()
    chat_template_kwargs: Raw = Raw()

    @property
    def shaping(self) -> tuple[str, ...]:
        """See shaping.py."""
        effort, budget, choice, template = (
            self.reasoning_effort,
            self.reasoning or self.thinking,
            self.tool_choice,
            self.chat_template_kwargs,
        )
        if not (effort or budget or choice or template):
            return ()
        fields = {"effort": effort, "thinking": budget, "tool_choice": choice, "template": template}
        return settings_of(fields)

    @property
    def output_tokens_max(self) -> int | None:
        most = self.max_completion_tokens
        return limit_of(most) if most is not None else super().output_tokens_max

    @property
    def tools_count(self) -> int:
        return count_tools(self.tools)

    @property
    def format(self) -> str:
        """The type of the response format; "" without one."""
        value = value_or_none(_FORMAT, self.response_format)
        return value.type if value is not None else ""


class CompletionBody(Body, kw_only=True):
    """max_tokens : 0 together with `echo` requests the prompt's own log probabilities"""

    prompt_field = "prompt"
    prompt: Raw = Raw()


_TEXT = msgspec.json.Decoder(str)
_TOOLS = msgspec.json.Decoder(list[Tool])
_FORMAT = msgspec.json.Decoder(ResponseFormat)
_SCALAR: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Scalar)
_STRINGS = msgspec.json.Decoder(str | list[str] | None)
OPTIONS = msgspec.json.Decoder(StreamOptions | None)


def text_or_none(raw: Raw) -> str | None:
    """The string; None if it is absent or no string."""
    return value_or_none(_TEXT, raw)


# ---- limits -------------------------------------------------------------------------------------------------------


def limit_of(value: Scalar) -> int | None:
    """The client's limit of output tokens, at least 1. None: there is none, for llama.cpp's -1, and for what the engine
    must reject.
    """
    if value is None:
        return None
    count = count_of(value)
    return None if count is None or count < 0 else max(1, count)


def unreadable(name: str, why: str) -> BadRequest:
    return BadRequest(f"`{name}`: {why}", param=name, code="invalid_value")


# ---- reading -------------------------------------------------------------------------------------------------------


def read_body(decoder: msgspec.json.Decoder[T], data: bytes, limits: BodyLimits) -> tuple[T, bytes]:
    """Read a body. Returns its fields, and the text of which Raw fields are views: `data`, or a copy of its length.

    Raises BadRequest, naming the first wrong field.
    """
    _made.left, _made.limits = {}, limits
    if is_too_deep(data):
        raise BadRequest(f"the body is nested more than {NESTING_MAX} deep", code="invalid_value")
    try:
        if not data.isascii():
            data.decode()  # what nobody reads is not decoded, but an engine would fail on it
        return decoder.decode(data), data
    except msgspec.ValidationError as error:
        raise bad_request(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _read_odd(decoder, data, error)


def _read_odd(decoder: msgspec.json.Decoder[T], data: bytes, error: Exception) -> tuple[T, bytes]:
    """Read a body with NaN or infinities, which Python's clients write and Python's engines read. Raises BadRequest."""
    numbers = readable_numbers(data)
    if numbers is not data:
        _made.left = {}
        try:
            return decoder.decode(numbers), numbers
        except msgspec.ValidationError as wrong:
            raise bad_request(wrong) from None
        except msgspec.DecodeError as wrong:
            error = wrong
    fault = fault_of(data, error)
    raise BadRequest(f"the body is not JSON: {fault.message}", param=fault.path or None, code="invalid_json") from None


def value_or_none(decoder: msgspec.json.Decoder[T], raw: Raw) -> T | None:
    """The value; None if it is absent or of another type, which the engine must reject."""
    try:
        return decoder.decode(raw) if raw else None
    except msgspec.DecodeError:
        return None


def stops_of(name: str, raw: Raw) -> tuple[str, ...]:
    """The stop strings; none of what the engine must reject. Raises BadRequest."""
    if not raw:
        return ()
    stops = strings_of(name, raw, "stop strings", "stops_max")
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def strings_of(name: str, raw: Raw, plural: str, setting: str) -> str | list[str] | None:
    """The value of a field of one string or several; None for anything else. Raises BadRequest.

    Makes no object for more than twice as many as are allowed: a string has two quotes that no backslash escapes. A
    backslash before a quote escapes it, or ends its string. So of n strings, at least n and at most 2n quotes have no
    backslash before them.
    """
    data, most = bytes(raw), getattr(_made.limits, setting)
    if len(data) > 2 * most and data.count(b'"') - data.count(b'\\"') > 2 * most:
        raise too_many(name, plural, setting)
    value: str | list[str] | None = value_or_none(_STRINGS, raw)
    if isinstance(value, list) and len(value) > most:
        raise too_many(name, plural, setting)
    return value


def count_tools(tools: Raw) -> int:
    """Number of tools; 0 for what is no list of objects, which the engine must reject. Raises BadRequest."""
    _made.left = {}
    listed = value_or_none(_TOOLS, tools)
    return len(listed) if listed is not None else 0


# ---- errors --------------------------------------------------------------------------------------------------------


def too_many(name: str, plural: str, setting: str) -> BadRequest:
    return unreadable(name, f"more than {getattr(_made.limits, setting):,} {plural} ({flag_of(setting)})")


_PLACE = re.compile(r" - at `\$(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def bad_request(error: msgspec.ValidationError, within: str = "") -> BadRequest:
    """Return the error in OpenAI's format. within : the field that was decoded; "" for the whole body"""
    text, place = str(error), _PLACE.search(str(error))
    path = place[1] if place is not None else ""
    if within and path.startswith("["):  # an item of a list of strings
        path = ""
    param = (within + path).replace("[", ".").replace("]", "").removeprefix(".")
    problem = text[: place.start()] if place is not None else text
    if missing := _MISSING.match(problem):
        param = f"{param}.{missing[1]}".removeprefix(".")
        return BadRequest(f"`{param}` is required", param=param, code="missing_required_parameter")
    problem = problem[:1].lower() + problem[1:]
    return BadRequest(
        f"`{param}`: {problem}" if param else f"the body: {problem}", param=param or None, code="invalid_value"
    )
