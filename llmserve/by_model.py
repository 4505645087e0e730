"""Settings that are given for all models or for one: `VALUE` or `model:ID=VALUE`, several of them."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "model:"


def by_model(setting: str, texts: Iterable[str]) -> dict[str, str]:
    """Values by their model's id; "": of every other model.

    setting : what the errors call it. Raises ValueError on a text of neither form, and on two for the same model.
    """
    found: dict[str, str] = {}
    for text in texts:
        model, value = "", text
        if text.startswith(PREFIX):
            model, _, value = text.removeprefix(PREFIX).partition("=")
            if not model or not value:
                raise ValueError(f"{setting}: {text!r} is not `{PREFIX}ID=VALUE`")
        if model in found:
            raise ValueError(f"{setting}: {text!r} stands beside another for the same")
        found[model] = value
    return found
