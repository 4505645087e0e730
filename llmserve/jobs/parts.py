"""The batch jobs of a server, from its settings. Nothing of a store is imported unless the server has one."""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import ConfigError
from llmserve.gateway.parse import limits_of
from llmserve.live.driver import LiveCluster
from llmserve.settings.tree import Config
from llmserve.tenants.limits import KeyLimits
from llmserve.tenants.shares import shared_by

if TYPE_CHECKING:
    from llmserve.jobs.service import JobService

FILE, FOLDER = "jobs.sqlite", "jobs"


def open_jobs(
    config: Config, cluster: LiveCluster, key_limits: KeyLimits
) -> AbstractAsyncContextManager[JobService | None]:
    """The jobs of the server inside the block. None: it has no place for files. Raises ConfigError."""
    jobs, state = config.jobs, config.server.state
    if jobs.store is None and state is None:
        if jobs.store_folder is not None:
            raise ConfigError("store_folder has no effect without --store or --state")
        return contextlib.nullcontext()
    if jobs.store_folder is None and state is None:
        raise ConfigError("store: give --store-folder or --state, too, for the bytes of files")
    from llmserve.jobs.service import opened
    from llmserve.jobs.store.batches import BatchLimits
    from llmserve.jobs.store.database import sqlite_url
    from llmserve.jobs.store.files import FileLimits
    from llmserve.jobs.submission import LineDoor

    home = Path(state).expanduser() if state is not None else Path()
    fair = shared_by(config.limits.fair_by, keys=key_limits.keys.required) != "none"
    return opened(
        jobs.store or sqlite_url(home / FILE),
        Path(jobs.store_folder) if jobs.store_folder is not None else home / FOLDER,
        LineDoor(cluster, key_limits, limits_of(config.limits), fair=fair),
        days=jobs.batch_days,
        limits=FileLimits(jobs.batch_files_max, jobs.batch_bytes_max),
        batch_limits=BatchLimits(jobs.batch_active_max, jobs.batch_active_total_max),
        tokens_queued_max=jobs.batch_tokens_max,
        line_bytes_max=config.limits.body_bytes_max,
        prompt_chars_max=config.limits.prompt_chars_max,
    )
