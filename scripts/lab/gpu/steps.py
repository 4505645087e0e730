"""The steps of a campaign. Each result is written at once; a later run measures the steps without a result."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from bench.progress import log
from bench.results import day_and_machine, rounded, write_json


@dataclass(frozen=True)
class CampaignStep:
    """Something to measure. about_s : seconds that it may take.  measure : returns what goes into the JSON."""

    name: str
    about_s: float
    measure: Callable[[], Awaitable[Any]]


class BadOutput(Exception):
    """The folder holds results of other settings."""


class Results:
    """A part's results, in DIR/PART.json.

    setting  the values that the results depend on
    Raises BadOutput for a file with another setting.
    """

    def __init__(self, folder: Path, part: str, setting: dict[str, Any]) -> None:
        self.path = folder / f"{part}.json"
        self.part = part
        self._content: dict[str, Any] = {"part": part, "setting": setting, "runs": [], "steps": {}, "failed": {}}
        if self.path.exists():
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
            if earlier["setting"] != json.loads(json.dumps(setting)):
                raise BadOutput(f"{self.path} is of other settings ({earlier['setting']}): give another --output")
            self._content = earlier

    @classmethod
    def read(cls, folder: Path, part: str) -> Results:
        """The results in the folder; a part without a file has no results."""
        path = folder / f"{part}.json"
        setting = json.loads(path.read_text(encoding="utf-8"))["setting"] if path.exists() else {}
        return cls(folder, part, setting)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """When, on which device, and by which command."""
        return list(self._content["runs"])

    @property
    def steps(self) -> dict[str, Any]:
        """Results by the step's name."""
        return dict(self._content["steps"])

    @property
    def failed(self) -> dict[str, str]:
        """The last line of the error, by the step's name."""
        return dict(self._content["failed"])

    def begin(self, command: str, device: str) -> None:
        run = {**day_and_machine(), "device": device, "command": command}
        if run not in self._content["runs"]:
            self._content["runs"].append(run)

    def put(self, step: str, value: Any) -> None:
        self._content["steps"][step] = rounded(value)
        self._content["failed"].pop(step, None)
        self._write()

    def fail(self, step: str, error: BaseException) -> None:
        self._content["failed"][step] = f"{type(error).__name__}: {error}".strip().splitlines()[-1][:500]
        self._write()

    def _write(self) -> None:
        write_json(self.path, self._content)


@dataclass
class Clock:
    """Time left for a run."""

    until_s: float

    @classmethod
    def of(cls, minutes: float) -> Clock:
        return cls(monotonic() + 60 * minutes)

    @property
    def left_s(self) -> float:
        return self.until_s - monotonic()


async def run_steps(steps: Sequence[CampaignStep], results: Results, clock: Clock) -> None:
    """Run the steps that have no result, in order, while there is time. A step that fails does not stop the others."""
    missing = [step for step in steps if step.name not in results.steps]
    for number, step in enumerate(missing, start=1):
        title = f"{results.part}, {number} of {len(missing)}: {step.name}"
        if step.about_s > clock.left_s:
            log(f"{title}: left for the next run, it takes some {step.about_s:.0f} s")
            continue
        began_s = monotonic()
        try:
            results.put(step.name, await step.measure())
            log(f"{title}: {monotonic() - began_s:.1f} s")
        except Exception as error:  # an unknown machine may raise any exception
            traceback.print_exc(file=sys.stderr)
            results.fail(step.name, error)
            log(f"{title}: failed")


def left(steps: Sequence[CampaignStep], results: Results) -> Iterator[str]:
    """Names of the steps that have no result."""
    return (step.name for step in steps if step.name not in results.steps)
