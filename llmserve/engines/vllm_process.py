"""vLLM servers of our own: one for each replica, each with GPUs of its own, started as `EngineProcess`es.

What a server is started with is decided by functions that touch nothing; only `visible_gpus`, `check_model` and
`check_python` look at the machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path

from llmserve.engines.engine_process import EngineProcess, free_ports
from llmserve.errors import ConfigError
from llmserve.extras import install

OURS = ("--model", "--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")
DATA_PARALLEL = ("--data-parallel-size", "-dp")
PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
    DATA_PARALLEL,
)
CHECK_S = 60.0  # longest answer of the interpreter, or of nvidia-smi
HAS_VLLM = (
    "import importlib.util, sys; spec = importlib.util.find_spec('vllm'); sys.exit(spec is None or not spec.origin)"
)


@dataclass(frozen=True)
class Replica:
    """One server to be: its name, its command line for a port, and variables beside our own."""

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
            log_file=log_folder / f"{self.name}.log",
        )


def processes(replicas: Sequence[Replica], *, start_s: float, log_folder: Path) -> list[EngineProcess]:
    """Not started yet; each with a port of its own. Their logs are log_folder/vllm-0.log, ..."""
    ports = free_ports(len(replicas))
    pairs = zip(replicas, ports, strict=True)
    return [replica.process(port, start_s=start_s, log_folder=log_folder) for replica, port in pairs]


def plan(
    model: str, *, python: str, slots: int | None, args: Sequence[str], count: int | None, gpus: Sequence[str]
) -> list[Replica]:
    """The replicas vllm-0, vllm-1, ...

    slots  --max-num-seqs; None: vLLM's own  count  of replicas; None: as many as the GPUs allow, at least one
    args   for vLLM, as the user gave them   gpus   as CUDA_VISIBLE_DEVICES names them; none: vLLM runs without

    Raises ConfigError when the replicas need more GPUs than there are, or `args` say what is ours to say.
    """
    for flag in OURS:
        if any(_flag_of(word) == flag for word in args):
            raise ConfigError(f"{flag} is not for vLLM's arguments: llmserve chooses it")
    command = partial(_command, python, os.path.expanduser(model), slots, tuple(args))
    each = _gpus_each(args)
    if not gpus:
        return [Replica(f"vllm-{index}", command) for index in range(count or 1)]
    count = count or max(1, len(gpus) // each)
    if count * each > len(gpus):
        raise ConfigError(f"replicas: {count} of {each} GPUs each need {count * each}, there are {len(gpus)}")
    parts = [",".join(gpus[index * each : (index + 1) * each]) for index in range(count)]
    return [Replica(f"vllm-{index}", command, {"CUDA_VISIBLE_DEVICES": part}) for index, part in enumerate(parts)]


def slots_of(slots: int | None, args: Sequence[str]) -> int | None:
    """Requests that a server, or each of its data-parallel ranks, runs at once: as said to us, or to vLLM.

    None when nobody has said: vLLM then chooses by its GPU's memory. Raises ConfigError when the two differ.
    """
    said = {_number(text, "--max-num-seqs") for text in _values(args, "--max-num-seqs")}
    said |= {slots} if slots is not None else set()
    if len(said) > 1:
        numbers = " and ".join(map(str, sorted(said)))
        raise ConfigError(f"slots: --slots and vLLM's --max-num-seqs are the same thing, but say {numbers}")
    return said.pop() if said else None


def ranks_of(args: Sequence[str]) -> int:
    """Data-parallel ranks of a server, each with its own requests."""
    return _number_of(args, DATA_PARALLEL)


def _command(python: str, model: str, slots: int | None, args: tuple[str, ...], port: int) -> list[str]:
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    if not _values(args, "--served-model-name"):
        words += ["--served-model-name", Path(model).resolve().name if Path(model).exists() else model]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    if slots is not None and not _values(args, "--max-num-seqs"):
        words += ["--max-num-seqs", str(slots)]
    return [*words, *args]


def _gpus_each(args: Sequence[str]) -> int:
    each = 1
    for flags in PARALLEL:
        each *= _number_of(args, flags)
    return each


def _number_of(args: Sequence[str], flags: tuple[str, str]) -> int:
    """1 when it is not given; the last when it is given twice."""
    return _number((_values(args, *flags) or ["1"])[-1], flags[0])


def _flag_of(word: str) -> str:
    """vLLM takes underscores as well."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _values(args: Sequence[str], *flags: str) -> list[str]:
    """What the flags are given, as `--flag VALUE` or `--flag=VALUE`, in order."""
    values = []
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        if _flag_of(word) in flags:
            values.append(word.partition("=")[2] if "=" in word else following)
    return values


def _number(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"vLLM's {flag} must be a whole number of at least 1, not {text!r}")
    return int(text)


# ---- what there is on this machine --------------------------------------------------------------------------------


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that we may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # so CUDA reads it
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=CHECK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip().isdecimal()]


def check_model(model: str) -> None:
    """Raises ConfigError when this can be neither a model folder nor a hub id. What a hub id holds, vLLM says."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise ConfigError(f"the model folder {model} has no config.json")
    elif not path.exists() and "://" not in model and _is_path(model):
        raise ConfigError(f"there is no model folder {model}")


def _is_path(model: str) -> bool:
    """A hub id is NAME or OWNER/NAME."""
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1


def check_python(python: str) -> None:
    """Raises ConfigError when it cannot be run or has no vLLM, which is not imported: that would take seconds."""
    try:
        asked = subprocess.run([python, "-c", HAS_VLLM], capture_output=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine_python: {python} cannot be run: {error}") from error
    if asked.returncode != 0:
        raise ConfigError(
            f"there is no vLLM for {python}: {install('vllm')}, or name the Python of an environment that has it with "
            "--engine-python"
        )
