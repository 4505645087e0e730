"""A cold server meets a burst, on an idle machine and on a busy one: do forecasts come, and stay in force?

    python scripts/lab cold --vllm-python .venv-vllm/bin/python --output docs/results/cold.json
    python scripts/lab cold --report --output docs/results/cold.json

200 requests of five templates arrive within one second, and once all are answered 200 more: directly at the engine, and
through a new `llmserve serve --engine URL` without another flag and without a predictor. The engines are the real vLLM
and a timed one, both with 8 slots. On the busy machine so many loops run that never rest (--loops). The arrangements
take turns, each round has other prompts, and ratios are taken round by round.

The server's metrics are read four times a second. "In force" says whether the forecasts ordered requests at every
reading after 100 answers. The rank correlation is that of forecasts with lengths, at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from kit.arguments import parser_of, whole
from kit.progress import log
from kit.results import day_and_machine, in_turn, read_parts, rounded, write_json
from kit.rows import Row, ratio, select
from kit.servers import front_end, of_lab, running, vllm
from kit.studies import add_report, measure_or_report
from kit.tables import markdown

from questions.cold.templates import drawn
from questions.vllm.passes import Question, question_of, send, session_of

TIMED, VLLM = ENGINES = ("timed", "vLLM")
DIRECT, LLMSERVE = "directly", "llmserve"
SLOTS, STEP_S, WITHIN_S = 8, 0.006, 1.0
READING_S, TAUGHT = 0.25, 100  # answers after which forecasts must be in force
CASE = ("engine", "loops", "arrangement", "round")
BURSTS = ("first", "second")
METRIC = r"^llmserve_{name}(?:\{{.*\}})? (\S+)$"


def burst(rng: random.Random, count: int) -> list[Question]:
    prompts = drawn(count, rng)
    return [question_of(prompt, WITHIN_S * index / count) for index, prompt in enumerate(prompts)]


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that never rest."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Readings:
    """What the server's metrics say of its forecasts while requests run."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.in_force = True
        self.rank_correlation = 0.0

    async def follow(self) -> None:
        """Read until cancelled."""
        async with session_of() as session:
            while True:
                async with session.get(f"{self._url}/metrics") as response:
                    self.take(await response.text())
                await asyncio.sleep(READING_S)

    def take(self, page: str) -> None:
        learnt, trusted, rank = (
            re.search(METRIC.format(name=name), page, re.MULTILINE)
            for name in ("prediction_learnt_answers_total", "prediction_trusted", "prediction_rank_correlation")
        )
        if rank is not None:
            self.rank_correlation = float(rank[1])
        assert learnt is not None and trusted is not None, "the server has metrics of its forecasts"  # noqa: PT018
        if float(learnt[1]) >= TAUGHT:
            self.in_force = self.in_force and float(trusted[1]) == 1.0


async def one_pass(arrangement: str, engine: str, count: int, seed: int) -> dict[str, float]:
    """Raises RuntimeError when a request fails."""
    rng = random.Random(seed)
    numbers: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        url, readings = engine, None
        if arrangement == LLMSERVE:
            flags = ("--engine", engine, "--log-level", "warning")
            url = (await stack.enter_async_context(front_end(arrangement, *flags))).url
            readings = Readings(url)
            stack.callback(asyncio.ensure_future(readings.follow()).cancel)
        for name in BURSTS:
            outcomes = await send([url] * count, burst(rng, count))
            if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
                raise RuntimeError(f"{arrangement} failed: {failures[0]}")
            latencies_s = [outcome.latency_s for outcome in outcomes]
            numbers[f"{name}_mean_s"] = statistics.fmean(latencies_s)
            numbers[f"{name}_tokens_per_s"] = sum(outcome.tokens for outcome in outcomes) / max(latencies_s)
        if readings is not None:
            await asyncio.sleep(2 * READING_S)
            numbers |= {"in_force": float(readings.in_force), "rank_correlation": readings.rank_correlation}
    return numbers


@asynccontextmanager
async def started(engine: str, args: argparse.Namespace) -> AsyncIterator[str]:
    if engine == VLLM:
        served = vllm(args.vllm_python, engine, SLOTS)
    else:
        command = of_lab("cold.engine", "--model", "llmserve-demo", "--slots", str(SLOTS), "--step-s", str(STEP_S))
        served = running(engine, command, ready="/health")
    async with served as server:
        await send([server.url] * 16, burst(random.Random(args.seed - 1), 16))  # the first answers are slow
        yield server.url


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    passes = [Row.of_record(record, CASE) for record in read_parts(args.output)["passes"]] if args.more else []
    for engine in args.engines:
        async with started(engine, args) as url:
            for loops in args.loops:
                done = len(select(passes, engine=engine, loops=loops, arrangement=DIRECT))
                for number in range(done, done + args.rounds):
                    for arrangement in in_turn((DIRECT, LLMSERVE), number):
                        with busy(loops):
                            numbers = await one_pass(arrangement, url, args.requests, args.seed + number)
                        passes.append(Row(dict(zip(CASE, (engine, loops, arrangement, number), strict=True)), numbers))
                        log(f"{engine}, {loops} loops, round {number + 1}: {arrangement}: {in_words(numbers)}")
    setting = {**day_and_machine(), "requests": args.requests, "slots": SLOTS, "step_s": STEP_S, "seed": args.seed}
    results: dict[str, Any] = rounded({**setting, "passes": [row.record for row in passes]})
    if args.output:
        write_json(args.output, results)
    return results


def in_words(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())


def print_report(results: dict[str, Any]) -> None:
    passes = [Row.of_record(record, CASE) for record in results["passes"]]
    head = ["engine", "busy loops", "runs", "first burst, to direct", "each", "second burst, to direct", "each"]
    head += ["tokens/s", "in force after 100 answers", "rank correlation, least"]
    lines = []
    for engine, loops in dict.fromkeys((row["engine"], row["loops"]) for row in passes):
        direct, own = [
            select(passes, engine=engine, loops=loops, arrangement=arrangement) for arrangement in (DIRECT, LLMSERVE)
        ]
        line = [engine, str(loops), str(len(own))]
        for name in BURSTS:
            each = [
                after[f"{name}_mean_s"] / before[f"{name}_mean_s"] for before, after in zip(direct, own, strict=True)
            ]
            line += [f"{statistics.median(each):.2f}", " ".join(f"{value:.2f}" for value in sorted(each))]
        line.append(f"{ratio(own, direct, 'second_tokens_per_s', 'round'):.2f}")
        line.append(f"{sum(row['in_force'] == 1.0 for row in own)} of {len(own)}")
        line.append(f"{min(row['rank_correlation'] for row in own):.2f}")
        lines.append(line)
    print(markdown(head, lines))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM in it")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--loops", nargs="+", type=whole(0), default=(0, 4))
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--requests", type=whole(1), default=200, help="of a burst")
    parser.add_argument("--seed", type=whole(1), default=1)
    parser.add_argument("--more", action="store_true", help="add the rounds to those of --output")
    add_report(parser)
    args = parser.parse_args()
    needed = ("vllm_python",) if VLLM in args.engines else ()
    measure_or_report(parser, args, measure, print_report, *needed)
