#!/usr/bin/env python
"""Deadlines kept: the orders of llmserve beside each other, on engines that serve, and in simulations.

    python scripts/lab/benchmark_deadlines.py fake \\
        --output docs/results/deadlines.json --figure docs/deadlines.png
    python scripts/lab/benchmark_deadlines.py vllm --vllm-python .venv-vllm/bin/python \\
        --output docs/results/deadlines-vllm.json --figure docs/deadlines-vllm.png
    python scripts/lab/benchmark_deadlines.py load --lengths "AlpacaEval=file:lengths.csv:tokens" \\
        --trace "Azure chat=azure_llm_2023_conv.csv.gz" \\
        --output docs/results/deadlines-load.json --figure docs/deadlines-load.png

fake, vllm: two streams with deadlines of their own, each of another model, share GPUs that run one batch at a time; in
the middle the quick one comes in a burst. Every order is a `llmserve serve` of its own that is asked over HTTP; all get
the same requests at the same times, in turn, round after round. Engines are timed ones, two GPUs with two models each
(fake), or two real vLLM servers that share this machine (vllm; it is given as one GPU, and each server's batch times
are measured first). Before a round's clock starts the server answers some requests without deadlines, so that it knows
how long answers are.

What became of each request is counted twice, by its client and in the server's journal, and it is an error where the
two differ, where a request did not end exactly once, or where a GPU ran two batches at a time:

    in time   200, before its deadline by the client's clock
    late      200, after it
    504       the server says that it is too late
    preempted requests that ran, were stopped for others, and ended in one of these ways; counted by themselves
    stopped   engine time of batches before they were stopped for others
    too late  engine time of batches of which no answer was in time

load: the scheduler alone, under a virtual clock: shares of deadlines met against load, where batches run to their end
and where slots refill; answer lengths predicted with an error (see PREDICTIONS). Nobody streams but where a row says so
(see STREAMED), as in fake and vllm: an answer of which a client has seen a byte cannot be stopped for others.

Prints Markdown tables, medians over rounds or means over seeds. With --results FILE an earlier --output is shown and
drawn again, and nothing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import bench  # noqa: F401  puts scripts/ on the path
import numpy as np
from benchmark_dispatch_live import progress, rounded
from benchmark_vllm import ENVIRONMENT, MODEL_FOLDER, running
from profile_engine import whole

from bins.profile import Curve, Profile
from llmserve.cluster import journal
from llmserve.cluster.journal import Step
from llmserve.errors import LLMServeError
from llmserve.headers import BATCH_HEADER, STREAM_HEADER
from llmserve.request import Batch, Request
from llmserve.scheduling.messages import (
    EngineReady,
    FailRequest,
    PreemptBatch,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    StartBatch,
)
from llmserve.scheduling.model_queues import ANSWERS_BETWEEN
from llmserve.simulate import Case, run_cases
from llmserve.simulation.estimates import Repeated
from llmserve.simulation.progress import Told

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICIES = {  # and their flags
    "fffs": ["--order", "fffs"],
    "edf": ["--order", "edf"],
    "clockwork": ["--order", "clockwork"],
    "flex, no preemption": ["--order", "flex", "--preemption", "off"],
    "flex, preemption if needed": ["--order", "flex", "--preemption", "if-needed"],
    "flex": ["--order", "flex"],
}
DRAWN = ("flex", "flex, no preemption", "fffs")
IN_TIME, LATE, REFUSED = "in time", "late", "504"
ENDS = (IN_TIME, LATE, REFUSED)
WARM_UP = "warm-up"  # a stream without deadlines
DRAIN_S = 30.0
COLOURS = ("#0072B2", "#D55E00")  # of streams
MISSED = "#333333"


# ---- what is asked ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Requests of one application. tokens : (least, most) of an answer, any as often.  burst_per_s : that come besides
    rate_per_s while the burst lasts.
    """

    name: str
    model: str
    slo_s: float
    rate_per_s: float
    tokens: tuple[int, int]
    burst_per_s: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Traffic of `seconds`, with a burst from burst_s[0] to burst_s[1]. batch_size : the largest, of every engine."""

    streams: tuple[Stream, ...]
    seconds: float
    burst_s: tuple[float, float]
    batch_size: int

    def in_burst(self, at_s: float) -> bool:
        return self.burst_s[0] <= at_s < self.burst_s[1]

    def stream(self, name: str) -> Stream:
        return next(stream for stream in self.streams if stream.name == name)


@dataclass(frozen=True)
class Asked:
    at_s: float
    stream: Stream
    tokens: int


def draw(setting: Setting, seed: int) -> list[Asked]:
    """A round's requests, in order of arrival: each stream Poisson, in the burst as well."""
    rng = np.random.default_rng(seed)
    asked = []
    for stream in setting.streams:
        spans = ((0.0, setting.seconds, stream.rate_per_s), (*setting.burst_s, stream.burst_per_s))
        for from_s, to_s, rate_per_s in spans:
            count = rng.poisson(rate_per_s * (to_s - from_s))
            times_s = rng.uniform(from_s, to_s, count)
            lengths = rng.integers(stream.tokens[0], stream.tokens[1], count, endpoint=True)
            asked += [Asked(*pair) for pair in zip(times_s, [stream] * count, lengths.tolist(), strict=True)]
    return sorted(asked, key=lambda each: each.at_s)


