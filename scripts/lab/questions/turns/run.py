"""Turns of agents: whole programs admitted by memory and ordered by what they need, beside other policies.

    python scripts/lab turns --output docs/results/turns.json
    python scripts/lab turns --results docs/results/turns.json

The script simulates engines as vLLM works (simulation/kv_engine.py) with the real scheduler, on worlds of agents and
chats (make/programs.py). A cell is a KV cache and a load: 1 is what the engine can do with a warm cache.

    direct    each request goes into the engine at once, in order of arrival
    length    each request by the forecast of its answer and its prompt, as if nobody knew programs
    arrival   whole programs admitted by memory, in order of arrival, held over tool calls without end
    thunder   ThunderAgent's admission (thunder.py)
    attained  as llmserve, but by what the turn has had so far instead of what it still needs: no forecast of steps
    llmserve  the default
    wrong     the default, where of 5 % of the requests a wrong program is known: half of them begin a new one, half are
              counted to another session's.  rarely wrong : the same of 1 %

A cell has the policies over which figures were asked of it.

Prints Markdown tables: what was asked of each cell, and what was reached; figures of `arrival`, and of the others over
those. A ratio is the mean over the seeds of the ratio in one seed. A turn is one message of a person up to the last
answer, tools included.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from kit.arguments import add_seeds, parser_of, whole
from kit.rows import Case, Row, group, measured, read_rows, save_rows
from kit.tables import markdown
from make.programs import AS_PUBLISHED, Drawing

from llmserve.request import Request
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.programs.tools import Tools
from llmserve.scheduling.programs.turn import Program
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.program_run import run_programs
from llmserve.simulation.programs import CHAT, World
from llmserve.simulation.scenario import Scenario
from questions.turns.thunder import ThunderAgent

POLICIES = ("arrival", "direct", "length", "thunder", "attained", "llmserve", "rarely wrong", "wrong")
CASE = ("cell", "policy", "seed")
WRONG = {"rarely wrong": (0.01, 1.05), "wrong": (0.05, 1.15)}  # share of requests, and what was asked: over llmserve
LONGER = 4.0  # times the tools of the cell `longer tools`
QUANTITIES = {
    "mean": "turn_s_mean",
    "p50": "turn_s_p50",
    "p99": "turn_s_p99",
    "chat": "chat_s_mean",
    "chat's first token p99": "first_token_s_p99",
    "turns/s": "turns_per_s",
}
OF = {"mean": "turn_s_mean", "p50": "turn_s_p50", "p99": "turn_s_p99", "chats": "chat_s_mean", "turns/s": "turns_per_s"}
Asked = tuple[str, str, float]
"""A figure of llmserve, the policy that it is over ("": it is taken as it is), and the most that it may be; below 0:
the least."""


@dataclass(frozen=True)
class Cell:
    """subagents : share of tools that are sub-agents.  longer : whether tools take LONGER times as long"""

    kv_tokens: int
    load: float
    asked: tuple[Asked, ...] = ()
    subagents: float = 0.0
    longer: bool = False
    engines: int = 1


AMPLE = tuple([(name, "direct", 1.02) for name in ("mean", "p99", "chats")])
CHATS: Asked = ("chats", "arrival", 1.06)
CELLS = {
    "430k, 0.95": Cell(
        430_000,
        0.95,
        (
            ("mean", "arrival", 0.85),
            ("p50", "arrival", 0.65),
            ("p99", "arrival", 1.08),
            ("mean", "thunder", 0.82),
            ("p99", "thunder", 0.75),
            ("mean", "direct", 0.28),
            ("mean", "length", 0.30),
            CHATS,
            ("chats", "length", 1.0),
            ("chat's first token p99, s", "", 15.0),
            ("hits", "", -0.87),
            ("mean", "attained", 1.05),
        ),
    ),
    "215k, 0.95": Cell(
        215_000,
        0.95,
        (
            ("mean", "arrival", 0.76),
            ("p99", "arrival", 1.18),
            ("mean", "thunder", 0.55),
            ("p99", "thunder", 0.45),
            CHATS,
            ("chat's first token p99, s", "", 15.0),
            ("hits", "", -0.82),
        ),
    ),
    "215k, 0.7": Cell(
        215_000,
        0.7,
        (
            ("mean", "arrival", 0.91),
            ("p99", "arrival", 1.05),
            ("mean", "direct", 0.23),
            ("mean", "length", 0.29),
            ("mean", "thunder", 0.50),
            CHATS,
        ),
    ),
    "430k, 0.7": Cell(
        430_000, 0.7, (("mean", "arrival", 0.97), ("p99", "arrival", 1.06), ("mean", "thunder", 0.90), CHATS)
    ),
    "430k, 0.3": Cell(430_000, 0.3, AMPLE),
    "1,720k, 0.7": Cell(1_720_000, 0.7, AMPLE),
    "430k, 1.1": Cell(
        430_000, 1.1, (("mean", "arrival", 0.76), ("p99", "arrival", 1.08), ("turns/s", "arrival", -1.05), CHATS)
    ),
    "430k, 0.95, sub-agents": Cell(
        430_000, 0.95, (("mean", "arrival", 0.60), ("p99", "arrival", 0.85), CHATS), subagents=0.15
    ),
    "215k, 0.7, longer tools": Cell(
        215_000, 0.7, (("mean without tools", "arrival", 0.72), ("p99", "arrival", 1.03), CHATS), longer=True
    ),
    "430k, 0.95, two engines": Cell(
        430_000, 0.95, (("mean", "arrival", 1.0), ("mean", "thunder", 1.0), CHATS), engines=2
    ),
}
WRONG_IDS = "430k, 0.95"  # the cell with the policies of WRONG


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


def policy_of(name: str, cell: Cell | None = None) -> Programs | None:
    if name == "arrival":
        return Programs(Unending(), patience=0.0, room=1.0)
    if name == "thunder" and cell is not None:
        return ThunderAgent({f"engine{number}": cell.kv_tokens for number in range(cell.engines)})
    return Attained() if name == "attained" else None


class Mistakes:
    """Wrong programs of a share of the requests of agents, as an inference from prompts might make them."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._rng = share, np.random.default_rng(seed)

    def __call__(self, world: World) -> None:
        programs = sorted({asked.program for asked in world.asked})
        new, called = max(programs), {program: program for program in programs}
        for asked in world.asked:
            program = asked.program
            asked.program = called[program]
            if self._rng.random() >= self._share:
                continue
            if self._rng.random() < 0.5:
                new += 1
                asked.program = called[program] = new
            else:
                asked.program = called[int(self._rng.choice(programs))]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=whole(1), default=300, help="of agents, and as many chats")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL", help="(default: all)")
    add_seeds(parser, 3)
    args = parser.parse_args()
    rows = read_rows(args.results, CASE) if args.results else measure(args)
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)


