"""The bodies of /v1/responses and /v1/messages, which agent programs send: long conversations with many tools.

Most of what they hold is for the engine. The texts of the turns are read as leniently as possible: what has another
shape counts as no text, and the engine refuses it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Raw

from llmserve.api.bodies import (
    STOPS_MAX,
    Counted,
    NotNegative,
    Positive,
    ResponseFormat,
    strings_of,
    value_or_none,
)

TURNS_MAX = BLOCKS_MAX = 8192  # in one body
TOOLS_MAX = 1024

Turns = list[tuple[str, str]]
"""(role, text) of each turn."""


class Block(Counted):
    """A part of a content, of either endpoint. content : of the result of a tool"""

    field = "the contents"
    most = BLOCKS_MAX
    plural = "blocks"
    type: str = ""
    text: Raw = Raw()
    thinking: Raw = Raw()
    input: Raw = Raw()
    content: Raw = Raw()


class AgentTool(Counted):
    field = "tools"
    most = TOOLS_MAX
    plural = "tools"


_STRING = msgspec.json.Decoder(str)
_CONTENT: msgspec.json.Decoder[str | list[Block]] = msgspec.json.Decoder(str | list[Block])
_TOOLS = msgspec.json.Decoder(list[AgentTool])


def text_of(content: Raw) -> str:
    """The text of a content: of a string, or of its blocks of text."""
    value = value_or_none(_CONTENT, content)
    if value is None or isinstance(value, str):
        return value or ""
    texts = [value_or_none(_STRING, block.text) for block in value]
    return " ".join([text for text in texts if text is not None])


class _AgentBody(msgspec.Struct, kw_only=True):
    """What both endpoints have, and what completions have but neither of these; see Body."""

    prompt_field: ClassVar[str]
    n: ClassVar[int | None] = None
    stream_options: ClassVar[Raw] = Raw()
    truncate_prompt_tokens: ClassVar[Raw] = Raw()
    output_tokens_certain: ClassVar[int] = 1
    model: str
    stream: bool | None = None
    tools: Raw = Raw()
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None

    def output_tokens_min(self, most: int | None) -> int | None:
        return None

    @property
    def tools_count(self) -> int:
        listed = value_or_none(_TOOLS, self.tools)
        return len(listed) if listed is not None else 0


# ---- /v1/responses --------------------------------------------------------------------------------------------------


class Item(Counted):
    """An item of the input: a message, a call of a tool, or its output. input : of a tool that takes free text"""

    field = "input"
    most = TURNS_MAX
    plural = "items"
    type: str = "message"
    role: str = ""
    content: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()
    output: Raw = Raw()

    @property
    def turn(self) -> tuple[str, str]:
        if self.role:
            return self.role, text_of(self.content)
        if self.output:
            return "tool", text_of(self.output)
        asked = value_or_none(_STRING, self.arguments) or value_or_none(_STRING, self.input)
        return "assistant", asked or text_of(self.content)


_INPUT: msgspec.json.Decoder[str | list[Item]] = msgspec.json.Decoder(str | list[Item])


class _TextSettings(msgspec.Struct):
    format: ResponseFormat | None = None


_TEXT_SETTINGS = msgspec.json.Decoder(_TextSettings)


class ResponseBody(_AgentBody, kw_only=True):
    prompt_field = "input"
    input: Raw = Raw()
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    text: Raw = Raw()
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    service_tier: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_output_tokens

    @property
    def format(self) -> str:
        """The type of the text's format; "" for plain text."""
        settings = value_or_none(_TEXT_SETTINGS, self.text)
        kind = settings.format.type if settings is not None and settings.format is not None else ""
        return "" if kind == "text" else kind

    @property
    def turns(self) -> Turns:
        given = value_or_none(_INPUT, self.input) or []
        return [("user", given)] if isinstance(given, str) else [item.turn for item in given]

    def stops(self) -> tuple[str, ...]:
        return ()


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


class AgentMessage(Counted):
    most = TURNS_MAX
    plural = "messages"
    role: str
    content: Raw = Raw()

    @property
    def turns(self) -> Turns:
        """The message as turns: the results of tools are apart from what the user says."""
        value = value_or_none(_CONTENT, self.content) or ""
        if isinstance(value, str):
            return [(self.role, value)]
        own, results = [], []
        for block in value:
            if block.type in ("tool_result", "mcp_tool_result"):
                results.append(text_of(block.content))
            else:
                text = value_or_none(_STRING, block.text) or value_or_none(_STRING, block.thinking)
                own.append(text if text is not None else bytes(block.input).decode(errors="replace"))
        turns = [("tool", " ".join(results))] if results else []
        return [*turns, (self.role, " ".join(own))] if own else turns


class MessagesBody(_AgentBody, kw_only=True):
    prompt_field = "messages"
    previous_response_id: ClassVar[str] = ""
    service_tier: ClassVar[str] = ""  # Anthropic's tiers are not OpenAI's
    priority: ClassVar[int] = 0
    messages: Annotated[list[AgentMessage], Meta(min_length=1)]
    max_tokens: NotNegative | None = None  # the engine says that it is required
    system: Raw = Raw()
    stop_sequences: Raw = Raw()
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None

    @property
    def output_tokens_max(self) -> int | None:
        return None if self.max_tokens is None else max(1, self.max_tokens)

    def stops(self) -> tuple[str, ...]:
        if not self.stop_sequences:
            return ()
        stops = strings_of("stop_sequences", self.stop_sequences, STOPS_MAX, "stop sequences")
        return (stops,) if isinstance(stops, str) else tuple(stops or ())
