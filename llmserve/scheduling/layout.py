"""A plan of serving groups, inverted: which group has a worker, and which group has a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from llmserve.scheduling.messages import ServingGroup

FALLBACK = "fallback"  # the group of all that no group of the plan names; a plan may also name this group

K = TypeVar("K")


class Layout:
    """names : of all groups, the fallback group included.  models : that some group is for

    Raises ValueError when two groups share a name, a worker, a model or a (stream, model) pair.
    """

    def __init__(self, groups: tuple[ServingGroup, ...]) -> None:
        self.groups = groups
        self.names = {group.name for group in groups} | {FALLBACK}
        _inverse("name", [(group.name, group) for group in groups])
        self._of_worker = _inverse("worker", [(worker, group) for group in groups for worker in group.workers])
        self._of_model = _inverse("model", [(model, group) for group in groups for model in group.models])
        self._of_stream = _inverse("stream", [(pair, group) for group in groups for pair in group.streams])
        self.models = {*self._of_model, *(model for _, model in self._of_stream)}

    def group_of_worker(self, worker: str) -> str:
        return self._of_worker.get(worker, FALLBACK)

    def group_of(self, stream: str, model: str) -> str:
        """The name of the group that has the requests of this stream and model."""
        name = self._of_stream.get((stream, model)) if self._of_stream else None
        return name if name is not None else self._of_model.get(model, FALLBACK)


def _inverse(kind: str, pairs: Iterable[tuple[K, ServingGroup]]) -> dict[K, str]:
    inverse: dict[K, str] = {}
    for key, group in pairs:
        if key in inverse:
            raise ValueError(f"{kind} {key!r} is in two groups, {inverse[key]} and {group.name}")
        inverse[key] = group.name
    return inverse
