"""Which room may import which, and alarms of size.

A room is a folder of llmserve/, a module that stands flat in it, or another package. Rooms stand on floors: a room
imports only from floors below its own, so there are no circles of rooms. Imports inside functions and for types count,
too.

The numbers of lines are alarms, not targets. Whoever meets one asks what belongs together; if the answer is "all of
it", the number grows. `scripts/look` prints the classes with most attributes and parameters.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("llmserve", "predictor", "bins")
MEASURED = (*PACKAGES, "scripts/lab")
CLASS_LINES, FILE_LINES, FUNCTION_LINES = 500, 700, 80
FLAT_MAX = 5  # modules that stand flat in llmserve/
SCHEDULING_LEVELS = 10  # of imports among the modules of scheduling

FLOORS: tuple[tuple[str, ...], ...] = (
    ("llmserve", "errors", "spelling", "predictor.errors", "predictor.prompt"),
    ("predictor.records",),
    ("bins",),
    ("request",),
    ("runtime", "predictor"),
    ("wire",),
    ("programs",),
    ("scheduling",),
    ("settings",),
    ("part",),
    ("http",),
    ("demo",),
    ("engines",),
    ("calls",),
    ("forecasts",),
    ("estimates",),
    ("live",),
    ("discovery",),
    ("observe",),
    ("kv_events",),
    ("tenants",),
    ("gateway",),
    ("forecast",),
    ("planning",),
    ("machines",),
    ("jobs",),
    ("webhook",),
    ("web",),
    ("workers",),
    ("simulation",),
    ("server",),
    ("doctor",),
    ("commands",),
    ("__main__",),
)
NOUNS = ("predictor.errors", "predictor.prompt", "predictor.records")  # of the predictor, which all rooms may use
PREDICTOR_USERS = ("forecasts", "forecast", "simulation", "server", "commands")  # rooms that may import its rest


# ---- imports -------------------------------------------------------------------------------------------------------


@cache
def modules() -> Mapping[str, Path]:
    """The files of all modules, by the names of the modules."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """The modules of the project that a module imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in modules()} or {node.module}
    return {module for module in found if module in modules()} - {name}


@cache
def graph() -> Mapping[str, set[str]]:
    return {name: imports(name, path) for name, path in modules().items()}


def room(module: str) -> str:
    """The room of a module. Every room of the predictor but its nouns is one."""
    package, _, rest = module.partition(".")
    if package == "llmserve":
        return rest.partition(".")[0] or "llmserve"
    return module if module in NOUNS else package


def floors() -> Mapping[str, int]:
    return {name: number for number, names in enumerate(FLOORS) for name in names}


def circles(graph: Mapping[str, Iterable[str]]) -> set[tuple[str, ...]]:
    """The largest sets of modules of which each reaches each other one, with two modules or more."""

    def reached(start: str) -> set[str]:
        found, ahead = set[str](), [start]
        while ahead:
            fresh = set(graph.get(ahead.pop(), ())) - found
            found |= fresh
            ahead += fresh
        return found

    reach = {name: reached(name) for name in graph}
    return {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph if name in reach[name]
    }


def test_every_room_stands_on_a_floor() -> None:
    rooms = {room(module) for module in modules()}
    assert rooms == set(floors()), "FLOORS has every room, and no room that is gone"


def test_a_room_imports_only_from_floors_below() -> None:
    floor = floors()
    upward = {
        (module, other)
        for module, others in graph().items()
        for other in others
        if room(other) != room(module) and floor[room(other)] >= floor[room(module)]
    }
    assert sorted(upward) == [], "imports from a higher floor, or from another room of the same floor"


def test_no_modules_import_each_other_in_circles() -> None:
    assert circles(graph()) == set()


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == {("a", "b", "c")}


def test_the_http_library_knows_nothing_of_what_is_served() -> None:
    others = {other for module, others in graph().items() if room(module) == "http" for other in others}
    assert {room(other) for other in others} <= {"http", "runtime"}


def test_only_those_who_forecast_import_the_predictor() -> None:
    users = {room(module) for module, others in graph().items() if any(room(other) == "predictor" for other in others)}
    assert users - {"predictor"} <= set(PREDICTOR_USERS)


def test_few_modules_stand_flat() -> None:
    flat = [path.name for path in (ROOT / "llmserve").glob("*.py") if path.name != "__init__.py"]
    assert len(flat) <= FLAT_MAX, flat


def test_scheduling_has_the_documented_number_of_levels() -> None:
    below = {
        name: {other for other in others if room(other) == "scheduling"}
        for name, others in graph().items()
        if room(name) == "scheduling"
    }

    @cache
    def level(module: str) -> int:
        return 1 + max([level(other) for other in below[module]], default=0)

    assert max(map(level, below)) <= SCHEDULING_LEVELS


# ---- what each folder says of itself --------------------------------------------------------------------------------


def described(folder: str) -> set[str]:
    """The modules that the docstring of a folder's __init__ describes, a line each: `module : what it is`."""
    return set(
        re.findall(r"^ *(\w+) +: ", ast.get_docstring(ast.parse(modules()[folder].read_text())) or "", re.MULTILINE)
    )


def test_a_folder_describes_each_of_its_modules_that_others_use() -> None:
    missing = defaultdict(set)
    for module, others in graph().items():
        for other in others:
            folder, _, name = other.rpartition(".")
            if room(other) != room(module) and folder.count(".") >= 1 and name not in described(folder):
                missing[folder].add(name)
    assert dict(missing) == {}, "each needs a line in the docstring of its folder's __init__"


def test_a_folder_describes_no_module_that_is_gone() -> None:
    folders = [name for name, path in modules().items() if path.name == "__init__.py" and name.startswith("llmserve.")]
    gone = {
        folder: names
        for folder in folders
        if (names := {n for n in described(folder) if f"{folder}.{n}" not in modules()})
    }
    assert gone == {}


# ---- sizes ---------------------------------------------------------------------------------------------------------


def sizes(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, lines, alarm) of the file, its classes and its functions."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    yield name, len(text.splitlines()), FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield f"{name} {node.name}", lines, CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES


@pytest.mark.parametrize("package", MEASURED)
def test_nothing_is_so_large_that_it_wants_a_second_look(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert {name: lines for path in paths for name, lines, alarm in sizes(path) if lines > alarm} == {}
