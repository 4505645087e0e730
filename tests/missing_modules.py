"""An installation without some extra, for tests of what is said then."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """These top-level modules are not found by who looks for them before importing them."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in modules else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
