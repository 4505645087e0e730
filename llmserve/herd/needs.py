"""How many GPUs each stream needs for its average load.

    T      goodput of one GPU, requests/s: measured, or b / (alpha b + beta) of the largest batch b within the SLO
    n      GPUs for a stream's average load: its rate / T, or as given; n_i: of model i, the sum over its streams

Streams come by the million, so they are arrays from here on. Source: Shepherd, Section 4; alpha and beta: its Table 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.errors import ConfigError
from llmserve.herd.arrays import ROUNDING, Bools, Floats, Ints
from llmserve.herd.instance import Instance, StreamColumns
from llmserve.herd.names import no_duplicates
from llmserve.spelling import nearest

MS_PER_S = 1e3


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams as arrays. model : (streams,) indices; the others (streams,), NaN where nothing is said."""

    names: Sequence[str]
    model: Ints
    rate_per_s: Floats
    slo_s: Floats
    gpus_needed: Floats


def streams_of(instance: Instance) -> Streams:
    """Raises ConfigError on an unknown model, a duplicate, a column too short, a number below 0 or that is none."""
    given = instance.streams
    if not isinstance(given, StreamColumns):
        given = StreamColumns(
            name=[stream.name for stream in given],
            model=[stream.model for stream in given],
            rate_per_s=[stream.rate_per_s for stream in given],
            slo_s=[stream.slo_s for stream in given],
            gpus_needed=[stream.gpus_needed for stream in given],
        )
    names, models = _texts(given.name), _texts(given.model)
    if len(models) != len(names):
        raise ConfigError(f"streams: there are {len(names):,} names and {len(models):,} models")
    if len(set(zip(names, models, strict=True))) < len(names):
        no_duplicates(list(zip(names, models, strict=True)), "stream")
    index = {model.name: number for number, model in enumerate(instance.models)}
    try:
        model = np.fromiter(map(index.__getitem__, models), dtype=np.int64, count=len(models))
    except KeyError as error:
        unknown = error.args[0]
        name = names[models.index(unknown)]
        raise ConfigError(f"stream {name!r}: unknown model {unknown!r}{nearest(unknown, index)}") from None
    columns = {field: _column(given, field, names) for field in ("rate_per_s", "slo_s", "gpus_needed")}
    return Streams(names, model, **columns)


def _texts(column: Sequence[str]) -> list[str]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def _column(given: StreamColumns, field: str, names: Sequence[str]) -> Floats:
    found = getattr(given, field)
    if found is None:
        return np.full(len(names), np.nan)
    values = np.array(found, dtype=float)  # None: NaN
    if values.shape != (len(names),):
        raise ConfigError(f"streams: there are {len(names):,} names and {values.size:,} of {field}")
    wrong = np.isinf(values) | (values < 0) | ((values == 0) & (field == "slo_s"))
    if wrong.any():
        at = int(np.argmax(wrong))
        least = "above 0" if field == "slo_s" else "at least 0"
        raise ConfigError(f"stream {names[at]!r}: {field} must be a finite number {least}, not {values[at]:g}")
    return values


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
