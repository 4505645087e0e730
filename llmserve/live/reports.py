"""What a live cluster says of the scheduler's reports, and to clients whose requests the scheduler fails."""

from __future__ import annotations

import logging
from typing import assert_never

from llmserve.errors import DeadlineExceeded, EngineFailed, RateLimited, RequestError, Unavailable
from llmserve.scheduling.messages import FailReason, ReportCircuit, ReportDue, ReportTrust

log = logging.getLogger("llmserve")


def report(action: ReportCircuit | ReportTrust | ReportDue) -> None:
    """Write a report into the log."""
    if isinstance(action, ReportCircuit):
        _log_circuit(action)
    elif isinstance(action, ReportTrust):
        _log_trust(action)
    elif isinstance(action, ReportDue):
        log.debug("line %d of a job counts as online from now on", action.request_id)
    else:
        assert_never(action)


def _log_circuit(action: ReportCircuit) -> None:
    if action.open_s is None:
        log.info("engine %s works again", action.engine)
    else:
        log.warning(
            "engine %s fails one request after another: it gets no requests for %.1f s", action.engine, action.open_s
        )


def _log_trust(action: ReportTrust) -> None:
    r = "none" if action.rank_correlation is None else f"{action.rank_correlation:.2f}"
    of = f" of {action.model}" if action.model else ""
    if action.trusted:
        log.info("length predictions rank answers%s again (rank correlation %s): bins are back", of, r)
    else:
        log.warning(
            "length predictions do not rank answers%s (rank correlation %s): one bin, first come first served", of, r
        )


def error_of(reason: FailReason, retry_after_s: float | None, *, preempted: bool = False) -> RequestError:
    """The error for a client whose request the scheduler fails. preempted : the request was preempted before."""
    if reason == "queue_full":
        return RateLimited("the queue is full", code="queue_full", retry_after_s=retry_after_s or 1.0)
    if reason == "deadline_exceeded" and preempted:
        return DeadlineExceeded("the request was preempted for other requests and cannot meet its deadline now")
    if reason == "deadline_exceeded":
        return DeadlineExceeded("the answer cannot be complete by its deadline")
    if reason in ("engine_failed", "refused"):
        return EngineFailed("the engine failed this request")
    if reason == "engine_lost":
        return EngineFailed("the engine was lost while it ran this request", code="engine_lost")
    message = "the server is shutting down" if reason == "draining" else "no engine that serves this model is up"
    return Unavailable(message, code=reason, retry_after_s=retry_after_s or 1.0)
