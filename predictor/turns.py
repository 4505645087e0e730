"""Conversations, as published data sets spell them -> what was asked, and the text of each answer."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from predictor.prompt import Prompt
from predictor.text import normalised

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Roles by their spellings in lower case. A call is an assistant's turn that calls a tool."""
ROLE_NAMES = ("role", "from", "speaker")
TEXT_NAMES = ("content", "value", "text", "parts")
THOUGHT_NAMES = ("reasoning_content", "reasoning")
CALLS_NAMES = ("tool_calls", "function_call")
CALL_PARTS = ("tool_use", "tool_call", "function_call", "functionCall")
"""Types of parts, of Anthropic's and of Gemini's format, that call a tool. Gemini's parts have a field of this name."""
RESULT_PARTS = ("tool_result", "functionResponse")


class BadRecord(Exception):
    """The reason why a record cannot be used, for the counts of load_rows. Names the column, never quotes data."""


@dataclass(frozen=True, slots=True)
class Turn:
    """role : a value of ROLES; "" for others.  text : may be empty.

    answer : what the model has written in the turn, thoughts included; "" where the text is not all of it, because the
    turn calls a tool, or where the turn is not to be learnt (weight 0 in OpenAI's format).
    """

    role: str
    text: str
    answer: str


def turns_of(value: Any, column: str) -> list[Turn]:
    """The turns of a list of objects, or of JSON that holds one, as tables do. Raises BadRecord."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRecord(f"no list in {column!r}") from None
    if not isinstance(value, list):
        raise BadRecord(f"no list in {column!r}")
    return [_turn(turn, column) for turn in value]


def asked(turns: list[Turn], around: Prompt) -> Prompt:
    """The turns as a request, as the server reads one: the last user turn is the text.

    turns : with a user turn.  around : has the model and the tools
    """
    place = max(place for place, turn in enumerate(turns) if turn.role == "user")
    system = turns[0].text if turns[0].role == "system" else ""
    characters = sum(len(turn.text) for turn in turns) - len(turns[place].text) - len(system)
    return msgspec.structs.replace(around, text=turns[place].text, system=system, history_characters=characters)


def answers_of(turns: list[Turn], around: Prompt, first: int = 0) -> Iterator[tuple[Prompt, str]]:
    """(the request, the answer's text) of each turn, from the place `first` on, that answers a user or a tool."""
    for place in range(max(first, 1), len(turns)):
        before, turn = turns[:place], turns[place]
        if turn.role == "assistant" and before[-1].role in ("user", "tool") and turn.answer.strip():
            question = next((each.text for each in reversed(before) if each.role == "user"), "")
            if question.strip():
                yield asked(before, around), turn.answer


def group_of(turns: list[Turn]) -> str:
    """The normalised first user text, which ties the rows of a conversation."""
    return normalised(next((turn.text for turn in turns if turn.role == "user" and turn.text.strip()), ""))


def encodable(text: str) -> str:
    """The text, encodable as UTF-8. JSON may hold half a surrogate pair, on which tokenizers and files fail."""
    return text.encode("utf-8", "replace").decode()


def text_of(content: Any, column: str) -> str:
    """The text of a turn's content: a text, or parts. Raises BadRecord."""
    if isinstance(content, Mapping):
        content = content.get("parts", content)
    if isinstance(content, list):  # joined as in the server
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = " ".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise BadRecord(f"a turn without text in {column!r}")
    return encodable(content or "")


def _turn(turn: Any, column: str) -> Turn:
    if not isinstance(turn, Mapping):
        raise BadRecord(f"a turn that is not a JSON object in {column!r}")
    role = ROLES.get(str(_first(turn, ROLE_NAMES) or "").strip().lower(), "")
    content = _first(turn, TEXT_NAMES)
    text, thoughts = text_of(content, column), text_of(_first(turn, THOUGHT_NAMES), column)
    if role == "user" and _has_part(content, RESULT_PARTS) and not text.strip():
        role = "tool"
    calls = _first(turn, CALLS_NAMES) or _has_part(content, CALL_PARTS)
    is_whole = not calls and turn.get("weight") != 0 and text.strip()
    return Turn(role, text, thoughts + text if is_whole else "")


def _has_part(content: Any, kinds: tuple[str, ...]) -> bool:
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return any(part.get("type") in kinds or not part.keys().isdisjoint(kinds) for part in parts)


def _first(turn: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((turn[name] for name in names if turn.get(name) is not None), None)
