"""The dialects of engines: how each kind is recognised, what it tells of itself, and what it makes of added fields.

An entry is data and small pure functions. The probe (probing.py) asks what the entry names. First, GET /v1/models,
which every engine answers, names most kinds by the owner of their models. An engine's settings are asked for once its
kind is known, and again now and then; its load is asked for at each probe. No entry names a path that generates, costs
money, or uses up what an operator wants to read.

The facts are those of the versions named as `source`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache

import msgspec

from llmserve.wire.event_stream import Count
from llmserve.wire.lenient_json import read

COUNT_MAX = 1 << 31  # of requests
TOKENS_MAX = 1 << 40

MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
ALIVE_PATH = "/health/liveliness"  # of LiteLLM, whose /health has every model generate an answer
METRICS_PATH = "/metrics"


class Priority(Enum):
    """What an engine makes of a request's field `priority`."""

    LOWER_FIRST = "lower first"
    HIGHER_FIRST = "higher first"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine says of itself; None: it does not say.

    version     as it says it; "" for unknown
    slots       requests that it runs at once, by its own settings
    running     requests that run in it now
    waiting     requests that wait in it now
    started_s   when its process started, on its own clock
    tokens_max  capacity of its KV cache, in tokens
    prefix_cache  whether it keeps prompts there for the next that begin so
    context_tokens  of each of its models: longer requests are refused
    loaded      ids of the models in its memory
    models_at_once  models that it has there at once, at most; 0: as many as it serves
    priority    what its scheduler makes of the field `priority`, by its own settings
    warning     what its operator should know who has it start requests by priority
    """

    version: str = ""
    slots: int | None = None
    running: int | None = None
    waiting: int | None = None
    started_s: float | None = None
    tokens_max: int | None = None
    prefix_cache: bool | None = None
    context_tokens: int | None = None
    loaded: tuple[str, ...] | None = None
    models_at_once: int | None = None
    priority: Priority | None = None
    warning: str = ""

    def over(self, other: Told) -> Told:
        """This, and where it says nothing, what the other says."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in told.items() if value not in (None, "")})

    @property
    def load_known(self) -> bool:
        return self.running is not None and self.waiting is not None


NOTHING_TOLD = Told()


@dataclass(frozen=True, slots=True)
class Listing:
    """What is known of an engine before it is recognised.

    owners  (id, owner) of its models; owner "": not told
    router  some model has a state: loaded, or not
    server  the head `Server`
    paths   of its OpenAPI description; None: not read
    """

    owners: tuple[tuple[str, str], ...]
    router: bool = False
    server: str = ""
    paths: frozenset[str] | None = None

    def owned_by(self, name: str) -> bool:
        return bool(self.owners) and all(owner == name for _, owner in self.owners)

    def with_paths(self, paths: frozenset[str] | None) -> Listing:
        return replace(self, paths=paths)


Reader = Callable[[bytes], Told | None]
"""Reads an answer of status 200. None: it is none of this dialect."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is known of a kind of engine.

    source        the version whose documentation or source says so; "" for none
    owner         of its models, in its list of models
    recognises    whether an engine may be of this kind, where its owner does not say so
    settings      GETs that tell its version and settings: the first that answers counts
    load          GETs that tell its load, likewise
    confirmed     only an answer of `settings` makes sure that it is one
    health        where it says whether it is healthy; "": the list of models is enough
    describes     whether it has a description of its endpoints
    priority      what it makes of the field `priority`; None: as its backends do, or as it was started
    swaps_models  whether it loads the model of a request, if need be instead of another
    """

    name: str
    source: str = ""
    owner: str = ""
    recognises: Callable[[Listing], bool] | None = None
    settings: tuple[tuple[str, Reader], ...] = ()
    load: tuple[tuple[str, Reader], ...] = ()
    confirmed: bool = False
    health: str = HEALTH_PATH
    describes: bool = True
    priority: Priority | None = Priority.NONE
    swaps_models: bool = False

    def may_be(self, listing: Listing) -> bool:
        if self.owner and listing.owned_by(self.owner):
            return True
        return self.recognises is not None and self.recognises(listing)


@dataclass(frozen=True, slots=True)
class Program:
    """The program behind an engine's URL. version : "" for unknown"""

    dialect: Dialect
    version: str = ""

    def __str__(self) -> str:
        return f"{self.dialect.name} {self.version}".rstrip()


# ---- metrics in the text of Prometheus ------------------------------------------------------------------------------


