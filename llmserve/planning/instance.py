"""The problem: streams of requests to models, the GPUs and the limits of groups.

The problem has three forms:

    a file      JSON; errors name the place in the file                         `Instance.load`, `Instance.save`
    types       `Instance` of `Model` and `Stream`, or of `StreamColumns`       `check`
    arrays      for planning, because there may be millions of streams          `Streams`, `streams_of`

`with_rates` gives the same problem at other rates, such as rates observed since the plan was made.

This module also defines the array types and the rounding tolerances of all modules of herd.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.spelling import nearest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROUNDING = 1e-9  # relative error of products and sums of floating-point numbers
HASH_STEP = 0x1E3779B97F4A7C15  # between the hashes of one name with two models
SLACK = 2e-6  # GPUs, or memories of one GPU: a little more than HiGHS's tolerance for a violated row

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]

Named = str | tuple[str, str]
"""A name, or a pair (stream, model)."""

Rates = Mapping[Named, float]
"""Requests/s, by (stream, model) or by model; the rates of a model's streams then change in proportion."""


# ---- the types ----------------------------------------------------------------------------------------------------


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests of one application to one model. The pair of name and model is unique.

    gpus_needed  for the average load; or rate_per_s, with slo_s unless the model's goodput is measured
    """

    name: Name
    model: Name
    rate_per_s: NotNegative | None = None
    slo_s: Positive | None = None
    gpus_needed: NotNegative | None = None


class StreamColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Millions of streams: the fields of Stream, each a sequence or a numpy array, all of one length."""

    name: Sequence[str]
    model: Sequence[str]
    rate_per_s: Sequence[NotNegative | None] | None = None
    slo_s: Sequence[Positive | None] | None = None
    gpus_needed: Sequence[NotNegative | None] | None = None


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A batch of b takes alpha_ms b + beta_ms. goodput_per_s : measured maximum of a GPU; None: from alpha, beta."""

    name: Name
    memory_gb: Positive
    alpha_ms: Positive
    beta_ms: NotNegative
    batch_size_max: Count = 128
    goodput_per_s: Positive | None = None


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The problem of a plan.

    gpus            number of GPUs of the cluster
    gpu_memory_gb   memory of a GPU for models
    group_gpus_max  most GPUs that one scheduler can serve
    groups          most groups
    affinity_max    largest `divergence` of two models of a group, at least 1; None: no limit
    load_s          seconds in which a GPU loads a model, and serves nothing; 0 where all GPUs have all models
    """

    streams: tuple[Stream, ...] | StreamColumns
    models: tuple[Model, ...]
    gpus: Count
    gpu_memory_gb: Positive
    group_gpus_max: Count
    groups: Count
    affinity_max: Annotated[float, Meta(ge=1)] | None = None
    load_s: NotNegative = 0.0

    @classmethod
    def load(cls, path: str | Path) -> Instance:
        """Read JSON. Raises ConfigError naming the error's place in the file."""
        return read_json(path, cls, PARTS, "instance")

    def save(self, path: str | Path) -> None:
        """Raises ConfigError when the file cannot be written."""
        write_json(path, self, "instance")


Parts = Mapping[str, type[msgspec.Struct]]
"""Types of the parts of a file, by the beginning of their place, such as "streams["."""

PARTS: Parts = {"streams[": Stream, "streams": StreamColumns, "models[": Model}
LEAST = {  # least value of a number; None: above 0
    "gpus": 1,
    "gpu_memory_gb": None,
    "group_gpus_max": 1,
    "groups": 1,
    "affinity_max": 1,
    "load_s": 0,
    "memory_gb": None,
    "alpha_ms": None,
    "beta_ms": 0,
    "batch_size_max": 1,
    "goodput_per_s": None,
}


