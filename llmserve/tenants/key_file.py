"""The file of API keys: lines of text, or TOML with the limits, weight and budgets of each key."""

from __future__ import annotations

import math
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError
from llmserve.runtime.private_file import warn_if_shared
from llmserve.settings.load import takes
from llmserve.spelling import nearest

HASHED = re.compile(r"sha256:[0-9a-f]{64}")
TABLES = ("keys", "tenants", "prices")
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Positive = Annotated[float, Meta(gt=0)]
Tier = Literal["auto", "default", "priority", "flex"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a key, or of a key and a model. 0: none. None: the server's default for a key, none for a model.

    requests_per_minute  size of a bucket that is refilled evenly over a minute
    tokens_per_minute    the same for the tokens of prompts and answers
    tokens_waiting       tokens of the requests that have not started on an engine
    concurrent           requests in progress
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_waiting: Count | None = None
    concurrent: Count | None = None

    def over(self, defaults: Limits) -> Limits:
        """These limits, and the defaults where there are none."""
        own = {name: value for name in Limits.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **own)


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may spend, tokens of prompts and answers or money, in each day or month of UTC. None: no limit."""

    tokens_per_day: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_month: Annotated[int, Meta(ge=1)] | None = None
    money_per_day: Positive | None = None
    money_per_month: Positive | None = None


class KeyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may ask for.

    weight    share of the service that the key gets while others wait, too, > 0
    limits    of the key; models : of the key for single models
    tiers     values of `service_tier` that the key may ask for
    priority  least and largest `priority` that the key may ask for; None: none
    """

    weight: float = 1.0
    limits: Limits = Limits()
    budgets: Budgets = Budgets()
    models: Mapping[str, Limits] = {}
    tiers: tuple[Tier, ...] = ("auto", "default", "flex")
    priority: tuple[int, int] | None = None


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Money for a million tokens of prompts (input) and of answers (output), in any currency."""

    input: Annotated[float, Meta(ge=0)] = 0.0
    output: Annotated[float, Meta(ge=0)] = 0.0

    def of(self, prompt_tokens: float, output_tokens: float) -> float:
        return (self.input * prompt_tokens + self.output * output_tokens) * 1e-6


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """keys: name -> key.  policies: by name; a key without one has KeyPolicy().  prices: by model.

    tenants  policies of tokens' tenants, by name
    """

    keys: Mapping[str, str] = {}
    policies: Mapping[str, KeyPolicy] = {}
    prices: Mapping[str, Price] = {}
    tenants: Mapping[str, KeyPolicy] = {}

    @property
    def has_budgets(self) -> bool:
        return any(policy.budgets != Budgets() for policy in (*self.policies.values(), *self.tenants.values()))


def read_key_file(path: Path, *, warns: bool = True) -> KeyFile:
    """Read a key file: TOML if its name ends in .toml, else lines, one `name: key` or `key` each.

    warns : whether to warn when others can read the file
    Raises ConfigError, which names the file and the line or table.
    """
    if path.suffix != ".toml":
        return KeyFile(keys=_keys_of_lines(path, warns=warns))
    try:
        tables = tomllib.loads(_text(path, warns=warns))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if unknown := [name for name in tables if name not in TABLES]:
        raise ConfigError(f"{path}: unknown table [{unknown[0]}]{nearest(unknown[0], TABLES)}")
    prices = {
        model: _struct(Price, table, f'{path}: [prices."{model}"]')
        for model, table in _table(tables.get("prices", {}), f"{path}: [prices]").items()
    }
    keys: dict[str, str] = {}
    policies: dict[str, KeyPolicy] = {}
    for name, table in _table(tables.get("keys", {}), f"{path}: [keys]").items():
        place = f"{path}: [keys.{name}]"
        keys[name], policies[name] = _key_of_table(name, dict(_table(table, place)), place)
        if name.startswith("jwt:"):
            raise ConfigError(f"{place}: names with `jwt:` are those of tokens")
        _check_prices(policies[name], place, prices)
    tenants: dict[str, KeyPolicy] = {}
    for name, table in _table(tables.get("tenants", {}), f"{path}: [tenants]").items():
        place = f"{path}: [tenants.{name}]"
        if "key" in _table(table, place):
            raise ConfigError(f"{place}: a tenant has no key: its clients send tokens")
        _, tenants[name] = _key_of_table("tenant", {**table, "key": "-"}, place)
        _check_prices(tenants[name], place, prices)
    if len(set(map(digest_of, keys.values()))) < len(keys):
        raise ConfigError(f"{path}: two names have the same key")
    if not keys and not tenants:
        raise ConfigError(f"{path} has no API key")
    return KeyFile(keys=keys, policies=policies, prices=prices, tenants=tenants)


def _check_prices(policy: KeyPolicy, place: str, prices: Mapping[str, Price]) -> None:
    if not prices and (policy.budgets.money_per_day or policy.budgets.money_per_month):
        raise ConfigError(f'{place}: a budget of money needs prices, [prices."MODEL"]')


def digest_of(entry: str) -> bytes:
    """The SHA-256 digest of a key in a file, which has the key or its digest. Never of a key that was sent."""
    return bytes.fromhex(entry.removeprefix("sha256:")) if HASHED.fullmatch(entry) else sha256(entry.encode()).digest()


def hashed(key: str) -> str:
    """What a file may have in the place of a key."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def read_key_to_send(path: Path) -> str:
    """The first key of a file, to be sent. Raises ConfigError, also when the file has its digest only."""
    key = next(iter(read_keys(path).values()))
    if HASHED.fullmatch(key):
        raise ConfigError(f"{path} has the digest of its first key: give a file with the key itself")
    return key


def key_rows(file: KeyFile) -> list[dict[str, Any]]:
    """What operators see of the keys of a file: everything but the keys. limits : of the key, those that are set"""
    rows = []
    for name, key in sorted(file.keys.items()):
        policy = file.policies.get(name, KeyPolicy())
        fields = {**msgspec.structs.asdict(policy.limits), **msgspec.structs.asdict(policy.budgets)}
        limits = {field: value for field, value in fields.items() if value is not None}
        is_hashed = HASHED.fullmatch(key) is not None
        rows.append({"name": name, "hashed": is_hashed, "weight": policy.weight, "limits": limits})
    return rows


def read_keys(path: Path, *, warns: bool = True) -> Mapping[str, str]:
    """The keys of a key file of either form, by their names. Raises ConfigError."""
    return read_key_file(path, warns=warns).keys


# ---- lines ---------------------------------------------------------------------------------------------------------


def _keys_of_lines(path: Path, *, warns: bool) -> dict[str, str]:
    """Read a file of keys, one `name: key` or `key` per line. Returns name -> key. Blank and #-lines are skipped.

    A key with a colon needs a name. A name has no slash, which separates a key's name from its client's stream. Raises
    ConfigError on an unreadable or empty file, a repeated name or key, a character that is not printable, such as a
    byte order mark, or a key that an HTTP header cannot carry.
    """
    keys: dict[str, str] = {}
    seen: set[bytes] = set()
    for number, line in enumerate(_text(path, warns=warns).split("\n"), start=1):
        text = line.strip(" \t\r")
        if not text or text.startswith("#"):
            continue
        name, key = name_and_key(text, number)
        _check(name, key, f"{path}, line {number}")
        if name in keys or digest_of(key) in seen:
            raise ConfigError(f"{path}, line {number}: this name or key is in the file twice")
        keys[name] = key
        seen.add(digest_of(key))
    if not keys:
        raise ConfigError(f"{path} has no API key")
    return keys


def _text(path: Path, *, warns: bool) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            if warns:
                warn_if_shared(path, os.fstat(file.fileno()))
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error


def name_and_key(text: str, number: int) -> tuple[str, str]:
    """Of a line. number : of the line, which names a key without a name"""
    first, separator, rest = text.partition(":")
    if HASHED.fullmatch(text) or not separator:
        return f"key{number}", text
    return first.strip(" \t"), rest.strip(" \t")


def _check(name: str, key: str, place: str) -> None:
    if unprintable := [character for character in name + key if not character.isprintable()]:
        raise ConfigError(f"{place}: the character {unprintable[0]!a} is not printable")
    if not name or not key or not key.isascii() or any(character.isspace() for character in key):
        raise ConfigError(f"{place}: not `name: key` or `key` (ASCII, without white space)")
    if "/" in name:
        raise ConfigError(f"{place}: the name {name!r} has a slash, which would make it a stream of another key")


# ---- tables --------------------------------------------------------------------------------------------------------


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a key's table that are neither limits nor budgets."""

    key: str
    weight: Positive = 1.0
    tiers: tuple[Tier, ...] = KeyPolicy().tiers
    priority: tuple[int, int] | None = None
    models: dict[str, Any] = {}


def _key_of_table(name: str, table: dict[str, Any], place: str) -> tuple[str, KeyPolicy]:
    fields = [field for kind in (_Key, Limits, Budgets) for field in kind.__struct_fields__]
    _check_names(table, fields, place)
    own = _struct(_Key, _only(table, _Key), place)
    _check(name, own.key, place)
    if own.priority is not None and own.priority[0] > own.priority[1]:
        raise ConfigError(f"{place}: priority: the least comes first, not {list(own.priority)}")
    return own.key, KeyPolicy(
        weight=own.weight,
        limits=_struct(Limits, _only(table, Limits), place),
        budgets=_struct(Budgets, _only(table, Budgets), place),
        models={
            model: _struct(Limits, limits, f'{place[:-1]}.models."{model}"]') for model, limits in own.models.items()
        },
        tiers=own.tiers,
        priority=own.priority,
    )


def _only(table: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field: value for field, value in table.items() if field in kind.__struct_fields__}


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: not a table")
    return value


def _check_names(table: Iterable[str], fields: Iterable[str], place: str) -> None:
    known = list(fields)
    for name in table:
        if name not in known:
            raise ConfigError(f"{place}: unknown field {name!r}{nearest(name, known)}")


S = TypeVar("S", bound=msgspec.Struct)


def _struct(kind: type[S], value: Any, place: str) -> S:
    """Raises ConfigError, which names the place and the field. It never quotes the key."""
    table = _table(value, place)
    _check_names(table, kind.__struct_fields__, place)
    hints = typing.get_type_hints(kind, include_extras=True)
    for name, number in table.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{place}: {name}: the number must be finite")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in table:
            raise ConfigError(f"{place}: the field {field.name!r} is missing")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].partition("`")[0].partition("[")[0]
        if name in ("", "tiers", "priority", "models", "key"):
            raise ConfigError(f"{place}: {name}: {str(error).partition(' - at ')[0]}") from None
        raise ConfigError(f"{place}: {name}: expected {takes(hints[name])}, not {table[name]!r}") from None
