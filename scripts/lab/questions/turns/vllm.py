"""Turns of agents before the real vLLM whose KV cache is short, beside the simulator's forecast of them.

    python scripts/lab turns.vllm --vllm-python .venv-vllm/bin/python --cell short --seed 1 \\
        --output docs/results/turns-vllm.json
    python scripts/lab turns.vllm --report --output docs/results/turns-vllm.json

The script starts vLLM on the CPU (the demo model, float32, prefix caching, blocks of 32 tokens, as many of them as the
cell says) and lets the sessions of a world ask it (make/programs.py, with the shape SMALL): contexts of some hundred to
3,800 tokens, tools that are sleeps. Answers have the world's lengths, and a parser of the laboratory (tool_parser.py)
makes them call the world's tools. Agents send the id of their session, as coding agents do.

    direct    the sessions ask vLLM itself
    arrival   llmserve that admits whole programs by memory in order of arrival, held over tool calls without end
    llmserve  the default
    router    vllm-router with its own scheduling of programs (--router)

All get the same sessions at the same times, one after the other; each seed begins with another one. Sessions come at
--load of the rate that vLLM serves warm: as many sessions side by side, without pauses, as its cache holds with room.
The script measures this rate first, and what tokens cost alone. From both follows what a step takes more for each
further sequence; with these costs the simulator runs the same world.

A cell and a seed are one run, whose rows replace those of an earlier run in --output. The times of turns are from a
person's message to the last answer, tools included; the first 15 % of the sessions do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from kit import client
from kit.arguments import parser_of, positive
from kit.progress import log
from kit.results import day_and_machine, in_turn, read_parts, rounded, write_json
from kit.rows import Row, group, select
from kit.servers import Server, front_end, of_lab, running, vllm
from kit.studies import run
from kit.tables import markdown
from make.programs import Drawing, Shape

from bins.curve import Curve
from bins.profile import Profile
from llmserve.engines.process import free_ports
from llmserve.scheduling.programs.programs import Programs
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.program_run import run_programs
from llmserve.simulation.programs import Outcome, SessionOf, World
from llmserve.simulation.scenario import Scenario
from questions.turns.agents import Agents, Texts, ask
from questions.turns.run import QUANTITIES, over, policy_of
from questions.vllm.engines import kept_off_the_first_core, move_engine_to_the_first_core

DIRECT, ARRIVAL, LLMSERVE, ROUTER = "direct", "arrival", "llmserve", "router"
ARRANGEMENTS = (DIRECT, ARRIVAL, LLMSERVE)
SMALL = Shape(
    shared=(400, 600, 880, 1_200),
    first=(320, 0.9),
    new=(20, 1.0),
    output=(16, 0.8),
    context_max=3_700,
    compacted=400,
    steps=(3, 0.9),
    gap_s=(3.0, 1.2),
    gap_max_s=10.0,
    tools_s=((0.02, 1.0), (0.1, 1.2), (3.0, 0.8)),
    chat_shared=24,
    chat=(24, 0.8),
    chat_output=(32, 0.8),
)
BLOCK_TOKENS = 32  # the smallest of vLLM on a CPU
CONTEXT_TOKENS = 4_096
STEP_TOKENS = 2_048
SLOTS = 16
CELLS = {"short": 8_640, "ample": 20_000, "double": 24_960}  # tokens of the KV cache
WARM_SHARE = 0.6  # of the cache that the sessions fill that run side by side
WARM_S = 20.0
CASE = ("cell", "seed", "arrangement")
TEMPLATE = (  # the demo model's, which leaves the spaces around a text as they are
    "{%- for message in messages -%}<|{{ message['role'] if message['role'] in ['user', 'assistant'] else 'system' }}|>"
    "{{ message['content'] }}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
PLUGIN = Path(__file__).with_name("tool_parser.py")


@dataclass(frozen=True)
class Costs:
    """What vLLM takes. prefill_s_per_token : of a prompt that it has not cached.  step_s : of one that decodes

    sequence_s : more of a step, for each further one that decodes
    """

    prefill_s_per_token: float
    step_s: float
    sequence_s: float = 0.0

    def with_rate(self, sessions: Sequence[SessionOf], count: int, requests_per_s: float) -> Costs:
        """With the time of a step that gives this rate, of so many sessions side by side whose prefixes are cached."""
        steps = [(new, answered) for one in sessions for _, new, answered, _ in contexts(one)]
        new, answered = (statistics.fmean(tokens) for tokens in zip(*steps, strict=True))
        step_s = count * (1 / requests_per_s - new * self.prefill_s_per_token) / answered
        sequence_s = (step_s - self.step_s) / (count - 1) if count > 1 else 0.0
        return replace(self, sequence_s=min(max(0.0, sequence_s), self.step_s))


def world(sessions: int, seed: int) -> tuple[SessionOf, ...]:
    """Sessions of agents, and as many chats, one a second in the mean."""
    drawn = Drawing(seed, 0.0, SMALL).world(sessions, sessions, 1.0)
    return tuple([msgspec.convert(one, SessionOf) for one in drawn])


@asynccontextmanager
async def engine(python: str, kv_tokens: int) -> AsyncIterator[Server]:
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--num-gpu-blocks-override", str(kv_tokens // BLOCK_TOKENS)]
    flags += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    flags += ["--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT_TOKENS})]
    flags += [
        "--chat-template",
        TEMPLATE,
        "--tool-parser-plugin",
        str(PLUGIN),
        "--tool-call-parser",
        "laboratory",
        "--enable-auto-tool-choice",
    ]
    first_core = min(os.sched_getaffinity(0))
    with kept_off_the_first_core((os.cpu_count() or 1) > 1):
        async with vllm(python, "vLLM", SLOTS, *flags, context_tokens=CONTEXT_TOKENS) as server:
            if (os.cpu_count() or 1) > 1:
                move_engine_to_the_first_core(server, first_core)
            yield server


@asynccontextmanager
async def reached(
    arrangement: str, url: str, kv_tokens: int, costs: Costs, router: str | None, journal: Path | None = None
) -> AsyncIterator[str]:
    """The URL that the sessions of an arrangement ask. A server in front has learnt nothing. journal : of llmserve"""
    if arrangement == DIRECT:
        yield url
        return
    flags = ["--log-level", "warning", "--slots", str(SLOTS), "--engine", url]
    if journal is not None:
        flags += ["--journal", str(journal)]
    if arrangement == LLMSERVE:
        async with front_end(arrangement, *flags) as server:
            yield server.url
    elif arrangement == ARRIVAL:
        command = of_lab("turns.by_arrival", "serve", *flags)
        async with running("llmserve, by arrival", command, ready="/ready") as server:
            yield server.url
    else:
        assert router is not None
        words = [router, "--host", "127.0.0.1", "--policy", "consistent_hash", "--log-level", "warning"]
        words += ["--prometheus-port", str(free_ports(1)[0]), "--enable-program-scheduling"]
        words += ["--program-scheduling-config-json", json.dumps(router_settings(kv_tokens, costs))]

        def command_of(port: int) -> list[str]:
            return [*words, "--port", str(port), "--worker-urls", url]

        async with running("vllm-router", command_of, ready="/health") as server:
            yield server.url


def router_settings(kv_tokens: int, costs: Costs) -> dict[str, Any]:
    """What vllm-router is told of the engine: its cache, and its costs as measured."""
    return {
        "program_scheduling_enable_key": "auto",
        "global_queue": True,
        "token_capacity_per_target": kv_tokens,
        "max_active_programs_per_target": SLOTS,
        "prefill_cost_model": {
            "intercept_seconds": costs.step_s,
            "linear_seconds_per_1k_tokens": 1_000 * costs.prefill_s_per_token,
            "quadratic_seconds_per_1k_tokens_squared": 0.0,
        },
        "decode_throughput_model": {
            "fixed_step_seconds": costs.step_s - costs.sequence_s,
            "batch_step_seconds_per_request": costs.sequence_s,
            "context_step_seconds_per_token": 0.0,
        },
    }


async def costs_of(url: str) -> Costs:
    """Medians over prompts that nobody has asked, one at a time."""
    texts, prefills_s, steps_s = Texts(0), [], []
    async with client.session_of(connections_kept=False) as session:
        for number in range(6):
            messages = [{"role": "user", "content": f"{number} {texts.of(1_500)}"}]
            begun_s = time.perf_counter()
            answer = await ask(session, url, messages, 40, texts.words())
            passed_s = time.perf_counter() - begun_s
            prefills_s.append(answer.first_s / (answer.prompt_tokens - answer.cached_tokens))
            steps_s.append((passed_s - answer.first_s) / 39)
    return Costs(statistics.median(prefills_s[1:]), statistics.median(steps_s[1:]))


# ---- what is to be expected ---------------------------------------------------------------------------------------


def contexts(one: SessionOf) -> Iterator[tuple[int, int, int, float]]:
    """(own tokens after the step, new, answered, seconds of the tool) of each step of a session."""
    own = 0
    for turn in one.turns:
        for step in turn.steps:
            own = (0 if step.compacted else own) + step.new_tokens + step.output_tokens
            yield own, step.new_tokens, step.output_tokens, step.tool_s


def working_set(sessions: Sequence[SessionOf], rate: float, costs: Costs) -> float:
    """Tokens of the programs that are on their way if nothing waits; a system prompt counts once."""
    token_s = 0.0
    for one in sessions:
        for own, new, answered, tool_s in contexts(one):
            token_s += own * (new * costs.prefill_s_per_token + answered * costs.step_s + tool_s)
    span_s = (sessions[-1].arrival_s - sessions[0].arrival_s) / rate
    return token_s / span_s + sum({one.kind: one.shared_tokens for one in sessions}.values())


def side_by_side(sessions: Sequence[SessionOf], kv_tokens: int) -> int:
    """How many sessions fill WARM_SHARE of the cache."""
    sizes = [one.shared_tokens + own for one in sessions for own, *_ in contexts(one)]
    return max(1, min(SLOTS, round(WARM_SHARE * kv_tokens / statistics.fmean(sizes))))


def simulated(
    sessions: Sequence[SessionOf],
    rate: float,
    kv_tokens: int,
    costs: Costs,
    arrangement: str,
    programs: Programs | None = None,
    shown_to: Callable[[World], None] | None = None,
) -> Outcome:
    """programs : None: the arrangement's own.  shown_to : gets all that will be asked"""
    straight = arrangement == DIRECT
    scheduling = SchedulingConfig(order="fffs" if straight else None).resolved(False)
    coming = [msgspec.structs.replace(one, arrival_s=one.arrival_s / rate) for one in sessions]
    profile = Profile.timed(
        "vllm",
        Curve.affine(costs.sequence_s, costs.step_s - costs.sequence_s),
        prefill_s_per_token=costs.prefill_s_per_token,
        source="Measured at the beginning of the run.",
    )
    with tempfile.TemporaryDirectory() as folder:
        file, engine_file = Path(folder, "programs.jsonl"), Path(folder, "engine.json")
        file.write_bytes(b"".join([msgspec.json.encode(one) + b"\n" for one in coming]))
        profile.save(engine_file)
        scenario = Scenario(
            programs=str(file),
            profile=str(engine_file),
            kv_tokens=kv_tokens,
            slots=SLOTS,
            step_tokens=STEP_TOKENS,
        )
        return run_programs(
            scenario,
            scheduling,
            straight=straight,
            named=not straight,
            programs=programs or policy_of(arrangement),
            mistakes=shown_to,
        )


