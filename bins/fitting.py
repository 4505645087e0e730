"""Fits an engine's profile to observed batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bins.curve import Curve, check_two_sizes, non_negative_fit, numbers, relative_error
from bins.profile import EnergySource, Profile


@dataclass(frozen=True, slots=True)
class Observation:
    """One observed batch.

    size     sequences
    tokens   steps: output tokens of its longest answer, > 0
    seconds  from its start to the end of its last answer, > 0
    joules   drawn during these seconds, > 0; None: not measured
    """

    size: int
    tokens: float
    seconds: float
    joules: float | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"an observed batch has at least one sequence, not {self.size}")
        for name in ("tokens", "seconds", "joules"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"an observed batch's {name} must be positive and finite, not {value}")


def fit(
    observations: Iterable[Observation],
    *,
    name: str,
    idle_w: float,
    source: str,
    busy_w: float | None = None,
    slots_max: int | None = None,
) -> Profile:
    """The profile with the least squared relative residuals over observed batches, no term below 0.

        seconds = prefill_s + tokens * (slope * size + intercept)      and joules likewise, over batches with joules

    If all batches have the same number of tokens, prefill cannot be told from steps and is 0. The curves' errors are
    the mean absolute relative errors of the batches' seconds and joules; their points are the means over each size.
    busy_w : watts while running, used if no observation has joules; the energy is then modelled as busy_w times time.
    If busy_w is also None, the energy is unknown and idle_w is not used. Raises ValueError when the observations have
    fewer than two different sizes, or idle_w is above the watts while running.
    """
    batches = list(observations)
    metered = [(batch, batch.joules) for batch in batches if batch.joules is not None]
    prefill_s, step_s = _fit_batches(batches, [batch.seconds for batch in batches])
    energy_source: EnergySource = "measured"
    if metered:
        prefill_j, step_j = _fit_batches([batch for batch, _ in metered], [joules for _, joules in metered])
    elif busy_w is not None:
        prefill_j, step_j = busy_w * prefill_s, step_s.times(busy_w)
        energy_source = "modelled"
    else:
        return Profile.timed(name, step_s, prefill_s=prefill_s, slots_max=slots_max, source=source)
    return Profile(
        name,
        step_s,
        step_j,
        idle_w,
        prefill_s=prefill_s,
        prefill_j=prefill_j,
        slots_max=slots_max,
        source=source,
        energy_source=energy_source,
    )


def _fit_batches(batches: Sequence[Observation], totals: Sequence[float]) -> tuple[float, Curve]:
    """(prefill, step) such that totals = prefill + tokens * step(size)."""
    sizes = np.array([batch.size for batch in batches], dtype=float)
    tokens = np.array([batch.tokens for batch in batches], dtype=float)
    y = np.array(totals)
    check_two_sizes(sizes)
    # Prefill comes last, because non_negative_fit drops the last term of equally good fits.
    columns = np.column_stack([tokens, tokens * sizes, np.ones_like(tokens)])
    terms = non_negative_fit(columns, y)
    intercept, slope, prefill = terms
    error = relative_error(columns @ terms, y)
    distinct, group = np.unique(sizes, return_inverse=True)
    points = np.bincount(group, y - prefill) / np.bincount(group, tokens)
    return prefill, Curve("affine", slope, intercept, error, numbers(distinct), numbers(points))
