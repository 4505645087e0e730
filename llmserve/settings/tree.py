"""The settings of `llmserve serve`: a tree of frozen structs, with a section for each table of the TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError
from llmserve.runtime.logs import LogFormat
from llmserve.settings.deadlines import DefaultDeadlines
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.jobs import JobsConfig
from llmserve.settings.load import shown
from llmserve.settings.policies import SchedulingConfig

WORKER = re.compile(r"[\w.-]+", re.ASCII)
PATH = re.compile(r"/[!-~]*")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server listens, and for which clients"""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free port")] = 8000
    api_key_file: Annotated[
        str | None,
        Meta(
            description="file of keys: `name: key` lines, or a *.toml file. Each key may have limits, a weight and "
            "budgets there. Without the file no key is required"
        ),
    ] = None
    door_key_file: Annotated[
        str | None,
        Meta(
            description="file with the key of doors, servers with --engines-are-groups: who has this key says whose "
            "requests these are. Without --api-key-file only doors are served"
        ),
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="file with the key of /admin. Without the file /admin is disabled")
    ] = None
    anonymous: Annotated[bool, Meta(description="listen beyond loopback without requiring a key")] = False
    cors_origin: Annotated[
        tuple[str, ...],
        Meta(
            description="origin whose pages may call the server from a browser, such as https://chat.example.com; *: "
            "every origin; repeat for several (default: none)",
            extra={"metavar": "ORIGIN"},
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        Meta(
            description="name under which clients reach a server that listens on loopback without keys, such as "
            "chat.example.com behind a proxy; *: any; repeat for several. Addresses, names without a dot and names of "
            "local networks (.local, .internal) need none: other names could be a web page's, which calls the server "
            "from a browser on the same machine (default: none)",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    trusted_proxy: Annotated[
        tuple[str, ...],
        Meta(
            description="address or network of a proxy in front of the server, such as 10.0.0.0/8, whose "
            "X-Forwarded-For says who the client is: for --fair-by address, and for the shares of the buffers; repeat "
            "for several (default: none)",
            extra={"metavar": "ADDRESS"},
        ),
    ] = ()
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="a second port, on which /metrics, /health and /ready answer without a key (default: none; "
            "with --api-key-file, /metrics and the engines of /ready need a key on the port of clients)"
        ),
    ] = None
    metrics_host: Annotated[str | None, Meta(description="address of --metrics-port (default: 127.0.0.1)")] = None
    drain_s: Annotated[float, Meta(ge=0, description="how long a stop waits for running requests")] = 30.0
    journal: Annotated[
        str | None, Meta(description="file for every scheduling step, as JSON lines. A file that exists is continued")
    ] = None
    state: Annotated[
        str | None,
        Meta(
            description="folder in which what was learnt is kept for the next start, and written every minute and at "
            "the end: lengths under hashes of prompts, sums of what a predictor knows of them, which key has asked for "
            "which response of /v1/responses, no text of a prompt or an answer (default: none is kept)",
            extra={"metavar": "DIR"},
        ),
    ] = None
    usage_file: Annotated[
        str | None,
        Meta(
            description="SQLite file that keeps what keys have spent of their budgets; several servers may share one "
            "(default: usage.sqlite in the folder of --state)"
        ),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level to log")] = "info"
    log_format: Annotated[
        LogFormat, Meta(description="lines of the log on standard error: text, or a JSON object each")
    ] = "text"
    traces_sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the requests whose spans are sent by OTLP to OTEL_EXPORTER_OTLP_ENDPOINT; the flag "
            "of a client's `traceparent` decides for its request. 0: no request is traced. Needs the extra `traces`",
        ),
    ] = 0.0
    access_log: Annotated[
        bool,
        Meta(
            description="log each request when it ends: status, milliseconds, request id, key, model, engine, tokens; "
            "never a prompt, an answer or a key's value"
        ),
    ] = False


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that run the requests"""

    engine: Annotated[
        tuple[str, ...],
        Meta(
            description="URL of an OpenAI-compatible server, `vllm` (llmserve starts one for each GPU) or `embedded` "
            "(a small model on the CPU); repeat for several. Engines with the same WORKER before their URLs share a "
            "GPU: with --barrier only one of them runs a batch at a time (default: embedded)",
            extra={"metavar": "[WORKER=]URL"},
        ),
    ] = ()
    model: Annotated[
        str | None,
        Meta(
            description="embedded (default: the demo model), vllm: model folder or hub id; URLs: serve only this model"
        ),
    ] = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="vLLM servers that llmserve starts (default: as many as the GPUs allow, or 1)"),
    ] = None
    slots: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that each refill engine runs at once (default: read from the engine)"),
    ] = None
    look_ahead: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="requests sent to a refill engine beyond its slots, to hide the network delay (default: 2; "
            "8 if the engine goes by priority)"
        ),
    ] = None
    engine_priority: Annotated[
        bool,
        Meta(
            description="URL engines start waiting requests by the field `priority` (vLLM with --scheduling-policy "
            "priority): each request carries its turn, so that the engine keeps the order. vLLM that llmserve starts "
            "does so unless its arguments say otherwise"
        ),
    ] = False
    engines_are_groups: Annotated[
        bool,
        Meta(
            description="URL engines are servers of llmserve with --door-key-file, whose key is --engine-api-key: this "
            "server is a door. It checks keys and limits, and tells the group's server who asks"
        ),
    ] = False
    barrier: Annotated[
        bool, Meta(description="URL and vllm engines run each batch to its end (static batching), without refill")
    ] = False
    alias: Annotated[
        tuple[str, ...],
        Meta(
            description="another name of a model; repeat for several names, and to give a name several models: the "
            "first whose engine is up gets the request. A name may be a model's own, to give it fallbacks",
            extra={"metavar": "NAME=MODEL"},
        ),
    ] = ()
    engine_args: Annotated[
        tuple[str, ...],
        Meta(description="arguments for vLLM; on the command line: all words after `--`", extra={"flag": False}),
    ] = ()
    engine_python: Annotated[
        str | None, Meta(description="Python interpreter of vLLM's environment (default: the one of llmserve)")
    ] = None
    engine_log_folder: Annotated[
        str | None,
        Meta(
            description="folder for the logs of vLLM started by llmserve, vllm-0.log, ... (default: $XDG_STATE_HOME/"
            "llmserve/PORT, or ~/.local/state/llmserve/PORT)"
        ),
    ] = None
    engine_api_key: Annotated[str | None, Meta(description="bearer key for URL engines; better in the environment")] = (
        None
    )
    plan: Annotated[
        str | None,
        Meta(
            description="file of `llmserve plan`: groups of workers, with their models and streams. With --group, this "
            "is the server of one of them. With --engines-are-groups, this is their door, and the engine NAME=URL is "
            "the server of the group NAME. `llmserve up` starts them all"
        ),
    ] = None
    group: Annotated[
        str | None,
        Meta(
            description="serve only one group of --plan: its models, on its workers in the plan, or else on the "
            "workers of no group; `fallback` is the group of all models and workers that the plan does not name"
        ),
    ] = None
    engine_connect_s: Annotated[float, Meta(gt=0, description="longest wait for a connection to an engine")] = 5.0
    engine_idle_s: Annotated[
        float, Meta(gt=0, description="longest silence of an engine inside a stream; comments and pings are silence")
    ] = 600.0
    engine_answer_s: Annotated[
        float, Meta(gt=0, description="longest time of an answer, from the request to the last byte")
    ] = 3600.0
    engine_answer_bytes_max: Annotated[
        int, Meta(ge=1, description="largest answer that is not streamed, bytes: it is in memory until it is complete")
    ] = 64 << 20
    engine_start_s: Annotated[float, Meta(gt=0, description="longest start of an engine's process")] = 600.0

    @property
    def has_vllm(self) -> bool:
        return "vllm" in self.engine

    @property
    def has_embedded(self) -> bool:
        return not self.engine or "embedded" in self.engine

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url for _, url in self.placed_urls)

    @property
    def placed_urls(self) -> tuple[tuple[str, str], ...]:
        """(worker, URL) of each engine by URL; worker "": the engine shares its GPU or CPU with no other engine."""
        return tuple(_placed(entry) for entry in self.engine if entry not in ("vllm", "embedded"))

    def check(self) -> None:
        """Raise ConfigError on settings that contradict each other."""
        for worker, url in self.placed_urls:
            if url in ("", "vllm", "embedded"):
                raise ConfigError(f"engine: only a URL can have a worker, not {worker}={url}")
            if worker == "embedded" and self.has_embedded and not self.barrier:
                raise ConfigError(
                    "engine: the worker `embedded` runs each batch to its end, but the slots of a URL refill, so they "
                    "cannot share a worker. Give --barrier, or another name for the worker"
                )
        if len(set(self.engine)) < len(self.engine):
            raise ConfigError("engine: the same server is given twice")
        if self.has_vllm and self.model is None:
            raise ConfigError("engine vllm needs --model FOLDER_OR_HUB_ID")
        if self.engines_are_groups and (self.barrier or len(self.urls) < len(self.engine or ("embedded",))):
            raise ConfigError("engines_are_groups: only URLs can be groups, without --barrier")
        for name in ("replicas", "engine_args", "engine_python", "engine_log_folder"):
            if getattr(self, name) and not self.has_vllm:
                raise ConfigError(f"{name}: only for vLLM that llmserve starts, --engine vllm")
        aliases_of(self.alias)
        self._check_plan()

    def _check_plan(self) -> None:
        if self.group is not None and self.plan is None:
            raise ConfigError("group has no effect without --plan")
        if self.plan is not None and (self.group is None) != self.engines_are_groups:
            raise ConfigError(
                "plan: a server has one group. Give --group (or --engines-are-groups, to a door), or start all groups "
                "with `llmserve up CLUSTER.toml --plan PLAN.json`"
            )


def _placed(entry: str) -> tuple[str, str]:
    """Split WORKER=URL. A worker's name cannot contain `:` or `/`, so a `=` inside a URL is no separator."""
    worker, separator, url = entry.partition("=")
    return (worker, url) if separator and WORKER.fullmatch(worker) else ("", entry)


