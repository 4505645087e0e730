"""vLLM servers that llmserve starts: one `EngineProcess` per replica, each replica with its own GPUs.

All functions are pure, except `visible_gpus`, `check_model` and `check_python`, which read the machine's state, and
`processes`, which reserves ports.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path

from llmserve.engines.process import EngineProcess, free_ports
from llmserve.errors import ConfigError
from llmserve.runtime.installation import pip_install

RESERVED = ("--model", "--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")  # set by llmserve
DATA_PARALLEL = ("--data-parallel-size", "-dp")
PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
    DATA_PARALLEL,
)
SCHEDULING, PRIORITY = "--scheduling-policy", "priority"
TELLS_CACHED = "--enable-prompt-tokens-details"  # answers say how much of their prompt was in the cache
CHECK_S = 60.0  # time limit of the interpreter, or of nvidia-smi
HAS_VLLM = (
    "import importlib.util, sys; spec = importlib.util.find_spec('vllm'); sys.exit(spec is None or not spec.origin)"
)


@dataclass(frozen=True)
class Replica:
    """A server to start: its name, its command line for a port, and additional environment variables."""

    name: str
    command: Callable[[int], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)

    def process(self, port: int, *, start_s: float, log_folder: Path) -> EngineProcess:
        return EngineProcess(
            self.name,
            self.command,
            start_s=start_s,
            port=port,
            environment=self.environment,
            key_variable="VLLM_API_KEY",
            log_file=log_folder / f"{self.name}.log",
        )


def processes(replicas: Sequence[Replica], *, start_s: float, log_folder: Path) -> list[EngineProcess]:
    """Return unstarted processes, each with its own port. Logs are log_folder/vllm-0.log, ..."""
    ports = free_ports(len(replicas))
    pairs = zip(replicas, ports, strict=True)
    return [replica.process(port, start_s=start_s, log_folder=log_folder) for replica, port in pairs]


def plan(
    model: str, *, python: str, slots: int | None, args: Sequence[str], count: int | None, gpus: Sequence[str]
) -> list[Replica]:
    """Return the replicas vllm-0, vllm-1, ...

    slots  --max-num-seqs; None: vLLM's default
    count  number of replicas; None: as many as the GPUs allow, at least one
    args   further arguments of vLLM, from the user
    gpus   names as in CUDA_VISIBLE_DEVICES; empty: vLLM runs without a GPU

    Raises ConfigError when the replicas need more GPUs than exist, or when `args` has a reserved flag.
    """
    check_args(args)
    command = partial(_command_at, python, os.path.expanduser(model), slots, tuple(args))
    size = _gpus_per_replica(args)
    if not gpus:
        return [Replica(f"vllm-{index}", command) for index in range(count or 1)]
    count = count or max(1, len(gpus) // size)
    if count * size > len(gpus):
        raise ConfigError(f"replicas: {count} of {size} GPUs each need {count * size} GPUs, there are {len(gpus)}")
    parts = [",".join(gpus[index * size : (index + 1) * size]) for index in range(count)]
    return [Replica(f"vllm-{index}", command, {"CUDA_VISIBLE_DEVICES": part}) for index, part in enumerate(parts)]


def check_args(args: Sequence[str]) -> None:
    """Raise ConfigError when the user's arguments have a reserved flag."""
    for flag in RESERVED:
        if any(_flag_of(word) == flag for word in args):
            raise ConfigError(f"{flag} is not allowed among vLLM's arguments: llmserve sets {flag}")


def slots_of(slots: int | None, args: Sequence[str]) -> int | None:
    """Return the slots of a server, or of each of its data-parallel ranks, from `slots` or vLLM's --max-num-seqs.

    None when neither is set: vLLM then chooses by its GPU's memory. Raises ConfigError when the two differ.
    """
    values = {_number(text, "--max-num-seqs") for text in _values(args, "--max-num-seqs")}
    values |= {slots} if slots is not None else set()
    if len(values) > 1:
        numbers = " and ".join(map(str, sorted(values)))
        raise ConfigError(f"slots: --slots and vLLM's --max-num-seqs set the same limit, but differ: {numbers}")
    return values.pop() if values else None


def goes_by_priority(args: Sequence[str]) -> bool:
    """Whether a server starts its waiting requests by priority."""
    return _values(args, SCHEDULING)[-1:] in ([], [PRIORITY])


def ranks_of(args: Sequence[str]) -> int:
    """Return the number of a server's data-parallel ranks, each of which has its own slots."""
    return _number_of(args, DATA_PARALLEL)


def _command_at(python: str, model: str, slots: int | None, args: tuple[str, ...], port: int) -> list[str]:
    return command(python, model, slots, args, "127.0.0.1", str(port))


def command(python: str, model: str, slots: int | None, args: Sequence[str], host: str, port: str) -> list[str]:
    """The words that start a server. slots, args : as in `plan`"""
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    if not _values(args, "--served-model-name"):
        words += ["--served-model-name", Path(model).resolve().name if Path(model).exists() else model]
    words += ["--host", host, "--port", port]
    if slots is not None and not _values(args, "--max-num-seqs"):
        words += ["--max-num-seqs", str(slots)]
    if not _values(args, SCHEDULING):
        words += [SCHEDULING, PRIORITY]
    return [*words, TELLS_CACHED, *args]  # --no-enable-prompt-tokens-details among args wins


def _gpus_per_replica(args: Sequence[str]) -> int:
    gpus = 1
    for flags in PARALLEL:
        gpus *= _number_of(args, flags)
    return gpus


def _number_of(args: Sequence[str], flags: tuple[str, str]) -> int:
    """Return the last value of a flag; 1 when the flag is absent."""
    return _number((_values(args, *flags) or ["1"])[-1], flags[0])


def _flag_of(word: str) -> str:
    """Return the flag of a word, with dashes: vLLM also accepts underscores."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _values(args: Sequence[str], *flags: str) -> list[str]:
    """Return the values of the flags, from `--flag VALUE` and `--flag=VALUE`, in order."""
    values = []
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        if _flag_of(word) in flags:
            values.append(word.partition("=")[2] if "=" in word else following)
    return values


def _number(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"vLLM's {flag} must be a whole number of at least 1, not {text!r}")
    return int(text)


# ---- checks of this machine ---------------------------------------------------------------------------------------


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the usable GPUs, by their names in CUDA_VISIBLE_DEVICES; by default nvidia-smi's indices."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # as CUDA does
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        reply = subprocess.run(query, capture_output=True, text=True, timeout=CHECK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in reply.stdout.splitlines() if line.strip().isdecimal()]


def check_model(model: str) -> None:
    """Raise ConfigError when the name is neither a model folder nor a possible hub id. vLLM itself checks hub ids."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise ConfigError(f"the model folder {model} has no config.json")
    elif not path.exists() and "://" not in model and _is_path(model):
        raise ConfigError(f"there is no model folder {model}")


def _is_path(model: str) -> bool:
    """Whether the name cannot be a hub id, which is NAME or OWNER/NAME."""
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1


def check_python(python: str) -> None:
    """Raise ConfigError when the interpreter cannot be run or has no vLLM. vLLM is not imported: that takes seconds."""
    try:
        probe = subprocess.run([python, "-c", HAS_VLLM], capture_output=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine_python: {python} cannot be run: {error}") from error
    if probe.returncode != 0:
        raise ConfigError(
            f"there is no vLLM for {python}: {pip_install('vllm')}, or name the Python of an environment that has it "
            "with --engine-python"
        )
