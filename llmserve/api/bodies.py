"""The JSON bodies of clients: the fields that are read, as typed values, and errors that name the wrong field.

A body of 4 MiB may hold a million values, and Python objects for all of them would hold the event loop for seconds. So
a value becomes an object only if it is read, and lists are counted while they are read.
"""

from __future__ import annotations

import re
import threading
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Raw

from llmserve.errors import BadRequest

MESSAGES_MAX = PARTS_MAX = PROMPTS_MAX = 2048  # in one body; parts: of all messages together
STOPS_MAX = 16  # OpenAI allows 4; evaluations of code on vLLM send five and more
TOOLS_MAX = 128

T = TypeVar("T")
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
NotNegative = Annotated[int, Meta(ge=0, lt=2**31)]


class _Made(threading.local):
    """Objects made so far by the decoding in progress, by type: a list that is too long is not read to its end."""

    def __init__(self) -> None:
        self.counts: dict[type, int] = {}


_made = _Made()


class Counted(msgspec.Struct):
    """An item of a list in `field`. Raises BadRequest at the item after the last one allowed."""

    field: ClassVar[str] = "messages"
    most: ClassVar[int]
    plural: ClassVar[str]

    def __post_init__(self) -> None:
        counts, kind = _made.counts, type(self)
        count = counts[kind] = counts.get(kind, 0) + 1
        if count > self.most:
            raise too_many(self.field, self.most, self.plural)


class Part(Counted):
    most = PARTS_MAX
    plural = "content parts in the messages"
    text: Raw = Raw()


class Message(Counted):
    most = MESSAGES_MAX
    plural = "messages"
    role: str
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        texts = [value_or_none(_TEXT, part.text) for part in self.content or ()]
        return " ".join([text for text in texts if text is not None])


class Tool(Counted):
    field = "tools"
    most = TOOLS_MAX
    plural = "tools"


class ResponseFormat(msgspec.Struct):
    type: str = ""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """The common fields of chat and plain completions. Other fields are forwarded to the engine without a check.

    A Raw field is a view of the body, and empty when the field is absent. min_tokens, ignore_eos and
    truncate_prompt_tokens are extensions of vLLM, which checks them.
    prompt_field : the field with the prompt
    """

    prompt_field: ClassVar[str]
    previous_response_id: ClassVar[str] = ""
    model: str
    stream: bool | None = None
    stream_options: Raw = Raw()
    max_tokens: Positive | None = None
    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: Raw = Raw()
    seed: int | None = None
    min_tokens: Raw = Raw()
    ignore_eos: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    service_tier: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None

    def output_tokens_min(self, most: int | None) -> int | None:
        """The answer's least length in tokens. With ignore_eos an answer ends only at its limit. most : that limit"""
        return most if bytes(self.ignore_eos) == b"true" else value_or_none(_LENGTH, self.min_tokens)

    @property
    def output_tokens_max(self) -> int | None:
        """The client's limit of each answer."""
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def output_tokens_certain(self) -> int:
        """Tokens that each answer has at least. vLLM cuts max_tokens to the context, but refuses such min_tokens."""
        return value_or_none(_LENGTH, self.min_tokens) or (0 if self.max_tokens == 0 else 1)

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises BadRequest."""
        if not self.stop:
            return ()
        stop = strings_of("stop", self.stop, STOPS_MAX, "stop strings")
        return (stop,) if isinstance(stop, str) else tuple(stop or ())


class ChatBody(Body, kw_only=True):
    prompt_field = "messages"
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    tools: Raw = Raw()
    response_format: Raw = Raw()

    @property
    def output_tokens_max(self) -> int | None:
        most = self.max_completion_tokens
        return most if most is not None else super().output_tokens_max

    @property
    def tools_count(self) -> int:
        """Number of tools; 0 for what is no list of objects, which the engine must reject. Raises BadRequest."""
        _made.counts = {}
        listed = value_or_none(_TOOLS, self.tools)
        return len(listed) if listed is not None else 0

    @property
    def format(self) -> str:
        """The type of the response format; "" without one."""
        value = value_or_none(_FORMAT, self.response_format)
        return value.type if value is not None else ""


class CompletionBody(Body, kw_only=True):
    prompt_field = "prompt"
    prompt: Raw
    max_tokens: NotNegative | None = None  # 0 together with `echo` requests the prompt's own log probabilities


_TEXT = msgspec.json.Decoder(str)
_TOOLS = msgspec.json.Decoder(list[Tool])
_FORMAT = msgspec.json.Decoder(ResponseFormat)
_LENGTH: msgspec.json.Decoder[int] = msgspec.json.Decoder(Positive)
_STRINGS = msgspec.json.Decoder(str | list[str] | None)
OPTIONS = msgspec.json.Decoder(StreamOptions | None)

# ---- reading -------------------------------------------------------------------------------------------------------


def read_body(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Read a body. Raises BadRequest, naming the first wrong field."""
    _made.counts = {}
    try:
        if not data.isascii():
            data.decode()  # what nobody reads is not decoded, but an engine would fail on it
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise bad_request(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_value") from None


def value_or_none(decoder: msgspec.json.Decoder[T], raw: Raw) -> T | None:
    """The value; None if it is absent or of another type, which the engine must reject."""
    try:
        return decoder.decode(raw) if raw else None
    except msgspec.DecodeError:
        return None


def value_of(name: str, decoder: msgspec.json.Decoder[Any], raw: Raw) -> Any:
    """The value of a Raw field. Raises BadRequest."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise bad_request(error, name) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"`{name}`: {error}", param=name, code="invalid_value") from None


def strings_of(name: str, raw: Raw, most: int, plural: str) -> str | list[str] | None:
    """The value of a field of one string or several. Makes no object for more than twice as many as are allowed.

    A string has two quotes that no backslash escapes. A backslash before a quote escapes it, or ends its string. So of
    n strings, at least n and at most 2n quotes have no backslash before them. Raises BadRequest.
    """
    data = bytes(raw)
    if data.count(b'"') - data.count(b'\\"') > 2 * most:
        raise too_many(name, most, plural)
    value: str | list[str] | None = value_of(name, _STRINGS, raw)
    if isinstance(value, list) and len(value) > most:
        raise too_many(name, most, plural)
    return value


# ---- errors --------------------------------------------------------------------------------------------------------


def too_many(name: str, most: int, plural: str) -> BadRequest:
    return BadRequest(f"`{name}`: more than {most:,} {plural}", param=name, code="invalid_value")


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
