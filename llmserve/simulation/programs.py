"""Worlds of programs: sessions of agents and chats, whose next request depends on the end of the one before.

A file has a session a line, as JSON:

    {"session": "s12", "kind": "kind-1", "arrival_s": 8.8, "shared_tokens": 15000, "turns": [
        {"gap_s": 40.2, "steps": [
            {"new_tokens": 9182, "output_tokens": 211, "tool": "edit", "tool_s": 0.1},
            {"new_tokens": 700, "output_tokens": 90}]}]}

All sessions of a kind begin with the same `shared_tokens`. The steps of a turn are requests, with the seconds of a tool
between them; a prompt is all that was before it in the session, and `new_tokens`. `gap_s` passes before each turn but
the first. With `compacted` the session's own context begins anew. `sessions` of a step are sub-agents, of which the
call of its tool consists.

A program is a turn of an agent, from a person's message to the last answer; a chat is one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from llmserve.errors import ConfigError, LLMServeError
from llmserve.request import Request
from llmserve.scheduling.messages import Action, Event, FailRequest, RequestEnded
from llmserve.simulation.files import records
from llmserve.simulation.kv_pool import Text
from llmserve.simulation.workload import Trace
from predictor.records import Malformed

if TYPE_CHECKING:
    from rich.table import Table

AGENTS = "agents"  # the tool that consists of sub-agents
CHAT = "chat"  # the kind of a session of one request by a person, who is not an agent
PERCENTILES = (50, 95, 99)
UNCOUNTED = 0.15  # of the sessions, the first ones: queues have yet to build up

Tokens = Annotated[int, Meta(ge=0)]
Arrive = Callable[[Request, float], None]
Seconds = Annotated[float, Meta(ge=0)]


class StepOf(msgspec.Struct, frozen=True):
    """One request of a turn, and what its answer calls."""

    new_tokens: Tokens
    output_tokens: Annotated[int, Meta(ge=1)]
    tool: str = ""
    tool_s: Seconds = 0.0
    compacted: bool = False
    sessions: tuple[SessionOf, ...] = ()


class TurnOf(msgspec.Struct, frozen=True):
    steps: Annotated[tuple[StepOf, ...], Meta(min_length=1)]
    gap_s: Seconds = 0.0


class SessionOf(msgspec.Struct, frozen=True):
    session: str
    kind: str
    shared_tokens: Tokens
    turns: Annotated[tuple[TurnOf, ...], Meta(min_length=1)]
    arrival_s: Seconds = 0.0


def read_sessions(name: str) -> tuple[SessionOf, ...]:
    """The sessions of a file, plain or compressed, in order of arrival. Raises ConfigError naming the line."""
    sessions = []
    for line, record in records(name, "file of programs"):
        try:
            if isinstance(record, Malformed):
                raise msgspec.ValidationError(record.reason)
            sessions.append(msgspec.convert(record, SessionOf))
        except msgspec.ValidationError as error:
            raise ConfigError(f"the file of programs {name!r}, line {line}: {error}") from error
    if not sessions:
        raise ConfigError(f"the file of programs {name!r} has no sessions")
    return tuple(sorted(sessions, key=lambda session: session.arrival_s))


@dataclass(eq=False, slots=True)
class Asked:
    """A request of a session.

    program, parent, kind, place  as `program`, `parent`, `kind` and `step` of Request
    tools     that its answer calls; (): none, as the turn ends
    sessions  of the sub-agents that its answer calls
    """

    number: int
    step: StepOf
    text: Text
    program: int
    parent: int
    kind: int
    place: int
    tools: tuple[str, ...] = ()
    sessions: list[Course] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Course:
    """A session on its way.

    program      its number, from 1 on
    turns        its requests, by turn
    is_counted   whether the results have it
    parent       the session that waits for this one, whose turn has this one's turns as its parts; None: a person does
    place        (turn, step) of its present request
    began_s      when its turn began
    waits_for    how many sub-agents have not ended
    """

    session: SessionOf
    program: int
    turns: list[list[Asked]]
    parent: Course | None = None
    is_counted: bool = False
    place: tuple[int, int] = (0, 0)
    began_s: float = 0.0
    waits_for: int = 0

    @property
    def asked(self) -> Asked:
        turn, step = self.place
        return self.turns[turn][step]


class World:
    """The requests of all sessions, numbered from 0 in the order of the file. sessions : in order of arrival"""

    def __init__(self, sessions: Sequence[SessionOf]) -> None:
        self.asked: list[Asked] = []
        self._programs = count(1)
        self._kinds: dict[str, int] = {}
        first = UNCOUNTED * len(sessions)
        self.courses = [
            self._course(session, f"{place}", is_counted=place >= first) for place, session in enumerate(sessions)
        ]

    def trace(self) -> Trace:
        """The requests, as if all came at once."""
        outputs = np.array([asked.step.output_tokens for asked in self.asked], dtype=float)
        inputs = np.array([sum([tokens for _, tokens in asked.text]) for asked in self.asked], dtype=float)
        return Trace(np.zeros(len(self.asked)), outputs, inputs, tuple([asked.text for asked in self.asked]))

    def _course(self, session: SessionOf, name: str, *, is_counted: bool, parent: Course | None = None) -> Course:
        """name : of the session's own text, unlike all others"""
        course = Course(session, next(self._programs), [], parent, is_counted)
        kind = self._kinds.setdefault(session.kind, len(self._kinds) + 1)
        own = epoch = 0
        for turn in session.turns:
            course.turns.append([])
            for place_in_turn, step in enumerate(turn.steps, 1):
                if step.compacted:
                    own, epoch = 0, epoch + 1
                own += step.new_tokens
                shared = (("kind", session.kind), session.shared_tokens)
                asked = Asked(
                    len(self.asked),
                    step,
                    (shared, ((name, epoch), own)),
                    course.program,
                    parent.program if parent is not None else 0,
                    kind,
                    place_in_turn,
                    (step.tool or AGENTS,) if place_in_turn < len(turn.steps) else (),
                )
                self.asked.append(asked)
                course.turns[-1].append(asked)
                own += step.output_tokens
                for place, inner in enumerate(step.sessions):
                    name_of = f"{name}.{asked.number}.{place}"
                    asked.sessions.append(self._course(inner, name_of, is_counted=is_counted, parent=course))
        return course


