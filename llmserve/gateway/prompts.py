"""What is read of a prompt, in each form in which clients send it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from llmserve.calls.prompt_blocks import Piece, stand_in
from llmserve.gateway.agent_bodies import MessagesBody, ResponseBody, Turn
from llmserve.gateway.bodies import ChatBody, CompletionBody, strings_of, text_or_none, unreadable
from llmserve.programs.trail import KIND_CHARACTERS, Trail, marks_of
from llmserve.wire.json_text import structure
from predictor.prompt import Prompt

OPENING_CHARS = 512
FIRST_TURNS = 2  # of a first question: it, and a system prompt


class ReadPrompt(msgspec.Struct):
    """What a Call has of the prompt.

    prompt   input of the length predictor
    pieces   all of its texts, in the order of the engine's template; of several prompts those of the first
    chars    characters of all its texts; ids : number of its token ids; prompts : each has its own answers
    trail    to find the earlier requests from which it goes on; None: a first question without tools
    """

    prompt: Prompt
    pieces: Sequence[Piece]
    chars: int
    ids: int = 0
    prompts: int = 1
    trail: Trail | None = None

    @property
    def opening(self) -> str:
        """The first OPENING_CHARS, to compare prompts."""
        return _first_characters(self.pieces)


def read_chat(body: ChatBody, stops: tuple[str, ...], output_tokens_max: int | None) -> ReadPrompt:
    """The predictor gets the last user turn, the system prompt, and the length of all other turns in characters."""
    roles = [message.role or "" for message in body.messages]
    texts = [message.content if type(message.content) is str else message.text for message in body.messages]
    tool_call = ""
    if body.tools:
        results = [message.tool_call_id for message in body.messages if message.role == "tool"]
        tool_call = (text_or_none(results[-1]) or "") if results else ""
    media: list[list[bytes]] = []
    if any(type(message.content) is list for message in body.messages):
        media = [[stand_in(memoryview(medium)) for medium in message.media] for message in body.messages]
    return _read_turns(body, roles, texts, stops, body.format, output_tokens_max, tool_call, media)


def read_response(body: ResponseBody, stops: tuple[str, ...], output_tokens_max: int | None) -> ReadPrompt:
    """As of a chat. A prompt that goes on from an earlier response lacks what only the engine knows."""
    turns: list[Turn] = []
    if body.instructions and isinstance(body.instructions, str):
        turns.append(("system", body.instructions, []))
    read, tool_call = body.read()
    turns += read
    roles, texts, media = _parts_of(turns)
    return _read_turns(body, roles, texts, stops, body.format, output_tokens_max, tool_call, media)


def read_messages(body: MessagesBody, stops: tuple[str, ...], output_tokens_max: int | None) -> ReadPrompt:
    """As of a chat: the results of tools are turns of their own, for they are not what the user asks."""
    turns: list[Turn] = [("system", text, [])] if (text := body.rules) else []
    tool_call = ""
    for message in body.messages:
        read, last_call = message.read()
        turns += read
        tool_call = last_call or tool_call
    roles, texts, media = _parts_of(turns)
    return _read_turns(body, roles, texts, stops, "", output_tokens_max, tool_call, media)


def _parts_of(turns: Sequence[Turn]) -> tuple[list[str], list[str], list[list[bytes]]]:
    """Roles, texts and media of turns, as `_read_turns` takes them."""
    media: list[list[bytes]] = []
    if any(turn[2] for turn in turns):
        media = [[stand_in(memoryview(medium)) for medium in turn[2]] for turn in turns]
    return [turn[0] for turn in turns], [turn[1] for turn in turns], media


def _read_turns(
    body: ChatBody | ResponseBody | MessagesBody,
    roles: list[str],
    texts: list[str],
    stops: tuple[str, ...],
    format: str,
    output_tokens_max: int | None,
    tool_call: str,
    media: Sequence[Sequence[bytes]] = (),
) -> ReadPrompt:
    """roles, texts : of each turn.  tool_call : id of the last one whose result is there

    media : of each turn, as texts of their sizes; () without any
    """
    tools, model = body.tools_count, body.model or ""
    if not roles:
        prompt = Prompt("", model, stop=stops, tools=tools, format=format, output_tokens_max=output_tokens_max)
        return ReadPrompt(prompt, (), 0)
    shaping, things = body.shaping, sum(map(len, media))
    if things:
        shaping = (*shaping, f"media {things.bit_length()}")
    question, rules = _last(roles, "user") % len(roles), max(_last(roles, "system"), _last(roles, "developer"))
    text, system = texts[question], texts[rules] if rules not in (-1, question) else ""
    chars = sum(map(len, texts))
    prompt = Prompt(
        text,
        model,
        system,
        chars - len(text) - len(system) + sum([len(medium) for turn in media for medium in turn]),
        stops,
        tools=tools,
        format=format,
        output_tokens_max=output_tokens_max,
        shaping=shaping,
    )
    pieces: list[Piece] = [memoryview(body.tools)] if tools else []
    for place, (role, content) in enumerate(zip(roles, texts, strict=True)):
        pieces += (role, content, *media[place]) if media else (role, content)
    trail = None
    if tools or len(roles) > FIRST_TURNS or body.previous_response_id:
        first = texts[0][:KIND_CHARACTERS] if roles[0] in ("system", "developer") else ""
        marks, step = marks_of(zip(roles, texts, strict=True), hash(model))
        trail = Trail(marks, step, (first, bytes(body.tools)), tool_call)
    return ReadPrompt(prompt, pieces, chars, 0, 1, trail)


def _last(roles: list[str], role: str) -> int:
    """The place of the last message of this role; -1 without one."""
    return len(roles) - 1 - roles[::-1].index(role) if role in roles else -1


def read_completion(body: CompletionBody, stops: tuple[str, ...], output_tokens_max: int | None) -> ReadPrompt:
    """What is neither texts nor token ids counts as one prompt with all its characters: the engine answers it."""
    data = bytes(body.prompt)
    text, chars, ids, prompts = "", 0, 0, 1
    pieces: Sequence[Piece] = ()
    if b'"' in data:
        value = strings_of("prompt", body.prompt, "prompts", "choices_max")
        if value is None:
            _check_one("prompt", data)
            chars = len(data)
            pieces = (data,)
        else:
            texts = [value] if isinstance(value, str) else value
            text, pieces, prompts = " ".join(texts), texts[:1], max(1, len(texts))
            chars = len(text)
    elif data not in (b"", b"null"):
        ids, prompts, first = _token_ids(data)
        pieces = (first,)
    prompt = Prompt(text, body.model or "", stop=stops, output_tokens_max=output_tokens_max)
    return ReadPrompt(prompt, pieces, chars, ids, prompts)


def _check_one(name: str, prompt: bytes) -> None:
    """Raise BadRequest unless it is one prompt: llmserve counts the answers to all prompts.

    llama.cpp takes an object, and a list of token ids and texts, each as one prompt.
    """
    if structure(prompt) != b"[]" and not prompt.startswith(b"{"):
        raise unreadable(name, EXPECTED)


EXPECTED = "expected text, a list of texts, a list of token ids, or a list of lists of token ids"


def _token_ids(prompt: bytes) -> tuple[int, int, bytes]:
    """(token ids, prompts, ids of the first prompt in decimal digits) of a list of numbers, or of a list of such lists.

    The prompt is valid JSON without a string. So with the characters of numbers and commas removed, exactly its
    brackets remain; between two inner lists stands a comma only. Raises BadRequest for anything else.
    """
    compact = prompt.translate(None, b" \t\r\n")
    brackets = compact.translate(None, b"0123456789-+.eE,")
    prompts = len(brackets) // 2 - 1
    flat = brackets == b"[]"
    nested = prompts > 0 and brackets == b"[" + prompts * b"[]" + b"]" and compact.count(b"],[") == prompts - 1
    if not flat and not (nested and compact.startswith(b"[[") and compact.endswith(b"]]")):
        raise unreadable("prompt", EXPECTED)
    ids = compact.count(b",") + 1 - compact.count(b"[]")
    return ids, 1 if flat else prompts, compact[: compact.index(b"]")].lstrip(b"[")


def _first_characters(pieces: Sequence[Piece]) -> str:
    """Join the pieces with newlines and return the first OPENING_CHARS. Joins no more pieces than necessary."""
    lines: list[str] = []
    remaining = OPENING_CHARS
    for piece in pieces:
        if remaining <= 0:
            break
        part = piece[:remaining]
        lines.append(part if isinstance(part, str) else bytes(part).decode(errors="replace"))
        remaining -= len(part) + 1
    return "\n".join(lines)
