"""Programs: whole turns of agents are admitted by memory, and go by what they still need.

A turn is a person's message, and the requests up to the answer that calls no tool. Where the contexts of all turns do
not fit an engine's KV cache together, first come, first served computes each context again and again, because another
has taken its place meanwhile. So a turn that has begun keeps its tokens over its tool calls, and others wait.

Order. The waiting request of the smallest key goes first:

    K = A + PATIENCE d ln(S / m)

    A  arrival of the turn.  S : expected seconds of a slot that the turn still needs, the present request included
    m  mean S at arrivals.   d : mean wait of the turns that had to wait

A wait of PATIENCE d counts as a factor e of work: age is what saves the long turn, each of whose steps looks short.
A request without a program is a turn of one step, so chats need no class of their own.

Room. The ledger of an engine has the tokens of its requests and of the programs in a tool call, shared prompts once. A
request starts if the ledger stays within ROOM of the cache. If not, tokens are dropped that were kept for long enough
(tools.py); if that is not enough, the request waits, and no larger one passes it: only requests of at most SMALL of the
cache, and programs whose tokens are kept. An engine that runs nothing takes the first in any case. Items of batch jobs
are in the ledger while they run; they start beside what is kept, and are stopped for a request that needs the room.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from llmserve.request import Request
from llmserve.scheduling.engines import EngineState
from llmserve.scheduling.programs.kinds import NOTHING, Kinds, LearntKinds
from llmserve.scheduling.programs.ledger import Holding, Ledger
from llmserve.scheduling.programs.tools import LearntTool, Tools
from llmserve.scheduling.programs.turn import PATIENCE, Pace, Program, Turn
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.work import PromptTime, Work

ROOM = 0.9  # of the cache
SMALL = 0.02
ACTIVE_S = 3600.0  # after a step of a program that was not its first, programs count
SORT_S = 1.0  # between two sorts of the queue by new keys
POOL_S = 20.0  # of a whole cache, before the speed of prompts is known
PROGRAMS_MAX = 1 << 16


class Times(Protocol):
    """What a model's requests take, as ModelQueues."""

    @property
    def prompts(self) -> PromptTime: ...

    def work(self, tokens: float, prompt_tokens: float, /) -> Work: ...


