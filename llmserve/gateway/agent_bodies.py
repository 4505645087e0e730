"""The bodies of /v1/responses and /v1/messages, which agent programs send: long conversations with many tools.

Most of what they hold is for the engine. The texts of the turns are read as leniently as possible: what has another
shape counts as no text, and the engine refuses it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Raw

from llmserve.gateway.bodies import (
    Asked,
    Counted,
    Levelled,
    ResponseFormat,
    count_tools,
    limit_of,
    stops_of,
    text_or_none,
    value_or_none,
)
from llmserve.gateway.shaping import settings_of
from llmserve.wire.json_text import Scalar

Turn = tuple[str, str, list[Raw]]
"""Role, text, and what there is besides the text: images, sounds, files, or where they are."""


class Block(Counted):
    """A part of a content, of either endpoint. content : of a tool's result.  source : of an image or a document"""

    field = "the contents"
    plural = "blocks"
    type: str = ""
    text: Raw = Raw()
    thinking: Raw = Raw()
    input: Raw = Raw()
    content: Raw = Raw()
    tool_use_id: Raw = Raw()
    source: Raw = Raw()
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    file_data: Raw = Raw()
    file_url: Raw = Raw()

    @property
    def medium(self) -> Raw:
        """What is no text; empty for a text."""
        if self.type not in MEDIA:
            return Raw()
        return self.source or self.image_url or self.input_audio or self.file_data or self.file_url


MEDIA = frozenset(("image", "document", "input_image", "input_audio", "input_file", "computer_screenshot"))
ATTRIBUTION = "x-anthropic-billing-header:"
_STRING = msgspec.json.Decoder(str)
_CONTENT: msgspec.json.Decoder[str | Block | list[str | Block]] = msgspec.json.Decoder(str | Block | list[str | Block])


def read_content(content: Raw) -> tuple[str, list[Raw]]:
    """The text of a content, of a string or of its blocks of text; and its media."""
    blocks = blocks_of(content)
    return text_of_blocks(blocks), media_of_blocks(blocks)


def media_of_blocks(blocks: list[str | Block]) -> list[Raw]:
    return [medium for block in blocks if isinstance(block, Block) and (medium := block.medium)]


def text_of_blocks(blocks: list[str | Block]) -> str:
    texts = [block if isinstance(block, str) else value_or_none(_STRING, block.text) for block in blocks]
    return " ".join([text for text in texts if text is not None])


def blocks_of(content: Raw) -> list[str | Block]:
    """The blocks of a content; none of what has another form."""
    value = value_or_none(_CONTENT, content)
    return value if isinstance(value, list) else [] if value is None else [value]


class OneAnswer:
    """What both bodies have in common: one answer, of no least length, and tools."""

    __slots__ = ()
    answers: ClassVar[int] = 1
    truncates: ClassVar[bool] = False
    output_tokens_certain: ClassVar[int] = 1
    tools: Raw

    def output_tokens_min(self, most: int | None) -> int | None:
        return None

    @property
    def tools_count(self) -> int:
        return count_tools(self.tools)


# ---- /v1/responses --------------------------------------------------------------------------------------------------


class Item(Counted):
    """An item of the input: a message, a call of a tool, or its output. input : of a tool that takes free text"""

    field = "input"
    plural = "items"
    type: str = "message"
    role: str | None = None
    content: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()
    output: Raw = Raw()
    call_id: Raw = Raw()

    @property
    def turn(self) -> Turn:
        if self.role:
            return self.role, *read_content(self.content)
        if self.output or self.type.endswith(("_output", "_response")):
            by_engine = self.type.endswith("_call")  # a call that the engine's side has run: a part of its answer
            return "assistant" if by_engine else "tool", *read_content(self.output)
        asked = value_or_none(_STRING, self.arguments) or value_or_none(_STRING, self.input)
        return ("assistant", asked, []) if asked else ("assistant", *read_content(self.content))


_INPUT: msgspec.json.Decoder[str | list[Item]] = msgspec.json.Decoder(str | list[Item])


