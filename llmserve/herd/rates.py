"""An instance at other rates: what was observed since its plan was made."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from llmserve.errors import ConfigError
from llmserve.herd.arrays import Floats
from llmserve.herd.instance import Instance, StreamColumns
from llmserve.herd.names import Named, quoted
from llmserve.herd.needs import Streams, streams_of
from llmserve.spelling import nearest

Rates = Mapping[Named, float]
"""Requests/s, by (stream, model), or by model: then all its streams' rates change in proportion."""


def with_rates(instance: Instance, rates_per_s: Rates) -> Instance:
    """What is not named stays. Where a model is named and a stream of it, too, the stream has its own rate.

    A stream that is named and has no SLO, or is not known to the instance, counts with the tightest SLO of its model's
    streams. Raises ConfigError on a rate below 0, one of an unknown model, and one of a model whose streams have no
    rates that could change in proportion.
    """
    streams = streams_of(instance)
    index = {model.name: number for number, model in enumerate(instance.models)}
    _check(rates_per_s, index)
    names, kinds = list(streams.names), streams.model.tolist()
    rates = (streams.rate_per_s * _factors(streams, rates_per_s, index)[streams.model]).tolist()
    slos, needs = streams.slo_s.tolist(), streams.gpus_needed.tolist()
    tightest_s = _tightest_s(streams, len(index))
    places = {pair: at for at, pair in enumerate(zip(names, kinds, strict=True))}
    for key, rate_per_s in rates_per_s.items():
        if isinstance(key, str):
            continue
        stream, kind = key[0], index[key[1]]
        at = places.get((stream, kind))
        if at is None:
            names.append(stream)
            kinds.append(kind)
            rates.append(rate_per_s)
            slos.append(float(tightest_s[kind]))
            needs.append(math.nan)
        else:
            rates[at], needs[at] = rate_per_s, math.nan
            slos[at] = float(tightest_s[kind]) if math.isnan(slos[at]) else slos[at]
    columns = StreamColumns(names, [instance.models[kind].name for kind in kinds], rates, slos, needs)
    return msgspec.structs.replace(instance, streams=columns)


def _check(rates_per_s: Rates, models: Mapping[str, int]) -> None:
    for key, rate_per_s in rates_per_s.items():
        model = key if isinstance(key, str) else key[1]
        if model not in models:
            raise ConfigError(f"rates_per_s: unknown model {model!r}{nearest(model, models)}")
        if not (math.isfinite(rate_per_s) and rate_per_s >= 0):
            raise ConfigError(f"rates_per_s: {quoted(key)}: a finite number of at least 0 is needed, not {rate_per_s}")


def _factors(streams: Streams, rates_per_s: Rates, models: Mapping[str, int]) -> Floats:
    """(models,) new rate / rate before, of all its streams together; 1 of a model that is not named."""
    before_per_s = np.bincount(streams.model, streams.rate_per_s, len(models))  # NaN where a stream's is not known
    factors = np.ones(len(models))
    for model, rate_per_s in rates_per_s.items():
        if not isinstance(model, str):
            continue
        if not before_per_s[models[model]] > 0:
            raise ConfigError(
                f"rates_per_s: the streams of model {model!r} have no rates that could change in proportion"
            )
        factors[models[model]] = rate_per_s / before_per_s[models[model]]
    return factors


def _tightest_s(streams: Streams, models: int) -> Floats:
    """(models,) the tightest SLO of its streams, NaN where none has one."""
    tightest_s = np.full(models, np.nan)
    np.fmin.at(tightest_s, streams.model, streams.slo_s)
    return tightest_s
