"""The settings of `llmserve serve`: one frozen tree, a section for each table of the TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from llmserve.config import shown
from llmserve.deadline_settings import DefaultDeadlines
from llmserve.dispatch_config import DispatchConfig
from llmserve.errors import ConfigError
from llmserve.policies import SchedulingConfig

WORKER = re.compile(r"[\w.-]+", re.ASCII)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom it listens"""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    api_key_file: Annotated[
        str | None, Meta(description="file of `name: key` lines. Without it no key is asked for")
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="file with the key of /admin. Without it there is no /admin")
    ] = None
    anonymous: Annotated[bool, Meta(description="listen beyond loopback although no key is asked for")] = False
    drain_s: Annotated[float, Meta(ge=0, description="how long a stop waits for running requests")] = 30.0
    journal: Annotated[str | None, Meta(description="file that keeps every scheduling step, as JSON lines")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what is logged")] = "info"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs the requests"""

    engine: Annotated[
        tuple[str, ...],
        Meta(
            description="URL of an OpenAI-compatible server, `vllm` (started here, one for each GPU) or `embedded` (a "
            "small model on the CPU); repeat for several. Engines with the same WORKER before their URLs share a GPU: "
            "with --barrier they run one batch at a time between them (default: embedded)",
            extra={"metavar": "[WORKER=]URL"},
        ),
    ] = ()
    model: Annotated[
        str | None,
        Meta(description="embedded (default: the demo model), vllm: model folder or hub id; URLs: serve only this one"),
    ] = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="vLLM servers started here (default: as many as the GPUs allow, or 1)"),
    ] = None
    slots: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that each refill engine runs at once (default: read from the engine)"),
    ] = None
    look_ahead: Annotated[
        int, Meta(ge=0, description="requests sent to a refill engine beyond its slots, to hide the way there")
    ] = 2
    barrier: Annotated[
        bool, Meta(description="URL and vllm engines run one batch to its end (static batching), without refill")
    ] = False
    engine_args: Annotated[
        tuple[str, ...],
        Meta(description="arguments for vLLM; on the command line: all that follows `--`", extra={"flag": False}),
    ] = ()
    engine_python: Annotated[
        str | None, Meta(description="interpreter of the environment that vLLM is installed in (default: this one)")
    ] = None
    engine_log_folder: Annotated[
        str | None,
        Meta(
            description="folder for what vLLM started here says, vllm-0.log, ... (default: $XDG_STATE_HOME/llmserve/"
            "PORT, or ~/.local/state/llmserve/PORT)"
        ),
    ] = None
    engine_api_key: Annotated[str | None, Meta(description="bearer key for URL engines; better in the environment")] = (
        None
    )
    plan: Annotated[
        str | None,
        Meta(
            description="file of `llmserve plan`: groups of workers, and which models and streams they serve. The "
            "rest is the fallback group's. A group's `workers` names them (WORKER, or an engine's HOST:PORT); else it "
            "gets as many as its `gpus` of those that serve its models"
        ),
    ] = None
    plan_instance: Annotated[
        str | None, Meta(description="file of what the plan was made for, to plan anew by; with --replan-every-s")
    ] = None
    replan_every_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="group workers anew, this often at most, when arrivals are others than were planned for "
            "(default: never)"
        ),
    ] = None
    group: Annotated[
        str | None,
        Meta(
            description="serve one group of --plan, by itself: its models, on the engines of the workers that the plan "
            "names for it, or else names for no group; `fallback` has what no group names"
        ),
    ] = None
    engine_connect_s: Annotated[float, Meta(gt=0, description="longest wait for a connection to an engine")] = 5.0
    engine_idle_s: Annotated[float, Meta(gt=0, description="longest silence of an engine inside an answer")] = 600.0
    engine_start_s: Annotated[float, Meta(gt=0, description="longest start of an engine started here")] = 600.0

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
        """(worker, URL) of each; worker "": it has a GPU, or what else it runs on, for itself."""
        return tuple(_placed(entry) for entry in self.engine if entry not in ("vllm", "embedded"))

    def check(self) -> None:
        """Raises ConfigError on settings that contradict each other."""
        for worker, url in self.placed_urls:
            if url in ("", "vllm", "embedded"):
                raise ConfigError(f"engine: a worker is for a URL, not {worker}={url}")
            if worker == "embedded" and self.has_embedded and not self.barrier:
                raise ConfigError(
                    "engine: the worker embedded runs one batch to its end, and the slots of a URL refill: they cannot "
                    "share it. Give --barrier, or the worker another name"
                )
        if len(set(self.engine)) < len(self.engine):
            raise ConfigError("engine: the same server stands twice")
        if self.has_vllm and self.model is None:
            raise ConfigError("engine vllm needs --model FOLDER_OR_HUB_ID")
        for name in ("replicas", "engine_args", "engine_python", "engine_log_folder"):
            if getattr(self, name) and not self.has_vllm:
                raise ConfigError(f"{name}: only for vLLM started here, --engine vllm")
        self._check_plan()

    def _check_plan(self) -> None:
        for name in ("plan_instance", "replan_every_s", "group"):
            if getattr(self, name) and self.plan is None:
                raise ConfigError(f"{name} is of no use without --plan")
        if (self.plan_instance is None) != (self.replan_every_s is None):
            raise ConfigError("replan_every_s and plan_instance are of use only together")
        if self.group and self.replan_every_s:
            raise ConfigError("group does not go with replan_every_s")


