"""All that the scheduler is told (events, past tense) and all that it says (actions, imperative).

Every message is frozen, compares by value and has a JSON form, so a journal of them can be replayed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from bins.dispatch import DispatchPlan, Observed
from llmserve.request import Batch, EngineInfo, Request

FailReason = Literal["queue_full", "no_engine", "draining", "deadline_exceeded", "engine_lost", "engine_failed"]


# ---- events ---------------------------------------------------------------------------------------------------


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    request: Request


class RequestCancelled(msgspec.Struct, frozen=True, tag=True):
    """The client has gone. A queued request ends here; a running one ends when its engine lets go of it."""

    request_id: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """An engine has let go of a request: it answered, failed, or was aborted.

    output_tokens  what it really generated (0 when unknown), a choice; a simulation may use real numbers
    fault          failed by the engine's fault, not by what was asked
    retryable      its client has not seen a byte: after a fault it may run elsewhere
    """

    engine: str
    request_id: int
    outcome: Literal["completed", "failed", "cancelled"]
    output_tokens: float = 0.0
    fault: bool = False
    retryable: bool = False


class AnswerBegan(msgspec.Struct, frozen=True, tag=True):
    """A running request's first byte is on its way to its client: from now on it cannot run anywhere else."""

    request_id: int


class BatchEnded(msgspec.Struct, frozen=True, tag=True):
    """A barrier engine has finished its batch at once; output_tokens by request id."""

    engine: str
    batch_id: int
    output_tokens: dict[int, float]


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """An engine takes requests from now on, or it is known better: its slots or its memory have changed."""

    engine: EngineInfo


class EngineClosed(msgspec.Struct, frozen=True, tag=True):
    """An engine takes no more requests, drained by its operator or refusing connections; those it runs go on."""

    engine: str


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """An engine is gone with all it ran; its body reports nothing more about those requests.

    answered  ids among them whose client has already seen bytes, so that they cannot run again
    planned   its operator restarts it
    """

    engine: str
    answered: tuple[int, ...] = ()
    planned: bool = False


class DrainRequested(msgspec.Struct, frozen=True, tag=True):
    """No more arrivals are wanted: bins let go of what they hold, later arrivals are refused."""


class TimerFired(msgspec.Struct, frozen=True, tag=True):
    """`wake_at_s` has come."""


class DispatchSolved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The plan that SolveDispatch asked for. Until it comes, the one before serves."""

    plan: DispatchPlan
    model: str = ""


class ServingGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Workers and what they serve, with a scheduler of their own (Shepherd, Section 3.2).

    workers  names of workers, or of engines that have a worker for themselves
    models   whose requests it serves
    streams  (stream, model) pairs whose requests it serves although another group has the model
    """

    name: str
    workers: tuple[str, ...]
    models: tuple[str, ...]
    streams: tuple[tuple[str, str], ...] = ()


class PlanChanged(msgspec.Struct, frozen=True, tag=True):
    """Who serves what from now on. What runs goes on where it is; what waits moves to the group that now serves it."""

    groups: tuple[ServingGroup, ...]


Event = (
    RequestArrived
    | RequestCancelled
    | RequestEnded
    | AnswerBegan
    | BatchEnded
    | EngineReady
    | EngineClosed
    | EngineLost
    | DrainRequested
    | TimerFired
    | DispatchSolved
    | PlanChanged
)

# ---- actions --------------------------------------------------------------------------------------------------


class StartBatch(msgspec.Struct, frozen=True, tag=True):
    """Run these requests on this engine now."""

    engine: str
    batch: Batch


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a running request; it may still end normally, and its RequestEnded is awaited either way."""

    engine: str
    request_id: int


class PreemptBatch(msgspec.Struct, frozen=True, tag=True):
    """Stop these requests, whose clients have seen no byte, for a batch that is worth more.

    As with AbortRequest, each may still end normally and its RequestEnded is awaited either way; one that was stopped
    is told of as cancelled, and waits again or fails.  request_ids : of the batch `batch_id`.
    """

    engine: str
    batch_id: int
    request_ids: tuple[int, ...]


class FailRequest(msgspec.Struct, frozen=True, tag=True):
    """Tell the client no. The request is over. retry_after_s: predicted time until a retry would be taken."""

    request_id: int
    reason: FailReason
    retry_after_s: float | None = None


class ReportCircuit(msgspec.Struct, frozen=True, tag=True):
    """Say that an engine failed too often in a row and gets nothing for a while; or that it works again.

    open_s  how long it gets nothing; None: it works again
    """

    engine: str
    open_s: float | None


class ReportTrust(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Say that predictions no longer rank answers, and one bin serves; or that they do again, and bins are back.

    rank_correlation  Spearman's, of predicted with real lengths; None when all lengths were alike
    model             whose answers
    """

    trusted: bool
    rank_correlation: float | None
    model: str = ""


class SolveDispatch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Make a plan for this load, which differs from the one that the present plan was made for."""

    observed: Observed
    model: str = ""


class PlanGroups(msgspec.Struct, frozen=True, tag=True):
    """Group streams and workers anew: arrivals are others than the present groups were planned for.

    rates_per_s : by (stream, model)
    """

    rates_per_s: tuple[tuple[str, str, float], ...]


Action = (
    StartBatch | AbortRequest | PreemptBatch | FailRequest | ReportCircuit | ReportTrust | SolveDispatch | PlanGroups
)