@dataclass(slots=True)
class Outcome:
    """What a run's programs took, of the sessions that count.

    turns_s        of agents: from the arrival of a turn's first request to the end of its last answer
    turn_ends_s    when these turns ended
    turn_first_s   of agents: from the arrival of a turn's first request to its first token
    chats_s, chat_first_s  the same of chats
    prompt_tokens  of all requests; cached_tokens : of these, in an engine's cache
    arrivals_s     of the sessions
    """

    turns_s: list[float] = field(default_factory=list)
    turn_ends_s: list[float] = field(default_factory=list)
    turn_first_s: list[float] = field(default_factory=list)
    chats_s: list[float] = field(default_factory=list)
    chat_first_s: list[float] = field(default_factory=list)
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def turns_per_s(self) -> float | None:
        """Turns of agents that ended while sessions arrived, over that time."""
        span_s = max(self.arrivals_s) - min(self.arrivals_s)
        within = sum([ended_s <= max(self.arrivals_s) for ended_s in self.turn_ends_s])
        return within / span_s if span_s > 0 else None

    @property
    def hit_rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def summary(self) -> dict[str, float | None]:
        """The figures by name; None where there is nothing to count."""
        return {
            "turn_s_mean": _mean(self.turns_s),
            **{f"turn_s_p{percent}": _percentile(self.turns_s, percent) for percent in PERCENTILES},
            "chat_s_mean": _mean(self.chats_s),
            "first_token_s_p99": _percentile(self.chat_first_s, 99),
            "hit_rate": self.hit_rate,
            "turns_per_s": self.turns_per_s,
        }

    def table(self) -> Table:
        from rich.table import Table

        table = Table()
        for column in ("", "mean", *[f"p{percent}" for percent in PERCENTILES]):
            table.add_column(column, justify="right" if column else "left", no_wrap=not column)
        for label, values in (
            (f"turn of an agent (s), {len(self.turns_s):,}", self.turns_s),
            ("its first token (s)", self.turn_first_s),
            (f"chat (s), {len(self.chats_s):,}", self.chats_s),
            ("its first token (s)", self.chat_first_s),
        ):
            parts = (_mean(values), *[_percentile(values, percent) for percent in PERCENTILES])
            table.add_row(label, *["" if part is None else f"{part:,.1f}" for part in parts])
        table.add_section()
        table.add_row("prompt tokens cached", "" if self.hit_rate is None else f"{self.hit_rate:.1%}")
        table.add_row("turns/s", "" if self.turns_per_s is None else f"{self.turns_per_s:.4f}")
        return table


