"""A relay's clients of the engines, by the names that the scheduler process has for them."""

from __future__ import annotations

from llmserve.engines.kinds import EngineTls, client_of
from llmserve.engines.openai import OpenAIEngine
from llmserve.live.engine_state import EngineEvent
from llmserve.live.handle import EngineHandle
from llmserve.request import EngineInfo
from llmserve.settings.tree import Config
from llmserve.workers import messages


class RelayEngines:
    """The engines that calls may be sent to."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tls = EngineTls(config.engines)
        self._clients: dict[str, tuple[messages.UseEngine, EngineHandle, OpenAIEngine]] = {}

    def use(self, told: messages.UseEngine) -> None:
        """Take an engine that is new, or at another place, or was restarted."""
        known = self._clients.get(told.name)
        if known is None or (known[0].url, known[0].api_key) != (told.url, told.api_key):
            tls = self._tls.context if told.url.startswith("https:") else None
            engine = client_of(self._config, EngineInfo(told.name, 1, False), told.url, told.api_key, tls=tls)
            handle = EngineHandle(engine)
            handle.step(EngineEvent.ANSWERED)
        else:
            before, handle, engine = known
            if before.outages != told.outages:
                engine.forget_additions()
        engine.sign = told.sign
        self._clients[told.name] = told, handle, engine

    def renew_certificate(self) -> None:
        """Show engines the certificate that is in its file now. Raises ConfigError."""
        if self._config.engines.engine_tls_cert:
            self._tls.read()
            self._tls.renew()

    def handle(self, name: str) -> EngineHandle:
        return self._clients[name][1]

    def heard(self) -> dict[str, float]:
        """When bytes of each engine last came."""
        return {name: engine.heard_s for name, (_, _, engine) in self._clients.items()}
