"""An installation without some extra, for tests of the error messages."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make find_spec find none of these top-level modules."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in modules else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
