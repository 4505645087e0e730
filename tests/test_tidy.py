"""Alarms of size: a class, file or function of this size wants a second look, and a name for what could leave it.

The numbers are no targets. Whoever meets one asks what belongs together; if the answer is "all of it", the number
grows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("llmserve", "predictor", "bins", "scripts/lab")
CLASS_LINES, FILE_LINES, FUNCTION_LINES = 500, 700, 80
FLOORS = 10  # levels of imports among the modules of scheduling

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def lines_of(node: ast.AST) -> int:
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def sizes(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, lines, limit) of the file, its classes and its functions."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    yield name, len(text.splitlines()), FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield f"{name} {node.name}", lines_of(node), CLASS_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name} {node.name}", lines_of(node), FUNCTION_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_too_large(path: Path) -> None:
    too_long = {name: lines for name, lines, lines_max in sizes(path) if lines > lines_max}
    assert not too_long


def imports(path: Path) -> set[str]:
    """The modules of scheduling that a module of scheduling imports."""
    nodes = ast.walk(ast.parse(path.read_text()))
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[-1] for module in named if module.startswith("llmserve.scheduling.")}


def test_scheduling_has_the_documented_number_of_levels() -> None:
    modules = {path.stem: imports(path) for path in (ROOT / "llmserve" / "scheduling").rglob("[a-z]*.py")}

    def floor(module: str) -> int:
        return 1 + max([floor(below) for below in modules[module]], default=0)

    assert max(map(floor, modules)) <= FLOORS
