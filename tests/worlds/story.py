"""Prints the steps of a journal in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmserve.live.journal import Step
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import (
    AbortRequest,
    Action,
    AnswerBegan,
    BatchEnded,
    CacheChanged,
    DispatchSolved,
    DrainRequested,
    EngineClosed,
    EngineExpected,
    EngineLost,
    EngineReady,
    Event,
    FailRequest,
    ForecastsRevised,
    PreemptBatch,
    ReportCircuit,
    ReportDue,
    ReportTrust,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ServedElsewhere,
    SolveDispatch,
    StartBatch,
    TimerFired,
    Tuned,
)


def story_of(steps: Sequence[Step]) -> str:
    """Return one line for each event and one for each resulting action."""
    lines = []
    for step in steps:
        lines.append(f"{step.now_s:12.6f} s  {_event(step.event)}")
        lines += [f"{' ' * 16}-> {_action(action)}" for action in step.actions]
    return "\n".join(lines)


def _event(event: Event) -> str:
    match event:
        case RequestArrived(request):
            return f"{'item' if request.background else 'request'} {request.id} arrives{_details(request)}"
        case RequestCancelled(request_id):
            return f"the client of request {request_id} leaves"
        case RequestEnded(engine, request_id, _, _, _, _, _, True, rest_s):
            return f"{engine} declines request {request_id}{'' if rest_s is None else f', and rests for {rest_s:g} s'}"
        case RequestEnded(engine, request_id, outcome, tokens, fault, retryable):
            blame = f", by the engine's fault, {'no byte' if retryable else 'some bytes'} sent" if fault else ""
            return f"{engine} ends request {request_id}: {outcome}, {tokens:g} tokens{blame}"
        case AnswerBegan(request_id):
            return f"the client of request {request_id} sees its first byte"
        case ForecastsRevised(revisions):
            lengths = [f"{later.request_id} ({later.predicted_tokens:g} tokens)" for later in revisions]
            return f"forecasts are revised of requests {_list(lengths)}"
        case BatchEnded(engine, batch_id, tokens):
            return f"{engine} has finished batch {batch_id}: requests {_list(tokens)}"
        case EngineExpected(engine):
            return f"{engine.name} is expected{_kind(engine)}"
        case EngineReady(engine):
            return f"{engine.name} is ready{_kind(engine)}"
        case EngineClosed(engine, expected):
            return f"{engine} takes no more requests{' for a while' if expected else ''}"
        case EngineLost(engine, answered, _, expected):
            begun = f", after first bytes of {_list(answered)}" if answered else ""
            return f"{engine} is lost{' for a while' if expected else ''}{begun}"
        case DispatchSolved(plan):
            return f"a dispatch plan arrives, queues {plan.queue_of}"
        case Tuned(settings):
            return f"from now on {_list(f'{name} {value}' for name, value in settings.items())}"
        case ServedElsewhere(model, tokens):
            return (
                f"elsewhere, {model or 'the model'} has served {_list(f'{share} {n:g}' for share, n in tokens.items())}"
            )
        case CacheChanged(engine, stored, removed, cleared):
            dropped = "all" if cleared else _list(removed)
            return f"the cache of {engine} has stored {_list(stored)} and dropped {dropped}"
        case DrainRequested():
            return "the drain begins"
        case TimerFired():
            return "the timer fires"


def _action(action: Action) -> str:
    match action:
        case StartBatch(engine, batch):
            ids = _list([request.id for request in batch.requests])
            return f"{engine} starts requests {ids} of batch {batch.id} ({batch.size} from bin {batch.bin})"
        case AbortRequest(engine, request_id):
            return f"{engine} must abort request {request_id}"
        case PreemptBatch(engine, batch_id, request_ids):
            return f"{engine} must preempt batch {batch_id}, requests {_list(request_ids)}"
        case FailRequest(request_id, reason, _):
            return f"request {request_id} fails: {reason}"
        case ReportCircuit(engine, open_s):
            return f"{engine} works again" if open_s is None else f"{engine} gets no requests for {open_s:g} s"
        case ReportTrust(trusted, _):
            return "predictions are trusted again" if trusted else "predictions are not trusted"
        case ReportDue(request_id):
            return f"item {request_id} counts as online from now on"
        case SolveDispatch(observed):
            return f"a dispatch plan is requested for {sum(observed.rates_per_s):g} requests a second"


def _details(request: Request) -> str:
    details = f" for {request.model}" if request.model else ""
    details += "" if request.predicted_tokens is None else f", {request.predicted_tokens:g} tokens predicted"
    return details if request.deadline_s is None else f"{details}, due at {request.deadline_s:g} s"


def _kind(engine: EngineInfo) -> str:
    kind = "barrier" if engine.barrier else f"refill, look-ahead {engine.look_ahead}"
    memory = f", {engine.tokens_max} tokens" if engine.tokens_max else ""
    models = f", serves {' '.join(engine.models)}" if engine.models else ""
    worker = f", on {engine.worker}" if engine.worker else ""
    return f": {engine.slots} slots, {kind}{memory}{models}{worker}"


def _list(ids: Iterable[object]) -> str:
    return " ".join(str(id_) for id_ in ids)
