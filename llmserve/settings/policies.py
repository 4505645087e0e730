"""The section [scheduling], and the scheduler that the section describes.

Only this module and policy_names.py know the policies by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bins.edges import Edges, OnlineEdges, answered_edges, equal_mass_edges
from bins.risk import risk
from llmserve.scheduling.choice.dispatch import Dispatch, FixedDispatch
from llmserve.scheduling.choice.orders import PREEMPTION_FACTOR, FixedOrder, Order
from llmserve.scheduling.choice.preemption import MomentDispatch
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.lengths import Learned, SeenLengths
from llmserve.scheduling.limits import Limits
from llmserve.scheduling.planner import Planner
from llmserve.scheduling.programs.programs import NOTHING_LEARNT, LearntPrograms, Programs
from llmserve.scheduling.queues.binning import Binning
from llmserve.scheduling.queues.deadline_queue import DeadlineQueue
from llmserve.scheduling.queues.model_queues import ModelQueues, Tally
from llmserve.scheduling.queues.waiting import BinQueue
from llmserve.scheduling.queues.window_queue import WindowQueue
from llmserve.scheduling.rates import Arrivals, ServiceTime
from llmserve.scheduling.release import Planned, Plans, Release
from llmserve.scheduling.scheduler import Scheduler
from llmserve.scheduling.trust import WINDOW_MIN, Trust
from llmserve.settings.policy_names import (
    ORDER_SETTINGS,
    ORDERS,
    PATIENCE,
    RATE_WAIT_S,
    TIMEOUT_S,
    OrderSettings,
    ReleaseSettings,
    named_order,
    named_release,
)


class Defaults(NamedTuple):
    """Default settings."""

    release: str
    order: str
    batch_size: int


# The best defaults depend on how an engine batches (docs/results/performance.md). In a batch that runs to its end, the
# requests should have similar lengths. A slot that refills should take the next request at once, from any bin.
BARRIER, REFILL = "engines run batches to their end", "slots refill"
COMPANY = "slots refill, and the release waits for further requests"
MOMENT = "the order is flex, clockwork or another MomentOrder"
DEFAULTS = {
    BARRIER: Defaults("window", "fffs", 8),
    REFILL: Defaults("greedy", "boost", 1),
    COMPANY: Defaults("greedy", "boost", 32),
    MOMENT: Defaults("window", "flex", 8),
}
"""Defaults by kind of engine. A barrier engine's release is greedy if bins or edges are set."""


def _by_engines(setting: str) -> str:
    """The default of a setting that depends on the engines, for its description."""
    barrier, refill = (getattr(DEFAULTS[kind], setting) for kind in (BARRIER, REFILL))
    return f"(default: {barrier} where engines run batches to their end, {refill} where slots refill)"


BINS = 8
WINDOW_BATCHES = 32
ORDER_PATTERN = rf"^({'|'.join(ORDERS)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
RELEASE_PATTERN = r"^(window|full|static:[1-9]\d*|timeout|greedy|rate-headroom|deadline|table)$"
SEEN_LEAST = 1024  # least window of answers whose lengths plans use
NOTHING_LEARNED = Learned()
ANSWERS_LEAST = 512  # answers before edges are fitted to answers
PLANNED = ("rate-headroom", "deadline", "table")  # releases that follow plans


