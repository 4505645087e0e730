"""The load: conversations that share prefixes, and chats among prompts of the whole context."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from kit import client
from make import demo_corpus

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """A message of the user, sent think_s after the answer before. answer_tokens : of its answer"""

    text: str
    think_s: float
    answer_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns behind a system prompt that other conversations share. begins_s : when the first turn is sent"""

    prefix: str
    begins_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """How large a load is.

    prefixes, prefix_chars  number and length of the shared prefixes
    turns                   of a conversation
    turn_chars              of a message of the user
    answer_tokens           of each answer
    think_s                 mean pause before the next turn
    begin_per_s             conversations that begin in a second
    """

    conversations: int
    prefixes: int = 20
    prefix_chars: int = 8_000
    turns: int = 8
    turn_chars: int = 200
    answer_tokens: int = 16
    think_s: float = 1.0
    begin_per_s: float = 0.7


class Words:
    """Held-out prompts of the demo model, and texts made of them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._texts = [example.prompt for example in demo_corpus.examples(400, seed=7, held_out=True)]
        self._rng = rng

    def prompt(self) -> str:
        return self._texts[int(self._rng.integers(len(self._texts)))]

    def of(self, chars: int) -> str:
        """A text of so many characters."""
        text = ""
        while len(text) < chars:
            text += self.prompt() + " "
        return text[:chars]


def conversations(shape: Shape, rng: np.random.Generator, salt: str) -> list[Conversation]:
    """The conversations of a pass. salt : begins each prefix, so that no pass finds the blocks of another one"""
    words = Words(rng)
    prefixes = [f"{salt} {index}. {words.of(shape.prefix_chars)}" for index in range(shape.prefixes)]
    begins_s = np.sort(rng.uniform(0.0, shape.conversations / shape.begin_per_s, shape.conversations))
    order = rng.permutation(np.arange(shape.conversations) % shape.prefixes)
    return [
        Conversation(
            prefixes[int(place)],
            float(begin_s),
            tuple(
                Turn(words.of(shape.turn_chars), float(rng.exponential(shape.think_s)), shape.answer_tokens)
                for _ in range(shape.turns)
            ),
        )
        for place, begin_s in zip(order, begins_s, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer. Times are seconds from when it was due.

    prompt_tokens, cached_tokens : by the engine's usage.  long : it is of a prompt of the whole context
    """

    first_s: float
    latency_s: float
    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    long: bool = False


async def ask(
    session: aiohttp.ClientSession, url: str, messages: Sequence[Message], tokens: int | None, due_s: float
) -> Told:
    """Stream an answer of so many tokens; None: as many as the model gives. Raises RuntimeError when there is none.

    due_s : on the clock of perf_counter
    """
    length: dict[str, Any] = {} if tokens is None else {"max_tokens": tokens, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": client.MODEL, "messages": list(messages), "temperature": 0, **options, **length}
    first_token = client.FirstToken(due_s)
    reply = await client.ask(session, url, body, on_chunk=first_token)
    latency_s = time.perf_counter() - due_s
    if reply.status != 200 or reply.error or b"data: [DONE]" not in reply.body:
        raise RuntimeError(f"no answer: {reply.status} {reply.error} {reply.body[-300:]!r}")
    events = [json.loads(line[5:]) for line in reply.body.splitlines() if line.startswith(b"data: {")]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return Told(
        first_token.seconds, latency_s, "".join(pieces), usage["completion_tokens"], usage["prompt_tokens"], cached
    )


async def converse(session: aiohttp.ClientSession, url: str, conversation: Conversation) -> list[Told]:
    """Hold a conversation: each turn sends all before it. Returns its answers."""
    messages: list[Message] = [{"role": "system", "content": conversation.prefix}]
    answers: list[Told] = []
    for turn in conversation.turns:
        if answers:
            await asyncio.sleep(turn.think_s)
        messages.append({"role": "user", "content": turn.text})
        answer = await ask(session, url, messages, turn.answer_tokens, time.perf_counter())
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers
