"""Reports on a predictor with answers outside its training, and on baselines: tables, JSON, figures."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bins.risk import risks
from predictor.baselines import PROMPT_LENGTH, TFIDF_RIDGE, baselines, out_of_fold_baselines
from predictor.dataset import Row, Splits
from predictor.evaluate import (
    BATCH_SIZES,
    BIN_COUNTS,
    GAIN_BIN_COUNTS,
    Array,
    Difference,
    Gains,
    Scores,
    as_served,
    compare,
    confusion,
    equal_mass_bins,
    equal_mass_edges,
    evaluate,
    gains_as_json,
    gains_of,
)
from predictor.prompt import Prompt
from predictor.text import Grid, markdown

PREDICTOR, OTHER, ORACLE, RANDOM = "predictor", "other", "oracle", "random"
PUBLISHED = ["_Multi-Bin, Table 1_", "", "", "", "", "_86.1%_", "_63.0%_", "_42.3%_", "_95.9%_", "_79.4%_"]
NONE = "–"
DEVIATIONS = 2.0  # standard deviations of a rank correlation by chance, which chance rarely exceeds
BASELINES_NOTE = "The baselines get the prompt's text; the ridge also gets the requested model."
VALIDATION_NOTE = "Training chose its epoch by these answers: use them to choose a predictor, not to measure it."
GAINS_NOTE = (
    "Bins of gains are equal-mass over their scores: the median, the risk (bins/risk.py), or, for the oracle, the real "
    "length."
)


class QuantilePredictor(Protocol):
    """An evaluated predictor: predictor.predict.LengthPredictor, or an object with its interface."""

    def predict(self, prompts: Sequence[Prompt], /) -> NDArray[np.floating[Any]]:
        """(prompts, Q) ascending, equally likely lengths, tokens."""


@dataclass(frozen=True, slots=True)
class Report:
    """evaluated : name of the set of answers.  answers : their number.  capped : number of cut answers.

    metrics : by predictor.  gains : by predictor and way to bin; the oracle first, random bins last.
    confusions : of the predictor, by number of bins.  edges : inner edges in tokens, by number of bins.
    differences : predictor - other, if there is another predictor.  notes : remarks for the reader.
    """

    evaluated: str
    answers: int
    capped: int
    metrics: dict[str, Scores]
    gains: dict[str, Gains]
    confusions: dict[int, NDArray[np.intp]]
    edges: dict[int, list[float]]
    differences: dict[str, Difference]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """All fields; the metrics without their gains, because `gains` has the gains of all ways to bin."""
        metrics = {name: scores.as_json() for name, scores in self.metrics.items()}
        return {
            "evaluated": self.evaluated,
            "answers": self.answers,
            "capped": self.capped,
            "metrics": {name: {k: v for k, v in scores.items() if k != "gains"} for name, scores in metrics.items()},
            "gains": {name: gains_as_json(gains) for name, gains in self.gains.items()},
            "bin_edges": {str(count): edges for count, edges in self.edges.items()},
            "confusion": {str(count): counts.tolist() for count, counts in self.confusions.items()},
            "differences": {
                name: {key: round(value, 4) for key, value in asdict(difference).items()}
                for name, difference in self.differences.items()
            },
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the predictor is of no use. Kendall's tau of n unrelated pairs has mean 0 and variance
        2 (2n + 5) / (9n (n - 1)) (Kendall, 1938).
        """
        n, tau = self.answers, self.metrics[PREDICTOR].kendall_tau
        chance = math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))) if n > 1 else math.inf
        if tau >= DEVIATIONS * chance:  # False for nan, when all answers are of one length
            return ()
        return (
            f"This predictor does not rank these {n} answers: Kendall's tau is {tau:.2f}, and chance alone gives up to "
            f"{DEVIATIONS * chance:.2f}. Bins by it gain nothing. Train on more answers, or evaluate on more.",
        )

    def tables(self) -> str:
        """All parts as Markdown."""
        return markdown(self.parts())

    def parts(self) -> list[str | Grid]:
        """Texts, in Markdown, and tables."""
        parts: list[str | Grid] = [
            *[f"**{warning}**" for warning in self.warnings],
            f"{self.answers} {self.evaluated} answers, {self.capped} of them cut at their max_tokens.",
            accuracy_table(self.metrics),
            "Throughput with bins over throughput without, endless backlog, batches of B answers:",
            gains_table(self.gains, self.answers),
        ]
        if any(self.answers < size * count for size in BATCH_SIZES for count in GAIN_BIN_COUNTS):
            parts.append(f"{NONE}: too few answers, fewer in a bin than in a batch.")
        if self.differences:
            parts += ["Differences, with 95 % intervals (paired bootstrap):", differences_table(self.differences)]
        return [*parts, "\n".join(f"* {note}" for note in self.notes)]

    def figures(self, folder: Path) -> list[Path]:
        """Write confusion.png, gains.png and, for a predictor of quantiles, calibration.png."""
        from predictor.figures import calibration_figure, confusion_figure, gains_figure  # matplotlib takes a second

        answers = f"{self.answers:,} {self.evaluated} answers"
        paths = [folder / "confusion.png", folder / "gains.png"]
        confusion_figure(paths[0], self.confusions, self.edges, f"Bins of {answers}: per cent of each real bin")
        gains_figure(paths[1], self.gains, f"Throughput gained by bins, endless backlog ({answers})")
        coverages = {name: scores.coverage for name, scores in self.metrics.items() if scores.coverage is not None}
        if coverages:
            paths.append(folder / "calibration.png")
            calibration_figure(paths[2], coverages, f"Calibration on {answers}")
        return paths


