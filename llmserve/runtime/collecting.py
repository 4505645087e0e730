"""Python's garbage collector, set for a process whose event loop must not be stalled."""

from __future__ import annotations

import gc

COLLECTED_AFTER = (10_000, 2)  # objects, and collections of new ones: each lasts under a millisecond, and is rare


def spare_what_is_loaded() -> None:
    """Collect now, and never look again at what lives by now. Loaded modules live forever: a full collection that scans
    these objects stalls every stream.
    """
    gc.collect()
    gc.set_threshold(*COLLECTED_AFTER)
    gc.freeze()
