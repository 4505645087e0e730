"""Sessions of a world as clients of a real server: they stream answers, and sleep for as long as tools take."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from kit import client
from kit.servers import MODEL_FOLDER
from make import demo_corpus
from make.programs import TOOL_NAMES
from tokenizers import Tokenizer

from llmserve.simulation.programs import CHAT, UNCOUNTED, Outcome, SessionOf, StepOf

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in TOOL_NAMES]
MARK = "\ncall "  # before the name of the tool that an answer calls, as tool_parser.py reads it
WORD = re.compile("Ġ[a-z]{3,}")
WORDS_MAX = 64
MARKUP_TOKENS = 4  # of a message beside its text
SESSION_HEADER = "x-session-id"


class Texts:
    """Texts of so many tokens, out of prompts of the demo model."""

    def __init__(self, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
        self._rng = np.random.default_rng(seed)
        prompts = [example.prompt for example in demo_corpus.examples(400, seed=7, held_out=True)]
        self._prompts = [self._tokenizer.encode(f"{prompt} ") for prompt in prompts]
        self._texts = prompts

    def words(self) -> list[int]:
        """Tokens that are words. A text of such tokens is made of the same tokens when it comes back in a prompt, as
        most answers of models are; other answers of the demo model are not.
        """
        found = [number for token, number in self._tokenizer.get_vocab().items() if WORD.fullmatch(token)]
        return sorted(found)[:WORDS_MAX]

    def of(self, tokens: int) -> str:
        """A text with about this many tokens, at least one."""
        text, left = "", max(1, tokens)
        while left > 0:
            place = int(self._rng.integers(len(self._prompts)))
            encoding = self._prompts[place]
            used = min(left, len(encoding.ids))
            text += f"{self._texts[place]} "[: encoding.offsets[used - 1][1]]
            left -= used
        return text


@dataclass(frozen=True, slots=True)
class Answer:
    """prompt_tokens, cached_tokens : by the engine's usage.  call : id of the tool's call; "": it calls none"""

    text: str
    first_s: float
    prompt_tokens: int
    cached_tokens: int
    call: str


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    messages: Sequence[Message],
    tokens: int,
    words: Sequence[int],
    name: str | None = None,
) -> Answer:
    """Stream an answer of so many tokens, out of these words. name : of the session of an agent; None: a chat. Raises
    RuntimeError when there is none.
    """
    body = {
        "model": client.MODEL,
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "allowed_token_ids": words,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if name is not None:
        body["tools"] = TOOLS
    first_token = client.FirstToken(time.perf_counter())
    headers = {SESSION_HEADER: name} if name is not None else None
    reply = await client.ask(session, url, body, headers, on_chunk=first_token)
    lines = reply.body.decode(errors="replace").split("\n")
    if reply.status != 200 or not any(line.startswith("data: [DONE]") for line in lines):
        raise RuntimeError(f"no answer: {reply.status} {reply.error} {reply.body[-300:]!r}")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text, call, usage = "", "", None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            call = call or next((each["id"] for each in delta.get("tool_calls") or () if each.get("id")), "")
    if usage is None:
        raise RuntimeError(f"an answer without usage: {reply.body[-300:]!r}")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(text, first_token.seconds, usage["prompt_tokens"], details.get("cached_tokens") or 0, call)


class Agents:
    """The sessions of a world, that ask a server.

    salt   begins each system prompt, so that no pass finds the blocks of another one
    pause  share of the seconds of tools and persons that pass; 0: none

    Raises RuntimeError where an answer fails: its session could not go on.
    """

    def __init__(self, url: str, sessions: Sequence[SessionOf], seed: int, salt: str, pause: float = 1.0) -> None:
        self._url, self._sessions, self._salt, self._pause = url, sessions, salt, pause
        self._texts = Texts(seed)
        self._words = self._texts.words()
        self._systems: dict[str, Message] = {}
        self._begun_s = 0.0
        self.requests = 0
        self.outcome = Outcome()

    async def at_their_times(self, rate: float) -> Outcome:
        """All sessions, that come at their times over the rate."""
        first = UNCOUNTED * len(self._sessions)
        at_s = [one.arrival_s / rate for one in self._sessions]
        self.outcome.arrivals_s += [seconds for place, seconds in enumerate(at_s) if place >= first]
        plans = [self._written(one) for one in self._sessions]
        async with client.session_of(connections_kept=False) as session:
            self._begun_s = time.perf_counter() + client.BEGIN_S
            await client.at_their_times(
                at_s,
                lambda index, due_s: self._session(
                    session, self._sessions[index], plans[index], due_s, is_counted=index >= first
                ),
            )
        return self.outcome

    async def side_by_side(self, count: int, until_s: float) -> float:
        """Requests a second while so many sessions run, one after the other, for some seconds."""
        plans = [self._written(one) for one in self._sessions]
        waiting = list(range(len(self._sessions)))[::-1]
        async with client.session_of(connections_kept=False) as session:
            begun_s = time.perf_counter()

            async def worker() -> None:
                while waiting:
                    index = waiting.pop()
                    await self._session(
                        session, self._sessions[index], plans[index], time.perf_counter(), is_counted=True
                    )

            workers = [asyncio.create_task(worker()) for _ in range(count)]
            await asyncio.wait(workers, timeout=until_s)
            asked, passed_s = self.requests, time.perf_counter() - begun_s
            for each in workers:
                if not each.done():
                    each.cancel()
            results = await asyncio.gather(*workers, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return asked / passed_s

    # ---- a session ----

    def _system(self, one: SessionOf) -> Message:
        """The system prompt that the sessions of a kind share."""
        if one.kind not in self._systems:
            text = f"{self._salt} {one.kind}: "
            text += self._texts.of(one.shared_tokens - len(text) // 3 - MARKUP_TOKENS)
            self._systems[one.kind] = {"role": "system", "content": text}
        return self._systems[one.kind]

    def _written(self, one: SessionOf) -> list[list[str]]:
        """What is new in each step of each turn."""
        self._system(one)
        return [[self._text(step) for step in turn.steps] for turn in one.turns]

    def _text(self, step: StepOf) -> str:
        more = MARKUP_TOKENS + (3 if step.tool else 0)
        return self._texts.of(step.new_tokens - more) + (MARK + step.tool if step.tool else "")

    async def _session(
        self, session: aiohttp.ClientSession, one: SessionOf, plan: list[list[str]], due_s: float, *, is_counted: bool
    ) -> None:
        is_chat = one.kind == CHAT
        name = None if is_chat else f"{self._salt}-{one.session}"
        messages = [self._system(one)]
        for number, (turn, texts) in enumerate(zip(one.turns, plan, strict=True)):
            if number:
                await asyncio.sleep(self._pause * turn.gap_s)
                due_s = time.perf_counter()
            call = ""
            for place, (step, text) in enumerate(zip(turn.steps, texts, strict=True)):
                if step.compacted:
                    messages, call = messages[:1], ""
                role = {"role": "tool", "tool_call_id": call} if call else {"role": "user"}
                messages.append({**role, "content": text})
                answer = await ask(session, self._url, messages, step.output_tokens, self._words, name)
                self.requests += 1
                if is_counted:
                    self._count(answer, is_chat, is_first=place == 0)
                call = answer.call
                said: Message = {"role": "assistant", "content": answer.text}
                if call:
                    function = {"name": step.tool, "arguments": "{}"}
                    said["tool_calls"] = [{"id": call, "type": "function", "function": function}]
                messages.append(said)
                if step.tool:
                    await asyncio.sleep(self._pause * step.tool_s)
            if is_counted:
                self._count_turn(time.perf_counter(), due_s, is_chat)

    def _count(self, answer: Answer, is_chat: bool, *, is_first: bool) -> None:
        self.outcome.prompt_tokens += answer.prompt_tokens
        self.outcome.cached_tokens += answer.cached_tokens
        if is_first:
            (self.outcome.chat_first_s if is_chat else self.outcome.turn_first_s).append(answer.first_s)

    def _count_turn(self, now_s: float, due_s: float, is_chat: bool) -> None:
        if is_chat:
            self.outcome.chats_s.append(now_s - due_s)
        else:
            self.outcome.turns_s.append(now_s - due_s)
            self.outcome.turn_ends_s.append(now_s - self._begun_s)
