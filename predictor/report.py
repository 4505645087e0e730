"""How good a predictor is on answers it was not trained on, next to what needs no predictor: tables, JSON, figures."""

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

PREDICTOR, OTHER, ORACLE, RANDOM = "predictor", "other", "oracle", "random"
PUBLISHED = ["_Multi-Bin, Table 1_", "", "", "", "", "_86.1%_", "_63.0%_", "_42.3%_", "_95.9%_", "_79.4%_"]
NONE = "–"
DEVIATIONS = 2.0  # of a rank correlation without any relation, which chance hardly ever exceeds
BASELINES_SEE = "They see the prompt's text, the ridge also which model is asked."
VALIDATION_IS_SEEN = "Training chose its epoch by these answers: they can choose predictors, not say how good one is."
GAINS_GO_BY = (
    "Those of gains are equal-mass over the scores that they go by: median, risk (bins/risk.py), or, for the oracle, "
    "the real length."
)


class QuantilePredictor(Protocol):
    """What is evaluated: predictor.predict.LengthPredictor, or what behaves like one."""

    @property
    def training_lengths(self) -> Sequence[int]:
        """Output tokens of its training answers, or a sample of them."""

    def predict(self, prompts: Sequence[Prompt], /) -> NDArray[np.floating[Any]]:
        """(prompts, Q) ascending, equally likely lengths, tokens."""


@dataclass(frozen=True, slots=True)
class Report:
    """evaluated : which answers. answers, capped : how many they are, and how many of them were cut.

    metrics : by predictor. gains : by predictor and way to bin; the oracle first, random bins last.
    confusions, edges : by number of bins, of the predictor; `edges` are inner edges in tokens, for all rows alike.
    differences : predictor - other, when there is another. notes : what a reader has to know.
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
        """Metrics by name, without their gains, which stand beside them with those of the other ways to bin."""
        metrics = {name: found.as_json() for name, found in self.metrics.items()}
        return {
            "evaluated": self.evaluated,
            "answers": self.answers,
            "capped": self.capped,
            "metrics": {name: {k: v for k, v in found.items() if k != "gains"} for name, found in metrics.items()},
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
        """What keeps the predictor from being of use. Without any relation Kendall's tau of n pairs has mean 0 and
        variance 2 (2n + 5) / (9n (n - 1)) (Kendall, 1938).
        """
        n, tau = self.answers, self.metrics[PREDICTOR].kendall_tau
        chance = math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))) if n > 1 else math.inf
        if tau >= DEVIATIONS * chance:  # False for nan, where all answers are alike
            return ()
        return (
            f"This predictor does not rank these {n} answers: Kendall's tau is {tau:.2f}, and chance alone gives up to "
            f"{DEVIATIONS * chance:.2f}. Bins by it gain nothing. Train on more answers, or evaluate on more.",
        )

    def tables(self) -> str:
        """Markdown."""
        parts = [
            *[f"**{warning}**" for warning in self.warnings],
            f"{self.answers} {self.evaluated} answers, {self.capped} of them cut at their max_tokens.",
            accuracy_table(self.metrics),
            "Throughput with bins over throughput without, endless backlog, batches of B answers:",
            gains_table(self.gains, self.answers),
        ]
        if self.differences:
            parts += ["Differences, with 95 % intervals (paired bootstrap):", differences_table(self.differences)]
        return "\n\n".join([*parts, "\n".join(f"* {note}" for note in self.notes)])

    def figures(self, folder: Path) -> list[Path]:
        """Write confusion.png, gains.png and, for a predictor that gives quantiles, calibration.png."""
        from predictor.figures import calibration_figure, confusion_figure, gains_figure  # matplotlib: a second

        said = f"{self.answers:,} {self.evaluated} answers"
        paths = [folder / "confusion.png", folder / "gains.png"]
        confusion_figure(paths[0], self.confusions, self.edges, f"Bins of {said}: per cent of each real bin")
        gains_figure(paths[1], self.gains, f"Throughput gained by bins, endless backlog ({said})")
        coverages = {name: found.coverage for name, found in self.metrics.items() if found.coverage is not None}
        if coverages:
            paths.append(folder / "calibration.png")
            calibration_figure(paths[2], coverages, f"Calibration on {said}")
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
    """On the held-out rows of the split that the predictor was trained with; baselines are fitted to its training rows.

    other : a second predictor, for the same rows. answers_max : evaluate at most so many, drawn by the seed.
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
    """The same on the validation rows, by which predictors may be chosen: held-out rows then judge the chosen one."""
    rows = _sample(splits.validation, answers_max, seed)
    return _split_report("validation", predictor, other, rows, splits.train, (VALIDATION_IS_SEEN,))


def _split_report(
    evaluated: str,
    predictor: QuantilePredictor,
    other: QuantilePredictor | None,
    rows: Sequence[Row],
    training: Sequence[Row],
    notes: tuple[str, ...] = (),
) -> Report:
    notes = (
        f"Baselines are fitted to the training rows of the same data. {BASELINES_SEE}",
        f"Bins of accuracies are equal-mass over the predictor's training lengths. {GAINS_GO_BY}",
        *notes,
    )
    return _report(evaluated, predictor, other, rows, baselines(training, rows), predictor.training_lengths, notes)


