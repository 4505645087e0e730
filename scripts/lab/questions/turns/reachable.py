"""What policies could reach in the cells that were run before the real vLLM, simulated with the costs of these runs.

    python scripts/lab turns.reachable --rows docs/results/turns-vllm.json --output docs/results/turns-reachable.json

The engine is also made slower, as behind a front-end that shares its cores. `oracle` knows the steps that remain of a
turn; `without age` is the same, least work first; `held without end` is llmserve whose tokens are kept over tool calls
without end; `memory for all` has a cache that is never full; `direct, measured` is the real vLLM's. Ratios to `direct`
are to an engine at its own speed, those to `arrival` to one of the same speed; means over the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.arguments import add_results, parser_of, positive
from kit.rows import Row, group, save_rows, select
from kit.tables import markdown

from llmserve.request import Request
from llmserve.scheduling.programs.programs import Programs
from llmserve.scheduling.programs.turn import Program
from llmserve.simulation.programs import Asked, World
from questions.turns.run import Attained, Unending, over
from questions.turns.vllm import ARRIVAL, CELLS, DIRECT, Costs, rows_of, side_by_side, simulated, world

CELL = "short"
AMPLE = 32  # times the cache: nothing waits for memory
NO_AGE = 1e6  # of patience: age counts for nothing
MEASURED = "direct, measured"
LOAD = 0.95
QUANTITIES = ("turn_s_mean", "turn_s_p99")


class Oracle(Programs):
    """Programs whose remaining steps are known."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._left: dict[int, Sequence[Asked]] = {}

    def read(self, world: World) -> None:
        for course in world.courses:
            for turn in course.turns:
                self._left |= {asked.number: turn[place:] for place, asked in enumerate(turn, 1)}

    def further_s(self, request: Request, program: Program, times: Any) -> float:
        left = [asked.step for asked in self._left[request.id]]
        return sum([times.work(step.output_tokens, step.new_tokens).seconds for step in left])


POLICIES: dict[str, Callable[[], Programs]] = {
    "llmserve": Programs,
    "attained": Attained,
    "oracle": Oracle,
    "without age": lambda: Oracle(patience=NO_AGE),
    "held without end": lambda: Programs(Unending()),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="of turns.vllm")
    parser.add_argument("--slower", type=positive, nargs="+", default=[1.0, 1.1, 1.2], help="(%(default)s)")
    add_results(parser)
    args = parser.parse_args()
    rows = [row for of in select(rows_of(args.rows), cell=CELL, arrangement=DIRECT) for row in measure(of, args.slower)]
    print(markdown(["slower", "policy", "mean of direct", "mean of arrival", "p99 of arrival"], list(lines(rows))))
    save_rows(args.output, rows)


def measure(of: Row, slower: Sequence[float]) -> Iterator[Row]:
    """of : the row of `direct` in a run"""
    sessions, kv_tokens, seed = world(of["sessions"], of["seed"]), CELLS[CELL], of["seed"]
    requests = sum([len(turn.steps) for one in sessions for turn in one.turns])
    rate = LOAD * of["requests_per_s"] * len(sessions) / requests
    costs = Costs(of["prefill_s_per_token"], of["step_s"])
    costs = costs.with_rate(sessions, side_by_side(sessions, kv_tokens), of["requests_per_s"])

    def row(policy: str, factor: float, arrangement: str, programs: Programs | None = None, caches: int = 1) -> Row:
        slow = Costs(*[factor * each for each in (costs.prefill_s_per_token, costs.step_s, costs.sequence_s)])
        numbers = simulated(
            sessions,
            rate,
            caches * kv_tokens,
            slow,
            arrangement,
            programs,
            shown_to=programs.read if isinstance(programs, Oracle) else None,
        ).summary()
        found = {name: numbers[name] and float(f"{numbers[name]:.6g}") for name in (*QUANTITIES, "hit_rate")}
        return Row({"policy": policy, "slower": factor, "seed": seed}, found)

    yield Row({"policy": MEASURED, "slower": 1.0, "seed": seed}, {name: of[name] for name in (*QUANTITIES, "hit_rate")})
    for factor in slower:
        yield row(DIRECT, factor, DIRECT)
        yield row(ARRIVAL, factor, ARRIVAL)
        for policy, make in POLICIES.items():
            yield row(policy, factor, "llmserve", make())
        yield row("memory for all", factor, DIRECT, caches=AMPLE)


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    direct = select(rows, policy=DIRECT, slower=1.0)
    for (factor,), own in group(rows, "slower").items():
        arrival = select(own, policy=ARRIVAL)
        for (policy,), same in group(own, "policy").items():
            figures = [over(same, direct, "turn_s_mean"), *[over(same, arrival, name) for name in QUANTITIES]]
            yield [f"{factor:g}", policy, *[f"{figure:.2f}" for figure in figures]]


if __name__ == "__main__":
    main()
