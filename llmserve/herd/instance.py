"""The question: streams of requests to models, the GPUs for them and the limits of their groups.

Three forms of it:

    a file      JSON, which names what is wrong in it by the place              `Instance.load`, `Instance.save`
    types       `Instance` of `Model` and `Stream`, or of `StreamColumns`       `check`
    arrays      streams come by the million, so planning knows them as arrays   `Streams`, `streams_of`

The same question at other rates, those that were observed since its plan was made, is `with_rates`.

All modules of herd take the types of arrays from here, and how far apart two numbers may be that count as equal.
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

ROUNDING = 1e-9  # relative: of products and sums of floating-point numbers
SLACK = 2e-6  # GPUs, and GPUs' memories: what HiGHS may leave a row violated by, and a little more

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]

Named = str | tuple[str, str]
"""A name of its own, or that of a stream: with its model's."""

Rates = Mapping[Named, float]
"""Requests/s, by (stream, model), or by model: then all its streams' rates change in proportion."""


# ---- what is planned ----------------------------------------------------------------------------------------------


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests of one application to one model. Its name and model together are its own.

    gpus_needed  for its average load; or rate_per_s, with slo_s unless the model's goodput is measured
    """

    name: Name
    model: Name
    rate_per_s: NotNegative | None = None
    slo_s: Positive | None = None
    gpus_needed: NotNegative | None = None


class StreamColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Streams by the million: the fields of Stream, each a sequence (a numpy array, too) of one length."""

    name: Sequence[str]
    model: Sequence[str]
    rate_per_s: Sequence[NotNegative | None] | None = None
    slo_s: Sequence[Positive | None] | None = None
    gpus_needed: Sequence[NotNegative | None] | None = None


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A batch of b takes alpha_ms b + beta_ms. goodput_per_s : measured maximum of a GPU; None: from alpha and beta."""

    name: Name
    memory_gb: Positive
    alpha_ms: Positive
    beta_ms: NotNegative
    batch_size_max: Count = 128
    goodput_per_s: Positive | None = None


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be planned.

    gpus            of the cluster; gpu_memory_gb : of each, that models may fill
    group_gpus_max  GPUs that one scheduler can keep up with
    groups          at most
    affinity_max    most that two models of a group may diverge by (`divergence`), at least 1; None: any two go together
    """

    streams: tuple[Stream, ...] | StreamColumns
    models: tuple[Model, ...]
    gpus: Count
    gpu_memory_gb: Positive
    group_gpus_max: Count
    groups: Count
    affinity_max: Annotated[float, Meta(ge=1)] | None = None

    @classmethod
    def load(cls, path: str | Path) -> Instance:
        """From JSON. Raises ConfigError naming what is wrong in it."""
        return read_json(path, cls, PARTS, "instance")

    def save(self, path: str | Path) -> None:
        """Raises ConfigError when it cannot be written."""
        write_json(path, self, "instance")


Parts = Mapping[str, type[msgspec.Struct]]
"""Of a file's object: how the places of its parts begin, such as "streams[", and what stands there."""

PARTS: Parts = {"streams[": Stream, "streams": StreamColumns, "models[": Model}
LEAST = {  # that a number may be; None: more than 0
    "gpus": 1,
    "gpu_memory_gb": None,
    "group_gpus_max": 1,
    "groups": 1,
    "affinity_max": 1,
    "memory_gb": None,
    "alpha_ms": None,
    "beta_ms": 0,
    "batch_size_max": 1,
    "goodput_per_s": None,
}


def check(instance: Instance) -> None:
    """What the types cannot say; and what they say, for instances that were made in Python. Raises ConfigError."""
    if not instance.models:
        raise ConfigError("models: at least one is needed")
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
                f"model {model.name!r}: it takes {model.memory_gb:g} GB, and a GPU has {instance.gpu_memory_gb:g}"
            )


def no_duplicates(names: Sequence[Named], what: str) -> None:
    """Raises ConfigError naming the first that comes again. what : they are."""
    if len(set(names)) == len(names):
        return
    seen: set[Named] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {_quoted(name)} is there twice")
        seen.add(name)


