"""A client of any OpenAI-compatible server: vLLM, SGLang, llama.cpp, TGI, the embedded engine, ...

The client's body and the engine's bytes are forwarded unchanged, but for what additions.py adds: an engine is asked for
the counts of a stream, and one that goes by priority gets the request's turn as the field `priority`. Two headers name
the batch of a request for a static-batching engine; other servers ignore both headers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from llmserve.engines.additions import PRIORITY, USAGE, Additions, Asking, with_priority
from llmserve.engines.engine import NOTHING, EngineError, Headers, Health, Passed, ServedModel
from llmserve.engines.vllm_metrics import Load, SlotsLearner, read_load
from llmserve.http.client import HttpClient, Response
from llmserve.http.connecting import HttpError, printable
from llmserve.request import Batch, Call, EngineInfo
from llmserve.wire import error_objects
from llmserve.wire.error_objects import KEY_STATUSES, ErrorObject, Verdict
from llmserve.wire.event_stream import Count
from llmserve.wire.headers import BATCH_HEADER, BATCH_SIZE_HEADER, KEPT_HEADERS, PASSED_HEADERS
from llmserve.wire.lenient_json import SCANNED_BYTES_MAX, read

log = logging.getLogger("llmserve")

ANSWERS = range(200, 204)  # statuses that come with an answer, whatever is wrong with its headers
ERROR_BYTES_MAX = 1 << 20  # of an error's body, and of a probe's
LIST_BYTES_MAX = 8 << 20  # of a list of models, and of the description of a server's endpoints
MODEL_ID_CHARS_MAX = 256
PATHS_TRIES_MAX = 3  # to read the description of a server's endpoints
PACKINGS = frozenset((b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress", b"dcb", b"dcz"))
NOT_SERVED_SHOWN = 5  # names in a line of the log
SHOWN_BYTES = 60  # of an answer that is none
HEALTH_PATH = "/health"  # of vLLM, SGLang, llama.cpp, TGI, llmserve; Ollama and LM Studio have none
METRICS_PATH = "/metrics"
ALIVE_PATH = "/health/liveliness"  # of LiteLLM, whose /health has every model generate an answer
MOMENTARY = (408, 429)  # statuses that say nothing about the next request


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times in seconds. idle_s: longest wait for the first or the next bytes of an answer. answer_s: of all of it."""

    connect_s: float = 5.0
    idle_s: float = 600.0
    answer_s: float = 3600.0
    probe_s: float = 5.0


class _Model(msgspec.Struct):
    """An entry of a list of models. Ollama's own lists have names instead of ids."""

    id: str | None = None
    name: str | None = None
    max_model_len: Count | None = None


class _ModelList(msgspec.Struct):
    """As OpenAI's; some servers have `models` instead. Entries may be bare names."""

    data: list[_Model | str] | None = None
    models: list[_Model | str] | None = None


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


class HttpAnswer:
    """An answer over HTTP; see engine.Answer. asking : asks again, where the engine may refuse what was added"""

    __slots__ = ("_engine", "_response", "asking", "content_type", "headers", "retry_after", "status")

    served: Mapping[str, Any] = NOTHING

    def __init__(self, response: Response, engine: OpenAIEngine) -> None:
        self.status = 0
        self.content_type = ""
        self.retry_after: str | None = None
        self.headers: Headers = ()
        self.asking: Asking | None = None
        self._response = response
        self._engine = engine

    @property
    def complete(self) -> bool:
        return self._response.complete

    def arrived(self) -> bool:
        if self.status:
            return True
        response = self._response
        if self.asking is not None and response.status:
            if (again := self.asking.again(response)) is not None:
                self._response = again
                return False
            self.asking = None
        if not response.status:
            if response.error is not None:
                raise self._engine.no_answer(response.error)
            return False
        self._read_head(response)
        return True

    def _read_head(self, response: Response) -> None:
        """Raises EngineError for a head that no client may get."""
        self.status = status = response.status
        self._engine.judge(status)
        if status in KEY_STATUSES:
            raise auth_error(self._engine.info.name, status)
        if 300 <= status < 400 or status in (204, 205):
            raise self._unusable(f"the status {status}")
        if _is_packed(response):
            raise self._unusable("a content-encoding that was not asked for")
        self.content_type = self._header(b"content-type") or "application/json"
        self.retry_after = self._header(b"retry-after")
        if not PASSED_HEADERS.isdisjoint(response.headers):
            self.headers = tuple(
                [
                    (name, value)
                    for name, value in response.headers.items()
                    if name in PASSED_HEADERS and _is_plain(value)
                ]
            )

    def _header(self, name: bytes) -> str | None:
        """The value without what is not printable ASCII; None: there is none."""
        value = self._response.headers.get(name)
        if value is None:
            return None
        text = value.decode("ascii", "ignore")
        return text if text.isprintable() else "".join(filter(str.isprintable, text))

    def body(self) -> bytes | None:
        try:
            return self._response.body(self._engine.answer_bytes_max if self.status < 300 else ERROR_BYTES_MAX)
        except HttpError as error:
            raise self._broken(error) from error

    def take(self) -> bytes:
        try:
            return self._response.take()
        except HttpError as error:
            raise self._broken(error) from error

    def judge(self, error: ErrorObject | None, *, names_model: bool) -> Verdict:
        return error_objects.judge(self.status, error, names_model=names_model)

    def stalled(self) -> None:
        self._response.stalled()

    def drain(self) -> None:
        self._response.drain()

    def close(self) -> None:
        self._response.close()

    def _unusable(self, what: str) -> EngineError:
        text = f"engine {self._engine.info.name} gave an answer that cannot be passed on: {what}"
        return EngineError(text, answered=self.status in ANSWERS)

    def _broken(self, error: HttpError) -> EngineError:
        name = self._engine.info.name
        if error.late:
            return late_error(name, error)
        if error.large and self.status < 300:
            return EngineError(f"engine {name} gave {error}, see --engine-answer-bytes-max", answered=True)
        return EngineError(f"engine {name} broke off its answer: {error}")