# ---- what became of it: the client's side -------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """latency_s : since it was due, whole answer.  batch : the last that it ran in, as the server says; "": in none."""

    asked: Asked
    status: int
    latency_s: float
    batch: str

    @property
    def end(self) -> str:
        """One of ENDS. Raises AssertionError on any other answer."""
        if self.status == 200:
            return IN_TIME if self.latency_s <= self.asked.stream.slo_s else LATE
        assert self.status == 504, f"an answer with status {self.status}"
        return REFUSED


async def ask_all(url: str, asked: Sequence[Asked], on_answer: Callable[[], None]) -> list[Answer]:
    """Every request at its time."""
    async with session() as client:
        began_s = time.perf_counter()

        async def ask_at(each: Asked) -> Answer:
            due_s = began_s + each.at_s
            await asyncio.sleep(due_s - time.perf_counter())
            status, batch = await ask(client, url, each.stream.model, each.tokens, each.stream.name)
            on_answer()
            return Answer(each, status, time.perf_counter() - due_s, batch)

        return list(await asyncio.gather(*map(ask_at, asked)))


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def ask(client: aiohttp.ClientSession, url: str, model: str, tokens: int, stream: str = "") -> tuple[int, str]:
    """An answer of exactly so many tokens. Its status, and the last batch that it ran in."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from 1 to 20."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    headers = {STREAM_HEADER: stream} if stream else {}
    async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status, response.headers.get(BATCH_HEADER, "")


# ---- what became of it: the journal's side ------------------------------------------------------------------------


@dataclass
class Ran:
    """A batch on an engine. Times in seconds of the journal.  stopped : for others.  open : requests that still run."""

    id: int
    worker: str
    stream: str
    size: int
    began_s: float
    ended_s: float = 0.0
    stopped: bool = False
    in_time: int = 0
    open: set[int] = field(default_factory=set)


@dataclass
class Course:
    """What the journal tells of a request. ends : how it ended, once if all is well.  preempted : times that it was
    told to stop for others.  batch : the last that it ran in; None: it never ran.
    """

    request: Request
    arrived_s: float
    ends: list[str] = field(default_factory=list)
    preempted: int = 0
    batch: int | None = None

    @property
    def end(self) -> str:
        return self.ends[0]


@dataclass(frozen=True)
class Ledger:
    """Requests with deadlines, by id; batches in the order of their beginnings. Nothing of the warm-up."""

    courses: dict[int, Course]
    batches: list[Ran]


def ledger_of(steps: Sequence[Step]) -> Ledger:
    book = _Book()
    for step in steps:
        book.see(step)
    dated = {id_: course for id_, course in book.courses.items() if course.request.deadline_s is not None}
    return Ledger(dated, [ran for ran in book.batches if ran.stream != WARM_UP])


class _Book:
    def __init__(self) -> None:
        self.courses: dict[int, Course] = {}
        self.batches: list[Ran] = []
        self._worker: dict[str, str] = {}  # of each engine
        self._runs: dict[int, Ran] = {}  # by request

    def see(self, step: Step) -> None:
        event, now_s = step.event, step.now_s
        if isinstance(event, EngineReady):
            self._worker[event.engine.name] = event.engine.worker or event.engine.name
        elif isinstance(event, RequestArrived):
            self.courses[event.request.id] = Course(event.request, now_s)
        elif isinstance(event, RequestCancelled):
            self.courses[event.request_id].ends.append("left")
        elif isinstance(event, RequestEnded):
            self._end(event, now_s)
        for action in step.actions:
            if isinstance(action, StartBatch):
                self._start(action.engine, action.batch, now_s)
            elif isinstance(action, PreemptBatch):
                for request_id in action.request_ids:
                    self.courses[request_id].preempted += 1
                    self._runs[request_id].stopped = True
            elif isinstance(action, FailRequest):
                late = action.reason == "deadline_exceeded"
                self.courses[action.request_id].ends.append(REFUSED if late else action.reason)

    def _start(self, engine: str, batch: Batch, now_s: float) -> None:
        stream = batch.requests[0].stream
        ids = {request.id for request in batch.requests}
        ran = Ran(batch.id, self._worker[engine], stream, len(ids), now_s, open=ids)
        self.batches.append(ran)
        for request_id in ids:
            self._runs[request_id] = ran
            self.courses[request_id].batch = batch.id

    def _end(self, event: RequestEnded, now_s: float) -> None:
        ran, course = self._runs.pop(event.request_id), self.courses[event.request_id]
        ran.open.discard(event.request_id)
        ran.ended_s = now_s
        if event.outcome == "completed":
            deadline_s = course.request.deadline_s
            course.ends.append(LATE if deadline_s is not None and now_s > deadline_s else IN_TIME)
            ran.in_time += course.end == IN_TIME


def check(answers: Sequence[Answer], ledger: Ledger) -> None:
    """Raises AssertionError where a request did not end exactly once, where client and journal differ, or where a
    worker ran two batches at a time.
    """
    wrong = {id_: course.ends for id_, course in ledger.courses.items() if len(course.ends) != 1}
    assert not wrong, f"requests that did not end exactly once, and how they ended: {wrong}"
    ours = Counter((answer.asked.stream.name, answer.status, answer.batch) for answer in answers)
    theirs = Counter(
        (
            course.request.stream,
            504 if course.end == REFUSED else 200,
            "" if course.batch is None else str(course.batch),
        )
        for course in ledger.courses.values()
        if course.end in ENDS
    )
    assert ours == theirs, f"client: {ours - theirs}, journal: {theirs - ours}"
    last_s: dict[str, float] = defaultdict(float)
    for ran in ledger.batches:
        assert not ran.open, f"batch {ran.id} never ended"
        assert ran.began_s >= last_s[ran.worker], f"{ran.worker} ran two batches at {ran.began_s} s"
        last_s[ran.worker] = ran.ended_s


# ---- a run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """Of a stream's requests. ends : how many ended in each of ENDS, by the client's clock; those of the burst apart.
    latency_s_p50, latency_s_p99 : of those in time; None: there are none.
    """

    ends: dict[str, int]
    burst: dict[str, int]
    latency_s_p50: float | None
    latency_s_p99: float | None


@dataclass(frozen=True)
class Run:
    """What a policy made of a round's requests. Engine times in seconds, of all workers together.

    preempted  requests, by how they ended; by the journal's clock
    stops      batches that were stopped for others
    stopped_s  that these ran
    too_late_s of batches that ran to their end, and no answer of which was in time
    bars       (worker, stream, size, began_s, ended_s, stopped) of each batch, and
    missed     (stream, deadline_s) of each request that was not in time; counted from the beginning of the traffic
    """

    policy: str
    round: int
    counts: dict[str, Count]
    preempted: dict[str, int]
    stops: int
    stopped_s: float
    too_late_s: float
    busy_s: float
    bars: list[tuple[str, str, int, float, float, bool]]
    missed: list[tuple[str, float]]

    def share(self, stream: str | None = None, part: str = "all") -> float:
        """In time, over all that were asked. stream : None: of all.  part : "all", "burst", or "steady"."""
        counts = [count for name, count in self.counts.items() if stream in (None, name)]
        ends = sum([Counter(_part(count, part)) for count in counts], Counter())
        return ends[IN_TIME] / ends.total() if ends.total() else 1.0

    def goodput_per_s(self, setting: Setting) -> float:
        return sum(count.ends[IN_TIME] for count in self.counts.values()) / setting.seconds


def _part(count: Count, part: str) -> dict[str, int]:
    steady = {end: count.ends[end] - count.burst[end] for end in ENDS}
    return {"all": count.ends, "burst": count.burst, "steady": steady}[part]


def run_of(policy: str, number: int, setting: Setting, answers: Sequence[Answer], ledger: Ledger) -> Run:
    """Raises AssertionError: see check."""
    check(answers, ledger)
    first_s = min(course.arrived_s for course in ledger.courses.values()) - answers[0].asked.at_s
    ran = ledger.batches
    return Run(
        policy,
        number,
        {stream.name: _count(stream, setting, answers) for stream in setting.streams},
        _ends(course.end for course in ledger.courses.values() if course.preempted),
        stops=sum(each.stopped for each in ran),
        stopped_s=sum(each.ended_s - each.began_s for each in ran if each.stopped),
        too_late_s=sum(each.ended_s - each.began_s for each in ran if not each.stopped and not each.in_time),
        busy_s=sum(each.ended_s - each.began_s for each in ran),
        bars=[
            (each.worker, each.stream, each.size, each.began_s - first_s, each.ended_s - first_s, each.stopped)
            for each in ran
        ],
        missed=[
            (each.asked.stream.name, each.asked.at_s + each.asked.stream.slo_s)
            for each in answers
            if each.end != IN_TIME
        ],
    )


def _ends(ends: Iterable[str]) -> dict[str, int]:
    counted = Counter(ends)
    return {end: counted[end] for end in ENDS}


def _count(stream: Stream, setting: Setting, answers: Sequence[Answer]) -> Count:
    mine = [answer for answer in answers if answer.asked.stream == stream]
    latencies = [answer.latency_s for answer in mine if answer.end == IN_TIME]
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if latencies else (None, None)
    burst = _ends(answer.end for answer in mine if setting.in_burst(answer.asked.at_s))
    return Count(_ends(answer.end for answer in mine), burst, p50, p99)


# ---- serving ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engines:
    """That are up. placed : WORKER=URL of each.  profiles : of each model.  what : they are, for people."""

    what: str
    placed: list[str]
    profiles: dict[str, Profile]


async def measure(
    setting: Setting, engines: Engines, policies: Sequence[str], rounds: int, seed: int, folder: Path
) -> list[Run]:
    """Every policy in each round, each round beginning with another. folder : for journals and profiles."""
    for model, profile in engines.profiles.items():
        profile.save(folder / f"{model}.json")
    asked = {number: draw(setting, seed + number) for number in range(1, rounds + 1)}
    runs = []
    with progress(len(policies) * sum(map(len, asked.values()))) as on_answer:
        for number in range(1, rounds + 1):
            for policy in [*policies[number - 1 :], *policies[: number - 1]]:
                path = folder / f"{policy.replace(' ', '-').replace(',', '')}-{number}.jsonl"
                flags = [*serve_flags(setting, engines, folder), "--journal", str(path), *POLICIES[policy]]
                async with front(policy, flags, engines.profiles) as url:
                    await warm_up(url, setting)
                    said = f"round {number}, {policy}"
                    answers = await ask_all(url, asked[number], lambda said=said: on_answer(said))
                runs.append(run_of(policy, number, setting, answers, ledger_of(journal.read(path)[1])))
    return runs


def serve_flags(setting: Setting, engines: Engines, folder: Path) -> list[str]:
    flags = ["--barrier", "--batch-size", str(setting.batch_size), "--drain-s", str(DRAIN_S)]
    # How long answers are plays no part here: the answers of a model are nearly alike.
    flags += ["--bins", "1", "--predictor", "none", "--memory-keys", "0", "--log-level", "warning"]
    for placed in engines.placed:
        flags += ["--engine", placed]
    for model in engines.profiles:
        flags += ["--profile", f"model:{model}={folder / model}.json"]
    for stream in setting.streams:
        flags += ["--slo-ms", f"stream:{stream.name}={1e3 * stream.slo_s:g}"]
    return flags


@asynccontextmanager
async def front(name: str, flags: Sequence[str], models: Iterable[str]) -> AsyncIterator[str]:
    """The URL of a `llmserve serve` of its own, once it serves all these models."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "llmserve", "serve", "--port", str(port), *flags]

    async with running(f"llmserve, {name}", command, ready="/ready") as server:
        async with session() as client, asyncio.timeout(60):
            while not set(models) <= await listed(client, server.url):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield server.url


