"""How much may wait, for how long, and how often a request may run again."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """The limits of the scheduler.

    queue_requests_max  requests that may wait; further requests are refused with `queue_full`
    retries_max         how often a request may run again after an engine failed before the first byte
    engine_wait_s       how long a request waits for a working engine before it fails with `no_engine`
    item_stops          fraction of online requests that may stop a running batch item
    """

    queue_requests_max: int = 100_000
    retries_max: int = 2
    engine_wait_s: float = 30.0
    item_stops: float = 0.0
