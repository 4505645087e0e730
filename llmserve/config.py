"""One frozen configuration tree: flags over environment over TOML file over defaults.

Each field of a section is a flag (`--batch-size`), a variable (`LLMSERVE_BATCH_SIZE`) and a key of the section's table
in the file (`[scheduling] batch_size`). Field names are unique across sections. An unknown key is an error that names
the nearest known one. Types, ranges and help texts stand with the fields.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import tomllib
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from llmserve.api.limits import ApiConfig
from llmserve.cluster.live import LiveConfig
from llmserve.dispatch_config import DispatchConfig
from llmserve.errors import ConfigError
from llmserve.policies import SchedulingConfig
from llmserve.spelling import nearest

ENVIRONMENT_PREFIX = "LLMSERVE_"
WORKER = re.compile(r"[\w.-]+", re.ASCII)
S = TypeVar("S", bound=msgspec.Struct)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom it listens"""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    api_key_file: Annotated[
        str | None, Meta(description="file of `name: key` lines; without it no key is asked for")
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="file with the key of POST /admin/...; without it there is no /admin")
    ] = None
    anonymous: Annotated[bool, Meta(description="listen beyond loopback although no key is asked for")] = False
    drain_s: Annotated[float, Meta(ge=0, description="how long a stop waits for running requests")] = 30.0
    journal: Annotated[str | None, Meta(description="file that keeps every scheduling step, as JSON lines")] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what is logged")] = "info"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What runs the requests"""

    engine: Annotated[
        tuple[str, ...],
        Meta(
            description="URL of an OpenAI-compatible server, `vllm` (started here, one for each GPU) or `embedded` (a "
            "small model on the CPU); repeat for several (default: embedded). Engines with the same WORKER before "
            "their URLs share a GPU: with --barrier they run one batch at a time between them",
            extra={"metavar": "[WORKER=]URL"},
        ),
    ] = ()
    model: Annotated[
        str | None,
        Meta(description="embedded (default: the demo model), vllm: model folder or hub id; URLs: serve only this one"),
    ] = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="vLLM servers started here (default: as many as the GPUs allow, or 1)"),
    ] = None
    slots: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that each refill engine runs at once (default: read from the engine)"),
    ] = None
    look_ahead: Annotated[
        int, Meta(ge=0, description="requests sent to a refill engine beyond its slots, to hide the way there")
    ] = 2
    barrier: Annotated[
        bool, Meta(description="URL and vllm engines run one batch to its end (static batching), without refill")
    ] = False
    engine_args: Annotated[
        tuple[str, ...],
        Meta(description="arguments for vLLM; on the command line: all that follows `--`", extra={"flag": False}),
    ] = ()
    engine_python: Annotated[
        str | None, Meta(description="interpreter of the environment that vLLM is installed in (default: this one)")
    ] = None
    engine_log_folder: Annotated[
        str | None,
        Meta(
            description="folder for what vLLM started here says, vllm-0.log, ... (default: $XDG_STATE_HOME/llmserve/"
            "PORT, or ~/.local/state/llmserve/PORT)"
        ),
    ] = None
    engine_api_key: Annotated[str | None, Meta(description="bearer key for URL engines; better in the environment")] = (
        None
    )
    plan: Annotated[
        str | None,
        Meta(
            description="file of `llmserve plan`: groups of workers, a scheduler each, and which models and streams "
            "they serve; the rest is the fallback group's. A group's `workers` names them (WORKER, or an engine's "
            "HOST:PORT); else it gets as many as its `gpus` of those that serve its models"
        ),
    ] = None
    plan_instance: Annotated[
        str | None, Meta(description="file of what the plan was made for, to plan anew by; with --replan-every-s")
    ] = None
    replan_every_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="group workers anew, this often at most, when arrivals are others than were planned for "
            "(default: never)"
        ),
    ] = None
    group: Annotated[
        str | None,
        Meta(
            description="serve one group of --plan, by itself: its models, on the engines of the workers that the plan "
            "names for it, or else names for no group; `fallback` has what no group names"
        ),
    ] = None
    engine_connect_s: Annotated[float, Meta(gt=0, description="longest wait for a connection to an engine")] = 5.0
    engine_idle_s: Annotated[float, Meta(gt=0, description="longest silence of an engine inside an answer")] = 600.0
    engine_start_s: Annotated[float, Meta(gt=0, description="longest start of an engine started here")] = 600.0

    @property
    def has_vllm(self) -> bool:
        return "vllm" in self.engine

    @property
    def has_embedded(self) -> bool:
        return not self.engine or "embedded" in self.engine

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url for _, url in self.placed_urls)

    @property
    def placed_urls(self) -> tuple[tuple[str, str], ...]:
        """(worker, URL) of each; worker "": it has a GPU, or what else it runs on, for itself."""
        return tuple(_placed(entry) for entry in self.engine if entry not in ("vllm", "embedded"))

    def check(self) -> None:
        """Raises ConfigError on settings that contradict each other."""
        for worker, url in self.placed_urls:
            if url in ("", "vllm", "embedded"):
                raise ConfigError(f"engine: a worker is for a URL, not {worker}={url}")
            if worker == "embedded" and self.has_embedded and not self.barrier:
                raise ConfigError(
                    "engine: the worker embedded runs one batch to its end, and the slots of a URL refill: they cannot "
                    "share it. Give --barrier, or the worker another name"
                )
        if len(set(self.engine)) < len(self.engine):
            raise ConfigError("engine: the same server stands twice")
        if self.has_vllm and self.model is None:
            raise ConfigError("engine vllm needs --model FOLDER_OR_HUB_ID")
        for name in ("replicas", "engine_args", "engine_python", "engine_log_folder"):
            if getattr(self, name) and not self.has_vllm:
                raise ConfigError(f"{name}: only for vLLM started here, --engine vllm")
        self._check_plan()

    def _check_plan(self) -> None:
        for name in ("plan_instance", "replan_every_s", "group"):
            if getattr(self, name) and self.plan is None:
                raise ConfigError(f"{name} is of no use without --plan")
        if (self.plan_instance is None) != (self.replan_every_s is None):
            raise ConfigError("replan_every_s and plan_instance are of use only together")
        if self.group and self.replan_every_s:
            raise ConfigError("group does not go with replan_every_s")