def measure(args: Any) -> list[Row]:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = [
        dict(zip(CASE, (cell, policy, seed), strict=True))
        for cell in args.cells
        for policy in policies_of(cell)
        for seed in seeds
    ]
    return measured(partial(run, args.sessions), cases, args.jobs)


def policies_of(cell: str) -> list[str]:
    """Those that the figures need that were asked of a cell."""
    needed = {"arrival", "llmserve", *[reference for _, reference, _ in CELLS[cell].asked]}
    return [policy for policy in POLICIES if policy in needed or (policy in WRONG and cell == WRONG_IDS)]


def run(sessions: int, case: Case) -> Row:
    cell, policy, seed = CELLS[case["cell"]], case["policy"], case["seed"]
    world = list(Drawing(seed, cell.subagents, AS_PUBLISHED).world(sessions, sessions, 1.0))
    rate = cell.engines * cell.load / seconds_each(world, cell.kv_tokens)
    for session in world:
        session["arrival_s"] /= rate
        lengthen(session, LONGER if cell.longer else 1.0)
    straight = policy == "direct"
    scheduling = SchedulingConfig(order="fffs" if straight else None).resolved(False)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(session) + "\n" for session in world)
        file.flush()
        scenario = Scenario(programs=file.name, kv_tokens=cell.kv_tokens, engines=cell.engines, seed=seed)
        outcome = run_programs(
            scenario,
            scheduling,
            straight=straight,
            named=policy not in ("direct", "length"),
            programs=policy_of(policy, cell),
            mistakes=Mistakes(WRONG[policy][0], seed) if policy in WRONG else None,
        )
    numbers = {**outcome.summary(), "tools_s_mean": tools_s_mean(world)}
    return Row(case, {name: value and float(f"{value:.6g}") for name, value in numbers.items()})


