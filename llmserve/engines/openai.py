"""A client of any OpenAI-compatible server: vLLM, SGLang, llama.cpp, TGI, the embedded engine, ...

The client's body and the engine's bytes are forwarded unchanged, but for what additions.py adds: an engine is asked for
the counts of a stream, and one that goes by priority gets the request's turn as the field `priority`. Two headers name
the batch of a request for a static-batching engine; other servers ignore both headers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from llmserve.engines.additions import PRIORITY, USAGE, Additions, Asking, with_priority
from llmserve.engines.dialects import HEALTH_PATH, Dialect
from llmserve.engines.engine import NOTHING, EngineError, Headers, Health, Passed, late_error, no_answer
from llmserve.engines.probing import HEADERS_KEPT, Gets, Prober
from llmserve.engines.slots import SlotsLearner
from llmserve.http.client import HttpClient, Response
from llmserve.http.connecting import HttpError
from llmserve.request import Batch, Call, EngineInfo
from llmserve.wire import error_objects
from llmserve.wire.error_objects import KEY_STATUSES, ErrorObject, Verdict
from llmserve.wire.headers import BATCH_HEADER, BATCH_SIZE_HEADER, KEPT_HEADERS, PASSED_HEADERS, is_packed

log = logging.getLogger("llmserve")

ANSWERS = range(200, 204)  # statuses that come with an answer, whatever is wrong with its headers
ERROR_BYTES_MAX = 1 << 20  # of an error's body
SOONER = 0.8  # of the time after which the engine closes idle connections: an end before that has another cause


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times in seconds. idle_s: longest wait for the first or the next bytes of an answer. answer_s: of all of it."""

    connect_s: float = 5.0
    idle_s: float = 600.0
    answer_s: float = 3600.0
    probe_s: float = 5.0


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

    @property
    def goes_on(self) -> bool:
        response = self._response
        return response.error is None and not response.complete

    @property
    def heard_s(self) -> float | None:
        return self._response.heard_s

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
        if is_packed(response.headers):
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

    def pass_to(self, on_part: Callable[[bytes], bool]) -> None:
        self._response.on_part = on_part

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


def _is_plain(value: bytes) -> bool:
    return value.isascii() and value.decode("ascii").isprintable()


def auth_error(name: str, status: int) -> EngineError:
    message = f"engine {name} refuses this server's key with {status}: see --engine-api-key"
    return EngineError(message, code="engine_auth", refused=True)


Kind = TypeVar("Kind", bound=HttpAnswer)


class OpenAIEngine:
    """An engine at `url` (scheme, host, port and optional path prefix; a trailing /v1 is removed).

    api_key is sent as a bearer token; the client's key is never sent to the engine. slots: learns how many requests
    the engine runs at once; None: `info` is all that is to know. probe_path: where the engine says whether it is
    healthy; by default where its dialect has it. dialect: of the engine; None: to be recognised. answer_bytes_max: of
    a whole answer. A stream is passed on as it comes, and has no limit but time. tls, tls_name: see HttpClient.
    """

    def __init__(
        self,
        info: EngineInfo,
        url: str,
        *,
        timeouts: Timeouts | None = None,
        api_key: str | None = None,
        slots: SlotsLearner | None = None,
        restart: Callable[[], Awaitable[None]] | None = None,
        probe_path: str = HEALTH_PATH,
        answer_bytes_max: int = 64 << 20,
        dialect: Dialect | None = None,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
    ) -> None:
        self.answer_bytes_max = answer_bytes_max
        self.info = info
        self.url = url.rstrip("/").removesuffix("/v1")
        self.restart = restart
        self.slots = slots
        self.api_key = api_key
        self.outages = 0  # probes that have failed: another program may be at the URL since
        self._additions = Additions()
        self._headers = {"content-type": "application/json", "user-agent": "llmserve"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        times = timeouts or Timeouts()
        self._client = HttpClient(
            self.url,
            connect_s=times.connect_s,
            idle_s=times.idle_s,
            answer_s=times.answer_s,
            headers_kept=KEPT_HEADERS,
            tls=tls,
            tls_name=tls_name,
        )
        # The first requests of all need no look at the server's name, which would shuffle them: a probe had that.
        probes = HttpClient(
            self.url,
            connect_s=times.connect_s,
            idle_s=times.probe_s,
            answer_s=times.probe_s,
            beside=self._client,
            headers_kept=HEADERS_KEPT,
            idle_most=1,
        )
        probes.on_hangup = self._hung_up
        self.on_hangup: Callable[[], None] | None = None
        self._lingers_s = math.inf  # the least time after which the engine has closed an idle connection
        self._prober = Prober(
            info.name,
            Gets(info.name, probes, self._headers, times.probe_s),
            path=probe_path,
            slots=slots,
            by_priority=info.by_priority,
            dialect=dialect,
        )
        self._health: Health | None = None  # of the last probe, unless that failed
        self._probes_late = False  # the last probe got no answer
        self._openings: dict[str, bytes] = {}
        self._key_refused = False

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
        if turn is not None:
            turn = turn * sign if (sign := self._prober.sign) else None
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

    @property
    def sign(self) -> int:
        """Of a turn as the field `priority`, see Prober."""
        return self._prober.sign

    @sign.setter
    def sign(self, sign: int) -> None:
        self._prober.sign = sign

    @property
    def heard_s(self) -> float:
        """On the event loop's clock, when bytes of a good answer last came; -inf: none have."""
        return self._client.heard_s

    def heard(self, at_s: float) -> None:
        """Note that another process has got bytes of a good answer."""
        self._client.heard_s = max(self._client.heard_s, at_s)

    def forget_additions(self) -> None:
        """Ask anew which added fields the engine takes."""
        self.outages += 1
        self._additions.forget()

    def judge(self, status: int) -> None:
        """Log once that the engine refuses the key."""
        refused = status in KEY_STATUSES
        if refused and not self._key_refused:
            log.error("%s", auth_error(self.info.name, status))
        self._key_refused = refused

    async def probe(self) -> Health:
        """Ask for the engine's program, health, models and load.

        An engine that gives no answer to a probe, but has gone on with answers meanwhile, is as it was.
        """
        began_s = asyncio.get_running_loop().time()
        try:
            self._health = await self._prober.probe()
        except HttpError as error:
            health = self._health
            if health is None or error.refused or error.local or self._client.heard_s < began_s:
                self._health = None
                self._prober.forget()
                self.forget_additions()
                raise self.no_answer(error) from error
            level, self._probes_late = logging.DEBUG if self._probes_late else logging.WARNING, True
            log.log(level, "engine %s goes on with its answers, but not with probes: %s", self.info.name, error)
            return health
        except EngineError:
            self._health = None
            raise
        self._probes_late = False
        return self._health

    def _hung_up(self, idle_s: float) -> None:
        """The engine has closed the connection that its last probe had left open: its process may have ended.

        Many servers close idle connections, too, each after about the same time.
        """
        lingers_s, self._lingers_s = self._lingers_s, min(idle_s, self._lingers_s)
        if idle_s < SOONER * lingers_s and self.on_hangup is not None:
            self.on_hangup()

    def no_answer(self, error: HttpError) -> EngineError:
        if error.refused:
            self._lingers_s = math.inf
            self._prober.look_again()
        return no_answer(self.info.name, error)

    async def close(self) -> None:
        await self._client.close()
        await self._prober.close()


def idle_s_of(call: Call) -> float | None:
    """Longest silence in an answer; None: the engine's setting. A whole answer is silent until it is complete."""
    return None if call.wire.stream else math.inf
