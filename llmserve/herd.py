"""HERD: which models share which GPUs, so that all streams can bear as large bursts as possible (Shepherd, Section 4).

    i, k       a model with all its streams (a "model-stream"): streams of one model are added up first
    T          goodput of one GPU, requests/s: measured, or profiled from alpha, beta and the SLO (`goodputs_per_s`)
    n_i        GPUs that it needs for its average load: the sum over its streams of rate / T        `gpus_needed`
    j          a group of GPUs, each of which holds every model of the group
    size_j     its GPUs, a whole number
    x_ij       whether model i is in group j
    bt(i)      sum_j size_j x_ij / n_i: the load that it can come to, over its average load         `burst_tolerance`
    t          a tolerance that is asked for: whether every bt(i) can be at least t

The programme: maximise the least bt(i), where (a) the sizes add up to at most the cluster's GPUs, (b) a size is at most
`group_gpus_max`, (c) the models of a group fit together into one GPU, (d) each model is in one group, of at most
`groups`, and (e) a group has models of one affinity set. As printed that is all, and an optimum may load a group to
more than it can serve, for a bt(i) counts a group's GPUs as if no other model were there. By default the load counts
too: sum_i n_i x_ij <= size_j.

How it is solved. The least bt(i) is some size / n_i, so t comes from a finite list and is searched by bisection; for a
given t, max-min is gone and model i only asks that size_j >= ceil(t n_i). For each t:

1. A relaxation that may split models between groups tells most t that are too large. With models by falling n_i, and
   groups by their first model, the models before that of group j + 1 are all in groups 1 to j: their memory is at most
   that of j groups, and their load at most those groups' GPUs. The later group j + 1 begins, the less it asks for. So a
   dynamic programme over (j, GPUs so far), each group beginning as late as that allows, finds the fewest GPUs. GPUs
   without load are bounded by those that the cluster has to spare, however load is spread (`_load_max`).
2. Greedy packings tell most t that are small enough: into the sizes that the relaxation finds when everything is taken
   for somewhat larger than it is; and one group after another. Of many models, HiGHS may then place some anew.
3. Between the two scipy's HiGHS decides, as an integer programme.

Where the largest t that 1 leaves is reached by 2, that is an optimum and no integer programme is solved.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from llmserve.errors import ConfigError, LLMServeError

S = TypeVar("S", "Instance", "Plan")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Rates = Mapping[str | tuple[str, str], float]
Told = Callable[[float | None, float], None]
"""(burst tolerance that was found, one that nothing can exceed): how far a search has come; None: none yet."""

MS_PER_S = 1e3
ROUNDING = 1e-9  # relative: of products and sums of floating-point numbers
SLACK = 2e-6  # GPUs, and GPUs' memories: what HiGHS may leave a row violated by, and a little more
STREAMS_TOLD_MAX = 1_000  # with more, a plan names models only: it stays small, and its streams follow their models
TIME_LIMIT_S = 10.0
SEARCHING = 0.85  # of the time at most; the rest is for choosing among equals
EXPLAINING_S = 5.0  # to find out what would have been enough
MOVES_S = 5.0  # to find few moves
WHOLE_SIZE, WHOLE_S = 4_000, 30.0  # models * groups, or seconds, for HiGHS on the whole: of more it looks at no clock
EXPONENTS = (0.0, 0.5, 1.0)  # of memory, by which need is divided
FREED = 100  # models that are placed anew at once
REFINING, REFINING_S = 0.8, 2.0  # of the time that is left, in all; and seconds at once
STEPS = 7  # of bisections that need no exact answer
NONE = 1 << 40  # GPUs that would do: no number would

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]


class NoPlan(LLMServeError):
    """No plan keeps an instance's limits, or none was found in time. The message says why, and by how much."""


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
        return _decoded(_read(path, "instance"), cls, f"the instance {path}")

    def save(self, path: str | Path) -> None:
        _write(path, self, "instance")


# ---- the plan -----------------------------------------------------------------------------------------------------


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """GPUs with a scheduler of their own, each holding all of the group's models.

    streams          (stream, model) pairs served here although another group has the model; `plan` makes none
    workers          the server's names of these GPUs; (): any that serve the models. `plan` names none
    load             GPUs needed for the average load, over gpus; above 1 it cannot be served
    memory_gb        that the models take on each GPU
    burst_tolerance  least of its models'; None: they have no load
    """

    name: Name
    gpus: Count
    models: tuple[Name, ...]
    streams: tuple[tuple[str, str], ...] = ()
    workers: tuple[Name, ...] = ()
    load: NotNegative = 0.0
    memory_gb: NotNegative = 0.0
    burst_tolerance: NotNegative | None = None


class PlannedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model with its streams added up. burst_tolerance : at most that of each of its streams; None: no load."""

    name: str
    group: str
    gpus_needed: float
    streams: int
    burst_tolerance: float | None = None


class PlannedStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    model: str
    group: str
    gpus_needed: float
    burst_tolerance: float | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Who serves what. A hand-written one needs groups only, with their names, GPUs and models.

    models           each with its group, in the instance's order
    streams          each with its own burst tolerance, where there are at most STREAMS_TOLD_MAX; else ()
    burst_tolerance  the least one; None: nothing has any load
    bound            that no plan can exceed; gap : bound / burst_tolerance - 1, 0 when the plan is proven to be optimal
    solve_s          seconds from the instance in memory to the plan
    as_printed       whether groups may have more load than GPUs
    moves            models that were in another group of the previous plan; None: there was none
    """

    groups: tuple[Group, ...]
    models: tuple[PlannedModel, ...] = ()
    streams: tuple[PlannedStream, ...] = ()
    burst_tolerance: float | None = None
    bound: float | None = None
    gap: float = 0.0
    solve_s: float = 0.0
    as_printed: bool = False
    moves: int | None = None
    version: Literal[1] = 1

    def group_of(self, stream: str, model: str) -> str | None:
        """The name of the group that serves them; None: not planned."""
        pairs, models = self._routes
        return pairs.get((stream, model)) or models.get(model)

    @cached_property
    def _routes(self) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
        pairs = {pair: group.name for group in self.groups for pair in group.streams}
        return pairs, {model: group.name for group in self.groups for model in group.models}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """From JSON. Raises ConfigError naming what is wrong in it."""
        where = f"the plan {path}"
        found = _decoded(_read(path, "plan"), cls, where)
        _no_duplicates([group.name for group in found.groups], f"{where}: group")
        _no_duplicates([model for group in found.groups for model in group.models], f"{where}: model")
        _no_duplicates([pair for group in found.groups for pair in group.streams], f"{where}: stream")
        _no_duplicates([worker for group in found.groups for worker in group.workers], f"{where}: worker")
        return found

    def save(self, path: str | Path) -> None:
        _write(path, self, "plan")