# ---- worlds -------------------------------------------------------------------------------------------------------

# Of a step, of each sequence and of each token of context in it; of a token of a prompt, and of each token before it.
# As in the profile h100-llama-3.1-8b-contexts.
STEP_S, SEQUENCE_S, CONTEXT_S = 6.5e-3, 48e-6, 52e-9
PROMPT_S, POSITION_S = 26e-6, 1.05e-9
FILLED = 0.6  # of the cache, by the batch at which an engine's speed is counted
PREFILLS = 1.037  # steps that also compute prompts: so the worlds to which the figures were asked have the load 0.95


def steps_of(session: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """(tokens before it, new ones, answered ones) of each request of a session and its sub-agents."""
    own = 0
    for turn in session["turns"]:
        for step in turn["steps"]:
            own = 0 if step.get("compacted") else own
            yield session["shared_tokens"] + own, step["new_tokens"], step["output_tokens"]
            own += step["new_tokens"] + step["output_tokens"]
            for inner in step.get("sessions", ()):
                yield from steps_of(inner)


def seconds_each(world: Sequence[dict[str, Any]], kv_tokens: int) -> float:
    """Seconds of a session on an engine with a warm cache."""
    steps = [step for session in world for step in steps_of(session)]
    batch = FILLED * kv_tokens / fmean([before + new for before, new, _ in steps])
    seconds = 0.0
    for before, new, answered in steps:
        seconds += new * (PROMPT_S + POSITION_S * (before + new / 2))
        seconds += answered * (STEP_S / batch + SEQUENCE_S + CONTEXT_S * (before + new + answered / 2))
    return PREFILLS * seconds / len(world)


def lengthen(session: dict[str, Any], factor: float) -> None:
    """Let tools take longer."""
    for turn in session["turns"]:
        for step in turn["steps"]:
            if "tool_s" in step:
                step["tool_s"] *= factor


def tools_s_mean(world: Sequence[dict[str, Any]]) -> float:
    """Seconds of tools in the mean turn of an agent."""
    turns = [turn for session in world if session["kind"] != CHAT for turn in session["turns"]]
    return fmean([sum([step.get("tool_s", 0.0) for step in turn["steps"]]) for turn in turns])


# ---- tables -----------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Iterator[str]:
    yield markdown(["cell", "figure of llmserve", "over", "asked", "reached", ""], list(compared(rows)))
    head = ["cell", "policy", *QUANTITIES, "hits"]
    yield markdown(head, list(lines(rows)), right=True)


def compared(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What was asked of each cell, and what was reached."""
    for (cell,), own in group(rows, "cell").items():
        of = {policy: same for (policy,), same in group(own, "policy").items()}
        asked = CELLS[cell].asked
        asked = (*asked, *[(f"mean, {name}", "llmserve", most) for name, (_, most) in WRONG.items() if name in of])
        for figure, reference, most in asked:
            value = reached(of, figure, reference)
            kept = value >= -most if most < 0 else value <= most
            bound = f"at least {-most:g}" if most < 0 else f"at most {most:g}"
            yield [cell, figure, reference, bound, f"{value:.3f}", "" if kept else "not reached"]


def reached(of: dict[str, list[Row]], figure: str, reference: str) -> float:
    ours = of["llmserve"]
    if figure == "hits":
        return fmean(row["hit_rate"] for row in ours)
    if not reference:
        return fmean(row["first_token_s_p99"] for row in ours)
    theirs = {row["seed"]: row for row in of[reference]}
    if figure == "mean without tools":
        without = [
            (row["turn_s_mean"] - row["tools_s_mean"])
            / (theirs[row["seed"]]["turn_s_mean"] - theirs[row["seed"]]["tools_s_mean"])
            for row in ours
        ]
        return fmean(without)
    if (wrong := figure.removeprefix("mean, ")) in WRONG:
        return over(of[wrong], ours, "turn_s_mean")
    return over(ours, of[reference], OF[figure])


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (cell,), own in group(rows, "cell").items():
        of = {policy: same for (policy,), same in group(own, "policy").items()}
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
