"""Random engines, their slots known or learnt from answers alone: throughput, and requests that wait inside.

    python scripts/lab slots --count 1000 --output docs/results/slots.json --plot docs/results/slots.png

The scheduler and the learner are those of the server (questions/slots/engine.py has the engine). All requests are there
at the beginning. With known slots the look-ahead is 2. Both are measured from the 100th answer until only as many are
left as the engine has slots; restarts and what they cost included. The learner was made with seeds from 1000 to 2999.

Of whole answers nothing shows that more requests run at once than were sent. So for engines that answer whole a third
front-end shows what the best search by doubling could have: one that knows where to stop (`Doubling`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from kit.arguments import add_results, parser_of
from kit.figures import BLUE, GREEN, ORANGE, new_figure, save
from kit.progress import log
from kit.results import day_and_machine, rounded, with_rows, write_text
from kit.tables import markdown

from llmserve.engines.slots import SlotsLearner
from llmserve.request import Request
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from questions.slots.engine import UnknownEngine, World, drawn, jobs_of

KNOWN_AHEAD = 2
FROM = 100  # answers before the measurement begins
SOON, FEW = 20, (1, 4, 8)  # after so many answers the number is right, for engines of so few slots
THROUGHPUT_LEAST, EXCESS_MOST = 0.98, 0.1
KINDS = {"streams": 1.0, "both": 0.5, "whole answers": 0.0}
COLOURS = {"streams": BLUE, "both": GREEN, "whole answers": ORANGE}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=50_000, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    add_results(parser, "--plot")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.count)
    with ProcessPoolExecutor(args.processes) as pool:
        rows = []
        for row in pool.map(compare, seeds, chunksize=4):
            rows.append(row)
            if len(rows) % 100 == 0:
                log(f"{len(rows)} engines")
    results = {**day_and_machine(), "count": args.count, "first": args.first, "kinds": summary(rows), "engines": rows}
    if args.output:
        write_text(args.output, with_rows(rounded(results), "engines"))
    if args.plot:
        plot(rows, args.plot)
    print(markdown(*table(results["kinds"])))


class Doubling(SlotsLearner):
    """Doubles the number with the first answer to a request that was sent at it, and knows where to stop."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.look_ahead = KNOWN_AHEAD
        self._most, self._after = world.slots, world.slots_after
        self._number_at: dict[int, int] = {}  # by request, when it was sent
        self.slots = min(self._most, self.slots)

    def sent(self, request_id: int, now_s: float, sequences: int = 1, *, loads: bool = False) -> None:
        self._number_at[request_id] = self.slots

    def began(self, request_id: int, now_s: float) -> None:
        pass

    def ended(self, request_id: int, now_s: float, tokens: float) -> None:
        if self._number_at.pop(request_id) == self.slots:
            self.slots = min(self._most, 2 * self.slots)

    def restarted(self) -> None:
        assert self._after is not None, "only then"
        self._most = self._after
        self.slots = min(self._most, max(2, math.isqrt(self.slots)))
        self._number_at.clear()


def compare(seed: int) -> dict[str, Any]:
    """One engine, with its slots known and learnt."""
    world = drawn(seed)
    known, learnt = (simulated(world, seed, learner) for learner in (None, SlotsLearner()))
    numbers, restarted = learnt.numbers, learnt.restarted
    soon = [(world.slots, numbers[SOON - 1])]
    if restarted is not None and world.slots_after is not None:
        soon.append((world.slots_after, numbers[restarted + SOON - 1]))
    rate, excess = measured(learnt)
    known_rate, known_excess = measured(known)
    doubled = {}
    if world.streams == KINDS["whole answers"]:
        doubled = {"doubled": measured(simulated(world, seed, Doubling(world)))[0] / known_rate}
    return {
        "seed": seed,
        "slots": world.slots,
        "after": world.slots_after,
        "streams": world.streams,
        "throughput": rate / known_rate,
        "excess": excess,
        "known_excess": known_excess,
        "soon": [(slots, number) for slots, number in soon if slots in FEW],
        **doubled,
    }