def _read(path: str | Path, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error


def _write(path: str | Path, value: Instance | Plan, what: str) -> None:
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=_listed)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {path}: {error.strerror}") from error


def _listed(value: Any) -> Any:
    """What JSON does not know: columns that are arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError


def _decoded(text: bytes, kind: type[S], where: str) -> S:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`").removeprefix(".")
        if (unknown := re.fullmatch(r"Object contains unknown field `(.+)`", what)) is not None:
            what = f"unknown key {unknown[1]!r}{_nearest(unknown[1], _keys(kind, place))}"
        raise ConfigError(f"{where}: {place + ': ' if place else ''}{what[0].lower()}{what[1:]}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _keys(kind: type[Instance] | type[Plan], place: str) -> tuple[str, ...]:
    """Of the object at this place in the JSON: streams[...] and the like."""
    parts: dict[tuple[type, str], type[msgspec.Struct]] = {
        (Instance, "streams["): Stream,
        (Instance, "streams"): StreamColumns,
        (Instance, "models["): Model,
        (Plan, "groups["): Group,
        (Plan, "models["): PlannedModel,
        (Plan, "streams["): PlannedStream,
    }
    return next((part.__struct_fields__ for (of, at), part in parts.items() if of is kind and place.startswith(at)),
                kind.__struct_fields__)  # fmt: skip


def _no_duplicates(names: Sequence[Any], what: str) -> None:
    if len(set(names)) == len(names):
        return
    seen = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {_named(name)} is there twice")
        seen.add(name)


def _nearest(word: str, known: Collection[str]) -> str:
    from llmserve.config import nearest  # here, for it imports all rooms that are configured, and they may have plans

    return nearest(word, known)


def _named(name: str | tuple[str, str]) -> str:
    return repr(name) if isinstance(name, str) else f"{name[0]!r} of model {name[1]!r}"


# ---- load and affinity --------------------------------------------------------------------------------------------


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
        _no_duplicates(list(zip(names, models, strict=True)), "stream")
    index = {model.name: number for number, model in enumerate(instance.models)}
    try:
        model = np.fromiter(map(index.__getitem__, models), dtype=np.int64, count=len(models))
    except KeyError as error:
        name = names[models.index(error.args[0])]
        raise ConfigError(f"stream {name!r}: unknown model {error.args[0]!r}{_nearest(error.args[0], index)}") from None
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


def divergence(alpha_ms: Floats, beta_ms: Floats, of: int) -> Floats:
    """(models,) A(m_i, m_j) of Section 5.2, the larger of both directions, of one model with each. Of like ones: 1."""

    def directed(alpha_i: Floats, beta_i: Floats, alpha_j: Floats, beta_j: Floats) -> Floats:
        spare = alpha_j + beta_j - beta_i
        most = (alpha_i + beta_i) / alpha_j
        later = np.maximum(alpha_i / np.where(spare > 0, spare, 1.0), alpha_i / alpha_j)
        return np.where(spare > 0, np.minimum(most, later), most)

    one = alpha_ms[of : of + 1], beta_ms[of : of + 1]
    return np.maximum(directed(*one, alpha_ms, beta_ms), directed(alpha_ms, beta_ms, *one))


def affinity_sets(models: Sequence[Model], affinity_max: float | None) -> Ints:
    """(models,) which set each is in: any two of a set diverge by at most affinity_max.

    Greedy: in the order of beta / alpha, then alpha, each goes into the first set whose members it all suits, or begins
    one. The fewest sets would be a clique cover, which is hard; more of them leave plans fewer choices.
    """
    kinds = np.zeros(len(models), dtype=np.int64)
    if affinity_max is None or not models:
        return kinds
    alpha_ms = np.array([model.alpha_ms for model in models])
    beta_ms = np.array([model.beta_ms for model in models])
    suits: list[Bools] = []  # by set: models that all its members suit
    for one in np.lexsort((alpha_ms, beta_ms / alpha_ms)).tolist():
        near = divergence(alpha_ms, beta_ms, one) <= affinity_max * (1 + ROUNDING)
        found = next((number for number, all_suit in enumerate(suits) if all_suit[one]), None)
        if found is None:
            found = len(suits)
            suits.append(near)
        else:
            suits[found] &= near
        kinds[one] = found
    return kinds


# ---- planning -----------------------------------------------------------------------------------------------------


def plan(
    instance: Instance,
    *,
    as_printed: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    previous: Plan | None = None,
    told: Told | None = None,
) -> Plan:
    """The plan of largest least burst tolerance; with its gap, if the time does not suffice to prove it.

    previous : a plan whose groups' names go on, and its models stay where they are wherever that is as good (`replan`).
    told : is called when something was found.

    GPUs that the optimum leaves over go, one by one, to the group of least burst tolerance. Unless as_printed, among
    equal optima one is looked for that levels the groups' loads.

    Raises ConfigError on an instance that makes no sense, and NoPlan.
    """
    began_s = time.perf_counter()
    _check(instance)
    streams = streams_of(instance)
    needs = needs_of(instance, streams)
    task, order = _task(instance, _by_model(instance, streams, needs), as_printed)
    search = Search(task, began_s + SEARCHING * time_limit_s, told)
    found = search.run()
    if found is None:
        raise NoPlan(_why_not(instance, as_printed, search))
    grouping, tolerance, bound = found
    if not as_printed:
        grouping = _levelled(task, tolerance, grouping, began_s + time_limit_s)
    names = [f"group-{number + 1}" for number in range(instance.groups)]
    moves = None
    if previous is not None:
        grouping, names, moves = _near(search, tolerance, grouping, previous, [instance.models[k].name for k in order])
    outcome = _Outcome(_with_spare(task, grouping), names, bound, moves, as_printed)
    return _plan(instance, streams, needs, outcome, order, began_s)


def replan(
    instance: Instance,
    rates_per_s: Rates,
    previous: Plan,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    told: Told | None = None,
) -> Plan:
    """A plan for other rates, in the form (as printed or not) of the previous one.

    rates_per_s : by (stream, model), or by model: then all its streams' rates change in proportion. What is not named
    stays. A stream that the instance does not know counts with the tightest SLO of its model's streams.

    The least burst tolerance is as large as if there were no previous plan. Among plans that reach it: the previous
    groups, unless they do not; else one that HiGHS finds, with the fewest moves if the time suffices (of many models
    only FREED may move), or, if that has fewer, the one that would be made without a previous plan, its groups named
    after those they share most models with.

    Raises ConfigError on a rate below 0 or of an unknown model, and NoPlan.
    """
    changed = with_rates(instance, rates_per_s)
    return plan(changed, as_printed=previous.as_printed, time_limit_s=time_limit_s, previous=previous, told=told)


def with_rates(instance: Instance, rates_per_s: Rates) -> Instance:
    """See `replan`."""
    streams = streams_of(instance)
    index = {model.name: number for number, model in enumerate(instance.models)}
    names, models = list(streams.names), streams.model.tolist()
    places = {pair: at for at, pair in enumerate(zip(names, models, strict=True))}
    tightest_s = np.full(len(index), np.inf)
    np.fmin.at(tightest_s, streams.model, streams.slo_s)
    rates_before_per_s = np.bincount(streams.model, streams.rate_per_s, len(index))  # NaN where one is not known
    factors = np.ones(len(index))
    rated = {key: rate for key, rate in rates_per_s.items() if not isinstance(key, str)}
    for key, rate_per_s in rates_per_s.items():
        of = key if isinstance(key, str) else key[1]
        if of not in index:
            raise ConfigError(f"rates_per_s: unknown model {of!r}{_nearest(of, index)}")
        if not (math.isfinite(rate_per_s) and rate_per_s >= 0):
            raise ConfigError(f"rates_per_s: {_named(key)}: a finite number of at least 0 is needed, not {rate_per_s}")
        if isinstance(key, str):
            factors[index[of]] = _factor(of, rate_per_s, float(rates_before_per_s[index[of]]))
    rates, slos = (streams.rate_per_s * factors[streams.model]).tolist(), streams.slo_s.tolist()
    needs = streams.gpus_needed.tolist()
    for (stream, of), rate_per_s in rated.items():
        at = places.get((stream, index[of]))
        if at is None:
            names.append(stream)
            models.append(index[of])
            rates.append(rate_per_s)
            slos.append(float(tightest_s[index[of]]) if math.isfinite(tightest_s[index[of]]) else math.nan)
            needs.append(math.nan)
        else:
            rates[at], needs[at] = rate_per_s, math.nan
    columns = StreamColumns(names, [instance.models[kind].name for kind in models], rates, slos, needs)
    return msgspec.structs.replace(instance, streams=columns)


def _factor(model: str, rate_per_s: float, before_per_s: float) -> float:
    if not before_per_s > 0:
        raise ConfigError(f"rates_per_s: the streams of model {model!r} have no rates that could change in proportion")
    return rate_per_s / before_per_s


def _check(instance: Instance) -> None:
    """What the types cannot say; and what they say, for instances that were made in Python."""
    if not instance.models:
        raise ConfigError("models: at least one is needed")
    _no_duplicates([model.name for model in instance.models], "model")
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


LEAST = {  # None: more than 0
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


@dataclass(frozen=True, slots=True)
class _Outcome:
    grouping: Grouping
    names: list[str]
    bound: float
    moves: int | None
    as_printed: bool


def _plan(instance: Instance, streams: Streams, needs: Floats, outcome: _Outcome, order: Ints, began_s: float) -> Plan:
    """In words. order : of the task's models, in the instance's."""
    group = np.empty(order.size, dtype=np.int64)
    group[order] = outcome.grouping.group
    sizes = outcome.grouping.sizes
    need = _by_model(instance, streams, needs)
    memory_gb = np.array([model.memory_gb for model in instance.models])
    counts = np.bincount(streams.model, minlength=order.size)
    used = [number for number in range(sizes.size) if (group == number).any()]
    groups = tuple(
        Group(
            name=outcome.names[number],
            gpus=int(sizes[number]),
            models=tuple(instance.models[k].name for k in np.flatnonzero(group == number)),
            load=float(need[group == number].sum() / sizes[number]),
            memory_gb=float(memory_gb[group == number].sum()),
            burst_tolerance=_tolerance(int(sizes[number]), float(need[group == number].max())),
        )
        for number in used
    )
    models = tuple(
        PlannedModel(
            name=model.name,
            group=outcome.names[group[k]],
            gpus_needed=float(need[k]),
            streams=int(counts[k]),
            burst_tolerance=_tolerance(int(sizes[group[k]]), float(need[k])),
        )
        for k, model in enumerate(instance.models)
    )
    least = min([each.burst_tolerance for each in groups if each.burst_tolerance is not None], default=None)
    bound = least if least is None or outcome.bound <= least * (1 + ROUNDING) else outcome.bound
    return Plan(
        groups=groups,
        models=models,
        streams=_planned_streams(streams, needs, models, groups) if needs.size <= STREAMS_TOLD_MAX else (),
        burst_tolerance=least,
        bound=bound,
        gap=0.0 if least is None or bound is None else bound / least - 1,
        solve_s=time.perf_counter() - began_s,
        as_printed=outcome.as_printed,
        moves=outcome.moves,
    )


def _planned_streams(
    streams: Streams, needs: Floats, models: Sequence[PlannedModel], groups: Sequence[Group]
) -> tuple[PlannedStream, ...]:
    gpus = {group.name: group.gpus for group in groups}
    return tuple(
        PlannedStream(name, models[kind].name, models[kind].group, need, _tolerance(gpus[models[kind].group], need))
        for name, kind, need in zip(streams.names, streams.model.tolist(), needs.tolist(), strict=True)
    )


def _tolerance(gpus: int, need: float) -> float | None:
    return gpus / need if need > 0 else None


# ---- the task: numbers only ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """An instance without names. Models by falling need.

    need       (models,) n_i
    load       (models,) what it takes of its group's GPUs: n_i; 0 as printed
    memory     (models,) share of a GPU's
    kind       (models,) affinity set
    """

    need: Floats
    load: Floats
    memory: Floats
    kind: Ints
    gpus: int
    size_max: int
    groups: int

    def asked(self, tolerance: float) -> Ints:
        """(models,) GPUs that a group needs to have, for this burst tolerance of each model in it."""
        gpus = np.ceil(tolerance * self.need * (1 - ROUNDING) - ROUNDING)
        return np.maximum(gpus, 1.0).astype(np.int64)

    def least_sizes(self, group: Ints, tolerance: float, groups: int) -> Ints:
        """(groups,) of these groups, 0 of an empty one."""
        sizes: Ints = np.ceil(np.bincount(group, self.load, groups) - SLACK).astype(np.int64)
        np.maximum.at(sizes, group, self.asked(tolerance))
        return sizes

    def sizes(self, group: Ints, tolerance: float, groups: int) -> Ints | None:
        """The same; None where limits are broken."""
        memory = np.bincount(group, self.memory, groups)
        sizes = self.least_sizes(group, tolerance, groups)
        kept = memory.max() <= 1 + SLACK and sizes.max() <= self.size_max and sizes.sum() <= self.gpus
        kept = kept and np.count_nonzero(sizes) <= self.groups
        return sizes if kept else None


@dataclass(frozen=True, slots=True)
class Grouping:
    """group : (models,) of each.  sizes : (groups,) GPUs, 0 of an empty one."""

    group: Ints
    sizes: Ints

    def tolerance(self, task: Task) -> float:
        """The least one; infinite without load."""
        with np.errstate(divide="ignore"):
            return float(np.min(self.sizes[self.group] / task.need))


def _task(instance: Instance, need: Floats, as_printed: bool) -> tuple[Task, Ints]:
    """And the order of its models in the instance's."""
    order = np.argsort(-need, kind="stable")
    memory = np.array([model.memory_gb for model in instance.models]) / instance.gpu_memory_gb
    task = Task(
        need=need[order],
        load=np.zeros(need.size) if as_printed else need[order],
        memory=memory[order],
        kind=affinity_sets(instance.models, instance.affinity_max)[order],
        gpus=instance.gpus,
        size_max=min(instance.group_gpus_max, instance.gpus),
        groups=min(instance.groups, need.size, instance.gpus),
    )
    return task, order


