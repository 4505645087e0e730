"""What a source of engines is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol


class CannotFind(Exception):
    """A source does not tell its engines now. The message is printable.

    after_s  seconds for which the source asks to be left alone
    """

    def __init__(self, message: str, *, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Source(Protocol):
    """Tells where engines are."""

    def found(self) -> AsyncGenerator[frozenset[str], None]:
        """The URLs of all engines: first, and after changes, until it ends. Then the next call goes on from there.

        Raises CannotFind. A source that does not know whether its engines are gone raises, and never tells of none.
        """
        ...

    async def close(self) -> None: ...
