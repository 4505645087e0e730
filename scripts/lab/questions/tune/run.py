"""Does what `tune` chooses from one half of a trace serve the other half well, and keep its bound there?

    python scripts/lab tune --trace conv=azure_llm_2023_conv.csv.gz --trace code=azure_llm_2023_code.csv.gz \\
        --output docs/results/tune.json

An engine of 32 slots serves each trace under the default order, and its journal is what `tune` would read. The choice
is made from the first half of the requests, twice: among all candidates that keep the p99 within 1.10 of first come,
first served, and among those that keep it in 9 of 10 resamples, too, as `tune` does. The second half, which neither has
seen, judges both: p99 and mean over those of first come, first served, and the mean over that of the best candidate
that keeps the bound there. Beside the files, traces are drawn: Poisson arrivals, and arrivals whose rate changes
threefold, with short and long tails.

Prints a Markdown table of all choices, and one of how often the bound was kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
from kit.arguments import parser_of, whole
from kit.rows import Case, Row, measured, read_rows, save_rows
from kit.tables import markdown

from llmserve.commands.simulate import simulate
from llmserve.live import journal
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.scenario import Scenario
from llmserve.simulation.twin import choice
from llmserve.simulation.twin.choice import P99_BOUND, rows_of
from llmserve.simulation.twin.past import Past, Recording
from llmserve.simulation.twin.replay import Twin

SLOTS, PREFILL_S = 32, 0.03
FORECASTS = "quantiles:0.6"
ARRIVALS = {"Poisson": "poisson", "bursts": "mmpp:3,60"}
LENGTHS = {"0.8": "lognormal:5,0.8", "1.5": "lognormal:5,1.5,16384"}
WAYS = ("bound", "sure")
CASE = ("trace", "load", "seed")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE", help="repeatable")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 0.95])
    parser.add_argument("--requests", type=whole(2), default=12_000, help="of a drawn trace, and at most of a file")
    parser.add_argument("--seeds", type=whole(1), default=3)
    parser.add_argument("--first-seed", type=whole(0), default=0)
    parser.add_argument("--jobs", type=whole(1), default=1)
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output and run nothing")
    parser.add_argument("--output", type=Path, help="JSON of every choice")
    args = parser.parse_args()
    if args.results:
        rows = read_rows(args.results, CASE)
    else:
        files = dict(text.split("=", 1) for text in args.trace)
        rows = measured(partial(judged, files, args.requests), list(cases(args, files)), args.jobs)
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)


def cases(args: argparse.Namespace, files: Mapping[str, str]) -> Iterator[Case]:
    drawn = [f"{arrivals}, sigma {sigma}" for arrivals in ARRIVALS for sigma in LENGTHS]
    for trace in (*files, *drawn):
        for load in args.loads:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                yield dict(zip(CASE, (trace, load, seed), strict=True))


def scenario_of(files: Mapping[str, str], requests: int, case: Case) -> Scenario:
    engine = {"slots": SLOTS, "prefill_s": PREFILL_S, "predictions": FORECASTS}
    common = {**engine, "requests": requests, "load": case["load"], "seed": case["seed"]}
    if case["trace"] in files:
        return Scenario(**common, trace=files[case["trace"]])
    arrivals, _, sigma = case["trace"].partition(", sigma ")
    return Scenario(**common, arrivals=ARRIVALS[arrivals], lengths=LENGTHS[sigma])


def judged(files: Mapping[str, str], requests: int, case: Case) -> Row:
    """What each way chooses from the first half, and how that serves the second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        simulate(scenario_of(files, requests, case), SchedulingConfig(), journal_path=path)
        header, steps = journal.read(path)
        recording = Past(header).read(steps).recording()
    whole_twin = Twin(recording, least=0)
    seen, unseen = [Twin(half, least=0, whole=whole_twin) for half in halves(recording)]
    candidates = whole_twin.candidates()
    before, after = [
        rows_of([half.replay(each) for each in candidates], "mean", half.recorded) for half in (seen, unseen)
    ]
    best = min(row.mean for row in after if row.allowed)
    result: dict[str, object] = {"requests": unseen.recorded}
    for way, allowed in zip(WAYS, (_within, _safe), strict=True):
        index = min((index for index, row in enumerate(before) if allowed(row)), key=lambda index: before[index].mean)
        row = after[index]
        result |= {f"{way}_order": row.name, f"{way}_mean": row.mean, f"{way}_p99": row.p99}
        result[f"{way}_over_best"] = row.mean / best
    return Row(case, result)


def halves(recording: Recording) -> tuple[Recording, Recording]:
    middle = len(recording.requests) // 2
    first, second = recording.requests[:middle], recording.requests[middle:]
    return (
        msgspec.structs.replace(recording, requests=first, until_s=second[0].arrived_s),
        msgspec.structs.replace(recording, requests=second),
    )


def _within(row: choice.Row) -> bool:
    return row.allowed


def _safe(row: choice.Row) -> bool:
    return row.is_safe


def tables(rows: list[Row]) -> list[str]:
    choices = [
        [row["trace"], f"{row['load']:g}", str(row["seed"])]
        + [
            cell
            for way in WAYS
            for cell in (row[f"{way}_order"], f"{row[f'{way}_mean']:.2f}", f"{row[f'{way}_p99']:.2f}")
        ]
        + [f"{row['sure_over_best']:.2f}"]
        for row in rows
    ]
    titles = ["trace", "load", "seed", "by the bound", "mean", "p99", "with the margin", "mean", "p99", "over best"]
    kept = []
    for way, name in zip(WAYS, ("by the bound alone", "with the margin"), strict=True):
        p99 = [row[f"{way}_p99"] for row in rows]
        kept.append(
            [
                *(name, f"{sum(value <= P99_BOUND for value in p99)} of {len(p99)}", f"{max(p99):.2f}"),
                f"{sum(row[f'{way}_mean'] for row in rows) / len(rows):.3f}",
                f"{sum(row[f'{way}_over_best'] for row in rows) / len(rows):.3f}",
            ]
        )
    summary = ["choice", "keeps the bound", "largest p99", "mean", "over best"]
    return [markdown(titles, choices), markdown(summary, kept)]


if __name__ == "__main__":
    main()