# ---- a run --------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> None:
    kv_tokens, sessions = CELLS[args.cell], world(args.sessions, args.seed)
    requests = sum(len(turn.steps) for one in sessions for turn in one.turns)
    case = {"cell": args.cell, "seed": args.seed}
    async with engine(args.vllm_python, kv_tokens) as server:
        costs = await costs_of(server.url)
        count = side_by_side(sessions, kv_tokens)
        warm = Agents(server.url, sessions, args.seed, f"{args.seed}w", pause=0.0)
        requests_per_s = args.requests_per_s or await warm.side_by_side(count, WARM_S)
        costs = costs.with_rate(sessions, count, requests_per_s)
        rate = args.load * requests_per_s / (requests / len(sessions))
        setting = {
            "kv_tokens": kv_tokens,
            "ratio": kv_tokens / working_set(sessions, rate, costs),
            "load": args.load,
            "requests_per_s": requests_per_s,
            "prefill_s_per_token": costs.prefill_s_per_token,
            "step_s": costs.step_s,
            "sequence_s": costs.sequence_s,
            "sessions": args.sessions,
            "new_tokens_p50": SMALL.new[0],
            "output_tokens_p50": SMALL.output[0],
            "build_s_p50": SMALL.tools_s[-1][0],
            **day_and_machine(),
        }
        log(f"{count} sessions side by side: {requests_per_s:.1f} requests/s; {rounded(setting)}")
        order = in_turn(args.arrangements, args.seed)
        for arrangement in order:
            expected = (
                simulated(sessions, rate, kv_tokens, costs, arrangement).summary() if arrangement != ROUTER else {}
            )
            salt = f"{args.seed}{arrangement}"
            if args.journals:
                args.journals.mkdir(parents=True, exist_ok=True)
            journal = args.journals and args.journals / f"{args.cell}-{args.seed}-{arrangement}.jsonl"
            async with reached(arrangement, server.url, kv_tokens, costs, args.router, journal) as url:
                agents = Agents(url, sessions, args.seed, salt)
                begun_s = time.perf_counter()
                outcome = await agents.at_their_times(rate)
                passed_s = time.perf_counter() - begun_s
            numbers = {"turns": len(outcome.turns_s), "passed_s": passed_s, **outcome.summary()}
            numbers |= {f"simulated_{name}": expected.get(name) for name in QUANTITIES.values()}
            row = Row({**case, "arrangement": arrangement}, rounded({**numbers, **setting}))
            log(f"{arrangement}: {row.record}")
            save(args.output, row)


