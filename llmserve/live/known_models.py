"""Which models are known, and how many engines list each.

A model is known while some engine lists it. The time to change one engine's list grows with that list only, not with
the other engines and models: an engine may list thousands of adapters, and a fleet may have hundreds of engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmserve.engines.engine import ServedModel

Listed = Mapping[str, ServedModel]
"""The models that one engine lists, by id."""


class KnownModels:
    """The models that engines list.

    by_id : in the order in which models became known; of several context sizes the smallest, of other facts the first
    """

    def __init__(self) -> None:
        self.by_id: dict[str, ServedModel] = {}
        self._engines: dict[str, dict[ServedModel, int]] = {}  # number of engines that list a model like this, by id

    def engines_of(self, model: str) -> int:
        """Number of engines that list the model."""
        return sum(self._engines[model].values()) if model in self._engines else 0

    def change(self, before: Listed, after: Listed) -> None:
        """Replace the models `before` of an engine by the models `after`."""
        for id_, model in after.items():
            if before.get(id_) != model:
                self._add(model)
        for id_, model in before.items():
            if after.get(id_) != model:
                self._remove(model)

    def _add(self, model: ServedModel) -> None:
        engines = self._engines.setdefault(model.id, {})
        engines[model] = engines.get(model, 0) + 1
        self.by_id[model.id] = _smallest(engines)

    def _remove(self, model: ServedModel) -> None:
        engines = self._engines[model.id]
        engines[model] -= 1
        if engines[model]:
            return
        del engines[model]
        if engines:
            self.by_id[model.id] = _smallest(engines)
        else:
            del self._engines[model.id], self.by_id[model.id]


def _smallest(models: Collection[ServedModel]) -> ServedModel:
    first = next(iter(models))
    if len(models) == 1:
        return first
    contexts = [model.context_tokens for model in models if model.context_tokens is not None]
    return first.in_context(min(contexts, default=None))
