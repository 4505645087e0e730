"""The keys of an identity provider: read at the start, every few minutes, and when a token names an unknown one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from llmserve.errors import ConfigError
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError
from llmserve.http.server import is_loopback
from llmserve.runtime.lasting import lasting
from llmserve.tenants.tokens import Tokens

log = logging.getLogger("llmserve")

RENEW_EVERY_S, AGAIN_S = 300.0, 5.0
ANSWER_S = 10.0
BYTES_MAX = 1 << 20
DISCOVERY = "/.well-known/openid-configuration"


class _Discovered(msgspec.Struct):
    issuer: str
    jwks_uri: str


class CannotRead(Exception):
    """The issuer's keys cannot be read. The message says why."""


class IssuerKeys:
    """Gives tokens the issuer's keys. What was read last holds while the issuer does not answer.

    place : URL or file of a JWK set; None: the issuer's description says it (OpenID Connect Discovery)
    """

    def __init__(self, tokens: Tokens, issuer: str, place: str | None = None) -> None:
        self._tokens, self._issuer, self._place = tokens, issuer, place
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys once, and renew them from then on. An issuer that does not answer now is asked again."""
        await self._renew()
        self._task = lasting("reading of the issuer's keys", self._renew_regularly)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _renew_regularly(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self._failing else RENEW_EVERY_S):
                    await self._tokens.wanted.wait()
            self._tokens.wanted.clear()
            await self._renew()

    async def _renew(self) -> None:
        try:
            number = self._tokens.use(await self._read())
            if number == 0:
                raise CannotRead("no key with which tokens can be signed")
        except (CannotRead, ValueError) as error:
            if not self._failing:
                log.warning("the keys of %s cannot be read: %s", self._issuer, error)
            self._failing = True
        else:
            if self._failing:
                log.info("the keys of %s are read again", self._issuer)
            self._failing = False

    async def _read(self) -> bytes:
        place = self._place
        if place is None:
            body = await fetched(self._issuer.rstrip("/") + DISCOVERY)
            try:
                told = msgspec.json.decode(body, type=_Discovered)
            except msgspec.MsgspecError as error:
                raise CannotRead(f"its description is not understood: {error}") from error
            if told.issuer.rstrip("/") != self._issuer.rstrip("/"):
                raise CannotRead(f"its description is that of {told.issuer}")
            place = told.jwks_uri
        if is_url(place):
            return await fetched(place)
        try:
            return await asyncio.to_thread(Path(place).read_bytes)
        except OSError as error:
            raise CannotRead(f"{place}: {error.strerror}") from error


async def fetched(url: str) -> bytes:
    """What is at a URL. Raises CannotRead."""
    if (why := insecure(url)) is not None:
        raise CannotRead(why)
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            HttpClient(
                f"{parts.scheme}://{parts.netloc}", connect_s=ANSWER_S, idle_s=ANSWER_S, answer_s=ANSWER_S
            ) as http,
        ):
            response = await http.request(http.opening("GET", path, {"accept": "application/json"}))
            body = await response.read(BYTES_MAX)
            if response.status != 200:
                raise CannotRead(f"{url} answers {response.status}")
            return body
    except (HttpError, TimeoutError) as error:
        raise CannotRead(f"{url} gives no answer: {error}") from error


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def insecure(url: str) -> str | None:
    """Why keys from this URL could be anybody's; None: they could not."""
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        return None
    return f"{url} is not https: whoever is on the way could give other keys"


def check_issuer(issuer: str, place: str | None) -> None:
    """Raise ConfigError when the keys would come from where anybody could give others."""
    url = issuer if place is None else place
    if (is_url(url) or place is None) and (why := insecure(url)) is not None:
        raise ConfigError(f"jwt_issuer: {why}" if place is None else f"jwt_keys: {why}")