class ProgramLoop:
    """Brings about the requests of a world: it hears the steps of a cluster, and says what arrives when.

    requests : by number.  named : whether they say which program they are a step of
    """

    def __init__(self, world: World, requests: Sequence[Request], *, named: bool = True) -> None:
        self._world = world
        self._requests = [_named(asked, requests[asked.number]) for asked in world.asked] if named else requests
        self._arrive: Arrive = _nowhere
        self._open: dict[int, Course] = {}
        self._arrived_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}  # when the first token came, by request
        self._outcome = Outcome()

    def begin(self, arrive: Arrive) -> None:
        """All sessions are to come. arrive : called with each request and its time, now and from steps"""
        self._arrive = arrive
        for course in self._world.courses:
            if course.is_counted:
                self._outcome.arrivals_s.append(course.session.arrival_s)
            self._begin_turn(course, course.session.arrival_s)

    def note_first_token(self, request_id: int, now_s: float) -> None:
        self._first_s.setdefault(request_id, now_s)

    def __call__(self, now_s: float, event: Event, actions: list[Action]) -> None:
        """A step of the cluster. Raises LLMServeError when a request is refused: its program could not go on."""
        for action in actions:
            if type(action) is FailRequest:
                raise LLMServeError(f"request {action.request_id} of a program was refused: {action.reason}")
        if type(event) is RequestEnded and event.outcome == "completed":
            self._end(self._open.pop(event.request_id), event.cached_tokens or 0.0, now_s)

    def outcome(self) -> Outcome:
        """After the run. Raises LLMServeError when a request has not been answered."""
        if self._open:
            raise LLMServeError(f"{len(self._open)} requests of programs were never answered: the release holds them")
        return self._outcome

    # ---- the course of a session ----

    def _begin_turn(self, course: Course, at_s: float) -> None:
        course.began_s = at_s
        self._ask(course, at_s)

    def _ask(self, course: Course, at_s: float) -> None:
        number = course.asked.number
        self._open[number] = course
        self._arrived_s[number] = at_s
        self._arrive(self._requests[number], at_s)

    def _end(self, course: Course, cached_tokens: float, now_s: float) -> None:
        asked = course.asked
        if course.is_counted:
            self._count(course, cached_tokens)
        if asked.sessions:
            course.waits_for = len(asked.sessions)
            for inner in asked.sessions:
                self._begin_turn(inner, now_s)
        else:
            self._go_on(course, now_s, asked.step.tool_s)

    def _go_on(self, course: Course, now_s: float, tool_s: float) -> None:
        """The tools of the present request have been called."""
        turn, step = course.place
        if step + 1 < len(course.turns[turn]):
            course.place = turn, step + 1
            self._ask(course, now_s + tool_s)
            return
        if course.is_counted and course.parent is None:
            self._count_turn(course, now_s)
        if turn + 1 < len(course.turns):
            course.place = turn + 1, 0
            self._begin_turn(course, now_s + course.session.turns[turn + 1].gap_s)
        elif (parent := course.parent) is not None:
            parent.waits_for -= 1
            if not parent.waits_for:
                self._go_on(parent, now_s, 0.0)

    # ---- results ----

    def _count(self, course: Course, cached_tokens: float) -> None:
        outcome, number = self._outcome, course.asked.number
        outcome.prompt_tokens += sum([tokens for _, tokens in course.asked.text])
        outcome.cached_tokens += cached_tokens
        if course.parent is None and course.place[1] == 0:
            first_s = outcome.chat_first_s if course.session.kind == CHAT else outcome.turn_first_s
            first_s.append(self._first_s[number] - self._arrived_s[number])

    def _count_turn(self, course: Course, now_s: float) -> None:
        took_s = now_s - course.began_s
        if course.session.kind == CHAT:
            self._outcome.chats_s.append(took_s)
        else:
            self._outcome.turns_s.append(took_s)
            self._outcome.turn_ends_s.append(now_s)


def _named(asked: Asked, request: Request) -> Request:
    return msgspec.structs.replace(
        request, program=asked.program, parent=asked.parent, kind=asked.kind, step=asked.place
    )


def _nowhere(_request: Request, _at_s: float) -> None:
    raise AssertionError("the loop has begun")


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None