def save(path: Path | None, row: Row) -> None:
    """Put a row into a file of rows, in the place of an earlier one of its case."""
    rows = [each for each in rows_of(path) if each.case != row.case]
    order = {name: place for place, name in enumerate((*CELLS, *ARRANGEMENTS, ROUTER))}
    rows = sorted([*rows, row], key=lambda each: (order[each["cell"]], each["seed"], order[each["arrangement"]]))
    write_json(path, {"rows": [each.record for each in rows]})


def rows_of(path: Path | None) -> list[Row]:
    return [Row.of_record(record, CASE) for record in read_parts(path).get("rows", ())]


# ---- tables -------------------------------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A table of the seeds, and one of the ratios in the mean over the seeds."""
    head = ["cell, seed", "ratio", "arrangement", *QUANTITIES, "hits", "simulated: mean", "p99"]
    yield markdown(head, list(runs(rows)), right=True)
    yield markdown(
        ["cell", "arrangement", "over", "seeds", *QUANTITIES, "simulated: mean"], list(ratios(rows)), right=True
    )


def runs(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        figures = [f"{row[name]:.3g}" for name in QUANTITIES.values()]
        expected = [shown(row[f"simulated_{name}"]) for name in ("turn_s_mean", "turn_s_p99")]
        cell = f"{row['cell']}, {row['seed']}"
        yield [cell, f"{row['ratio']:.2f}", row["arrangement"], *figures, f"{row['hit_rate']:.2f}", *expected]


def ratios(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (cell,), own in group(rows, "cell").items():
        for arrangement in (ARRIVAL, LLMSERVE, ROUTER):
            for reference in (DIRECT, ARRIVAL):
                theirs = {row["seed"] for row in select(own, arrangement=reference)}
                ours = [row for row in select(own, arrangement=arrangement) if row["seed"] in theirs]
                if not ours or arrangement == reference:
                    continue
                ratio = partial(over, ours, select(own, arrangement=reference))
                figures = [f"{ratio(name):.2f}" for name in QUANTITIES.values()]
                expected = "" if arrangement == ROUTER else f"{ratio('simulated_turn_s_mean'):.2f}"
                yield [cell, arrangement, reference, str(len(ours)), *figures, expected]


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--router", help="the executable vllm-router")
    add("--cell", choices=CELLS, default="short", help="how much fits the KV cache (%(default)s)")
    add("--arrangements", nargs="+", choices=(*ARRANGEMENTS, ROUTER), default=list(ARRANGEMENTS))
    add("--seed", type=int, default=1)
    add("--sessions", type=int, default=135, help="of agents, and as many chats (%(default)s)")
    add("--load", type=positive, default=0.95, help="of the rate that vLLM serves warm (%(default)s)")
    add("--requests-per-s", type=positive, help="that rate, as an earlier run has measured it")
    add("--journals", type=Path, metavar="DIR", help="keep llmserve's journals in this folder")
    add("--output", type=Path, help="write the results as JSON; rows of other cases stay")
    add("--report", action="store_true", help="measure nothing: print the tables of --output")
    args = parser.parse_args()
    if args.report:
        print("\n\n".join(report(rows_of(args.output))))
        return
    if not args.vllm_python:
        parser.error("--vllm-python is needed to measure")
    if ROUTER in args.arrangements and not args.router:
        parser.error("--router is needed for vllm-router")
    run(measure(args))
