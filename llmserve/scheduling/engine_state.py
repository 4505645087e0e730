"""An engine as the scheduler sees it: what it runs, and what it could take."""

from __future__ import annotations

from llmserve.request import EngineInfo
from llmserve.scheduling.circuit import Circuit
from llmserve.scheduling.memory import BLOCK_TOKENS, peak_tokens, remaining_tokens
from llmserve.scheduling.queues import Ticket

SURE_SHARE = 0.5  # of the cache: with predictions that fill less of it nothing is looked at closely
LOOK_AGAIN_S = 0.1  # after a request did not fit: time alone may make it fit


class EngineState:
    """running: requests on it, by id.  total_tokens: sum of what these are predicted to hold at their ends."""

    __slots__ = ("_refused", "circuit", "info", "ready", "running", "total_tokens")

    def __init__(self, info: EngineInfo, circuit: Circuit) -> None:
        self.info = info
        self.circuit = circuit
        self.ready = True
        self.running: dict[int, Ticket] = {}
        self.total_tokens = 0
        self._refused: tuple[int, float] | None = None  # a request that does not fit before a time

    # ---- room ----

    @property
    def room(self) -> int:
        """Slots without a request; of a barrier engine all or none. Negative by what waits there to look ahead."""
        if self.info.barrier:
            return 0 if self.running else self.info.slots
        return self.info.slots - len(self.running)

    def takes(self, now_s: float) -> bool:
        """Whether it may be sent anything now, be it only to wait there."""
        if not self.ready or not self.circuit.takes(now_s):
            return False
        return self.room > (0 if self.info.barrier else -self.info.look_ahead)

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


def _need(ticket: Ticket, ran_s: float, seconds_per_token: float) -> tuple[float, float, float]:
    """(held now, choices, steps to go) of one request; see scheduling/memory.py."""
    request, expected = ticket.request, ticket.expected_tokens
    generated = ran_s / seconds_per_token
    held = request.prompt_tokens + request.choices * (generated + BLOCK_TOKENS)
    return held, request.choices, remaining_tokens(request.quantiles, expected, generated)
