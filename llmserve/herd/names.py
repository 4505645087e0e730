"""Names in what a person wrote: each once."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.errors import ConfigError

Named = str | tuple[str, str]
"""A name of its own, or that of a stream: with its model's."""


def no_duplicates(names: Sequence[Named], what: str) -> None:
    """Raises ConfigError naming the first that comes again. what : they are."""
    if len(set(names)) == len(names):
        return
    seen: set[Named] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {quoted(name)} is there twice")
        seen.add(name)


def quoted(name: Named) -> str:
    return repr(name) if isinstance(name, str) else f"{name[0]!r} of model {name[1]!r}"