# --- reports ----------------------------------------------------------------------------------------------------


def held_out_report(
    predictor: QuantilePredictor,
    splits: Splits,
    *,
    other: QuantilePredictor | None = None,
    answers_max: int | None = None,
    seed: int = 0,
) -> Report:
    """A report on the held-out rows of the predictor's split; baselines are fitted to the training rows.

    other : a second predictor, for the same rows.  answers_max : most rows, drawn with the seed.
    """
    rows = _sample(splits.held_out, answers_max, seed)
    return _split_report("held-out", predictor, other, rows, splits.train)


def validation_report(
    predictor: QuantilePredictor,
    splits: Splits,
    *,
    other: QuantilePredictor | None = None,
    answers_max: int | None = None,
    seed: int = 0,
) -> Report:
    """A report on the validation rows, for the choice of a predictor; the held-out rows then judge the chosen one."""
    rows = _sample(splits.validation, answers_max, seed)
    return _split_report("validation", predictor, other, rows, splits.train, (VALIDATION_NOTE,))


def _split_report(
    evaluated: str,
    predictor: QuantilePredictor,
    other: QuantilePredictor | None,
    rows: Sequence[Row],
    training: Sequence[Row],
    notes: tuple[str, ...] = (),
) -> Report:
    notes = (
        f"Baselines are fitted to the training rows of the same data. {BASELINES_NOTE}",
        f"Bins of accuracies are equal-mass over the lengths of these training rows. {GAINS_NOTE}",
        *notes,
    )
    lengths = [row.output_tokens for row in training]
    return _report(evaluated, predictor, other, rows, baselines(training, rows), lengths, notes)


def transfer_report(
    predictor: QuantilePredictor,
    rows: Sequence[Row],
    *,
    other: QuantilePredictor | None = None,
    answers_max: int | None = None,
    seed: int = 0,
) -> Report:
    """A report on rows outside the predictor's training; each row's baselines are fitted to rows of other prompts.

    Bins of accuracies are equal-mass over the lengths of these rows, as in a server that has served them: with edges of
    other data most bins might be empty. Other arguments as for `held_out_report`.
    Raises DatasetError for rows of fewer than 5 prompts.
    """
    rows = _sample(rows, answers_max, seed)
    notes = (
        "Baselines are fitted to rows of other prompts of the same data, in 5 folds: unlike the predictor they know "
        f"this data. {BASELINES_NOTE}",
        f"Bins of accuracies are equal-mass over the lengths of these answers. {GAINS_NOTE}",
    )
    return _report(
        "unseen", predictor, other, rows, out_of_fold_baselines(rows), [r.output_tokens for r in rows], notes
    )


def _report(
    evaluated: str,
    predictor: QuantilePredictor,
    other: QuantilePredictor | None,
    rows: Sequence[Row],
    points: Mapping[str, Array],
    lengths: Sequence[int],
    notes: tuple[str, ...],
) -> Report:
    """points : the baselines' predictions for the rows.  lengths : for the equal-mass bins of accuracies."""
    actual, capped = np.array([row.output_tokens for row in rows], float), np.array([row.capped for row in rows])
    ceilings = np.array([_ceiling(row) for row in rows], float)  # None becomes nan
    prompts = [row.prompt for row in rows]
    predictors = {PREDICTOR: predictor} | ({} if other is None else {OTHER: other})
    quantiles = {name: as_served(model.predict(prompts), ceilings) for name, model in predictors.items()}
    metrics = {
        name: evaluate(predicted, actual, lengths, capped=capped, ceilings=ceilings)
        for name, predicted in [*quantiles.items(), *points.items()]
    }
    edges = {count: equal_mass_edges(lengths, count) for count in BIN_COUNTS}
    differences = {}
    if other is not None:
        pair = quantiles[PREDICTOR], quantiles[OTHER]
        differences = compare(*pair, actual, lengths, capped=capped, ceilings=ceilings)
    return Report(
        evaluated=evaluated,
        answers=len(rows),
        capped=int(capped.sum()),
        metrics=metrics,
        gains=_all_gains(quantiles, metrics, actual),
        confusions={count: confusion(quantiles[PREDICTOR], actual, e) for count, e in edges.items()},
        edges={count: e.tolist() for count, e in edges.items()},
        differences=differences,
        notes=notes,
    )