async def listed(client: aiohttp.ClientSession, url: str) -> set[str]:
    async with client.get(f"{url}/v1/models") as response:
        return {model["id"] for model in (await response.json())["data"]}


async def warm_up(url: str, setting: Setting) -> None:
    """So many answers of each model that batch times are expected from them. Raises AssertionError when one fails."""
    rng = np.random.default_rng(0)
    async with session() as client:
        for stream in setting.streams:
            lengths = rng.integers(*stream.tokens, ANSWERS_BETWEEN, endpoint=True).tolist()
            ended = await asyncio.gather(*[ask(client, url, stream.model, tokens, WARM_UP) for tokens in lengths])
            assert all(status == 200 for status, _ in ended), ended


# ---- engines: timed ones ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A batch of b whose longest answer has L tokens takes prefill_s + L (step_s + row_s b)."""

    prefill_s: float
    step_s: float
    row_s: float


WORKERS = 2
# An image classifier answers with one token; a batch takes alpha b + beta, as Table 4 of Shepherd has them.
TIMED = {"classifier": Timed(0.0, 0.040, 0.005), "chat": Timed(0.3, 0.020, 0.0005)}
FAKE = Setting(
    (
        Stream("images", "classifier", slo_s=0.4, rate_per_s=8.0, tokens=(1, 1), burst_per_s=90.0),
        Stream("chats", "chat", slo_s=4.0, rate_per_s=1.2, tokens=(30, 70)),
    ),
    seconds=18.0,
    burst_s=(6.0, 11.0),
    batch_size=16,
)


