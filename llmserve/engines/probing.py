"""Probes of an engine: its program, its health, its models, its load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from llmserve.engines.dialects import (
    DIALECTS,
    HEALTH_PATH,
    METRICS_PATH,
    MODELS_PATH,
    NOTHING_TOLD,
    UNKNOWN,
    Dialect,
    Listing,
    Priority,
    Program,
    Reader,
    Told,
)
from llmserve.engines.engine import EngineError, Health, ServedModel
from llmserve.engines.slots import SlotsLearner
from llmserve.http.client import HttpClient, WholeAnswer
from llmserve.http.connecting import HttpError, printable
from llmserve.wire.event_stream import Count
from llmserve.wire.headers import KEPT_HEADERS, is_packed
from llmserve.wire.lenient_json import SCANNED_BYTES_MAX, read

log = logging.getLogger("llmserve")

BYTES_MAX = 1 << 20  # of an answer to a probe
LIST_BYTES_MAX = 8 << 20  # of a list of models, and of the description of a server's endpoints
MODEL_ID_CHARS_MAX = 256
PATHS_TRIES_MAX = 3  # to read the description of a server's endpoints
NOT_SERVED_SHOWN = 5  # names in a line of the log
SHOWN_BYTES = 60  # of an answer that is none
SETTINGS_S = 30.0  # an engine may have been restarted with other settings between two probes
ABSENT = (404, 405, 501)  # statuses of a path that the program does not have
MOMENTARY = (408, 429)  # statuses that say nothing about the next request
HEADERS_KEPT = KEPT_HEADERS | {b"server"}
SIGNS = {None: 1, Priority.LOWER_FIRST: 1, Priority.HIGHER_FIRST: -1, Priority.NONE: 0}


class _State(msgspec.Struct):
    value: str = ""


class _Meta(msgspec.Struct):
    n_ctx: Count | None = None


class _Model(msgspec.Struct):
    """An entry of a list of models. Ollama's own lists have names instead of ids.

    max_model_len, meta.n_ctx : the context, of vLLM and SGLang, and of llama.cpp.  status : of servers that load models
    """

    id: str | None = None
    name: str | None = None
    created: Count | None = None
    owned_by: str | None = None
    max_model_len: Count | None = None
    meta: _Meta | None = None
    status: _State | str | None = None

    @property
    def served(self) -> ServedModel | None:
        id_ = self.id if self.id is not None else self.name
        context = self.max_model_len or (self.meta.n_ctx if self.meta is not None else None)
        return ServedModel(id_, context or None, self.created or 0, self.owned_by or "") if id_ is not None else None

    @property
    def state(self) -> str:
        return self.status.value if isinstance(self.status, _State) else ""


class _ModelList(msgspec.Struct):
    """As OpenAI's; some servers have `models` instead. Entries may be bare names. Ollama's list is null without any."""

    object: str = ""
    data: list[_Model | str] | None = None
    models: list[_Model | str] | None = None


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class ModelList:
    """The models of a list, without entries that name none. loaded : ids, as Told.loaded"""

    models: tuple[ServedModel, ...]
    loaded: tuple[str, ...] | None

    def listing(self, server: str, paths: frozenset[str] | None = None) -> Listing:
        owners = tuple([(model.id, model.owned_by) for model in self.models])
        return Listing(owners, self.loaded is not None, server, paths)


def models_of(body: bytes) -> ModelList | None:
    """None: the body is no list."""
    if body.lstrip().startswith(b"["):
        body = b'{"data":%b}' % body
    listed = read(_ModelList, body, LIST_BYTES_MAX)
    if listed is None:
        return None
    entries = listed.data if listed.data is not None else listed.models
    if entries is None:
        return ModelList((), None) if listed.object == "list" else None
    models = [_Model(entry) if isinstance(entry, str) else entry for entry in entries]
    pairs = [(served, model.state) for model in models if (served := model.served) is not None]
    loaded = tuple([served.id for served, state in pairs if state == "loaded"])
    return ModelList(tuple([served for served, _ in pairs]), loaded if any(state for _, state in pairs) else None)


@dataclass(slots=True)
class _Known:
    """What is known of the program that answers.

    served    its models
    settings  what it told of itself when it was recognised, or when it was last asked again, at read_s
    paths     of its endpoints; None: not listed
    cache     what its load told last of its cache, since a probe may miss the load
    """

    served: tuple[ServedModel, ...]
    dialect: Dialect
    settings: Told
    paths: frozenset[str] | None
    read_s: float
    cache: Told = NOTHING_TOLD


class Gets:
    """GETs of probes. Each opens a connection: a server that accepts no new ones may still answer on an old one.

    client : keeps one idle connection
    lacking : paths that the program does not have, or does not show
    """

    def __init__(self, name: str, client: HttpClient, headers: Mapping[str, str], get_s: float) -> None:
        self.lacking: set[str] = set()
        self._name = name
        self._client = client
        self._headers = dict(headers)
        self._headers_once = {**headers, "connection": "close"}
        self._get_s = get_s

    async def get(self, path: str, bytes_max: int = BYTES_MAX, *, stays: bool = False) -> WholeAnswer:
        """The body is b"" for another status than 200. Raises HttpError, also when the time is over.

        stays : the connection is left open until another one is: its end tells at once that the process has ended
        """
        opening = self._client.opening("GET", path, self._headers if stays else self._headers_once)
        response = self._client.ask(opening, None, None, fresh=True)
        try:
            async with asyncio.timeout(self._get_s):
                await response.head()
                if is_packed(response.headers):
                    raise HttpError(f"{path} has a content-encoding that was not asked for")
                body = await response.read(bytes_max) if response.status == 200 else b""
                return WholeAnswer(response.status, response.headers, body)
        except TimeoutError:
            late = "probe" if response.connection is not None else ""
            raise HttpError(f"{path} did not come within {self._get_s:g} s, see --probe-s", late=late) from None
        finally:
            response.close()

    async def first(self, readers: tuple[tuple[str, Reader], ...]) -> Told | None:
        """What is told at the first of these paths that tells something."""
        for path, reader in readers:
            if path in self.lacking:
                continue
            try:
                answer = await self.get(path)
            except HttpError:
                continue
            if answer.status != 200:
                self.lacks(path, answer.status)
            elif (told := reader(answer.body)) is not None:
                return told
            elif path != METRICS_PATH:  # metrics may come with the first request
                self.lacking.add(path)
        return None

    def lacks(self, path: str, status: int, level: int = logging.DEBUG) -> bool:
        """Whether a status means that the engine says nothing at a path. Such a path is asked for no more."""
        if not (300 <= status < 500 or status == 501):
            return False
        if status not in MOMENTARY:
            self.lacking.add(path)
            level = level if status in ABSENT else logging.INFO
            log.log(level, "engine %s: %s answers %d, and is asked for no more", self._name, path, status)
        return True

    async def close(self) -> None:
        await self._client.close()


class Prober:
    """Probes an engine.

    path         where the engine says whether it is healthy; HEALTH_PATH: where its dialect has it
    slots        learns the engine's slots from what it tells; None: they are set
    by_priority  whether the engine is to start requests by the field `priority`
    dialect      of the engine; None: to be recognised
    sign         of a turn as the field `priority`; 0: the engine has no such field
    """

    def __init__(
        self,
        name: str,
        gets: Gets,
        *,
        path: str = HEALTH_PATH,
        slots: SlotsLearner | None = None,
        by_priority: bool = False,
        dialect: Dialect | None = None,
    ) -> None:
        self.sign = 1
        self._name = name
        self._gets = gets
        self._path = path
        self._slots = slots
        self._by_priority = by_priority
        self._dialect = dialect
        self._known: _Known | None = None  # None: another program may answer next
        self._paths_tries = 0  # to read the description of its endpoints, which brought none
        self._not_served: list[str] = []  # the ids of the last list that cannot be served

    def forget(self) -> None:
        """Forget what is known of the program behind the URL: another one may answer next."""
        self._known, self._paths_tries = None, 0
        self._gets.lacking.clear()

    def look_again(self) -> None:
        """Ask for the program's settings at the next probe: it may have been restarted."""
        self._gets.lacking.clear()
        if self._known is not None:
            self._known.read_s = -SETTINGS_S

    async def probe(self) -> Health:
        """Raises EngineError when the engine is not healthy, and HttpError when it gives no answer."""
        answer = await self._gets.get(MODELS_PATH, LIST_BYTES_MAX, stays=True)
        if answer.status != 200:
            code = "engine_auth" if answer.status in (401, 403) else None
            raise EngineError(f"engine {self._name}: {MODELS_PATH} answers {answer.status}", code=code)
        # In a thread, since a long list that is no proper JSON takes long.
        large = len(answer.body) > SCANNED_BYTES_MAX
        listed = await asyncio.to_thread(models_of, answer.body) if large else models_of(answer.body)
        if listed is None:
            begin = printable(answer.body[:SHOWN_BYTES].decode(errors="replace"))
            raise EngineError(f"engine {self._name}: {MODELS_PATH} is not a list of models, but begins with {begin!r}")
        served = self._served(listed.models)
        server = answer.headers.get(b"server", b"").decode("latin-1").lower()
        known = await self._know(served, listed.listing(server))
        if known is None:
            return self._health(_Known(served, UNKNOWN, NOTHING_TOLD, None, 0.0), NOTHING_TOLD)
        await self._check_health(known.dialect)
        told = Told(loaded=listed.loaded)
        if (load := await self._gets.first(known.dialect.load)) is not None:
            told = load.over(told)
            known.cache = Told(tokens_max=load.tokens_max, prefix_cache=load.prefix_cache)
        told = told.over(known.cache).over(known.settings)
        self._check_priority(known.dialect, told)
        return self._health(known, told)

    def _health(self, known: _Known, told: Told) -> Health:
        served, context = known.served, told.context_tokens
        if context is not None:
            served = tuple([model if model.context_tokens else model.in_context(context) for model in served])
        slots, found = None, True
        if self._slots is not None:
            self._slots.told(told)
            slots, found = self._slots.slots, self._slots.found
        program = Program(known.dialect, told.version)
        return Health(served, slots, told.tokens_max, found, known.paths, told.load_known, told, program)

    async def _know(self, served: tuple[ServedModel, ...], listing: Listing) -> _Known | None:
        """What is known of the program; None: the description of its endpoints is still to come.

        A server may take long to make its first description. Until then it is not asked about its health, which only
        the description tells to be costly.
        """
        known, now_s = self._known, asyncio.get_running_loop().time()
        if known is not None and known.served == served:
            if now_s >= known.read_s + SETTINGS_S:
                known.read_s = now_s
                settings = await self._gets.first(known.dialect.settings) or known.settings
                if settings != known.settings:
                    known.settings = settings
                    self._gets.lacking.clear()
            return known
        if known is not None:
            self._gets.lacking.clear()
        dialect, settings = await self._recognised(listing)
        paths = None
        if dialect is None or dialect.describes:
            try:
                paths = await self._read_paths()
            except HttpError:
                self._paths_tries += 1
                if self._paths_tries < PATHS_TRIES_MAX:
                    return None
        if dialect is None:
            dialect, settings = await self._recognised(listing.with_paths(paths))
        self._known, self._paths_tries = _Known(served, dialect or UNKNOWN, settings, paths, now_s), 0
        if self._by_priority and settings.warning:
            log.warning("engine %s is %s: %s", self._name, self._known.dialect.name, settings.warning)
        return self._known

    async def _recognised(self, listing: Listing) -> tuple[Dialect | None, Told]:
        """The program's dialect, and its settings; None: none that is known."""
        if self._dialect is not None:
            return self._dialect, await self._gets.first(self._dialect.settings) or NOTHING_TOLD
        for dialect in DIALECTS:
            if dialect.may_be(listing):
                settings = await self._gets.first(dialect.settings)
                if settings is not None or not dialect.confirmed:
                    return dialect, settings or NOTHING_TOLD
        return None, NOTHING_TOLD

    async def _read_paths(self) -> frozenset[str] | None:
        """The paths of the server's endpoints, from its OpenAPI description; None: it has none. Raises HttpError."""
        answer = await self._gets.get("/openapi.json", LIST_BYTES_MAX)
        try:
            return frozenset(msgspec.json.decode(answer.body, type=_OpenApi).paths) if answer.status == 200 else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _check_priority(self, dialect: Dialect, told: Told) -> None:
        """Raise EngineError if the engine is to start requests by priority, and does not."""
        priority = told.priority or dialect.priority
        if self._by_priority and priority is Priority.NONE:
            raise EngineError(
                f"engine {self._name} is {dialect.name}, whose scheduler does not go by priority: start it with one "
                "that does (SGLang: --enable-priority-scheduling), or this server without --engine-priority",
                code="engine_priority",
            )
        self.sign = SIGNS[priority]

    async def _check_health(self, dialect: Dialect) -> None:
        """Raise EngineError if the engine says that it is not healthy.

        A path that the engine lacks or does not show says nothing; then the list of models is enough.
        """
        path = dialect.health if self._path == HEALTH_PATH else self._path
        if path in self._gets.lacking or path in ("", MODELS_PATH):
            return
        status = (await self._gets.get(path)).status
        if status // 100 == 2 or self._gets.lacks(path, status, logging.INFO):
            return
        raise EngineError(f"engine {self._name} is not healthy: {path} answers {status}")

    def _served(self, models: tuple[ServedModel, ...]) -> tuple[ServedModel, ...]:
        """The models whose ids may stand in a line of the log; the others are named there, once.

        Some engines say of each model that it was created just now: the first time that they said counts.
        """
        created = {model.id: model.created for model in self._known.served} if self._known is not None else {}
        served, not_served = [], []
        for model in models:
            if 0 < len(model.id) <= MODEL_ID_CHARS_MAX and model.id.isprintable():
                served.append(msgspec.structs.replace(model, created=created.get(model.id, model.created)))
            else:
                not_served.append(model.id[: MODEL_ID_CHARS_MAX + 1])
        if not_served and not_served != self._not_served:
            shown = ", ".join([repr(id_) for id_ in not_served[:NOT_SERVED_SHOWN]])
            text = "engine %s: %d models are not served, whose ids are not printable or longer than %d characters: %s"
            log.warning(text, self._name, len(not_served), MODEL_ID_CHARS_MAX, shown)
        self._not_served = not_served
        return tuple(served)

    async def close(self) -> None:
        await self._gets.close()
