"""The clients' keys: the files of keys, which are read before anything slow, and the limits of each key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from llmserve.live.cluster import LiveCluster
from llmserve.observe.key_usage import KeyUsage
from llmserve.observe.metrics import Metrics
from llmserve.part import BehindRelays, Commit, Part, Server
from llmserve.settings.tree import Config
from llmserve.tenants import authentication
from llmserve.tenants.budgets import Ledger
from llmserve.tenants.issuer_keys import IssuerKeys
from llmserve.tenants.key_file import KeyFile
from llmserve.tenants.keys import admin_keys_of, default_limits, keys_of, tokens_of, usage_path
from llmserve.tenants.limits import KeyLimits
from llmserve.tenants.tokens import Tokens
from llmserve.tenants.usage_file import UsageFile


@dataclass(frozen=True)
class KnownKeys:
    """clients : of the file of keys.  admin : of /admin; None: it is disabled.  ledger : of budgets; None: of no key

    tokens  that clients may send in place of a key; None: none
    """

    clients: KeyFile
    admin: authentication.Keys | None
    ledger: Ledger | None
    tokens: Tokens | None


class KeyFiles(Part):
    """The files of keys, and the file that keeps what keys have spent of their budgets."""

    def check(self, config: Config) -> Config:
        keys_of(config, warns=False)
        admin_keys_of(config, warns=False)
        tokens_of(config)
        return config

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config = server.config
        clients, admin, path = keys_of(config), admin_keys_of(config), usage_path(config)
        relays = server.find(BehindRelays)
        holder = relays.name if relays is not None else ""
        ledger = Ledger(UsageFile(path), holder=holder) if path is not None else None
        tokens = tokens_of(config)
        server.add(KnownKeys(clients, admin, ledger, tokens))
        async with AsyncExitStack() as stack:
            if ledger is not None:
                ledger.start()
                stack.push_async_callback(ledger.close)
            if tokens is not None and config.server.jwt_issuer is not None:
                keys = IssuerKeys(tokens, config.server.jwt_issuer, config.server.jwt_keys)
                stack.push_async_callback(keys.close)
                await keys.start()
            yield


class Keys(Part):
    """Keys and their limits, which follow the file of keys while the server runs."""

    changeable = frozenset({"concurrent_max", "requests_per_minute_max", "tokens_per_minute_max", "limits_part"})
    """limits_part counts at the next start only: the controller of a cluster deals the parts."""

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        config, known = server.config, server.get(KnownKeys)
        server.add(
            KeyLimits(
                known.clients,
                default_limits(config),
                ledger=known.ledger,
                times=server.get(LiveCluster).estimator,
                usage=server.find(KeyUsage),
                on_refused=server.get(Metrics).refused,
                part=config.limits.limits_part,
                tokens=known.tokens,
            )
        )
        yield

    def change(self, server: Server, before: Config, after: Config) -> Commit:
        file, defaults = keys_of(after), default_limits(after)
        return lambda: server.get(KeyLimits).change(file, defaults)
