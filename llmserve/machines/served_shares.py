"""What shares are served, told between the groups that serve the same model once a second: fair shares of all of them.

Groups exchange served tokens, so that each group's counter of a waiting share covers all groups. A report is at most
one exchange old: until the next one, a share can be ahead by what the other groups serve it in that time. A group that
does not answer gets no report, and its own report comes later, or is lost with the group. Without a controller each
group is fair by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from llmserve.machines.peers import Served


class ServedShares:
    """Collects what groups have served since it was last taken."""

    def __init__(self) -> None:
        self._received: dict[str, Sequence[Served]] = {}

    def received(self, group: str, served: Sequence[Served]) -> None:
        self._received[group] = served

    def take_elsewhere(self) -> dict[str, tuple[Served, ...]]:
        """What each group is told, by group: of each set of models that share engines, the service elsewhere.

        Two sets compete if they have a model in common.
        """
        received, self._received = self._received, {}
        by_model: dict[str, list[tuple[str, Served]]] = {}
        for group, sets in received.items():
            for served in sets:
                for model in served.models:
                    by_model.setdefault(model, []).append((group, served))
        return {
            group: tuple([told for served in sets if (told := _elsewhere(group, served, by_model)).tokens])
            for group, sets in received.items()
        }


def _elsewhere(group: str, own: Served, by_model: Mapping[str, Sequence[tuple[str, Served]]]) -> Served:
    others = {id(served): served for model in own.models for other, served in by_model[model] if other != group}
    tokens: Counter[str] = Counter()
    for served in others.values():
        tokens.update(served.tokens)
    return Served(own.models, dict(tokens))
