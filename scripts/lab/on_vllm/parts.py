"""The parts, but that of the killed server."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bench import client
from bench.client import get_text
from bench.progress import log
from bench.results import in_turn

from on_vllm.arrangements import DIRECT, PARTS, Arrangement, arrangements_of
from on_vllm.engines import Engines, capacity_per_s, front
from on_vllm.loads import Load, nearest_indices, poisson_arrivals_s, predictions, read_trace
from on_vllm.passes import ANSWER_S_MAX, Outcome, all_at_once, ask, questions_of, rows, send, session_of, summary

REQUESTS = {"idle": 200, "barrier": 400, "memory": 400, "kill": 500}  # of a pass; else REQUESTS_LOAD
REQUESTS_LOAD = 600
ROUNDS = {"idle": 1, "barrier": 3, "memory": 3, "kill": 1}  # else ROUNDS_LOAD
ROUNDS_LOAD = 5
LOADS = {"poisson-0.7": 0.7, "poisson-0.9": 0.9, "trace": 0.9, "routers": 0.9}  # of capacity
IDLE_TOKENS = 16
WARM_UP_REQUESTS = 16
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{.*\} (\S+)$", re.M)


def requests_of(args: argparse.Namespace, part: str) -> int:
    return int(args.requests or REQUESTS.get(part, REQUESTS_LOAD))


def rounds_of(args: argparse.Namespace, part: str) -> int:
    return int(args.rounds or ROUNDS.get(part, ROUNDS_LOAD))


@dataclass
class Rounds:
    """A part in the making: what each pass has shown, by arrangement; and of each round's load what it was like."""

    arrangements: list[Arrangement]
    shown: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    taus: list[dict[str, float]] = field(default_factory=list)
    mean_tokens: list[float] = field(default_factory=list)
    capacity_per_s: list[float] = field(default_factory=list)

    def section(self) -> dict[str, Any]:
        taus = {kind: statistics.median(these[kind] for these in self.taus) for kind in self.taus[0]}
        found: dict[str, Any] = {
            "mean_tokens": round(statistics.median(self.mean_tokens), 1),
            "kendall_tau": {kind: round(tau, 3) for kind, tau in taus.items()},
            "rows": rows(self.arrangements, self.shown),
            "passes": self.shown,
        }
        if self.capacity_per_s:
            found["capacity_requests_per_s"] = round(statistics.median(self.capacity_per_s), 2)
        return found


async def take_turns(
    args: argparse.Namespace,
    part: str,
    engines: Engines,
    make: Callable[[np.random.Generator], Load],
    timed: Callable[[Load, float, np.random.Generator], Load] | None = None,
) -> dict[str, Any]:
    """Round after round, the arrangements of a part over the same load.

    make : the requests of a round.  timed : gives them their arrivals, from the requests a second that engines can do;
    without it all come at once.
    """
    these = Rounds(arrangements_of(part, args.orders))
    count = rounds_of(args, part)
    for number in range(count):
        rng = np.random.default_rng([args.seed, PARTS.index(part), number])
        load = make(rng)
        if timed is not None:
            capacity = await capacity_per_s(engines, load)
            these.capacity_per_s.append(capacity)
            load = timed(load, capacity, rng)
            log(f"{part} round {number + 1}/{count}: vLLM's capacity is {capacity:.2f} requests/s")
        these.taus.append(load.taus)
        these.mean_tokens.append(float(load.tokens.mean()))
        for arrangement in in_turn(these.arrangements, number):
            before = await preemptions(engines)
            outcomes = await one_pass(args, arrangement, engines, load, burst=timed is None)
            found = summary(outcomes, load, engines.service) | {"preemptions": await preemptions(engines) - before}
            these.shown.setdefault(arrangement.name, []).append(found)
            log(f"{part} round {number + 1}/{count}: {arrangement.name}: {in_words(found)}")
    return these.section()


async def preemptions(engines: Engines) -> float:
    """Times so far that vLLM has evicted a request from its cache, to compute it again later."""
    count = 0.0
    async with session_of() as session:
        for url in engines.urls:
            found = PREEMPTIONS.findall(await get_text(session, f"{url}/metrics"))
            count += sum(float(number) for number in found)
    return count


async def one_pass(
    args: argparse.Namespace, arrangement: Arrangement, engines: Engines, load: Load, *, burst: bool
) -> list[Outcome]:
    async with front(args, arrangement, engines) as url:
        some = engines.prompts[:WARM_UP_REQUESTS]
        await send([url] * len(some), all_at_once(some))
        return await send([url] * len(load.prompts), questions_of(arrangement, load, engines.service, burst=burst))


