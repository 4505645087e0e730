"""A client of any OpenAI-compatible server: vLLM, SGLang, llama.cpp, TGI, the embedded engine, ...

The client's body and the engine's bytes are forwarded unchanged; but an engine that goes by priority gets the request's
turn as the field `priority`. Two headers name the batch of a request for a
static-batching engine; other servers ignore both headers.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from llmserve.engines.connecting import HttpError, printable
from llmserve.engines.engine import EngineError, Health, ServedModel
from llmserve.engines.http_client import HttpClient, Response
from llmserve.engines.vllm_metrics import Load, SlotsLearner, read_load
from llmserve.headers import BATCH_HEADER, BATCH_SIZE_HEADER
from llmserve.request import Batch, Call, EngineInfo

log = logging.getLogger("llmserve")

ANSWER_BYTES_MAX = 64 << 20  # of a whole answer; a stream is passed on as it comes, and has no limit but time
ERROR_BYTES_MAX = 1 << 20  # of an error's body, and of a probe's
MODEL_ID_CHARS_MAX = 256
COUNT = re.compile(rb"\d{1,15}")
CONTEXT_TOKENS_MAX = 1 << 31
NOT_SERVED_SHOWN = 5  # names in a line of the log
AUTH_STATUSES = (401, 403, 407)  # they speak of the key that this server sends, never of the client's


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times in seconds. idle_s: longest wait for the first or the next bytes of an answer. answer_s: of all of it."""

    connect_s: float = 5.0
    idle_s: float = 600.0
    answer_s: float = 3600.0
    probe_s: float = 5.0


class _Model(msgspec.Struct):
    id: str
    max_model_len: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def context_tokens(self) -> int | None:
        """None for what is no sensible number."""
        tokens = int(self.max_model_len) if COUNT.fullmatch(self.max_model_len) else 0
        return tokens if 0 < tokens <= CONTEXT_TOKENS_MAX else None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class HttpAnswer:
    """An answer over HTTP."""

    served: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, response: Response, name: str) -> None:
        """Raises EngineError for a head that no client may get."""
        self.status = status = response.status
        self._response = response
        self._name = name
        if status in AUTH_STATUSES:
            message = f"engine {name} refuses this server's key with {status}: see --engine-api-key"
            raise EngineError(message, code="engine_auth")
        if 300 <= status < 400 or status in (204, 205):
            raise self._unusable(f"the status {status}")
        if response.headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
            raise self._unusable("a content-encoding that was not asked for")
        self.content_type = self._header(b"content-type") or "application/json"
        self.retry_after = self._header(b"retry-after")
        self.fault = status >= 500 or status == 408  # 408: the engine got no whole request, so it has begun nothing

    def _header(self, name: bytes) -> str | None:
        value = self._response.headers.get(name)
        if value is None:
            return None
        text = value.decode("latin-1")
        if not (text.isascii() and text.isprintable()):
            raise self._unusable(f"a {name.decode()} that is not printable")
        return text

    async def read(self) -> bytes:
        try:
            return await self._response.read(ANSWER_BYTES_MAX if self.status < 300 else ERROR_BYTES_MAX)
        except HttpError as error:
            raise self._broken(error) from error

    async def chunks(self) -> AsyncIterator[bytes]:
        response = self._response
        try:
            while await response.more():
                yield response.take()
        except HttpError as error:
            raise self._broken(error) from error

    def close(self) -> None:
        self._response.close()

    def _unusable(self, what: str) -> EngineError:
        return EngineError(f"engine {self._name} gave an answer that cannot be passed on: {what}")

    def _broken(self, error: HttpError) -> EngineError:
        return EngineError(f"engine {self._name} broke off its answer: {error}")


