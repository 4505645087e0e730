"""Settings with a value for all models or for single models: a list of `VALUE` and `model:ID=VALUE`."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "model:"


def by_model(setting: str, texts: Iterable[str]) -> dict[str, str]:
    """Return the values by model id; "": for every other model.

    setting : name in error messages. Raises ValueError on a text of neither form, and on two values for one model.
    """
    values: dict[str, str] = {}
    for text in texts:
        model, value = "", text
        if text.startswith(PREFIX):
            model, _, value = text.removeprefix(PREFIX).partition("=")
            if not model or not value:
                raise ValueError(f"{setting}: {text!r} is not `{PREFIX}ID=VALUE`")
        if model in values:
            raise ValueError(f"{setting}: {text!r} is a second value for the same model")
        values[model] = value
    return values
