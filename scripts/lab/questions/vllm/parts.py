"""All parts except the part with the killed server."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from kit import client
from kit.client import get_text
from kit.progress import log
from kit.results import in_turn, read_parts
from kit.rows import Row, group, median

from llmserve.simulation.trace_files import read_rows
from questions.vllm.arrangements import AHEAD, DIRECT, PARTS, Arrangement, arrangements_of, with_those_before
from questions.vllm.engines import Engines, capacity_per_s, front
from questions.vllm.loads import Load, draw_predictions, nearest_indices, poisson_arrivals_s
from questions.vllm.passes import (
    ANSWER_S_MAX,
    Outcome,
    Question,
    all_at_once,
    ask,
    questions_of,
    rows,
    send,
    session_of,
    summary,
)

REQUESTS = {"idle": 200, "barrier": 400, "memory": 400, "own": 400, "kill": 500}  # of a pass; else REQUESTS_LOAD
REQUESTS_LOAD = 600
ROUNDS = {"idle": 1, "barrier": 3, "memory": 3, "own": 3, "kill": 1}  # else ROUNDS_LOAD
ROUNDS_LOAD = 5
LOADS = {"poisson-0.7": 0.7, "poisson-0.9": 0.9, "trace": 0.9, "routers": 0.9}  # of capacity
LOADS |= {part: float(part.removeprefix("ahead-")) for part in AHEAD}
IDLE_TOKENS = 16
WARM_UP_REQUESTS = 16
PREEMPTIONS, STEPS = [
    re.compile(rf"^vllm:{name}\{{.*\}} (\S+)$", re.M)
    for name in ("num_preemptions_total", "iteration_tokens_total_count")
]


def requests_of(args: argparse.Namespace, part: str) -> int:
    return int(args.requests or REQUESTS.get(part, REQUESTS_LOAD))


def prompts_of(args: argparse.Namespace, part: str) -> int:
    """Number of prompts that a part needs: own forecasts learn from as many others."""
    return requests_of(args, part) * (2 if part == "own" else 1)


def rounds_of(args: argparse.Namespace, part: str) -> int:
    return int(args.rounds or ROUNDS.get(part, ROUNDS_LOAD))


def earlier_rounds(args: argparse.Namespace, part: str, names: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Rows of the rounds, and of their passes, to which --more adds. names : of the arrangements

    Raises ValueError when they had other arrangements, requests or draws.
    """
    section = read_parts(args.output).get(part) if args.more else None
    if section is None:
        return [], []
    loads, passes = section.get("loads", []), section["passes"]
    if (list(passes), section["requests"], section["seed"]) != (list(names), requests_of(args, part), args.seed):
        raise ValueError(f"{part} of {args.output} had other arrangements, requests or another seed")
    if not loads:
        raise ValueError(f"{part} of {args.output} does not have the loads of its rounds")
    return (
        [Row({"round": number}, load) for number, load in enumerate(loads)],
        [
            Row({"arrangement": name, "round": number}, numbers)
            for name, own in passes.items()
            for number, numbers in enumerate(own)
        ],
    )


async def take_turns(
    args: argparse.Namespace,
    part: str,
    engines: Engines,
    make: Callable[[np.random.Generator], Load],
    timed: Callable[[Load, float, np.random.Generator], Load] | None = None,
) -> dict[str, Any]:
    """Run the arrangements of a part on the same load, in turn, round after round.

    make   returns the load of a round
    timed  sets the arrivals of a load, from the requests per second of the engines; None: all requests come at once
    """
    arrangements, count = arrangements_of(part, args.orders, args.ways), rounds_of(args, part)
    arrangements = with_those_before(arrangements) if args.before else arrangements
    loads, passes = earlier_rounds(args, part, [arrangement.name for arrangement in arrangements])
    count += len(loads)
    for number in range(len(loads), count):
        rng = np.random.default_rng([args.seed, PARTS.index(part), number])
        load, capacity = make(rng), None
        if timed is not None:
            capacity = await capacity_per_s(engines, load)
            load = timed(load, capacity, rng)
            log(f"{part} round {number + 1}/{count}: vLLM's capacity is {capacity:.2f} requests/s")
        mean_tokens = float(load.tokens.mean())
        loads.append(Row({"round": number}, {"mean_tokens": mean_tokens, "capacity": capacity, **load.taus}))
        for arrangement in in_turn(arrangements, number):
            outcomes, counted = await one_pass(args, arrangement, engines, load, burst=timed is None)
            numbers = summary(outcomes, load, engines.service) | counted
            passes.append(Row({"arrangement": arrangement.name, "round": number}, numbers))
            log(f"{part} round {number + 1}/{count}: {arrangement.name}: {in_words(numbers)}")
    section = {
        "rounds": count,
        "mean_tokens": round(median(loads, "mean_tokens"), 1),
        "kendall_tau": {kind: round(median(loads, kind), 3) for kind in load.taus},
        "loads": [row.numbers for row in loads],
        "rows": [{**row.record, "ratios": row.ratios} for row in rows(arrangements, passes)],
        "passes": {name: [row.numbers for row in own] for (name,), own in group(passes, "arrangement").items()},
    }
    return section if timed is None else section | {"capacity_requests_per_s": round(median(loads, "capacity"), 2)}


