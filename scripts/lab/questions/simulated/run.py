"""How far simulated requests are from those of the real vLLM, where prompts share prefixes and memory is short.

    python scripts/lab simulated --vllm-python .venv-vllm/bin/python --output docs/results/simulated.json
    python scripts/lab simulated --report --output docs/results/simulated.json

One vLLM server on the CPU (the demo model, float32, prefix caching, a KV cache of --cache-blocks blocks of 32 tokens)
serves two worlds of conversations over shared prefixes, one after the other; a conversation's next request comes when
the one before has been answered and a pause is over. Prompts are token ids, and go on with the tokens that were really
answered. From the first world the costs of the engine are fitted (fit.py); the simulator then runs the second world,
and its hits and latencies are put beside the measured ones. The first 15 % of the conversations are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np
from kit import client
from kit.arguments import parser_of
from kit.client import MODEL
from kit.progress import log
from kit.results import day_and_machine, rounded, write_json
from kit.servers import vllm
from kit.studies import add_report, measure_or_report
from kit.tables import show

from llmserve.live.journal import Header
from llmserve.request import EngineInfo
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.kv_engine import KVEngine, KVLimits
from llmserve.simulation.programs import UNCOUNTED, ProgramLoop, SessionOf, StepOf, TurnOf, World
from questions.simulated.fit import Answer, fitted
from questions.vllm.engines import kept_off_the_first_core, move_engine_to_the_first_core

BLOCK_TOKENS = 32  # the smallest of vLLM on a CPU
CONTEXT_TOKENS = 4_096  # more than any conversation has
SLOTS, STEP_TOKENS = 8, 512
PREFIXES = 20
IDS = (100, 1_800)  # token ids that prompts are drawn from
STRAIGHT = 10**6
FIGURES = ("hit_rate", "latency_s_mean", "latency_s_p50", "latency_s_p95", "first_s_mean")


def conversations(requests: int, rate_per_s: float, rng: np.random.Generator) -> list[SessionOf]:
    """Conversations of 8 turns over shared prefixes of 200 to 500 tokens; Poisson, of so many requests a second."""
    count = math.ceil(requests / 8)
    begins_s = np.cumsum(rng.exponential(8 / rate_per_s, count))
    sizes = rng.integers(200, 500, PREFIXES).tolist()
    sessions = []
    for number, begin_s in enumerate(begins_s.tolist()):
        prefix = int(rng.integers(PREFIXES))
        turns = [
            TurnOf(
                (StepOf(int(rng.integers(20, 90)), int(min(120, max(2, rng.lognormal(3.5, 0.6))))),),
                float(rng.exponential(2.0)),
            )
            for _ in range(8)
        ]
        sessions.append(SessionOf(f"c{number}", f"prefix {prefix}", sizes[prefix], tuple(turns), begin_s))
    return sessions


# ---- the real one ---------------------------------------------------------------------------------------------------


async def converse(
    session: aiohttp.ClientSession, url: str, told: SessionOf, ids: list[int], rng: np.random.Generator, begun_s: float
) -> list[Answer]:
    """Ask for the turns of a conversation, one after the other. ids : of the shared prefix"""
    answers = []
    await asyncio.sleep(max(0.0, begun_s + told.arrival_s - time.perf_counter()))
    for number, turn in enumerate(told.turns):
        if number:
            await asyncio.sleep(turn.gap_s)
        (step,) = turn.steps
        ids = [*ids, *rng.integers(*IDS, step.new_tokens).tolist()]
        answer = await ask(session, url, ids, step.output_tokens)
        ids = [*ids, *answer.ids]
        answers.append(answer)
    return answers


async def ask(session: aiohttp.ClientSession, url: str, ids: Sequence[int], tokens: int) -> Answer:
    body = {
        "model": MODEL,
        "prompt": list(ids),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer = Answer(time.perf_counter(), len(ids))
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "choices" in event, event
            for choice in event["choices"]:
                fresh = choice.get("token_ids") or []
                answer.ids += fresh
                answer.times_s += [time.perf_counter()] * len(fresh)
            if usage := event.get("usage"):
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    answer.ended_s = time.perf_counter()
    assert len(answer.ids) == tokens, f"{len(answer.ids)} tokens of {tokens}"
    return answer


async def measured(url: str, sessions: Sequence[SessionOf], seed: int) -> list[list[Answer]]:
    """The answers of each conversation. seed : of the token ids, unlike all others, so that nothing is cached yet"""
    rng = np.random.default_rng([seed, 1])
    shared = {one.kind: rng.integers(*IDS, one.shared_tokens).tolist() for one in sessions}
    async with client.session_of(600.0) as session:
        begun_s = time.perf_counter() + 0.1
        return list(
            await asyncio.gather(
                *[
                    converse(session, url, told, shared[told.kind], np.random.default_rng([seed, 2, number]), begun_s)
                    for number, told in enumerate(sessions)
                ]
            )
        )


def figures_of(answers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    counted = [answer for own in answers[math.ceil(UNCOUNTED * len(answers)) :] for answer in own]
    return figures(
        [answer.ended_s - answer.asked_s for answer in counted],
        [answer.times_s[0] - answer.asked_s for answer in counted],
        sum(answer.cached_tokens for answer in counted) / sum(answer.prompt_tokens for answer in counted),
    )


def figures(latencies_s: Sequence[float], first_s: Sequence[float], hit_rate: float) -> dict[str, float]:
    p50, p95 = np.percentile(latencies_s, (50, 95)).tolist()
    values = (hit_rate, float(np.mean(latencies_s)), p50, p95, float(np.mean(first_s)))
    return dict(zip(FIGURES, values, strict=True))


# ---- the simulated one ----------------------------------------------------------------------------------------------


def simulated(sessions: Sequence[SessionOf], costs: Costs, cache_blocks: int) -> dict[str, float]:
    """The same figures, by the simulator: each request goes straight to the engine."""
    world = World(sessions)
    trace = world.trace()
    limits = KVLimits(cache_blocks * BLOCK_TOKENS, STEP_TOKENS, SLOTS, BLOCK_TOKENS)
    info = EngineInfo("simulated", SLOTS, False, STRAIGHT)
    requests = [request for _, request in workload.requests(trace, None)]
    loop = ProgramLoop(world, requests, named=False)
    engine = KVEngine(
        info, trace.output_tokens.tolist(), costs, limits, texts=trace.texts, on_first_token=loop.note_first_token
    )
    scheduler = Header(SchedulingConfig(order="fffs").resolved(False)).scheduler()
    cluster = SimulatedCluster(scheduler, [engine], on_step=loop)
    cluster.begin()
    loop.begin(cluster.arrive_later)
    cluster.advance(math.inf)
    outcome = loop.outcome()
    return figures(outcome.turns_s, outcome.turn_first_s, outcome.hit_rate or 0.0)


# ---- both -----------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--num-gpu-blocks-override", str(args.cache_blocks), "--max-num-batched-tokens", str(STEP_TOKENS)]
    flags += ["--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT_TOKENS})]
    worlds = [
        conversations(args.requests, args.rate, np.random.default_rng([args.seed, number])) for number in range(2)
    ]
    first_core = min(os.sched_getaffinity(0))
    with kept_off_the_first_core(True):
        async with vllm(args.vllm_python, "vLLM", SLOTS, *flags, context_tokens=CONTEXT_TOKENS) as server:
            move_engine_to_the_first_core(server, first_core)
            await measured(server.url, worlds[0][:4], args.seed + 7)  # the first answers of a fresh server are slow
            real = []
            for number, sessions in enumerate(worlds):
                real.append(await measured(server.url, sessions, args.seed + number))
                log(f"world {number}: {figures_of(real[-1])}")
    costs = fitted(real[0], SLOTS)
    rows = [
        {
            "world": name,
            "measured": figures_of(answers),
            "simulated": simulated(sessions, costs, args.cache_blocks),
        }
        for name, sessions, answers in zip(("fitted to", "judged by"), worlds, real, strict=True)
    ]
    setting = {name: getattr(args, name) for name in ("requests", "rate", "cache_blocks", "seed")}
    result = {**day_and_machine(), **setting, "costs": costs_record(costs), "rows": rows}
    result = dict(rounded(result))
    write_json(args.output, result)
    return result


def costs_record(costs: Costs) -> dict[str, float]:
    names = ("prefill_s", "prefill_s_per_token", "prefill_s_per_context_token", "step_s_per_context_token")
    slope_s = costs.step_s[2] - costs.step_s[1]
    return {"step_s": costs.step_s[0], "step_s_per_sequence": slope_s, **{name: getattr(costs, name) for name in names}}


def print_report(result: Mapping[str, Any]) -> None:
    lines = []
    for row in result["rows"]:
        for name in FIGURES:
            real, model = row["measured"][name], row["simulated"][name]
            off = f"{100 * (model - real):+.1f} points" if name == "hit_rate" else f"{model / real - 1:+.1%}"
            lines.append([row["world"], name, f"{real:.3f}", f"{model:.3f}", off])
    show("simulated beside vLLM", ("world", "", "measured", "simulated", "off by"), lines, left=("world", ""))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--requests", type=int, default=500, help="of each world (%(default)s)")
    add("--rate", type=float, default=8.0, help="requests a second, if nothing waited (%(default)s)")
    add("--cache-blocks", type=int, default=500, help="of 32 tokens (%(default)s)")
    add("--seed", type=int, default=2031)
    add_report(parser)
    measure_or_report(parser, parser.parse_args(), measure, print_report, "vllm_python")


if __name__ == "__main__":
    main()
