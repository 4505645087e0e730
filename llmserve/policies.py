"""From a configuration to a scheduler: the one place where policies are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bins.edges import Edges, OnlineEdges, answered_edges, equal_mass_edges
from bins.risk import risk
from llmserve.policy_names import ORDERS, RATE_WAIT_S, TIMEOUT_S, order_of, release_of
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.deadline_queue import DeadlineQueue
from llmserve.scheduling.dispatch import Dispatch
from llmserve.scheduling.lengths import SeenLengths
from llmserve.scheduling.messages import ServingGroup
from llmserve.scheduling.model_queues import ModelQueues, Tally
from llmserve.scheduling.orders import (
    PREEMPTION_FACTOR,
    FixedOrder,
    MomentOrder,
    Order,
    fffs,
)
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.queues import BinQueue, FormedQueue, WindowQueue
from llmserve.scheduling.rates import Arrivals, GroupRates
from llmserve.scheduling.release import Planned, Release
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.trust import WINDOW_MIN, Trust


class Defaults(NamedTuple):
    """Where nothing was chosen."""

    release: str
    order: str
    batch_size: int


# What serves an engine best depends on how it batches (docs/results/performance.md): a batch that runs to its end wants
# equals beside each other; slots that refill one by one want the next request, whoever it was queued with.
BARRIER, REFILL = "engines run batches to their end", "slots refill"
COMPANY = "slots refill, and the release waits for company"
MOMENT = "the order is flex, clockwork or one like them"
DEFAULTS = {
    BARRIER: Defaults("window", "fffs", 8),
    REFILL: Defaults("greedy", "shortest", 1),
    COMPANY: Defaults("greedy", "shortest", 32),
    MOMENT: Defaults("window", "flex", 8),
}
"""By the kind of engine. A barrier engine's release is greedy where bins or their edges are asked for."""
BINS = 8
WINDOW_BATCHES = 32
ORDER_PATTERN = rf"^({'|'.join(ORDERS)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
RELEASE_PATTERN = r"^(window|full|static:[1-9]\d*|timeout|greedy|rate-headroom|deadline|table)$"
SEEN_LEAST = 1024  # answers whose lengths plans are made of
ANSWERS_LEAST = 512  # before edges go by them
PLANNED = ("rate-headroom", "deadline", "table")  # releases that follow plans


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What decides when and where each request runs. `resolved` fills in what depends on the engines."""

    bins: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description=f"length bins (default: {BINS}, or 1 under --release window and --order clockwork)"),
    ] = None
    batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="requests in a full batch. The default for engines whose slots refill is 1 under --release "
            "greedy and timeout, and 32 under those that wait for company (default: 8, or 1 where slots refill)"
        ),
    ] = None
    release: Annotated[
        Annotated[str, Meta(pattern=RELEASE_PATTERN)] | None,
        Meta(
            description="when a bin lets a batch go: window, greedy, timeout, full, static:B, rate-headroom, deadline "
            "or table. Any release goes with any order. window: when an engine is free, neighbours by length among the "
            "first --window that wait, of use where batches run to their end; under flex and clockwork whoever can be "
            "in time. greedy: full, or an engine would idle. timeout: full, or the oldest has waited batch-wait-s. "
            "full, or static:B with batches of B. rate-headroom: BatchMonitor's least batch that keeps up with "
            "arrivals, with head-room and a limit to waiting. deadline: the largest batch within the deadline. table: "
            "least cost, or least energy within a latency target, by the profile and the load of the moment. window "
            "is the default for engines that run batches to their end, if neither bins nor their edges are asked for, "
            "and under flex and clockwork (default: window, or greedy where slots refill)",
            extra={
                "metavar": "NAME",
                "takes": "window, greedy, timeout, full, static:B, rate-headroom, deadline or table",
            },
        ),
    ] = None
    window: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="under --release window: requests, of those that wait in a bin, whose turn comes first, and "
            f"among which a batch is looked for, at least a batch; under fffs none is passed over more often (default: "
            f"{WINDOW_BATCHES} batches)"
        ),
    ] = None
    batch_wait_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="longest wait in a bin under --release timeout. Under rate-headroom and table: longest wait "
            f"for an engine that is free (default: {TIMEOUT_S} under timeout, {RATE_WAIT_S:g} under rate-headroom, "
            "none under table)"
        ),
    ] = None
    rate_headroom: Annotated[
        float, Meta(gt=0, le=1, description="under --release rate-headroom: share of a batch size's throughput to use")
    ] = 0.8
    rate_factor: Annotated[
        float,
        Meta(gt=1, description="under --release table: plan anew when arrivals have changed by more than this factor"),
    ] = 1.25
    order: Annotated[
        Annotated[str, Meta(pattern=ORDER_PATTERN)] | None,
        Meta(
            description="which batch runs next: fffs, shortest, edf, flex, clockwork or one of your own. Of formed "
            "ones: fffs (first formed, first served), shortest (shortest "
            "predicted first, ageing by --patience), edf (earliest deadline first). Of all that wait: flex (the "
            "largest that can be in time, stopping far smaller ones for it: Shepherd), clockwork (the earliest "
            "deadline that can be met). MODULE:FUNCTION names an order of your own: the function takes nothing and "
            "returns it (default: fffs, or shortest where slots refill)",
            extra={"metavar": "NAME", "takes": "fffs, shortest, edf, flex, clockwork or MODULE:FUNCTION"},
        ),
    ] = None
    preemption: Annotated[
        Literal["on", "off", "if-needed"],
        Meta(
            description="under --order flex: whether a batch that engines run to its end, and of which no client has "
            "seen a byte, is stopped for one that is worth more; if-needed: and only if more requests would be late "
            "without (spares engines most preemptions at low load; Shepherd goes by the factor alone)"
        ),
    ] = "on"
    preemption_factor: Annotated[
        float, Meta(gt=1, description="under --order flex: how many times as large that one must be")
    ] = PREEMPTION_FACTOR
    patience: Annotated[
        float,
        Meta(
            ge=0,
            description="under --order shortest: no request is overtaken by one that arrives later than this many "
            "times its predicted service after it",
        ),
    ] = 12.0
    bins_by: Annotated[
        Literal["risk", "median"],
        Meta(description="risk: the expected longest answer of a batch of such requests; median: the predicted length"),
    ] = "risk"
    edges: Annotated[
        tuple[float, ...] | None,
        Meta(description="first interior edges of the bins, output tokens (default: from the predictor's training)"),
    ] = None
    edges_by: Annotated[
        Literal["mass", "answers"],
        Meta(
            description="mass: as many requests in each bin; answers: edges for most throughput, by how long the "
            "answers to such predictions became (where few are very long they get a bin of their own, which fills "
            "slowly)"
        ),
    ] = "mass"
    edges_window: Annotated[int, Meta(ge=1, description="predictions, and answers, that the edges are fitted to")] = (
        4096
    )
    edges_refit_every: Annotated[int, Meta(ge=0, description="arrivals between two fits of the edges; 0: never")] = 256
    trust_window: Annotated[
        int,
        Meta(
            ge=WINDOW_MIN,
            description="answers by which predictions are judged, or 4 x bins (under --release window: 32) x "
            "batch-size when that is more; while they rank answers no better than chance, one bin serves",
        ),
    ] = 256
    queue_requests_max: Annotated[int, Meta(ge=1, description="requests that may wait; one more gets 429")] = 10_000
    retries_max: Annotated[
        int, Meta(ge=0, description="times a request runs again when its engine failed before the first byte")
    ] = 2
    engine_wait_s: Annotated[
        float, Meta(ge=0, description="how long requests wait for an engine when none is up, before 503")
    ] = 30.0
    circuit_faults_max: Annotated[
        int,
        Meta(
            ge=0,
            description="requests in a row that an engine fails by its own fault before it gets none for a while; "
            "0: however many",
        ),
    ] = 5
    circuit_pause_s: Annotated[
        float, Meta(gt=0, description="the first such while; it doubles each time that a request on trial fails")
    ] = 1.0

    def resolved(self, barrier: bool) -> SchedulingConfig:
        """With the defaults that suit barrier engines, or engines whose slots refill, where nothing was chosen."""
        bins = self.bins if self.edges is None or self.bins is not None else len(self.edges) + 1
        asks_for_bins = bins is not None or self.edges_by == "answers"
        late = self.goes_by_times
        waits = self.release not in (None, "greedy", "timeout", "window")
        defaults = DEFAULTS[MOMENT if late else BARRIER if barrier else COMPANY if waits else REFILL]._asdict()
        if asks_for_bins and not late:
            defaults["release"] = "greedy"
        needs_none = self.order == "clockwork" or (not late and (self.release or defaults["release"]) == "window")
        defaults["bins"] = bins or (1 if needs_none else BINS)
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return msgspec.structs.replace(self, **unset) if unset else self

    @property
    def goes_by_times(self) -> bool:
        """Whether the order goes by what batches take on each engine."""
        return self.order is not None and isinstance(order_of(self), MomentOrder)

    @property
    def uses_profiles(self) -> bool:
        """Whether anything goes by what batches take on each engine: the order, or the release's plans."""
        return self.goes_by_times or self.release in PLANNED

    @property
    def has_windows(self) -> bool:
        """Whether batches are looked for among neighbours by length; orders of the moment choose by deadline."""
        return self.release == "window" and not self.goes_by_times

    @property
    def bins_count(self) -> int:
        """Bins that there are; only of a resolved configuration."""
        assert self.bins is not None, "resolve the configuration first"
        return self.bins

    @property
    def full_batch(self) -> int:
        """Requests in a full batch; only of a resolved configuration."""
        assert self.batch_size is not None, "resolve the configuration first"
        return self.batch_size

    def scheduler(
        self,
        scores: Sequence[float] = (),
        lengths: Sequence[float] = (),
        *,
        order: Order | None = None,
        release: Callable[[Arrivals], Release] | None = None,
        plan: tuple[ServingGroup, ...] = (),
        rates: GroupRates | None = None,
    ) -> Scheduler:
        """A fresh scheduler. scores: a sample of what bins go by (tokens) for the first edges.  lengths: one each of
        the same forecasts, as likely as any; () when the scores are lengths.  order, release: instead of the ones that
        are named, the release made for each model, of its arrivals.  plan, rates: of serving groups.

        Only of a resolved configuration. Raises ValueError when `edges` does not fit `bins`, or groups contradict each
        other.
        """
        assert self.order is not None, "resolve the configuration first"
        order = order or order_of(self)
        self.queues(
            "", scores, lengths, order=order, release=release
        )  # what is wrong is said now, not when the first request comes
        return Scheduler(
            new_queues=lambda model, group, tally: self.queues(
                model, scores, lengths, order=order, release=release, group=group, tally=tally
            ),
            order=order,
            dispatch=Dispatch(order, self.full_batch),
            circuit=lambda: Circuit(self.circuit_faults_max, self.circuit_pause_s),
            plan=plan,
            rates=rates,
            queue_requests_max=self.queue_requests_max,
            retries_max=self.retries_max,
            engine_wait_s=self.engine_wait_s,
        )

    def queues(
        self,
        model: str,
        scores: Sequence[float] = (),
        lengths: Sequence[float] = (),
        *,
        order: Order | None = None,
        release: Callable[[Arrivals], Release] | None = None,
        group: str = "",
        tally: Tally | None = None,
    ) -> ModelQueues:
        """Fresh ones of a model. The rest is as `scheduler` has it. Raises ValueError likewise."""
        bins = self.bins_count
        order = order or order_of(self)
        arrivals = Arrivals(bins)
        decides = release(arrivals) if release is not None else release_of(self, arrivals)
        seen = self._seen(decides, scores, lengths)
        return ModelQueues(
            model,
            release=decides,
            planner=Planner(bins, seen, arrivals, rate_factor=self.rate_factor)
            if isinstance(decides, Planned) and seen is not None
            else None,
            formed=FormedQueue(order.key if isinstance(order, FixedOrder) else fffs),
            edges=_edges(self, seen, scores),
            batch_size=self.full_batch,
            trust=Trust(max(self.trust_window, 4 * self._kinds_of_batch * self.full_batch)),
            seen=seen,
            queue=self._queue(order),
            by_risk=self.bins_by == "risk",
            group=group,
            tally=tally,
        )

    @property
    def _kinds_of_batch(self) -> int:
        """Answers come in batches of like lengths, one of which says nothing about ranking those of others."""
        return max(self.bins_count, BINS if self.has_windows else 1)

    @property
    def _edges_by_answers(self) -> bool:
        return self.edges_by == "answers" and self.bins_count > 1 and self.edges_refit_every > 0

    def _seen(self, release: Release, scores: Sequence[float], lengths: Sequence[float]) -> SeenLengths | None:
        """How long answers have been, where anything goes by that."""
        window = max(SEEN_LEAST, 64 * self.bins_count)
        if self._edges_by_answers:
            return SeenLengths(max(window, self.edges_window), scores, lengths)
        return SeenLengths(window, scores, lengths) if release.plans or self.goes_by_times else None

    def _queue(self, order: Order) -> Callable[[int], BinQueue]:
        """What bins are made of."""
        if not isinstance(order, FixedOrder):
            return DeadlineQueue
        if self.release != "window":
            return BinQueue
        window, turn_of = self.window or WINDOW_BATCHES * self.full_batch, order.turn
        return lambda index: WindowQueue(index, window, turn_of)

    def scores(self, forecasts: Iterable[Sequence[float]]) -> tuple[float, ...]:
        """What bins go by, of a sample of forecasts (equally likely lengths each)."""
        if self.bins_by == "risk":
            return tuple(risk(lengths, self.full_batch) for lengths in forecasts)
        return tuple(lengths[len(lengths) // 2] for lengths in forecasts)

    def likely_lengths(self, forecasts: Iterable[Sequence[float]]) -> tuple[float, ...]:
        """A length of each of a sample of forecasts, all levels alike often."""
        return tuple([lengths[index % len(lengths)] for index, lengths in enumerate(forecasts)])


def _edges(config: SchedulingConfig, seen: SeenLengths | None, scores: Sequence[float]) -> OnlineEdges:
    bins, batch_size = config.bins_count, config.full_batch

    def fit(values: NDArray[np.float64]) -> Edges:
        assert seen is not None, "edges by answers see them"
        predicted, tokens = seen.predicted
        if predicted.size < ANSWERS_LEAST:
            return equal_mass_edges(values, bins)
        return answered_edges(predicted, tokens, bins, batch_size)

    return OnlineEdges(
        bins,
        edges=config.edges,
        sample=scores,
        window=config.edges_window,
        refit_every=config.edges_refit_every,
        fit=fit if config._edges_by_answers else None,
    )
