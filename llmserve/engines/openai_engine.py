"""A client of any OpenAI-compatible server: vLLM, SGLang, llama.cpp, TGI, the embedded engine, ...

The client's body and the engine's bytes are forwarded unchanged; but an engine that goes by priority gets the request's
turn as the field `priority`. Two headers name the batch of a request for a
static-batching engine; other servers ignore both headers.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from llmserve.engines.engine import ENGINE_FAULTS, EngineError, Health, ServedModel
from llmserve.engines.vllm_metrics import Load, SlotsLearner, read_load
from llmserve.headers import BATCH_HEADER, BATCH_SIZE_HEADER
from llmserve.request import Batch, Call, EngineInfo


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times in seconds. idle_s: longest wait for the first or the next bytes of an answer."""

    connect_s: float = 5.0
    idle_s: float = 600.0
    probe_s: float = 5.0


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class HttpAnswer:
    """An answer over HTTP."""

    def __init__(self, response: aiohttp.ClientResponse, name: str) -> None:
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self.retry_after = response.headers.get("retry-after")
        self.fault = response.status in ENGINE_FAULTS
        self._response = response
        self._name = name

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self._name} broke off its answer: {_text(error)}") from error

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self._name} broke off its answer: {_text(error)}") from error


class OpenAIEngine:
    """An engine at `url` (scheme, host, port and optional path prefix; a trailing /v1 is removed).

    api_key is sent as a bearer token; the client's key is never sent to the engine. learns_slots: `info.slots` is a
    first guess, which the engine's metrics correct. Create the object inside a running event loop.
    """

    def __init__(
        self,
        info: EngineInfo,
        url: str,
        *,
        timeouts: Timeouts | None = None,
        api_key: str | None = None,
        learns_slots: bool = False,
        restart: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.info = info
        self.url = url.rstrip("/").removesuffix("/v1")
        self.restart = restart
        self.slots = SlotsLearner(info.slots, info.look_ahead) if learns_slots else None
        self._has_metrics = True  # until /metrics answers 404 or 405
        self._tokens_max: int | None = None
        self._timeouts = timeouts or Timeouts()
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._timeouts.connect_s, sock_read=self._timeouts.idle_s
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # Each probe opens a new connection: a server that accepts no new connections may still answer on an old one.
        self._probing = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(total=self._timeouts.probe_s),
        )

    @asynccontextmanager
    async def open(self, call: Call, batch: Batch) -> AsyncIterator[HttpAnswer]:
        headers = {
            **dict(call.headers),
            **self._headers,
            BATCH_HEADER: str(batch.id),
            BATCH_SIZE_HEADER: str(len(batch.requests)),
        }
        body = call.body if batch.turn is None else with_priority(call.body, batch.turn)
        try:
            response = await self._session.post(self.url + call.path, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._no_answer(error) from error
        try:
            yield HttpAnswer(response, self.info.name)
        finally:
            # A finished response has returned its connection; closing an unfinished response aborts the request.
            response.close()

    async def probe(self) -> Health:
        """GET /health if the server has /health, then GET /v1/models, then vLLM's figures in GET /metrics."""
        try:
            url, headers = f"{self.url}/health", self._headers
            async with self._probing.get(url, headers=headers, allow_redirects=False) as response:
                if response.status not in (200, 404, 405):
                    raise EngineError(f"engine {self.info.name} is not healthy: /health answers {response.status}")
            url = f"{self.url}/v1/models"
            async with self._probing.get(url, headers=headers, allow_redirects=False) as response:
                body = await response.read()
                if response.status != 200:
                    raise EngineError(f"engine {self.info.name}: /v1/models answers {response.status}")
            models = msgspec.json.decode(body, type=_ModelList)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._no_answer(error) from error
        except msgspec.MsgspecError as error:
            raise EngineError(f"engine {self.info.name}: /v1/models is not a list of models: {error}") from error
        served = tuple(ServedModel(model.id, model.max_model_len) for model in models.data)
        if (load := await self._load()) is not None:
            self._tokens_max = load.tokens_max
            if self.slots is not None:
                self.slots.observe(load)
        if self.slots is None:
            return Health(served, None, self._tokens_max)
        return Health(served, self.slots.slots, self._tokens_max, self.slots.limit_reached)

    async def _load(self) -> Load | None:
        """Read vLLM's metrics; None if missing or unreadable, which does not make the engine unhealthy."""
        if not self._has_metrics:
            return None
        try:
            async with self._probing.get(
                f"{self.url}/metrics", headers=self._headers, allow_redirects=False
            ) as response:
                self._has_metrics = response.status not in (404, 405)
                return read_load(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    def _no_answer(self, error: BaseException) -> EngineError:
        """Only a refused connection means unreachable; a timeout, or a lack of local sockets, does not."""
        refused = isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
        return EngineError(f"engine {self.info.name} does not answer: {_text(error)}", unreachable=refused)

    async def close(self) -> None:
        await self._session.close()
        await self._probing.close()


def with_priority(body: bytes, turn: float) -> bytes:
    """The body of a call with vLLM's field `priority`: an engine runs the smallest first.

    body : a JSON object with at least one field. A field that is there twice counts as the last one says.
    turn : seconds, or the number of a batch; thousandths are kept.
    """
    return b'%b,"priority":%d}' % (body.rstrip()[:-1], round(1000 * turn))


def _text(error: BaseException) -> str:
    """Return the error's message, or its type's name if the message is empty."""
    return str(error) or type(error).__name__
