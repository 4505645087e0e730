"""Run llmserve so that engines tell it nothing of themselves: it learns their slots from answers alone.

    python scripts/lab slots.untold serve --engine URL

Whatever an engine shows at /metrics, /props or /slots is not asked for. All else is `llmserve`, in the same process, so
that a benchmark needs no proxy that hides these paths and takes time of its own.
"""

from __future__ import annotations

from llmserve import __main__ as llmserve
from llmserve.engines.dialects import Reader, Told
from llmserve.engines.probing import Gets


async def first(self: Gets, readers: tuple[tuple[str, Reader], ...]) -> Told | None:
    """In the place of Gets.first: no path tells anything."""
    return None


def main() -> int:
    Gets.first = first  # type: ignore[method-assign]
    return llmserve.main()
