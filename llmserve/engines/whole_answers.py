"""How well each number of slots explains the ends of an engine's whole answers.

An engine with c slots starts the k-th of its requests when it has it, and when all but c - 1 of the earlier ones have
ended. So each c says when each request got its slot, and how long the engine took from then on:

    sent_k, end_k  times of the k-th request and of its answer
    start_k(c)     max(sent_k, time of the (k - c)-th end)
    s_k(c)         end_k - start_k(c); not above 0: such a c is ruled out by this answer
    t_k            tokens of the answer
    a              a prompt's tokens, over the mean of t_k
    y_k            log s_k(c) - log(t_k + a * mean t), the pace's logarithm

Under the engine's own c, its answers have about the same pace. Under a smaller c, an answer that was long under way
seems fast; under a larger one, an answer that has waited seems slow. But other causes hold answers up, too: a long
prompt of another request, a stall. The measure is the likelihood of the ends under c, with the best of a few a, and

    y_k ~ N(mu, sigma^2), or with probability HELD_UP: mu + an exponential variable of mean HELD_UP_LOG

whose mu and sigma are fitted by expectation-maximisation, sigma with a prior. So an answer that would have been slow
under each c says little, and no answer alone says everything. The pace at an earlier limit is a further observation:
more requests at once are not faster, and not slower than in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ANSWERS_MOST = 256  # the last answers that are looked at
CANDIDATES_MOST = 24  # numbers that are compared, as a geometric series where there are more
PROMPTS = np.array([0.0, 0.05, 0.2, 0.6, 2.0])  # a
NOISE, NOISE_ANSWERS = 0.12, 3.0  # sigma beforehand, and the answers that count as much
HELD_UP, HELD_UP_LOG = 0.2, 1.0
FITS = 3  # steps of expectation-maximisation
PACE_NOISE = 0.08  # of the pace's logarithm between two limits
SLOWER, SLOWER_NOISE = 0.3, 0.3  # power of the number with which an engine slows down as it fills
RULED_OUT = 6.0  # what an answer that rules a number out takes from its likelihood's logarithm
USUAL = 0.5 * (1.0 + math.log(math.tau))  # added for each other answer: -log sigma is then the usual sum
NONE = 1e-300
INSTANT = 0.01  # share of an answer's time in flight: less than that with a slot is none


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for each token, prompts included, of requests that ran `together`"""

    token_s: float
    together: float


@dataclass(frozen=True, slots=True)
class Explained:
    """Numbers of slots, in order; the logarithm of each one's likelihood; seconds for each token under each"""

    numbers: npt.NDArray[np.int64]
    log_likelihoods: Floats
    token_s: Floats

    def best(self) -> int:
        return int(np.argmax(self.log_likelihoods))

    def odds(self, index: int, others: npt.NDArray[np.bool_]) -> float:
        """Logarithm of the odds of a number against the best of some others. inf: there are none"""
        rivals = self.log_likelihoods[others]
        return float(self.log_likelihoods[index] - rivals.max()) if len(rivals) else math.inf

    def pace(self, index: int) -> Pace:
        return Pace(float(self.token_s[index]), float(self.numbers[index]))


class WholeAnswers:
    """The whole answers to requests that were sent at one limit.

    due  answers after which the numbers are to be compared
    """

    __slots__ = ("_rows", "due")

    def __init__(self, due: int) -> None:
        self._rows: list[tuple[int, float, float, float]] = []
        self.due = due

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, place: int, sent_s: float, end_s: float, tokens: float) -> bool:
        """Add an answer. place : of its request among all.  Returns whether the numbers are to be compared"""
        self._rows.append((place, sent_s, end_s, tokens))
        return len(self._rows) >= self.due

    def explain(self, least: int, most: int, ends: Sequence[float], ends_before: int, before: Pace | None) -> Explained:
        """Compare the numbers of slots from `least` to `most`.

        ends : times, in order, of the ends after the first `ends_before`; from the first on that a start depends on.
        before : the pace at an earlier limit
        """
        numbers = candidates(least, most)
        place, sent_s, end_s, tokens = np.array(self._rows[-ANSWERS_MOST:]).T
        seconds = end_s[:, None] - starts(place, sent_s, numbers, ends, ends_before)  # (answers, numbers)
        possible = seconds > INSTANT * (end_s - sent_s)[:, None]
        log_s = np.log(np.where(possible, seconds, 1.0))
        count = possible.sum(axis=0)
        likelihoods, log_paces = _fitted(log_s, possible, count, tokens, numbers, before)  # (prompts, numbers)
        best = likelihoods.argmax(axis=0), np.arange(len(numbers))
        likelihood = likelihoods[best] - log_s.sum(axis=0) - RULED_OUT * (len(place) - count)
        return Explained(numbers, likelihood, np.exp(log_paces[best]))


