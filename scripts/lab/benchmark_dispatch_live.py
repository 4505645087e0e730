#!/usr/bin/env python
"""Waiting for company at low load, live: what it costs in latency and saves in energy on the embedded engine.

    python scripts/lab/benchmark_dispatch_live.py \\
        --output docs/results/dispatch-live.json --figure docs/dispatch-live.png

First the embedded engine's profile is measured, with batches of all sizes that go the way that requests will go. From
it and the lengths of the demo corpus follow the arrival rate of the wanted load, and what an exact solve (bins/smdp.py)
expects of `greedy`; the latency target is twice that. Then three servers take turns, each a fresh `llmserve serve` with
its own engine and the demo predictor: `--release full`, `greedy`, and `table` with the target. In one round all get the
same held-out prompts at the same Poisson times; every round draws others. One mean gap after the last arrival a server
is told to stop, and lets go of what still waits in its bins: what `full` would keep for ever ends there.

Everything but the client's own latency is read from the servers' journals:

- joules are modelled: --busy-power-w while a batch runs, --idle-power-w between, from the first arrival to the last
  end. No power is measured on a CPU here: read ratios, not joules. "Above idle" is the part that batching can change:
  what the batches take beyond idle power, each for as long as the profile says, whatever else the machine did.
- a free wait is the time that a request spent in its bin while no batch ran. The journal is replayed for it, so each
  request counts in the queue where it really waited, against the bound of the plan in force (`wait_s_max`). Whoever
  still waits more than LATE_S after it, while the engine is free, is a violation.
- pace is the batches' real time over what the profile expects, at the median: 1 when the machine was as busy as while
  it was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
import bench  # noqa: F401  puts scripts/ on the path
import msgspec
import numpy as np
from benchmark_throughput import MODEL, is_ready
from profile_engine import power, profile_of, whole
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer

from bins.dispatch import DispatchPlan
from bins.profile import Profile
from bins.service import ServiceTimes
from bins.smdp import Queue
from llmserve.cluster import journal
from llmserve.cluster.journal import Header, Step
from llmserve.cluster.observed import observations
from llmserve.energy import ModelledEnergy
from llmserve.engines import embedded
from llmserve.engines.embedded import demo_corpus
from llmserve.engines.engine_process import EngineProcess
from llmserve.errors import LLMServeError
from llmserve.scheduling.messages import DispatchSolved, RequestArrived, RequestEnded, SolveDispatch
from llmserve.scheduling.scheduler import Scheduler
from llmserve.simulation.report import Recorder, Summary, elapsed, summarise
from llmserve.simulation.workload import poisson_arrivals

RELEASES = ("full", "greedy", "table")
LATE_S = 0.1  # the timer comes a millisecond late by design; the rest is what a busy machine's event loop may add
CORPUS = 2_000  # answers that the load is computed from
PROFILE_ROUNDS = 4  # batches of each size
DRAIN_S = 120  # for what still waits at the end
ANSWERS_A_LINE = 20  # of progress, without a terminal

OnAnswer = Callable[[str], None]
"""Called for each answer with what is being served."""


# ---- what arrives -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """share: of what full batches of one queue can serve.  greedy_s: exact mean response time of `greedy` there."""

    share: float
    arrival_rate_per_s: float
    greedy_s: float


def load_of(profile: Profile, lengths: Sequence[float], share: float, batch_size: int) -> Load:
    """lengths : output tokens, a sample of what will be answered."""
    sizes = np.arange(1, batch_size + 1)
    service = ServiceTimes.longest_of(lengths, profile.step_s.at(sizes), prefill_s=profile.prefill_s)
    rate_per_s = share * batch_size / float(service.mean_s[-1])
    queue = Queue(rate_per_s, service, profile.energy_j([lengths], sizes)[0], profile.idle_w)
    return Load(share, rate_per_s, queue.evaluate(queue.greedy()).response_s_mean)


def corpus_lengths(count: int, seed: int) -> list[float]:
    """Output tokens of held-out answers: every prompt of the corpus has one right answer."""
    tokenizer = Tokenizer.from_file(str(Path(embedded.__file__).parent / "model" / "tokenizer.json"))
    answers = [example.answer for example in demo_corpus.examples(count, seed=seed, held_out=True)]
    encoded = tokenizer.encode_batch(answers, add_special_tokens=False)
    return [float(len(tokens.ids)) for tokens in encoded]


@dataclass(frozen=True)
class Arrivals:
    """prompts and at_s: when each is sent.  gap_s: the mean time between two."""

    prompts: list[str]
    at_s: list[float]
    gap_s: float


def draw(count: int, rate_per_s: float, seed: int) -> Arrivals:
    examples = demo_corpus.examples(count, seed=seed, held_out=True)
    at_s = poisson_arrivals(rate_per_s, count, np.random.default_rng(seed))
    return Arrivals([example.prompt for example in examples], at_s.tolist(), 1.0 / rate_per_s)


# ---- what a journal tells -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FreeWaits:
    """Waits in a bin while the engine was free.

    longest_s    of one request, all such times together
    bound_s_max  the largest bound that a request had waited under; None without a plan
    late_s_max   by which a request was still in its bin after its bound; at most 0: nobody was
    violations   requests that were, by more than LATE_S
    """

    longest_s: float
    bound_s_max: float | None
    late_s_max: float | None
    violations: int


def free_waits(header: Header, steps: Sequence[Step]) -> FreeWaits:
    """Raises AssertionError when the replayed scheduler does not do what the journal says that it did."""
    scheduler = header.scheduler()
    plan: DispatchPlan | None = None
    waited_s: dict[int, float] = defaultdict(float)
    late_s: dict[int, float] = {}
    bounds_s: set[float] = set()
    then_s = 0.0
    for step in steps:
        models = scheduler.models.values() if is_free(scheduler) else ()
        for queue in [queue for queues in models for queue in queues.bins]:
            for queued in queue:
                waited_s[queued.request.id] += step.now_s - then_s
                if plan is not None:
                    bound_s = plan.tables[queue.index].wait_s_max
                    bounds_s.add(bound_s)
                    # Whoever's bound had passed when this plan came, or the engine became free, is late from then on.
                    late = step.now_s - max(then_s, queued.arrived_at_s + bound_s)
                    late_s[queued.request.id] = max(late, late_s.get(queued.request.id, late))
        done = tuple(scheduler.handle(step.event, step.now_s))
        assert done == step.actions, f"at {step.now_s} s the scheduler says {done}, its journal {step.actions}"
        plan = step.event.plan if isinstance(step.event, DispatchSolved) else plan
        then_s = step.now_s
    return FreeWaits(
        longest_s=max(waited_s.values(), default=0.0),
        bound_s_max=max(bounds_s, default=None),
        late_s_max=max(late_s.values(), default=None),
        violations=sum(late > LATE_S for late in late_s.values()),
    )


def is_free(scheduler: Scheduler) -> bool:
    return any(engine.ready and not engine.running for engine in scheduler.engines.values())


@dataclass(frozen=True)
class Planned:
    """A plan, in force from at_s on. arrival_rate_per_s: that it was made for; 0: of a load not known yet.

    least: requests that each queue waits for, in the policy that waits longer; wait_s_max: for so long at most.
    share: of decisions that follow the mixture's other policy.  response_s, power_w: what the model expects; None
    where it expects nothing.
    """

    at_s: float
    arrival_rate_per_s: float
    queues: int
    least: list[int]
    wait_s_max: list[float]
    share: float
    response_s: float | None
    power_w: float | None
    target_met: bool


def plans_of(steps: Sequence[Step]) -> list[Planned]:
    found, rate_per_s = [], 0.0
    for step in steps:
        if isinstance(step.event, DispatchSolved):
            found.append(_planned(step.now_s, rate_per_s, step.event.plan))
        for action in step.actions:
            if isinstance(action, SolveDispatch):
                rate_per_s = sum(action.observed.rates_per_s)
    return found


def _planned(now_s: float, rate_per_s: float, plan: DispatchPlan) -> Planned:
    return Planned(
        at_s=now_s,
        arrival_rate_per_s=rate_per_s,
        queues=len(plan.tables),
        least=[max(_least(table.actions), _least(table.other)) for table in plan.tables],
        wait_s_max=[table.wait_s_max for table in plan.tables],
        share=plan.share,
        response_s=plan.response_s_mean,
        power_w=plan.power_w_mean,
        target_met=plan.target_met,
    )


def _least(actions: Sequence[int]) -> int:
    return next((waiting for waiting, size in enumerate(actions) if size), 0)


@dataclass(frozen=True)
class Run:
    """One server's pass over a round's requests.

    summary                 as the simulator reports it
    above_idle_j_per_token  by the profile, of the batches that ran
    client_s_mean           latency that the client saw, prediction and HTTP included
    planned_s_mean          latency of the requests that came after the first plan for a known load; None: none did
    pace                    median of the batches' real time over what the profile expects of their size and length
    """

    release: str
    round: int
    summary: Summary
    batches: int
    above_idle_j_per_token: float
    client_s_mean: float
    planned_s_mean: float | None
    pace: float
    waits: FreeWaits
    plans: list[Planned]


def run_of(
    header: Header, steps: Sequence[Step], profile: Profile, *, release: str, number: int, client_s: Sequence[float]
) -> Run:
    recorder, tokens = recorded(steps)
    elapsed_s, began_s = elapsed(recorder), float(np.nanmin(recorder.arrived_s))
    ran = observations(steps)
    times = profile.step_times(max([batch.size for batch in ran], default=1))
    expected_s = [times.batch_s(batch.tokens, batch.size) for batch in ran]
    expected_j = [profile.prefill_j + batch.tokens * float(profile.step_j.at(batch.size)) for batch in ran]
    plans = plans_of(steps)
    return Run(
        release=release,
        round=number,
        summary=summarise(
            recorder,
            tokens,
            times.batch_s(tokens, 1),
            header.scheduling.full_batch,
            [sum(batch.seconds for batch in ran) / elapsed_s],
            joules_between(steps, profile, began_s, began_s + elapsed_s),
        ),
        batches=len(recorder.batches),
        above_idle_j_per_token=(sum(expected_j) - profile.idle_w * sum(expected_s)) / float(tokens.sum()),
        client_s_mean=statistics.mean(client_s),
        planned_s_mean=_planned_s_mean(recorder, plans),
        pace=statistics.median(batch.seconds / s for batch, s in zip(ran, expected_s, strict=True)),
        waits=free_waits(header, steps),
        plans=plans,
    )


def recorded(steps: Sequence[Step]) -> tuple[Recorder, np.ndarray]:
    """When each request came, started and ended, and its output tokens, by its id."""
    ids = [step.event.request.id for step in steps if isinstance(step.event, RequestArrived)]
    recorder, tokens = Recorder(max(ids) + 1), np.zeros(max(ids) + 1)
    for step in steps:
        recorder(step.now_s, step.event, list(step.actions))
        if isinstance(step.event, RequestEnded):
            tokens[step.event.request_id] = step.event.output_tokens
    return recorder, tokens


def joules_between(steps: Sequence[Step], profile: Profile, from_s: float, to_s: float) -> float:
    """from_s, to_s : times of steps."""
    meter = ModelledEnergy({"": profile})
    before_j: float | None = None
    for step in itertools.takewhile(lambda step: step.now_s <= to_s, steps):
        meter.observe(step)
        if before_j is None and step.now_s >= from_s:
            before_j = meter.joules(step.now_s)
    assert before_j is not None, f"no step between {from_s} and {to_s} s"
    return meter.joules(to_s) - before_j


def _planned_s_mean(recorder: Recorder, plans: Sequence[Planned]) -> float | None:
    since_s = next((plan.at_s for plan in plans if plan.response_s is not None), np.inf)
    arrived, ended = np.array(recorder.arrived_s), np.array(recorder.ended_s)
    latency = (ended - arrived)[arrived >= since_s]
    return float(np.nanmean(latency)) if latency.size else None


# ---- serving ------------------------------------------------------------------------------------------------------


async def measured_profile(args: argparse.Namespace, folder: Path) -> Profile:
    """Of the embedded engine behind a server, from bursts of every size, in random order."""
    sizes = [*range(1, args.batch_size + 1)] * PROFILE_ROUNDS
    random.Random(args.seed).shuffle(sizes)
    prompts = iter([example.prompt for example in demo_corpus.examples(sum(sizes), seed=args.seed, held_out=True)])
    path = folder / "profile.jsonl"
    flags = ["--bins", "1", "--batch-wait-s", "0.2", "--batch-size", str(args.batch_size), "--journal", str(path)]
    async with server("timeout", flags) as process, session_of() as session:
        with progress(sum(sizes)) as on_answer:
            for size in sizes:
                burst = list(itertools.islice(prompts, size))
                await asyncio.gather(*[ask(session, process.url, prompt) for prompt in burst])
                for _ in burst:
                    on_answer("profile")
    batches = observations(journal.read(path)[1])
    return profile_of(
        batches,
        name=MODEL,
        origin=f"Measured by scripts/lab/benchmark_dispatch_live.py, {date.today()}: the embedded engine "
        f"behind llmserve, {len(batches)} batches of the demo corpus",
        idle_w=args.idle_power_w,
        busy_w=args.busy_power_w,
    )


async def serve(
    release: str, number: int, arrivals: Arrivals, profile: Profile, flags: list[str], folder: Path, on_answer: OnAnswer
) -> Run:
    """A server of its own for one run, and what its journal tells."""
    path = folder / f"{release}-{number}.jsonl"
    async with server(release, [*flags, "--journal", str(path)]) as process:
        client_s = await send(process, arrivals, lambda: on_answer(f"round {number}, {release}"))
    header, steps = journal.read(path)
    return run_of(header, steps, profile, release=release, number=number, client_s=client_s)


@asynccontextmanager
async def server(release: str, flags: Sequence[str]) -> AsyncIterator[EngineProcess]:
    """`llmserve serve` with the embedded engine and the demo predictor, ready; it ends with the block, or with us."""

    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve", "serve", "--port", str(port), "--release", release]
        return [*words, "--drain-s", str(DRAIN_S), *flags]

    process = EngineProcess(f"llmserve, {release}", command, start_s=120)
    await process.start()
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while not await is_ready(session, process.url):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield process
    finally:
        await process.stop()


async def send(process: EngineProcess, arrivals: Arrivals, on_answer: Callable[[], None]) -> list[float]:
    """Every prompt at its time, then SIGTERM, so that bins let go. Seconds from each sending to its whole answer.

    Raises an ExceptionGroup when a request gets anything but an answer.
    """
    async with session_of() as session:
        began_s = time.perf_counter()

        async def send_at(at_s: float, prompt: str) -> float:
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            sent_s = time.perf_counter()
            await ask(session, process.url, prompt)
            on_answer()
            return time.perf_counter() - sent_s

        async with asyncio.TaskGroup() as group:
            pairs = zip(arrivals.at_s, arrivals.prompts, strict=True)
            asked = [group.create_task(send_at(at_s, prompt)) for at_s, prompt in pairs]
            await asyncio.sleep(arrivals.at_s[-1] + arrivals.gap_s)
            assert process.pid is not None, "it has been started"
            os.kill(process.pid, signal.SIGTERM)  # its leash passes it on
        return [task.result() for task in asked]


def session_of() -> aiohttp.ClientSession:
    """As many connections as there are requests, each for as long as its answer takes."""
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str) -> None:
    """Raises AssertionError when it gets anything but an answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer


async def measure(args: argparse.Namespace, profile: Profile, load: Load, target_s: float, folder: Path) -> list[Run]:
    """The releases in turn, round after round."""
    profile.save(folder / "profile.json")
    common = ["--batch-size", str(args.batch_size), "--profile", str(folder / "profile.json")]
    # At low load one bin answers sooner than many (docs/dispatch.md); table finds that out for itself.
    flags = {release: [*common, "--bins", "1"] for release in RELEASES}
    flags["table"] = [*common, "--latency-target-s", f"{target_s:.4g}"]
    runs = []
    with progress(args.rounds * len(RELEASES) * args.requests) as on_answer:
        for number in range(1, args.rounds + 1):
            arrivals = draw(args.requests, load.arrival_rate_per_s, args.seed + number)
            for release in RELEASES:
                runs.append(await serve(release, number, arrivals, profile, flags[release], folder, on_answer))
    return runs


@contextmanager
def progress(total: int) -> Iterator[OnAnswer]:
    """On stderr: a bar in a terminal, plain lines without."""
    if not sys.stderr.isatty():
        answers = itertools.count(1)

        def say(what: str) -> None:
            if (number := next(answers)) % ANSWERS_A_LINE == 0 or number == total:
                print(f"answer {number}/{total}: {what}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


# ---- what comes of it ---------------------------------------------------------------------------------------------


def print_tables(runs: Sequence[Run], title: str, target_s: float, console: Console) -> None:
    """What each run came to; what the runs that followed plans did about target and bounds. Times in seconds."""
    every = Table(title=title, title_justify="left")
    for name in ("round", "release", "latency: mean, p50, p95", "waiting: mean, p50, p95", "batches", "size"):
        every.add_column(name, justify="left" if name == "release" else "right")
    for name in ("J/token", "above idle", "pace"):
        every.add_column(name, justify="right")
    for run in runs:
        one = run.summary
        latency = (one.latency_s_mean, one.latency_s_p50, one.latency_s_p95)
        waiting = (one.waiting_s_mean, one.waiting_s_p50, one.waiting_s_p95)
        spreads = [" ".join(f"{value:5.2f}" for value in values) for values in (latency, waiting)]
        energies = (f"{one.energy_j_per_token:.4f}", f"{run.above_idle_j_per_token:.4f}")
        counts = (str(run.batches), f"{one.batch_size_mean:.2f}")
        every.add_row(str(run.round), run.release, *spreads, *counts, *energies, f"{run.pace:.2f}")
    console.print(every)
    planned = Table(title=f"table, whose target is {target_s:.2f} s", title_justify="left")
    for name in (
        "round",
        "mean",
        "since planned",
        "plans",
        "queues",
        "longest free wait",
        "bound",
        "late",
        "violations",
    ):
        planned.add_column(name, justify="right")
    for run in [run for run in runs if run.plans]:
        waits = run.waits
        times = (run.summary.latency_s_mean, run.planned_s_mean)
        free = (waits.longest_s, waits.bound_s_max, waits.late_s_max)
        planned.add_row(
            str(run.round),
            *map(_seconds, times),
            str(len(run.plans)),
            queues_over_time(run.plans),
            *map(_seconds, free),
            str(waits.violations),
        )
    console.print(planned)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def queues_over_time(plans: Sequence[Planned]) -> str:
    """Numbers of queues in force, one after the other: "8, 1"."""
    return ", ".join(str(queues) for queues, _ in itertools.groupby(plan.queues for plan in plans))


def draw_figure(runs: Sequence[Run], target_s: float, title: str, path: Path) -> None:
    """Mean latency against energy per token, all of it and what is above idle: a point for each run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(9, 4.2), layout="constrained", dpi=140)
    panels = figure.subplots(1, 2)
    labels = ("J per output token, idle counted", "J per output token above idle, at the profile's pace")
    energies: tuple[Callable[[Run], float], ...] = (energy_j_per_token, lambda run: run.above_idle_j_per_token)
    for axes, label, energy in zip(panels, labels, energies, strict=True):
        for release, color in zip(RELEASES, ("#8c8c8c", "#3b7dd8", "#2a9d5c"), strict=True):
            these = [run for run in runs if run.release == release]
            points = [(run.summary.latency_s_mean, energy(run)) for run in these]
            axes.plot(*zip(*points, strict=True), "o", color=color, ms=8, label=release)
            for run, point in zip(these, points, strict=True):
                axes.annotate(str(run.round), point, xytext=(7, 4), textcoords="offset points", fontsize=8)
        axes.axvline(target_s, color="#c0392b", lw=1.2, ls="--", label=f"target of table, {target_s:.2g} s")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="mean latency (s)", ylabel=label, ylim=(0, 1.2 * max(map(energy, runs))))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, loc="lower right")
    figure.suptitle(f"{title} (numbers: rounds; joules modelled)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def energy_j_per_token(run: Run) -> float:
    assert run.summary.energy_j_per_token is not None, "it was given the energy"
    return run.summary.energy_j_per_token


def result_of(args: argparse.Namespace, profile: Profile, load: Load, target_s: float, runs: Sequence[Run]) -> Any:
    """All of it, for JSON."""
    setting = {name: getattr(args, name) for name in ("requests", "rounds", "seed", "batch_size")}
    return {
        "date": str(date.today()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **setting,
        "load": load.share,
        "arrival_rate_per_s": load.arrival_rate_per_s,
        "greedy_s_mean_expected": load.greedy_s,
        "latency_target_s": target_s,
        "late_s": LATE_S,
        "profile": asdict(profile),
        "runs": [
            {**asdict(run), "summary": msgspec.structs.asdict(run.summary), "queues": queues_over_time(run.plans)}
            for run in runs
        ],
    }


def rounded(value: Any) -> Any:
    """Numbers to six digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


# ---- the command --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.journals or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            profile = Profile.load(args.profile) if args.profile else asyncio.run(measured_profile(args, folder))
        except (LLMServeError, ValueError) as error:
            sys.exit(f"benchmark_dispatch_live: error: {error}")
        load = load_of(profile, corpus_lengths(CORPUS, args.seed), args.load, args.batch_size)
        target_s = args.latency_target_s or 2.0 * load.greedy_s
        title = f"Embedded engine, Poisson at load {load.share:g}: {load.arrival_rate_per_s:.3g} requests/s"
        say_setting(profile, load, target_s, title)
        runs = asyncio.run(measure(args, profile, load, target_s, folder))
    print_tables(runs, title, target_s, Console(width=None if sys.stdout.isatty() else 120))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        result = result_of(args, profile, load, target_s, runs)
        args.output.write_text(json.dumps(rounded(result), indent=1) + "\n")
    if args.figure:
        draw_figure(runs, target_s, title, args.figure)
    if any(run.waits.violations for run in runs):
        sys.exit("a request waited beyond its bound")


def say_setting(profile: Profile, load: Load, target_s: float, title: str) -> None:
    step_s = profile.step_s
    print(
        f"{title}; a batch takes {1e3 * profile.prefill_s:.3g} ms, and {1e3 * step_s.slope:.3g} b + "
        f"{1e3 * step_s.intercept:.3g} ms a step (error {step_s.error:.0%}); greedy is expected to take "
        f"{load.greedy_s:.2f} s, the target is {target_s:.2f} s",
        file=sys.stderr,
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--requests", type=whole(16), default=80, help="of each run (%(default)s)")
    add("--rounds", type=whole(1), default=2, help="in each of which every release has a run (%(default)s)")
    add("--load", type=load_share, default=0.2, metavar="RHO", help="share of what full batches serve (%(default)s)")
    add("--batch-size", type=whole(2), default=8, help="requests in a full batch (%(default)s)")
    add(
        "--latency-target-s",
        type=positive,
        metavar="S",
        help="of table, for the mean (default: twice greedy's, solved)",
    )
    add("--profile", metavar="FILE", help="of the embedded engine (default: it is measured first)")
    add("--busy-power-w", type=power, default=20.0, metavar="W", help="assumed of a measured profile (%(default)s)")
    add("--idle-power-w", type=power, default=8.0, metavar="W", help="while no batch runs, likewise (%(default)s)")
    add("--seed", type=int, default=2026, help="draws prompts and arrivals (%(default)s)")
    add("--journals", type=Path, metavar="FOLDER", help="keep the servers' journals and the profile there")
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    add("--figure", type=Path, metavar="FILE", help="write the results as PNG")
    return parser


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value


def load_share(text: str) -> float:
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"a load below 1 is needed, not {text!r}: no queue is stable above")
    return value


if __name__ == "__main__":
    main()
