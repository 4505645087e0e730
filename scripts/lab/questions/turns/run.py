"""Turns of agents: whole programs admitted by memory and ordered by what they need, beside other policies.

    python scripts/lab turns --output docs/results/turns.json

The script simulates one engine as vLLM works (simulation/kv_engine.py) with the real scheduler, on worlds of agents and
chats (make/programs.py). A cell is a KV cache and a rate of sessions; `agents in agents` has tools that are sub-agents.

    direct    each request goes into the engine at once, in order of arrival
    length    each request by the forecast of its answer and its prompt, as if nobody knew programs
    arrival   whole programs admitted by memory, in order of arrival, held over tool calls without end
    attained  as llmserve, but by what the turn has had so far instead of what it still needs: no forecast of steps
    llmserve  the default

Prints a Markdown table: figures of `arrival`, and of the others over those, as the mean over the seeds of the ratio in
one seed. A turn is one message of a person up to the last answer, tools included.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from kit.arguments import add_seeds, parser_of, whole
from kit.rows import Case, Row, group, measured, read_rows, save_rows
from kit.tables import markdown
from make.programs import Drawing

from llmserve.request import Request
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.programs.tools import Tools
from llmserve.scheduling.programs.turn import Program
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.program_run import run_programs
from llmserve.simulation.scenario import Scenario

POLICIES = ("arrival", "direct", "length", "attained", "llmserve")
CASE = ("kv_tokens", "rate", "subagents", "policy", "seed")
CELLS = (
    (215_000, 0.060, 0.0),
    (215_000, 0.082, 0.0),
    (430_000, 0.026, 0.0),
    (430_000, 0.060, 0.0),
    (430_000, 0.082, 0.0),
    (430_000, 0.048, 0.15),
    (860_000, 0.082, 0.0),
    (1_720_000, 0.082, 0.0),
)
QUANTITIES = {
    "mean": "turn_s_mean",
    "p50": "turn_s_p50",
    "p99": "turn_s_p99",
    "chat": "chat_s_mean",
    "chat's first token p99": "first_token_s_p99",
    "turns/s": "turns_per_s",
}


class Unending(Tools):
    """Tools whose calls may last for ever."""

    def keep_s(self, tools: tuple[str, ...], pool_s: float) -> float:
        return math.inf


class Attained(Programs):
    """Programs that go by what their turns have had."""

    def __init__(self) -> None:
        super().__init__()
        self._had_s: dict[int, float] = {}

    def further_s(self, request: Request, program: Program, times: Any) -> float:
        had_s = self._had_s.get(request.program, 0.0) if program.step > 1 else 0.0
        self._had_s[request.program] = had_s + times.work(request.expected_tokens or 0.0, program.tokens).seconds
        return had_s


def policy_of(name: str) -> Programs | None:
    if name == "arrival":
        return Programs(Unending(), patience=0.0, room=1.0)
    return Attained() if name == "attained" else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=whole(1), default=300, help="of agents, and as many chats")
    add_seeds(parser, 3)
    args = parser.parse_args()
    rows = read_rows(args.results, CASE) if args.results else measure(args)
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)


def measure(args: Any) -> list[Row]:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = [
        dict(zip(CASE, (*cell, policy, seed), strict=True)) for cell in CELLS for policy in POLICIES for seed in seeds
    ]
    return measured(partial(run, args.sessions), cases, args.jobs)


def run(sessions: int, case: Case) -> Row:
    world = Drawing(case["seed"], case["subagents"]).world(sessions, sessions, case["rate"])
    straight = case["policy"] == "direct"
    scheduling = SchedulingConfig(order="fffs" if straight else None).resolved(False)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(session) + "\n" for session in world)
        file.flush()
        scenario = Scenario(programs=file.name, kv_tokens=case["kv_tokens"], seed=case["seed"])
        outcome = run_programs(
            scenario,
            scheduling,
            straight=straight,
            named=case["policy"] not in ("direct", "length"),
            programs=policy_of(case["policy"]),
        )
    return Row(case, {name: value and float(f"{value:.6g}") for name, value in outcome.summary().items()})


# ---- tables -----------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Iterator[str]:
    head = ["KV tokens, sessions/s", "policy", *QUANTITIES, "hits"]
    yield markdown(head, list(lines(rows)), right=True)


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (kv_tokens, rate, subagents), own in group(rows, "kv_tokens", "rate", "subagents").items():
        of = {policy: same for (policy,), same in group(own, "policy").items()}
        cell = f"{kv_tokens:,}, {rate:g}" + (", agents in agents" if subagents else "")
        for policy, same in of.items():
            hits = f"{fmean(row['hit_rate'] for row in same):.2f}"
            if policy == "arrival":
                figures = [f"{fmean(row[name] for row in same):.3g}" for name in QUANTITIES.values()]
            else:
                figures = [f"{over(same, of['arrival'], name):.2f}" for name in QUANTITIES.values()]
            yield [cell, policy, *figures, hits]


def over(rows: Sequence[Row], references: Sequence[Row], name: str) -> float:
    """Mean over the seeds of the ratio in one seed."""
    by_seed = {row["seed"]: row[name] for row in references}
    return fmean(row[name] / by_seed[row["seed"]] for row in rows)


if __name__ == "__main__":
    main()