def _fitted(
    log_s: Floats,
    possible: npt.NDArray[np.bool_],
    count: npt.NDArray[np.int64],
    tokens: Floats,
    numbers: npt.NDArray[np.int64],
    before: Pace | None,
) -> tuple[Floats, Floats]:
    """Logarithms of the likelihoods of y, and of the paces. Both (prompts, numbers). count : possible answers"""
    y = (
        log_s - np.log(tokens + PROMPTS[:, None] * tokens.mean())[:, :, None]
    ) * possible  # (prompts, answers, numbers)
    weight: Floats = np.broadcast_to(possible.astype(float), y.shape)  # of an answer that nothing held up
    for fits_left in range(FITS, -1, -1):
        known = np.maximum(weight.sum(axis=1), NONE)
        mean = (weight * y).sum(axis=1) / known
        off = y - mean[:, None, :]
        variance = (NOISE_ANSWERS * NOISE**2 + (weight * off**2).sum(axis=1)) / (NOISE_ANSWERS + known)
        each = variance[:, None, :]
        normal = (1.0 - HELD_UP) * np.exp(-0.5 * off**2 / each) / np.sqrt(math.tau * each)
        held_up = np.where(off > 0.0, HELD_UP / HELD_UP_LOG * np.exp(-np.abs(off) / HELD_UP_LOG), 0.0)
        density = normal + held_up + NONE
        if fits_left:
            weight = possible * (normal / density)
    prior = np.log(variance) + NOISE**2 / variance
    likelihood = (possible * (np.log(density) + USUAL)).sum(axis=1) - 0.5 * NOISE_ANSWERS * prior
    likelihood -= PROMPTS[:, None]
    log_pace = mean + np.log1p(PROMPTS)[:, None]
    if before is not None:
        fuller = np.log(np.maximum(1.0, numbers / before.together))
        spread = PACE_NOISE**2 + (SLOWER_NOISE * fuller) ** 2 + variance / np.maximum(known, 1.0)
        distance = (log_pace - math.log(before.token_s) - SLOWER * fuller) ** 2 / spread
        # a heavy tail, Student's t with 3 degrees of freedom: a stall, or a long prompt, may change a pace
        likelihood -= (count > 0) * (2.0 * np.log1p(distance / 3.0) + 0.5 * np.log(spread))
    return likelihood, log_pace


def candidates(least: int, most: int) -> npt.NDArray[np.int64]:
    if most - least < CANDIDATES_MOST:
        return np.arange(least, most + 1)
    return np.unique(np.geomspace(least, most, CANDIDATES_MOST).round().astype(np.int64))


def starts(
    place: Floats, sent_s: Floats, numbers: npt.NDArray[np.int64], ends: Sequence[float], ends_before: int
) -> Floats:
    """When each request would have got its slot, for each number. (answers, numbers); inf: not yet"""
    made_room = place.astype(np.int64)[:, None] - numbers - 1 - ends_before  # index of the end that made room
    first = max(0, int(made_room.min()))
    at_s = np.array([*ends[first:], math.inf])[np.clip(made_room - first, 0, len(ends) - first)]
    return np.maximum(np.where(made_room < 0, -math.inf, at_s), sent_s[:, None])
