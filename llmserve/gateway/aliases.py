"""Other names of models, each with the models that stand behind it: the first whose engine is up.

The body goes to the engine as it came, but for the value of `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from llmserve.errors import BadRequest
from llmserve.request import Call
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

    def resolved(self, call: Call) -> Call:
        """The call for the model behind its name."""
        models = self._aliases.get(call.model)
        if models is None:
            return call
        model = next((model for model in models if self._is_up(model)), models[0])
        return call if model == call.model else with_model(call, model)

    def of(self, models: Iterable[str]) -> dict[str, str]:
        """The first of these models behind each name that is none of them, by name."""
        there = set(models)
        first = {
            name: next((model for model in behind if model in there), "") for name, behind in self._aliases.items()
        }
        return {name: model for name, model in first.items() if model and name not in there}


def of_only_model(call: Call, models: Sequence[str]) -> Call:
    """A call that names no model, for the only model that there is. Raises BadRequest."""
    if len(models) != 1:
        raise BadRequest("`model` is required", param="model", code="missing_required_parameter")
    return replace(call, prompt=replace(call.prompt, model=models[0]))


def with_model(call: Call, model: str) -> Call:
    """The call for another model: the value of `model` is exchanged in its body, and no other byte."""
    if call.content_type:
        of_model = read_form(call.body, call.content_type).place("model")
        assert of_model is not None, "the call has a model"
        place, value = of_model, model.encode()
    else:
        text = readable_numbers(call.body)
        place, value = place_of(_BODY.decode(text).model, text), msgspec.json.encode(model)
    return replace(call.with_value(place, value), prompt=replace(call.prompt, model=model))