async def counters(engines: Engines) -> tuple[float, float]:
    """Preemptions and steps of the engines so far. A preempted request has left the cache, and is computed again."""
    async with session_of() as session:
        pages = [await get_text(session, f"{url}/metrics") for url in engines.urls]
    preemptions, steps = (
        sum(float(value) for page in pages for value in counter.findall(page)) for counter in (PREEMPTIONS, STEPS)
    )
    return preemptions, steps


async def one_pass(
    args: argparse.Namespace, arrangement: Arrangement, engines: Engines, load: Load, *, burst: bool
) -> tuple[list[Outcome], dict[str, float]]:
    """What came of the requests, and what the engines counted meanwhile."""
    if arrangement.own:
        return await _own_pass(args, arrangement, engines, load)
    async with front(args, arrangement, engines) as url:
        await _warm_up(engines, url)
        return await _counted(engines, url, questions_of(arrangement, load, engines.service, burst=burst))


async def _counted(engines: Engines, url: str, questions: Sequence[Question]) -> tuple[list[Outcome], dict[str, float]]:
    before = await counters(engines)
    outcomes = await send([url] * len(questions), questions)
    preemptions, steps = (now - then for now, then in zip(await counters(engines), before, strict=True))
    tokens = sum(outcome.tokens for outcome in outcomes)
    return outcomes, {"preemptions": preemptions, "tokens_per_step": tokens / max(1.0, steps)}


async def _warm_up(engines: Engines, url: str) -> None:
    prompts = engines.prompts[:WARM_UP_REQUESTS]
    await send([url] * len(prompts), all_at_once(prompts))


async def _own_pass(
    args: argparse.Namespace, arrangement: Arrangement, engines: Engines, load: Load
) -> tuple[list[Outcome], dict[str, float]]:
    """A burst to a server that forecasts by itself. Any but a cold one has the state of an earlier server, whose burst
    had as many other prompts, or the same. The requests that warm up the engine go directly to the engine, so that
    llmserve learns nothing from them.
    """
    count = len(load.prompts)
    earlier = {"warm": engines.prompts[count : 2 * count], "again": load.prompts}.get(arrangement.own)
    with TemporaryDirectory() as state:
        if earlier:
            async with front(args, arrangement, engines, Path(state)) as url:
                await send([url] * count, all_at_once(earlier))
        async with front(args, arrangement, engines, Path(state)) as url:
            await _warm_up(engines, engines.urls[0])
            return await _counted(engines, url, all_at_once(load.prompts))


ODD = ("dropped", "failed", "other_length", "preemptions")


def in_words(numbers: Mapping[str, float]) -> str:
    text = (
        f"{numbers['tokens_per_s']:,.0f} tokens/s, latency {numbers['latency_s_mean']:.2f} s mean, "
        f"{numbers['latency_s_p99']:.2f} s p99, slow-down {numbers['slowdown_mean']:.2f}"
    )
    odd = {name: int(numbers[name]) for name in ODD if numbers.get(name)}
    return text + "".join(f", {count} {name.replace('_', ' ')}" for name, count in odd.items())


