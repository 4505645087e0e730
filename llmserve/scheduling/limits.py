"""How much may wait, for how long, and how often a request may run again."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """queue_requests_max  requests that may wait; further requests are refused with `queue_full`
    retries_max         how often a request may run again after its engine failed before the first byte
    engine_wait_s       how long a request waits for a working engine before it fails with `no_engine`
    item_stops          share of online requests for which an item of a batch job may be stopped that has begun
    """

    queue_requests_max: int = 100_000
    retries_max: int = 2
    engine_wait_s: float = 30.0
    item_stops: float = 0.0
