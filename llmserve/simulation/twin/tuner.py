"""Tunes a server by its own past: asks the twin now and then, and changes the order when the twin is sure."""

from __future__ import annotations

import logging
from itertools import takewhile

import msgspec

from bins.profile import resolve
from llmserve.errors import ConfigError
from llmserve.live.journal import Header, Journal, Step
from llmserve.request import EngineInfo
from llmserve.scheduling.messages import BatchEnded, Event, RequestEnded, ServingGroup, Tuned
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.policies import SchedulingConfig, Settings
from llmserve.simulation.twin.choice import Choice, Goal, choose
from llmserve.simulation.twin.past import Past
from llmserve.simulation.twin.replay import Twin
from llmserve.simulation.twin.stretch import latest_alike

log = logging.getLogger("llmserve")

EVERY_S = 30.0  # seconds between two questions
WINDOW_S = 900.0  # of the past that may be replayed
ENDED_LEAST = 100  # answers since the last question
STEPS_MAX = 20_000  # of the journal in memory


class Question(msgspec.Struct, frozen=True):
    """What the twin must know.

    scheduling  resolved, as the server began; settings : of the order in force
    engines     ready engines; groups : of the plan in force
    steps       of the last minutes
    """

    goal: Goal
    scheduling: SchedulingConfig
    settings: Settings
    engines: tuple[EngineInfo, ...]
    groups: tuple[ServingGroup, ...]
    steps: tuple[Step, ...]
    profile: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """choice : None when the past cannot be replayed, for the reason `problem`."""

    choice: Choice | None
    problem: str = ""


def answer(question: Question) -> Answer:
    """Replay the steps of the question under all candidates; seconds of work."""
    header = Header(question.scheduling, groups=question.groups)
    past = Past(header, question.engines, question.settings)
    recording = latest_alike(past.read(question.steps).recording())
    try:
        twin = Twin(recording, resolve(question.profile) if question.profile is not None else None)
        return Answer(choose(twin, question.goal, twin.candidates(), left_out=recording.left_out))
    except (ConfigError, ValueError) as error:  # ValueError: an unknown profile
        return Answer(None, str(error))


class Tuner:
    """Asks about a running scheduler, and turns answers into changes. Both drivers use it, live and simulated.

    goal       what is to be small, see llmserve/simulation/twin/choice.py
    journal    of the scheduler; its steps in memory are the past
    profile    name or file of the engines' profile, for the goal `energy`

    settings   of the order in force; {} while it is as configured
    choice     the last one; None before the first
    replays    number of answers, and changes of settings, so far
    """

    def __init__(self, goal: Goal, journal: Journal, scheduler: Scheduler, profile: str | None = None) -> None:
        self.settings: Settings = {}
        self.choice: Choice | None = None
        self.replays = self.changes = 0
        self._goal = goal
        self._journal = journal
        self._scheduler = scheduler
        self._profile = profile
        self._asked_at_s = 0.0
        self._problem = ""

    def question(self, now_s: float) -> Question | None:
        """The question of the moment; None while too few requests have ended since the last one."""
        since_s = max(0.0, now_s - WINDOW_S)
        steps = tuple(takewhile(lambda step: step.now_s >= since_s, reversed(self._journal.steps)))[::-1]
        recent = reversed(steps)
        ended = sum([_ended(step.event) for step in takewhile(lambda step: step.now_s > self._asked_at_s, recent)])
        if ended < ENDED_LEAST:
            return None
        self._asked_at_s = now_s
        return Question(
            self._goal,
            self._journal.header.scheduling,
            self.settings,
            tuple([engine.info for engine in self._scheduler.engines.values() if engine.ready]),
            self._scheduler.plan,
            steps,
            self._profile,
        )

    def take(self, answer: Answer) -> Tuned | None:
        """Take an answer. Returns the event for the scheduler; None: the settings stay."""
        choice = answer.choice
        if choice is None:
            if answer.problem != self._problem:
                log.warning("the order stays, for the last minutes cannot be replayed: %s", answer.problem)
            self._problem = answer.problem
            return None
        self._problem = ""
        self.choice = choice
        self.replays += 1
        if not choice.changes:
            return None
        self.changes += 1
        log.info("%s", explained(choice))
        self.settings = choice.rows[choice.take].settings
        return Tuned(self.settings)


def explained(choice: Choice) -> str:
    """A change of the order in a line."""
    old, new = choice.rows[choice.present], choice.rows[choice.take]
    what = {"deadlines": "late", "energy": "energy"}.get(choice.goal, choice.goal)
    undone = "" if old.allowed else f" (p99 had come to {old.p99:.2f})"
    return (
        f"order {old.name} -> {new.name}: {what} {old.goal:.2f} -> {new.goal:.2f} at p99 {new.p99:.2f} of first come "
        f"first served{undone}, replayed {choice.requests:,} requests"
    )


def _ended(event: Event) -> int:
    if isinstance(event, BatchEnded):
        return len(event.output_tokens)
    return int(isinstance(event, RequestEnded) and event.outcome == "completed")
