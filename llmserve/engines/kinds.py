"""The kinds of engines: the embedded engine, vLLM started by llmserve, and servers that run already.

A kind of engine checks its settings, lists the processes to start, and connects to its engines once the processes run.
To add a kind, write a class and add an entry to KINDS.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmserve import demo as embedded
from llmserve.engines import group_server
from llmserve.engines import vllm as vllm_process
from llmserve.engines.dialects import HEALTH_PATH, LLMSERVE
from llmserve.engines.group_server import GroupServer
from llmserve.engines.openai import OpenAIEngine, Timeouts
from llmserve.engines.process import EngineProcess
from llmserve.engines.slots import SLOTS_FIRST, SlotsLearner
from llmserve.errors import ConfigError
from llmserve.http.tls import TlsError, client_context, load_chain
from llmserve.request import EngineInfo
from llmserve.runtime.extras import need_embedded

if TYPE_CHECKING:
    from llmserve.settings.tree import Config, EngineConfig

log = logging.getLogger("llmserve")

LOOK_AHEAD_BY_PRIORITY = 8  # an engine that goes by priority may hold more than its slots, for it keeps their order


class EngineTls:
    """TLS with engines by https: one context for all, which is made for the first."""

    def __init__(self, settings: EngineConfig) -> None:
        self._files = [
            Path(file) if file else None
            for file in (settings.engine_tls_ca, settings.engine_tls_cert, settings.engine_tls_key)
        ]

    @cached_property
    def context(self) -> ssl.SSLContext:
        """Raises ConfigError."""
        return self.read()

    def read(self) -> ssl.SSLContext:
        """A context of the files as they are now. Raises ConfigError."""
        try:
            return client_context(*self._files)
        except TlsError as error:
            raise ConfigError(f"engine_tls: {error}") from error

    def renew(self) -> None:
        """Have new connections show the certificate that is in the file now. The files must have been read."""
        _, certificate, key = self._files
        if certificate is not None:
            load_chain(self.context, certificate, key)


class EngineKind:
    """A kind of engine. gpus : its processes' GPUs, as in CUDA_VISIBLE_DEVICES; None: all GPUs visible to llmserve."""

    gpus: str | None = None

    def __init__(self, config: Config, tls: EngineTls | None = None) -> None:
        self.config = config
        self._tls = tls or EngineTls(config.engines)
        self.settings = config.engines

    @staticmethod
    def is_requested(settings: EngineConfig) -> bool:
        """Whether the settings name an engine of this kind."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ConfigError on errors that can be found before any start. The settings agree with each other."""

    def processes(self) -> list[EngineProcess]:
        """Return the processes to start; the same objects at every call."""
        return []

    def connect(self) -> list[OpenAIEngine]:
        """Return clients of the engines, whose processes run already."""
        raise NotImplementedError

    def _connected(
        self, info: EngineInfo, url: str, process: EngineProcess | None = None, *, slots: SlotsLearner | None = None
    ) -> OpenAIEngine:
        return client_of(
            self.config,
            info,
            url,
            process.api_key if process is not None else self.settings.engine_api_key,
            probe_path=self.config.live.probe_path if process is None else HEALTH_PATH,
            restart=process.restart if process is not None else None,
            slots=slots,
            tls=self._tls.context if url.startswith("https:") else None,
        )

    def _refill(
        self,
        name: str,
        url: str,
        process: EngineProcess | None = None,
        *,
        slots: int | None,
        worker: str = "",
        by_priority: bool,
    ) -> OpenAIEngine:
        """Return the client of an engine whose slots refill, or of a barrier engine. slots : None: unknown"""
        if self.settings.barrier:
            info = EngineInfo(name, self.config.scheduling.full_batch, True, worker=worker)
            return self._connected(info, url, process)
        look_ahead = self.settings.look_ahead
        if look_ahead is None and by_priority:
            look_ahead = LOOK_AHEAD_BY_PRIORITY
        learner = SlotsLearner(
            slots or SLOTS_FIRST, fixed=slots is not None, look_ahead=look_ahead, in_order=not by_priority
        )
        info = EngineInfo(
            name, learner.slots, False, look_ahead=learner.look_ahead, worker=worker, by_priority=by_priority
        )
        return self._connected(info, url, process, slots=learner)


class Embedded(EngineKind):
    """A small model in a separate process, on the CPU."""

    @staticmethod
    def is_requested(settings: EngineConfig) -> bool:
        return settings.has_embedded

    def check(self) -> None:
        need_embedded()

    def processes(self) -> list[EngineProcess]:
        return [self._process]

    @cached_property
    def _process(self) -> EngineProcess:
        def command(port: int) -> list[str]:
            words = [sys.executable, "-m", "llmserve.demo", "--host", "127.0.0.1", "--port", str(port)]
            words += ["--batch-size-max", str(self.config.scheduling.full_batch)]
            return words + (["--model", self.settings.model] if self.settings.model else [])

        return EngineProcess(
            "the embedded engine", command, start_s=self.settings.engine_start_s, key_variable=embedded.KEY_VARIABLE
        )

    def connect(self) -> list[OpenAIEngine]:
        info = EngineInfo("embedded", self.config.scheduling.full_batch, True)
        return [self._connected(info, self._process.url, self._process)]