@cache
def _rows(name: str) -> re.Pattern[str]:
    return re.compile(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)(?: \d+)?\r?$", re.M)


BY_PRIORITY = re.compile(r'\bpriority="[^"]')  # SGLang repeats its counts for each priority


def total(name: str, text: str) -> int | None:
    """The sum of a gauge over its labels, such as the ranks of an engine; 0 without any.

    None: it is no count, but negative, not finite, absurd, or no number at all.
    """
    rows = [value for labels, value in _rows(name).findall(text) if BY_PRIORITY.search(labels) is None]
    try:
        counts = [float(value) for value in rows]
    except ValueError:
        return None
    return int(sum(counts)) if sum(counts) <= COUNT_MAX and min(counts, default=0.0) >= 0 else None  # NaN is not <=


STARTED = re.compile(r"^process_start_time_seconds (\d[\d.e+]{0,30})\r?$", re.M)


def started_s(text: str) -> float | None:
    """When the process started that shows these metrics; None: the metrics do not say."""
    said = STARTED.search(text)
    try:
        return float(said[1]) if said is not None else None
    except ValueError:
        return None


def gauges(running: str, waiting: str) -> Reader:
    """A reader of metrics with these names. An engine that has served nothing yet may not show what waits."""

    def read_gauges(body: bytes) -> Told | None:
        text = body.decode(errors="replace")
        if _rows(running).search(text) is None:
            return None
        runs, waits = total(running, text), total(waiting, text)
        if runs is None or waits is None:
            return None
        return Told(running=runs, waiting=waits, started_s=started_s(text))

    return read_gauges


VLLM_LOAD = gauges("vllm:num_requests_running", "vllm:num_requests_waiting")
VLLM_CACHE = "vllm:cache_config_info"
CACHE_TOKENS = re.compile(r'\bkv_cache_size_tokens="(\d{1,15})"')
BLOCKS = re.compile(r'\bnum_gpu_blocks="(\d{1,15})"')  # older versions have blocks instead of tokens
NO_PREFIXES = 'enable_prefix_caching="False"'
BLOCK_SIZE = re.compile(r'\bblock_size="(\d{1,15})"')


def vllm_metrics(body: bytes) -> Told | None:
    """With sums over the data-parallel ranks. A cache of no size, or of an absurd one, is unknown."""
    told = VLLM_LOAD(body)
    if told is None:
        return None
    rows = _rows(VLLM_CACHE).findall(body.decode(errors="replace"))
    tokens = sum(_cache_tokens(labels) for labels, _ in rows)
    off = any(NO_PREFIXES in labels for labels, _ in rows)
    return replace(told, tokens_max=tokens if 0 < tokens <= TOKENS_MAX else None, prefix_cache=False if off else None)


def _cache_tokens(labels: str) -> int:
    """Return the cache capacity in tokens; 0 if the labels have none."""
    tokens, blocks, size = (pattern.search(labels) for pattern in (CACHE_TOKENS, BLOCKS, BLOCK_SIZE))
    if tokens is not None:
        return int(tokens[1])
    return int(blocks[1]) * int(size[1]) if blocks is not None and size is not None else 0


SGLANG_METRICS = gauges("sglang:num_running_reqs", "sglang:num_queue_reqs")
LLAMA_METRICS = gauges("llamacpp:requests_processing", "llamacpp:requests_deferred")
LMDEPLOY_METRICS = gauges("lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting")
TGI_METRICS = gauges("tgi_batch_current_size", "tgi_queue_size")
ANY_METRICS = (vllm_metrics, SGLANG_METRICS, LLAMA_METRICS, LMDEPLOY_METRICS, TGI_METRICS)


def any_metrics(body: bytes) -> Told | None:
    """Metrics of any kind: a proxy may hide what is behind it, and show its metrics."""
    return next((told for reader in ANY_METRICS if (told := reader(body)) is not None), None)


# ---- JSON -----------------------------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    version: str


def version(body: bytes) -> Told | None:
    said = read(_Version, body)
    return Told(version=said.version) if said is not None else None


class _SglangState(msgspec.Struct):
    effective_max_running_requests_per_dp: Count | None = None


class _SglangInfo(msgspec.Struct):
    version: str
    max_total_num_tokens: Count | None = None
    max_running_requests: Count | None = None
    enable_priority_scheduling: bool | None = None
    disable_priority_preemption: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    disable_radix_cache: bool | None = None
    internal_states: list[_SglangState] | None = None


SGLANG_PREEMPTS = (
    "it stops running requests for ones of higher priority, and prefills them again: --disable-priority-preemption "
    "keeps it from that"
)