RateFactor = Annotated[
    float,
    Meta(gt=1, description="under --release table: replan when arrival rates have changed by more than this factor"),
]
RetriesMax = Annotated[int, Meta(ge=0, description="retries of a request whose engine failed before the first byte")]
LineStops = Annotated[
    float,
    Meta(
        ge=0,
        le=1,
        description="fraction of online requests that may stop a running item of a batch job; the youngest item is "
        "stopped, and runs again later. 1: items take every free slot; 0: items run to their end, and leave free the "
        "slots that online requests will want, as far as arrivals tell",
    ),
]


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When and where each request runs. `resolved` fills in the defaults that depend on the engines."""

    bins: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description=f"length bins (default: {BINS}, or 1 under --release window and --order clockwork)"),
    ] = None
    batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="requests in a full batch. Where slots refill and the release waits for a batch, the default "
            f"is {DEFAULTS[COMPANY].batch_size} {_by_engines('batch_size')}"
        ),
    ] = None
    release: Annotated[
        Annotated[str, Meta(pattern=RELEASE_PATTERN)] | None,
        Meta(
            description="when a bin releases a batch: window, greedy, timeout, full, static:B, rate-headroom, "
            "deadline or table. Any release works with any order. window: when an engine is free, requests of "
            "similar length among the first --window waiting requests, except those that would make the others wait "
            "too long; useful where batches run to their end. Under flex and clockwork, the requests that can meet "
            "their deadlines. greedy: a full batch, or any batch for an idle engine. timeout: a full batch, or the "
            "oldest request has waited batch-wait-s. full: full batches; static:B: batches of B. rate-headroom: "
            "BatchMonitor's smallest batch that keeps up with arrivals, with some headroom and a limit to the wait. "
            "deadline: the largest batch within the deadline. table: least cost, or least energy within a latency "
            "target, from the profile and the current load. With bins or edges, the default is greedy, and under "
            f"flex and clockwork {DEFAULTS[MOMENT].release} {_by_engines('release')}",
            extra={
                "metavar": "NAME",
                "takes": "window, greedy, timeout, full, static:B, rate-headroom, deadline or table",
            },
        ),
    ] = None
    window: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="under --release window: how many of the first requests of a bin a batch is chosen from, at "
            f"least a batch (default: {WINDOW_BATCHES} batches)"
        ),
    ] = None
    batch_wait_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="longest wait in a bin under --release timeout. Under rate-headroom and table: longest wait "
            f"while an engine is free (default: {TIMEOUT_S} under timeout, {RATE_WAIT_S:g} under rate-headroom, "
            "none under table)"
        ),
    ] = None
    rate_headroom: Annotated[
        float, Meta(gt=0, le=1, description="under --release rate-headroom: share of a batch size's throughput to use")
    ] = 0.8
    rate_factor: RateFactor = 1.25
    order: Annotated[
        Annotated[str, Meta(pattern=ORDER_PATTERN)] | None,
        Meta(
            description="which batch runs next: fffs, shortest, boost, edf, flex, clockwork or a custom order. "
            "Orders of formed batches: fffs (first formed, first served), shortest (shortest predicted first, ageing "
            "by --patience), boost (by arrival time minus a boost for short answers, which adapts to the load), edf "
            "(earliest deadline first). Orders of all waiting requests: flex (the largest batch that can meet its "
            "deadlines, which may preempt far smaller batches: Shepherd), clockwork (the earliest deadline that can "
            "be met). MODULE:FUNCTION names a custom order: a function without arguments that returns the order "
            f"{_by_engines('order')}",
            extra={"metavar": "NAME", "takes": "fffs, shortest, boost, edf, flex, clockwork or MODULE:FUNCTION"},
        ),
    ] = None
    preemption: Annotated[
        Literal["on", "off", "if-needed"],
        Meta(
            description="under --order flex: whether a larger batch may preempt a batch that runs to its end and has "
            "not sent a byte; if-needed: only if more requests would otherwise be late (avoids most preemptions at "
            "low load; Shepherd uses the factor alone)"
        ),
    ] = "on"
    preemption_factor: Annotated[
        float,
        Meta(
            gt=1, description="under --order flex: smallest ratio of the two batch sizes at which a batch is preempted"
        ),
    ] = PREEMPTION_FACTOR
    patience: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="under --order shortest, which it selects if no order is set: a request cannot be overtaken by "
            "one that arrives more than this many times its own predicted service time later (default: "
            f"{PATIENCE:g})"
        ),
    ] = None
    bins_by: Annotated[
        Literal["risk", "median"],
        Meta(description="risk: expected longest answer of a batch of equal requests; median: the predicted length"),
    ] = "risk"
    edges: Annotated[
        tuple[float, ...] | None,
        Meta(description="first interior edges of the bins, output tokens (default: from the predictor's training)"),
    ] = None
    edges_by: Annotated[
        Literal["mass", "answers"],
        Meta(
            description="mass: equally many requests in each bin; answers: edges for the highest throughput, from the "
            "predicted and actual lengths of answers (a few very long answers get a separate bin, which fills slowly)"
        ),
    ] = "mass"
    edges_window: Annotated[
        int, Meta(ge=1, description="number of recent predictions and answers to which the edges are fitted")
    ] = 4096
    edges_refit_every: Annotated[
        int, Meta(ge=0, description="arrivals between two fits of the edges; 0: the edges are never fitted again")
    ] = 256
    trust_window: Annotated[
        int,
        Meta(
            ge=WINDOW_MIN,
            description="number of recent answers by which predictions are judged, or 4 x bins (under --release "
            "window: 32) x batch-size if that is larger; while predictions rank answers no better than chance, only "
            "one bin is used",
        ),
    ] = 256
    line_stops: LineStops = 1.0
    queue_requests_max: Annotated[
        int, Meta(ge=1, description="limit of waiting requests; further requests get 429")
    ] = 10_000
    retries_max: RetriesMax = 2
    engine_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long a request waits, while no engine is up, for one that is expected; then it gets 503",
        ),
    ] = 30.0
    circuit_faults_max: Annotated[
        int,
        Meta(
            ge=0,
            description="engine faults in a row after which an engine gets no requests for --circuit-pause-s; "
            "0: no limit",
        ),
    ] = 5
    circuit_pause_s: Annotated[
        float, Meta(gt=0, description="first pause of a failing engine; doubles each time a trial request fails")
    ] = 1.0

    def resolved(self, barrier: bool) -> SchedulingConfig:
        """Fill in the unset settings with the defaults for barrier engines, or for engines whose slots refill."""
        kind = self._kind(barrier)
        defaults: dict[str, str | int | float] = DEFAULTS[kind]._asdict()
        if kind != MOMENT and (self._bins_set is not None or self.edges_by == "answers"):
            defaults["release"] = "greedy"
        if self.patience is not None:
            defaults["order"] = "shortest"
        has_windows = kind != MOMENT and (self.release or defaults["release"]) == "window"
        defaults["bins"] = self._bins_set or (1 if has_windows or self.order == "clockwork" else BINS)
        defaults["patience"] = PATIENCE
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return msgspec.structs.replace(self, **unset) if unset else self

    def _kind(self, barrier: bool) -> str:
        """The kind of engines and policies whose defaults apply."""
        if self.goes_by_times:
            return MOMENT
        if barrier:
            return BARRIER
        return REFILL if self.release in (None, "greedy", "timeout", "window") else COMPANY

    @property
    def _bins_set(self) -> int | None:
        """The number of bins that the settings ask for; None: they do not say."""
        return len(self.edges) + 1 if self.bins is None and self.edges is not None else self.bins

    @property
    def goes_by_times(self) -> bool:
        """Whether the order depends on the duration of batches on each engine."""
        return self.order is not None and self.named_order().by_times

    def named_order(self) -> Order:
        """The order that a resolved configuration names. Raises ConfigError when the order does not exist."""
        assert self.order is not None, "resolve the configuration first"
        settings = OrderSettings(self.patience, self.preemption, self.preemption_factor)
        return named_order(self.order, settings)

    def _named_release(self, arrivals: Arrivals) -> Release:
        """The release that a resolved configuration names, for one model with its arrivals.

        Raises ValueError on settings that have no effect in the release, or that contradict the release.
        """
        assert self.release is not None, "resolve the configuration first"
        if self.release != "window" and self.window is not None:
            raise ValueError(f"window has no effect under release {self.release}, only under window")
        if self.window is not None and self.goes_by_times:
            raise ValueError(f"window has no effect under order {self.order}, which considers all waiting requests")
        if self.window is not None and self.window < self.full_batch:
            raise ValueError(f"window: {self.window} requests are fewer than a batch of {self.full_batch}")
        settings = ReleaseSettings(self.full_batch, self.batch_wait_s, self.rate_headroom)
        return named_release(self.release, settings, arrivals)

    @property
    def uses_profiles(self) -> bool:
        """Whether the order, or the release's plans, depend on the duration of batches on each engine."""
        return self.goes_by_times or self.release in PLANNED

    @property
    def has_windows(self) -> bool:
        """Whether batches are formed of neighbours by length; a MomentOrder forms batches by deadline."""
        return self.release == "window" and not self.goes_by_times

    @property
    def bins_count(self) -> int:
        """Number of bins. Needs a resolved configuration."""
        assert self.bins is not None, "resolve the configuration first"
        return self.bins

    @property
    def full_batch(self) -> int:
        """Requests in a full batch. Needs a resolved configuration."""
        assert self.batch_size is not None, "resolve the configuration first"
        return self.batch_size

    def scheduler(
        self,
        scores: Sequence[float] = (),
        lengths: Sequence[float] = (),
        *,
        order: Order | None = None,
        release: Callable[[Arrivals], Release] | None = None,
        learnt: Mapping[str, Learned] = MappingProxyType({}),
        programs: LearntPrograms = NOTHING_LEARNT,
    ) -> Scheduler:
        """Create a scheduler from a resolved configuration.

        scores          sample of `scores` (tokens), for the first edges
        lengths         one likely length for each of the same forecasts; () when the scores are lengths
        order, release  used instead of the named ones; `release` is called for each model, with its arrivals
        learnt          by model, used instead of scores and lengths where it has some
        programs        what was learnt of programs before the start

        Raises ValueError when `edges` does not fit `bins`.
        """
        assert self.order is not None, "resolve the configuration first"
        dispatch = self._dispatch(order or self.named_order())
        self.queues("", scores, lengths, order=dispatch.order, release=release)  # raises errors before any request
        return Scheduler(
            new_queues=lambda model, tally: self.queues(
                model,
                scores,
                lengths,
                order=dispatch.order,
                release=release,
                tally=tally,
                learnt=learnt.get(model, NOTHING_LEARNED),
            ),
            dispatch=dispatch,
            circuit=lambda: Circuit(self.circuit_faults_max, self.circuit_pause_s),
            limits=Limits(self.queue_requests_max, self.retries_max, self.engine_wait_s, self.line_stops),
            programs=Programs(learnt=programs),
        )

    def _dispatch(self, order: Order) -> Dispatch:
        if isinstance(order, FixedOrder):
            return FixedDispatch(order, self.full_batch, lambda chosen: tuned(self, chosen).named_order())
        return MomentDispatch(order, self.full_batch)

    def queues(
        self,
        model: str,
        scores: Sequence[float] = (),
        lengths: Sequence[float] = (),
        *,
        order: Order | None = None,
        release: Callable[[Arrivals], Release] | None = None,
        tally: Tally | None = None,
        learnt: Learned = NOTHING_LEARNED,
    ) -> ModelQueues:
        """Create the queues of a model. Arguments and errors are those of `scheduler`. learnt : of this model."""
        bins = self.bins_count
        order = order or self.named_order()
        arrivals = Arrivals(bins)
        model_release = release(arrivals) if release is not None else self._named_release(arrivals)
        if learnt.scores:
            scores, lengths = learnt.scores, learnt.lengths
        has_lengths = lengths or not learnt.scores
        lengths_seen = self._lengths_seen(model_release, scores if has_lengths else (), lengths)
        queues = ModelQueues(
            model,
            binning=Binning(
                _edges(self, lengths_seen, scores),
                Trust(max(self.trust_window, 4 * self._kinds_of_batch * self.full_batch)),
                batch_size=self.full_batch,
                by_risk=self.bins_by == "risk",
                seen=lengths_seen,
            ),
            release=model_release,
            order=order,
            plans=Plans(model_release, Planner(bins, lengths_seen, arrivals, rate_factor=self.rate_factor))
            if isinstance(model_release, Planned) and lengths_seen is not None
            else None,
            queue=self._queue(order),
            tally=tally,
        )
        if learnt.service is not None:
            seconds_per_token, tokens_mean, answers = learnt.service
            queues.service = ServiceTime(seconds_per_token=seconds_per_token, tokens_mean=tokens_mean, answers=answers)
        return queues

    @property
    def _kinds_of_batch(self) -> int:
        """Number of kinds of batches by length. One batch of similar lengths cannot show how well predictions rank."""
        return max(self.bins_count, BINS if self.has_windows else 1)

    @property
    def _edges_by_answers(self) -> bool:
        return self.edges_by == "answers" and self.bins_count > 1 and self.edges_refit_every > 0

    def _lengths_seen(self, release: Release, scores: Sequence[float], lengths: Sequence[float]) -> SeenLengths | None:
        """Create the record of answer lengths; None if neither edges, nor release, nor order use it."""
        window = max(SEEN_LEAST, 64 * self.bins_count)
        if self._edges_by_answers:
            return SeenLengths(max(window, self.edges_window), scores, lengths)
        return SeenLengths(window, scores, lengths) if release.plans or self.goes_by_times else None

    def _queue(self, order: Order) -> Callable[[int], BinQueue]:
        """Return the constructor of a bin's queue, by index."""
        if order.by_times:
            return DeadlineQueue
        if self.release != "window":
            return BinQueue
        window, turn_of = self.window or WINDOW_BATCHES * self.full_batch, order.turn
        return lambda index: WindowQueue(index, window, turn_of)

    def scores(self, forecasts: Iterable[Sequence[float]]) -> tuple[float, ...]:
        """Return the score (risk or median, tokens) of each forecast, a list of equally likely lengths."""
        if self.bins_by == "risk":
            return tuple(risk(lengths, self.full_batch) for lengths in forecasts)
        return tuple(lengths[len(lengths) // 2] for lengths in forecasts)

    def likely_lengths(self, forecasts: Iterable[Sequence[float]]) -> tuple[float, ...]:
        """Return one length of each forecast. The quantile levels are used in turn, so that all occur equally often."""
        return tuple([lengths[index % len(lengths)] for index, lengths in enumerate(forecasts)])


Settings = dict[str, str | int | float]
"""Some settings of a SchedulingConfig, by name."""


def order_settings(config: SchedulingConfig) -> Settings:
    """The settings of a resolved configuration that make its order."""
    assert config.order is not None, "resolve the configuration first"
    own = ORDER_SETTINGS.get(config.order, ())
    return {"order": config.order, **{name: getattr(config, name) for name in own}}


def named(settings: Mapping[str, str | float]) -> str:
    """Settings in words: shortest patience 12."""
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in settings.items()}
    return " ".join([text if name == "order" else f"{name} {text}" for name, text in texts.items()])


def tuned(config: SchedulingConfig, settings: Mapping[str, str | float]) -> SchedulingConfig:
    """The configuration with other settings, by name. Raises ValueError on an unknown name or a wrong value."""
    unknown = settings.keys() - set(config.__struct_fields__)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no setting of the scheduling")
    return msgspec.convert(msgspec.structs.asdict(config) | dict(settings), SchedulingConfig)


def _edges(config: SchedulingConfig, lengths_seen: SeenLengths | None, scores: Sequence[float]) -> OnlineEdges:
    bins, batch_size = config.bins_count, config.full_batch

    def fit(values: NDArray[np.float64]) -> Edges:
        assert lengths_seen is not None, "edges by answers need their lengths"
        predicted, tokens = lengths_seen.predicted
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
