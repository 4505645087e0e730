"""Settings from flags, which win over the environment, a TOML file and defaults, in this order.

A tree of frozen structs defines the settings, with a section for each table of the file. Each field of a section is a
flag (`--batch-size`), a variable (`LLMSERVE_BATCH_SIZE`) and a key of the table (`[scheduling] batch_size`). Field
names are unique across sections. An unknown key is an error that names the nearest known key. Each field has its type,
range and help text. A section names in `removed` settings that it had, with what to use instead. This module imports
nothing of the server.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError
from llmserve.spelling import nearest

ENVIRONMENT_PREFIX = "LLMSERVE_"
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
BOUNDS = (("ge", "at least {:g}"), ("gt", "more than {:g}"), ("le", "at most {:g}"), ("lt", "less than {:g}"))
Sections = Mapping[str, type[msgspec.Struct]]
S = TypeVar("S", bound=msgspec.Struct)


def sections(tree: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the sections by name."""
    return {field.name: field.type for field in msgspec.structs.fields(tree)}


# ---- flags --------------------------------------------------------------------------------------------------------


def add_flags(
    parser: argparse.ArgumentParser,
    struct: type[msgspec.Struct],
    title: str,
    *,
    skip: Collection[str] = (),
    common: Collection[str] | None = None,
    **defaults: Any,
) -> None:
    """Add a group of flags, one per field except `skip`. An absent flag sets no attribute.

    common: the flags that `--help` shows, with the first sentence of their descriptions; HelpAll shows all flags with
    whole descriptions. None: no flag is hidden.  defaults: default values shown in the help instead of the fields'.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        default = defaults.get(field.name, field.default)
        if field.name not in skip and _extra(hints[field.name]).get("flag", True):
            action = group.add_argument(flag_of(field.name), dest=field.name, **_flag(hints[field.name], default))
            if common is not None:
                whole = action.help or ""
                action.whole_help = whole  # type: ignore[attr-defined]
                action.help = _first_sentence(whole) if field.name in common else argparse.SUPPRESS
    for name, instead in _removed(struct).items():
        group.add_argument(flag_of(name), nargs="?", action=_Removed, const=instead, help=argparse.SUPPRESS)


class _Removed(argparse.Action):
    """Says what to use instead of the flag."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} was removed: {self.const}")