def check(instance: Instance) -> None:
    """Check the conditions that the types do not express, and those of the types for an instance made in Python.

    Raises ConfigError.
    """
    if not instance.models:
        raise ConfigError("models: at least one model is needed")
    no_duplicates([model.name for model in instance.models], "model")
    for owner, where in ((instance, ""), *((model, f"model {model.name!r}: ") for model in instance.models)):
        for field, least in LEAST.items():
            value = getattr(owner, field, None)
            if value is not None and not (math.isfinite(value) and (value > 0 if least is None else value >= least)):
                limit = "above 0" if least is None else f"of at least {least}"
                raise ConfigError(f"{where}{field} must be a finite number {limit}, not {value:g}")
    for model in instance.models:
        if model.memory_gb > instance.gpu_memory_gb * (1 + ROUNDING):
            raise ConfigError(
                f"model {model.name!r} takes {model.memory_gb:g} GB, and a GPU has {instance.gpu_memory_gb:g} GB"
            )


def no_duplicates(names: Sequence[Named], label: str) -> None:
    """Raises ConfigError naming the first duplicate. label : the kind of the names, for the message."""
    if len(set(names)) == len(names):
        return
    earlier: set[Named] = set()
    for name in names:
        if name in earlier:
            raise ConfigError(f"{label} {_quoted(name)} is there twice")
        earlier.add(name)


def _quoted(name: Named) -> str:
    return repr(name) if isinstance(name, str) else f"{name[0]!r} of model {name[1]!r}"


# ---- as a file ----------------------------------------------------------------------------------------------------

S = TypeVar("S", bound=msgspec.Struct)


def read_json(path: str | Path, kind: type[S], parts: Parts, label: str) -> S:
    """The object of this kind in a file. label : the kind of file, for messages.

    Raises ConfigError naming the error's place in the file, and for an unknown key the nearest valid key.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"cannot read the {label} {path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        wrong, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`").removeprefix(".")
        if (unknown := re.fullmatch(r"Object contains unknown field `(.+)`", wrong)) is not None:
            owner = next((part for begin, part in parts.items() if place.startswith(begin)), kind)
            wrong = f"unknown key {unknown[1]!r}{nearest(unknown[1], owner.__struct_fields__)}"
        where = f"the {label} {path}: {place + ': ' if place else ''}"
        raise ConfigError(f"{where}{wrong[0].lower()}{wrong[1:]}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {label} {path} is not JSON: {error}") from error


def write_json(path: str | Path, value: msgspec.Struct, label: str) -> None:
    """Write the value as indented JSON. label : the kind of file, for messages. Raises ConfigError."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=_listed)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the {label} {path}: {error.strerror}") from error


def _listed(value: Any) -> Any:
    """Convert arrays and their elements to lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"there is no JSON for {type(value)}")  # msgspec requires this exception


# ---- as arrays ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams as arrays. model : (streams,) indices of models.  The numbers : (streams,), NaN where not set."""

    names: Sequence[str]
    model: Ints
    rate_per_s: Floats
    slo_s: Floats
    gpus_needed: Floats


def streams_of(instance: Instance) -> Streams:
    """Raises ConfigError on an unknown model, a duplicate, a short column, a negative or infinite number."""
    columns = instance.streams
    if not isinstance(columns, StreamColumns):
        fields = StreamColumns.__struct_fields__
        columns = StreamColumns(**{field: [getattr(stream, field) for stream in columns] for field in fields})
    names, models = _texts(columns.name), _texts(columns.model)
    if len(models) != len(names):
        raise ConfigError(f"streams: there are {len(names):,} names and {len(models):,} models")
    index = _index(instance)
    try:
        model = np.fromiter(map(index.__getitem__, models), dtype=np.int64, count=len(models))
    except KeyError as error:
        unknown = error.args[0]
        name = names[models.index(unknown)]
        raise ConfigError(f"stream {name!r}: unknown model {unknown!r}{nearest(unknown, index)}") from None
    _check_pairs(names, models, model)
    return Streams(names, model, *(_column(columns, field, names) for field in ("rate_per_s", "slo_s", "gpus_needed")))


def _check_pairs(names: Sequence[str], models: Sequence[str], model: Ints) -> None:
    """Raises ConfigError on a duplicate stream. Streams may be millions: only those of equal hashes are compared."""
    hashes = np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
    hashes += HASH_STEP * model  # integers of arrays overflow without harm
    ordered = np.sort(hashes)
    shared = ordered[1:][ordered[1:] == ordered[:-1]]
    if shared.size:
        suspects = np.flatnonzero(np.isin(hashes, shared)).tolist()
        no_duplicates([(names[at], models[at]) for at in suspects], "stream")