def _quoted(name: Named) -> str:
    return repr(name) if isinstance(name, str) else f"{name[0]!r} of model {name[1]!r}"


# ---- as a file ----------------------------------------------------------------------------------------------------

S = TypeVar("S", bound=msgspec.Struct)


def read_json(path: str | Path, kind: type[S], parts: Parts, what: str) -> S:
    """The object of this kind in a file. what : the file is, in messages.

    Raises ConfigError, which names what is wrong by its place in the file, and for an unknown key the nearest known.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        wrong, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`").removeprefix(".")
        if (unknown := re.fullmatch(r"Object contains unknown field `(.+)`", wrong)) is not None:
            owner = next((part for begin, part in parts.items() if place.startswith(begin)), kind)
            wrong = f"unknown key {unknown[1]!r}{nearest(unknown[1], owner.__struct_fields__)}"
        where = f"the {what} {path}: {place + ': ' if place else ''}"
        raise ConfigError(f"{where}{wrong[0].lower()}{wrong[1:]}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {what} {path} is not JSON: {error}") from error


def write_json(path: str | Path, value: msgspec.Struct, what: str) -> None:
    """The value, as indented JSON. what : the file is, in messages. Raises ConfigError."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=_listed)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {path}: {error.strerror}") from error


def _listed(value: Any) -> Any:
    """What JSON does not know: columns that are arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"there is no JSON for {type(value)}")  # msgspec wants this of its hooks


# ---- as arrays ----------------------------------------------------------------------------------------------------


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
        fields = StreamColumns.__struct_fields__
        given = StreamColumns(**{field: [getattr(stream, field) for stream in given] for field in fields})
    names, models = _texts(given.name), _texts(given.model)
    if len(models) != len(names):
        raise ConfigError(f"streams: there are {len(names):,} names and {len(models):,} models")
    no_duplicates(list(zip(names, models, strict=True)), "stream")
    index = _index(instance)
    try:
        model = np.fromiter(map(index.__getitem__, models), dtype=np.int64, count=len(models))
    except KeyError as error:
        unknown = error.args[0]
        name = names[models.index(unknown)]
        raise ConfigError(f"stream {name!r}: unknown model {unknown!r}{nearest(unknown, index)}") from None
    return Streams(names, model, *(_column(given, field, names) for field in ("rate_per_s", "slo_s", "gpus_needed")))


def _index(instance: Instance) -> dict[str, int]:
    return {model.name: number for number, model in enumerate(instance.models)}


def _texts(column: Sequence[str]) -> list[str]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def _column(given: StreamColumns, field: str, names: Sequence[str]) -> Floats:
    column = getattr(given, field)
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
    """What is not named stays. Where a model is named and a stream of it, too, the stream has its own rate.

    A stream that is named and has no SLO, or is not known to the instance, counts with the tightest SLO of its model's
    streams. Raises ConfigError on a rate below 0, one of an unknown model, and one of a model whose streams have no
    rates that could change in proportion.
    """
    streams, index = streams_of(instance), _index(instance)
    _check_rates(rates_per_s, index)
    of_models = {key: rate_per_s for key, rate_per_s in rates_per_s.items() if isinstance(key, str)}
    of_streams = {key: rate_per_s for key, rate_per_s in rates_per_s.items() if not isinstance(key, str)}
    names, models = list(streams.names), streams.model.tolist()
    rates = (streams.rate_per_s * _factors(streams, of_models, index)[streams.model]).tolist()
    slos, needs = streams.slo_s.tolist(), streams.gpus_needed.tolist()
    tightest_s = np.full(len(index), np.nan)  # (models,) SLO of its streams, NaN where none has one
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
    """(models,) new rate / rate before, of all its streams together; 1 of a model that is not named."""
    before_per_s = np.bincount(streams.model, streams.rate_per_s, len(models))  # NaN where a stream's is not known
    factors = np.ones(len(models))
    for model, rate_per_s in rates_per_s.items():
        if not before_per_s[models[model]] > 0:
            raise ConfigError(
                f"rates_per_s: the streams of model {model!r} have no rates that could change in proportion"
            )
        factors[models[model]] = rate_per_s / before_per_s[models[model]]
    return factors
