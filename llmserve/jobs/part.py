"""Batch jobs: a store of files and batches, whose lines run beside the requests of clients.

Nothing of a store is imported unless the settings say where the store is.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import ConfigError
from llmserve.gateway.parse import limits_of
from llmserve.gateway.part import OwnApi
from llmserve.live.cluster import LiveCluster
from llmserve.observe.metrics import Metrics
from llmserve.part import Part, Server
from llmserve.runtime.extras import missing, need
from llmserve.settings.tree import Config
from llmserve.tenants.guards import client_key
from llmserve.tenants.limits import KeyLimits
from llmserve.tenants.shares import shared_by

if TYPE_CHECKING:
    from llmserve.jobs.service import JobService

FILE, FOLDER = "jobs.sqlite", "jobs"
MODULES = ("sqlalchemy", "aiosqlite", "python_multipart")
"""Modules of the extra."""


def has_store(config: Config) -> bool:
    """Whether the server keeps files and batches: it has a place for them, and the packages."""
    return config.jobs.store is not None or (config.server.state is not None and missing(*MODULES) is None)


class Jobs(Part):
    """Files and batches, if there is a place for them."""

    def check(self, config: Config) -> Config:
        jobs, state = config.jobs, config.server.state
        if jobs.store is not None:
            need("jobs", *MODULES, why="--store")
        elif state is not None and (Path(state).expanduser() / FILE).exists():
            need("jobs", *MODULES, why=f"{FILE} of --state")  # its batches would wait for ever
        elif state is None and jobs.store_folder is not None:
            raise ConfigError("store_folder has no effect without --store or --state")
        if jobs.store is not None and jobs.store_folder is None and state is None:
            raise ConfigError("store: give --store-folder or --state, too, for the bytes of files")
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        from llmserve.jobs.endpoints import FILES, BatchEndpoints, NoBatches

        api = server.get(OwnApi)
        if not has_store(server.config):
            nothing = NoBatches(_remedy(server.config))
            api.routes += nothing.routes
            api.uploads[FILES] = nothing.upload
            yield
            return
        async with _service(server) as service:
            server.add(service)
            batches = BatchEndpoints(service, client_key(server.get(KeyLimits).keys))
            server.add(batches.sums)
            api.routes += batches.routes
            api.uploads[FILES] = batches.upload
            yield

    @contextlib.asynccontextmanager
    async def run(self, server: Server) -> AsyncIterator[None]:
        if not has_store(server.config):
            yield
            return
        from llmserve.jobs.service import JobService

        service = server.get(JobService)
        try:
            service.start()
            server.get(Metrics).follow_jobs(service.runner.feeder)
            yield
        finally:
            await service.close()


def _remedy(config: Config) -> str:
    """What gives a server files and batches, for its clients: they do not see where it is installed."""
    return "start it with --state DIR" if config.server.state is None else "it needs the extra llmserve[jobs]"


def _service(server: Server) -> AbstractAsyncContextManager[JobService]:
    """The jobs of the store that the settings name, inside the block."""
    from llmserve.jobs.service import opened
    from llmserve.jobs.store.batches import BatchLimits
    from llmserve.jobs.store.files import FileLimits
    from llmserve.jobs.store.sqlite import sqlite_url
    from llmserve.jobs.submission import BatchSubmitter

    config, jobs, state = server.config, server.config.jobs, server.config.server.state
    home = Path(state).expanduser() if state is not None else Path()
    key_limits = server.get(KeyLimits)
    fair = shared_by(config.limits.fair_by, keys=key_limits.keys.required) != "none"
    return opened(
        jobs.store or sqlite_url(home / FILE),
        Path(jobs.store_folder) if jobs.store_folder is not None else home / FOLDER,
        BatchSubmitter(server.get(LiveCluster), key_limits, limits_of(config.limits), fair=fair),
        days=jobs.batch_days,
        limits=FileLimits(jobs.batch_files_max, jobs.batch_bytes_max),
        batch_limits=BatchLimits(jobs.batch_active_max, jobs.batch_active_total_max),
        tokens_queued_max=jobs.batch_tokens_max,
        line_bytes_max=config.limits.body_bytes_max,
        prompt_chars_max=config.limits.prompt_chars_max,
    )
