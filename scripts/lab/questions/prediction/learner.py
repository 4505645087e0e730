"""What a server's forecasts are worth after 1, 100, 10,000 answers, without a trained predictor and with one.

    D=/data; C=:response_tokens_llama3
    scripts/lab/questions/prediction/learner.py --set "two=$D/alpaca.jsonl.gz$C,$D/gpteacher.jsonl.gz$C" \\
        --set "many models=$D/alpaca_eval.jsonl.gz$C" --new-model "many models" \\
        --predictor "two=runs/other" --output docs/results/learner.json --plot docs/results/learner.png

Each row of a set is forecast, then learnt, in an order drawn by seed. These ways forecast the same rows: the learner
of a server without a predictor, with one request at a time and with 64 in flight, whose answers are learnt later; its
memory of templates alone; the prompt's length, which only ranks; and with --predictor a trained predictor, alone and
corrected by the learner. Rows of the predictor's training flatter it: give it others.

--new-model: after 20,000 answers of the other models of this set, the forecasts for a model that is asked for the first
time. Its prompts are those that other models answered before, and then prompts that none has answered.

The first set is served once more beside a key that sends nonsense: prompts of the set with random lengths.

--results FILE prints and draws an earlier --output, and measures nothing.
"""

import argparse
import gc
import itertools
import json
import math
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from kit.arguments import add_results, exit_on, parser_of, whole
from kit.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, log_ticks, new_figure, save
from kit.progress import counted
from kit.results import day_and_machine, rounded, write_json
from kit.tables import markdown

from bins.risk import risks
from predictor.dataset import Row, load_rows
from predictor.errors import DatasetError, PredictorError
from predictor.evaluate import equal_mass_bins, saturated_gain
from predictor.online import OnlineLearner
from predictor.predict import LengthPredictor
from predictor.prediction import Prediction
from predictor.prequential import RANGES, Forecasts, forecast_stream, scores, scores_by_range
from predictor.quantiles import LEVELS, at_levels

IN_FLIGHT = 64
LEARNER, DELAYED = "learner", f"learner, {IN_FLIGHT} in flight"
TEMPLATES, PROMPT_LENGTH = "templates alone", "prompt length"
PREDICTOR, CORRECTED = "predictor alone", "predictor and learner"
COLORS = {LEARNER: BLUE, DELAYED: SKY, TEMPLATES: ORANGE, PROMPT_LENGTH: GREY, PREDICTOR: PINK, CORRECTED: GREEN}
CURVE = (0, 50, *(100 * 2**doubling for doubling in range(12)))
"""Numbers of answers seen between which the figure has a point, at their geometric mean."""
SEEN_LEAST = 10  # in place of 0, which has no place on a logarithmic axis
BATCH_SIZE, BINS = 8, 8
GAIN_FROM = 4_000  # answers seen before the gain is measured; half of the rows if there are fewer
PASSES = 3  # that are timed; of each answer the fastest counts, because other work on the machine only adds time
TIMED_MAX = 8_000
OTHERS, FIRST = 20_000, 100  # answers of other models, and first answers of the new model
NEW_MODELS = 3  # drawn for each seed
HONEST_KEYS, HONEST = 4, 2_000  # keys that send no nonsense, and their answers
NONSENSE = (0.0, 0.5, 0.9)  # shares of all answers
NONSENSE_TOKENS = 2_000  # at most; lengths of nonsense are log-uniform

Ways = Mapping[str, Forecasts]


def main() -> None:
    args = parse_args()
    with exit_on(PredictorError, OSError, ValueError):
        result = read(args.results) if args.results else measure(args)
    print_tables(result)
    write_json(args.output, result)
    if args.plot:
        draw(result, args.plot)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--set", dest="sets", action="append", default=[], metavar="NAME=FILE[:COLUMN],...", help="rows; repeatable")
    add("--predictor", dest="predictors", action="append", default=[], metavar="NAME=FOLDER", help="for this set")
    add("--new-model", metavar="NAME", help="the set of many models whose new models are forecast")
    add("--seeds", type=whole(1), default=3, help="orders of the rows (%(default)s)")
    add("--answers", type=whole(100), default=12_800, metavar="N", help="at most so many of a set (%(default)s)")
    add("--results", type=Path, metavar="FILE", help="show and draw an earlier --output")
    add_results(parser, "--plot")
    args = parser.parse_args()
    if not args.sets and not args.results:
        parser.error("either --set or --results is needed")
    args.sets, args.predictors = named(parser, args.sets), named(parser, args.predictors)
    unknown = [name for name in (*args.predictors, args.new_model) if name not in (*args.sets, None)]
    if unknown and not args.results:
        parser.error(f"no --set has the name {unknown[0]!r}")
    return args


