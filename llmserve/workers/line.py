"""A relay's line to the scheduler process, and to the next one when that has died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from llmserve.errors import RequestError
from llmserve.workers import messages
from llmserve.workers.link import Link

RECONNECT_S = 0.05


class SchedulerLine:
    """Tells the scheduler process what happens, asks it questions, and hears what it decides.

    path     of the scheduler process's socket.  name : of this relay
    hear     called with each message but replies
    on_lost  called when the scheduler process is gone; its successor's first message is a Welcome
    """

    def __init__(self, path: str, name: str, hear: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._path, self._name, self._hear, self._on_lost = path, name, hear, on_lost
        self._link: Link | None = None
        self._last_question = 0
        self._questions: dict[int, asyncio.Future[RequestError | None]] = {}
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a scheduler process."""
        return self._link is not None

    async def keep(self) -> None:
        """Stay connected until `close`."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            lost = asyncio.Event()
            link = Link(messages.ToRelay, self._opened, self._take, partial(_set, lost))
            try:
                await loop.create_unix_connection(partial(_itself, link), self._path)
            except OSError:  # the scheduler process has not started yet
                await asyncio.sleep(RECONNECT_S)
                continue
            await lost.wait()
            self._lost()

    def tell(self, message: Any) -> None:
        """Send a message. While there is no scheduler process it is lost: the next one is told of each call anew."""
        if self._link is not None:
            self._link.tell(message)

    async def ask(self, message: Callable[[int], Any]) -> RequestError | None:
        """Ask a question, and wait for the reply. message : makes the question, by its number

        None is also the reply of a scheduler process that dies.
        """
        if self._link is None:
            return None
        self._last_question = question = self._last_question + 1
        reply: asyncio.Future[RequestError | None] = asyncio.get_running_loop().create_future()
        self._questions[question] = reply
        self._link.tell(message(question))
        return await reply

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.flush()
            self._link.close()

    # ---- the link ----

    def _opened(self, link: Link) -> None:
        self._link = link
        link.tell(messages.Hello(self._name))

    def _take(self, message: Any) -> None:
        if type(message) is messages.Reply:
            self._reply(message)
        else:
            self._hear(message)

    def _reply(self, told: messages.Reply) -> None:
        reply = self._questions.pop(told.question, None)
        if reply is not None and not reply.done():
            reply.set_result(told.error.error if told.error is not None else None)

    def _lost(self) -> None:
        self._link = None
        questions, self._questions = self._questions, {}
        for reply in questions.values():
            if not reply.done():
                reply.set_result(None)
        if not self._closed:
            self._on_lost()


def _set(event: asyncio.Event, link: Link) -> None:
    event.set()


def _itself(link: Link) -> Link:
    return link
