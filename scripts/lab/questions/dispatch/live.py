"""Waiting for larger batches at low load, live: what waiting costs in latency and saves in energy.

    python scripts/lab dispatch.live \\
        --output docs/results/dispatch-live.json --figure docs/results/dispatch-live.png

The script first measures the profile of the embedded engine behind a server, with batches of all sizes. The profile and
the lengths of the demo corpus give the arrival rate for --load, and the response time of `greedy` by an exact solve
(bins/smdp.py). The latency target is twice that response time. Then three servers take turns, each a fresh `llmserve
serve` with its own engine and the demo predictor: `--release full`, `greedy`, and `table` with the target. In a round
all servers get the same held-out prompts at the same Poisson times; every round draws new prompts and times. One mean
gap after the last arrival the script stops the server, which then releases all requests in its bins: `full` would
otherwise keep a last partial batch for ever.

All numbers except the client's latency come from the servers' journals:

- Joules are modelled: --busy-power-w while a batch runs, --idle-power-w between batches, from the first arrival to the
  last end. No power is measured on a CPU, so read ratios, not joules. "Above idle" is the part that batching can
  change: the energy of the batches beyond idle power, with the batch times of the profile.
- A free wait is the time that a request spends in its bin while no batch runs. The script replays the journal, so each
  request counts in its real queue, with the bound of the plan in force (`wait_s_max`). A violation is a request that
  still waits more than LATE_S after its bound while the engine is free.
- Pace is the median of the real time of a batch over the profile's time: 1 when the machine is as busy as it was while
  the profile was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from kit import client
from kit.arguments import add_results, exit_on, parser_of, positive, whole
from kit.client import MODEL
from kit.figures import BLUE, GREEN, GREY, ORANGE, log_ticks, new_figure, save
from kit.progress import counted, log
from kit.results import day_and_machine, rounded, write_json
from kit.servers import MODEL_FOLDER, Server, front_end
from kit.tables import show
from make import demo_corpus
from rich.console import Console
from tokenizers import Tokenizer

from bins.profile import Profile
from bins.service import ServiceTimes
from bins.smdp import Queue
from llmserve.commands.profile import power, profile_of
from llmserve.errors import LLMServeError
from llmserve.live import journal
from llmserve.simulation.observed import observations
from llmserve.simulation.workload import poisson_arrivals
from questions.dispatch.journal import LATE_S, Planned, Run, run_of

RELEASES = ("full", "greedy", "table")
CORPUS = 2_000  # answers from which the load is computed
PROFILE_ROUNDS = 4  # batches of each size
DRAIN_S = 120  # for the requests that still wait at the end
OnAnswer = Callable[[str], None]
"""Called for each answer with the name of the round and the release."""


@dataclass(frozen=True)
class Load:
    """share : of the throughput of full batches of one queue.  greedy_s : exact mean response time of `greedy`"""

    share: float
    arrival_rate_per_s: float
    greedy_s: float


def load_of(profile: Profile, lengths: Sequence[float], share: float, batch_size: int) -> Load:
    """lengths : output tokens of a sample of answers"""
    sizes = np.arange(1, batch_size + 1)
    service = ServiceTimes.longest_of(lengths, profile.step_s.at(sizes), prefill_s=profile.prefill_s)
    rate_per_s = share * batch_size / float(service.mean_s[-1])
    queue = Queue(rate_per_s, service, profile.energy_j([lengths], sizes)[0], profile.idle_w)
    return Load(share, rate_per_s, queue.evaluate(queue.greedy()).response_s_mean)


def corpus_lengths(count: int, seed: int) -> list[float]:
    """Output tokens of held-out answers: each prompt of the corpus has exactly one right answer."""
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    answers = [example.answer for example in demo_corpus.examples(count, seed=seed, held_out=True)]
    encoded = tokenizer.encode_batch(answers, add_special_tokens=False)
    return [float(len(tokens.ids)) for tokens in encoded]


@dataclass(frozen=True)
class Arrivals:
    """at_s : send time of each prompt.  gap_s : mean time between two"""

    prompts: list[str]
    at_s: list[float]
    gap_s: float


def draw(count: int, rate_per_s: float, seed: int) -> Arrivals:
    examples = demo_corpus.examples(count, seed=seed, held_out=True)
    at_s = poisson_arrivals(rate_per_s, count, np.random.default_rng(seed))
    return Arrivals([example.prompt for example in examples], at_s.tolist(), 1.0 / rate_per_s)


async def measured_profile(args: argparse.Namespace, folder: Path) -> Profile:
    """Measure the embedded engine behind a server, with bursts of every size in random order."""
    sizes = [*range(1, args.batch_size + 1)] * PROFILE_ROUNDS
    random.Random(args.seed).shuffle(sizes)
    prompts = iter([example.prompt for example in demo_corpus.examples(sum(sizes), seed=args.seed, held_out=True)])
    path = folder / "profile.jsonl"
    flags = ["--bins", "1", "--batch-wait-s", "0.2", "--batch-size", str(args.batch_size), "--journal", str(path)]
    async with serving("timeout", flags) as server, client.session_of() as session:
        with counted(sum(sizes)) as on_answer:
            for size in sizes:
                burst = list(itertools.islice(prompts, size))
                await asyncio.gather(*[ask(session, server.url, prompt) for prompt in burst])
                for _ in burst:
                    on_answer("profile")
    batches = observations(journal.read(path)[1])
    return profile_of(
        batches,
        name=MODEL,
        origin=f"Measured by scripts/lab/questions/dispatch/live.py, {date.today()}: the embedded engine "
        f"behind llmserve, {len(batches)} batches of the demo corpus",
        idle_w=args.idle_power_w,
        busy_w=args.busy_power_w,
    )


async def serve(
    release: str, number: int, arrivals: Arrivals, profile: Profile, flags: list[str], folder: Path, on_answer: OnAnswer
) -> Run:
    """Start a server, send it one run, and read the run from its journal."""
    path = folder / f"{release}-{number}.jsonl"
    async with serving(release, [*flags, "--journal", str(path)]) as server:
        client_s = await send(server, arrivals, lambda: on_answer(f"round {number}, {release}"))
    header, steps = journal.read(path)
    return run_of(header, steps, profile, release=release, number=number, client_s=client_s)


def serving(release: str, flags: Sequence[str]) -> AbstractAsyncContextManager[Server]:
    """`llmserve serve` with the embedded engine and the demo predictor."""
    return front_end(release, "--release", release, "--drain-s", str(DRAIN_S), *flags)


async def send(server: Server, arrivals: Arrivals, on_answer: Callable[[], None]) -> list[float]:
    """Send every prompt at its time, then SIGTERM, so that the server releases all bins.

    Returns the seconds from each due time to the end of the answer. Raises an ExceptionGroup when a request fails.
    """
    async with client.session_of() as session:

        async def send_at(index: int, due_s: float) -> float:
            if index == len(arrivals.prompts):
                server.process.send_signal(signal.SIGTERM)  # its supervisor passes it on
                return 0.0
            await ask(session, server.url, arrivals.prompts[index])
            on_answer()
            return time.perf_counter() - due_s

        *latencies_s, _ = await client.at_their_times([*arrivals.at_s, arrivals.at_s[-1] + arrivals.gap_s], send_at)
    return latencies_s


async def ask(session: aiohttp.ClientSession, url: str, prompt: str) -> None:
    """Raises AssertionError unless the reply is an answer."""
    reply = await client.ask(session, url, client.body_of(prompt))
    assert reply.answer, reply


async def measure(args: argparse.Namespace, profile: Profile, load: Load, target_s: float, folder: Path) -> list[Run]:
    """Run the releases in turn, round after round."""
    profile.save(folder / "profile.json")
    common = ["--batch-size", str(args.batch_size), "--profile", str(folder / "profile.json")]
    # At low load one bin is faster than many (docs/results/dispatch.md); `table` chooses the number of queues itself.
    flags = {release: [*common, "--bins", "1"] for release in RELEASES}
    flags["table"] = [*common, "--latency-target-s", f"{target_s:.4g}"]
    runs = []
    with counted(args.rounds * len(RELEASES) * args.requests) as on_answer:
        for number in range(1, args.rounds + 1):
            arrivals = draw(args.requests, load.arrival_rate_per_s, args.seed + number)
            for release in RELEASES:
                runs.append(await serve(release, number, arrivals, profile, flags[release], folder, on_answer))
    return runs


def print_tables(runs: Sequence[Run], title: str, target_s: float, console: Console) -> None:
    """A table of all runs, and a table of targets and bounds of the runs with plans. Times are seconds."""
    totals, planned = [], []
    for run in runs:
        summary, waits = run.summary, run.waits
        latency = (summary.latency_s_mean, summary.latency_s_p50, summary.latency_s_p95)
        waiting = (summary.waiting_s_mean, summary.waiting_s_p50, summary.waiting_s_p95)
        spreads = [" ".join(f"{value:5.2f}" for value in values) for values in (latency, waiting)]
        energies = (f"{summary.energy_j_per_token:.4f}", f"{run.above_idle_j_per_token:.4f}")
        counts = (str(run.batches), f"{summary.batch_size_mean:.2f}")
        totals.append((str(run.round), run.release, *spreads, *counts, *energies, f"{run.pace:.2f}"))
        if run.plans:
            times = map(_seconds, (summary.latency_s_mean, run.planned_s_mean))
            free = map(_seconds, (waits.longest_s, waits.bound_s_max, waits.late_s_max))
            plans = (str(len(run.plans)), queues_over_time(run.plans))
            planned.append((str(run.round), *times, *plans, *free, str(waits.violations)))
    columns = ("round", "release", "latency: mean, p50, p95", "waiting: mean, p50, p95", "batches", "size")
    show(title, (*columns, "J/token", "above idle", "pace"), totals, left=("release",), console=console)
    columns = ("round", "mean", "since planned", "plans", "queues", "longest free wait", "bound", "late", "violations")
    show(f"table, whose target is {target_s:.2f} s", columns, planned, console=console)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def queues_over_time(plans: Sequence[Planned]) -> str:
    """The numbers of queues of successive plans, without repetitions: "8, 1"."""
    return ", ".join(str(queues) for queues, _ in itertools.groupby(plan.queues for plan in plans))


def draw_figure(runs: Sequence[Mapping[str, Any]], target_s: float, title: str, path: Path) -> None:
    """Mean latency against energy per token, on the left all energy, on the right above idle: a point for each run."""
    figure, (panels,) = new_figure(1, 2, width=9, height=4.2)
    labels = ("J per output token, idle counted", "J per output token above idle")
    energies = [[run["summary"]["energy_j_per_token"] for run in runs], [run["above_idle_j_per_token"] for run in runs]]
    for axes, label, joules in zip(panels, labels, energies, strict=True):
        for release, color in zip(RELEASES, (GREY, BLUE, GREEN), strict=True):
            points = [
                (run["summary"]["latency_s_mean"], energy_j)
                for run, energy_j in zip(runs, joules, strict=True)
                if run["release"] == release
            ]
            axes.plot(*zip(*points, strict=True), "o", color=color, ms=8, label=release)
        axes.axvline(target_s, color=ORANGE, lw=1.2, ls="--", label=f"target of table, {target_s:.2g} s")
        log_ticks(axes)
        axes.set(xlabel="mean latency (s)", ylabel=label, ylim=(0, 1.2 * max(joules)))
    panels[0].legend(loc="lower right")
    figure.suptitle(f"{title} (a point for each round; joules modelled)", fontsize=10)
    save(figure, path)


def result_of(args: argparse.Namespace, profile: Profile, load: Load, target_s: float, runs: Sequence[Run]) -> Any:
    """The setting and all runs, for JSON."""
    setting = {name: getattr(args, name) for name in ("requests", "rounds", "seed", "batch_size")}
    return {
        **day_and_machine(),
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


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.results:
        result = json.loads(args.results.read_text(encoding="utf-8"))
    else:
        result = measured(args)
        write_json(args.output, result)
    if args.figure:
        title = title_of(result["load"], result["arrival_rate_per_s"])
        draw_figure(result["runs"], result["latency_target_s"], title, args.figure)
    if any(run["waits"]["violations"] for run in result["runs"]):
        sys.exit("a request waited beyond its bound")


def title_of(load: float, arrival_rate_per_s: float) -> str:
    return f"Embedded engine, Poisson at load {load:g}: {arrival_rate_per_s:.3g} requests/s"


def measured(args: argparse.Namespace) -> Any:
    """Run every release, and print the tables. Return the setting and all runs, as JSON has them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.journals or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with exit_on(LLMServeError, ValueError):
            profile = Profile.load(args.profile) if args.profile else asyncio.run(measured_profile(args, folder))
        load = load_of(profile, corpus_lengths(CORPUS, args.seed), args.load, args.batch_size)
        target_s = args.latency_target_s or 2.0 * load.greedy_s
        title = title_of(load.share, load.arrival_rate_per_s)
        log_setting(profile, load, target_s, title)
        runs = asyncio.run(measure(args, profile, load, target_s, folder))
    print_tables(runs, title, target_s, Console(width=None if sys.stdout.isatty() else 120))
    return rounded(result_of(args, profile, load, target_s, runs))


