"""Which models are known, and how many engines list each.

A model is known while some engine lists it. The time to change one engine's list grows with that list only, not with
the other engines and models: an engine may list thousands of adapters, and a fleet may have hundreds of engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmserve.engines.engine import ServedModel

Listed = Mapping[str, ServedModel]
"""The models that one engine lists, by id."""


class KnownModels:
    """The models that engines list.

    by_id : in the order in which models became known; of several context sizes the smallest
    """

    def __init__(self) -> None:
        self.by_id: dict[str, ServedModel] = {}
        self._engines: dict[str, dict[int | None, int]] = {}  # number of engines by model id and context size

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
        engines[model.context_tokens] = engines.get(model.context_tokens, 0) + 1
        self.by_id[model.id] = model if len(engines) == 1 else _smallest(model.id, engines)

    def _remove(self, model: ServedModel) -> None:
        engines = self._engines[model.id]
        engines[model.context_tokens] -= 1
        if engines[model.context_tokens]:
            return
        del engines[model.context_tokens]
        if engines:
            self.by_id[model.id] = _smallest(model.id, engines)
        else:
            del self._engines[model.id], self.by_id[model.id]


def _smallest(id_: str, contexts_tokens: Iterable[int | None]) -> ServedModel:
    return ServedModel(id_, min([tokens for tokens in contexts_tokens if tokens is not None], default=None))