def _by_model(instance: Instance, streams: Streams, needs: Floats) -> Floats:
    """(models,) n_i, of all its streams."""
    return np.bincount(streams.model, needs, len(instance.models)).astype(float)


def _candidates(task: Task) -> Floats:
    """Rising: 0, and every size / n_i that the least burst tolerance can be."""
    most = task.size_max / task.need[0] if task.need[0] > 0 else 0.0
    found = [np.zeros(1)]
    for need in np.unique(task.need[task.need > 0]):
        sizes = np.arange(1, math.floor(most * need * (1 + ROUNDING)) + 1)
        found.append(sizes / need)
    values = np.unique(np.concatenate(found))
    distinct = np.diff(values, prepend=-np.inf) > ROUNDING * values  # of equals, the smaller: asked() rounds down
    return values[distinct]


# ---- 1: the relaxation --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stage:
    """After j groups of one affinity set. Both (gpus + 1,), by the GPUs that they have in all.

    reached  whether they can have so many
    begun    models, by falling need, that memory and load let those groups hold at most
    """

    reached: Bools
    begun: Ints


def _stages(asked: Ints, load: Floats, memory: Floats, task: Task, groups: int) -> list[_Stage]:
    """Of 0, 1, ..., groups groups of one affinity set. asked, load, memory : of its models, by falling need."""
    gpus = np.arange(task.gpus + 1)
    by_memory = np.append(0.0, np.cumsum(memory))
    by_load = np.searchsorted(np.append(0.0, np.cumsum(load)), gpus + SLACK, side="right") - 1
    reached = gpus == 0
    idle = task.gpus - float(task.load.sum())  # GPUs that can be without load, in all groups together
    stages = []
    for number in range(groups + 1):
        held = int(np.searchsorted(by_memory, number + SLACK * max(number, 1), side="right")) - 1
        begun = np.minimum(by_load, held)
        reached &= gpus <= idle + _load_max(load, memory, number) + SLACK * max(number, 1)
        stages.append(_Stage(reached, begun))
        going = np.flatnonzero(reached & (begun < asked.size))
        low = gpus[going] + asked[begun[going]]
        high = np.minimum(gpus[going] + task.size_max, task.gpus)
        open_ = low <= high
        marks = np.bincount(low[open_], minlength=task.gpus + 2) - np.bincount(high[open_] + 1, minlength=task.gpus + 2)
        reached = np.cumsum(marks)[:-1] > 0
    return stages