class Vllm(EngineKind):
    """vLLM servers that llmserve starts, one for each GPU or group of GPUs."""

    @staticmethod
    def is_requested(settings: EngineConfig) -> bool:
        return settings.has_vllm

    def check(self) -> None:
        assert self.settings.model is not None, "checked"
        vllm_process.check_model(self.settings.model)

    def processes(self) -> list[EngineProcess]:
        return self._processes

    @cached_property
    def _processes(self) -> list[EngineProcess]:
        settings = self.settings
        assert settings.model is not None, "checked"
        python = settings.engine_python or sys.executable
        replicas = vllm_process.plan(
            settings.model,
            python=python,
            slots=self._slots_of_each,
            args=settings.engine_args,
            count=settings.replicas,
            gpus=vllm_process.visible_gpus(os.environ),
        )
        vllm_process.check_python(python)
        # The port makes the folder unique among the front-ends on one machine.
        folder = _log_folder(settings.engine_log_folder, str(self.config.server.port))
        log.info("starting vLLM: %s; logs are in %s", ", ".join(replica.name for replica in replicas), folder)
        visible = [replica.environment.get("CUDA_VISIBLE_DEVICES") for replica in replicas]
        self.gpus = ",".join(filter(None, visible)) if all(visible) else None
        return vllm_process.processes(replicas, start_s=settings.engine_start_s, log_folder=folder)

    @cached_property
    def _slots_of_each(self) -> int | None:
        """Slots of each data-parallel rank; None: vLLM's default, which llmserve does not know."""
        return vllm_process.slots_of(self.settings.slots, self.settings.engine_args)

    def connect(self) -> list[OpenAIEngine]:
        slots, by_priority = self._slots_of_each, vllm_process.goes_by_priority(self.settings.engine_args)
        if slots is not None:
            slots *= vllm_process.ranks_of(self.settings.engine_args)
        return [
            self._refill(process.name, process.url, process, slots=slots, by_priority=by_priority)
            for process in self._processes
        ]


class Servers(EngineKind):
    """OpenAI-compatible servers that run already, by URL."""

    @staticmethod
    def is_requested(settings: EngineConfig) -> bool:
        return bool(settings.urls or settings.sources)

    def check(self) -> None:
        names = [engine_name(url) for url in self.settings.urls]
        if len(set(names)) < len(names):
            raise ConfigError("engine: the same server is given twice")

    def connect(self) -> list[OpenAIEngine]:
        return [self.client(url, worker) for worker, url in self.settings.placed_urls]

    def client(self, url: str, worker: str = "") -> OpenAIEngine:
        """The client of one server."""
        settings, name = self.settings, engine_name(url)
        if settings.engines_are_groups:
            return self._connected(EngineInfo(name, group_server.SLOTS, False, worker=worker), url)
        return self._refill(name, url, slots=settings.slots, worker=worker, by_priority=settings.engine_priority)


KINDS: dict[str, type[EngineKind]] = {"embedded": Embedded, "vllm": Vllm, "URL": Servers}
"""The kinds by their values of --engine."""


def kinds_of(config: Config, tls: EngineTls | None = None) -> list[EngineKind]:
    """Return the requested kinds of engines."""
    return [kind(config, tls) for kind in KINDS.values() if kind.is_requested(config.engines)]


def client_of(
    config: Config,
    info: EngineInfo,
    url: str,
    api_key: str | None,
    *,
    probe_path: str = HEALTH_PATH,
    restart: Callable[[], Awaitable[None]] | None = None,
    slots: SlotsLearner | None = None,
    tls: ssl.SSLContext | None = None,
) -> OpenAIEngine:
    """A client of the engine at a URL, with the times and sizes of the settings; see OpenAIEngine."""
    settings, live = config.engines, config.live
    return (GroupServer if settings.engines_are_groups else OpenAIEngine)(
        info,
        url,
        timeouts=Timeouts(settings.engine_connect_s, settings.engine_idle_s, settings.engine_answer_s, live.probe_s),
        answer_bytes_max=settings.engine_answer_bytes_max,
        probe_path=probe_path,
        api_key=api_key,
        restart=restart,
        slots=slots,
        dialect=LLMSERVE if settings.engines_are_groups else None,
        tls=tls,
        tls_name=settings.engine_tls_name,
    )


def engine_name(url: str) -> str:
    """Return the URL's host, port and path, which clients see. Raises ConfigError when the URL is not plain http."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or parts.query:
        raise ConfigError(
            f"engine {url!r} is not a URL such as http://127.0.0.1:8001, nor WORKER=URL, dns:NAME:PORT or "
            "k8s:NAMESPACE/SERVICE"
        )
    if parts.username is not None:
        raise ConfigError("engine: give credentials with --engine-api-key, not inside the URL")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port or (443 if parts.scheme == 'https' else 80)}{parts.path.rstrip('/').removesuffix('/v1')}"


def _log_folder(chosen: str | None, name: str) -> Path:
    """Create and return the folder for logs: `chosen`, or else `name` in llmserve's folder. Raises ConfigError."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(chosen or f"{state}/llmserve/{name}")
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise ConfigError(f"engine_log_folder: cannot write to {folder}: {error}") from error