def named(parser: argparse.ArgumentParser, texts: Sequence[str]) -> dict[str, str]:
    if bad := [text for text in texts if not all(text.partition("="))]:
        parser.error(f"{bad[0]!r} is not NAME=...")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError when the file is not an --output of this script."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"sets", "costs"} <= set(result):
        raise ValueError(f"{path} is not an --output of this script")
    return result


# ---- measuring ---------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    sets = {name: load_rows(text.split(",")).rows for name, text in args.sets.items()}
    for name, rows in sets.items():
        if len(rows) < FIRST:
            raise DatasetError(f"{name}: {len(rows)} rows are too few to learn from")
    predictors = {name: LengthPredictor.load(folder) for name, folder in args.predictors.items()}
    steps = len(sets) * args.seeds + (args.seeds if args.new_model else 0) + args.seeds + 1 + bool(predictors)
    with counted(steps) as done:
        measured = []
        for name, rows in sets.items():
            streams = []
            for seed in range(args.seeds):
                streams.append(stream(shuffled(rows, seed)[: args.answers], predictors.get(name)))
                done(f"{name}, seed {seed}")
            measured.append({"name": name, **facts(rows), **over_seeds(streams)})
        newcomers = [] if args.new_model is None else new_models(sets[args.new_model], args.seeds, done)
        nonsense = nonsense_beside(next(iter(sets.values())), args.seeds, done)
        name, rows = next(iter(sets.items()))
        costs = {LEARNER: cost_of(shuffled(rows, 0)[:TIMED_MAX], None)}
        done("time and memory")
        for name, predictor in itertools.islice(predictors.items(), 1):
            costs[CORRECTED] = cost_of(shuffled(sets[name], 0)[:TIMED_MAX], predictor)
            done("time and memory with a predictor")
    result = {**day_and_machine(), "seeds": args.seeds, "sets": measured, "nonsense": nonsense, "costs": costs}
    return rounded(result | ({"new_model": newcomers} if newcomers else {}))  # type: ignore[no-any-return]


def shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """The rows in the order of `llmserve evaluate --online --shuffle SEED`."""
    return [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]


def facts(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "models": len({row.prompt.model for row in rows}),
        "capped": sum(row.capped for row in rows),
        "median_tokens": float(np.median([row.output_tokens for row in rows])),
    }