def _is_packed(response: Response) -> bool:
    """Whether the body is packed. What servers send to keep proxies from packing, such as `none`, is no packing."""
    told = response.headers.get(b"content-encoding")
    return told is not None and not PACKINGS.isdisjoint([coding.strip() for coding in told.lower().split(b",")])


def _is_plain(value: bytes) -> bool:
    return value.isascii() and value.decode("ascii").isprintable()


def models_of(body: bytes) -> list[ServedModel] | None:
    """The models of a list, without entries that name none; None: the body is no list."""
    if body.lstrip().startswith(b"["):
        body = b'{"data":%b}' % body
    listed = read(_ModelList, body, LIST_BYTES_MAX)
    entries = None if listed is None else listed.data if listed.data is not None else listed.models
    if entries is None:
        return None
    models = [_Model(entry) if isinstance(entry, str) else entry for entry in entries]
    named = [(model.id if model.id is not None else model.name, model.max_model_len) for model in models]
    return [ServedModel(id_, context_tokens or None) for id_, context_tokens in named if id_ is not None]


def auth_error(name: str, status: int) -> EngineError:
    message = f"engine {name} refuses this server's key with {status}: see --engine-api-key"
    return EngineError(message, code="engine_auth", refused=True)


def late_error(name: str, error: HttpError) -> EngineError:
    """The error of an answer that takes longer than a setting allows."""
    message = f"engine {name} has not answered in time: {error}, see --engine-{error.late}-s"
    return EngineError(message, code="engine_timeout", late=True)


Kind = TypeVar("Kind", bound=HttpAnswer)


