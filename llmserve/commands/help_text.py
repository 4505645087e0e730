"""The form of --help, alike in all commands: a word for each value, and the default of each flag."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

KINDS: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
OF_NAMES = {"positive": "N", "natural": "N", "odd": "N"}  # of functions that read numbers; others read an X
NO_DEFAULT: tuple[Any, ...] = (None, False, (), [], argparse.SUPPRESS)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Names values by their type where the flag does not, and adds defaults that the text does not tell."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.type is None:
            return "TEXT"
        kind: Any = action.type
        return KINDS.get(kind) or OF_NAMES.get(getattr(kind, "__name__", ""), "X")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if not text or text is argparse.SUPPRESS or "default" in text or not action.option_strings:
            return text
        if action.default in NO_DEFAULT or action.default is True:
            return text
        value = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return f"{text} (default: {value})"
