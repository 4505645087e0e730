"""Which extra of the installation a command needs, told before the command does anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from llmserve.errors import ConfigError


def need(extra: str, *modules: str, why: str, otherwise: str = "") -> None:
    """Raises ConfigError with the line to run where one of the extra's modules is not installed.

    why : what needs them, the subject of the sentence.  otherwise : what may be done instead.
    Nothing is imported: some of these modules take seconds.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            instead = f", or {otherwise}" if otherwise else ""
            raise ConfigError(f"{why} needs {module}: {install(extra)}{instead}")


def install(extra: str) -> str:
    """The line that installs an extra."""
    return f"pip install 'llmserve[{extra}]'"


def need_embedded() -> None:
    """Raises ConfigError where the embedded engine cannot run."""
    need(
        "embedded",
        *("torch", "transformers", "safetensors"),
        why="the embedded engine",
        otherwise="name a server with --engine URL",
    )


def need_plot(path: Path | None, flag: str = "--plot") -> None:
    """Raises ConfigError where a picture is asked for and nothing can be drawn.

    path : of the picture; None: there is none.  flag : by which it was named.
    """
    if path is not None:
        need("plot", "matplotlib", why=flag)
