"""The section [engines]: the engines that run the requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError

WORKER = re.compile(r"[\w.-]+", re.ASCII)
SOURCE = re.compile(r"(dns|k8s|inferencepool)(\+https)?:(.+)", re.ASCII)
DNS_PLACE = re.compile(r"([\w.-]+)(?::(\d{1,5}))?", re.ASCII)
KUBERNETES_PLACE = re.compile(r"(?:([a-z0-9-]+)/)?([a-z0-9.-]+)(?::([a-z0-9-]+))?", re.ASCII)
REPLANNING = "`llmserve up CLUSTER.toml` plans groups again, with [planning] in its file"


class SourceEntry(NamedTuple):
    """Where engines are found while the server runs.

    text       as the settings name it
    kind       "dns", "k8s" or "inferencepool"
    scheme     of the engines' URLs
    namespace  of Kubernetes; "": the server's own
    port       of the engines, a number or the name of a Service's port; "": the source tells it
    """

    text: str
    kind: str
    scheme: str
    namespace: str
    name: str
    port: str


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that run the requests"""

    engine: Annotated[
        tuple[str, ...],
        Meta(
            description="URL of an OpenAI-compatible server, `vllm` (llmserve starts one for each GPU), `embedded` "
            "(a small model on the CPU), or where servers are found: `dns:NAME:PORT` (addresses of a name), `dns:NAME` "
            "(SRV), `k8s:NAMESPACE/SERVICE[:PORT]` or `inferencepool:NAMESPACE/NAME`; repeat for several. Engines "
            "with the same WORKER before their URLs share a "
            "GPU: with --barrier only one of them runs a batch at a time (default: what is found "
            "on this machine at the usual ports of vLLM, llama.cpp, Ollama, LM Studio and SGLang, else embedded)",
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
        Meta(
            description="requests that each refill engine runs at once (default: learnt from its answers, and read "
            "from engines that tell)"
        ),
    ] = None
    look_ahead: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="requests sent to a refill engine beyond its slots, to hide the network delay (default: as "
            "many as the delay costs, learnt from answers; 8 if the engine goes by priority)"
        ),
    ] = None
    engine_priority: Annotated[
        bool,
        Meta(
            description="URL engines start waiting requests by the field `priority` (vLLM with --scheduling-policy "
            "priority, SGLang with --enable-priority-scheduling): each request carries its place in the order, so that "
            "the engine keeps the order. An engine that says it has no priority gets no requests. "
            "vLLM servers that llmserve starts do this unless their arguments say otherwise"
        ),
    ] = False
    engines_are_groups: Annotated[
        bool,
        Meta(
            description="URL engines are servers of llmserve with --gateway-key-file, whose key is --engine-api-key. "
            "This server is then a gateway: it checks keys and limits, and tells the group's server for which client a "
            "request is"
        ),
    ] = False
    barrier: Annotated[
        bool, Meta(description="URL and vllm engines run each batch to its end (static batching), without refill")
    ] = False
    alias: Annotated[
        tuple[str, ...],
        Meta(
            description="another name of a model; repeat for several names, or to give a name several models, of which "
            "the first one with an engine that is up gets the request. A model's own name may be used, to "
            "give the model fallbacks",
            extra={"metavar": "NAME=MODEL"},
        ),
    ] = ()
    kv_events: Annotated[
        tuple[str, ...],
        Meta(
            description="socket where a URL engine tells what its prefix cache stores and drops, and after a comma the "
            "one that sends missed messages again (vLLM and SGLang: --kv-events-config, which no engine tells); "
            "ENGINE is its HOST:PORT, needed with several. Without, the cache is what was sent to the engine",
            extra={"metavar": "[ENGINE=]tcp://HOST:PORT[,tcp://HOST:PORT]"},
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
    engine_tls_ca: Annotated[
        str | None,
        Meta(
            description="file of the authorities that engines by https have their certificates from (default: the "
            "system's)"
        ),
    ] = None
    engine_tls_cert: Annotated[
        str | None,
        Meta(
            description="file of the certificate that engines by https see, where they ask for one (mTLS), as PEM. "
            "SIGHUP reads it again"
        ),
    ] = None
    engine_tls_key: Annotated[
        str | None, Meta(description="file of its key (default: in the file of --engine-tls-cert)")
    ] = None
    engine_tls_name: Annotated[
        str | None,
        Meta(
            description="name that the certificates of engines by https have, where engines are reached by address, as "
            "those that are found are (default: the host of the URL)"
        ),
    ] = None
    plan: Annotated[
        str | None,
        Meta(
            description="file of `llmserve plan`: groups of workers, with their models and streams. With --group, "
            "this server is that of one group. With --engines-are-groups, this server is the gateway, and the engine "
            "NAME=URL is the server of group NAME. `llmserve up` starts them all"
        ),
    ] = None
    group: Annotated[
        str | None,
        Meta(
            description="serve only one group of --plan: its models, on the workers that the plan names for it, "
            "otherwise on workers of no group. `fallback`: all models and workers that the plan does not "
            "name"
        ),
    ] = None
    removed: ClassVar[Mapping[str, str]] = dict.fromkeys(("plan_instance", "replan_every_s"), REPLANNING)

    engine_connect_s: Annotated[float, Meta(gt=0, description="longest wait for a connection to an engine")] = 5.0
    engine_idle_s: Annotated[
        float,
        Meta(gt=0, description="longest silence of an engine within a stream; comments and pings count as silence"),
    ] = 600.0
    engine_answer_s: Annotated[
        float, Meta(gt=0, description="longest duration of an answer, from the request to the last byte")
    ] = 3600.0
    engine_answer_bytes_max: Annotated[
        int,
        Meta(
            ge=1, description="largest answer that is not streamed, in bytes; it stays in memory until it is complete"
        ),
    ] = 64 << 20
    engine_start_s: Annotated[
        float, Meta(gt=0, description="longest time that an engine process may take to start")
    ] = 600.0

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
        return tuple(
            _placed(entry) for entry in self.engine if entry not in ("vllm", "embedded") and not SOURCE.fullmatch(entry)
        )

    @property
    def sources(self) -> tuple[SourceEntry, ...]:
        """Where engines are found while the server runs. Raises ConfigError."""
        return tuple(source_of(entry) for entry in self.engine if SOURCE.fullmatch(entry))

    def check(self) -> None:
        """Raise ConfigError on settings that contradict each other."""
        self.sources  # noqa: B018 (each is parsed)
        for worker, url in self.placed_urls:
            if url in ("", "vllm", "embedded") or SOURCE.fullmatch(url):
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
        if self.engines_are_groups and (self.barrier or self.has_vllm or self.has_embedded):
            raise ConfigError("engines_are_groups: only URLs can be groups, without --barrier")
        for name in ("replicas", "engine_args", "engine_python", "engine_log_folder"):
            if getattr(self, name) and not self.has_vllm:
                raise ConfigError(f"{name}: only for vLLM that llmserve starts, --engine vllm")
        aliases_of(self.alias)
        kv_events_of(self.kv_events)
        self._check_plan()

    def _check_plan(self) -> None:
        if self.sources and self.plan is not None:
            raise ConfigError(f"plan: it names its workers, so {self.sources[0].text} cannot be one: give URLs")
        if self.group is not None and self.plan is None:
            raise ConfigError("group has no effect without --plan")
        if self.plan is not None and (self.group is None) != self.engines_are_groups:
            raise ConfigError(
                "plan: a server has one group. Give --group (or --engines-are-groups, to a gateway), or start all "
                "groups with `llmserve up CLUSTER.toml --plan PLAN.json`"
            )


def _placed(entry: str) -> tuple[str, str]:
    """Split WORKER=URL. A worker's name cannot contain `:` or `/`, so a `=` inside a URL is no separator."""
    worker, separator, url = entry.partition("=")
    return (worker, url) if separator and WORKER.fullmatch(worker) else ("", entry)


def source_of(text: str) -> SourceEntry:
    """What an entry with the form of a source names. Raises ConfigError."""
    entry = SOURCE.fullmatch(text)
    assert entry is not None, "EngineConfig.sources has only such entries"
    kind, https, place = entry.groups()
    scheme = "https" if https else "http"
    if kind == "dns":
        found = DNS_PLACE.fullmatch(place)
        if found is None or not 0 < int(found[2] or 1) < 1 << 16:
            raise ConfigError(f"engine: {text!r} is neither dns:NAME:PORT (addresses) nor dns:NAME (SRV)")
        return SourceEntry(text, kind, scheme, "", found[1], found[2] or "")
    found = KUBERNETES_PLACE.fullmatch(place)
    if found is None or (kind == "inferencepool" and found[3]):
        form = "k8s:NAMESPACE/SERVICE[:PORT]" if kind == "k8s" else "inferencepool:NAMESPACE/NAME"
        raise ConfigError(f"engine: {text!r} is not {form}")
    return SourceEntry(text, kind, scheme, found[1] or "", found[2], found[3] or "")


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


SOCKET = re.compile(r"(tcp://[^\s,=/]+:\d+|ipc://[^\s,]+)", re.ASCII)


def kv_events_of(texts: Iterable[str]) -> list[tuple[str, tuple[str, str]]]:
    """(engine, (socket, replay socket)) of each; engine "": the only one, replay "": none. Raises ConfigError."""
    found = []
    for text in texts:
        engine, separator, sockets = text.rpartition("=")
        endpoint, _, replay = sockets.partition(",")
        if not SOCKET.fullmatch(endpoint) or (replay and not SOCKET.fullmatch(replay)) or (separator and not engine):
            raise ConfigError(f"kv_events: {text!r} is not [ENGINE=]tcp://HOST:PORT[,tcp://HOST:PORT]")
        found.append((engine, (endpoint, replay)))
    return found