def some_requests(engines: Engines, count: int) -> Callable[[np.random.Generator], Load]:
    """A function that returns a load of the first `count` prompts, in random order, all at once."""

    def make(rng: np.random.Generator) -> Load:
        order = rng.permutation(count)
        tokens = engines.tokens[order]
        return Load([engines.prompts[index] for index in order], tokens, np.zeros(count), draw_predictions(tokens, rng))

    return make


def at_poisson_times(share: float) -> Callable[[Load, float, np.random.Generator], Load]:
    def timed(load: Load, capacity: float, rng: np.random.Generator) -> Load:
        arrivals_s = poisson_arrivals_s(load.tokens.size, share * capacity, rng)
        return Load(load.prompts, load.tokens, arrivals_s, load.predictions)

    return timed


async def at_once_or_poisson(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    make = some_requests(engines, requests_of(args, part))
    return await take_turns(args, part, engines, make, at_poisson_times(LOADS[part]) if part in LOADS else None)


async def trace(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Each round replays another stretch of the trace."""
    recorded = read_rows(str(args.trace))
    all_arrivals_s, all_tokens = recorded.arrivals_s, recorded.output_tokens
    count = min(requests_of(args, part), all_tokens.size)
    factor = float(engines.tokens.max() / all_tokens.max())

    def make(rng: np.random.Generator) -> Load:
        start = int(rng.integers(all_tokens.size - count + 1))
        chosen = nearest_indices(factor * all_tokens[start : start + count], engines.tokens, rng)
        tokens = engines.tokens[chosen]
        arrivals_s = all_arrivals_s[start : start + count] - all_arrivals_s[start]
        return Load([engines.prompts[index] for index in chosen], tokens, arrivals_s, draw_predictions(tokens, rng))

    def timed(load: Load, capacity: float, rng: np.random.Generator) -> Load:
        # The mean rate of the stretch is scaled to the part's load; the shape of the arrivals stays.
        scale = load.tokens.size / (LOADS[part] * capacity) / load.arrivals_s[-1]
        return Load(load.prompts, load.tokens, scale * load.arrivals_s, load.predictions)

    section = await take_turns(args, part, engines, make, timed)
    return {"trace": args.trace.name, "length_factor": round(factor, 3), **section}


async def idle(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Pairs of requests, one through llmserve and one directly to vLLM, in turn."""
    pairs = requests_of(args, part)
    near = np.argsort(np.abs(engines.tokens - IDLE_TOKENS), kind="stable")[:16]
    ways = arrangements_of(part, args.orders)
    outcomes: dict[str, list[Outcome]] = {arrangement.name: [] for arrangement in ways}
    async with (
        front(args, ways[1], engines) as through,
        client.session_of(ANSWER_S_MAX) as session,  # keeps one connection to each side, which is cheapest for both
    ):
        urls = {DIRECT.name: engines.urls[0], ways[1].name: through}
        warm_up = 10
        for number in range(warm_up + pairs):
            question = all_at_once([engines.prompts[near[number % near.size]]])[0]
            for name in sorted(urls, reverse=bool(number % 2)):
                outcome = await ask(session, urls[name], question, time.perf_counter())
                if outcome.failure:
                    raise RuntimeError(f"{name}: {outcome.failure}")
                if number >= warm_up:
                    outcomes[name].append(outcome)
    direct, llmserve = [_idle_row(name, own) for name, own in outcomes.items()]
    latency_ms, first_ms = [
        round(llmserve[name] - direct[name], 3) for name in ("latency_ms_p50", "first_token_ms_p50")
    ]
    log(f"idle: {latency_ms:.2f} ms added, {first_ms:.2f} ms to the first token")
    section = {"tokens": int(np.median(engines.tokens[near])), "rows": [direct.record, llmserve.record]}
    return {**section, "added_latency_ms": latency_ms, "added_first_token_ms": first_ms}


def _idle_row(name: str, outcomes: Sequence[Outcome]) -> Row:
    times_s = {"latency_ms": [o.latency_s for o in outcomes], "first_token_ms": [o.first_s for o in outcomes]}
    percentiles = {
        f"{quantity}_p{q}": round(1e3 * float(np.percentile(values, q)), 3)
        for quantity, values in times_s.items()
        for q in (50, 95)
    }
    return Row({"arrangement": name}, percentiles)
