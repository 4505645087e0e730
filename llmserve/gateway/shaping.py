"""What a request says of how its answer is to be made, beside its texts: how much to think, which tools to call.

The settings go to the learner of lengths as short texts, which it takes for facts and does not understand; the engine
gets them as they came. A number counts by its power of two: budgets of 1,000 and 1,100 tokens are one setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

SETTINGS_MAX = 8
"""Settings that are kept of a request."""
CHARACTERS_MAX = 60

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def settings_of(fields: Mapping[str, Raw]) -> tuple[str, ...]:
    """The settings in these fields of a body, such as `reasoning_effort high` or `thinking budget_tokens 12`.

    An absent field, null, and what is no JSON, tell nothing.
    """
    settings: list[str] = []
    for name, raw in fields.items():
        if raw:
            try:
                value = _ANY.decode(raw)
            except (msgspec.DecodeError, RecursionError):
                continue
            for path, told in _leaves(name, value):
                if len(settings) == SETTINGS_MAX:
                    return tuple(settings)
                settings.append(f"{path} {told}"[:CHARACTERS_MAX])
    return tuple(settings)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _leaves(f"{path} {name}", value[name])
    elif isinstance(value, bool):
        yield path, str(value).lower()
    elif isinstance(value, int | float):
        yield path, str(int(min(abs(value), 2.0**60)).bit_length())
    elif isinstance(value, str):
        yield path, value
