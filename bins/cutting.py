"""Which neighbours by length form a batch that runs to its end, which go before them, and where the batch is cut.

    l_1 <= ... <= l_b   lengths of the batch's requests by their forecasts, tokens
    T_j     expected longest answer of the first j of them: the time of a batch of these j, tokens
    m       waiting requests, those of the batch included
    lam     arrivals in the time of a token
    E       engines that serve the queue

Uncut, all b requests end after T_b. If the first j run by themselves, they end T_b - T_j earlier; but the extra batch
takes T_j of the time of E engines. So the m - j others end T_j / E later, and so do those that arrive before the end,
lam T_b on average. The sum of all latencies falls by

    gain(j) = j (T_b - T_j) - (m - j + lam T_b) T_j / E

The batch is cut at the largest gain above zero. With one engine, this is where requests would leave at a rate j / T_j
above m / T_b + lam. So similar lengths stay together, and so does a batch while many others wait or arrive.

The longest answer: the logarithm of an answer is that of its forecast, plus a correction that depends on the forecast,
plus an error of standard deviation d; the answers teach both. Of n equal forecasts, the longest answer is e^(d z_n)
times the median answer, z_n: mean of the longest of n standard normals (Blom's formula). With corrected l_i, a p-norm
grows as fast up to n = b, and is exact for known lengths:

    T_j = (l_1^p + ... + l_j^p)^(1/p),   p = max(1, ln b / (d z_b));   d = 0: p is infinite, T_j = l_j

The use of a batch is the share of its slot-steps that give tokens, (l_1 + ... + l_b) / (b T_b). Where lengths are very
skewed, the few long requests that wait do not fill a batch. So if other neighbours are of much more use, these go
before, and more of the long ones gather: both batches run anyway, and the later one is of more use by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

ANSWERS_LEAST = 32  # answers; with fewer, batches are not cut
KEPT = 1.0 - 1.0 / 1024  # weight of an error after one more answer
KEPT_AT_KNOT = 1.0 / 256  # weight that an answer takes from the earlier answers near its forecast
BATCHES_KEPT = 1.0 - 1.0 / 64  # weight of a batch's time and arrivals after one more batch
MUCH_MORE = 1.25  # times the use of the request's own batch, from which other neighbours go before
DEVIATION_LEAST = 1e-9
LOGARITHM_MAX = 300.0  # keeps lengths and their sums finite and above 0
LN_2 = math.log(2.0)


def least_waste(lengths: Sequence[float], count: int) -> int:
    """Start of the `count` neighbours that waste the fewest slot-steps: `count` times the longest, less the sum.

    lengths : ascending, at least `count`.
    """
    total = sum(lengths[:count])
    best, least = 0, count * lengths[count - 1] - total
    for start in range(1, len(lengths) - count + 1):
        total += lengths[start + count - 1] - lengths[start - 1]
        waste = count * lengths[start + count - 1] - total
        if waste < least:
            best, least = start, waste
    return best


class Meaning:
    """What forecasts mean: the median answer of a forecast, and the deviation of answers from it, in logarithms.

    Corrections belong to knots, the forecasts 2^k, and are linear in ln(forecast) between them: forecasts may be too
    extreme, and answers may be of several kinds. The nearest two knots learn from an answer, each with its weight.
    """

    def __init__(self) -> None:
        self.answers = 0
        self._knots: dict[int, tuple[float, float]] = {}  # by k: weight of answers, and their mean correction
        self._weight = self._errors = self._corrections = 0.0  # of all answers, with the same decay

    def observe(self, forecast: float, output_tokens: float) -> None:
        """Learn from an answer. forecast, output_tokens : > 0"""
        knot, correction = _knot_below(forecast), math.log(output_tokens / forecast)
        share = math.log(forecast) / LN_2 - knot
        below, above = self._correction(knot), self._correction(knot + 1)
        error = correction - below - share * (above - below) if self.answers else 0.0
        self.answers += 1
        self._weight = KEPT * self._weight + 1.0
        self._errors = KEPT * self._errors + error * error
        self._corrections = KEPT * self._corrections + correction
        for number, part in ((knot, 1.0 - share), (knot + 1, share)):
            weight, mean = self._knots.get(number, (0.0, 0.0))
            weight = weight * (1.0 - part * KEPT_AT_KNOT) + part
            if weight > 0.0:
                self._knots[number] = weight, mean + part / weight * (correction - mean)

    @property
    def deviation(self) -> float:
        """d, of predictions that were made before each answer."""
        return math.sqrt(self._errors / self._weight)

    def lengths(self, forecasts: Sequence[float]) -> NDArray[np.float64]:
        """Corrected forecasts, in the same order, and never descending. forecasts : ascending, > 0"""
        values = np.array(forecasts)
        knots = np.frexp(values)[1] - 1
        least = int(knots[0])
        lines = np.array([self._line(knot) for knot in range(least, int(knots[-1]) + 1)])[knots - least]
        logarithms = np.clip(lines[:, 0] + lines[:, 1] * np.log(values), -LOGARITHM_MAX, LOGARITHM_MAX)
        return np.maximum.accumulate(np.exp(logarithms))

    def _line(self, knot: int) -> tuple[float, float]:
        """Constant and slope of the logarithm of corrected forecasts between a knot and the next."""
        below, above = self._correction(knot), self._correction(knot + 1)
        return below - knot * (above - below), 1.0 + (above - below) / LN_2

    def _correction(self, knot: int) -> float:
        """The mean correction of all answers counts as one more answer at each knot."""
        weight, mean = self._knots.get(knot, (0.0, 0.0))
        return (weight * mean + self._corrections / self._weight) / (weight + 1.0) if self.answers else 0.0


def _knot_below(forecast: float) -> int:
    """k of the largest 2^k that is not above the forecast."""
    return math.frexp(forecast)[1] - 1


class Cutting:
    """Chooses and cuts the batches of one queue, by what its arrivals and answers have shown.

    A batch may leave out the request whose turn it is. Such batches take no more time, one after the other, than that
    request's own batch: no request waits for ever, nor much longer than without them.
    """

    def __init__(self) -> None:
        self._meaning = Meaning()
        self._arrivals = self._tokens = 0.0  # arrivals, and the time of batches on all engines, with the same decay
        self._next, self._passed = -1, 0.0  # the request that was left out last, and the time of batches before it

    def arrived(self) -> None:
        """Count an arrival."""
        self._arrivals += 1.0

    def answered(self, forecast: float, output_tokens: float) -> None:
        """Learn from an answer. Without a forecast (0), or without a token, nothing is learnt."""
        if forecast > 0.0 and output_tokens > 0.0:
            self._meaning.observe(forecast, output_tokens)

    def before(self, forecasts: Sequence[float], start: int, count: int, request_id: int) -> int | None:
        """Start of the `count` neighbours that go before those at `start`, which hold the request whose turn it is.

        forecasts : lengths of all from whom to choose, ascending.  None: no others are of so much more use
        """
        if self._meaning.answers < ANSWERS_LEAST or forecasts[0] <= 0.0:
            return None
        lengths, power = self._meaning.lengths(forecasts), self._power(count)
        longest, sums = lengths[count - 1 :], np.concatenate(([0.0], np.cumsum(lengths)))
        times = longest
        if power < math.inf:
            powers = np.concatenate(([0.0], np.cumsum((lengths / lengths[-1]) ** power)))
            times = np.maximum(longest, lengths[-1] * (powers[count:] - powers[:-count]) ** (1.0 / power))
        uses = np.where(
            self._passed_of(request_id) + times <= times[start], (sums[count:] - sums[:-count]) / times, 0.0
        )
        best = int(np.argmax(uses))
        if uses[best] <= MUCH_MORE * (sums[start + count] - sums[start]) / times[start]:
            return None
        self._ran(float(times[best]), request_id, leaves_out=True)
        return best

    def size(self, forecasts: Sequence[float], waiting: int, engines: int, place: int, request_id: int) -> int:
        """How many of a batch's requests run now, the shortest; at least one.

        forecasts : lengths, ascending.  waiting : m.  engines : E.  place, request_id : of the request whose turn it is
        """
        if self._meaning.answers < ANSWERS_LEAST or forecasts[0] <= 0.0:
            return len(forecasts)
        times = self._longest(forecasts)
        count, passed = len(times), self._passed_of(request_id)
        if self._tokens and times[0] < times[-1]:
            whole = times[-1]
            others, best = waiting / engines + self._arrivals / self._tokens * whole, 0.0  # (m + lam T_b) / E
            own_share = 1.0 - 1.0 / engines
            for size, own in enumerate(times[:-1], start=1):
                gain = size * whole - (size * own_share + others) * own
                if gain > best and (size > place or passed + own <= whole):
                    best, count = gain, size
        self._ran(times[count - 1], request_id, leaves_out=count <= place)
        return count

    def _passed_of(self, request_id: int) -> float:
        """Time of the batches that have left this request out, one after the other, tokens."""
        return self._passed if request_id == self._next else 0.0

    def _ran(self, tokens: float, request_id: int, *, leaves_out: bool) -> None:
        """Count a batch. tokens : its time.  leaves_out : the request whose turn it is"""
        if leaves_out:
            self._next, self._passed = request_id, self._passed_of(request_id) + tokens
        self._arrivals *= BATCHES_KEPT
        self._tokens = BATCHES_KEPT * self._tokens + tokens

    def _power(self, count: int) -> float:
        """p, of batches of `count`."""
        scale = self._meaning.deviation * _longest_normal(count)
        return max(1.0, math.log(count) / scale) if scale > DEVIATION_LEAST else math.inf

    def _longest(self, forecasts: Sequence[float]) -> list[float]:
        """T_1, ..., T_b."""
        power = self._power(len(forecasts))
        root, longest, times = 1.0 / power, 0.0, []
        for length in self._meaning.lengths(forecasts).tolist():
            # (T^p + l^p)^(1/p), without the overflow of large powers; T <= l if p is infinite
            longest = length * (1.0 + (longest / length) ** power) ** root
            times.append(longest)
        return times


@lru_cache(maxsize=1024)
def _longest_normal(size: int) -> float:
    """z_n, about. Source: Blom (1958), Statistical Estimates and Transformed Beta-Variables."""
    return NormalDist().inv_cdf((size - 0.375) / (size + 0.25))
