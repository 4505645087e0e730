"""All events that go into the scheduler (past tense) and all actions that come out (imperative).

Every message is frozen, compares by value and has a JSON form, so a journal of messages can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from bins.dispatch import DispatchPlan, Observed
from llmserve.request import Batch, EngineInfo, Request

FailReason = Literal[
    "queue_full",
    "no_engine",
    "model_not_found",
    "draining",
    "deadline_exceeded",
    "engine_lost",
    "engine_failed",
    "refused",
]
REVISIONS_MAX = 64  # forecasts in one ForecastsRevised, which bounds the work of its step
SHARES_MAX = 256  # shares in one ServedElsewhere, for the same reason
BLOCKS_MAX = 1024  # blocks in one CacheChanged, likewise


# ---- events ---------------------------------------------------------------------------------------------------


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    request: Request


class RequestAdopted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An engine runs a request that an earlier scheduler has started: its process has died, and the answer has not.

    engine  that need not be known yet.  ran_s : seconds since the start
    began   as by AnswerBegan
    """

    request: Request
    engine: EngineInfo
    ran_s: float = 0.0
    began: bool = False


class RequestCancelled(msgspec.Struct, frozen=True, tag=True):
    """The client has gone. A waiting request ends now; a running request ends with its RequestEnded."""

    request_id: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request has left its engine: it was answered, has failed, or was aborted.

    output_tokens  tokens generated per choice, 0 when unknown; a simulation may use fractions
    fault          whether the failure was the engine's fault, not the client's
    retryable      whether the client has received no byte yet, so that the request may run elsewhere after a fault
    refused        whether the engine has declined the request. A refused request is retryable: each other engine is
                   tried before the request fails
    rest_s         how long the engine takes no more requests of the model, while others do; 0: the engine does not say;
                   None: the end says nothing about other requests
    no_socket      whether this server had no socket for the request: `cancelled`, which says nothing about the engine
    lost           whether the engine was judged to have lost the request, which is its fault
    cached_tokens  tokens of the prompt that the engine had in its cache, by its own word; None: it does not say
    tools          names of the tools that a completed answer calls, so that its program comes back with their results
    decode_s       seconds from the first token of a stream to its end; None: not a stream
    """

    engine: str
    request_id: int
    outcome: Literal["completed", "failed", "cancelled"]
    output_tokens: float = 0.0
    fault: bool = False
    retryable: bool = False
    no_socket: bool = False
    refused: bool = False
    rest_s: float | None = None
    lost: bool = False
    cached_tokens: float | None = None
    tools: tuple[str, ...] = ()
    decode_s: float | None = None


class RevisedForecast(msgspec.Struct, frozen=True, omit_defaults=True):
    """A later forecast of a request's answer. predicted_tokens, quantiles : as in Request"""

    request_id: int
    predicted_tokens: float
    quantiles: tuple[float, ...] = ()

    def of(self, request: Request) -> Request:
        """The request with this forecast."""
        return msgspec.structs.replace(request, predicted_tokens=self.predicted_tokens, quantiles=self.quantiles)


class ForecastsRevised(msgspec.Struct, frozen=True, tag=True):
    """Answers have taught the predictor: these requests get new forecasts and are re-queued accordingly.

    Requests keep their arrival times, their deadlines and their ageing. Requests that run, and unknown ids, are
    ignored: such requests started or ended while they were forecast again.

    revisions : at most REVISIONS_MAX, else ValueError.  changes : by request id; gives the request its new forecast
    """

    revisions: tuple[RevisedForecast, ...]

    def __post_init__(self) -> None:
        if len(self.revisions) > REVISIONS_MAX:
            raise ValueError(f"{len(self.revisions)} forecasts are too many for one step: at most {REVISIONS_MAX}")

    @property
    def changes(self) -> dict[int, Callable[[Request], Request]]:
        return {revision.request_id: revision.of for revision in self.revisions}


class AnswerBegan(msgspec.Struct, frozen=True, tag=True):
    """A running request's first byte is on its way to its client: from now on it cannot run anywhere else."""

    request_id: int


class BatchEnded(msgspec.Struct, frozen=True, tag=True):
    """A barrier engine has finished its whole batch. output_tokens : by request id."""

    engine: str
    batch_id: int
    output_tokens: dict[int, float]


class EngineExpected(msgspec.Struct, frozen=True, tag=True):
    """An engine will be ready, and requests wait for it. A new engine may serve any model until it is ready."""

    engine: EngineInfo


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """An engine takes requests from now on, or its description has changed (slots, memory, models, speed)."""

    engine: EngineInfo


