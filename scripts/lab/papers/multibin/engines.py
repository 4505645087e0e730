"""Fig. 1 (a), 5, 7 and 11: measurements on a real engine.

The engine is llmserve's embedded engine: a small model on the CPU that runs static batches. Fig. 5 also has vLLM if the
variable VLLM_PYTHON names an interpreter that has vLLM. `llmserve profile` and `llmserve bench` measure the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

import aiohttp
import numpy as np
from kit.results import straight_line
from kit.servers import batching_front_end, embedded_engine, vllm
from make import demo_corpus

from bins.fitting import Observation
from llmserve.commands import bench as throughput
from llmserve.commands.bench import BASELINE, Arrangement, BenchRun
from llmserve.engines import measuring
from papers.multibin.table_1 import MEASURED
from papers.rows import Report, Row, Rows, claim

BATCHING, LINEAR, ORACLE, PREDICTED = "Fig. 1 (a)", "Fig. 5", "Fig. 7", "Fig. 11"
EMBEDDED, VLLM = "embedded", "vLLM, CPU"
VLLM_PYTHON = "VLLM_PYTHON"
BATCH = 8  # of Fig. 7 and 11
PUBLISHED = {ORACLE: {4: 1.45, 32: 1.70}, PREDICTED: {4: 1.08}}  # gains, by number of bins
MODELS = {ORACLE: "Phi-3.5-mini, A100", PREDICTED: "Vicuna-13B, A100"}
HOW = {ORACLE: "oracle", PREDICTED: "median"}
LINEAR_FROM = 0.99  # least R² of a linear relation
IMPLIED_WITHIN = 0.1
RATE, RATE_OVER_ONE = "output tokens a second", "output tokens a second over those of batches of one"
IS_LINEAR, RISING = "the time is linear in the tokens", "throughput increases with the number of bins"
SLOPE, BESIDES, R_SQUARED = "time of a token", "time besides", "R²"
GAIN, IMPLIED = "gain over one bin, all at once", "gain implied by the lengths"
STARTED = 0.5  # share of the work that is done when Fig. 7 begins


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    sizes, tokens, rounds  of Fig. 1 (a)
    answers, tokens_max    lengths of Fig. 5, and the longest of them
    repeats                measurements of each length
    warm_up                requests before Fig. 7
    requests, passes       of Fig. 7 and 11
    oracle, predicted      numbers of bins of Fig. 7, and of Fig. 11
    cost_rounds            rounds that measure the time of a batch, for the gain that the lengths imply
    cost_tokens            tokens of these batches
    """

    seed: int
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: int = 128
    rounds: int = 2
    answers: int = 20
    tokens_max: int = 480
    repeats: int = 3
    warm_up: int = 16
    requests: int = 480
    passes: int = 1
    cost_rounds: int = 2
    cost_tokens: tuple[int, ...] = throughput.COST_TOKENS
    oracle: tuple[int, ...] = (4, 8, 16, 32)
    predicted: tuple[int, ...] = (4, 8)
    vllm_python: str | None = None

    @property
    def arrangements(self) -> list[Arrangement]:
        return [
            BASELINE,
            *(_arrangement(ORACLE, bins) for bins in self.oracle),
            *(_arrangement(PREDICTED, bins) for bins in self.predicted),
        ]

    @classmethod
    def full(cls, seed: int) -> Effort:
        return cls(seed, vllm_python=os.environ.get(VLLM_PYTHON))

    @classmethod
    def quick(cls, seed: int) -> Effort:
        """Without vLLM, which takes half a minute to start."""
        return cls(
            seed,
            (1, 8),
            tokens=16,
            answers=6,
            tokens_max=120,
            repeats=1,
            warm_up=BATCH,
            requests=16,
            cost_rounds=1,
            cost_tokens=(1, 60, 240),
            oracle=(4,),
            predicted=(4,),
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of the engines.

    batches  full batches, of Fig. 1 (a)
    answers  single answers, of Fig. 5, by engine
    runs     of Fig. 7 and 11, by arrangement: one run for each pass
    cost     seconds of a full batch by its tokens, on the engine alone
    """

    batches: list[Observation]
    answers: dict[str, list[Observation]]
    runs: dict[str, list[BenchRun]]
    cost: np.poly1d


def measure(seed: int, quick: bool, report: Report) -> Rows:
    effort = Effort.quick(seed) if quick else Effort.full(seed)
    observed = asyncio.run(observe(effort, report))
    rows = Rows(batching_rows(effort, observed.batches))
    for engine, answers in observed.answers.items():
        rows.extend(line_rows(engine, answers))
    rows.extend(gain_rows(effort, observed.runs, observed.cost))
    rows.extend(people_rows())
    return rows


# ---- measurements -----------------------------------------------------------------------------------------------


async def observe(effort: Effort, report: Report) -> Observed:
    answers: dict[str, list[Observation]] = {}
    report("Fig. 1 (a): batches of the embedded engine", 0.0)
    async with embedded_engine(max(effort.sizes)) as server:
        plan = measuring.MeasuringPlan(effort.sizes, effort.tokens, effort.rounds, effort.seed)
        measured = await measuring.measure(server.url, None, plan, None, idle_s=0, on_batch=lambda *_: None)
        report("Fig. 5: its answers, one by one", 0.1)
        answers[EMBEDDED] = await answer_times(server.url, effort)
    if effort.vllm_python:
        report("Fig. 5: vLLM's answers, one by one", 0.2)
        async with vllm(effort.vllm_python, VLLM, 1, "--scheduling-policy", "priority") as server:
            answers[VLLM] = await answer_times(server.url, effort)
    report("Fig. 7 and 11: starting the servers", 0.3)
    runs, cost = await _all_at_once(effort, report)
    return Observed(measured.batches, answers, runs, cost)


async def answer_times(url: str, effort: Effort) -> list[Observation]:
    """Measure answers one after the other, in a new random order for each repeat, after a warm-up answer."""
    lengths = (
        np.linspace(effort.tokens_max / effort.answers, effort.tokens_max, effort.answers).round().astype(int).tolist()
    )
    rng = random.Random(effort.seed)
    timeout = aiohttp.ClientTimeout(total=measuring.ANSWER_S_MAX)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = measuring.Client(session, url, await measuring.first_model(url), effort.seed)
        await client.learn(min(lengths))
        await client.batch(1, max(lengths))
        return [
            await measuring.observe(client, None, 1, length)
            for _ in range(effort.repeats)
            for length in rng.sample(lengths, len(lengths))
        ]


async def _all_at_once(effort: Effort, report: Report) -> tuple[dict[str, list[BenchRun]], np.poly1d]:
    """Run Fig. 7 and 11 on one engine: every arrangement in turn, pass after pass."""
    prompts = [example.prompt for example in demo_corpus.examples(effort.requests, seed=effort.seed, held_out=True)]
    found: dict[str, list[BenchRun]] = {arrangement.name: [] for arrangement in effort.arrangements}
    async with AsyncExitStack() as stack:
        engine_url = (await stack.enter_async_context(embedded_engine(BATCH))).url
        urls = [
            (await stack.enter_async_context(batching_front_end(engine_url, arrangement, BATCH))).url
            for arrangement in effort.arrangements
        ]
        await throughput.run(urls[0], prompts[: effort.warm_up], None)
        cost = await throughput.batch_cost(engine_url, BATCH, effort.cost_rounds, effort.cost_tokens)
        turns = effort.passes * list(zip(effort.arrangements, urls, strict=True))
        lengths: list[int] | None = None
        for number, (arrangement, url) in enumerate(turns):
            report(f"Fig. 7 and 11: {arrangement.name}", STARTED + (1 - STARTED) * number / len(turns))
            done = await throughput.run(url, prompts, lengths if arrangement.lengths == HOW[ORACLE] else None)
            lengths = lengths or done.lengths
            found[arrangement.name].append(done)
    return found, cost


# ---- rows -------------------------------------------------------------------------------------------------------


def batching_rows(effort: Effort, batches: Iterable[Observation]) -> list[Row]:
    """Fig. 1 (a): tokens a second by batch size, from the batches of the plan's full length."""
    whole = [batch for batch in batches if batch.tokens == effort.tokens]
    rows = []
    for size in effort.sizes:
        rates = [size * batch.tokens / batch.seconds for batch in whole if batch.size == size]
        rows.append(Row.mean(BATCHING, {"batch": size}, RATE, "1/s", rates))
    times = (rows[-1].measured or 0.0) / (rows[0].measured or 1.0)
    rows.append(Row(BATCHING, rows[-1].case, RATE_OVER_ONE, "1", times))
    return [*rows, claim(BATCHING, {}, "batch serving improves the throughput", times > 1)]


def line_rows(engine: str, answers: Sequence[Observation]) -> list[Row]:
    """Fig. 5: the median time of each length, and the straight line through them."""
    tokens = np.array(sorted({answer.tokens for answer in answers}))
    seconds = np.array([median([one.seconds for one in answers if one.tokens == length]) for length in tokens])
    slope_s, besides_s, share = straight_line(tokens, seconds)
    case = {"engine": engine}
    return [
        Row.of_curve(LINEAR, case, "time of an answer", "s", "tokens", tokens, seconds),
        Row(LINEAR, case, SLOPE, "ms", 1e3 * slope_s),
        Row(LINEAR, case, BESIDES, "ms", 1e3 * besides_s),
        Row(LINEAR, case, R_SQUARED, "1", share),
        claim(LINEAR, case, IS_LINEAR, share >= LINEAR_FROM, f"R² of {LINEAR_FROM:g} or more"),
    ]


def gain_rows(effort: Effort, runs: dict[str, list[BenchRun]], cost: np.poly1d) -> list[Row]:
    """Fig. 7 and 11: each gain beside the gain that the observed lengths imply."""
    results = {result["arrangement"]: result for result in throughput.rows(runs, cost)}
    rows = [Row(ORACLE, {"k": 1}, RATE, "1/s", results[BASELINE.name]["tokens_per_s"])]
    gains: dict[str, list[float]] = {ORACLE: [], PREDICTED: []}
    for figure, bins in [
        *((ORACLE, bins) for bins in effort.oracle),
        *((PREDICTED, bins) for bins in effort.predicted),
    ]:
        result = results[_arrangement(figure, bins).name]
        gain, implied, note = result["gain"], result["gain_implied"], _published(figure, bins)
        gains[figure].append(gain)
        rows.append(Row(figure, {"k": bins}, GAIN, "1", gain, implied, IMPLIED_WITHIN, note=note, kind="derived"))
    if len(gains[ORACLE]) > 1:
        rows.append(claim(ORACLE, {}, RISING, gains[ORACLE] == sorted(gains[ORACLE])))
    rows.append(claim(PREDICTED, {}, "bins by a predictor improve the throughput", min(gains[PREDICTED]) > 1))
    return rows


def people_rows() -> Iterator[Row]:
    """Yield the gains that the lengths of large models' answers to people imply, from docs/results/prediction.md."""
    gains = json.loads(MEASURED.read_text(encoding="utf-8"))["gains"]
    for figure, name in ((ORACLE, "oracle"), (PREDICTED, "predictor, bins by median")):
        for bins, gain in gains[name][str(BATCH)].items():
            note = _published(figure, int(bins))
            yield Row(figure, {"prompts": "people's", "k": int(bins)}, IMPLIED, "1", gain, note=note)


def _arrangement(figure: str, bins: int) -> Arrangement:
    return Arrangement("barrier", bins, HOW[figure])


def _published(figure: str, bins: int) -> str:
    gain = PUBLISHED[figure].get(bins)
    return "" if gain is None else f"the paper: {gain:g} ({MODELS[figure]})"
