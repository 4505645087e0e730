"""Sends the notices, again and again where the receiver does not take them.

A notice is a POST of the batch, as GET /v1/batches/{id} shows it, with the headers of standardwebhooks.com:

    webhook-id         the batch's: a notice that arrives twice has the same
    webhook-timestamp  unix seconds of this try
    webhook-signature  v1,BASE64: HMAC-SHA256 of `ID.TIMESTAMP.BODY` under the secret; only with a secret
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from llmserve.errors import ConfigError
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError

log = logging.getLogger("llmserve")

PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0)  # before each further try
CONNECT_S, ANSWER_S = 5.0, 15.0
AT_ONCE_MAX = 8  # tries
NOTICES_MAX = 10_000  # that wait; a further one is given up at once
CLOSE_S = 3.0  # for the last tries when the server ends
SECRET_PREFIX = "whsec_"  # of secrets in base64

Outcome = Literal["sent", "given_up"]
Read = Callable[[str, str], Awaitable[bytes | None]]
"""The batch of a key as JSON, by key and id; None: it has not ended, or is gone. May raise."""


@dataclass(frozen=True)
class Receiver:
    """Where notices go. secret : None: they are not signed.  Raises ConfigError for a URL that cannot be one."""

    url: str
    secret: bytes | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not self.url.isascii() or " " in self.url:
            raise ConfigError(f"batch_webhook: {self.url!r} is not a URL such as https://example.com/hook")
        if parts.username is not None:
            raise ConfigError(
                "batch_webhook: the receiver gets no credentials in its URL: give --batch-webhook-key-file"
            )

    @property
    def origin(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def target(self) -> str:
        """The path and the query."""
        parts = urlsplit(self.url)
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def headers(self, notice_id: str, at_s: int, body: bytes) -> dict[str, str]:
        headers = {"webhook-id": notice_id, "webhook-timestamp": str(at_s), "content-type": "application/json"}
        if self.secret is not None:
            headers["webhook-signature"] = signature(self.secret, notice_id, at_s, body)
        return headers


def secret_of(text: str) -> bytes:
    """The bytes of a secret: of base64 behind `whsec_`, else of the text itself. Raises ValueError."""
    if not text.startswith(SECRET_PREFIX):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"what follows {SECRET_PREFIX} is not base64: {error}") from error


def signature(secret: bytes, notice_id: str, at_s: int, body: bytes) -> str:
    digest = hmac.new(secret, b"%b.%d.%b" % (notice_id.encode(), at_s, body), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class Sender:
    """Tells a receiver of batches that have ended. No batch waits for it, and nothing that fails here reaches a batch.

    read   the batch that a notice is about
    count  hears how each notice ended
    """

    def __init__(
        self,
        receiver: Receiver,
        read: Read,
        count: Callable[[Outcome], None],
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._receiver, self._read, self._count = receiver, read, count
        self._clock, self._sleep = clock, sleep
        self._client = HttpClient(receiver.origin, connect_s=CONNECT_S, idle_s=ANSWER_S, answer_s=ANSWER_S)
        self._room = asyncio.Semaphore(AT_ONCE_MAX)
        self._notices: dict[str, asyncio.Task[None]] = {}  # by batch
        self._pausing: set[str] = set()  # those of them that wait for their next try
        self._closing = False

    def notice(self, key: str, batch_id: str) -> None:
        """Begin to tell the receiver of a batch, if the batch has ended."""
        if batch_id in self._notices:
            return
        if len(self._notices) >= NOTICES_MAX:
            self._give_up(batch_id, f"{NOTICES_MAX:,} notices wait already")
            return
        task = self._notices[batch_id] = asyncio.create_task(self._tell(key, batch_id))
        task.add_done_callback(lambda _: self._notices.pop(batch_id))

    async def close(self) -> None:
        """Wait for tries under way, for a moment, and give the other notices up."""
        self._closing = True
        tasks, under_way = list(self._notices.values()), self._notices.keys() - self._pausing
        for batch_id in self._pausing:
            self._notices[batch_id].cancel()
        if under_way:
            await asyncio.wait([self._notices[batch_id] for batch_id in under_way], timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _tell(self, key: str, batch_id: str) -> None:
        trouble = ""
        try:
            for pause_s in (0.0, *PAUSES_S):
                if pause_s and not await self._pause(batch_id, pause_s):
                    break
                try:
                    body = await self._read(key, batch_id)
                    if body is None:
                        return
                    async with self._room:
                        await self._post(batch_id, body)
                except Exception as error:  # of the receiver, its network, or the store
                    trouble = str(error) or type(error).__name__
                    log.info("webhook: batch %s was not told: %s", batch_id, trouble)
                else:
                    self._count("sent")
                    return
            self._give_up(batch_id, trouble)
        except asyncio.CancelledError:
            self._give_up(batch_id, "the server ends")
            raise

    async def _pause(self, batch_id: str, seconds: float) -> bool:
        """Wait for the next try. False: there is none, for the server ends."""
        if self._closing:
            return False
        self._pausing.add(batch_id)
        try:
            await self._sleep(seconds)
        finally:
            self._pausing.discard(batch_id)
        return True

    async def _post(self, batch_id: str, body: bytes) -> None:
        """Raises HttpError unless the receiver answers with a status of 2xx."""
        headers = self._receiver.headers(batch_id, int(self._clock()), body)
        opening = self._client.opening("POST", self._receiver.target, headers)
        response = await self._client.request(opening, body)
        response.drain()
        if not 200 <= response.status < 300:
            raise HttpError(f"the receiver answers with status {response.status}")

    def _give_up(self, batch_id: str, why: str) -> None:
        log.error("webhook: the receiver was not told that batch %s has ended: %s", batch_id, why)
        self._count("given_up")