def _removed(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    return getattr(struct, "removed", {})


class HelpAll(argparse.Action):
    """Shows every flag with its whole description, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "whole_help", action.help)
        parser.print_help()
        parser.exit()


def _first_sentence(text: str) -> str:
    """Return the first sentence, and the default at the end of the text."""
    first, separator, rest = text.partition(". ")
    default = re.search(r" \(default[^()]*\)$", rest)
    return first + (default[0] if separator and default else "")


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def _extra(hint: Any) -> dict[str, Any]:
    """Return a field's `extra`. metavar: of the flag; flag: False for no flag; takes: the field's values in words."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return {name: value for meta in metas for name, value in (meta.extra or {}).items()}


def _flag(hint: Any, default: Any) -> dict[str, Any]:
    kind, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    text = next((meta.description for meta in metas if meta.description), "")
    help_ = text if default is None or default is False or default == () else f"{text} (default {default})"
    common: dict[str, Any] = {"help": help_.replace("%", "%%"), "default": argparse.SUPPRESS}
    if kind is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    parts = get_args(kind) if get_origin(kind) is not Literal else (kind,)
    words = [part for part in parts if get_origin(part) is Literal]
    if words and set(parts) <= {*words, type(None)}:
        return {**common, "choices": get_args(words[0])}
    if kind == tuple[str, ...]:
        return {**common, "action": "append", "metavar": _extra(hint).get("metavar", "TEXT")}
    return {**common, "metavar": _extra(hint).get("metavar", _metavar(kind, text))}


_OF_FILES = re.compile(r"(TOML |SQLite )?(file|folder)\b", re.IGNORECASE)


def _metavar(kind: Any, text: str) -> str:
    parts = {kind, *get_args(kind)}
    parts |= {part for outer in get_args(kind) for part in get_args(outer)}  # of an optional value with limits
    if any(get_origin(part) is tuple for part in parts):
        return "X,X,..."
    if str in parts and (word := _OF_FILES.match(text)) is not None:
        return "DIR" if "folder" in word[0].lower() else "FILE"
    return "TEXT" if str in parts else "X" if float in parts else "N"


# ---- loading ------------------------------------------------------------------------------------------------------


def load(
    tree: type[S], flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None
) -> tuple[S, dict[str, str]]:
    """Merge and check the three sources. Also returns the source of each given setting, by the setting's name.

    tree : a struct of sections.  flags : setting -> text (or list, or bool), without absent flags.
    Raises ConfigError, naming the key and its source.
    """
    structs = sections(tree)
    section_of = {field: name for name, struct in structs.items() for field in struct.__struct_fields__}
    removed = {name: instead for struct in structs.values() for name, instead in _removed(struct).items()}
    values: dict[str, dict[str, Any]] = {name: {} for name in structs}
    origin: dict[str, str] = {}
    for source, pairs in (
        (file or "", _file_values(structs, file) if file else []),
        ("the environment", _environment_values(environment, section_of, removed)),
        ("the command line", [(section_of[name], name, value) for name, value in flags.items()]),
    ):
        for section, name, value in pairs:
            values[section][name] = value
            origin[name] = source
    return tree(**{name: convert(struct, values[name], origin) for name, struct in structs.items()}), origin


def convert(struct: type[S], values: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> S:
    """Convert texts, or values of the right type, to a section. Raises ConfigError."""
    hints = typing.get_type_hints(struct, include_extras=True)
    prepared = {name: _split(name, hints[name], value) for name, value in values.items()}
    for name, value in prepared.items():
        # A journal cannot store infinity or NaN. Only an arrival rate may be infinite.
        if name != "arrival_rate" and not _is_finite(value):
            raise ConfigError(f"{name}: the number must be finite, not {values[name]!r}")
    try:
        return msgspec.convert(prepared, struct, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].partition("`")[0].partition("[")[0]
        if name not in hints:  # an error of the whole section, not of one setting
            raise ConfigError(str(error)) from None
        source, expected = (origin or {}).get(name, "the command line"), takes(hints[name])
        raise ConfigError(f"{name} ({source}): expected {expected}, not {values.get(name)!r}") from None


def takes(hint: Any) -> str:
    """Return a field's values in words: its `takes` in extra, or else its type and range."""
    words = _extra(hint).get("takes")
    if words is not None:
        return str(words)
    bounds = [
        text.format(bound)
        for meta in _metas(hint)
        for name, text in BOUNDS
        if (bound := getattr(meta, name)) is not None
    ]
    return ", ".join([*_kinds(hint), *bounds])


def _metas(hint: Any) -> list[Meta]:
    """Return the Metas of a hint and of all its parts."""
    inner, *own = get_args(hint) if get_origin(hint) is Annotated else (None, *get_args(hint))
    if get_origin(hint) is Annotated:
        return [*own, *_metas(inner)]
    return [meta for part in own for meta in _metas(part)]


def _kinds(hint: Any) -> Iterator[str]:
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif origin is Literal:
        yield " or ".join(get_args(hint))
    elif origin is tuple:
        yield "texts" if get_args(hint)[0] is str else "numbers"
    elif hint in KINDS:
        yield KINDS[hint]
    else:
        for part in get_args(hint):
            yield from _kinds(part)


def _is_finite(value: Any) -> bool:
    """False for infinities and NaN, as numbers or as texts, alone or in a list; True for everything else."""
    if isinstance(value, list | tuple):
        return all(_is_finite(part) for part in value)
    if isinstance(value, str) and value.strip().lstrip("+-").lower() not in ("inf", "infinity", "nan"):
        return True
    return not isinstance(value, str | float) or math.isfinite(float(value))


def _split(name: str, kind: Any, value: Any) -> Any:
    """Split a text for a tuple at commas, or a program's arguments as a shell does."""
    if not _is_tuple(kind) or not isinstance(value, str):
        return value
    if name != "engine_args":
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}, in {value!r}") from error


def _is_tuple(kind: Any) -> bool:
    """Whether a type is a tuple, or a union with a tuple."""
    return get_origin(kind) is tuple or any(_is_tuple(part) for part in get_args(kind))


def _environment_values(
    environment: Mapping[str, str], section_of: Mapping[str, str], removed: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    values = []
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == f"{ENVIRONMENT_PREFIX}CONFIG":
            continue
        if _is_of_service(variable, environment[variable]):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in removed:
            raise ConfigError(f"{variable} was removed: {removed[name]}")
        if name not in section_of:
            variables = [ENVIRONMENT_PREFIX + field.upper() for field in section_of]
            raise ConfigError(f"the environment has an unknown variable {variable}{nearest(variable, variables)}")
        values.append((section_of[name], name, environment[variable]))
    return values


_OF_SERVICE = re.compile(
    rf"{ENVIRONMENT_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_OF_PORT, _ADDRESS = re.compile(rf"{ENVIRONMENT_PREFIX}(\w+_)?PORT"), re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def _is_of_service(variable: str, value: str) -> bool:
    """Whether Kubernetes has set the variable, for a Service whose name begins with `llmserve`."""
    return bool(_OF_SERVICE.fullmatch(variable) or (_OF_PORT.fullmatch(variable) and _ADDRESS.fullmatch(value)))


def service_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that are no settings, but Kubernetes' own, of Services in the same namespace."""
    return sorted([variable for variable, value in environment.items() if _is_of_service(variable, value)])


def _file_values(structs: Sections, file: str) -> list[tuple[str, str, Any]]:
    try:
        tables = tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {file}: {error}") from error
    values = []
    for section, table in tables.items():
        if section not in structs:
            raise ConfigError(f"{file}: unknown table [{section}]{nearest(section, structs)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} must be a table, [{section}]")
        for name, value in table.items():
            if (instead := _removed(structs[section]).get(name)) is not None:
                raise ConfigError(f"{file}: {name} was removed: {instead}")
            if name not in structs[section].__struct_fields__:
                fields = structs[section].__struct_fields__
                raise ConfigError(f"{file}: unknown key {name!r} in [{section}]{nearest(name, fields)}")
            values.append((section, name, value))
    return values


# ---- showing ------------------------------------------------------------------------------------------------------

SECRETS = ("engine_api_key",)


def shown(config: msgspec.Struct, origin: Mapping[str, str]) -> str:
    """Return every setting with its value and source, as a TOML file.

    config : a tree of sections.  origin : sources of the given settings, by name; all other settings are defaults.
    """
    lines = []
    for section in config.__struct_fields__:
        lines += ["", f"[{section}]"]
        for name in (settings := getattr(config, section)).__struct_fields__:
            value = getattr(settings, name)
            line = f"# {name} =" if value is None else f"{name} = {_toml('...' if name in SECRETS else value)}"
            lines.append(f"{line:<47} # {origin.get(name, 'default')}")
    return "\n".join(lines[1:])


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