@asynccontextmanager
async def timed_engines(setting: Setting, timed: Mapping[str, Timed] = TIMED) -> AsyncIterator[Engines]:
    """Each a process of its own."""
    profiles = {
        model: Profile.timed(
            model,
            Curve.affine(time_.row_s, time_.step_s),
            prefill_s=time_.prefill_s,
            source="what the timed engine was told",
        )
        for model, time_ in timed.items()
    }
    placed = []
    async with AsyncExitStack() as stack:
        for worker in range(WORKERS):
            for model, time_ in timed.items():
                server = await stack.enter_async_context(
                    running(f"timed {model}", _timed_command(model, time_, setting.batch_size), ready="/health")
                )
                placed.append(f"gpu{worker}={server.url}")
        yield Engines(f"timed engines, {WORKERS} GPUs with {len(timed)} models each", placed, profiles)


def _timed_command(model: str, timed: Timed, slots: int) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve.engines.fake", "--port", str(port), "--model", model, "--barrier"]
        words += ["--slots", str(slots), "--step-s", str(timed.step_s), "--row-s", str(timed.row_s)]
        return [*words, "--prefill-s", str(timed.prefill_s)]

    return command


# ---- engines: vLLM ------------------------------------------------------------------------------------------------

VLLM = Setting(
    (
        Stream("completions", "quick", slo_s=0.6, rate_per_s=4.0, tokens=(8, 8), burst_per_s=26.0),
        Stream("essays", "thorough", slo_s=9.0, rate_per_s=0.3, tokens=(250, 350)),
    ),
    seconds=24.0,
    burst_s=(10.0, 14.0),
    batch_size=8,
)
PROBES = (8, 200)  # tokens of the answers that batch times are measured with
PROBED = (1, 2, 4, 8)  # sizes of such batches
PROBE_ROUNDS = 3


