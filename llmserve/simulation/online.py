"""The rows of a file as requests to a learner, which forecasts and learns their answers during a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class RowForecast(Protocol):
    """Equally likely output lengths, tokens, ascending; () when nothing is known. The middle length is the median."""

    @property
    def lengths(self) -> tuple[float, ...]: ...

    @property
    def median(self) -> float | None: ...


class RowLearner(Protocol):
    """Forecasts and learns the answers to the rows of a file, like the learner of a server."""

    def forecast(self, row: Any, /) -> RowForecast: ...

    def revise(self, row: Any, forecast: Any, /) -> RowForecast:
        """The row's forecast by what was learnt since the earlier one."""
        ...

    def observe(self, row: Any, forecast: Any, /) -> None:
        """Learn the length of the row's answer."""
        ...


@dataclass(frozen=True, slots=True)
class OnlineRows:
    """rows : (rows,) of a file, of any type.  learner : makes a learner of these rows that knows nothing yet."""

    rows: NDArray[np.object_]
    learner: Callable[[], RowLearner]

    def at(self, places: NDArray[np.intp]) -> OnlineRows:
        """The rows at these places, in this order; a row may repeat."""
        return OnlineRows(self.rows[places], self.learner)