def _load_max(load: Floats, memory: Floats, groups: int) -> float:
    """The most load of models, or parts of them, that fit into the memory of so many groups."""
    order = np.argsort(-load / memory, kind="stable")
    taken = np.append(0.0, np.cumsum(memory[order]))
    return float(np.interp(groups * (1 + SLACK), taken, np.append(0.0, np.cumsum(load[order]))))


def _least_gpus(stages: Sequence[_Stage], models: int) -> Ints:
    """(groups + 1,) that 0, 1, ... groups need at least to hold all; NONE where they cannot."""
    found = [np.flatnonzero(stage.reached & (stage.begun == models)) for stage in stages]
    return np.array([int(gpus[0]) if gpus.size else NONE for gpus in found])


@dataclass(frozen=True, slots=True)
class Relaxation:
    """What the relaxation comes to at a tolerance: least GPUs of each affinity set by its groups, and of all.

    stages     by set
    least      (sets, groups + 1)
    together   (sets + 1, groups + 1) GPUs that the first sets need at least with so many groups
    """

    stages: list[list[_Stage]]
    least: Ints
    together: Ints

    @property
    def gpus(self) -> int:
        """That all sets need at least; NONE: no number would do."""
        return min(int(self.together[-1].min()), NONE)

    @classmethod
    def of(cls, task: Task, tolerance: float) -> Relaxation:
        asked = task.asked(tolerance)
        kinds = int(task.kind.max()) + 1
        stages, least = [], []
        together = np.full((kinds + 1, task.groups + 1), NONE)
        together[0, 0] = 0
        for kind in range(kinds):
            mine = task.kind == kind
            stages.append(_stages(asked[mine], task.load[mine], task.memory[mine], task, task.groups))
            least.append(_least_gpus(stages[-1], int(mine.sum())))
            for own in range(1, task.groups + 1):
                sums = together[kind, : task.groups + 1 - own] + least[-1][own]
                together[kind + 1, own:] = np.minimum(together[kind + 1, own:], sums)
        return cls(stages, np.array(least), together)

    def allotted(self) -> list[tuple[int, int]]:
        """(groups, GPUs) of each set, where they need the fewest GPUs in all."""
        left = int(np.argmin(self.together[-1]))
        found = []
        for kind in reversed(range(len(self.least))):
            for own in range(1, left + 1):
                if self.together[kind, left - own] + self.least[kind, own] == self.together[kind + 1, left]:
                    found.append((own, int(self.least[kind, own])))
                    left -= own
                    break
        return found[::-1]


