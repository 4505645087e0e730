"""Lists in the documents that follow from the code: the rooms, the modules, the levels of scheduling, the endpoints,
the dialects of engines.

A page marks the place of a list: everything between `<!-- NAME: ... -->` and `<!-- end of NAME -->` is written anew.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kit import ROOT

from llmserve.engines.dialects import DIALECTS, UNKNOWN, Dialect
from llmserve.gateway.endpoints import BATCH_PATHS, ENDPOINTS, Answers, Endpoint, FormFile

MADE = "<!-- {name}: made by scripts/lab/make/reference_pages.py from the code -->"
DESCRIBED = re.compile(r"^ *(\w+) +: (.*)$", re.MULTILINE)


@cache
def rules() -> Mapping[str, Any]:
    """The names of tests/test_tidy.py, which knows the floors and the imports."""
    return runpy.run_path(str(ROOT / "tests" / "test_tidy.py"))


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    return " ".join(docstring(path).partition("\n\n")[0].split()).removesuffix(".")


def folder_of(room: str) -> Path:
    own = ROOT / room
    return own if own.is_dir() else ROOT / "llmserve" / room


def rooms() -> Iterator[tuple[int, str, str]]:
    """(floor, path, sentence) of each room, from the highest floor down. What stands flat in llmserve/ is left out."""
    floors = rules()["FLOORS"]
    for number, names in reversed(list(enumerate(floors, start=1))):
        for room in names:
            folder = folder_of(room)
            if room != "llmserve" and folder.is_dir():
                yield number, f"{folder.relative_to(ROOT).as_posix()}/", sentence(folder / "__init__.py")


def room_rows() -> str:
    return table(("floor", "room", "what it is"), [(str(number), path, text) for number, path, text in rooms()])


def modules_page() -> str:
    lines = [
        "# Modules",
        MADE.format(name="modules"),
        "",
        "The modules of each room that others use, or that a reader looks for, as the docstring of the room's "
        "`__init__` describes them. The rooms stand in the order of their floors: a room imports only from rooms below "
        "it on this page ([design](../design.md#the-map)).",
    ]
    for _, path, text in rooms():
        described = list(DESCRIBED.findall(docstring(ROOT / path / "__init__.py")))
        lines += ["", f"## {path}", "", f"{text}."]
        if described:
            lines += ["", table(("module", "what it is"), [(f"`{name}`", what) for name, what in described])]
        for inner in sorted((ROOT / path).glob("*/__init__.py")):
            described = DESCRIBED.findall(docstring(inner))
            rows = [(f"`{inner.parent.name}/{name}`", what) for name, what in described]
            lines += ["", f"**{inner.parent.name}/**: {sentence(inner)}."]
            lines += ["", table(("module", "what it is"), rows)] if rows else []
    return "\n".join(lines) + "\n"


def level_rows() -> str:
    graph, room = rules()["graph"](), rules()["room"]

    @cache
    def level(module: str) -> int:
        below = [other for other in graph[module] if room(other) == "scheduling"]
        return 1 + max(map(level, below), default=0)

    levels = defaultdict(list)
    for module in sorted(graph):
        if room(module) == "scheduling" and rules()["modules"]()[module].name != "__init__.py":
            name = module.removeprefix("llmserve.scheduling.").replace(".", "/")
            levels[level(module)].append(f"`{name}`")
    return table(("level", "modules"), [(str(number), " · ".join(names)) for number, names in sorted(levels.items())])


def scheduled_by(endpoint: Endpoint) -> str:
    if isinstance(endpoint.reads, Answers):
        return "the predicted length of the answer"
    return "the size of the file" if isinstance(endpoint.reads, FormFile) else "the prompt alone"


def endpoint_rows() -> str:
    paths = defaultdict(list)
    for path, endpoint in ENDPOINTS.items():
        paths[scheduled_by(endpoint)].append(f"`{path}`")
    return table(("endpoints", "scheduled by"), [(", ".join(names), how) for how, names in paths.items()])


def batch_paths() -> str:
    return ", ".join([f"`{path}`" for path in BATCH_PATHS])


def dialect_rows() -> str:
    heads = ("kind", "as of", "recognised by", "settings", "load", "health", "priority", "loads")
    return table(heads, [_dialect(dialect) for dialect in (*DIALECTS, UNKNOWN)])


def _dialect(dialect: Dialect) -> tuple[str, ...]:
    signs = [f"models of `{dialect.owner}`"] if dialect.owner else []
    signs += [dialect.recognises.__doc__ or ""] if dialect.recognises is not None else []
    return (
        *(dialect.name, dialect.source, "; ".join(signs) + ", if it tells its settings" * dialect.confirmed),
        *(_paths(path for path, _ in readers) for readers in (dialect.settings, dialect.load)),
        _paths([dialect.health] if dialect.health else []),
        "as it is set up" if dialect.priority is None else dialect.priority.value,
        "yes" if dialect.swaps_models else "",
    )


def _paths(paths: Iterable[str]) -> str:
    return ", ".join([f"`{path}`" for path in dict.fromkeys(paths)])


LISTS: Mapping[str, tuple[tuple[str, Callable[[], str]], ...]] = {  # by page
    "docs/design.md": (("rooms", room_rows), ("levels", level_rows)),
    "docs/guide/endpoints.md": (("endpoints", endpoint_rows),),
    "docs/guide/batch-jobs.md": (("endpoints of batches", batch_paths),),
    "docs/reference/engines.md": (("dialects", dialect_rows),),
}


def with_lists(text: str, lists: tuple[tuple[str, Callable[[], str]], ...]) -> str:
    """The text of a page with its lists written anew. Raises ValueError where a mark is missing."""
    for name, made in lists:
        pattern = re.compile(rf"<!-- {name}: .*?-->.*?<!-- end of {name} -->", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"the page does not have the marks of `{name}` once")
        block = f"{MADE.format(name=name)}\n\n{made()}\n\n<!-- end of {name} -->"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])