def aliases_of(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The models behind each name, in the order given. Raises ConfigError."""
    aliases: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, model = text.partition("=")
        if not name or not model:
            raise ConfigError(f"alias: {text!r} is not NAME=MODEL")
        if model in aliases.get(name, ()):
            raise ConfigError(f"alias: {text!r} is given twice")
        aliases[name] = (*aliases.get(name, ()), model)
    return aliases


class PredictorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of answer lengths"""

    predictor: Annotated[
        tuple[str, ...],
        Meta(
            description="folder of a trained length predictor, or `none`: lengths are predicted from earlier answers. "
            "The prefix model:ID= limits the predictor to one model; repeat for several (default: the demo predictor "
            "with the demo model, else none)",
            extra={"metavar": "[model:ID=]FOLDER"},
        ),
    ] = ()
    predictor_budget_s: Annotated[
        float,
        Meta(gt=0, description="longest wait for a prediction; then the length is predicted from earlier answers"),
    ] = 1.0
    predictor_threads: Annotated[int, Meta(ge=1, description="CPU threads of the predictor's process")] = 1
    memory_keys: Annotated[
        int,
        Meta(
            ge=0,
            description="templates and applications whose recent answer lengths are remembered; 0: none, and the words "
            "of prompts teach nothing",
        ),
    ] = 10_000
    record: Annotated[
        str | None,
        Meta(
            description="file to which prompts and answer lengths are appended, to train a predictor. The file has "
            "JSON lines with the parameters of each request, and never an answer"
        ),
    ] = None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of requests and keys"""

    body_bytes_max: Annotated[int, Meta(ge=1, description="largest request body, bytes, also when unpacked")] = 16 << 20
    buffers_bytes_max: Annotated[
        int,
        Meta(
            ge=1,
            description="bytes of requests and unread answers in memory. A key (without keys, an address) has at most "
            "as many as are still free: its further bodies get status 503",
        ),
    ] = 1 << 30
    prompt_chars_max: Annotated[int, Meta(ge=1, description="longest prompt, characters")] = 1_000_000
    choices_max: Annotated[
        int, Meta(ge=1, description="most answers of one request: `n` times the number of its prompts")
    ] = 128
    messages_max: Annotated[
        int, Meta(ge=1, description="most messages, and most parts of their contents, of one request")
    ] = 8192
    tools_max: Annotated[int, Meta(ge=1, description="most tools of one request")] = 1024
    stops_max: Annotated[int, Meta(ge=1, description="most stop strings of one request")] = 64
    concurrent_max: Annotated[int, Meta(ge=0, description="requests in progress per API key; 0: no limit")] = 0
    requests_per_minute_max: Annotated[int, Meta(ge=0, description="requests per minute and API key; 0: no limit")] = 0
    fair_by: Annotated[
        Literal["key", "stream", "address", "none"] | None,
        Meta(
            description="who gets equal shares of the engines while requests wait, by tokens of prompts and answers: "
            "each API key, stream or client address (default: key with --api-key-file, else none)"
        ),
    ] = None
    tokens_per_minute_max: Annotated[
        int,
        Meta(ge=0, description="tokens of prompts and answers per minute and API key; 0: no limit"),
    ] = 0
    limits_part: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="part of the keys' limits that this server may use at first, where several servers share the "
            "keys: `llmserve up` sets it, and deals the parts anew each second",
        ),
    ] = 1.0
    slo_ms: Annotated[
        tuple[str, ...],
        Meta(
            description="default deadline of a request, milliseconds after its arrival. `MS`, `model:ID=MS`, "
            "`stream:NAME=MS` or `key:NAME=MS`; key wins over stream, stream over model, model over plain `MS`; repeat "
            "for several. With keys, a stream that a client names is KEY/NAME",
            extra={"metavar": "[model:ID=|stream:NAME=|key:NAME=]MS"},
        ),
    ] = ()

    def __post_init__(self) -> None:
        DefaultDeadlines(self.slo_ms)


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Health probes of engines, and limits for slow clients"""

    probes_failed_max: Annotated[
        int, Meta(ge=1, description="failed health probes in a row after which an engine counts as lost")
    ] = 3
    probe_every_s: Annotated[float, Meta(gt=0, description="interval between two health probes of an engine")] = 2.0
    probe_s: Annotated[
        float,
        Meta(
            gt=0,
            description="longest wait for an answer to a probe. An engine that goes on with its answers is not lost "
            "because its probes are late",
        ),
    ] = 5.0
    probe_path: Annotated[
        str,
        Meta(
            description="where engines by URL say whether they are healthy. Where the path is missing or refused, "
            "GET /v1/models is enough, and `/v1/models` asks for nothing else",
            extra={"metavar": "PATH"},
        ),
    ] = "/health"
    memory_bound: Annotated[
        bool,
        Meta(description="delay requests that do not fit into an engine's KV cache, if its size is known"),
    ] = True
    buffer_bytes_max: Annotated[
        int, Meta(ge=1, description="bytes buffered for a slow client, before its engine is slowed down")
    ] = 8 << 20
    client_stall_s: Annotated[
        float, Meta(gt=0, description="longest time in which a client may read nothing of its answer")
    ] = 60.0
    keep_alive_s: Annotated[
        float,
        Meta(
            ge=0,
            description="silence in a stream after which the client gets a comment that says how long it will wait, on "
            "/v1/messages and /v1/responses also an event, so that neither a proxy nor the client cuts the connection; "
            "the status is then 200, and later errors are events. 0: none",
        ),
    ] = 15.0

    def __post_init__(self) -> None:
        if PATH.fullmatch(self.probe_path) is None:
            raise ConfigError(f"probe_path: {self.probe_path!r} is not a path such as /health")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server."""

    server: ServerConfig = ServerConfig()
    engines: EngineConfig = EngineConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    dispatch: DispatchConfig = DispatchConfig()
    prediction: PredictorConfig = PredictorConfig()
    limits: ApiConfig = ApiConfig()
    live: LiveConfig = LiveConfig()
    jobs: JobsConfig = JobsConfig()

    @property
    def barrier(self) -> bool:
        """Whether engines run batches to their end; true also for a mix with refill engines."""
        return self.engines.barrier or self.engines.has_embedded

    def resolved(self) -> Config:
        """Fill in the defaults that depend on the engines. Raises ConfigError on contradictions among the engines."""
        self.engines.check()
        return msgspec.structs.replace(self, scheduling=self.scheduling.resolved(self.barrier))

    def shown(self, origin: Mapping[str, str]) -> str:
        """Return all settings as TOML, see config.shown, with the defaults that depend on the engines."""
        scheduling = self.scheduling.resolved(self.barrier)
        kind = "engines that run batches to their end" if self.barrier else "engines whose slots refill"
        names = [name for name in scheduling.__struct_fields__ if getattr(self.scheduling, name) is None]
        chosen = {name: f"default for {kind}" for name in names if getattr(scheduling, name) is not None}
        return shown(msgspec.structs.replace(self, scheduling=scheduling), {**chosen, **origin})


TITLES = {
    "server": "server",
    "engines": "engines",
    "scheduling": "scheduling",
    "dispatch": "dispatching by latency and energy",
    "prediction": "length prediction",
    "limits": "limits",
    "live": "timing",
    "jobs": "batch jobs",
}
"""Titles of the sections in the help."""
COMMON = {
    *("host", "port", "api_key_file", "admin_key_file", "anonymous", "journal", "log_level"),
    *("engine", "model", "replicas", "slots", "barrier", "plan"),
    *("release", "order", "batch_size", "bins", "queue_requests_max"),
    *("profile", "energy_weight", "latency_target_s"),
    *("predictor", "record"),
    *("slo_ms", "concurrent_max", "requests_per_minute_max"),
}
"""Settings that `serve --help` shows."""
