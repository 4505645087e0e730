"""Which engine gave each response that engines keep, and for whom: clients may go on from a response, or ask for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

RESPONSES_MAX = 50_000  # whose engine is remembered
ROWS_AT_ONCE = 1000  # of a state, in a slice


class Origin(NamedTuple):
    """The engine that knows a response. engine : name.  key : name of the key that asked for it"""

    engine: str
    key: str


class Origins:
    """The origins of the last RESPONSES_MAX responses."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Origin] = OrderedDict()  # the oldest first

    def get(self, response_id: str) -> Origin | None:
        """None: the response is not remembered."""
        return self._by_id.get(response_id)

    def note(self, response_id: str, origin: Origin) -> None:
        """Remember a response, as this server names it."""
        self._by_id[response_id] = origin
        if len(self._by_id) > RESPONSES_MAX:
            self._by_id.popitem(last=False)

    def saving(self) -> Generator[None, None, dict[str, Any]]:
        """Make the state in slices (predictor/state.py)."""
        rows = []
        for number, (response_id, origin) in enumerate(list(self._by_id.items())):
            rows.append([response_id, *origin])
            if number % ROWS_AT_ONCE == 0:
                yield
        return {"responses": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `saving` has made. Raises ValueError for a state of something else."""
        rows = state.get("responses")
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise ValueError("the state has no list of responses with their engines and keys")
        self._by_id.update({response_id: Origin(engine, key) for response_id, engine, key in rows[-RESPONSES_MAX:]})


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == len(Origin._fields) + 1 and all(isinstance(part, str) for part in row)