def _placed(entry: str) -> tuple[str, str]:
    """A worker's name has no character that a URL's scheme ends with, so that a `=` inside a URL is none of ours."""
    worker, separator, url = entry.partition("=")
    return (worker, url) if separator and WORKER.fullmatch(worker) else ("", entry)


class PredictorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What predicts answer lengths"""

    predictor: Annotated[
        tuple[str, ...],
        Meta(
            description="folder of a trained length predictor, or `none` (default: the demo predictor with the demo "
            "model, else none); with none, answers are predicted from earlier ones; with model:ID= before it, for this "
            "model; repeat for several",
            extra={"metavar": "[model:ID=]FOLDER"},
        ),
    ] = ()
    predictor_budget_s: Annotated[
        float, Meta(gt=0, description="longest wait for a prediction; then earlier answers serve instead")
    ] = 1.0
    predictor_threads: Annotated[int, Meta(ge=1, description="of the predictor's process, on a CPU")] = 1
    memory_keys: Annotated[
        int, Meta(ge=0, description="templates and applications whose recent answer lengths are remembered; 0: none")
    ] = 10_000
    record: Annotated[
        str | None,
        Meta(
            description="file to which prompts, parameters and answer lengths are appended, as JSON lines, to train "
            "a predictor on; never an answer"
        ),
    ] = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole tree."""

    server: ServerConfig = ServerConfig()
    engines: EngineConfig = EngineConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    dispatch: DispatchConfig = DispatchConfig()
    prediction: PredictorConfig = PredictorConfig()
    limits: ApiConfig = ApiConfig()
    live: LiveConfig = LiveConfig()


def sections() -> dict[str, type[msgspec.Struct]]:
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


# ---- flags --------------------------------------------------------------------------------------------------------


def add_flags(
    parser: argparse.ArgumentParser,
    struct: type[msgspec.Struct],
    title: str,
    *,
    skip: Collection[str] = (),
    **defaults: Any,
) -> None:
    """A group of flags, one per field but those to skip; absent flags leave no trace.

    defaults: what the help shows instead.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        default = defaults.get(field.name, field.default)
        if field.name not in skip and _extra(hints[field.name]).get("flag", True):
            group.add_argument(flag_of(field.name), dest=field.name, **_flag(hints[field.name], default))


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def _extra(hint: Any) -> dict[str, Any]:
    """What a field says beside its type and range. metavar: of its flag; flag: False when it has none."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return {name: value for meta in metas for name, value in (meta.extra or {}).items()}


