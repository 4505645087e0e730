"""The settings of `llmserve serve`: a tree of frozen structs, with a section for each table of the TOML file.

Each section stands in the module of its name; [scheduling] is in policies.py. The sections are imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.engines import EngineConfig, aliases_of
from llmserve.settings.jobs import JobsConfig
from llmserve.settings.limits import ApiConfig
from llmserve.settings.live import LiveConfig
from llmserve.settings.load import shown
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.prediction import PredictorConfig
from llmserve.settings.server import ServerConfig

__all__ = [
    "COMMON",
    "TITLES",
    "ApiConfig",
    "Config",
    "DispatchConfig",
    "EngineConfig",
    "JobsConfig",
    "LiveConfig",
    "PredictorConfig",
    "SchedulingConfig",
    "ServerConfig",
    "aliases_of",
]


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
