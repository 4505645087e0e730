"""The policies in turn: each has a server of its own in front of the same engines, and gets its load over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from kit import client
from kit.client import Reply
from kit.progress import counted
from kit.results import in_turn
from kit.servers import flags_of, front_end

from bins.profile import Profile
from llmserve.live import journal
from llmserve.scheduling.lengths import ANSWERS_BETWEEN
from llmserve.wire.headers import STREAM_HEADER
from questions.deadlines.ledger import WARM_UP, Answer, ledger_of
from questions.deadlines.runs import Run, run_of
from questions.deadlines.traffic import Arrival, Setting, draw

POLICIES = {  # name -> flags of `llmserve serve`
    "fffs": ["--order", "fffs"],
    "edf": ["--order", "edf"],
    "clockwork": ["--order", "clockwork"],
    "flex, no preemption": ["--order", "flex", "--preemption", "off"],
    "flex, preemption if needed": ["--order", "flex", "--preemption", "if-needed"],
    "flex": ["--order", "flex"],
}
DRAIN_S = 30.0


@dataclass(frozen=True)
class Engines:
    """Running engines. placed : WORKER=URL of each engine.  profiles : by model.  description : for people"""

    description: str
    placed: list[str]
    profiles: dict[str, Profile]


async def measure(
    setting: Setting, engines: Engines, policies: Sequence[str], rounds: int, seed: int, folder: Path
) -> list[Run]:
    """Run every policy in each round; each round begins with another policy. folder : for journals and profiles"""
    for model, profile in engines.profiles.items():
        profile.save(folder / f"{model}.json")
    arrivals = {number: draw(setting, seed + number) for number in range(1, rounds + 1)}
    runs = []
    with counted(len(policies) * sum(map(len, arrivals.values()))) as on_answer:
        for number in range(1, rounds + 1):
            for policy in in_turn(policies, number - 1):
                path = folder / f"{policy.replace(' ', '-').replace(',', '')}-{number}.jsonl"
                flags = [*serve_flags(setting, engines, folder), "--journal", str(path), *POLICIES[policy]]
                async with serving(policy, flags, engines.profiles) as url:
                    await warm_up(url, setting)
                    text = f"round {number}, {policy}"
                    answers = await ask_all(url, arrivals[number], lambda text=text: on_answer(text))
                runs.append(run_of(policy, number, setting, answers, ledger_of(journal.read(path)[1])))
    return runs


def serve_flags(setting: Setting, engines: Engines, folder: Path) -> list[str]:
    flags = ["--barrier", "--batch-size", str(setting.batch_size), "--drain-s", str(DRAIN_S)]
    # Predictions and bins are off, because all answers of a model have nearly the same length.
    flags += ["--bins", "1", "--predictor", "none", "--memory-keys", "0", "--log-level", "warning"]
    flags += flags_of("engine", engines.placed)
    for model in engines.profiles:
        flags += ["--profile", f"model:{model}={folder / model}.json"]
    for stream in setting.streams:
        flags += ["--slo-ms", f"stream:{stream.name}={1e3 * stream.slo_s:g}"]
    return flags


@asynccontextmanager
async def serving(name: str, flags: Sequence[str], models: Iterable[str]) -> AsyncIterator[str]:
    """Start `llmserve serve` and yield its URL once it serves all these models."""
    async with front_end(name, *flags) as server:
        async with client.session_of() as session, asyncio.timeout(60):
            while not set(models) <= await served_models(session, server.url):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield server.url


async def served_models(session: aiohttp.ClientSession, url: str) -> set[str]:
    return {model["id"] for model in json.loads(await client.get_text(session, f"{url}/v1/models"))["data"]}


async def warm_up(url: str, setting: Setting) -> None:
    """Ask each model for enough answers to let the server expect batch times. Raises AssertionError if one fails."""
    rng = np.random.default_rng(0)
    async with client.session_of() as session:
        for stream in setting.streams:
            lengths = rng.integers(*stream.tokens, ANSWERS_BETWEEN, endpoint=True).tolist()
            replies = await asyncio.gather(*[ask(session, url, stream.model, tokens, WARM_UP) for tokens in lengths])
            assert all(reply.status == 200 for reply in replies), replies


async def ask_all(url: str, arrivals: Sequence[Arrival], on_answer: Callable[[], None]) -> list[Answer]:
    """Send every request at its time."""
    async with client.session_of() as session:

        async def ask_in_time(index: int, due_s: float) -> Answer:
            arrival = arrivals[index]
            reply = await ask(session, url, arrival.stream.model, arrival.tokens, arrival.stream.name)
            on_answer()
            return Answer(arrival, reply.status, time.perf_counter() - due_s, reply.batch)

        return await client.at_their_times([arrival.at_s for arrival in arrivals], ask_in_time)


async def ask(session: aiohttp.ClientSession, url: str, model: str, tokens: int, stream: str = "") -> Reply:
    """Ask for an answer of exactly this many tokens."""
    body = client.body_of("Count from 1 to 20.", model=model, max_tokens=tokens, ignore_eos=True)
    return await client.ask(session, url, body, {STREAM_HEADER: stream} if stream else {})
