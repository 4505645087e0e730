"""An engine as the scheduler sees it: what it runs, and what it could take."""

from __future__ import annotations

from llmserve.request import EngineInfo, Speed
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.memory import BLOCK_TOKENS, peak_tokens, remaining_tokens
from llmserve.scheduling.queues import FormedBatch, Ticket

SURE_SHARE = 0.5  # of the cache: with predictions that fill less of it nothing is looked at closely
LOOK_AGAIN_S = 0.1  # after a request did not fit: time alone may make it fit
PACE_KEEP = 1.0 - 1.0 / 32.0  # of what was known, at each new answer
PACE_SAME = 1e-6  # differences of rounding, not of speed


class Worker:
    """A GPU and the engines that share it. Barrier engines of one worker run one batch at a time between them.

    reserved  a batch that the one which runs was told to make room for, and its engine
    """

    __slots__ = ("engines", "reserved")

    def __init__(self) -> None:
        self.engines: list[EngineState] = []
        self.reserved: tuple[EngineState, FormedBatch] | None = None

    @property
    def busy(self) -> bool:
        return any(engine.running for engine in self.engines)


class EngineState:
    """running       requests on it, by id
    total_tokens  sum of what these are predicted to hold at their ends
    models        that it serves; empty: whatever is asked for
    pace          seconds that it takes for each second of its speed as it was told
    """

    __slots__ = ("_refused", "circuit", "info", "models", "pace", "ready", "running", "total_tokens", "worker")

    def __init__(self, info: EngineInfo, circuit: Circuit, worker: Worker) -> None:
        self.know(info)
        self.circuit = circuit
        self.worker = worker
        worker.engines.append(self)
        self.ready = True
        self.pace = 1.0
        self.running: dict[int, Ticket] = {}
        self.total_tokens = 0
        self._refused: tuple[int, float] | None = None  # a request that does not fit before a time

    def know(self, info: EngineInfo) -> None:
        """What it is from now on."""
        self.info = info
        self.models = frozenset(info.models)

    # ---- room ----

    @property
    def room(self) -> int:
        """Slots without a request; of a barrier engine all or none. Negative by what waits there to look ahead."""
        if self.info.barrier:
            return 0 if self.worker.busy else self.info.slots
        return self.info.slots - len(self.running)

    def takes(self, now_s: float) -> bool:
        """Whether it may be sent anything now, be it only to wait there."""
        if not self.ready or self.worker.reserved is not None or not self.circuit.takes(now_s):
            return False
        return self.room > (0 if self.info.barrier else -self.info.look_ahead)

    def serves(self, model: str) -> bool:
        return not self.models or model in self.models

    def speed(self, model: str) -> Speed | None:
        """None where it is not known."""
        speeds = self.info.speeds
        return speeds.get(model) or speeds.get("") if speeds else None

    def fits(self, ticket: Ticket, now_s: float, seconds_per_token: float) -> bool:
        """Whether its memory will hold this request beside those that it runs, until each has ended.

        An empty engine takes anything, for no other moment would be better.
        """
        tokens_max = self.info.tokens_max
        if tokens_max is None or self.info.barrier or not self.running:
            return True
        if self.total_tokens + ticket.total_tokens <= SURE_SHARE * tokens_max:
            return True  # all of them at their ends at once, and twice as long as predicted
        if self._refused is not None and self._refused[0] == ticket.request.id and now_s < self._refused[1]:
            return False
        needs = [_need(other, now_s - other.started_at_s, seconds_per_token) for other in self.running.values()]
        if peak_tokens([*needs, _need(ticket, 0.0, seconds_per_token)]) <= tokens_max:
            return True
        self._refused = ticket.request.id, now_s + LOOK_AGAIN_S
        return False

    @property
    def look_again_at_s(self) -> float | None:
        """When what did not fit is worth another look; None: nothing was refused since the last change."""
        return self._refused[1] if self._refused is not None else None

    # ---- in and out ----

    def start(self, ticket: Ticket, now_s: float) -> None:
        ticket.engine = self.info.name
        ticket.started_at_s = now_s
        self.running[ticket.request.id] = ticket
        self.total_tokens += ticket.total_tokens
        self._refused = None
        self.circuit.started(ticket.request.id)

    def let_go(self, ticket: Ticket) -> None:
        del self.running[ticket.request.id]
        self.total_tokens -= ticket.total_tokens
        self._refused = None
        self.circuit.let_go(ticket.request.id)

    def let_all_go(self) -> list[Ticket]:
        tickets = list(self.running.values())
        for ticket in tickets:
            self.let_go(ticket)
        return tickets

    def took(self, model: str, sequences: int, tokens: float, seconds: float) -> None:
        """It has run so many sequences for so long, the longest of them `tokens`: is it as fast as it was told?"""
        speed = self.speed(model)
        if speed is None or not speed.step_s or tokens <= 0:
            return
        told_s = speed.prefill_s + tokens * speed.step_s[min(sequences, len(speed.step_s)) - 1]
        if told_s > 0 and abs(seconds - self.pace * told_s) > PACE_SAME * told_s:
            self.pace = PACE_KEEP * self.pace + (1.0 - PACE_KEEP) * seconds / told_s


def _need(ticket: Ticket, ran_s: float, seconds_per_token: float) -> tuple[float, float, float]:
    """(held now, choices, steps to go) of one request; see scheduling/memory.py."""
    request, expected = ticket.request, ticket.expected_tokens
    generated = ran_s / seconds_per_token
    held = request.prompt_tokens + request.choices * (generated + BLOCK_TOKENS)
    return held, request.choices, remaining_tokens(request.quantiles, expected, generated)