def _ceiling(row: Row) -> int | None:
    """The limit of the answer's length; for an answer cut at an unknown limit, its length."""
    return row.output_tokens if row.capped and row.output_tokens_max is None else row.output_tokens_max


def _all_gains(quantiles: Mapping[str, Array], metrics: Mapping[str, Scores], actual: Array) -> dict[str, Gains]:
    gains = {ORACLE: gains_of(lambda k, _: equal_mass_bins(actual, k), actual)}
    for name, predicted in quantiles.items():
        if predicted.shape[1] > 1:  # the risk of a point prediction is the prediction
            gains[f"{name}, bins by risk"] = gains_by_risk(predicted, actual)
        gains[f"{name}, bins by median"] = metrics[name].gains
    nothing = np.zeros_like(actual)
    return gains | {
        TFIDF_RIDGE: metrics[TFIDF_RIDGE].gains,
        PROMPT_LENGTH: metrics[PROMPT_LENGTH].gains,
        RANDOM: gains_of(lambda k, _: equal_mass_bins(nothing, k), actual),
    }


def gains_by_risk(quantiles: Array, actual: Array) -> Gains:
    """Gains of equal-mass bins by risk: the expected effect of a request on its batch."""
    return gains_of(lambda k, batch_size: equal_mass_bins(risks(quantiles, batch_size), k), actual)


def _sample(rows: Sequence[Row], size_max: int | None, seed: int) -> list[Row]:
    """At most size_max rows, in their order; drawn at random, because files may be sorted."""
    if size_max is None or len(rows) <= size_max:
        return list(rows)
    chosen = np.random.default_rng(seed).choice(len(rows), size_max, replace=False)
    return [rows[i] for i in sorted(chosen)]


# --- tables -----------------------------------------------------------------------------------------------------


def accuracy_table(metrics: Mapping[str, Scores]) -> Grid:
    """±1 of 2 bins is always right, and left out. The last line has the paper's results.

    A predicted distribution has two lines: bins by the median, like a point prediction, and the likeliest bin (for ±1:
    the likeliest three neighbours).
    """
    head = ["", "MAE, tokens", "Kendall's tau", "calibration error", "pinball loss, tokens"]
    head += [*[f"{k} bins" for k in BIN_COUNTS], *[f"±1 of {k}" for k in BIN_COUNTS[1:]]]
    lines = []
    for name, scores in metrics.items():
        numbers = [
            f"{scores.mae_tokens:.1f}",
            NONE if np.isnan(scores.kendall_tau) else f"{scores.kendall_tau:.3f}",
            NONE if scores.calibration_error is None else f"{scores.calibration_error:.1%}",
            f"{scores.pinball_tokens:.1f}",
        ]
        lines.append([name, *numbers, *_shares(scores.bin_accuracy, scores.near_accuracy)])
        if scores.likely_accuracy is not None and scores.likely_near_accuracy is not None:
            likely = _shares(scores.likely_accuracy, scores.likely_near_accuracy)
            lines.append([f"{name}, likeliest bins", *[""] * len(numbers), *likely])
    return [head, *lines, PUBLISHED]


def _shares(exact: Mapping[int, float], near: Mapping[int, float]) -> list[str]:
    return [*[f"{exact[k]:.1%}" for k in BIN_COUNTS], *[f"{near[k]:.1%}" for k in BIN_COUNTS[1:]]]


def gains_table(gains: Mapping[str, Gains], answers: int) -> Grid:
    """answers : number of evaluated answers. Gains are left out where a bin has fewer answers than a batch."""
    columns = [(size, count) for size in BATCH_SIZES for count in GAIN_BIN_COUNTS]
    head = ["B × bins", *[f"{size} × {count}" for size, count in columns]]
    lines = [
        [name, *[f"{by_size[size][k]:.2f}" if answers >= size * k else NONE for size, k in columns]]
        for name, by_size in gains.items()
    ]
    return [head, *lines]


def differences_table(differences: Mapping[str, Difference]) -> Grid:
    head = [f"{PREDICTOR} - {OTHER}", "difference", "from", "to"]
    lines = [[name, f"{d.value:+.3f}", f"{d.low:+.3f}", f"{d.high:+.3f}"] for name, d in differences.items()]
    return [head, *lines]


def shareable(value: Any) -> Any:
    """The value; absolute paths lose their folders, which are private to a machine."""
    return re.sub(r"(^|[=:])/.*/", r"\1", value) if isinstance(value, str) else value
