"""Nexus's plan: which batches each GPU runs, over and over, for rates that are known (Shen et al., SOSP 2019).

    R    requests a second of a model          L    within how many seconds they are wanted, its SLO
    l(b) seconds of a batch of b               T    requests a second that a GPU serves in its largest batches
    d    duty cycle in seconds: a GPU runs each of its batches once in it, one after the other

A request may just have missed its batch: it then waits d, and is served in l(b) of the next one. So a plan promises
that all is in time that comes evenly, where d + l(b) <= L. A GPU of one model alone runs its batches back to back:
d = l(b), and its largest batch is that with 2 l(b) <= L.

As Shepherd compares with it (Section 7): made again every 60 s, for the peak of the 60 s to come; and where the GPUs
that there are do not suffice, for the largest share of every rate that they can promise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from reproduction.shepherd.models import BATCH_MAX
from reproduction.shepherd.streams import Arrivals

PERIOD_S = 60.0  # from plan to plan
PEAK_S = 1.0  # that a peak lasts: the paper does not say
ROUNDING = 1e-9  # relative, by which sums of times may be off
SHARE_ERROR = 1e-3  # relative, of the share of the rates
SHARE_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """A model's requests, all with one SLO.

    batch_s     seconds of a batch of a size; non-decreasing
    rate_per_s  finite, >= 0
    """

    model: str
    batch_s: Callable[[int], float]
    rate_per_s: float
    slo_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.rate_per_s < math.inf and self.slo_s > 0):
            raise ConfigError(f"{self.model}: a finite rate of at least 0 and an SLO above 0 are needed")

    @property
    def batch_max(self) -> int:
        """Of a GPU of its own; 0: not even a request alone is sure to be in time."""
        return _size_max(lambda size: 2 * self.batch_s(size), self.slo_s)


@dataclass(frozen=True, slots=True)
class Slot:
    """A batch of a duty cycle.

    batch_size  at most so many requests
    offset_s    when it begins in the cycle
    batch_s     how long it takes
    rate_per_s  of the model's requests, what this GPU is planned to serve
    """

    model: str
    batch_size: int
    offset_s: float
    batch_s: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a GPU does, over and over. duty_s : seconds; 0 where there are no slots."""

    duty_s: float
    slots: tuple[Slot, ...]

    @property
    def occupancy(self) -> float:
        """Share of its time for which it is planned to work."""
        return sum(slot.batch_s for slot in self.slots) / self.duty_s if self.slots else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What each GPU does.

    gpus      one cycle each, idle ones without slots
    share     of every rate that is planned for, in (0, 1]
    unserved  models of which not even a request alone is sure to be in time
    """

    gpus: tuple[Cycle, ...]
    share: float
    unserved: tuple[str, ...] = ()

    def check(self, demands: Sequence[Demand]) -> None:
        """Assert that it keeps its promise: this share of these rates, in time when requests come evenly."""
        slo_s = {demand.model: demand.slo_s for demand in demands}
        planned = dict.fromkeys(slo_s, 0.0)
        for cycle in self.gpus:
            assert cycle.occupancy <= 1 + ROUNDING, f"more work than fits: {cycle}"
            ends_s = 0.0
            for slot in cycle.slots:
                assert slot.offset_s >= ends_s * (1 - ROUNDING), f"{slot.model} begins before the last one has ended"
                ends_s = slot.offset_s + slot.batch_s
                assert cycle.duty_s + slot.batch_s <= slo_s[slot.model] * (1 + ROUNDING), f"{slot.model} may be late"
                assert slot.rate_per_s * cycle.duty_s <= slot.batch_size * (1 + ROUNDING), f"{slot.model} piles up"
                planned[slot.model] += slot.rate_per_s
        for demand in demands:
            wanted = 0.0 if demand.model in self.unserved else self.share * demand.rate_per_s
            assert math.isclose(planned[demand.model], wanted, rel_tol=1e-6), f"{demand.model}: not what was wanted"


def plan(demands: Sequence[Demand], gpus: int) -> Plan:
    """For the rates that are asked for, or for the largest share of them, found by bisection, that fits on the GPUs.

    Packing is not quite monotone: now and then a share a little larger would fit too.

    Raises ConfigError where a model is named twice, or the GPUs cannot promise even a request now and then of
    each.
    """
    if len({demand.model for demand in demands}) < len(demands):
        raise ConfigError("a model has two demands: add them up")
    unserved = tuple(demand.model for demand in demands if not demand.batch_max)
    wanted = [demand for demand in demands if demand.rate_per_s > 0 and demand.model not in unserved]
    share = _largest_share(lambda share: len(pack(wanted, share)) <= gpus)
    if share is None:
        raise ConfigError(f"{len(wanted)} models do not fit on {gpus} GPUs, however few requests they have")
    cycles = pack(wanted, share)
    return Plan((*cycles, *[Cycle(0.0, ())] * (gpus - len(cycles))), share, unserved)


def _largest_share(fits: Callable[[float], bool]) -> float | None:
    """Bisects the logarithm, for it may be small. None: not even SHARE_MIN fits."""
    if fits(1.0):
        return 1.0
    if not fits(SHARE_MIN):
        return None
    low, high = SHARE_MIN, 1.0
    while high > low * (1 + SHARE_ERROR):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---- squishy bin packing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Load:
    """What a GPU is to serve of a demand."""

    demand: Demand
    rate_per_s: float

    def batch_size(self, duty_s: float) -> int:
        """As many as come in a duty cycle."""
        return max(1, math.ceil(self.rate_per_s * duty_s * (1 - ROUNDING)))


@dataclass(frozen=True, slots=True)
class _Node:
    """A GPU, while plans are made."""

    duty_s: float
    loads: tuple[_Load, ...]

    @property
    def work_s(self) -> float:
        return sum(load.demand.batch_s(load.batch_size(self.duty_s)) for load in self.loads)

    @property
    def occupancy(self) -> float:
        return self.work_s / self.duty_s

    def cycle(self) -> Cycle:
        sizes = [load.batch_size(self.duty_s) for load in self.loads]
        batches_s = [load.demand.batch_s(size) for load, size in zip(self.loads, sizes, strict=True)]
        offsets_s = accumulate(batches_s, initial=0.0)
        slots = [
            Slot(load.demand.model, size, offset_s, batch_s, load.rate_per_s)
            for load, size, offset_s, batch_s in zip(self.loads, sizes, offsets_s, batches_s, strict=False)
        ]
        return Cycle(self.duty_s, tuple(slots))


def pack(demands: Sequence[Demand], share: float = 1.0) -> list[Cycle]:
    """The GPUs that this share of the rates needs, as Nexus counts them (its Algorithm 1).

    demands : rates above 0, and batch_max above 0.
    """
    saturated: list[_Node] = []
    residual: list[_Node] = []
    for demand in demands:
        size = demand.batch_max
        whole_s = demand.batch_s(size)
        gpus, rest_per_s = divmod(share * demand.rate_per_s, size / whole_s)
        saturated += [_Node(whole_s, (_Load(demand, size / whole_s),))] * int(gpus)
        if rest_per_s > 0:
            residual.append(_residual(_Load(demand, rest_per_s)))
    return [node.cycle() for node in saturated + _merged(residual)]


def _residual(load: _Load) -> _Node:
    """What is left of a demand, on a GPU of its own: the batch that gathers, and is run, within the SLO.

    Where requests are so few that even one alone would gather for too long, the GPU runs one a cycle, or none. Where
    only batches come together that are too small for the rate, it works as if it were saturated.
    """
    demand, rate_per_s = load.demand, load.rate_per_s
    size = max(1, _size_max(lambda size: demand.batch_s(size) + size / rate_per_s, demand.slo_s))
    duty_s = min(size / rate_per_s, demand.slo_s - demand.batch_s(size))
    if demand.batch_s(size) > duty_s:
        duty_s = demand.batch_s(demand.batch_max)
    return _Node(duty_s, (load,))


def _merged(nodes: Sequence[_Node]) -> list[_Node]:
    """The fullest first, each on the GPU that is then the fullest, where there is one on which it fits."""
    packed: list[_Node] = []
    for node in sorted(nodes, key=lambda node: -node.occupancy):
        found = [(index, both) for index, other in enumerate(packed) if (both := _merge(other, node)) is not None]
        if found:
            index, both = max(found, key=lambda entry: entry[1].occupancy)
            packed[index] = both
        else:
            packed.append(node)
    return packed


def _merge(a: _Node, b: _Node) -> _Node | None:
    """Both on one GPU, in the shorter of the two duty cycles, with the smaller batches of that; None: too much."""
    both = _Node(min(a.duty_s, b.duty_s), a.loads + b.loads)
    return both if both.work_s <= both.duty_s * (1 + ROUNDING) else None


def _size_max(time_s: Callable[[int], float], limit_s: float) -> int:
    """The largest batch for which this is within the limit; 0: none. time_s : non-decreasing."""
    return bisect_right(range(1, BATCH_MAX + 1), limit_s * (1 + ROUNDING), key=time_s)


# ---- for arrivals -----------------------------------------------------------------------------------------------


def peaks_per_s(arrivals: Arrivals, *, period_s: float = PERIOD_S, peak_s: float = PEAK_S) -> NDArray[np.float64]:
    """(periods, models) the highest rate over peak_s seconds in each period. peak_s : a whole part of period_s."""
    per_period = round(period_s / peak_s)
    if per_period < 1 or not math.isclose(per_period * peak_s, period_s):
        raise ConfigError(f"a period of {period_s} s is not a number of peaks of {peak_s} s")
    models = len(arrivals.streams.models)
    place = np.floor_divide(arrivals.times_s, peak_s).astype(np.intp)
    periods = int(place[-1]) // per_period + 1 if place.size else 0
    counts = np.bincount(place * models + arrivals.model, minlength=periods * per_period * models)
    highest: NDArray[np.float64] = counts.reshape(periods, per_period, models).max(axis=1) / peak_s
    return highest


def plans(
    arrivals: Arrivals,
    batch_s: Sequence[Callable[[int], float]],
    gpus: int,
    *,
    period_s: float = PERIOD_S,
    peak_s: float = PEAK_S,
) -> Iterator[Plan]:
    """The plan of each period, for its own peaks: they are foreseen. batch_s : of each model.

    The SLO of a model is the least of its streams'.
    """
    streams = arrivals.streams
    slo_s = np.full(len(streams.models), math.inf)
    np.minimum.at(slo_s, streams.model_of, streams.slo_s)
    models = list(zip(streams.models, batch_s, slo_s.tolist(), strict=True))
    for rates_per_s in peaks_per_s(arrivals, period_s=period_s, peak_s=peak_s).tolist():
        demands = [Demand(name, times, rate, slo) for (name, times, slo), rate in zip(models, rates_per_s, strict=True)]
        yield plan(demands, gpus)