def _flag(hint: Any, default: Any) -> dict[str, Any]:
    kind, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    text = next((meta.description for meta in metas if meta.description), "")
    help_ = text if default is None or default is False or default == () else f"{text} (default {default})"
    common: dict[str, Any] = {"help": help_.replace("%", "%%"), "default": argparse.SUPPRESS}
    if kind is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    for part in (kind, *get_args(kind)):
        if get_origin(part) is Literal:
            return {**common, "choices": get_args(part)}
    if kind == tuple[str, ...]:
        return {**common, "action": "append", "metavar": _extra(hint).get("metavar", "TEXT")}
    return {**common, "metavar": _metavar(kind)}


def _metavar(kind: Any) -> str:
    parts = {kind, *get_args(kind)}
    parts |= {part for outer in get_args(kind) for part in get_args(outer)}  # of an optional value with limits
    if any(get_origin(part) is tuple for part in parts):
        return "X,X,..."
    return "TEXT" if str in parts else "X" if float in parts else "N"


# ---- loading ------------------------------------------------------------------------------------------------------


def load_config(flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None) -> Config:
    """Merge the three sources and check them. flags: field name -> text (or list, or bool), absent ones left out.

    Raises ConfigError naming the key and where it came from.
    """
    section_of = {field: name for name, struct in sections().items() for field in struct.__struct_fields__}
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origin: dict[tuple[str, str], str] = {}
    for source, pairs in (
        (file or "", _file_values(file) if file else []),
        ("the environment", _environment_values(environment, section_of)),
        ("the command line", [(section_of[name], name, value) for name, value in flags.items()]),
    ):
        for section, name, value in pairs:
            values[section][name] = value
            origin[section, name] = source
    tree: dict[str, Any] = {name: convert(struct, values[name], name, origin) for name, struct in sections().items()}
    return Config(**tree)


def convert(
    struct: type[S], values: Mapping[str, Any], section: str, origin: Mapping[tuple[str, str], str] | None = None
) -> S:
    """A section from texts or values of the right type. Raises ConfigError."""
    hints = typing.get_type_hints(struct)
    prepared = {name: _split(name, hints[name], value) for name, value in values.items()}
    for name, value in prepared.items():
        # Infinity and NaN would not survive in a journal; only an arrival rate has a use for one of them.
        if name != "arrival_rate" and not _is_finite(value):
            raise ConfigError(f"{name}: a finite number is needed, not {values[name]!r}")
    try:
        return msgspec.convert(prepared, struct, strict=False)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        name = place.partition("`")[0].partition("[")[0]
        source = (origin or {}).get((section, name), "the command line")
        raise ConfigError(f"{name} ({source}): {what[0].lower()}{what[1:]}, not {values.get(name)!r}") from None


def _is_finite(value: Any) -> bool:
    """False for infinities and NaN, as numbers or as texts, alone or in a list; True for everything else."""
    if isinstance(value, list | tuple):
        return all(_is_finite(part) for part in value)
    if isinstance(value, str) and value.strip().lstrip("+-").lower() not in ("inf", "infinity", "nan"):
        return True
    return not isinstance(value, str | float) or math.isfinite(float(value))


def _split(name: str, kind: Any, value: Any) -> Any:
    """Texts for a tuple are comma-separated; a program's arguments are written as for a shell."""
    is_tuple = any(get_origin(part) is tuple for part in (kind, *get_args(kind)))
    if not is_tuple or not isinstance(value, str):
        return value
    if name != "engine_args":
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}, in {value!r}") from error


def _environment_values(environment: Mapping[str, str], section_of: Mapping[str, str]) -> list[tuple[str, str, str]]:
    values = []
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == f"{ENVIRONMENT_PREFIX}CONFIG":
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in section_of:
            known = [ENVIRONMENT_PREFIX + field.upper() for field in section_of]
            raise ConfigError(f"the environment has an unknown variable {variable}{nearest(variable, known)}")
        values.append((section_of[name], name, environment[variable]))
    return values


def _file_values(file: str) -> list[tuple[str, str, Any]]:
    try:
        tables = tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {file}: {error}") from error
    known = sections()
    values = []
    for section, table in tables.items():
        if section not in known:
            raise ConfigError(f"{file}: unknown table [{section}]{nearest(section, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} must be a table, [{section}]")
        for name, value in table.items():
            if name not in known[section].__struct_fields__:
                fields = known[section].__struct_fields__
                raise ConfigError(f"{file}: unknown key {name!r} in [{section}]{nearest(name, fields)}")
            values.append((section, name, value))
    return values