class LearntPrograms(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was learnt of kinds of programs and of tools before the scheduler's start."""

    kinds: LearntKinds = NOTHING
    tools: tuple[LearntTool, ...] = ()


NOTHING_LEARNT = LearntPrograms()


class Programs:
    """All programs of a scheduler.

    tools     how long they take; None: as learnt
    patience  see the module
    room      share of an engine's cache that is filled
    learnt    before the start

    returns   of programs from tool calls: how many came while their tokens were kept, and how many later
    alone     by engine: programs that started there above its room, because nothing else ran
    """

    def __init__(
        self,
        tools: Tools | None = None,
        *,
        patience: float = PATIENCE,
        room: float = ROOM,
        learnt: LearntPrograms = NOTHING_LEARNT,
    ) -> None:
        self.kinds, self.tools = Kinds(learnt.kinds), tools or Tools(learnt.tools)
        self._patience, self._room = patience, room
        self.active_until_s = -math.inf
        self._sort_s = -math.inf
        self._paces: dict[str, Pace] = {}  # by model
        self._programs: OrderedDict[int, Program] = OrderedDict()
        self._ledgers: dict[str, Ledger] = {}  # by engine
        self._lacks: dict[EngineState, float] = {}
        self.returns, self.alone = Counter[str](), Counter[str]()

    @property
    def seen(self) -> bool:
        """Whether requests of programs have come."""
        return self.active_until_s > -math.inf

    def active(self, now_s: float) -> bool:
        """Whether requests of programs come."""
        return now_s < self.active_until_s

    # ---- requests ----

    def arrived(self, queued: QueuedRequest, times: Times, now_s: float) -> bool:
        """A request arrives, and has not been sorted in yet. True when the queue shall be sorted again."""
        request = queued.request
        if request.program and request.step > 1:
            self.active_until_s = now_s + ACTIVE_S
        if not self.active(now_s):
            return False
        pace = self._pace_of(request.model)
        program = self._of(request, now_s) if request.program else None
        is_first = program is None or program.step == 1
        turn = queued.turn = Turn(pace, now_s if program is None else program.from_s, program, is_first=is_first)
        if program is not None:
            turn.further_s = self.further_s(request, program, times)
        pace.arrived(queued.service_s + turn.further_s)
        sorts = now_s >= self._sort_s
        if sorts:
            self._sort_s = now_s + SORT_S
        return sorts

    def item(self, queued: QueuedRequest, now_s: float) -> None:
        """An item of a batch job may start. It teaches nothing about turns."""
        if self.active(now_s):
            queued.turn = Turn(self._pace_of(queued.request.model), now_s, None, is_first=False)

    def _pace_of(self, model: str) -> Pace:
        pace = self._paces.get(model)
        if pace is None:
            pace = self._paces[model] = Pace(self._patience)
        return pace

    def further_s(self, request: Request, program: Program, times: Times) -> float:
        """Expected seconds of a slot for the steps that follow a request."""
        further = self.kinds.further(request.kind, program.step)
        return further.steps * times.work(further.answer, further.growth).seconds

    def _of(self, request: Request, now_s: float) -> Program:
        """The program of a request, whose turn begins or goes on."""
        program = self._programs.get(request.program)
        if program is None:
            program = self._programs[request.program] = Program()
            if len(self._programs) > PROGRAMS_MAX:
                self._programs.popitem(last=False)
        self._programs.move_to_end(request.program)
        program.kind = request.kind
        program.present += 1
        goes_on = program.step > 0 and (bool(program.tools) if request.step == 0 else request.step > 1)
        if goes_on:
            if program.tools:
                self.tools.returned(program.tools, now_s - program.ended_s)
                if (ledger := self._ledgers.get(program.engine)) is not None:
                    self.returns["in_time" if ledger.is_kept(request.program) else "late"] += 1
                program.tools = ()
            program.step = max(program.step + 1, request.step)
        else:
            program.from_s, program.step, program.tools = now_s, max(1, request.step), ()
        return program

    def started(self, queued: QueuedRequest, engine: EngineState, now_s: float) -> None:
        """A request starts on an engine."""
        turn = queued.turn
        if turn is None:
            return
        turn.waited(now_s - queued.arrived_at_s)
        if not self.counts(engine, queued):
            return
        request, program, name = queued.request, turn.program, engine.info.name
        ledger = self._ledgers.setdefault(name, Ledger())
        turn.holder = -request.id if program is None or program.present > 1 else request.program
        if program is not None:
            if program.engine != name and turn.holder > 0 and (before := self._ledgers.get(program.engine)) is not None:
                before.drop(turn.holder)
            program.engine = name
        ledger.run(turn.holder, request.blocks, *queued.held())
        if (
            program is not None
            and len(ledger) == 1
            and ledger.tokens > self._room * (engine.info.tokens_max or math.inf)
        ):
            self.alone[name] += 1

    def left(self, queued: QueuedRequest, engine: str) -> None:
        """A run has ended for nothing: the request waits again, has failed, or its client has gone."""
        turn = queued.turn
        if turn is not None and turn.holder:
            self._ledgers[engine].drop(turn.holder)
            turn.holder = 0

    def gone(self, queued: QueuedRequest) -> None:
        """A request is forgotten without an answer, and its turn has ended."""
        if (turn := queued.turn) is None or (program := turn.program) is None:
            return
        program.present -= 1
        program.tools = ()
        if (ledger := self._ledgers.get(program.engine)) is not None and ledger.is_kept(queued.request.program):
            ledger.drop(queued.request.program)

    def answered(
        self,
        queued: QueuedRequest,
        engine: EngineState,
        times: Times,
        output_tokens: float,
        tools: tuple[str, ...],
        now_s: float,
    ) -> None:
        """An answer is complete. tools : that it calls"""
        turn, request = queued.turn, queued.request
        if turn is None:
            return
        program, ledger = turn.program, self._ledgers.get(engine.info.name) or Ledger()
        if program is None:
            ledger.drop(turn.holder)
            return
        program.present -= 1
        growth = request.prompt_tokens - program.tokens
        self.kinds.stepped(program.kind, growth if program.step > 1 and growth > 0.0 else None, output_tokens)
        program.tokens, program.ended_s, program.tools = request.prompt_tokens + output_tokens, now_s, tools
        if not tools:
            self.kinds.turn_ended(program.kind, program.step)
        if tools and turn.holder > 0:
            pool_s = (engine.info.tokens_max or 0) * times.prompts.proven_s or POOL_S
            keep_s = self.tools.keep_s(tools, pool_s)
            ledger.keep(turn.holder, queued.held(output_tokens)[1], now_s, now_s + keep_s)
        else:
            ledger.drop(turn.holder)
        if (tokens_max := engine.info.tokens_max) is not None:
            while ledger.tokens > tokens_max and (first := ledger.first_kept()) is not None:
                ledger.drop(first)

    def lost(self, engine: str) -> None:
        """An engine has lost its cache."""
        if engine in self._ledgers:
            self._ledgers[engine].clear()

    def kept(self, engine: str) -> tuple[int, int]:
        """The programs in a tool call for which an engine keeps tokens; and the tokens of its ledger."""
        ledger = self._ledgers.get(engine)
        return (sum([not holding.runs for _, holding in ledger]), ledger.tokens) if ledger is not None else (0, 0)

    def held(self) -> list[tuple[int, Program, Holding]]:
        """The programs for which an engine keeps tokens over a tool call, those whose answers ended first before."""
        held = [
            (holder, self._programs[holder], holding)
            for ledger in self._ledgers.values()
            for holder, holding in ledger
            if not holding.runs and holder in self._programs
        ]
        return sorted(held, key=lambda entry: (entry[2].ended_s, entry[0]))

    def keeps(self, request: Request) -> bool:
        """Whether an engine keeps tokens for the request's program."""
        program = self._programs.get(request.program) if request.program else None
        ledger = self._ledgers.get(program.engine) if program is not None else None
        return ledger is not None and ledger.is_kept(request.program)

    # ---- room ----

    def counts(self, engine: EngineState, queued: QueuedRequest) -> bool:
        """Whether the ledger decides on the request's room in the engine."""
        return queued.turn is not None and engine.info.tokens_max is not None and not engine.info.barrier

    def fits(self, queued: QueuedRequest, engine: EngineState, now_s: float) -> bool:
        """Whether the request has room in the engine beside what the ledger has."""
        tokens_max, ledger = engine.info.tokens_max, self._ledgers.get(engine.info.name)
        if ledger is None or tokens_max is None:
            return True
        is_item = queued.request.background
        if not engine.running and not (is_item and ledger):
            return True
        need = self._need(queued, ledger)
        room = self._room_for(queued, ledger, tokens_max, need)
        if ledger.tokens + need <= room:
            return True
        for holder in ledger.over(now_s):
            if holder != queued.request.program:
                ledger.drop(holder)
                if ledger.tokens + self._need(queued, ledger) <= room:
                    return True
        return not engine.running and not ledger

    def _room_for(self, queued: QueuedRequest, ledger: Ledger, tokens_max: int, need: int) -> float:
        """Up to how many tokens the ledger may be filled with the request."""
        request = queued.request
        fills = not request.background and (need <= SMALL * tokens_max or _is_kept(request, ledger))
        return tokens_max if fills else self._room * tokens_max

    def wait_for_room(self, queued: QueuedRequest, engines: Sequence[EngineState]) -> None:
        """A request waits for room, while items of batch jobs run."""
        for engine in engines:
            tokens_max, ledger = engine.info.tokens_max, self._ledgers.get(engine.info.name)
            if ledger is not None and tokens_max is not None:
                need = self._need(queued, ledger)
                self._lacks[engine] = ledger.tokens + need - self._room_for(queued, ledger, tokens_max, need)

    def take_lacks(self) -> dict[EngineState, float]:
        """Tokens that the request which waited for room last in this step lacks on each engine."""
        lacks, self._lacks = self._lacks, {}
        return lacks

    def passes(self, queued: QueuedRequest, engine: EngineState) -> bool:
        """Whether the request may pass others that wait for room in the engine."""
        ledger = self._ledgers.get(engine.info.name)
        if ledger is None or engine.info.tokens_max is None:
            return True
        return _is_kept(queued.request, ledger) or self._need(queued, ledger) <= SMALL * engine.info.tokens_max

    def next_room_s(self, engine: EngineState, now_s: float) -> float | None:
        """When kept tokens may be dropped for others; None: none are kept."""
        ledger = self._ledgers.get(engine.info.name)
        return ledger.next_over_s(now_s) if ledger is not None else None

    def home(self, queued: QueuedRequest, engines: Sequence[EngineState]) -> Sequence[EngineState]:
        """Of these engines the one that keeps tokens for the request's program; all of them, if none does."""
        program = queued.turn.program if queued.turn is not None else None
        if program is None or (ledger := self._ledgers.get(program.engine)) is None:
            return engines
        if not ledger.is_kept(queued.request.program):
            return engines
        return [engine for engine in engines if engine.info.name == program.engine] or engines

    def _need(self, queued: QueuedRequest, ledger: Ledger) -> int:
        request = queued.request
        block_tokens, more = queued.held()
        return ledger.need(request.program or -request.id, request.blocks, block_tokens, more)


def _is_kept(request: Request, ledger: Ledger) -> bool:
    """Whether tokens are kept for the request's program."""
    return bool(request.program) and ledger.is_kept(request.program)