def _placed(entry: str) -> tuple[str, str]:
    """A worker's name has no character that a URL's scheme ends with, so that a `=` inside a URL is none of ours."""
    worker, separator, url = entry.partition("=")
    return (worker, url) if separator and WORKER.fullmatch(worker) else ("", entry)


class PredictorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What predicts answer lengths"""

    predictor: Annotated[
        tuple[str, ...],
        Meta(
            description="folder of a trained length predictor, or `none`: answers are predicted from earlier ones. "
            "With model:ID= before it, for this model; repeat for several (default: the demo predictor with the demo "
            "model, else none)",
            extra={"metavar": "[model:ID=]FOLDER"},
        ),
    ] = ()
    predictor_budget_s: Annotated[
        float, Meta(gt=0, description="longest wait for a prediction; then earlier answers serve instead")
    ] = 1.0
    predictor_threads: Annotated[int, Meta(ge=1, description="of the predictor's process, on a CPU")] = 1
    memory_keys: Annotated[
        int, Meta(ge=0, description="templates and applications whose recent answer lengths are remembered; 0: none")
    ] = 10_000
    record: Annotated[
        str | None,
        Meta(
            description="file to which prompts and answer lengths are appended, to train a predictor on. It has JSON "
            "lines with the parameters of each request, and never an answer"
        ),
    ] = None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of requests and keys"""

    body_bytes_max: Annotated[int, Meta(ge=1, description="largest request body, bytes")] = 4 << 20
    prompt_chars_max: Annotated[int, Meta(ge=1, description="longest prompt, characters")] = 1_000_000
    concurrent_max: Annotated[int, Meta(ge=0, description="requests in progress per API key; 0: no limit")] = 0
    requests_per_minute_max: Annotated[int, Meta(ge=0, description="requests a minute per API key; 0: no limit")] = 0
    slo_ms: Annotated[
        tuple[str, ...],
        Meta(
            description="deadline of requests that bring none, milliseconds. `MS`, `model:ID=MS`, `stream:NAME=MS` or "
            "`key:NAME=MS`, the key's before the stream's before the model's before the plain one; repeat for several",
            extra={"metavar": "[model:ID=|stream:NAME=|key:NAME=]MS"},
        ),
    ] = ()

    def __post_init__(self) -> None:
        DefaultDeadlines(self.slo_ms)


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How engines are watched, and how much is kept for slow clients"""

    probes_failed_max: Annotated[
        int, Meta(ge=1, description="health probes that an engine may miss in a row before it counts as lost")
    ] = 3
    probe_every_s: Annotated[float, Meta(gt=0, description="between two health probes of an engine")] = 2.0
    memory_bound: Annotated[
        bool,
        Meta(description="hold back requests that an engine's KV cache, where it tells its size, would have to evict"),
    ] = True
    buffer_bytes_max: Annotated[
        int, Meta(ge=1, description="bytes kept for a client that reads slowly, before its engine is slowed down")
    ] = 8 << 20
    client_stall_s: Annotated[
        float, Meta(gt=0, description="how long such a client may keep its engine waiting before it is cut off")
    ] = 60.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole tree."""

    server: ServerConfig = ServerConfig()
    engines: EngineConfig = EngineConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    dispatch: DispatchConfig = DispatchConfig()
    prediction: PredictorConfig = PredictorConfig()
    limits: ApiConfig = ApiConfig()
    live: LiveConfig = LiveConfig()

    @property
    def barrier(self) -> bool:
        """Whether engines run batches to their end; mixed ones are taken for such."""
        return self.engines.barrier or self.engines.has_embedded

    def shown(self, origin: Mapping[str, str]) -> str:
        """See config.shown; with the defaults that depend on the engines."""
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
}
"""Of the sections, in the help."""
COMMON = {
    *("host", "port", "api_key_file", "admin_key_file", "anonymous", "journal", "log_level"),
    *("engine", "model", "replicas", "slots", "barrier", "plan"),
    *("release", "order", "batch_size", "bins", "queue_requests_max"),
    *("profile", "energy_weight", "latency_target_s"),
    *("predictor", "record"),
    *("slo_ms", "concurrent_max", "requests_per_minute_max"),
}
"""Settings that `serve --help` shows."""