def _path(stages: Sequence[_Stage], asked: Ints, size_max: int, groups: int, gpus: int, largest_first: bool) -> Ints:
    """(groups,) sizes that lead to so many GPUs. largest_first : or the smallest that the first groups can have."""
    sizes = []
    for stage in reversed(stages[:groups]):
        before = np.flatnonzero(stage.reached & (stage.begun < asked.size))
        sums = before[(before + asked[stage.begun[before]] <= gpus) & (before + size_max >= gpus)]
        chosen = int(sums[-1] if largest_first else sums[0])
        sizes.append(gpus - chosen)
        gpus = chosen
    return np.array(sizes[::-1])


# ---- 2: the greedy packing ----------------------------------------------------------------------------------------


def _packed(task: Task, tolerance: float) -> Grouping | None:
    """A grouping of this tolerance, or None where none was found."""
    asked = task.asked(tolerance)
    for group in chain(_spread(task, tolerance, asked), _in_turn(task, asked)):
        if (sizes := task.sizes(group, tolerance, task.groups)) is not None:
            return Grouping(group, sizes)
    return None


def _spread(task: Task, tolerance: float, asked: Ints) -> Iterator[Ints]:
    """Into groups of the sizes that the relaxation finds, side by side."""
    inflated = _inflated(task, tolerance)
    if inflated is None:
        return
    relaxation = Relaxation.of(inflated, tolerance)
    allotted = relaxation.allotted()
    for largest_first, even in product((True, False), (True, False)):
        paths = [
            _path(relaxation.stages[kind], asked[task.kind == kind], task.size_max, groups, gpus, largest_first)
            for kind, (groups, gpus) in enumerate(allotted)
        ]
        kinds = np.repeat(np.arange(len(paths)), [path.size for path in paths])
        group = _filled(task, asked, np.concatenate(paths), kinds, even)
        if group is not None:
            yield group


def _in_turn(task: Task, asked: Ints) -> Iterator[Ints]:
    """One group after another, each with the models of largest need for their memory that fit: its largest size is paid
    for already, and the more load it takes and the fewer large models it leaves, the smaller the others can be.
    """
    for exponent in EXPONENTS:
        order = np.argsort(-(task.need + ROUNDING) / task.memory**exponent, kind="stable")
        group = np.full(asked.size, -1)
        count = 0
        for kind in range(int(task.kind.max()) + 1):
            left = order[task.kind[order] == kind].tolist()
            while left and count < task.groups:
                taken, left = _one_filled(task, left)
                group[taken] = count
                count += 1
        if (group >= 0).all():
            yield group


def _one_filled(task: Task, models: Sequence[int]) -> tuple[list[int], list[int]]:
    """A group with the first of them, wherever memory and load still fit; and those that are left."""
    memory_left, load_left = 1.0 + ROUNDING, task.size_max + ROUNDING
    first = min(models)  # of the largest need: who has it asks for the most GPUs
    taken, left = [], []
    for k in (first, *(k for k in models if k != first)):
        if task.memory[k] <= memory_left and task.load[k] <= load_left:
            memory_left -= task.memory[k]
            load_left -= task.load[k]
            taken.append(k)
        else:
            left.append(k)
    return taken, left


def _inflated(task: Task, tolerance: float) -> Task | None:
    """The task with memory, then load, made larger as far as the relaxation allows: a packing needs room for manoeuvre.

    Memory by half as much as it could be, so that some is left for load. None where not even the task itself is solved.
    """

    def larger(load: float, memory: float) -> Task:
        return replace(
            task,
            load=np.minimum(task.load * load, np.maximum(task.load, task.size_max)),
            memory=np.minimum(task.memory * memory, 1.0),
        )

    def most(made: Callable[[float], Task], limit: float) -> float:
        low, high = 1.0, limit
        for _ in range(STEPS):
            middle = (low + high) / 2
            solved = Relaxation.of(made(middle), tolerance).gpus <= task.gpus
            low, high = (middle, high) if solved else (low, middle)
        return low

    if Relaxation.of(task, tolerance).gpus > task.gpus:
        return None
    memory = (1 + most(lambda factor: larger(1.0, factor), 2.0)) / 2
    total = float(task.load.sum())
    load = most(lambda factor: larger(factor, memory), max(task.gpus / total, 1.0)) if total > 0 else 1.0
    return larger(load, memory)


def _filled(task: Task, asked: Ints, sizes: Ints, kinds: Ints, even: bool) -> Ints | None:
    """(models,) a group for each; None where one has no room.

    First those that the fewest groups can take, then the largest first. Each goes where the fuller of memory and load
    is then the least full (even), or where what is left resembles it most (their inner product).
    sizes, kinds : (groups,).
    """
    suited = (asked[:, None] <= sizes) & (task.kind[:, None] == kinds)  # (models, groups)
    weight = np.maximum(task.memory, task.load / max(float(np.mean(sizes)), 1.0))
    memory_left, load_left = np.ones(sizes.size), sizes.astype(float)
    group = np.full(asked.size, -1)
    for k in np.lexsort((-weight, suited.sum(axis=1))).tolist():
        memory, load = task.memory[k], task.load[k]
        fits = suited[k] & (memory <= memory_left + ROUNDING) & (load <= load_left + ROUNDING)
        if not fits.any():
            return None
        if even:
            score = np.minimum(memory_left - memory, (load_left - load) / sizes)
        else:
            score = memory * memory_left + load * load_left / sizes**2
        chosen = int(np.argmax(np.where(fits, score, -np.inf)))
        memory_left[chosen] -= memory
        load_left[chosen] -= load
        group[k] = chosen
    return group