def _index(instance: Instance) -> dict[str, int]:
    return {model.name: number for number, model in enumerate(instance.models)}


def _texts(column: Sequence[str]) -> list[str]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def _column(columns: StreamColumns, field: str, names: Sequence[str]) -> Floats:
    column = getattr(columns, field)
    if column is None:
        return np.full(len(names), np.nan)
    values = np.array(column, dtype=float)  # None: NaN
    if values.shape != (len(names),):
        raise ConfigError(f"streams: there are {len(names):,} names and {values.size:,} of {field}")
    wrong = np.isinf(values) | (values < 0) | ((values == 0) & (field == "slo_s"))
    if wrong.any():
        at = int(np.argmax(wrong))
        least = "above 0" if field == "slo_s" else "at least 0"
        raise ConfigError(f"stream {names[at]!r}: {field} must be a finite number {least}, not {values[at]:g}")
    return values


# ---- at other rates -----------------------------------------------------------------------------------------------


def with_rates(instance: Instance, rates_per_s: Rates) -> Instance:
    """The instance at these rates; other rates stay. A stream's own rate takes precedence over its model's rate.

    A named stream without an SLO, or a new stream, gets the tightest SLO of its model's streams. Raises ConfigError on
    a rate below 0, an unknown model, and a model's rate when the model's streams have no rates to scale.
    """
    streams, index = streams_of(instance), _index(instance)
    _check_rates(rates_per_s, index)
    of_models = {key: rate_per_s for key, rate_per_s in rates_per_s.items() if isinstance(key, str)}
    of_streams = {key: rate_per_s for key, rate_per_s in rates_per_s.items() if not isinstance(key, str)}
    names, models = list(streams.names), streams.model.tolist()
    rates = (streams.rate_per_s * _factors(streams, of_models, index)[streams.model]).tolist()
    slos, needs = streams.slo_s.tolist(), streams.gpus_needed.tolist()
    tightest_s = np.full(len(index), np.nan)  # (models,) tightest SLO of the model's streams, NaN without any SLO
    np.fmin.at(tightest_s, streams.model, streams.slo_s)
    places = {pair: at for at, pair in enumerate(zip(names, models, strict=True))}
    for (name, of), rate_per_s in of_streams.items():
        model = index[of]
        at = places.get((name, model))
        if at is None:
            names.append(name)
            models.append(model)
            rates.append(rate_per_s)
            slos.append(float(tightest_s[model]))
            needs.append(math.nan)
        else:
            rates[at], needs[at] = rate_per_s, math.nan
            slos[at] = float(tightest_s[model]) if math.isnan(slos[at]) else slos[at]
    columns = StreamColumns(names, [instance.models[model].name for model in models], rates, slos, needs)
    return msgspec.structs.replace(instance, streams=columns)


def _check_rates(rates_per_s: Rates, models: Mapping[str, int]) -> None:
    for key, rate_per_s in rates_per_s.items():
        model = key if isinstance(key, str) else key[1]
        if model not in models:
            raise ConfigError(f"rates_per_s: unknown model {model!r}{nearest(model, models)}")
        if not (math.isfinite(rate_per_s) and rate_per_s >= 0):
            raise ConfigError(f"rates_per_s: {_quoted(key)}: a finite number of at least 0 is needed, not {rate_per_s}")


def _factors(streams: Streams, rates_per_s: Mapping[str, float], models: Mapping[str, int]) -> Floats:
    """(models,) new rate / previous rate of all streams of a model together; 1 for a model without a new rate."""
    before_per_s = np.bincount(streams.model, streams.rate_per_s, len(models))  # NaN if a stream's rate is unknown
    factors = np.ones(len(models))
    for model, rate_per_s in rates_per_s.items():
        if not before_per_s[models[model]] > 0:
            raise ConfigError(
                f"rates_per_s: the streams of model {model!r} have no rates that could change in proportion"
            )
        factors[models[model]] = rate_per_s / before_per_s[models[model]]
    return factors