def transfer_report(
    predictor: QuantilePredictor,
    rows: Sequence[Row],
    *,
    other: QuantilePredictor | None = None,
    answers_max: int | None = None,
    seed: int = 0,
) -> Report:
    """On rows none of which the predictor was trained on; each row's baselines are fitted to other prompts' rows.

    Bins of accuracies are equal-mass over these rows' own lengths, as those of a server are that has seen them: over
    other data's lengths, most of them might be empty. Other arguments as for `held_out_report`.
    Raises DatasetError for rows of fewer than 5 prompts.
    """
    rows = _sample(rows, answers_max, seed)
    notes = (
        "Baselines are fitted to other prompts' rows of the same data, in 5 folds: unlike the predictor they know it. "
        f"{BASELINES_SEE}",
        f"Bins of accuracies are equal-mass over the lengths of these answers. {GAINS_GO_BY}",
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
    """points : the baselines' predictions for the rows. lengths : that the bins of accuracies are equal-mass over."""
    actual, capped = np.array([row.output_tokens for row in rows], float), np.array([row.capped for row in rows])
    ceilings = np.array([_ceiling(row) for row in rows], float)  # None becomes nan
    prompts = [row.prompt for row in rows]
    predictors = {PREDICTOR: predictor} | ({} if other is None else {OTHER: other})
    quantiles = {name: as_served(each.predict(prompts), ceilings) for name, each in predictors.items()}
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
    """What the answer could be at most; of one that was cut at nobody knows what, how long it became."""
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
    """Of equal-mass bins by what a request is expected to do to a batch."""
    return gains_of(lambda k, batch_size: equal_mass_bins(risks(quantiles, batch_size), k), actual)


def _sample(rows: Sequence[Row], size_max: int | None, seed: int) -> list[Row]:
    """In their order; files are sorted by this and that, so the first ones would not do."""
    if size_max is None or len(rows) <= size_max:
        return list(rows)
    chosen = np.random.default_rng(seed).choice(len(rows), size_max, replace=False)
    return [rows[i] for i in sorted(chosen)]


# --- tables -----------------------------------------------------------------------------------------------------


def accuracy_table(metrics: Mapping[str, Scores]) -> str:
    """Within one of two bins is everything, and so left out. The last line is what the paper reports.

    Of predicted distributions there are two lines: bins by the median, as a point prediction's, and the likeliest bin
    (for ±1: the likeliest three neighbours).
    """
    head = ["", "MAE, tokens", "Kendall's tau", "calibration error", "pinball loss, tokens"]
    head += [*[f"{k} bins" for k in BIN_COUNTS], *[f"±1 of {k}" for k in BIN_COUNTS[1:]]]
    lines = []
    for name, found in metrics.items():
        numbers = [
            f"{found.mae_tokens:.1f}",
            NONE if np.isnan(found.kendall_tau) else f"{found.kendall_tau:.3f}",
            NONE if found.calibration_error is None else f"{found.calibration_error:.1%}",
            f"{found.pinball_tokens:.1f}",
        ]
        lines.append([name, *numbers, *_shares(found.bin_accuracy, found.near_accuracy)])
        if found.likely_accuracy is not None and found.likely_near_accuracy is not None:
            likely = _shares(found.likely_accuracy, found.likely_near_accuracy)
            lines.append([f"{name}, likeliest bins", *[""] * len(numbers), *likely])
    return markdown([head, *lines, PUBLISHED])


def _shares(exact: Mapping[int, float], near: Mapping[int, float]) -> list[str]:
    return [*[f"{exact[k]:.1%}" for k in BIN_COUNTS], *[f"{near[k]:.1%}" for k in BIN_COUNTS[1:]]]


def gains_table(gains: Mapping[str, Gains], answers: int) -> str:
    """answers : how many were evaluated; where bins hold fewer of them than a batch, gains would be too large."""
    columns = [(size, count) for size in BATCH_SIZES for count in GAIN_BIN_COUNTS]
    head = ["B × bins", *[f"{size} × {count}" for size, count in columns]]
    lines = [
        [name, *[f"{found[size][k]:.2f}" if answers >= size * k else NONE for size, k in columns]]
        for name, found in gains.items()
    ]
    few = any(answers < size * count for size, count in columns)
    note = f"\n\n{NONE}: too few answers to say, fewer in a bin than in a batch."
    return markdown([head, *lines]) + (note if few else "")


def differences_table(differences: Mapping[str, Difference]) -> str:
    head = [f"{PREDICTOR} - {OTHER}", "difference", "from", "to"]
    lines = [[name, f"{d.value:+.3f}", f"{d.low:+.3f}", f"{d.high:+.3f}"] for name, d in differences.items()]
    return markdown([head, *lines])


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table; the first line is its head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])


def shareable(value: Any) -> Any:
    """The value, but absolute paths without their folder: where files lie on a machine is nobody else's business."""
    return re.sub(r"(^|[=:])/.*/", r"\1", value) if isinstance(value, str) else value
