"""Follows sources of engines, and has the fleet add and remove what they find."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from llmserve.discovery.source import CannotFind, Source
from llmserve.engines.engine import Engine
from llmserve.engines.kinds import engine_name
from llmserve.live.membership import Looked, Membership
from llmserve.runtime.lasting import lasting

log = logging.getLogger("llmserve")

AGAIN_S, AGAIN_S_MAX = 0.2, 30.0  # after a look that failed; doubled each time
NAMES_SHOWN = 20


class Follower:
    """Follows one source. Engines that a source has told of stay while it tells of none, or does not answer.

    For a source that is wrong must not take away what works, and engines that are gone fail their probes.
    connect : makes the client of an engine by URL
    """

    def __init__(self, text: str, source: Source, membership: Membership, connect: Callable[[str], Engine]) -> None:
        self._text, self._source, self._membership, self._connect = text, source, membership, connect
        self._names: set[str] = set()
        self._failures = 0
        membership.looked[text] = Looked()
        self._task = lasting(f"the search for engines of {text}", self._run)

    async def stop(self) -> None:
        """Follow the source no more. What it has found goes, unless other sources name it."""
        await self.close()
        self._membership.change(self._text, {}, self._names)
        del self._membership.looked[self._text]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._source.close()

    async def _run(self) -> None:
        while True:
            pause_s = AGAIN_S
            try:
                async with aclosing(self._source.found()) as looks:
                    async for urls in looks:
                        self._take(urls)
                        self._failures = 0
            except CannotFind as error:
                self._tell(str(error))
                await self._source.close()
                pause_s = max(error.after_s, min(AGAIN_S * 2**self._failures, AGAIN_S_MAX))
                self._failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _take(self, urls: frozenset[str]) -> None:
        if not urls:
            self._tell("it tells of no ready engine")
            return
        found = {engine_name(url): url for url in sorted(urls)}
        added, removed = found.keys() - self._names, self._names - found.keys()
        again = bool(self._membership.looked[self._text].trouble)
        self._membership.looked[self._text] = Looked(tuple(sorted(found)), seen=True)
        if added or removed or again:
            self._names = set(found)
            self._membership.change(
                self._text, {name: partial(self._connect, found[name]) for name in sorted(added)}, sorted(removed)
            )
            changes = [f"{len(names)} {what}" for names, what in ((added, "new"), (removed, "gone")) if names]
            shown = _shown(sorted(found))
            log.info("%s: %d engines (%s): %s", self._text, len(found), ", ".join(changes) or "as before", shown)

    def _tell(self, trouble: str) -> None:
        looked = self._membership.looked[self._text]
        if trouble != looked.trouble:
            kept = f"; the {len(self._names)} engines found before stay" if self._names else ""
            log.warning("%s: %s%s", self._text, trouble, kept)
            self._membership.looked[self._text] = replace(looked, trouble=trouble)


class Followers:
    """Follows the sources that the settings name.

    make : the source of an entry of the settings, by its text.  connect : see Follower
    """

    def __init__(self, membership: Membership, make: Callable[[str], Source], connect: Callable[[str], Engine]) -> None:
        self._membership, self._make, self._connect = membership, make, connect
        self._followers: dict[str, Follower] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, texts: list[str]) -> None:
        """Follow these sources from now on, and no others."""
        for text in self._followers.keys() - set(texts):
            ending = asyncio.create_task(self._followers.pop(text).stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        for text in texts:
            if text not in self._followers:
                self._followers[text] = Follower(text, self._make(text), self._membership, self._connect)

    async def close(self) -> None:
        await asyncio.gather(*self._ending, *(follower.close() for follower in self._followers.values()))


def _shown(names: list[str]) -> str:
    more = [f"and {len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join([*names[:NAMES_SHOWN], *more])