def simulated(world: World, seed: int, learner: SlotsLearner | None) -> UnknownEngine:
    jobs = jobs_of(world, seed)
    engine = UnknownEngine(world, jobs, learner, KNOWN_AHEAD if learner is None else 0)
    scheduler = SchedulingConfig(order="fffs", release="greedy", bins=1, batch_size=1).scheduler()
    requests = [Request(number, float(job.tokens)) for number, job in enumerate(jobs)]
    SimulatedCluster(scheduler, [engine]).run(iter([(0.0, request) for request in requests]))
    return engine


def measured(engine: UnknownEngine) -> tuple[float, float]:
    """Answers a second, and the mean number of requests that wait inside over the engine's slots."""
    last = len(engine.ends) - engine.world.most - 1
    cut = engine.restarted if engine.restarted is not None else last
    waited = seconds = 0.0
    for first, end, slots in ((FROM, cut, engine.world.slots), (cut, last, engine.world.slots_after or 1)):
        if end > first:
            (from_s, before), (until_s, after) = engine.ends[first], engine.ends[end]
            waited += (after - before) / slots
            seconds += until_s - from_s
    return (last - FROM) / (engine.ends[last][0] - engine.ends[FROM][0]), waited / seconds


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    kinds = {kind: [row for row in rows if row["streams"] == share] for kind, share in KINDS.items()}
    return {kind: of(chosen) for kind, chosen in {**kinds, "all": list(rows)}.items() if chosen}


def of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    throughput, excess = (np.array([row[name] for row in rows]) for name in ("throughput", "excess"))
    soon = [pair for row in rows for pair in row["soon"]]
    doubled = [row["doubled"] for row in rows if "doubled" in row]
    return {
        "engines": len(rows),
        "throughput_mean": float(throughput.mean()),
        "throughput_p1": float(np.quantile(throughput, 0.01)),
        "throughput_kept": float(np.mean(throughput >= THROUGHPUT_LEAST)),
        "excess_mean": float(excess.mean()),
        "excess_p95": float(np.quantile(excess, 0.95)),
        "excess_kept": float(np.mean(excess <= EXCESS_MOST)),
        "soon_count": len(soon),
        "soon_right": float(np.mean([slots == number for slots, number in soon])) if soon else 1.0,
        **(
            {"doubled_kept": float(np.mean(np.array(doubled) >= THROUGHPUT_LEAST))} if len(doubled) == len(rows) else {}
        ),
    }


def table(kinds: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    head = ["answers", "engines", "throughput: mean", "1 % have less than", "0.98 or more", "by the best doubling"]
    head += ["waiting over slots: mean", "5 % have more than", "0.1 or less", "1, 4 or 8 slots right after 20 answers"]
    rows = [
        [
            kind,
            f"{values['engines']}",
            f"{values['throughput_mean']:.3f}",
            f"{values['throughput_p1']:.3f}",
            f"{values['throughput_kept']:.1%}",
            f"{values['doubled_kept']:.1%}" if "doubled_kept" in values else "",
            f"{values['excess_mean']:.3f}",
            f"{values['excess_p95']:.2f}",
            f"{values['excess_kept']:.1%}",
            f"{values['soon_right']:.1%} of {values['soon_count']}",
        ]
        for kind, values in kinds.items()
    ]
    return head, rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure, axes = new_figure(1, 2, width=10, height=4)
    left, right = axes[0]
    for axis, name, limit, label in (
        (left, "throughput", THROUGHPUT_LEAST, "throughput, over that with known slots"),
        (right, "excess", EXCESS_MOST, "requests that wait inside, over slots"),
    ):
        for kind, share in KINDS.items():
            chosen = [row for row in rows if row["streams"] == share]
            axis.semilogx(
                [row["slots"] for row in chosen], [row[name] for row in chosen], ".", ms=4, c=COLOURS[kind], label=kind
            )
        axis.axhline(limit, lw=0.8, c="black")
        axis.set_xlabel("slots of the engine")
        axis.set_ylabel(label)
    left.legend()
    save(figure, path)


if __name__ == "__main__":
    main()
