"""The groups of a gateway's plan: which group has the requests of a stream and model.

The engines of a gateway are the servers of groups. An engine lists a queue for the scheduler (fleet.py)

    if the plan gives the queue to the engine's group,
    or if it gives the queue to nobody, or to a group whose engine is not ready: then every engine of the model does

so that requests go to their group, and while that is down, to others that serve their model.
"""

from __future__ import annotations

import msgspec


class Homes(msgspec.Struct, frozen=True):
    """of_model, of_stream : names of groups.  The pairs of of_stream are (stream, model)."""

    of_model: dict[str, str] = {}
    of_stream: dict[tuple[str, str], str] = {}

    @property
    def models(self) -> set[str]:
        """Models that some group is for."""
        return {*self.of_model, *(model for _, model in self.of_stream)}

    def of(self, model: str) -> str:
        """The group of a model; "": the plan gives it to none."""
        return self.of_model.get(model, "")

    def apart(self, stream: str, model: str) -> str:
        """The group of a stream that does not go where its model goes; "": it does."""
        group = self.of_stream.get((stream, model), "") if self.of_stream else ""
        return group if group != self.of(model) else ""
