"""The receiver's settings, and who tells this room that a batch has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llmserve.errors import ConfigError, NotFound
from llmserve.jobs.objects import ACTIVE
from llmserve.jobs.part import has_store
from llmserve.observe.counters import Families
from llmserve.part import Part, Server
from llmserve.runtime.private_file import warn_if_shared
from llmserve.settings.tree import Config

if TYPE_CHECKING:
    from llmserve.jobs.service import JobService
    from llmserve.webhook.sender import Read, Receiver


class Webhook(Part):
    """Tells a receiver of each batch that has ended."""

    def check(self, config: Config) -> Config:
        jobs = config.jobs
        if jobs.batch_webhook is None and jobs.batch_webhook_key_file is not None:
            raise ConfigError("batch_webhook_key_file has no effect without --batch-webhook")
        if jobs.batch_webhook is not None and not has_store(config):
            raise ConfigError("batch_webhook has no effect without --store or --state")
        if jobs.batch_webhook is not None:
            _receiver(config, warns=False)
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        if server.config.jobs.batch_webhook is None:
            yield
            return
        from llmserve.jobs.service import JobService
        from llmserve.webhook.sender import Sender

        service, told = server.get(JobService), server.get(Families).counter("llmserve_batch_webhooks")
        sender = Sender(_receiver(server.config), _ended_batch(service), lambda outcome: told.of(outcome).inc())
        service.runner.on_left.append(sender.notice)
        try:
            yield
        finally:
            await sender.close()


def _ended_batch(service: JobService) -> Read:
    """What reads a batch that has ended, as its client sees it."""

    async def read(key: str, batch_id: str) -> bytes | None:
        try:
            row = await service.batches.batch(key, batch_id)
        except NotFound:
            return None
        return None if row.status in ACTIVE else msgspec.json.encode(service.shown(row))

    return read


def _receiver(config: Config, *, warns: bool = True) -> Receiver:
    from llmserve.webhook.sender import Receiver, secret_of

    url, file = config.jobs.batch_webhook, config.jobs.batch_webhook_key_file
    assert url is not None
    if file is None:
        return Receiver(url)
    try:
        with Path(file).open(encoding="utf-8") as opened:
            if warns:
                warn_if_shared(Path(file), os.fstat(opened.fileno()))
            secret = secret_of(opened.read().strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"batch_webhook_key_file: cannot read a key from {file}: {error}") from error
    if not secret:
        raise ConfigError(f"batch_webhook_key_file: {file} has no key")
    return Receiver(url, secret)
