"""The keys and limits of a server, from its settings."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from llmserve.errors import ConfigError
from llmserve.runtime.extras import need
from llmserve.settings.deadlines import DefaultDeadlines
from llmserve.settings.tree import Config
from llmserve.tenants.authentication import Keys
from llmserve.tenants.issuer_keys import check_issuer
from llmserve.tenants.key_file import KeyFile, Limits, digest_of, read_key_file, read_keys
from llmserve.tenants.tokens import TokenRules, Tokens

USAGE_FILE = "usage.sqlite"
GATEWAY = "/door"  # name of the gateways' key: no client's key has a slash in its name


def keys_of(config: Config, *, warns: bool = True) -> KeyFile:
    """Read the key file. Raises ConfigError, also when the file and the settings contradict each other.

    warns : whether to warn when others can read the file
    """
    server = config.server
    file = read_key_file(Path(server.api_key_file), warns=warns) if server.api_key_file else KeyFile()
    if unknown := DefaultDeadlines(config.limits.slo_ms).keys - set(file.keys):
        raise ConfigError(f"slo_ms: --api-key-file has no key named {', '.join(sorted(unknown))}")
    if file.tenants and server.jwt_tenant_claim is None:
        raise ConfigError(f"{server.api_key_file}: [tenants] need tokens that name them: give --jwt-tenant-claim")
    if server.usage_file and not (server.api_key_file or "").endswith(".toml"):
        raise ConfigError("usage_file: only a TOML file of --api-key-file has budgets")
    if file.has_budgets and usage_path(config) is None:
        raise ConfigError(f"{server.api_key_file}: budgets need a file that keeps them: give --usage-file or --state")
    if server.gateway_key_file is not None:
        (key,) = read_keys(Path(server.gateway_key_file), warns=warns).values()
        if digest_of(key) in map(digest_of, file.keys.values()):
            raise ConfigError(f"{server.gateway_key_file}: a client has the gateways' key, too")
        file = replace(file, keys={**file.keys, GATEWAY: key})
    return file


def tokens_of(config: Config) -> Tokens | None:
    """Checks the tokens that clients may send; None: the settings name no issuer. Raises ConfigError."""
    server = config.server
    if server.jwt_issuer is None:
        for name in ("jwt_audience", "jwt_keys", "jwt_tenant_claim"):
            if getattr(server, name) is not None:
                raise ConfigError(f"{name}: there is no issuer of tokens: give --jwt-issuer, too")
        return None
    if server.jwt_audience is None:
        raise ConfigError("jwt_issuer: tokens for anybody would be taken: give --jwt-audience, too")
    check_issuer(server.jwt_issuer, server.jwt_keys)
    need("auth", "jwt", "cryptography", why="--jwt-issuer")
    rules = TokenRules(server.jwt_issuer, server.jwt_audience, server.jwt_account_claim, server.jwt_tenant_claim)
    return Tokens(rules)


def admin_keys_of(config: Config, *, warns: bool = True) -> Keys | None:
    """The keys of /admin; None: /admin is disabled. Raises ConfigError."""
    path = config.server.admin_key_file
    return Keys(read_keys(Path(path), warns=warns)) if path else None


def default_limits(config: Config) -> Limits:
    """Limits of every key that has none of its own."""
    limits = config.limits
    return Limits(
        requests_per_minute=limits.requests_per_minute_max,
        tokens_per_minute=limits.tokens_per_minute_max,
        concurrent=limits.concurrent_max,
    )


def usage_path(config: Config) -> Path | None:
    """The file that keeps what keys have spent of their budgets; None: no key can have a budget.

    Only a TOML file of keys can have budgets.
    """
    server = config.server
    if not (server.api_key_file or "").endswith(".toml"):
        return None
    if server.usage_file is not None:
        return Path(server.usage_file)
    return Path(server.state) / USAGE_FILE if server.state else None
