"""Keys are created, revoked and hashed in the file of keys, whose comments and order stay.

The file is changed as text, then read: it is written only if it says what it said before, but for the change. A new
key is in the file as its SHA-256 digest alone, so whoever reads the file has no key. (A key is drawn at random, so its
digest needs no salt.)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llmserve.errors import ConfigError
from llmserve.tenants.key_file import HASHED, KeyFile, digest_of, hashed, name_and_key, read_key_file

KEY_BYTES = 32
BARE = re.compile(r"[A-Za-z0-9_-]+")
HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
KEY_LINE = re.compile(r"(\s*key\s*=\s*)(.*)")


def create_key(path: Path, name: str, fields: Mapping[str, Any]) -> str:
    """Add a key to a file, which is made if it is missing. Returns the key, which nobody can read there.

    fields : of the key's table: limits, weight, budgets
    Raises ConfigError; then the file is as it was.
    """
    before = read_key_file(path, warns=False) if path.exists() else KeyFile()
    if name in before.keys:
        raise ConfigError(f"{path} has a key named {name!r} already")
    key = "sk-" + secrets.token_urlsafe(KEY_BYTES)
    if path.suffix == ".toml":
        table = name if BARE.fullmatch(name) else json.dumps(name)
        lines = [f"[keys.{table}]", f'key = "{hashed(key)}"']
        lines += [f"{field} = {_toml(field, value)}" for field, value in fields.items()]
    elif fields:
        raise ConfigError(f"{path}: only a *.toml file has {', '.join(fields)}")
    else:
        lines = [f"{name}: {hashed(key)}"]

    def changed(text: str) -> str:
        start = text if not text or text.endswith("\n") else f"{text}\n"
        gap = "\n" if text and path.suffix == ".toml" else ""
        return start + gap + "\n".join(lines) + "\n"

    _change(path, changed, lambda after: _without(after, name) == before and name in after.keys)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of a file. Raises ConfigError; then the file is as it was."""
    before = read_key_file(path, warns=False)
    if name not in before.keys:
        raise ConfigError(f"{path} has no key named {name!r}; it has {', '.join(sorted(before.keys))}")
    without = _without_table if path.suffix == ".toml" else _without_line
    _change(path, lambda text: without(text, name), lambda after: after == _without(before, name))


def hash_keys(path: Path) -> int:
    """Put the digest of each key in its place. Returns how many keys were there to be read. Raises ConfigError."""
    before = read_key_file(path, warns=False)
    plain = [name for name, key in before.keys.items() if not HASHED.fullmatch(key)]
    digests = {name: digest_of(key) for name, key in before.keys.items()}

    def is_same(after: KeyFile) -> bool:
        keys = {name: digest_of(key) for name, key in after.keys.items()}
        all_hashed = all(HASHED.fullmatch(key) for key in after.keys.values())
        return keys == digests and all_hashed and replace(after, keys=before.keys) == before

    if plain:
        _change(path, _hashed_tables if path.suffix == ".toml" else _hashed_lines, is_same)
    return len(plain)


# ---- text ----------------------------------------------------------------------------------------------------------


def _without_line(text: str, name: str) -> str:
    kept = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip(" \t\r")
        if not content or content.startswith("#") or name_and_key(content, number)[0] != name:
            kept.append(line)
    return "\n".join(kept)


def _without_table(text: str, name: str) -> str:
    """Without the table of a key, and the tables in it. Comments right before the next table are that table's."""
    kept: list[str] = []
    held: list[str] = []  # comments and blank lines within the table, which may belong to the next
    inside = False
    for line in text.split("\n"):
        if (header := HEADER.fullmatch(line)) is not None:
            inside = _path(header[1])[:2] == ["keys", name]
            kept += [] if inside else held
            held = []
        if not inside:
            kept.append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            held = []
        elif header is None:
            held.append(line)
    return "\n".join(kept)


def _path(header: str) -> list[str]:
    """The names in the header of a table."""
    path, table = [], _parsed(f"[{header}]")
    while isinstance(table, dict) and len(table) == 1:
        ((name, table),) = table.items()
        path.append(name)
    return path


def _hashed_lines(text: str) -> str:
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip(" \t\r")
        if content and not content.startswith("#"):
            name, key = name_and_key(content, number)
            line = f"{name}: {key if HASHED.fullmatch(key) else hashed(key)}"
        lines.append(line)
    return "\n".join(lines)


def _hashed_tables(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        match = KEY_LINE.fullmatch(line)
        key = _parsed(f"key = {match[2]}").get("key") if match is not None else None
        if match is not None and isinstance(key, str) and not HASHED.fullmatch(key):
            line = f'{match[1]}"{hashed(key)}"'
        lines.append(line)
    return "\n".join(lines)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _toml(field: str, value: Any) -> str:
    """A value of a key's table. Raises ConfigError for what has a table of its own."""
    values = value if isinstance(value, list) else [value]
    if field == "key" or not all(isinstance(each, str | int | float) for each in values):
        raise ConfigError(f"{field}: give it in the file")
    return json.dumps(value)


def _without(file: KeyFile, name: str) -> KeyFile:
    def rest(table: Mapping[str, Any]) -> dict[str, Any]:
        return {each: value for each, value in table.items() if each != name}

    return replace(file, keys=rest(file.keys), policies=rest(file.policies))


# ---- the file ------------------------------------------------------------------------------------------------------


def _change(path: Path, changed: Callable[[str], str], is_right: Callable[[KeyFile], bool]) -> None:
    """Put the changed text in the file's place at once, with its owner and mode. Raises ConfigError."""
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        status = path.stat() if path.exists() else None
        handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be changed: {error}") from error
    draft = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(changed(text))
            file.flush()
            os.fsync(file.fileno())
            if status is not None:
                os.fchmod(file.fileno(), status.st_mode & 0o777)
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
        if not is_right(read_key_file(draft, warns=False)):
            raise ConfigError(f"{path} is written in a way that only its author can change: change it by hand")
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be changed: {error}") from error
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(draft), str(path))) from None
    finally:
        draft.unlink(missing_ok=True)