def _levelled(task: Task, tolerance: float, grouping: Grouping, until_s: float) -> Grouping:
    """One of this tolerance whose most loaded group has less to do, if the packing finds one."""
    total = float(task.load.sum())
    if total == 0:
        return grouping
    loads = np.bincount(grouping.group, task.load, grouping.sizes.size)
    low, high = total / task.gpus, float(np.max(loads / np.maximum(_with_spare(task, grouping).sizes, 1)))
    for _ in range(STEPS):
        if time.perf_counter() > until_s:
            break
        level = (low + high) / 2
        found = _packed(replace(task, load=task.load / level), tolerance)
        low, high = (level, high) if found is None else (low, level)
        grouping = grouping if found is None else found
    return grouping


def _with_spare(task: Task, grouping: Grouping) -> Grouping:
    """Each GPU that is left to the group of least burst tolerance that may have more."""
    sizes = grouping.sizes.copy()
    need = np.zeros(sizes.size)
    np.maximum.at(need, grouping.group, task.need)
    load = np.bincount(grouping.group, task.need, sizes.size)
    for _ in range(task.gpus - int(sizes.sum())):
        room = np.flatnonzero((sizes > 0) & (sizes < task.size_max))
        if not room.size:
            break
        with np.errstate(divide="ignore"):
            tolerances = sizes[room] / need[room]
        sizes[room[np.lexsort((-load[room] / sizes[room], tolerances))[0]]] += 1
    return Grouping(grouping.group, sizes)


# ---- 3: the integer programme -------------------------------------------------------------------------------------


def decide(
    task: Task, tolerance: float, time_limit_s: float, kept: Bools | None = None, fixed: Ints | None = None
) -> tuple[Grouping | None, bool]:
    """A grouping of this tolerance, if HiGHS finds one; and whether it is proven that there is none.

    fixed : (models,) the group of those that have theirs, -1 of the others; then nothing is proven.
    kept : (models, groups) where each model would rather be; then, of all such groupings, one with as many as possible.

    Variables, all whole: x (models, groups), size (groups,) and, for each group, affinity set and number c that its
    models ask for, reach = 1 if the group may have models of the set that ask for c. Of a group's sets only one is
    reached. Groups are interchangeable unless some are preferred: then they have falling sizes.
    """
    scipy = _scipy()
    programme = _Programme(task, tolerance, task.groups if kept is None else kept.shape[1])
    programme.add_all(in_order=kept is None and fixed is None)
    rows, low, high = programme.rows()
    lower, upper = np.zeros(programme.variables), np.ones(programme.variables)
    upper[programme.size] = task.size_max
    if fixed is not None:
        held = np.flatnonzero(fixed >= 0)
        upper[programme.x[held]] = 0.0
        lower[programme.x[held, fixed[held]]] = upper[programme.x[held, fixed[held]]] = 1.0
    cost = np.zeros(programme.variables)
    if kept is not None:
        cost[programme.x] = -1.0 * kept
    result = scipy.milp(
        cost,
        integrality=np.ones(programme.variables),
        bounds=scipy.Bounds(lower, upper),
        constraints=scipy.LinearConstraint(rows, low, high),
        options={"time_limit": max(time_limit_s, 0.0)},
    )
    if result.x is None:
        return None, result.status == INFEASIBLE and fixed is None
    group = np.argmax(result.x[programme.x], axis=1)
    sizes = task.sizes(group, tolerance, programme.groups)
    return (None if sizes is None else Grouping(group, sizes)), False


INFEASIBLE = 2  # scipy's status


def _scipy() -> Any:
    """Its solvers. Raises ConfigError without it: it is a dependency of planning only."""
    try:
        import scipy.optimize
    except ImportError as error:
        raise ConfigError("planning needs scipy: pip install '.[plan]'") from error
    return scipy.optimize


class _Programme:
    """Rows of the integer programme: low <= rows @ variables <= high."""

    def __init__(self, task: Task, tolerance: float, groups: int) -> None:
        self.task, self.groups = task, groups
        asked = task.asked(tolerance)
        models = asked.size
        pairs, level = np.unique(np.stack([task.kind, asked]), axis=1, return_inverse=True)
        self._level = level.reshape(-1)  # (models,) of pairs
        self._level_kind, self._level_gpus = pairs
        levels = pairs.shape[1]
        self.x = np.arange(models * groups).reshape(models, groups)
        self.size = models * groups + np.arange(groups)
        self.reach = models * groups + groups + np.arange(groups * levels).reshape(groups, levels)
        self.variables = models * groups + groups + groups * levels
        self._parts: list[tuple[Ints, Ints, Floats]] = []
        self._low: list[Floats] = []
        self._high: list[Floats] = []
        self._count = 0

    def add_all(self, in_order: bool) -> None:
        task, infinite = self.task, np.inf
        begins = np.diff(self._level_kind, prepend=-1) > 0  # (levels,) the least of an affinity set
        more = np.where(begins, self._level_gpus, np.diff(self._level_gpus, prepend=0))
        self._add([(self.x, 1.0)], 1.0, 1.0)  # each model is in one group
        self._add([(self.size[None], 1.0)], -infinite, float(task.gpus))
        open_ = self.reach[:, begins]
        self._add([(self.x.T, task.load), (self.size[:, None], -1.0)], -infinite, 0.0)
        self._add([(self.x.T, task.memory), (open_, -1.0)], -infinite, 0.0)
        self._add([(open_, 1.0)], -infinite, 1.0)
        self._add([(open_.reshape(1, -1), 1.0)], -infinite, float(task.groups))
        self._add([(self.size[:, None], 1.0), (self.reach, -1.0 * more)], 0.0, infinite)
        later = np.flatnonzero(~begins)  # reaching a level takes reaching the one before
        self._add(
            [(_column_of(self.reach[:, later]), 1.0), (_column_of(self.reach[:, later - 1]), -1.0)], -infinite, 0.0
        )
        self._add([(_column_of(self.x), 1.0), (_column_of(self.reach[:, self._level].T), -1.0)], -infinite, 0.0)
        if in_order:
            self._add([(self.size[:-1, None], 1.0), (self.size[1:, None], -1.0)], 0.0, infinite)

    def _add(self, terms: Sequence[tuple[Ints, float | Floats]], low: float, high: float) -> None:
        """A row for each first index. terms : (variables (rows, n), their coefficients), added up."""
        count = terms[0][0].shape[0]
        for variables, coefficients in terms:
            rows = np.broadcast_to(self._count + np.arange(count)[:, None], variables.shape)
            values = np.broadcast_to(np.asarray(coefficients, dtype=float), variables.shape)
            self._parts.append((rows.ravel(), variables.ravel(), values.ravel()))
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self._count += count

    def rows(self) -> tuple[Any, Floats, Floats]:
        from scipy.sparse import csr_array

        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self._count, self.variables))
        return matrix, np.concatenate(self._low), np.concatenate(self._high)