class OpenAIEngine:
    """An engine at `url` (scheme, host, port and optional path prefix; a trailing /v1 is removed).

    api_key is sent as a bearer token; the client's key is never sent to the engine. learns_slots: `info.slots` is a
    first guess, which the engine's metrics correct. probe_path: where the engine says whether it is healthy.
    answer_bytes_max: of a whole answer. A stream is passed on as it comes, and has no limit but time.
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
        probe_path: str = HEALTH_PATH,
        answer_bytes_max: int = 64 << 20,
    ) -> None:
        self.answer_bytes_max = answer_bytes_max
        self.info = info
        self.url = url.rstrip("/").removesuffix("/v1")
        self.restart = restart
        self.slots = SlotsLearner(info.slots, info.look_ahead) if learns_slots else None
        self._additions = Additions()
        self._probe_path = probe_path
        self._lacking: set[str] = set()  # paths of probes that the engine does not have, or does not show
        self._health: Health | None = None  # of the last probe, unless that failed
        self._probes_late = False  # the last probe got no answer
        self._tokens_max: int | None = None
        self._timeouts = timeouts or Timeouts()
        self._headers = {"content-type": "application/json", "user-agent": "llmserve"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        times = self._timeouts
        self._client = HttpClient(
            self.url,
            connect_s=times.connect_s,
            idle_s=times.idle_s,
            answer_s=times.answer_s,
            headers_kept=KEPT_HEADERS,
        )
        probe_s = times.probe_s
        # The first requests of all need no look at the server's name, which would shuffle them: a probe had that.
        self._probes = HttpClient(
            self.url,
            connect_s=times.connect_s,
            idle_s=probe_s,
            answer_s=probe_s,
            beside=self._client,
            headers_kept=KEPT_HEADERS,
        )
        self._openings: dict[str, bytes] = {}
        self._not_served: list[str] = []  # the model ids of the last probe that cannot be served
        self._key_refused = False
        self._paths: frozenset[str] | None = None
        self._paths_tries = 0  # that brought none
        self._paths_of: tuple[ServedModel, ...] | None = None  # models whose endpoints are `_paths`; None: not read

    def ask(self, call: Call, batch: Batch, on_change: Callable[[], None]) -> HttpAnswer:
        opening = self._opening(call)
        further = f"{BATCH_HEADER}: {batch.id}\r\n{BATCH_SIZE_HEADER}: {len(batch.requests)}\r\n"
        for name, value in call.wire.headers:
            further += f"{name}: {value}\r\n"
        turn = batch.turn
        if call.wire.form is not None and not call.wire.form.takes_priority:
            turn = None
        elif turn is None and call.priority:  # the client's `priority` is for the scheduler (tenants/shares.py)
            turn = 0.0
        return self._asked(HttpAnswer, opening + further.encode("latin-1"), call, turn, on_change)

    def _asked(
        self, kind: type[Kind], head: bytes, call: Call, turn: float | None, on_change: Callable[[], None]
    ) -> Kind:
        """Send a call with what is added to its body. turn : see Asking"""
        client, takes, idle_s = self._client, self._additions.takes, idle_s_of(call)
        if (turn is None or takes(call, PRIORITY)) and (call.wire.written is None or takes(call, USAGE)):
            body = call.wire.body if turn is None else with_priority(call.wire.body, turn)
            return kind(client.ask(head, body, on_change, idle_s=idle_s), self)
        asking = Asking(self._additions, call, turn, lambda body: client.ask(head, body, on_change, idle_s=idle_s))
        answer = kind(asking.ask(), self)
        if asking.is_open:
            answer.asking = asking
        return answer

    def _opening(self, call: Call) -> bytes:
        """The first lines of a request; the same for each request to a path, but for bodies that are no JSON."""
        if call.wire.content_type:  # with a boundary of its own
            headers = {**self._headers, "content-type": call.wire.content_type}
            return self._client.opening("POST", call.wire.path, headers)
        opening = self._openings.get(call.wire.path)
        if opening is None:
            opening = self._openings[call.wire.path] = self._client.opening("POST", call.wire.path, self._headers)
        return opening

    async def pass_on(self, method: str, path: str, body: bytes | None) -> Passed:
        opening = self._client.opening(method, path, self._headers)
        try:
            response = await self._client.request(opening, body)
            try:
                content_type = response.headers.get(b"content-type", b"application/json").decode("latin-1")
                return Passed(response.status, content_type, await response.read(self.answer_bytes_max))
            finally:
                response.close()
        except HttpError as error:
            raise self.no_answer(error) from error

    def judge(self, status: int) -> None:
        """Log once that the engine refuses the key."""
        refused = status in KEY_STATUSES
        if refused and not self._key_refused:
            log.error("%s", auth_error(self.info.name, status))
        self._key_refused = refused

    async def probe(self) -> Health:
        """GET /v1/models, then the path of the probe unless the engine lacks it, then vLLM's figures in GET /metrics.

        An engine that gives no answer to a probe, but has gone on with answers meanwhile, is as it was.
        """
        began_s = asyncio.get_running_loop().time()
        try:
            self._health = await self._probed()
        except HttpError as error:
            health = self._health
            if health is None or error.refused or error.local or self._client.heard_s < began_s:
                self._forget()
                raise self.no_answer(error) from error
            level, self._probes_late = logging.DEBUG if self._probes_late else logging.WARNING, True
            log.log(level, "engine %s goes on with its answers, but not with probes: %s", self.info.name, error)
            return health
        except EngineError:
            self._health = None
            raise
        self._probes_late = False
        return self._health

    def _forget(self) -> None:
        """Forget what is known of the program behind the URL: another one may answer next."""
        self._health = self._paths_of = None
        self._lacking.clear()
        self._additions.forget()

    async def _probed(self) -> Health:
        """Raises EngineError when the engine is not healthy, and HttpError when it gives no answer."""
        name = self.info.name
        status, body = await self._get("/v1/models", LIST_BYTES_MAX)
        if status != 200:
            code = "engine_auth" if status in (401, 403) else None
            raise EngineError(f"engine {name}: /v1/models answers {status}", code=code)
        # In a thread, since a long list that is no proper JSON takes long.
        large = len(body) > SCANNED_BYTES_MAX
        models = await asyncio.to_thread(models_of, body) if large else models_of(body)
        if models is None:
            begin = printable(body[:SHOWN_BYTES].decode(errors="replace"))
            raise EngineError(f"engine {name}: /v1/models is not a list of models, but begins with {begin!r}")
        served = self._served(models)
        if served == self._paths_of or await self._read_paths(served):
            await self._check_health()
        if (load := await self._load()) is not None:
            self._tokens_max = load.tokens_max
            if self.slots is not None:
                self.slots.observe(load)
        known = load is not None
        if self.slots is None:
            return Health(served, None, self._tokens_max, paths=self._paths, load_known=known)
        return Health(served, self.slots.slots, self._tokens_max, self.slots.limit_reached, self._paths, known)

    async def _check_health(self) -> None:
        """Raise EngineError if the engine says that it is not healthy.

        A path that the engine lacks or does not show says nothing; then the list of models is enough.
        """
        path = self._probe_path
        if path == HEALTH_PATH and self._paths is not None and ALIVE_PATH in self._paths:
            path = ALIVE_PATH
        if path in self._lacking or path == "/v1/models":
            return
        status, _ = await self._get(path)
        if status // 100 == 2 or self._lacks(path, status):
            return
        raise EngineError(f"engine {self.info.name} is not healthy: {path} answers {status}")

    def _lacks(self, path: str, status: int) -> bool:
        """Whether a status means that the engine says nothing at a path. Such a path is asked for no more."""
        if not (300 <= status < 500 or status == 501):
            return False
        if status not in MOMENTARY:
            self._lacking.add(path)
            level = logging.DEBUG if status in (404, 405) and path != self._probe_path else logging.INFO
            log.log(level, "engine %s: %s answers %d, and is asked for no more", self.info.name, path, status)
        return True

    async def _read_paths(self, served: tuple[ServedModel, ...]) -> bool:
        """Read the paths of the server's endpoints from its OpenAPI description. False: it is still to come.

        A server may take long to make its first description. Until then it is not asked about its health, which only
        the description tells to be costly.
        """
        self._paths = None
        try:
            status, body = await self._get("/openapi.json", LIST_BYTES_MAX)
            if status == 200:
                self._paths = frozenset(msgspec.json.decode(body, type=_OpenApi).paths)
        except HttpError:
            self._paths_tries += 1
            if self._paths_tries < PATHS_TRIES_MAX:
                return False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        self._paths_of, self._paths_tries = served, 0
        return True

    async def _get(self, path: str, bytes_max: int = ERROR_BYTES_MAX) -> tuple[int, bytes]:
        """Status and body; b"" for another status than 200. Raises HttpError, also when the time of a probe is over.

        Each probe opens a new connection: a server that accepts no new connections may still answer on an old one.
        """
        opening = self._probes.opening("GET", path, {**self._headers, "connection": "close"})
        probe_s = self._timeouts.probe_s
        try:
            async with asyncio.timeout(probe_s):
                response = await self._probes.request(opening, fresh=True)
                try:
                    if _is_packed(response):
                        raise HttpError(f"{path} has a content-encoding that was not asked for")
                    return response.status, await response.read(bytes_max) if response.status == 200 else b""
                finally:
                    response.close()
        except TimeoutError:
            raise HttpError(f"{path} did not come within {probe_s:g} s, see --probe-s") from None

    def _served(self, models: list[ServedModel]) -> tuple[ServedModel, ...]:
        """The models whose ids may stand in a line of the log; the others are named there, once."""
        served, not_served = [], []
        for model in models:
            if 0 < len(model.id) <= MODEL_ID_CHARS_MAX and model.id.isprintable():
                served.append(model)
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
        if METRICS_PATH in self._lacking:
            return None
        try:
            status, body = await self._get(METRICS_PATH)
        except HttpError:
            return None
        self._lacks(METRICS_PATH, status)
        return read_load(body.decode(errors="replace")) if status == 200 else None

    def no_answer(self, error: HttpError) -> EngineError:
        """Only a refused connection means unreachable; a timeout does not."""
        if error.local:
            return EngineError(f"this server has no socket left for engine {self.info.name}: {error}", local=True)
        if error.late:
            return late_error(self.info.name, error)
        return EngineError(f"engine {self.info.name} does not answer: {error}", unreachable=error.refused)

    async def close(self) -> None:
        await self._client.close()
        await self._probes.close()


def idle_s_of(call: Call) -> float | None:
    """Longest silence in an answer; None: the engine's setting. A whole answer is silent until it is complete."""
    return None if call.wire.stream else math.inf