def sglang_info(body: bytes) -> Told | None:
    """The arguments of the server, and its scheduler's state, for each data-parallel rank."""
    said = read(_SglangInfo, body)
    if said is None:
        return None
    states = said.internal_states or []
    slots = sum([state.effective_max_running_requests_per_dp or 0 for state in states]) or said.max_running_requests
    priority = Priority.NONE
    if said.enable_priority_scheduling:
        priority = Priority.LOWER_FIRST if said.schedule_low_priority_values_first else Priority.HIGHER_FIRST
    return Told(
        version=said.version,
        slots=slots or None,
        tokens_max=(said.max_total_num_tokens or 0) * max(1, len(states)) or None,
        prefix_cache=False if said.disable_radix_cache else None,
        priority=priority,
        warning=SGLANG_PREEMPTS if priority is not Priority.NONE and not said.disable_priority_preemption else "",
    )


class _SglangLoad(msgspec.Struct):
    num_running_reqs: Count
    num_waiting_reqs: Count


class _SglangLoads(msgspec.Struct):
    loads: list[_SglangLoad]


def sglang_loads(body: bytes) -> Told | None:
    said = read(_SglangLoads, body)
    if said is None or not said.loads:
        return None
    running = sum([load.num_running_reqs for load in said.loads])
    return Told(running=running, waiting=sum([load.num_waiting_reqs for load in said.loads]))


class _LlamaSettings(msgspec.Struct):
    n_ctx: Count | None = None


class _LlamaProps(msgspec.Struct):
    default_generation_settings: _LlamaSettings
    total_slots: Count | None = None
    build_info: str = ""
    max_instances: Count | None = None


def llama_props(body: bytes) -> Told | None:
    """n_ctx : of each slot. A router has no slots of its own; max_instances : of models that it runs at once."""
    said = read(_LlamaProps, body)
    if said is None:
        return None
    context = said.default_generation_settings.n_ctx
    return Told(
        said.build_info.partition("-")[0],
        slots=said.total_slots or None,
        context_tokens=context or None,
        models_at_once=said.max_instances,
    )


class _LlamaSlot(msgspec.Struct):
    is_processing: bool


class _LlamaSlots(msgspec.Struct):
    slots: list[_LlamaSlot]


def llama_slots(body: bytes) -> Told | None:
    """What waits is not told."""
    said = read(_LlamaSlots, b'{"slots":%b}' % body)
    if said is None or not said.slots:
        return None
    return Told(slots=len(said.slots), running=sum([slot.is_processing for slot in said.slots]))


class _Loaded(msgspec.Struct):
    name: str = ""
    model: str = ""


class _OllamaProcesses(msgspec.Struct):
    models: list[_Loaded]


def ollama_processes(body: bytes) -> Told | None:
    said = read(_OllamaProcesses, body)
    return Told(loaded=_ids(said.models)) if said is not None else None


class _SwapRunning(msgspec.Struct):
    running: list[_Loaded]


def swap_running(body: bytes) -> Told | None:
    said = read(_SwapRunning, body)
    return Told(loaded=_ids(said.running)) if said is not None else None


def _ids(models: Iterable[_Loaded]) -> tuple[str, ...]:
    return tuple([model.model or model.name for model in models])


class _StudioModel(msgspec.Struct):
    id: str
    state: str = ""


class _StudioModels(msgspec.Struct):
    data: list[_StudioModel]


def studio_models(body: bytes) -> Told | None:
    said = read(_StudioModels, body)
    return Told(loaded=tuple([each.id for each in said.data if each.state == "loaded"])) if said is not None else None


class _TgiInfo(msgspec.Struct):
    router: str
    version: str = ""
    max_total_tokens: Count | None = None


def tgi_info(body: bytes) -> Told | None:
    said = read(_TgiInfo, body)
    if said is None or "text-generation" not in said.router:
        return None
    return Told(version=said.version, context_tokens=said.max_total_tokens or None)


class _LitellmReadiness(msgspec.Struct):
    litellm_version: str


def litellm_readiness(body: bytes) -> Told | None:
    said = read(_LitellmReadiness, body)
    return Told(version=said.litellm_version) if said is not None else None


# ---- the table ------------------------------------------------------------------------------------------------------


def _is_llmserve(listing: Listing) -> bool:
    """the head `server: llmserve` of its list"""
    return listing.server.startswith("llmserve")


