"""Which candidate a twin would take, and why.

p99 bound   a candidate must keep the p99 latency within 1.10 of first come first served, and answer as many requests
sure        the probability that the p99 keeps the bound for as many requests to come. A p99 goes by the few longest
            waits, which come together: so the trace is resampled in blocks, the same for both orders (moving blocks:
            Künsch, Annals of Statistics 17, 1989). What comes next differs from the trace by chance as one resample
            differs from another
best        of the candidates that keep the bound with a probability of 0.9 or more, the one of the least mean, p99,
            share of late requests, or energy per token
margin      another candidate is taken only if it is better than the present settings by 2 % of first come first
            served, or these exceed the bound; and only if so in the first half of the requests and in the second half,
            with the candidate within the bound in both: what is noise seldom shows in both halves
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.settings.policies import Settings, named
from llmserve.simulation.twin.replay import FIRST_COME, Outcome, Twin

Latencies = NDArray[np.float64]

P99_BOUND = 1.10
MARGIN = 0.02
SURE = 0.9  # the least probability that a candidate keeps the bound
BLOCKS, RESAMPLES = 20, 200
Goal = Literal["mean", "p99", "deadlines", "energy"]
GOALS: tuple[Goal, ...] = ("mean", "p99", "deadlines", "energy")


class Row(msgspec.Struct, frozen=True):
    """A candidate beside first come first served (1.00 each).

    settings       over those of the configuration
    mean, p99      latency, relative
    mean_s, p99_s  latency
    goal           what is to be small: the relative mean, p99 or energy per token; with goal deadlines the share of the
                   requests with deadlines that are late
    answered       number of requests
    allowed        whether the p99 is within the bound, and no fewer requests are answered
    sure           probability that the p99 is within the bound for requests to come
    """

    settings: Settings
    mean: float
    p99: float
    mean_s: float
    p99_s: float
    goal: float
    answered: int
    allowed: bool
    sure: float

    @property
    def is_safe(self) -> bool:
        """Whether the bound holds with a margin."""
        return self.allowed and self.sure >= SURE

    @property
    def name(self) -> str:
        return named(self.settings)


class Choice(msgspec.Struct, frozen=True):
    """rows       of all candidates; the first is first come first served
    present    index of the settings in force; best : of the candidate that is best for the goal
    take       index of the settings to be set: `best`, or `present`
    reason     in words
    requests   replayed; recorded : distinct ones; forecast : those of them whose real length is not known
    left_out   number of requests that cannot be replayed, by reason
    observed_mean_s  mean latency of the recorded answers; replayed_mean_s : of the same, with the settings in force
    """

    goal: Goal
    rows: tuple[Row, ...]
    present: int
    best: int
    take: int
    reason: str
    requests: int
    recorded: int
    forecast: int
    left_out: dict[str, int]
    observed_mean_s: float
    replayed_mean_s: float

    @property
    def changes(self) -> bool:
        return self.take != self.present


def choose(twin: Twin, goal: Goal, candidates: Sequence[Settings], *, left_out: dict[str, int]) -> Choice:
    """Replay all candidates, the present settings among them, and choose. Raises ConfigError."""
    outcomes = [twin.replay(settings) for settings in candidates]
    rows = rows_of(outcomes, goal, twin.recorded)
    present = candidates.index(twin.present)
    safe = [index for index, row in enumerate(rows) if row.is_safe]
    best = min(safe, key=lambda index: rows[index].goal)
    take, reason = _decide(twin, goal, rows, present, best)
    return Choice(
        *(goal, rows, present, best, take, reason, len(twin), twin.recorded, twin.forecast, left_out),
        *(twin.observed_mean_s, twin.recorded_mean_s(outcomes[present])),
    )


def rows_of(outcomes: Sequence[Outcome], goal: Goal, recorded: int) -> tuple[Row, ...]:
    """Judge outcomes of the same requests. The first is of FIRST_COME. recorded : distinct requests

    Raises ConfigError when the past does not show the goal.
    """
    first = outcomes[0]
    assert first.settings == FIRST_COME, "the first outcome must be of first come first served"
    if goal == "deadlines" and first.in_time is None:
        raise ConfigError("no request had a deadline: deadlines cannot be the goal")
    if goal == "energy" and first.joules_per_token is None:
        raise ConfigError("the power of the engines is not known: give --profile to tune for energy")
    rows = []
    for outcome in outcomes:
        p99 = _ratio(outcome, first, _p99)
        rows.append(
            Row(
                outcome.settings,
                _ratio(outcome, first, _mean),
                p99,
                _mean(outcome.latency_s),
                _p99(outcome.latency_s),
                _value(outcome, first, goal),
                outcome.answered,
                p99 <= P99_BOUND and outcome.answered >= first.answered,
                sure_of(outcome.latency_s, first.latency_s, recorded),
            )
        )
    return tuple(rows)


def _decide(twin: Twin, goal: Goal, rows: Sequence[Row], present: int, best: int) -> tuple[int, str]:
    """(index of the settings to be set, the reason)."""
    now, other = rows[present], rows[best]
    if best == present:
        return present, f"{now.name} is the best"
    if now.allowed and now.goal <= other.goal:
        return (
            present,
            f"{now.name} keeps the bound with a probability of {now.sure:.2f}, and no safer candidate is better",
        )
    if now.allowed and now.goal - other.goal < MARGIN:
        return present, f"{other.name} is better by less than {MARGIN:.0%}"
    settings = FIRST_COME, now.settings, other.settings
    halves = [rows_of([half.replay(each) for each in settings], goal, half.recorded)[1:] for half in twin.halves()]
    if not any(before.allowed for before, _ in halves):
        return best, f"{now.name} exceeds the bound in both halves: p99 {now.p99:.2f} of first come first served"
    gain = min([before.goal - after.goal for before, after in halves])
    if gain < MARGIN or not all(after.allowed for _, after in halves):
        return present, f"{other.name} is better, and keeps the bound, in one half of the requests at most"
    return best, (
        f"{other.name} is better by {gain:.0%} or more in both halves of the requests, and keeps the bound with a "
        f"probability of {other.sure:.2f}"
    )


def sure_of(latency_s: Latencies, first_s: Latencies, recorded: int) -> float:
    """The probability that the p99 of requests to come is within the bound, by pairs of RESAMPLES resamples.

    latency_s, first_s : (requests,) in the order of the arrivals, nan without an answer.  recorded : of them distinct;
    the others repeat them, and prove nothing more
    """
    count = latency_s.size
    length = max(1, min(recorded, count) // BLOCKS)
    rng = np.random.default_rng(0)
    ratios = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        starts = rng.integers(0, count, BLOCKS)
        chosen = (starts[:, None] + np.arange(length)).ravel() % count
        ratios[number] = _p99(latency_s[chosen]) / _p99(first_s[chosen])
    # Requests to come differ from the past as two resamples differ, not as a resample differs from its own source.
    observed = _p99(latency_s) / _p99(first_s)
    to_come = observed * ratios[:, None] / ratios
    return float((to_come <= P99_BOUND).mean())


def _value(outcome: Outcome, first: Outcome, goal: Goal) -> float:
    if goal == "mean":
        return _ratio(outcome, first, _mean)
    if goal == "p99":
        return _ratio(outcome, first, _p99)
    if goal == "deadlines":
        assert outcome.in_time is not None, "the goal has been checked"
        return float(1.0 - outcome.in_time.mean())
    assert outcome.joules_per_token is not None, "the goal has been checked"
    assert first.joules_per_token is not None, "the goal has been checked"
    return outcome.joules_per_token / first.joules_per_token


def _ratio(outcome: Outcome, first: Outcome, of: Callable[[Latencies], float]) -> float:
    return of(outcome.latency_s) / of(first.latency_s)


def _mean(latency_s: Latencies) -> float:
    return float(np.nanmean(latency_s))


def _p99(latency_s: Latencies) -> float:
    return float(np.nanpercentile(latency_s, 99))
