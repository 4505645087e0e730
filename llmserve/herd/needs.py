"""How many GPUs each stream needs for its average load.

    T      goodput of one GPU, requests/s: measured, or b / (alpha b + beta) of the largest batch b within the SLO
    n      GPUs for a stream's average load: its rate / T, or as given; n_i: of model i, the sum over its streams

Streams come by the million, so they are arrays from here on. Source: Shepherd, Section 4; alpha and beta: its Table 4.
"""

from __future__ import annotations

import numpy as np

from llmserve.errors import ConfigError
from llmserve.herd.instance import ROUNDING, Bools, Floats, Instance, Streams

MS_PER_S = 1e3


def needs_of(instance: Instance, streams: Streams) -> Floats:
    """(streams,) n_i, GPUs for the average load of each.

    Raises ConfigError on a stream that says too little or too much, or whose SLO no batch meets.
    """
    given = ~np.isnan(streams.gpus_needed)
    rated = ~np.isnan(streams.rate_per_s)
    if (both := given & rated).any():
        raise ConfigError(f"stream {_first(streams, both)}: gpus_needed cannot be given with rate_per_s")
    if (neither := ~given & ~rated).any():
        raise ConfigError(f"stream {_first(streams, neither)}: either rate_per_s or gpus_needed is needed")
    measured = np.array([model.goodput_per_s is not None for model in instance.models], dtype=bool)
    if (without := rated & np.isnan(streams.slo_s) & ~measured[streams.model]).any():
        raise ConfigError(
            f"stream {_first(streams, without)}: rate_per_s needs slo_s, for its model has no goodput_per_s"
        )
    with np.errstate(invalid="ignore"):
        return np.where(given, streams.gpus_needed, streams.rate_per_s / goodputs_per_s(instance, streams))


def goodputs_per_s(instance: Instance, streams: Streams) -> Floats:
    """(streams,) T: the most requests that one GPU ends in time each second, for this stream alone; NaN: not known.

    Measured for the model, or b / batch_time(b) of the best batch: the largest that ends within the SLO, for a batch's
    throughput grows with its size.

    Nexus asks for batch_time(b) <= SLO / 2, because a request that has just missed a batch waits for that batch and
    then for its own. Here b need only end within the SLO: T is the paper's maximum goodput, what ends in time however
    much is offered, and FLEX picks among what waits those that still have batch_time(b) left. It is also what gives a
    goodput to every stream whose SLO one request alone can meet.

    Raises ConfigError on an SLO that a batch of one exceeds.
    """
    alpha_s, beta_s, size_max, measured = np.array(
        [
            (model.alpha_ms / MS_PER_S, model.beta_ms / MS_PER_S, model.batch_size_max, model.goodput_per_s or np.nan)
            for model in instance.models
        ]
    ).reshape(-1, 4).T[:, streams.model]  # fmt: skip
    fits = np.floor((streams.slo_s - beta_s) / alpha_s * (1 + ROUNDING))
    if (hopeless := fits < 1).any():
        at = int(np.argmax(hopeless))
        model = instance.models[streams.model[at]].name
        raise ConfigError(
            f"stream {streams.names[at]!r}: no batch of model {model!r} meets its SLO of {streams.slo_s[at]:g} s; "
            f"one request takes {alpha_s[at] + beta_s[at]:g} s"
        )
    size = np.minimum(fits, size_max)
    profiled: Floats = size / (alpha_s * size + beta_s)
    return np.where(np.isnan(measured), profiled, measured)


def _first(streams: Streams, wrong: Bools) -> str:
    return repr(streams.names[int(np.argmax(wrong))])


def by_model(instance: Instance, streams: Streams, needs: Floats) -> Floats:
    """(models,) n_i, of all its streams."""
    return np.bincount(streams.model, needs, len(instance.models)).astype(float)