class EngineClosed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An engine takes no more requests (drained by its operator, or refusing connections). Running requests go on.

    expected  whether the engine is expected back, so that new requests wait for it
    """

    engine: str
    expected: bool = False


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """An engine and its running requests are gone; no further event reports these requests.

    answered  ids of requests that cannot run again, because their clients have received bytes
    planned   whether the operator restarts the engine
    expected  as in EngineClosed
    """

    engine: str
    answered: tuple[int, ...] = ()
    planned: bool = False
    expected: bool = False


class DrainRequested(msgspec.Struct, frozen=True, tag=True):
    """The server drains: bins wait for no further requests, and later arrivals are refused."""


class TimerFired(msgspec.Struct, frozen=True, tag=True):
    """`wake_at_s` has come."""


class DispatchSolved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The plan that SolveDispatch asked for. Until it comes, the previous plan is followed."""

    plan: DispatchPlan
    model: str = ""


class Tuned(msgspec.Struct, frozen=True, tag=True):
    """Another order from now on: the waiting requests are sorted again, the running requests go on.

    settings : of the order, by name, such as {"order": "shortest", "patience": 40.0}; the others stay as configured
    """

    settings: dict[str, str | int | float]


class ServedElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Service of a model's shares by the servers of other groups, charged to the shares that wait here.

    tokens : weighted (scheduling/fair.py), by share; of at most SHARES_MAX shares, else ValueError
    """

    model: str
    tokens: dict[str, float]

    def __post_init__(self) -> None:
        if len(self.tokens) > SHARES_MAX:
            raise ValueError(f"{len(self.tokens)} shares are too many for one step: at most {SHARES_MAX}")


class CacheChanged(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An engine tells what its prefix cache has stored and dropped. At most BLOCKS_MAX blocks, else ValueError.

    stored, removed  blocks as in `Request.blocks`; of each prompt the beginning first
    cleared          all that the cache had is gone; `stored` came later
    """

    engine: str
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False

    def __post_init__(self) -> None:
        if (count := len(self.stored) + len(self.removed)) > BLOCKS_MAX:
            raise ValueError(f"{count} blocks are too many for one step: at most {BLOCKS_MAX}")


Event = (
    RequestArrived
    | RequestAdopted
    | RequestCancelled
    | RequestEnded
    | AnswerBegan
    | ForecastsRevised
    | BatchEnded
    | EngineExpected
    | EngineReady
    | EngineClosed
    | EngineLost
    | DrainRequested
    | TimerFired
    | DispatchSolved
    | ServedElsewhere
    | Tuned
    | CacheChanged
)

# ---- actions --------------------------------------------------------------------------------------------------


class StartBatch(msgspec.Struct, frozen=True, tag=True):
    """Run these requests on this engine now."""

    engine: str
    batch: Batch


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a running request. It may still end normally; its RequestEnded is awaited in both cases."""

    engine: str
    request_id: int


class PreemptBatch(msgspec.Struct, frozen=True, tag=True):
    """Stop these requests, whose clients have received no byte, for a batch that is worth more.

    As with AbortRequest, each request may still end normally, and its RequestEnded is awaited in both cases. The
    RequestEnded of a stopped request says `cancelled`; the request waits again or fails.  request_ids : of the batch
    `batch_id`.
    """

    engine: str
    batch_id: int
    request_ids: tuple[int, ...]


class FailRequest(msgspec.Struct, frozen=True, tag=True):
    """Refuse or fail a request, which ends. retry_after_s: predicted seconds until a retry would be accepted.

    reason : `refused`: every engine that works has refused it
    """

    request_id: int
    reason: FailReason
    retry_after_s: float | None = None


class ReportCircuit(msgspec.Struct, frozen=True, tag=True):
    """Report that an engine failed too often in a row and gets no requests for a while; or that it works again.

    open_s  seconds without requests; None: the engine works again
    """

    engine: str
    open_s: float | None


class ReportTrust(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Report that predictions no longer rank answers, so that one bin serves; or that they do again.

    rank_correlation  Spearman's, of predicted with real lengths; None when all lengths were equal
    model             model of the answers
    """

    trusted: bool
    rank_correlation: float | None
    model: str = ""


class ReportDue(msgspec.Struct, frozen=True, tag=True):
    """Report that an item of a batch job counts as an online request of its share from now on.

    The latest start has come, or the run was in vain: the engine failed, or the whole batch was preempted.
    """

    request_id: int


class SolveDispatch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Make a plan for this load, which differs from the load of the present plan."""

    observed: Observed
    model: str = ""


Action = (
    StartBatch | AbortRequest | PreemptBatch | FailRequest | ReportCircuit | ReportTrust | ReportDue | SolveDispatch
)
