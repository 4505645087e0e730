"""Checks that the extras of the installation that a command needs are installed, before the command does anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from llmserve.errors import ConfigError
from llmserve.runtime.installation import pip_install


def need(extra: str, *modules: str, why: str, otherwise: str = "") -> None:
    """Raise ConfigError, with the command that installs the extra, if one of the modules is not installed.

    why : what needs the modules, the subject of the message.  otherwise : an alternative, in the imperative.
    Nothing is imported: some of these modules take seconds.
    """
    module = missing(*modules)
    if module is not None:
        instead = f", or {otherwise}" if otherwise else ""
        raise ConfigError(f"{why} needs {module}: {pip_install(extra)}{instead}")


def missing(*modules: str) -> str | None:
    """Return the first of these modules that is not installed; None: all are."""
    return next((module for module in modules if importlib.util.find_spec(module) is None), None)


EMBEDDED = ("torch", "transformers", "safetensors", "onnxruntime", "aiohttp")
"""Modules of the extra `embedded`."""


def need_embedded() -> None:
    """Raise ConfigError if the embedded engine cannot run."""
    need(
        "embedded",
        *EMBEDDED,
        why="the embedded engine",
        otherwise="name a server with --engine URL",
    )


def need_predictor(why: str) -> None:
    """Raise ConfigError if a trained predictor cannot run."""
    need("predictor", "onnxruntime", "tokenizers", why=why)


def need_plot(path: Path | None, flag: str = "--plot") -> None:
    """Raise ConfigError if a picture is requested but matplotlib is missing.

    path : of the picture; None: no picture.  flag : the flag that requests the picture.
    """
    if path is not None:
        need("plot", "matplotlib", why=flag)