@asynccontextmanager
async def vllm_engines(setting: Setting, python: str) -> AsyncIterator[Engines]:
    """Two vLLM servers, each with the demo model under a name of its own, on one worker: they have this machine's
    cores between them, as two models would a GPU.
    """
    placed, profiles = [], {}
    async with AsyncExitStack() as stack:
        for model in [stream.model for stream in setting.streams]:
            server = await stack.enter_async_context(
                running(
                    f"vLLM, {model}",
                    _vllm_command(python, model, setting.batch_size),
                    ready="/health",
                    environment=ENVIRONMENT,
                )
            )
            placed.append(f"gpu0={server.url}")
            profiles[model] = await measured(server.url, model)
        yield Engines("two vLLM servers on the CPU, one GPU's worth", placed, profiles)


def _vllm_command(python: str, model: str, slots: int) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_FOLDER), "--port", str(port)]
        words += ["--served-model-name", model, "--host", "127.0.0.1", "--max-num-seqs", str(slots)]
        words += ["--max-model-len", "1024", "--enforce-eager", "--dtype", "float32"]
        return [*words, "--distributed-executor-backend", "uni", "--no-enable-prefix-caching"]

    return command


async def measured(url: str, model: str) -> Profile:
    """What batches take on an engine that is free: of sizes PROBED, with answers of PROBES tokens, medians."""
    took_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    async with session() as client:
        for _ in range(PROBE_ROUNDS):
            for size in PROBED:
                for tokens in PROBES:
                    began_s = time.perf_counter()
                    ended = await asyncio.gather(*[ask(client, url, model, tokens) for _ in range(size)])
                    assert all(status == 200 for status, _ in ended), ended
                    took_s[size, tokens].append(time.perf_counter() - began_s)
    return profile_of(model, {key: statistics.median(times) for key, times in took_s.items()})


def profile_of(model: str, took_s: Mapping[tuple[int, int], float]) -> Profile:
    """took_s : seconds of a batch, by its size and its answers' tokens, of two lengths."""
    sizes, (few, many) = sorted({size for size, _ in took_s}), sorted({tokens for _, tokens in took_s})
    steps = [(took_s[size, many] - took_s[size, few]) / (many - few) for size in sizes]
    rising = np.maximum.accumulate(np.maximum(steps, 1e-6))
    left_s = [took_s[size, few] - few * step for size, step in zip(sizes, rising, strict=True)]
    prefill_s = max(0.0, statistics.median(left_s))
    return Profile.timed(model, Curve.table(sizes, rising), prefill_s=prefill_s, source="measured before the rounds")


# ---- what it came to ----------------------------------------------------------------------------------------------