def in_words(found: Mapping[str, float]) -> str:
    text = (
        f"{found['tokens_per_s']:,.0f} tokens/s, latency {found['latency_s_mean']:.2f} s mean, "
        f"{found['latency_s_p99']:.2f} s p99, slow-down {found['slowdown_mean']:.2f}"
    )
    odd = {name: int(found[name]) for name in ("dropped", "failed", "other_length", "preemptions") if found[name]}
    return text + "".join(f", {count} {name.replace('_', ' ')}" for name, count in odd.items())


def some_requests(engines: Engines, count: int) -> Callable[[np.random.Generator], Load]:
    """Makes loads of the first `count` prompts, in another order each time, all arriving at once."""

    def make(rng: np.random.Generator) -> Load:
        order = rng.permutation(count)
        tokens = engines.tokens[order]
        return Load([engines.prompts[index] for index in order], tokens, np.zeros(count), predictions(tokens, rng))

    return make


def at_poisson_times(share: float) -> Callable[[Load, float, np.random.Generator], Load]:
    def timed(load: Load, capacity: float, rng: np.random.Generator) -> Load:
        arrivals_s = poisson_arrivals_s(load.tokens.size, share * capacity, rng)
        return Load(load.prompts, load.tokens, arrivals_s, load.told)

    return timed


async def at_once_or_poisson(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    make = some_requests(engines, requests_of(args, part))
    return await take_turns(args, part, engines, make, at_poisson_times(LOADS[part]) if part in LOADS else None)


async def trace(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Each round another stretch of the trace."""
    all_arrivals_s, all_tokens = read_trace(args.trace)
    count = min(requests_of(args, part), all_tokens.size)
    factor = float(engines.tokens.max() / all_tokens.max())

    def make(rng: np.random.Generator) -> Load:
        start = int(rng.integers(all_tokens.size - count + 1))
        chosen = nearest_indices(factor * all_tokens[start : start + count], engines.tokens, rng)
        tokens = engines.tokens[chosen]
        arrivals_s = all_arrivals_s[start : start + count] - all_arrivals_s[start]
        return Load([engines.prompts[index] for index in chosen], tokens, arrivals_s, predictions(tokens, rng))

    def timed(load: Load, capacity: float, rng: np.random.Generator) -> Load:
        # The stretch's own mean rate becomes the wanted one; the shape of its arrivals stays.
        scale = load.tokens.size / (LOADS[part] * capacity) / load.arrivals_s[-1]
        return Load(load.prompts, load.tokens, scale * load.arrivals_s, load.told)

    found = await take_turns(args, part, engines, make, timed)
    return {"trace": args.trace.name, "length_factor": round(factor, 3), **found}


async def idle(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Pairs of one request through llmserve and one to vLLM, in turns."""
    pairs = requests_of(args, part)
    near = np.argsort(np.abs(engines.tokens - IDLE_TOKENS), kind="stable")[:16]
    ways = arrangements_of(part, args.orders)
    seen: dict[str, list[Outcome]] = {arrangement.name: [] for arrangement in ways}
    async with (
        front(args, ways[1], engines) as through,
        client.session_of(ANSWER_S_MAX) as session,  # one connection to each side, kept: the cheapest for both
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
                    seen[name].append(outcome)
    found: dict[str, Any] = {"tokens": int(np.median(engines.tokens[near])), "rows": []}
    for name, outcomes in seen.items():
        row: dict[str, Any] = {"arrangement": name}
        for what, values in (
            ("latency_ms", [outcome.latency_s for outcome in outcomes]),
            ("first_token_ms", [outcome.first_s for outcome in outcomes]),
        ):
            row |= {f"{what}_{f'p{q}'}": round(1e3 * float(np.percentile(values, q)), 3) for q in (50, 95)}
        found["rows"].append(row)
    direct, llmserve = found["rows"]
    found["added_latency_ms"] = round(llmserve["latency_ms_p50"] - direct["latency_ms_p50"], 3)
    found["added_first_token_ms"] = round(llmserve["first_token_ms_p50"] - direct["first_token_ms_p50"], 3)
    log(f"idle: {found['added_latency_ms']:.2f} ms added, {found['added_first_token_ms']:.2f} ms to the first token")
    return found
