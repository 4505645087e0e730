"""Other names of models, each with the models that stand behind it: the first whose engine is up.

The body goes to the engine as it came, but for the value of `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw

from llmserve.errors import BadRequest
from llmserve.request import Wire
from llmserve.wire.form_data import read_form
from llmserve.wire.json_text import readable_numbers
from llmserve.wire.raw_views import place_of


class _Body(msgspec.Struct):
    model: Raw = Raw()


_BODY = msgspec.json.Decoder(_Body)


class Aliases:
    """aliases : models by name, in the order in which they are tried.  is_up : whether an engine serves a model now"""

    def __init__(self, aliases: Mapping[str, tuple[str, ...]], is_up: Callable[[str], bool]) -> None:
        self._aliases, self._is_up = aliases, is_up

    def model_of(self, name: str) -> str:
        """The model behind a name: the first that is up."""
        models = self._aliases.get(name)
        if models is None:
            return name
        return next((model for model in models if self._is_up(model)), models[0])

    def of(self, models: Iterable[str]) -> dict[str, str]:
        """The first of these models behind each name that is none of them, by name."""
        there = set(models)
        first = {
            name: next((model for model in behind if model in there), "") for name, behind in self._aliases.items()
        }
        return {name: model for name, model in first.items() if model and name not in there}


def only_model(models: Sequence[str]) -> str:
    """The model of a call that names none. Raises BadRequest unless there is exactly one."""
    if len(models) != 1:
        raise BadRequest("`model` is required", param="model", code="missing_required_parameter")
    return models[0]


def with_model(wire: Wire, model: str) -> Wire:
    """The same for another model: the value of `model` is exchanged in the body, and no other byte."""
    if wire.content_type:
        of_model = read_form(wire.body, wire.content_type).place("model")
        assert of_model is not None, "the body names a model"
        return wire.with_value(of_model, model.encode())
    text = readable_numbers(wire.body)
    return wire.with_value(place_of(_BODY.decode(text).model, text), msgspec.json.encode(model))
