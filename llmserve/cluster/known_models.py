"""Which models are known, and how many engines list each.

A model is known while some engine lists it. A change of one engine's list takes as long as that list, however many
engines and models there are beside it: an engine may list thousands of adapters, and a fleet hundreds of engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmserve.engines.engine import ServedModel

Listed = Mapping[str, ServedModel]
"""What one engine lists, by id."""


class KnownModels:
    """by_id: in the order in which they became known; of several sizes of context the least."""

    def __init__(self) -> None:
        self.by_id: dict[str, ServedModel] = {}
        self._engines: dict[str, dict[int | None, int]] = {}  # by id and size of context: how many list it so

    def engines_of(self, model: str) -> int:
        """Engines that list the model."""
        return sum(self._engines[model].values()) if model in self._engines else 0

    def change(self, before: Listed, after: Listed) -> None:
        """An engine listed the models `before`, and lists the models `after` instead."""
        for id_, model in after.items():
            if before.get(id_) != model:
                self._add(model)
        for id_, model in before.items():
            if after.get(id_) != model:
                self._take_away(model)

    def _add(self, model: ServedModel) -> None:
        engines = self._engines.setdefault(model.id, {})
        engines[model.context_tokens] = engines.get(model.context_tokens, 0) + 1
        self.by_id[model.id] = model if len(engines) == 1 else _least(model.id, engines)

    def _take_away(self, model: ServedModel) -> None:
        engines = self._engines[model.id]
        engines[model.context_tokens] -= 1
        if engines[model.context_tokens]:
            return
        del engines[model.context_tokens]
        if engines:
            self.by_id[model.id] = _least(model.id, engines)
        else:
            del self._engines[model.id], self.by_id[model.id]


def _least(id_: str, contexts_tokens: Iterable[int | None]) -> ServedModel:
    return ServedModel(id_, min([tokens for tokens in contexts_tokens if tokens is not None], default=None))
