"""The sources of a server, from its settings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing

from llmserve.discovery.following import Followers
from llmserve.discovery.kubernetes import Api, Pool, Service
from llmserve.discovery.names import Name
from llmserve.discovery.source import CannotFind, Source
from llmserve.errors import ConfigError
from llmserve.live.cluster import LiveCluster
from llmserve.live.part import ByUrl
from llmserve.part import Commit, Part, Server
from llmserve.settings.engines import SourceEntry, source_of
from llmserve.settings.tree import Config


class Discovery(Part):
    """Engines that are found while the server runs."""

    changeable = frozenset({"engine"})

    def check(self, config: Config) -> Config:
        for entry in config.engines.sources:
            source(entry)
        return config

    @contextlib.asynccontextmanager
    async def run(self, server: Server) -> AsyncIterator[None]:
        membership, connect = server.get(LiveCluster).membership, server.get(ByUrl).client
        followers = server.add(Followers(membership, lambda text: source(source_of(text)), connect))
        followers.follow([entry.text for entry in server.config.engines.sources])
        try:
            yield
        finally:
            await followers.close()

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        texts = [self._checked(entry).text for entry in after.engines.sources]
        return lambda: server.get(Followers).follow(texts)

    @staticmethod
    def _checked(entry: SourceEntry) -> SourceEntry:
        source(entry)
        return entry


async def first_look(entry: SourceEntry) -> frozenset[str]:
    """The URLs of engines that a source tells of now. Raises CannotFind, ConfigError."""
    asked = source(entry)
    try:
        async with aclosing(asked.found()) as looks:
            async for urls in looks:
                return urls
        raise CannotFind("it gives no answer")
    finally:
        await asked.close()


def source(entry: SourceEntry) -> Source:
    """The source of an entry of the settings. Raises ConfigError."""
    if entry.kind == "dns":
        return Name(entry.name, int(entry.port) if entry.port else None, entry.scheme)
    api = Api.of_this_pod()
    if api is None:
        raise ConfigError(
            f"engine: {entry.text} needs a pod of Kubernetes with a token of its service account: this process has none"
        )
    if entry.kind == "k8s":
        return Service(api, entry.namespace, entry.name, entry.port, entry.scheme)
    return Pool(api, entry.namespace, entry.name, entry.scheme)