def stream(rows: Sequence[Row], predictor: LengthPredictor | None) -> dict[str, Any]:
    """The scores of each way to forecast these rows, in this order."""
    characters = [[float(len(row.prompt.text))] * LEVELS for row in rows]
    ways: dict[str, Forecasts] = {
        LEARNER: forecast_stream(OnlineLearner(), rows),
        DELAYED: forecast_stream(OnlineLearner(), rows, in_flight=IN_FLIGHT),
        TEMPLATES: forecast_stream(OnlineLearner(learns_text=False), rows),
        PROMPT_LENGTH: np.array(characters),
    }
    if predictor is not None:
        predictions = predictor.predictions([row.prompt for row in rows])
        ways[PREDICTOR] = np.exp([at_levels(np.log(prediction.lengths).tolist()) for prediction in predictions])
        ways[CORRECTED] = forecast_stream(OnlineLearner(), rows, predictions)
    begin = min(GAIN_FROM, len(rows) // 2)
    actual = np.array([row.output_tokens for row in rows[begin:]], float)
    oracle = gain(actual, actual)
    return {
        "oracle_gain": oracle,
        "ways": {name: scored(forecasts, rows) | {"gain": gain_of(forecasts[begin:], actual)}
                 for name, forecasts in ways.items()},
    }  # fmt: skip


def scored(forecasts: Forecasts, rows: Sequence[Row]) -> dict[str, Any]:
    curve = []
    for first, last in itertools.pairwise(CURVE):
        if (first + last) / 2 <= len(rows):
            middle = math.sqrt(max(first, SEEN_LEAST) * min(last, len(rows)))
            curve.append({"seen": middle, "tau": scores(forecasts[first:last], rows[first:last])["tau"]})
    return {"ranges": scores_by_range(forecasts, rows), "curve": curve}


def gain_of(forecasts: Forecasts, actual: Any) -> float:
    """The gain of bins by risk, the server's default; without a forecast the risk counts as 0."""
    return gain(np.nan_to_num(risks(forecasts, BATCH_SIZE)), actual)


def gain(score: Any, actual: Any) -> float:
    """Throughput of a saturated server with bins over its throughput without (predictor.evaluate.saturated_gain)."""
    return saturated_gain(equal_mass_bins(score, BINS), actual, BATCH_SIZE)


def over_seeds(streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the orders; of tau also its least and its largest value."""
    oracle = fmean(stream["oracle_gain"] for stream in streams)
    ways = {}
    for name in streams[0]["ways"]:
        each = [stream["ways"][name] for stream in streams]
        gained = fmean(way["gain"] for way in each)
        ways[name] = {
            "ranges": [means(parts) for parts in zip(*(way["ranges"] for way in each), strict=True)],
            "curve": [means(parts) for parts in zip(*(way["curve"] for way in each), strict=True)],
            "gain": gained,
            "share_of_oracles_gain": (gained - 1) / (oracle - 1),
        }
    return {"oracle_gain": oracle, "ways": ways}


def means(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each number over the seeds that have it; tau_min and tau_max."""
    merged: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts if part[name] is not None]
        merged[name] = None if not values else values[0] if name in ("from", "to") else fmean(values)
    taus = [part["tau"] for part in parts if part["tau"] is not None]
    return merged | ({"tau_min": min(taus), "tau_max": max(taus)} if taus else {})


def new_models(rows: Sequence[Row], seeds: int, done: Callable[[str], None]) -> list[dict[str, Any]]:
    """Scores of a new model's first answers, means over seeds and models; see the script's description."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for seed in range(seeds):
        order = shuffled(rows, seed)
        models = np.random.default_rng(seed).permutation(sorted({row.prompt.model for row in rows}))[:NEW_MODELS]
        for model, prompts_known in itertools.product(models.tolist(), found):
            new = [row for row in order if row.prompt.model == model][:FIRST]
            asked = set() if prompts_known else {row.prompt.text for row in new}
            others = [row for row in order if row.prompt.model != model and row.prompt.text not in asked][:OTHERS]
            forecasts = forecast_stream(OnlineLearner(), [*others, *new])
            found[prompts_known].append(scores(forecasts[len(others) :], new) | {"others": len(others)})
        done(f"new models, seed {seed}")
    return [{"prompts_known": known, "models": len(parts), **means(parts)} for known, parts in found.items()]


def nonsense_beside(rows: Sequence[Row], seeds: int, done: Callable[[str], None]) -> list[dict[str, Any]]:
    """Scores of the honest keys' answers for each of NONSENSE, means over the seeds."""
    streams: dict[float, list[dict[str, Any]]] = {share: [] for share in NONSENSE}
    for seed in range(seeds):
        honest = [sent_by(row, f"key {place % HONEST_KEYS}") for place, row in enumerate(shuffled(rows, seed)[:HONEST])]
        for share, scored in streams.items():
            rng, mixed = np.random.default_rng(seed), list[Row]()
            for row in honest:
                mixed += [nonsense_of(rows, rng) for _ in range(rng.geometric(1 - share) - 1)]
                mixed.append(row)
            forecasts = forecast_stream(OnlineLearner(), mixed)
            is_honest = [row.prompt.sender != "nonsense" for row in mixed]
            scored.append({"ranges": scores_by_range(forecasts[is_honest], honest)})
        done(f"nonsense, seed {seed}")
    return [
        {"share": share, "ranges": [means(parts) for parts in zip(*(way["ranges"] for way in ways), strict=True)]}
        for share, ways in streams.items()
    ]


def nonsense_of(rows: Sequence[Row], rng: np.random.Generator) -> Row:
    tokens = max(1, round(math.exp(rng.uniform(0, math.log(NONSENSE_TOKENS)))))
    return replace(sent_by(rows[rng.integers(len(rows))], "nonsense"), output_tokens=tokens)


def sent_by(row: Row, sender: str) -> Row:
    return replace(row, prompt=msgspec.structs.replace(row.prompt, sender=sender))


def cost_of(rows: Sequence[Row], predictor: LengthPredictor | None) -> dict[str, Any]:
    """Microseconds of the forecast and of the learning of an answer, and the learner's memory after the last answer.

    A predictor's own time is not counted: it runs in another process.
    """
    predictions: Sequence[Prediction | None] = [None] * len(rows)
    if predictor is not None:
        predictions = predictor.predictions([row.prompt for row in rows])
    took_ns = np.min([times_ns(rows, predictions) for _ in range(PASSES)], axis=0)  # (2, rows)
    both = took_ns.sum(axis=0)
    tracemalloc.start()
    learner = OnlineLearner()
    for row, prediction in zip(rows, predictions, strict=True):
        learner.observe(learner.forecast(row.prompt, prediction), row.output_tokens, row.capped)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    parts = {"forecast_us": took_ns[0], "learn_us": took_ns[1], "both_us": both}
    return {
        "answers": len(rows),
        **{name: {"median": float(np.median(ns)) / 1e3, "p99": float(np.quantile(ns, 0.99)) / 1e3,
                  "max": float(ns.max()) / 1e3} for name, ns in parts.items()},
        "memory_mib": held / 2**20,
    }  # fmt: skip


def times_ns(rows: Sequence[Row], predictions: Sequence[Prediction | None]) -> list[list[int]]:
    """Nanoseconds of each row's forecast, and of its learning."""
    learner, clock = OnlineLearner(), time.perf_counter_ns
    forecast_ns, learn_ns = [], []
    for row, prediction in zip(rows, predictions, strict=True):
        begin = clock()
        forecast = learner.forecast(row.prompt, prediction)
        middle = clock()
        learner.observe(forecast, row.output_tokens, row.capped)
        learn_ns.append(clock() - middle)
        forecast_ns.append(middle - begin)
    return [forecast_ns, learn_ns]


# ---- showing -----------------------------------------------------------------------------------------------------


def print_tables(result: Mapping[str, Any]) -> None:
    print(table(result, "Kendall's tau, and the share of the oracle's gain", "tau", ".2f"), end="\n\n")
    print(table(result, "MAE, tokens", "mae_tokens", ".1f"), end="\n\n")
    print(table(result, "Share of the answers in the 80 % interval", "coverage80", ".1%"), end="\n\n")
    for part in result.get("new_model", []):
        prompts = "prompts that they answered" if part["prompts_known"] else "other prompts"
        tau = text(part["tau"], ".2f")
        print(f"A new model after {part['others']:,.0f} answers of other models, {prompts}: tau {tau}.\n")
    for part in result["nonsense"]:
        taus = ", ".join(f"{scores['tau']:.2f}" for scores in part["ranges"])
        print(f"Honest keys beside {part['share']:.0%} of nonsense: tau {taus} by range of their answers.\n")
    for way, cost in result["costs"].items():
        rows = [
            [name, *(f"{value:.0f}" for value in cost[f"{name}_us"].values())] for name in ("forecast", "learn", "both")
        ]
        title = f"{way}: {cost['memory_mib']:.1f} MiB after {cost['answers']:,} answers"
        print(markdown(["µs an answer", "median", "p99", "largest"], rows, title=title, right=True))


def table(result: Mapping[str, Any], title: str, key: str, shape: str) -> str:
    """A Markdown table of one score: a line for each set and way, a column for each range of answers seen."""
    head = ["set", "forecasts", *(f"{first:,}-{last:,}" for first, last in RANGES), *(["gain"] if key == "tau" else [])]
    lines = []
    for part in result["sets"]:
        for name, way in part["ways"].items():
            if key != "tau" and name == PROMPT_LENGTH:
                continue
            scored = {scores["from"]: scores[key] for scores in way["ranges"]}
            share = [text(way["share_of_oracles_gain"], ".0%")] if key == "tau" else []
            lines.append([part["name"], name, *(text(scored.get(first), shape) for first, _ in RANGES), *share])
    return markdown(head, lines, title=title, right=True)


def text(value: float | None, shape: str) -> str:
    return "-" if value is None else format(value, shape)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Tau against answers seen: a panel a set, a line a way, and a band from the least to the largest of the seeds."""
    parts = result["sets"]
    columns = min(3, len(parts))
    lines = math.ceil(len(parts) / columns)
    figure, axes = new_figure(lines, columns, width=3.6 * columns, height=2.8 * lines + 0.6, sharey=True)
    for panel in axes.flat[len(parts) :]:
        panel.set_visible(False)
    for panel, part in zip(axes.flat, parts, strict=False):
        for name, way in part["ways"].items():
            points = [point for point in way["curve"] if point["tau"] is not None]
            seen = [point["seen"] for point in points]
            panel.plot(seen, [point["tau"] for point in points], color=COLORS[name], label=name, marker=".", lw=1.5)
            low, high = ([point[key] for point in points] for key in ("tau_min", "tau_max"))
            panel.fill_between(seen, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
        log_ticks(panel)
        panel.set_title(f"{part['name']} ({part['rows']:,} rows)", fontsize=9)
        panel.axhline(0, color="#555555", lw=0.8)
    for panel in axes[-1]:
        panel.set_xlabel("answers seen", fontsize=9)
    for panel in axes[:, 0]:
        panel.set_ylabel("Kendall's tau", fontsize=9)
    handles = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), fontsize=9, frameon=False
    )
    save(figure, path)
