"""The answer: groups of GPUs with their models, as a file that `llmserve plan` or a person writes for the server."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from llmserve.herd.instance import Count, Name, NotNegative, Parts, no_duplicates, read_json, write_json


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """GPUs with a scheduler of their own, each holding all of the group's models.

    streams          (stream, model) pairs served here although another group has the model; `plan` makes none
    workers          the server's names of these GPUs; (): any that serve the models. `plan` names none
    load             GPUs needed for the average load, over gpus; above 1 it cannot be served
    memory_gb        that the models take on each GPU
    burst_tolerance  least of its models'; None: they have no load
    """

    name: Name
    gpus: Count
    models: tuple[Name, ...]
    streams: tuple[tuple[str, str], ...] = ()
    workers: tuple[Name, ...] = ()
    load: NotNegative = 0.0
    memory_gb: NotNegative = 0.0
    burst_tolerance: NotNegative | None = None


class PlannedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model with its streams added up. burst_tolerance : at most that of each of its streams; None: no load."""

    name: str
    group: str
    gpus_needed: float
    streams: int
    burst_tolerance: float | None = None


class PlannedStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stream, in its model's group. burst_tolerance : None: it has no load."""

    name: str
    model: str
    group: str
    gpus_needed: float
    burst_tolerance: float | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Who serves what. A hand-written one needs groups only, with their names, GPUs and models.

    models           each with its group, in the instance's order
    streams          each with its own burst tolerance, where there are at most `planning.STREAMS_TOLD_MAX`; else ()
    burst_tolerance  the least one; None: nothing has any load
    bound            that no plan can exceed; gap : bound / burst_tolerance - 1, 0 when the plan is proven to be optimal
    solve_s          seconds from the instance in memory to the plan
    as_printed       whether groups may have more load than GPUs
    moves            models that were in another group of the previous plan; None: there was none
    """

    groups: tuple[Group, ...]
    models: tuple[PlannedModel, ...] = ()
    streams: tuple[PlannedStream, ...] = ()
    burst_tolerance: float | None = None
    bound: float | None = None
    gap: float = 0.0
    solve_s: float = 0.0
    as_printed: bool = False
    moves: int | None = None
    version: Literal[1] = 1

    def group_of(self, stream: str, model: str) -> str | None:
        """The name of the group that serves them; None: not planned."""
        pairs, models = self._routes
        return pairs.get((stream, model)) or models.get(model)

    @cached_property
    def _routes(self) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
        pairs = {pair: group.name for group in self.groups for pair in group.streams}
        return pairs, {model: group.name for group in self.groups for model in group.models}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """From JSON. Raises ConfigError naming what is wrong in it."""
        where = f"the plan {path}"
        found = read_json(path, cls, PARTS, "plan")
        no_duplicates([group.name for group in found.groups], f"{where}: group")
        no_duplicates([model for group in found.groups for model in group.models], f"{where}: model")
        no_duplicates([pair for group in found.groups for pair in group.streams], f"{where}: stream")
        no_duplicates([worker for group in found.groups for worker in group.workers], f"{where}: worker")
        return found

    def save(self, path: str | Path) -> None:
        """Raises ConfigError when it cannot be written."""
        write_json(path, self, "plan")


PARTS: Parts = {"groups[": Group, "models[": PlannedModel, "streams[": PlannedStream}