def live_tables(setting: Setting, runs: Sequence[Run]) -> list[str]:
    """Markdown: medians over rounds, sums for counts of what was preempted."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    by_policy = {policy: [run for run in runs if run.policy == policy] for policy in policies}
    quick, slow = setting.streams
    met = [
        "order",
        "all",
        quick.name,
        "steady",
        "in the burst",
        slow.name,
        "goodput/s",
        f"{quick.name}, p50 / p99 (s)",
        f"{slow.name}, p50 / p99 (s)",
    ]
    cost = ["order", "batches stopped", "requests preempted", *ENDS, "stopped (s)", "too late (s)", "busy (s)"]
    shares, costs = [], []
    for policy, mine in by_policy.items():
        parts = ((None, "all"), (quick.name, "all"), (quick.name, "steady"), (quick.name, "burst"), (slow.name, "all"))
        row = [f"{median(mine, lambda run, a=args: run.share(*a)):.1%}".replace("%", " %") for args in parts]
        row.append(f"{median(mine, lambda run: run.goodput_per_s(setting)):.1f}")
        shares.append([policy, *row, *[_latencies(mine, stream.name) for stream in setting.streams]])
        ended = [sum(run.preempted[end] for run in mine) for end in ENDS]
        counts = [sum(run.stops for run in mine), sum(ended), *ended]
        seconds = [median(mine, lambda run, n=name: getattr(run, n)) for name in ("stopped_s", "too_late_s", "busy_s")]
        costs.append([policy, *map(str, counts), *[f"{value:.1f}" for value in seconds]])
    rounds = max(run.round for run in runs)
    return [
        _markdown(f"Deadlines met, medians of {rounds} rounds; latencies of those in time", met, shares),
        _markdown(f"What it took: counts of all {rounds} rounds, engine time the median of a round", cost, costs),
    ]


def _latencies(runs: Sequence[Run], stream: str) -> str:
    counts = [run.counts[stream] for run in runs]
    known = [(c.latency_s_p50, c.latency_s_p99) for c in counts if c.latency_s_p50 is not None]
    return " / ".join(f"{statistics.median(values):.2f}" for values in zip(*known, strict=True)) or "-"


def median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return statistics.median(map(value, runs))


def _markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *rows)]
    return f"**{title}**\n\n" + "\n".join(lines)


def live_result(engines: Engines, setting: Setting, seed: int, runs: Sequence[Run]) -> dict[str, Any]:
    """All of it, for JSON; bars and missed deadlines of the first round only, which is drawn."""
    told = [asdict(run) for run in runs]
    for run in told:
        if run["round"] > 1:
            run["bars"], run["missed"] = [], []
    return {
        "date": str(date.today()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "engines": engines.what,
        "seed": seed,
        "setting": asdict(setting),
        "profiles": {model: asdict(profile) for model, profile in engines.profiles.items()},
        "runs": told,
    }


def live_from(result: Mapping[str, Any]) -> tuple[str, Setting, list[Run]]:
    """What the engines were, the setting and the runs, of a result that was read."""
    setting = dict(result["setting"])
    streams = tuple([Stream(**{**each, "tokens": tuple(each["tokens"])}) for each in setting.pop("streams")])
    runs = [
        Run(**{**run, "counts": {name: Count(**count) for name, count in run["counts"].items()}})
        for run in result["runs"]
    ]
    return result["engines"], Setting(streams, **{**setting, "burst_s": tuple(setting["burst_s"])}), runs


# ---- the timeline -------------------------------------------------------------------------------------------------

GAP = 0.3  # between the rows of two workers, each 1 high
MISSES_AT = -0.42  # below the last worker's row
BEFORE_S, AFTER_S = 3.0, 5.0  # that are drawn around the burst


def timeline(what: str, setting: Setting, runs: Sequence[Run], asked: Sequence[Asked]) -> Figure:
    """The first round: arrivals on top, then what the GPUs ran under each of DRAWN."""
    from matplotlib.figure import Figure

    shown = [run for policy in DRAWN for run in runs if (run.policy, run.round) == (policy, 1)]
    workers = sorted({bar[0] for run in shown for bar in run.bars})
    panel = 0.55 + 0.62 * len(workers)
    figure = Figure(figsize=(12.5, 1.9 + len(shown) * panel), layout="constrained", facecolor="white")
    axes = figure.subplots(1 + len(shown), 1, sharex=True, height_ratios=[0.8, *[panel] * len(shown)])
    colour = {stream.name: COLOURS[index] for index, stream in enumerate(setting.streams)}
    _draw_arrivals(axes[0], setting, asked, colour)
    for axis, run in zip(axes[1:], shown, strict=True):
        _draw_panel(axis, setting, run, workers, colour)
    for axis in axes:
        axis.axvspan(*setting.burst_s, color="#F2EFE4", zorder=-5, linewidth=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(setting.burst_s[0] - BEFORE_S, setting.burst_s[1] + AFTER_S)
    figure.suptitle(f"Two streams, a burst: {what}", x=0.01, ha="left", fontsize=12)
    _explain(figure, setting, colour)
    return figure


def _draw_arrivals(axis: Axes, setting: Setting, asked: Sequence[Asked], colour: Mapping[str, str]) -> None:
    width_s = 0.5
    edges = np.arange(0.0, setting.seconds + width_s, width_s)
    counts = [np.histogram([e.at_s for e in asked if e.stream == s], edges)[0] / width_s for s in setting.streams]
    bottom = np.zeros(edges.size - 1)
    for stream, count in zip(setting.streams, counts, strict=True):
        axis.bar(edges[:-1], count, width_s * 0.9, bottom, align="edge", color=colour[stream.name])
        bottom += count
    axis.set_yticks([0, round(float(bottom.max()), -1)])
    axis.set_title("requests that come, a second", loc="left", fontsize=10)
    axis.text(setting.burst_s[0] + 0.06, 1.32 * bottom.max(), "burst", va="top", fontsize=10, style="italic")
    axis.set_ylim(0, 1.35 * bottom.max())


def _draw_panel(axis: Axes, setting: Setting, run: Run, workers: Sequence[str], colour: Mapping[str, str]) -> None:
    base = {worker: (len(workers) - 1 - index) * (1 + GAP) for index, worker in enumerate(workers)}
    for worker, stream, size, began_s, ended_s, stopped in run.bars:
        height = max(0.1, size / setting.batch_size)
        look: dict[str, Any] = {"facecolor": colour[stream], "edgecolor": "white", "linewidth": 0.4}
        if stopped:
            look = {"facecolor": "white", "edgecolor": colour[stream], "linewidth": 0.6, "hatch": "/////"}
        axis.bar(began_s, height, ended_s - began_s, base[worker], align="edge", **look)
        if stopped:
            axis.plot(
                [ended_s] * 2, [base[worker] - 0.04, base[worker] + height + 0.12], color="#CC0000", linewidth=1.6
            )
    for number, stream_ in enumerate(setting.streams):
        at = [deadline_s for name, deadline_s in run.missed if name == stream_.name]
        place = MISSES_AT - 0.3 * number
        axis.plot(at, [place] * len(at), "|", color=colour[stream_.name], markersize=7, markeredgewidth=1.0)
        axis.axhline(place, color="#E4E4E4", linewidth=0.5, zorder=-3)
    for worker in workers:
        axis.axhline(base[worker], color="#BBBBBB", linewidth=0.6, zorder=-2)
    axis.set_yticks([*[base[worker] + 0.5 for worker in workers], MISSES_AT - 0.15], [*workers, "missed"])
    axis.set_ylim(MISSES_AT - 0.55, max(base.values()) + 1.15)
    parts = ", ".join(f"{stream.name} {run.share(stream.name):.0%}" for stream in setting.streams)
    preempted = sum(run.preempted.values())
    said = (
        f"; {preempted} requests preempted, {run.preempted[IN_TIME]} of them in time all the same" if preempted else ""
    )
    axis.set_title(f"{run.policy}: {run.share():.0%} in time ({parts}){said}", loc="left", fontsize=10)


def _explain(figure: Figure, setting: Setting, colour: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names: list[Any] = [
        Patch(color=colour[stream.name], label=f"{stream.name}: within {stream.slo_s:g} s")
        for stream in setting.streams
    ]
    names.append(
        Patch(facecolor="white", edgecolor=colour[setting.streams[1].name], hatch="/////", label="stopped for others")
    )
    names.append(
        Line2D([], [], marker="|", linestyle="", color=MISSED, markersize=8, label="a deadline that was missed")
    )
    names.append(Patch(color="none", label=f"height: batch size, up to {setting.batch_size}"))
    figure.legend(handles=names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)


# ---- simulated loads ----------------------------------------------------------------------------------------------

PREDICTIONS = "quantiles:0.5"  # of an error of 0.5 in the logarithm, and known
SLOS_S = (8.0, 30.0)
SIMULATED: dict[str, dict[str, Any]] = {
    "fffs": {"order": "fffs"},
    "shortest": {"order": "shortest"},
    "edf": {"order": "edf"},
    "flex, 1 bin": {"order": "flex", "bins": 1},
    "flex": {"order": "flex"},
}
STREAMED: dict[str, dict[str, Any]] = {  # shares of clients that stream; of all others nobody does
    "flex, half stream": {"order": "flex", "streaming": 0.5},
    "flex, all stream": {"order": "flex", "streaming": 1.0},
}
KINDS: dict[str, dict[str, Any]] = {  # of engines
    "batches to their end": {"barrier": True, "batch_size": 8},
    "slots that refill": {"slots": 32},
}
# Of what the engines can serve, each kind in its own way: full batches of one bin, or slots that are all taken.
LOADS = {"batches to their end": (0.5, 0.8, 1.5, 2.5), "slots that refill": (0.5, 0.8, 1.5, 2.5)}
PROFILE = "h100-llama-3.1-8b"
LOAD_COLOURS = {
    "fffs": "#7F7F7F",
    "shortest": "#E69F00",
    "edf": "#CC79A7",
    "flex, 1 bin": "#56B4E9",
    "flex": "#0072B2",
    "flex, half stream": "#009E73",
    "flex, all stream": "#D55E00",
}


@dataclass(frozen=True)
class Cell:
    """Means over seeds. half_width : of the 95 % confidence interval of in_time."""

    workload: str
    kind: str
    policy: str
    load: float
    in_time: float
    half_width: float
    goodput_per_s: float
    preempted: float


def simulated(workloads: Mapping[str, Mapping[str, Any]], requests: int, seeds: int, jobs: int) -> list[Cell]:
    """workloads : fields of a Scenario by name."""
    keys, cases = [], []
    for name, given in workloads.items():
        for kind, engine in KINDS.items():
            # Only batches that run to their end are preempted, so that elsewhere streaming changes nothing.
            orders = {**SIMULATED, **STREAMED} if engine.get("barrier") else SIMULATED
            for policy, order in orders.items():
                for load in LOADS[kind]:
                    common = {"engines": 2, "requests": requests, "predictions": PREDICTIONS, "slo_s": SLOS_S}
                    keys.append((name, kind, policy, load))
                    cases.append(Case.of({**common, **given, **engine, **order, "load": load}, {}))
    with Told(len(cases) * seeds) as told:
        found = run_cases(cases, seeds, jobs, told)
    return [cell_of(key, repeated) for key, repeated in zip(keys, found, strict=True)]


def cell_of(key: tuple[str, str, str, float], repeated: Repeated) -> Cell:
    in_time, goodput = repeated.estimates["in_time_share"], repeated.estimates["goodput_per_s"]
    return Cell(*key, in_time.mean, in_time.half_width, goodput.mean, repeated.estimates["preempted"].mean)


def load_tables(cells: Sequence[Cell]) -> list[str]:
    """A table for each kind of engine: shares in time by workload, policy and load."""
    tables = []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        rows: dict[tuple[str, str], list[Cell]] = {}
        for cell in sorted([cell for cell in cells if cell.kind == kind], key=lambda cell: cell.load):
            rows.setdefault((cell.workload, cell.policy), []).append(cell)
        loads = [cell.load for cell in next(iter(rows.values()))]
        head = ["answers", "order", *[f"load {load:g}" for load in loads], f"in time/s at {loads[-1]:g}"]
        lines = [
            [*key, *[f"{100 * cell.in_time:.1f} ± {100 * cell.half_width:.1f}" for cell in mine], _rate(mine[-1])]
            for key, mine in rows.items()
        ]
        tables.append(_markdown(f"Deadlines met (%), {kind}", head, lines))
    return tables


def _rate(cell: Cell) -> str:
    return f"{cell.goodput_per_s:.2f}"


def load_figure(cells: Sequence[Cell]) -> Figure:
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    size = (1.0 + 3.9 * len(workloads), 0.8 + 3.0 * len(kinds))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(len(kinds), len(workloads), sharex="row", sharey=True, squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        for axis, workload in zip(row, workloads, strict=True):
            for policy in dict.fromkeys(cell.policy for cell in cells if cell.kind == kind):
                mine = sorted(
                    [c for c in cells if (c.workload, c.kind, c.policy) == (workload, kind, policy)],
                    key=lambda cell: cell.load,
                )
                axis.errorbar(
                    [cell.load for cell in mine],
                    [100 * cell.in_time for cell in mine],
                    [100 * cell.half_width for cell in mine],
                    color=LOAD_COLOURS[policy],
                    marker="o",
                    markersize=4,
                    linewidth=2.4 if policy == "flex" else 1.4,
                    capsize=2,
                    label=policy,
                )
            axis.set_title(f"{workload}: {kind}", fontsize=10)
            axis.grid(color="#e6e6e6", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("deadlines met (%)")
    for axis in axes[-1]:
        axis.set(xlabel="load (1: all that full batches of one bin, or full slots, bear)", ylim=(0, 102))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    return figure


# ---- the command --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.part == "vllm" and not (args.vllm_python or args.results):
        parser().error("vllm needs --vllm-python, the interpreter of an environment with vLLM in it")
    try:
        result = json.loads(args.results.read_text()) if args.results else asyncio.run(measured_part(args))
    except (LLMServeError, OSError, ValueError) as error:
        sys.exit(f"benchmark_deadlines: error: {error}")
    result = json.loads(json.dumps(rounded(result)))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(written(result))
    show(args, result)


async def measured_part(args: argparse.Namespace) -> dict[str, Any]:
    if args.part == "load":
        cells = await asyncio.to_thread(simulated, workloads_of(args), args.requests, args.seeds, args.jobs)
        common = {"requests": args.requests, "seeds": args.seeds, "predictions": PREDICTIONS, "slos_s": SLOS_S}
        return {"date": str(date.today()), **common, "cells": [asdict(cell) for cell in cells]}
    setting = FAKE if args.part == "fake" else VLLM
    up = timed_engines(setting) if args.part == "fake" else vllm_engines(setting, args.vllm_python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.journals or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        async with up as engines:
            runs = await measure(setting, engines, args.policies, args.rounds, args.seed, folder)
    return live_result(engines, setting, args.seed, runs)


def workloads_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {"lognormal": {}}  # the simulator's default lengths and step
    for field_, texts in (("lengths", args.lengths), ("trace", args.trace)):
        for text in texts:
            name, _, value = text.partition("=")
            made[name] = {field_: value, "profile": PROFILE}
    return made


def written(result: Mapping[str, Any]) -> str:
    """JSON, a run or a cell a line."""
    (rows,) = [name for name in ("runs", "cells") if name in result]
    head = json.dumps({name: value for name, value in result.items() if name != rows}, indent=1)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in result[rows])
    return f'{head[:-2]},\n "{rows}": [\n{lines}\n]}}\n'


def show(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if args.part == "load":
        cells = [Cell(**cell) for cell in result["cells"]]
        tables, draw_it = load_tables(cells), lambda: load_figure(cells)
    else:
        what, setting, runs = live_from(result)
        tables = live_tables(setting, runs)
        draw_it = lambda: timeline(what, setting, runs, draw(setting, result["seed"] + 1))  # noqa: E731
    print("\n\n".join(tables))
    if args.figure:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        draw_it().savefig(args.figure, dpi=140)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", choices=("fake", "vllm", "load"))
    add("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM in it")
    add("--policies", type=policies, default=list(POLICIES), metavar="NAME;NAME;...", help="(default: all)")
    add("--rounds", type=whole(1), default=3, help="in each of which every policy has a run (%(default)s)")
    add("--seed", type=int, default=2026, help="draws arrivals and lengths of fake and vllm (%(default)s)")
    add("--lengths", action="append", default=[], metavar="NAME=LENGTHS", help="load: as `llmserve simulate` has them")
    add("--trace", action="append", default=[], metavar="NAME=FILE", help="load: as `llmserve simulate` has it")
    add("--requests", type=whole(1), default=5000, help="load: of each run (%(default)s)")
    add("--seeds", type=whole(1), default=3, help="load: runs of each case (%(default)s)")
    add("--jobs", type=whole(1), default=1, help="load: processes (%(default)s)")
    add("--journals", type=Path, metavar="FOLDER", help="keep the servers' journals there")
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    add("--figure", type=Path, metavar="FILE", help="draw them as PNG")
    add("--results", type=Path, metavar="FILE", help="show an earlier --output; nothing runs")
    return parser


def policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of: {'; '.join(POLICIES)}")
    return names


if __name__ == "__main__":
    main()
