"""Run a part of the laboratory: `python scripts/lab NAME`. Without a NAME it lists them.

A name is a module of questions/, campaigns/ or make/, with dots: `dispatch.live` is questions/dispatch/live.py, and
`dispatch` is questions/dispatch/run.py.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

LAB = Path(__file__).resolve().parent
FOLDERS = ("questions", "campaigns", "make", ".")


def scripts() -> Iterator[tuple[str, str, str]]:
    """(name, module, first line of its docstring) of each module with a `main`."""
    for folder in FOLDERS:
        for path in sorted((LAB / folder).rglob("*.py") if folder != "." else LAB.glob("compare_*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
                module = ".".join(path.relative_to(LAB).with_suffix("").parts)
                name = module.removeprefix(f"{folder}.").removesuffix(".run")
                yield name, module, (ast.get_docstring(tree) or "").partition("\n")[0]


def main() -> object:
    known = {name: (module, text) for name, module, text in scripts()}
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        width = max(map(len, known))
        print(__doc__, *[f"{name:<{width}}  {text}" for name, (_, text) in known.items()], sep="\n")
        return 0 if len(sys.argv) < 2 else f"there is no {sys.argv[1]}"
    name = sys.argv[1]
    sys.argv = [f"lab {name}", *sys.argv[2:]]
    return import_module(known[name][0]).main()


if __name__ == "__main__":
    sys.path.insert(1, str(LAB.parents[1]))
    sys.exit(main())