def log_setting(profile: Profile, load: Load, target_s: float, title: str) -> None:
    step_s = profile.step_s
    log(
        f"{title}; a batch takes {1e3 * profile.prefill_s:.3g} ms, and {1e3 * step_s.slope:.3g} b + "
        f"{1e3 * step_s.intercept:.3g} ms a step (error {step_s.error:.0%}); greedy is expected to take "
        f"{load.greedy_s:.2f} s, the target is {target_s:.2f} s"
    )


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--requests", type=whole(16), default=80, help="requests of each run (%(default)s)")
    add("--rounds", type=whole(1), default=2, help="every release has a run in each round (%(default)s)")
    add(
        "--load",
        type=load_share,
        default=0.2,
        metavar="RHO",
        help="share of the throughput of full batches (%(default)s)",
    )
    add("--batch-size", type=whole(2), default=8, help="requests in a full batch (%(default)s)")
    add("--latency-target-s", type=positive, metavar="S", help="mean latency for table (default: twice greedy's)")
    add("--profile", metavar="FILE", help="profile of the embedded engine (default: measure it first)")
    add("--busy-power-w", type=power, default=20.0, metavar="W", help="assumed for a measured profile (%(default)s)")
    add("--idle-power-w", type=power, default=8.0, metavar="W", help="the same while no batch runs (%(default)s)")
    add("--seed", type=int, default=2026, help="draws prompts and arrivals (%(default)s)")
    add("--journals", type=Path, metavar="FOLDER", help="keep the servers' journals and the profile there")
    add("--results", type=Path, metavar="FILE", help="draw an earlier --output; nothing runs")
    add_results(parser, "--figure")
    return parser


def load_share(text: str) -> float:
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"a load below 1 is needed, not {text!r}: no queue is stable above")
    return value
