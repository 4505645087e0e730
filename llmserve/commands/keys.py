"""Create, list, revoke and hash the keys of a file, which `serve --api-key-file` reads.

    llmserve keys create NAME --api-key-file FILE [FIELD=VALUE ...]   prints the new key, once: FILE has its digest only
    llmserve keys list --api-key-file FILE
    llmserve keys revoke NAME --api-key-file FILE
    llmserve keys hash --api-key-file FILE                            digests in the place of keys that can be read

FIELD=VALUE are limits, weight and budgets of a *.toml file: requests_per_minute=60. A running server takes the change
on SIGHUP, or by POST /admin/reload; /admin/keys does both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmserve.errors import ConfigError
from llmserve.tenants.key_editing import create_key, hash_keys, revoke_key
from llmserve.tenants.key_file import key_rows, read_key_file

DOES = ("create", "list", "revoke", "hash")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=DOES, help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the key, to create or revoke it")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="of the key's table in a *.toml file")
    parser.add_argument("--api-key-file", type=Path, required=True, metavar="FILE", help="the file of keys")


def main(args: argparse.Namespace) -> int:
    path = args.api_key_file.expanduser()
    if (args.name is None) == (args.what in ("create", "revoke")):
        raise ConfigError(f"keys {args.what} {'needs the name of a key' if args.name is None else 'takes no name'}")
    if args.fields and args.what != "create":
        raise ConfigError(f"keys {args.what} takes no FIELD=VALUE")
    if args.what == "create":
        print(create_key(path, args.name, dict(map(_field, args.fields))))
    elif args.what == "revoke":
        revoke_key(path, args.name)
        print(f"{args.name} is revoked; a running server takes that on SIGHUP")
    elif args.what == "hash":
        print(f"{hash_keys(path)} keys were hashed")
    else:
        Console().print(_table(path))
    return 0


def _field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"{text!r} is not FIELD=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _table(path: Path) -> Table:
    table = Table("key", "kept as", "weight", "limits and budgets", box=None, pad_edge=False)
    for row in key_rows(read_key_file(path, warns=False)):
        limits = ", ".join(f"{name} {value:,}" for name, value in row["limits"].items())
        table.add_row(row["name"], "digest" if row["hashed"] else "text", f"{row['weight']:g}", limits)
    return table
