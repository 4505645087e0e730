"""The requests of a fleet, second by second: a day's curve for all models, and bursts, each of one key of one model.

    rate of a model at t    peak rate of its pool * its share of the pool * day(t / span), plus its burst
    day                     0.25 of the peak at night, 1 at its highest

Lengths of answers are lognormal. A forecast is the length times lognormal noise. Each second is drawn by itself, from
the seed and its number: the same seed gives the same requests, whatever happened before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmserve.request import Request

LENGTH_SIGMA, FORECAST_SIGMA, TOKENS_MAX = 0.7, 0.3, 4_000.0
PROMPT_TOKENS_MEAN = 300.0
NIGHT, KEYS = 0.25, 50  # least rate over the peak; keys of a pool
BURST_S, BURST_FACTOR = 20.0, 3.0  # seconds of a burst; its rate over the model's own

Floats = NDArray[np.float64]


class Sent(msgspec.Struct, frozen=True):
    """A request on its way.

    at_s    when it is sent: at its arrival, or later to another group
    gateway    which holds its client's connection
    tokens  real length
    burst   whether it is of a burst
    """

    request: Request
    at_s: float
    pool: int
    gateway: int
    tokens: float
    burst: bool


@dataclass(frozen=True, slots=True)
class Burst:
    """pool, model : indices.  key : whose requests they are"""

    pool: int
    model: int
    key: int
    begin_s: float


def day(part: float) -> float:
    """Rate over the peak rate. part : of the day, from 0 to 1; the peak is in its middle"""
    return NIGHT + (1 - NIGHT) * (0.5 - 0.5 * math.cos(2 * math.pi * part)) ** 1.5


def always(part: float) -> float:
    return 1.0


@dataclass(frozen=True)
class Traffic:
    """peak_per_s   requests/s of each pool at the highest
    shares       of the models of a pool, which add up to 1
    tokens_mean  of the answers
    slo_s        deadline of an answer after its arrival
    """

    peak_per_s: tuple[float, ...]
    shares: tuple[float, ...]
    span_s: float
    gateways: int
    tokens_mean: float
    slo_s: float
    bursts: tuple[Burst, ...] = ()
    curve: Callable[[float], float] = day
    seed: int = 0

    def second(self, number: int, first_id: int) -> list[Sent]:
        """The requests of this second in the order of their arrival. first_id : of the first"""
        rng = np.random.default_rng((self.seed, number))
        day_rate = self.curve((number + 0.5) / self.span_s)
        rates = np.outer(self.peak_per_s, self.shares) * day_rate  # (pools, models)
        counts = rng.poisson(rates)
        pool, model = (np.repeat(index.ravel(), counts.ravel()) for index in np.indices(rates.shape))
        key = np.minimum(rng.geometric(0.1, pool.size) - 1, KEYS - 1)  # a few keys send most
        kinds = [np.stack([pool, model, key, np.zeros_like(key)])]
        for burst in self.bursts:
            if burst.begin_s <= number < burst.begin_s + BURST_S:
                extra = int(rng.poisson((BURST_FACTOR - 1) * rates[burst.pool, burst.model]))
                kinds.append(np.tile([[burst.pool], [burst.model], [burst.key], [1]], extra))
        return self._drawn(number, first_id, np.concatenate(kinds, axis=1), rng)

    def forecasts(self, count: int) -> list[float]:
        """A sample, for a scheduler's first edges."""
        return self._lengths(count, np.random.default_rng(self.seed))[1].tolist()

    def _lengths(self, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """(real, forecast) tokens."""
        mu = math.log(self.tokens_mean) - LENGTH_SIGMA**2 / 2
        tokens = np.clip(np.round(rng.lognormal(mu, LENGTH_SIGMA, count)), 1.0, TOKENS_MAX)
        return tokens, np.round(tokens * rng.lognormal(0.0, FORECAST_SIGMA, count), 1)

    def _drawn(self, number: int, first_id: int, kinds: NDArray[np.int64], rng: np.random.Generator) -> list[Sent]:
        """kinds : (4, requests) pool, model, key, whether of a burst"""
        count = kinds.shape[1]
        at_s = number + np.sort(rng.random(count))
        pools, models, keys, bursts = kinds[:, rng.permutation(count)].tolist()
        tokens, forecasts = self._lengths(count, rng)
        prompts = np.round(rng.exponential(PROMPT_TOKENS_MEAN, count)) + 1.0
        gateways = rng.integers(self.gateways, size=count)
        rows = zip(
            *(at_s.tolist(), pools, models, keys, tokens.tolist()),
            *(forecasts.tolist(), prompts.tolist(), gateways.tolist(), bursts),
            strict=True,
        )
        return [
            Sent(
                Request(
                    first_id + k, forecast, at + self.slo_s, prompt_tokens=prompt, model=f"m{of}", share=f"k{whose}"
                ),
                *(at, in_pool, gateway, length, burst > 0),
            )
            for k, (at, in_pool, of, whose, length, forecast, prompt, gateway, burst) in enumerate(rows)
        ]


def drawn_bursts(pools: int, models: int, span_s: float, each: float, rng: np.random.Generator) -> tuple[Burst, ...]:
    """each : mean number of bursts of a model"""
    counts = rng.poisson(each, (pools, models))
    return tuple(
        Burst(pool, model, int(rng.integers(KEYS)), float(rng.uniform(0.0, max(span_s - BURST_S, 1.0))))
        for pool, model in np.argwhere(counts > 0).tolist()
        for _ in range(counts[pool, model])
    )