class _TextSettings(msgspec.Struct):
    format: ResponseFormat | None = None


_TEXT_SETTINGS = msgspec.json.Decoder(_TextSettings)


class ResponseBody(Levelled, OneAnswer, kw_only=True):
    prompt_field: ClassVar[str] = "input"
    input: Raw = Raw()
    instructions: Scalar = None
    max_output_tokens: Scalar = None
    previous_response_id: str | None = None
    text: Raw = Raw()
    tools: Raw = Raw()
    reasoning: Raw = Raw()
    tool_choice: Raw = Raw()

    @property
    def shaping(self) -> tuple[str, ...]:
        return settings_of({"thinking": self.reasoning, "tool_choice": self.tool_choice})

    @property
    def output_tokens_max(self) -> int | None:
        return limit_of(self.max_output_tokens)

    @property
    def format(self) -> str:
        """The type of the text's format; "" for plain text."""
        settings = value_or_none(_TEXT_SETTINGS, self.text)
        kind = settings.format.type if settings is not None and settings.format is not None else ""
        return "" if kind == "text" else kind

    def read(self) -> tuple[list[Turn], str]:
        """The turns, and the id of the last tool call whose output is there; "" for none."""
        given = value_or_none(_INPUT, self.input) or []
        if isinstance(given, str):
            return [("user", given, [])], ""
        outputs = [item.call_id for item in given if item.output and item.call_id]
        return [item.turn for item in given], (text_or_none(outputs[-1]) or "") if outputs else ""

    def stops(self) -> tuple[str, ...]:
        return ()


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


class AgentMessage(Counted):
    plural = "messages"
    role: str | None = None
    content: Raw = Raw()

    def read(self) -> tuple[list[Turn], str]:
        """The message as turns: the results of tools are apart from what the user says. And the id of the last tool
        call with a result; "" for none.
        """
        own, results, tool_call = [], [], ""
        shown: list[Raw] = []  # by tools
        blocks = blocks_of(self.content)
        for block in blocks:
            if isinstance(block, str):
                own.append(block)
            elif block.type in ("tool_result", "mcp_tool_result"):
                text, media = read_content(block.content)
                results.append(text)
                shown += media
                tool_call = value_or_none(_STRING, block.tool_use_id) or tool_call
            else:
                said = value_or_none(_STRING, block.text) or value_or_none(_STRING, block.thinking)
                own.append(said if said is not None else bytes(block.input).decode(errors="replace"))
        turns: list[Turn] = [("tool", " ".join(results), shown)] if results else []
        return [*turns, (self.role or "", " ".join(own), media_of_blocks(blocks))] if own else turns, tool_call


class MessagesBody(Asked, OneAnswer, kw_only=True):
    prompt_field: ClassVar[str] = "messages"
    previous_response_id: ClassVar[str] = ""
    tier: ClassVar[str] = ""  # Anthropic's tiers are not OpenAI's
    level: ClassVar[int] = 0
    messages: Annotated[list[AgentMessage], Meta(min_length=1)]
    max_tokens: Scalar = None  # the engine says that it is required
    system: Raw = Raw()
    stop_sequences: Raw = Raw()
    tools: Raw = Raw()
    thinking: Raw = Raw()
    output_config: Raw = Raw()
    tool_choice: Raw = Raw()

    @property
    def shaping(self) -> tuple[str, ...]:
        fields = {"thinking": self.thinking, "output": self.output_config, "tool_choice": self.tool_choice}
        return settings_of(fields)

    @property
    def rules(self) -> str:
        """The system prompt, without a first block in which Claude Code says for whom it asks: it changes each time."""
        blocks = blocks_of(self.system)
        if len(blocks) > 1 and text_of_blocks(blocks[:1]).startswith(ATTRIBUTION):
            del blocks[0]
        return text_of_blocks(blocks)

    @property
    def output_tokens_max(self) -> int | None:
        return limit_of(self.max_tokens)

    def stops(self) -> tuple[str, ...]:
        return stops_of("stop_sequences", self.stop_sequences)