class OpenAIEngine:
    """An engine at `url` (scheme, host, port and optional path prefix; a trailing /v1 is removed).

    api_key is sent as a bearer token; the client's key is never sent to the engine. learns_slots: `info.slots` is a
    first guess, which the engine's metrics correct.
    """

    answer_type = HttpAnswer

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
        self._headers = {"content-type": "application/json", "user-agent": "llmserve"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        times = self._timeouts
        self._client = HttpClient(self.url, connect_s=times.connect_s, idle_s=times.idle_s, answer_s=times.answer_s)
        self._openings: dict[str, bytes] = {}
        self._not_served: list[str] = []  # the model ids of the last probe that cannot be served
        self._key_refused = False

    async def open(self, call: Call, batch: Batch) -> HttpAnswer:
        opening = self._opening(call.path)
        further = f"{BATCH_HEADER}: {batch.id}\r\n{BATCH_SIZE_HEADER}: {len(batch.requests)}\r\n"
        for name, value in call.headers:
            further += f"{name}: {value}\r\n"
        body = call.body
        if batch.turn is not None or call.priority:  # the client's priority is the front-end's, see api/shares.py
            body = with_priority(body, batch.turn or 0.0)
        try:
            response = await self._client.request(opening + further.encode("latin-1"), body)
        except HttpError as error:
            raise self._no_answer(error) from error
        return self._answer(response)

    def _opening(self, path: str) -> bytes:
        """The first lines of a request; the same for each request to a path."""
        opening = self._openings.get(path)
        if opening is None:
            opening = self._openings[path] = self._client.opening("POST", path, self._headers)
        return opening

    def _answer(self, response: Response) -> HttpAnswer:
        try:
            answer = self.answer_type(response, self.info.name)
        except EngineError as error:
            response.close()
            if error.code == "engine_auth" and not self._key_refused:
                self._key_refused = True
                log.error("%s", error)
            raise
        self._key_refused = False
        return answer

    async def probe(self) -> Health:
        """GET /health if the server has /health, then GET /v1/models, then vLLM's figures in GET /metrics."""
        name = self.info.name
        try:
            status, _ = await self._get("/health")
            if status not in (200, 404, 405):
                raise EngineError(f"engine {name} is not healthy: /health answers {status}")
            status, body = await self._get("/v1/models")
            if status != 200:
                raise EngineError(f"engine {name}: /v1/models answers {status}")
            models = msgspec.json.decode(body, type=_ModelList).data
        except HttpError as error:
            raise self._no_answer(error) from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineError(f"engine {name}: /v1/models is not a list of models: {printable(str(error))}") from error
        served = self._served(models)
        if (load := await self._load()) is not None:
            self._tokens_max = load.tokens_max
            if self.slots is not None:
                self.slots.observe(load)
        if self.slots is None:
            return Health(served, None, self._tokens_max)
        return Health(served, self.slots.slots, self._tokens_max, self.slots.limit_reached)

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body; b"" for another status than 200. Raises HttpError, also when the time of a probe is over.

        Each probe opens a new connection: a server that accepts no new connections may still answer on an old one.
        """
        opening = self._client.opening("GET", path, {**self._headers, "connection": "close"})
        probe_s = self._timeouts.probe_s
        try:
            async with asyncio.timeout(probe_s):
                response = await self._client.request(opening, fresh=True)
                try:
                    if response.headers.get(b"content-encoding", b"identity") != b"identity":
                        raise HttpError(f"{path} has a content-encoding that was not asked for")
                    return response.status, await response.read(ERROR_BYTES_MAX) if response.status == 200 else b""
                finally:
                    response.close()
        except TimeoutError:
            raise HttpError(f"{path} did not come within {probe_s:g} s") from None

    def _served(self, models: list[_Model]) -> tuple[ServedModel, ...]:
        """The models whose ids may stand in a line of the log; the others are named there, once."""
        served, not_served = [], []
        for model in models:
            if 0 < len(model.id) <= MODEL_ID_CHARS_MAX and model.id.isprintable():
                served.append(ServedModel(model.id, model.context_tokens))
            else:
                not_served.append(model.id[: MODEL_ID_CHARS_MAX + 1])
        if not_served and not_served != self._not_served:
            shown = ", ".join([repr(id_) for id_ in not_served[:NOT_SERVED_SHOWN]])
            text = "engine %s: %d models are not served, whose ids are not printable or longer than %d characters: %s"
            log.warning(text, self.info.name, len(not_served), MODEL_ID_CHARS_MAX, shown)
        self._not_served = not_served
        return tuple(served)

    async def _load(self) -> Load | None:
        """Read vLLM's metrics; None if missing or unreadable, which does not make the engine unhealthy."""
        if not self._has_metrics:
            return None
        try:
            status, body = await self._get("/metrics")
        except HttpError:
            return None
        self._has_metrics = status not in (404, 405)
        return read_load(body.decode(errors="replace")) if status == 200 else None

    def _no_answer(self, error: HttpError) -> EngineError:
        """Only a refused connection means unreachable; a timeout does not."""
        if error.local:
            return EngineError(f"this server has no socket left for engine {self.info.name}: {error}", local=True)
        return EngineError(f"engine {self.info.name} does not answer: {error}", unreachable=error.refused)

    async def close(self) -> None:
        await self._client.close()


def with_priority(body: bytes, turn: float) -> bytes:
    """The body of a call with vLLM's field `priority`: an engine runs the smallest first.

    body : a JSON object with at least one field. A field that is there twice counts as the last one says.
    turn : seconds, or the number of a batch; thousandths are kept.
    """
    return b'%b,"priority":%d}' % (body.rstrip()[:-1], round(1000 * turn))
