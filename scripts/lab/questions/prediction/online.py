"""What a server learns from answers: forecasts of a stream of requests, each made after all earlier answers ended.

    python scripts/lab prediction.online runs/predictor --data answers.jsonl --part held-out --output online.json

Rows come in a random order. They come once unchanged, and once with all lengths of the second half multiplied by
--drift, as when an engine gets another model. The script scores four kinds of forecasts of the second half: as
predicted, recalibrated, recalibrated with the memory of templates, and from earlier answers alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kit.arguments import exit_on, parser_of
from kit.results import write_json
from kit.tables import show

from predictor.dataset import Row, load_rows, split_rows
from predictor.errors import PredictorError
from predictor.evaluate import evaluate
from predictor.online import OnlineLearner
from predictor.options import Split, add_data_options, columns, counter, share
from predictor.predict import LengthPredictor
from predictor.prediction import Prediction

WAYS = ("as predicted", "recalibrated", "recalibrated, with memory", "without a predictor")


def main() -> None:
    args = parse_args()
    with exit_on(PredictorError, OSError):
        result = measure(args)
    print_tables(result)
    write_json(args.output, result)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("predictor", type=Path, help="a predictor's folder")
    add_data_options(parser)
    add("--part", choices=["held-out", "all"], default="all", help="held-out: only rows that training left out")
    add("--model", metavar="NAME", help="use only answers of this model")
    add("--held-out-share", type=share, default=Split().held_out_share, help="as in training (%(default)s)")
    add("--validation-share", type=share, default=Split().validation_share, help="as in training (%(default)s)")
    add("--drift", type=float, default=2.0, help="factor on the lengths of the second half (%(default)s)")
    add("--seed", type=int, default=0, help="of the split, as in training, and of the order")
    add("--output", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    predictor = LengthPredictor.load(args.predictor)
    rows = load_rows(args.data, columns(args), counter(args.answer_tokenizer)).rows
    if args.part == "held-out":
        rows = split_rows(rows, args.seed, args.validation_share, args.held_out_share).held_out
    rows = [row for row in rows if args.model in (None, row.prompt.model)]
    if len(rows) < 100:
        raise PredictorError(f"{len(rows)} rows are too few to learn from")
    rows = [rows[i] for i in np.random.default_rng(args.seed).permutation(len(rows))]
    predictions = predictor.predictions([row.prompt for row in rows])
    factors = {"steady": 1.0, f"lengths x {args.drift:g} from the middle on": args.drift}
    return {
        "answers_scored": len(rows) - len(rows) // 2,
        "streams": {
            name: {way: stream(way, rows, predictions, factor, predictor.training_lengths) for way in WAYS}
            for name, factor in factors.items()
        },
    }


def stream(
    way: str, rows: Sequence[Row], predictions: Sequence[Prediction], factor: float, training_lengths: Sequence[int]
) -> dict[str, Any]:
    """Metrics of the forecasts of the second half."""
    learner = OnlineLearner() if way.endswith(("memory", "without a predictor")) else OnlineLearner(keys_max=0)
    middle = len(rows) // 2
    forecasts, actual = [], []
    for place, (row, predicted) in enumerate(zip(rows, predictions, strict=True)):
        length = row.output_tokens * (factor if place >= middle else 1.0)
        if way == "as predicted":
            lengths = predicted.lengths
        else:
            forecast = learner.forecast(row.prompt, None if way == "without a predictor" else predicted)
            learner.observe(forecast, length, row.capped)
            lengths = forecast.lengths
        if place >= middle:
            forecasts.append(lengths)
            actual.append(length)
    metrics = evaluate(forecasts, actual, training_lengths).as_json()
    return {name: metrics[name] for name in ("mae_tokens", "kendall_tau", "calibration_error", "pinball_tokens")}


def print_tables(result: dict[str, Any]) -> None:
    for name, ways in result["streams"].items():
        rows = [
            [way, *("-" if value is None else f"{value:g}" for value in metrics.values())]
            for way, metrics in ways.items()
        ]
        columns = ("", "MAE, tokens", "Kendall's tau", "calibration error", "pinball loss, tokens")
        show(f"{name} ({result['answers_scored']} answers scored)", columns, rows)
