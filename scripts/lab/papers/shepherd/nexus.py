"""Nexus's plan: the batches that each GPU repeats, for known request rates (Shen et al., SOSP 2019).

    R    requests a second of a model          L    the model's SLO, seconds
    l(b) seconds of a batch of b               T    requests a second that a GPU serves in its largest batches
    d    duty cycle, seconds: a GPU runs each of its batches once in a cycle, one after the other

A request that has just missed its batch waits d, and is served in l(b) by the next batch. So if d + l(b) <= L, the plan
serves all evenly arriving requests in time. A GPU with only one model runs its batches back to back: d = l(b), and the
largest batch has 2 l(b) <= L.

Shepherd's comparison (Section 7) makes a new plan every 60 s, for the peak rates of the next 60 s. If the GPUs do not
suffice, the plan is for the largest feasible share of every rate.
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
from papers.shepherd.models import BATCH_MAX
from papers.shepherd.streams import Arrivals

PERIOD_S = 60.0  # from plan to plan
PEAK_S = 1.0  # duration of a peak, assumed: the paper does not give one
ROUNDING = 1e-9  # relative error of sums of times
SHARE_ERROR = 1e-3  # relative error of the share of the rates
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
        """Largest batch of a GPU with only this model; 0: even a single request may be late."""
        return _size_max(lambda size: 2 * self.batch_s(size), self.slo_s)


@dataclass(frozen=True, slots=True)
class Slot:
    """A batch of a duty cycle.

    batch_size  most requests of the batch
    offset_s    start in the cycle, 0 <= offset_s < duty_s
    batch_s     duration
    rate_per_s  planned share of this GPU in the model's request rate
    """

    model: str
    batch_size: int
    offset_s: float
    batch_s: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Cycle:
    """The batches that a GPU repeats. duty_s : seconds; 0 without slots.  slots : ascending by offset"""

    duty_s: float
    slots: tuple[Slot, ...]

    @property
    def occupancy(self) -> float:
        """Planned utilisation of the GPU."""
        return sum(slot.batch_s for slot in self.slots) / self.duty_s if self.slots else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The cycle of each GPU.

    gpus      one cycle each; idle GPUs have no slots
    share     planned share of every rate, in (0, 1]
    unserved  models of which even a single request may be late
    """

    gpus: tuple[Cycle, ...]
    share: float
    unserved: tuple[str, ...] = ()


def plan(demands: Sequence[Demand], gpus: int) -> Plan:
    """Plan for the demanded rates, or for the largest share of the rates that fits on the GPUs, found by bisection.

    Packing is not quite monotone: sometimes a slightly larger share would fit, too.
    Raises ConfigError if a model has two demands, or the models do not fit at any rate.
    """
    if len({demand.model for demand in demands}) < len(demands):
        raise ConfigError("a model has two demands: add them up")
    unserved = tuple(demand.model for demand in demands if not demand.batch_max)
    served = [demand for demand in demands if demand.rate_per_s > 0 and demand.model not in unserved]
    share = _largest_share(lambda share: len(pack(served, share)) <= gpus)
    if share is None:
        raise ConfigError(f"{len(served)} models do not fit on {gpus} GPUs, at any rate")
    cycles = pack(served, share)
    return Plan((*cycles, *[Cycle(0.0, ())] * (gpus - len(cycles))), share, unserved)


def _largest_share(fits: Callable[[float], bool]) -> float | None:
    """Bisect on a logarithmic scale, because the share may be small. None: even SHARE_MIN does not fit."""
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
    """The part of a demand that one GPU serves."""

    demand: Demand
    rate_per_s: float

    def batch_size(self, duty_s: float) -> int:
        """Return the number of requests that come in a duty cycle, at least 1."""
        return max(1, math.ceil(self.rate_per_s * duty_s * (1 - ROUNDING)))


@dataclass(frozen=True, slots=True)
class _Node:
    """A GPU of a plan in the making."""

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
    """Return the cycles of the GPUs that this share of the rates needs (Nexus, Algorithm 1).

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
    """Return a GPU for the rest of a demand: its batch is the largest that gathers and runs within the SLO.

    If requests are so rare that even one request takes too long to come, the GPU runs at most one a cycle. If all such
    batches are too small for the rate, the GPU runs its largest batches back to back.
    """
    demand, rate_per_s = load.demand, load.rate_per_s
    size = max(1, _size_max(lambda size: demand.batch_s(size) + size / rate_per_s, demand.slo_s))
    duty_s = min(size / rate_per_s, demand.slo_s - demand.batch_s(size))
    if demand.batch_s(size) > duty_s:
        duty_s = demand.batch_s(demand.batch_max)
    return _Node(duty_s, (load,))


def _merged(nodes: Sequence[_Node]) -> list[_Node]:
    """Merge nodes, the fullest first, each into the node that is the fullest after the merge."""
    packed: list[_Node] = []
    for node in sorted(nodes, key=lambda node: -node.occupancy):
        merges = [(index, both) for index, other in enumerate(packed) if (both := _merge(other, node)) is not None]
        if merges:
            index, both = max(merges, key=lambda entry: entry[1].occupancy)
            packed[index] = both
        else:
            packed.append(node)
    return packed


def _merge(a: _Node, b: _Node) -> _Node | None:
    """Put both loads on one GPU with the shorter duty cycle and its smaller batches; None: they do not fit."""
    both = _Node(min(a.duty_s, b.duty_s), a.loads + b.loads)
    return both if both.work_s <= both.duty_s * (1 + ROUNDING) else None


def _size_max(time_s: Callable[[int], float], limit_s: float) -> int:
    """Return the largest batch size whose time is within the limit; 0: none. time_s : non-decreasing."""
    return bisect_right(range(1, BATCH_MAX + 1), limit_s * (1 + ROUNDING), key=time_s)


# ---- plans for arrivals -----------------------------------------------------------------------------------------


def peaks_per_s(arrivals: Arrivals) -> NDArray[np.float64]:
    """Return (periods, models) the highest rate of each model over PEAK_S in each period of PERIOD_S."""
    per_period = round(PERIOD_S / PEAK_S)
    models = len(arrivals.streams.models)
    place = np.floor_divide(arrivals.times_s, PEAK_S).astype(np.intp)
    periods = int(place[-1]) // per_period + 1 if place.size else 0
    counts = np.bincount(place * models + arrivals.model, minlength=periods * per_period * models)
    highest: NDArray[np.float64] = counts.reshape(periods, per_period, models).max(axis=1) / PEAK_S
    return highest


def plans(arrivals: Arrivals, batch_s: Sequence[Callable[[int], float]], gpus: int) -> Iterator[Plan]:
    """Yield a plan for each period, with the exact peaks of the period. batch_s : of each model.

    The SLO of a model is the least SLO of its streams.
    """
    streams = arrivals.streams
    slo_s = np.full(len(streams.models), math.inf)
    np.minimum.at(slo_s, streams.model_of, streams.slo_s)
    models = list(zip(streams.models, batch_s, slo_s.tolist(), strict=True))
    for rates_per_s in peaks_per_s(arrivals).tolist():
        demands = [Demand(name, times, rate, slo) for (name, times, slo), rate in zip(models, rates_per_s, strict=True)]
        yield plan(demands, gpus)