def _is_llama_router(listing: Listing) -> bool:
    """models of `llamacpp`, of which some say whether they are loaded"""
    return listing.owned_by("llamacpp") and listing.router


def _is_llama(listing: Listing) -> bool:
    """the head `server: llama.cpp`"""
    return listing.server == "llama.cpp"


def _is_ollama(listing: Listing) -> bool:
    """ids with a tag, whose owner is the id's name space or `library`"""

    def owns(id_: str, owner: str) -> bool:
        *spaces, name = id_.split("/")
        return ":" in name and owner == (spaces[-1] if spaces else "library")

    return bool(listing.owners) and all(owns(id_, owner) for id_, owner in listing.owners)


def _is_tgi(listing: Listing) -> bool:
    """models that are their own owners"""
    return bool(listing.owners) and all(id_ == owner for id_, owner in listing.owners)


def _is_litellm(listing: Listing) -> bool:
    """`/health/liveliness` in its description"""
    return listing.paths is not None and ALIVE_PATH in listing.paths


LLMSERVE = Dialect(
    "llmserve",
    owner="llmserve",
    recognises=_is_llmserve,
)
VLLM = Dialect(
    "vLLM",
    source="0.32.0",
    owner="vllm",
    settings=(("/version", version),),
    load=((METRICS_PATH, vllm_metrics),),
    priority=Priority.LOWER_FIRST,  # with --scheduling-policy priority, which it does not tell
)
SGLANG = Dialect(
    "SGLang",
    source="0.5",
    owner="sglang",
    settings=(("/server_info", sglang_info), ("/get_server_info", sglang_info)),
    load=((METRICS_PATH, SGLANG_METRICS), ("/v1/loads", sglang_loads)),
    priority=Priority.HIGHER_FIRST,
)
LLAMA_ROUTER = Dialect(
    "llama.cpp's router",
    source="b11434",
    recognises=_is_llama_router,
    settings=(("/props", llama_props),),
    describes=False,
    swaps_models=True,
)
LLAMA = Dialect(
    "llama.cpp",
    source="b11434",
    owner="llamacpp",
    recognises=_is_llama,
    settings=(("/props", llama_props),),
    load=((METRICS_PATH, LLAMA_METRICS), ("/slots", llama_slots)),
    describes=False,
)
LM_STUDIO = Dialect(
    "LM Studio",
    source="0.4",
    owner="organization_owner",
    # Every other GET is an error in its log, and is answered with 200.
    load=(("/api/v0/models", studio_models),),
    health="",
    describes=False,
    swaps_models=True,
)
LMDEPLOY = Dialect(
    "LMDeploy",
    source="0.16.0",
    owner="lmdeploy",
    load=((METRICS_PATH, LMDEPLOY_METRICS),),
)
TENSORRT_LLM = Dialect(
    "TensorRT-LLM",
    source="main of 2026",
    owner="tensorrt_llm",
    settings=(("/version", version),),
    # Its /metrics hands out each statistic once: the operator's own reader would miss what a probe takes.
)
LLAMA_SWAP = Dialect(
    "llama-swap",
    source="v99",
    owner="llama-swap",
    settings=(("/api/version", version),),
    load=(("/running", swap_running),),
    describes=False,
    priority=None,
    swaps_models=True,
)
OLLAMA = Dialect(
    "Ollama",
    source="0.33.0",
    recognises=_is_ollama,
    settings=(("/api/version", version),),
    load=(("/api/ps", ollama_processes),),
    confirmed=True,
    health="",
    describes=False,
    swaps_models=True,
)
TGI = Dialect(
    "TGI",
    source="3.3.7",
    recognises=_is_tgi,
    settings=(("/info", tgi_info),),
    load=((METRICS_PATH, TGI_METRICS),),
    confirmed=True,
    describes=False,
)
LITELLM = Dialect(
    "LiteLLM",
    recognises=_is_litellm,
    settings=(("/health/readiness", litellm_readiness),),
    health=ALIVE_PATH,
    priority=None,
)
UNKNOWN = Dialect(
    "OpenAI-compatible server",
    load=((METRICS_PATH, any_metrics),),
    priority=None,
)

DIALECTS = (
    *(LLMSERVE, VLLM, SGLANG, LLAMA_ROUTER, LLAMA, LM_STUDIO, LMDEPLOY, TENSORRT_LLM, LLAMA_SWAP),
    *(OLLAMA, TGI, LITELLM),
)
"""The known dialects, in the order in which they are tried; else an engine is UNKNOWN."""
UNKNOWN_PROGRAM = Program(UNKNOWN)
