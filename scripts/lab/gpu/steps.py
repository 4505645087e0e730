"""The steps of a campaign: which come first, how long each may take, and what they brought.

All parts share one order: the most valuable step comes first, and each result is on the disk before the next step
begins. So whenever the clock stops, what is there is the best that the time allowed. A later run goes on with the steps
that have no result.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TypeVar

from kit.progress import log
from kit.results import day_and_machine, rounded

T = TypeVar("T")

ENDING_S = 6.0  # kept back for the end of a run
GIVING_WAY_S = 5.0  # that a step may take to end after its processes were killed
SLACK_S = 40.0  # of a step's deadline, beside twice its estimate
FAILED_RANKS = 2.5  # that a step loses when it fails: it is tried again, but after what is worth nearly as much
TRIES = 2  # of a step in one run


@dataclass(frozen=True)
class CampaignStep:
    """Something to measure.

    part     whose results it belongs to
    name     within the part
    value    rank of its worth: steps of a smaller value come first, for all parts
    about_s  seconds that it takes, without the start of its engine
    engine, start_s  which engine it uses, and about how many seconds this engine takes to start; "": no engine
    measure  returns what goes into the JSON
    """

    part: str
    name: str
    value: float
    about_s: float
    measure: Callable[[], Awaitable[Any]]
    engine: str = ""
    start_s: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.part}: {self.name}"

    def takes_s(self, running: str) -> float:
        """About how many seconds, after a step with the engine `running`."""
        return self.about_s + (self.start_s if self.engine != running else 0.0)

    def deadline_s(self, running: str) -> float:
        """When it gives way: a step that takes so long hangs, or measures a machine that is busy with other things."""
        return 2 * self.takes_s(running) + SLACK_S


# ---- results ------------------------------------------------------------------------------------------------------


class BadOutput(Exception):
    """The folder holds results of other settings or of another device."""


class Results:
    """A part's results on one device, in DIR/PART.json.

    setting  the values that the results depend on
    device   what the results were measured on, or "": any
    Raises BadOutput for a file with another setting or device.
    """

    def __init__(self, folder: Path, part: str, setting: Mapping[str, Any], device: str = "") -> None:
        self.path = folder / f"{part}.json"
        self.part = part
        self._content: dict[str, Any] = {
            **{"part": part, "device": device, "setting": dict(setting)},
            **{"runs": [], "steps": {}, "notes": {}, "failed": {}},
        }
        if self.path.exists():
            self._content = self._earlier(self.path, setting, device)

    @staticmethod
    def _earlier(path: Path, setting: Mapping[str, Any], device: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["setting"] != json.loads(json.dumps(setting)):
            raise BadOutput(f"{path} is of other settings ({content['setting']}): give another --output")
        if device and content["device"] != device:
            raise BadOutput(f"{path} is of another device ({content['device']}): give another --output")
        return content

    @classmethod
    def read(cls, folder: Path, part: str) -> Results:
        """The results in the folder; a part without a file has no results."""
        path = folder / f"{part}.json"
        setting = json.loads(path.read_text(encoding="utf-8"))["setting"] if path.exists() else {}
        return cls(folder, part, setting)

    @property
    def device(self) -> str:
        return str(self._content["device"])

    @property
    def runs(self) -> list[dict[str, Any]]:
        """When, by which command, with which energy counter, and what else used the device."""
        return list(self._content["runs"])

    @property
    def steps(self) -> dict[str, Any]:
        """Results by the step's name."""
        return dict(self._content["steps"])

    @property
    def notes(self) -> dict[str, list[str]]:
        """What was not as it should be while a step was measured, by the step's name."""
        return dict(self._content["notes"])

    @property
    def failed(self) -> dict[str, str]:
        """The last line of the error, by the step's name."""
        return dict(self._content["failed"])

    def go_on_from(self, folder: Path) -> None:
        """Take over the results of an earlier run, if these are none yet. Raises BadOutput, see the class."""
        path = folder / self.path.name
        if path.exists() and not self._content["steps"]:
            self._content = self._earlier(path, self._content["setting"], self.device)
            self._write()

    def begin(self, command: str, **facts: Any) -> None:
        run = {**day_and_machine(), **facts, "command": command}
        if run not in self._content["runs"]:
            self._content["runs"].append(run)

    def put(self, step: str, value: Any, notes: Sequence[str] = ()) -> None:
        self._content["steps"][step] = rounded(value)
        self._content["failed"].pop(step, None)
        self._content["notes"].pop(step, None)
        if notes:
            self._content["notes"][step] = list(notes)
        self._write()

    def fail(self, step: str, error: BaseException) -> None:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        self._content["failed"][step] = lines[-1][:500]
        self._write()

    def _write(self) -> None:
        """At once and as a whole: a run that is killed leaves the results of before or after, never half of them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self._content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)


# ---- the order ----------------------------------------------------------------------------------------------------


def in_order(steps: Sequence[CampaignStep], results: Mapping[str, Results]) -> list[CampaignStep]:
    """All steps without a result, the most valuable first. What failed has lost some ranks."""

    def rank(step: CampaignStep) -> float:
        return step.value + (FAILED_RANKS if step.name in results[step.part].failed else 0.0)

    return sorted([step for step in steps if step.name not in results[step.part].steps], key=rank)


def planned(steps: Sequence[CampaignStep], seconds: float) -> Iterator[tuple[CampaignStep, float, bool]]:
    """For each step in order: the step, its seconds, and whether it fits into the time by the estimates."""
    left_s, running = seconds - ENDING_S, ""
    for step in steps:
        takes_s = step.takes_s(running)
        fits = takes_s <= left_s
        yield step, takes_s, fits
        if fits:
            left_s, running = left_s - takes_s, step.engine


# ---- time ---------------------------------------------------------------------------------------------------------


class Clock:
    """The time of one run.

    minutes  that the run may take
    pace     seconds of this clock in each real second: a rehearsal's clock runs too fast, a real one does not
    """

    def __init__(self, minutes: float, pace: float = 1.0) -> None:
        self._pace = pace
        self._until_s = monotonic() + 60 * minutes / pace

    @property
    def left_s(self) -> float:
        """Seconds of this clock until the end of the run."""
        return (self._until_s - monotonic()) * self._pace

    def real_s(self, seconds: float) -> float:
        """Real seconds in so many of this clock."""
        return seconds / self._pace


class NotYet(Exception):
    """The step needs the result of another step, which is not there."""


class GaveWay(Exception):
    """A step reached its deadline, and its processes were killed."""


async def within(seconds: float, work: Awaitable[T], kill: Callable[[], None]) -> T:
    """The result of the work. After so many seconds its processes are killed, and GaveWay is raised.

    kill : ends all processes that the work waits for, so that the work's own clean-up does not hang, too
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if done:
            return task.result()
        kill()
        raise GaveWay(f"gave way after {seconds:.1f} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GIVING_WAY_S)


# ---- a run --------------------------------------------------------------------------------------------------------


class Site(Protocol):
    """Where steps run: see machine.py."""

    def kill(self) -> None:
        """End all engines and other processes of the steps, at once."""
        ...

    def taken_notes(self) -> list[str]:
        """What was not as it should be since the last call."""
        ...


async def run_steps(
    steps: Sequence[CampaignStep], results: Mapping[str, Results], clock: Clock, site: Site
) -> list[CampaignStep]:
    """Run all steps without a result, in their order, while there is time.

    A step that fails or hangs does not stop the others, and is tried once more. A step that needs another's result is
    tried again when there is a new result. Returns the steps that did not fit, or whose need was not met.
    """
    running, tries, waiting, left = "", Counter[str](), set[str](), list[CampaignStep]()
    while True:
        order = [step for step in in_order(steps, results) if tries[step.title] < TRIES and step.title not in waiting]
        left = [step for step in order if step.takes_s(running) > clock.left_s - ENDING_S]
        step = next((step for step in order if step not in left), None)
        if step is None:
            break
        began_s, of, takes_s = monotonic(), results[step.part], step.takes_s(running)
        deadline_s = clock.real_s(min(step.deadline_s(running), clock.left_s - ENDING_S))
        try:
            of.put(step.name, await within(deadline_s, step.measure(), site.kill), site.taken_notes())
            running = step.engine
            waiting.clear()
            log(f"{step.title}: {monotonic() - began_s:.1f} s, some {takes_s:.0f} s expected")
        except NotYet as error:
            waiting.add(step.title)
            log(f"{step.title}: not yet: {error}")
        except Exception as error:  # an unknown machine may raise any exception
            if not isinstance(error, GaveWay):
                traceback.print_exc(file=sys.stderr)
            tries[step.title] += 1
            site.kill()
            running = ""
            of.fail(step.name, error)
            notes = "".join(f"; {note}" for note in site.taken_notes())
            log(f"{step.title}: failed after {monotonic() - began_s:.1f} s: {of.failed[step.name]}{notes}")
    return [step for step in in_order(steps, results) if step in left or step.title in waiting]