def _column_of(variables: Ints) -> Ints:
    return variables.reshape(-1, 1)


# ---- the search ---------------------------------------------------------------------------------------------------


class Search:
    """For the largest tolerance of a task that a grouping has, until a time (time.perf_counter)."""

    def __init__(self, task: Task, until_s: float, told: Told | None = None) -> None:
        self.task, self.until_s = task, until_s
        self.proven = False  # that there is none, or that what was found is the best
        self._tolerances = _candidates(task)  # indexed by all of the below
        self._told = told
        self._best: Grouping | None = None
        self._found = -1  # largest known to be feasible
        self._most = self._tolerances.size - 1  # all above are known to be not

    @property
    def left_s(self) -> float:
        return self.until_s - time.perf_counter()

    def run(self) -> tuple[Grouping, float, float] | None:
        """The grouping, the tolerance that it was found for and a bound; None: none was found, or there is none."""
        self._most = _last(self._relaxed, self._most)
        if self._most >= 0:
            self._tell()
            self._pack()
        if self.task.need.size > FREED:
            self._refine()
        if self._best is None or self.left_s > WHOLE_S or self.task.need.size * self.task.groups <= WHOLE_SIZE:
            self._solve()
        self.proven = self._found == self._most
        if self._best is None:
            return None
        return self._best, float(self._tolerances[self._found]), float(self._tolerances[self._most])

    def _relaxed(self, at: int) -> bool:
        return Relaxation.of(self.task, self._tolerances[at]).gpus <= self.task.gpus

    def _pack(self) -> None:
        """As large a tolerance as the greedy packing finds; where it fails, larger ones are taken for out of reach."""

        def packed(at: int) -> bool:
            if at <= self._found:
                return True
            grouping = _packed(self.task, self._tolerances[at]) if self.left_s > 0 else None
            if grouping is not None:
                self._keep(grouping, at)
            return grouping is not None

        if not packed(self._most):
            _last(packed, self._most - 1)

    def _refine(self) -> None:
        """Where there are many models: pack one group after another, whatever GPUs it takes, and let the integer
        programme place only some of them anew. It saves the few GPUs that are lost where loads are rounded up to sizes.
        """
        rng = np.random.default_rng(0)  # any choice will do; the same each time
        until_s = time.perf_counter() + REFINING * self.left_s

        def refined(at: int) -> bool:
            left_s = until_s - time.perf_counter()
            if at <= self._found or left_s <= 0:
                return at <= self._found
            fixed = self._with_some_freed(self._tolerances[at], rng)
            if fixed is None:
                return False
            grouping, _ = decide(self.task, self._tolerances[at], min(left_s, REFINING_S), fixed=fixed)
            if grouping is not None:
                self._keep(grouping, at)
            return grouping is not None

        _last(refined, self._most)

    def _with_some_freed(self, tolerance: float, rng: np.random.Generator) -> Ints | None:
        """(models,) groups that need few GPUs, -1 of some models; of each group the largest model stays in it."""
        asked = self.task.asked(tolerance)
        tried = list(_in_turn(self.task, asked)) + ([] if self._best is None else [self._best.group])
        if not tried:
            return None
        gpus = [int(self.task.least_sizes(group, tolerance, self.task.groups).sum()) for group in tried]
        group = tried[int(np.argmin(gpus))].copy()
        _, largest = np.unique(group, return_index=True)  # models are by falling need
        others = np.setdiff1d(np.arange(group.size), largest)
        group[rng.choice(others, min(FREED, others.size), replace=False)] = -1
        return group

    def _solve(self) -> None:
        """By the integer programme, from above: the bound is usually near, so steps down from it begin small."""
        highest, step = self._most, 1  # what is yet to be tried lies above _found and up to here
        while self._found < highest and self.left_s > 0:
            at = max(highest - step + 1, self._found + 1)
            grouping, impossible = decide(self.task, self._tolerances[at], max(self.left_s / 2, min(self.left_s, 1.0)))
            if grouping is not None:
                self._keep(grouping, at)
                step = max((highest - self._found) // 2, 1)
                continue
            if impossible:
                self._most = at - 1
                self._tell()
            highest, step = at - 1, 2 * step

    def _keep(self, grouping: Grouping, at: int) -> None:
        """It was asked for this tolerance, and may have a larger one."""
        reached = np.searchsorted(self._tolerances, grouping.tolerance(self.task) * (1 + ROUNDING), side="right") - 1
        self._best, self._found = grouping, min(max(at, int(reached)), self._most)
        self._tell()

    def _tell(self) -> None:
        if self._told is not None:
            found = None if self._best is None else float(self._tolerances[self._found])
            self._told(found, float(self._tolerances[self._most]))


def _last(holds: Callable[[int], bool], high: int) -> int:
    """The largest of 0 .. high where it holds, -1 where it never does: it holds up to some number and not beyond."""
    low = -1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# ---- why there is no plan -----------------------------------------------------------------------------------------


def _why_not(instance: Instance, as_printed: bool, search: Search) -> str:
    reasons = list(_limits_broken(instance, search.task))
    if reasons:
        return f"there is no plan: {'; '.join(reasons)}"
    if not search.proven:
        return "no plan was found in the time, nor was it shown that there is none; a longer time limit may find one"
    helps = [text for text in (_would_do(instance, as_printed, field) for field in ("gpus", "groups")) if text]
    return (
        "there is no plan: load, memory and affinity fit in total, but no grouping of whole models keeps all limits"
        + (f"; {' or '.join(helps)} would do" if helps else "")
    )


def _limits_broken(instance: Instance, task: Task) -> Iterator[str]:
    """What can be told without a search. `task` has the load that counts."""
    total, gpus, groups = float(task.load.sum()), instance.gpus, instance.groups
    if task.load[0] > task.size_max + SLACK:
        yield (
            f"one model's load needs {task.load[0]:.6g} GPUs, and a group has at most {task.size_max}: "
            f"{task.load[0] - task.size_max:.6g} too few"
        )
    if total > gpus + SLACK:
        yield f"the load needs {total:.6g} GPUs, {total - gpus:.6g} more than the {gpus} there are"
    elif total > groups * task.size_max + SLACK:
        yield (
            f"the load needs {total:.6g} GPUs, and {groups} groups of at most {task.size_max} have "
            f"{groups * task.size_max}"
        )
    sets = int(task.kind.max()) + 1
    if sets > min(groups, gpus):
        yield f"the models fall into {sets} affinity sets, each needs a group of its own, and {_room(instance)}"
    filled = math.ceil(task.memory.sum() - SLACK)
    if filled > min(groups, gpus):
        yield (
            f"the models take {task.memory.sum() * instance.gpu_memory_gb:.6g} GB, the memory of {filled} GPUs of "
            f"{instance.gpu_memory_gb:g} GB, so at least {filled} groups are needed, and {_room(instance)}"
        )
    elif sets > 1 and (needed := sum(_groups_needed(task))) > min(groups, gpus) >= sets:
        yield f"the models of {sets} affinity sets need {needed} groups at least, and {_room(instance)}"


def _groups_needed(task: Task) -> list[int]:
    """By affinity set: at least, by memory and by load."""
    sets = int(task.kind.max()) + 1
    memory, load = (np.bincount(task.kind, weights, sets) for weights in (task.memory, task.load))
    most = np.maximum(np.ceil(memory - SLACK), np.ceil(load / task.size_max - SLACK))
    return [int(groups) for groups in np.maximum(most, 1)]


def _room(instance: Instance) -> str:
    few = instance.gpus < instance.groups
    return f"{instance.gpus} GPUs are too few for that" if few else f"there may be {instance.groups}"


def _would_do(instance: Instance, as_printed: bool, field: str) -> str | None:
    """The least number of GPUs, or of groups, that would have a plan; None where none, or none in the time, would."""
    now = getattr(instance, field)
    most = len(instance.models) if field == "groups" else instance.groups * instance.group_gpus_max
    streams = streams_of(instance)
    need = _by_model(instance, streams, needs_of(instance, streams))
    until_s = time.perf_counter() + EXPLAINING_S

    def fails(more: int) -> bool:
        task, _ = _task(msgspec.structs.replace(instance, **{field: now + more}), need, as_printed)
        return not _fits(task, until_s - time.perf_counter())

    enough = _last(fails, most - now) + 1
    return f"{now + enough} {'GPUs' if field == 'gpus' else 'groups'}" if 0 < enough <= most - now else None


def _fits(task: Task, time_limit_s: float) -> bool:
    if Relaxation.of(task, 0.0).gpus > task.gpus:
        return False
    return _packed(task, 0.0) is not None or (time_limit_s > 0 and decide(task, 0.0, time_limit_s)[0] is not None)


# ---- few moves ----------------------------------------------------------------------------------------------------


def _near(
    search: Search, tolerance: float, grouping: Grouping, previous: Plan, models: Sequence[str]
) -> tuple[Grouping, list[str], int]:
    """Of this tolerance, in the previous groups as far as possible; the groups' names; the models that moved.

    models : names of the task's, in its order. A model that is new does not move.
    """
    task = search.task
    index = {model: number for number, group in enumerate(previous.groups) for model in group.models}
    before = np.array([index.get(model, -1) for model in models])
    names = _names([group.name for group in previous.groups], task.groups)
    kept = before[:, None] == np.arange(len(names))
    candidates = [_renamed(grouping, kept)]
    stayed = _stayed(task, tolerance, before, len(names))
    if stayed is not None:
        candidates = [stayed]
    elif search.left_s > 0:
        fixed = None if kept.size <= WHOLE_SIZE else _some_freed(before)
        found, _ = decide(task, tolerance, min(search.left_s, MOVES_S), kept, fixed)
        candidates += [] if found is None else [found]
    moves = [int(np.count_nonzero((before >= 0) & (each.group != before))) for each in candidates]
    best = int(np.argmin(moves))
    return candidates[best], names, moves[best]


def _some_freed(before: Ints) -> Ints:
    """Where there are too many models for all to be placed anew: some, and those that are new."""
    known = np.flatnonzero(before >= 0)
    freed = np.random.default_rng(0).choice(known, min(FREED, known.size), replace=False)
    return np.where(np.isin(np.arange(before.size), freed), -1, before)


def _names(previous: list[str], groups: int) -> list[str]:
    """Those of the previous groups, and new ones if there may be more."""
    fresh = [name for number in range(len(previous) + groups) if (name := f"group-{number + 1}") not in previous]
    return previous + fresh[: max(groups - len(previous), 0)]


def _stayed(task: Task, tolerance: float, before: Ints, groups: int) -> Grouping | None:
    """Everything where it was, if that is of this tolerance and nothing is new."""
    if (before < 0).any():
        return None
    if any(np.unique(task.kind[before == number]).size > 1 for number in range(groups)):
        return None
    sizes = task.sizes(before, tolerance, groups)
    return None if sizes is None else Grouping(before, sizes)


def _renamed(grouping: Grouping, kept: Bools) -> Grouping:
    """The same groups, numbered so that the most models keep their number."""
    shared = np.zeros((grouping.sizes.size, kept.shape[1]))
    np.add.at(shared, grouping.group, kept)
    old, new = _scipy().linear_sum_assignment(-shared)
    numbers = np.empty(grouping.sizes.size, dtype=np.int64)
    numbers[old] = new
    sizes = np.zeros(kept.shape[1], dtype=np.int64)
    sizes[numbers] = grouping.sizes
    return Grouping(numbers[grouping.group], sizes)
