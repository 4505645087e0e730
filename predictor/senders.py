"""How much the answers of one sender teach.

A client decides the lengths of its answers, with max_tokens or with what it asks for, so one key can send nonsense.
Nonsense cannot be forecast: the correlation of a nonsense sender's lengths with their forecasts stays near zero, or is
negative. The answers of such a sender count little, and so do those of a sender who has a large share of the answers
and no known correlation yet. Who sends nearly everything always counts: there is nobody to protect.
"""

import math
from collections.abc import Sequence

SENDERS_MAX = 1000
NUMBERS = 9
"""Numbers that describe a sender in a state."""
COUNTED = 0.1
"""An answer of at least this weight counts like the others for whatever cannot weigh answers."""
_SHARE_RATE = 0.002  # of an answer, in the shares
_ALONE, _LARGE = 0.98, 0.3  # shares
_JUDGED = 100  # answers before a sender with a small share is judged
_CORRELATION_RATE = 0.003  # of an answer, in the correlation
_CORRELATED = 0.1  # a correlation beyond chance by so much is enough for the whole weight
BEYOND_CHANCE = 2.5
_WEIGHT_MIN = 0.02


class Sender:
    """The lengths of a sender's answers, and their forecasts. weight : of its answers, in (0, 1]."""

    __slots__ = ("_count", "_moments", "_place", "_share", "weight")

    def __init__(self) -> None:
        self._share, self._place, self._count = 0.0, 0, 0  # the share was so when answer number `place` came
        self._moments = [0.0] * 5  # means of length and forecast, their variances, and their covariance
        self.weight = 1.0

    @property
    def counts(self) -> bool:
        return self.weight >= COUNTED

    @property
    def answers(self) -> int:
        return self._count

    @property
    def mean(self) -> float:
        """Of the lengths, on the scale of `learn`."""
        return self._moments[0]

    @property
    def correlation(self) -> float:
        """Of the lengths with their forecasts; 0 where either is constant."""
        product = self._moments[2] * self._moments[3]
        return self._moments[4] / math.sqrt(product) if product > 0 else 0.0

    def learn(self, actual: float, forecast: float, place: int) -> None:
        """actual, forecast : on any one scale.  place : number of answers of all senders before this one."""
        self._share = self._share * (1 - _SHARE_RATE) ** (place - self._place) + _SHARE_RATE
        self._place = place
        self._count += 1
        rate = max(1 / self._count, _CORRELATION_RATE)
        mean, mean_forecast, variance, variance_forecast, covariance = self._moments
        error, error_forecast = actual - mean, forecast - mean_forecast
        self._moments = [
            mean + rate * error,
            mean_forecast + rate * error_forecast,
            (1 - rate) * (variance + rate * error * error),
            (1 - rate) * (variance_forecast + rate * error_forecast * error_forecast),
            (1 - rate) * (covariance + rate * error * error_forecast),
        ]
        self.weight = self._weight(self._share / (1 - (1 - _SHARE_RATE) ** (place + 1)))

    def _weight(self, share: float) -> float:
        if share > _ALONE or (share < _LARGE and self._count < _JUDGED):
            return 1.0
        by_chance = BEYOND_CHANCE / math.sqrt(min(self._count, 2 / _CORRELATION_RATE))
        return min(max((self.correlation - by_chance) / _CORRELATED, _WEIGHT_MIN), 1.0)

    def numbers(self) -> tuple[float, ...]:
        """(NUMBERS,)"""
        return self._share, self._place, self._count, self.weight, *self._moments

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Sender":
        """numbers : as from `numbers`."""
        sender = cls()
        sender._share, sender._place, sender._count = numbers[0], int(numbers[1]), int(numbers[2])
        sender.weight = min(max(numbers[3], _WEIGHT_MIN), 1.0)
        sender._moments = list(numbers[4:])
        return sender
