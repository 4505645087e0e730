"""Writes the pages "in one page" of docs/papers: lines of the code, what they print and draw, and a notebook of each.

    python scripts/lab algorithm_pages             # renews all pages
    python scripts/lab algorithm_pages --check     # exit status 1 if a page shows other lines or prints other numbers
    python scripts/lab algorithm_pages flex        # only docs/papers/flex-algorithm.md

A Python block of a page whose first line is `# FILE: NAME, NAME ...` is an excerpt: these functions of the file,
without their docstrings. The other Python blocks run, one after the other; what a block prints stands in the plain
block after it, and a picture after it is its `figure`. In the notebook an excerpt is a cell that can be changed:
`%%into MODULE` puts its functions in the place of the module's own, so that llmserve itself runs the changed lines.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import ROOT
from kit.progress import log

FOLDER = ROOT / "docs" / "papers"
SUFFIX = "-algorithm"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"# ([\w/]+\.py): (.+)\n")
PICTURE = re.compile(r"\s*!\[[^\]]*\]\(([\w.-]+\.png)\)\n")
DPI = 130
INTO = '''import importlib
import inspect


def into(module, code):
    """Put the functions of a cell in the place of a module's own: what you change here, llmserve does from then on."""
    names = vars(importlib.import_module(module))
    before = dict(names)
    exec(code, names)
    for name, old in before.items():
        if inspect.isclass(old) and names[name] is not old:  # of a class, only the methods that the cell has
            for method, function in vars(names[name]).items():
                if inspect.isfunction(function):
                    setattr(old, method, function)
            names[name] = old
'''
REGISTER = """

get_ipython().register_magic_function(lambda line, cell: into(line.strip(), cell), "cell", "into")
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a page. language : of a fenced block; None: text"""

    language: str | None
    body: str

    @property
    def excerpt(self) -> tuple[str, list[str]] | None:
        """(file, names of functions) of an excerpt, else None."""
        head = EXCERPT.match(self.body) if self.language == "python" else None
        return None if head is None else (head[1], head[2].split(", "))

    @property
    def runs(self) -> bool:
        return self.language == "python" and self.excerpt is None

    @property
    def text(self) -> str:
        return self.body if self.language is None else f"```{self.language}\n{self.body}```\n"


def parts_of(page: str) -> list[Part]:
    parts, end = [], 0
    for block in FENCED.finditer(page):
        parts += [Part(None, page[end : block.start()]), Part(block[1], block[2])]
        end = block.end()
    return [part for part in [*parts, Part(None, page[end:])] if part.body]


# ---- excerpts -------------------------------------------------------------------------------------------------------


def with_excerpts(parts: Sequence[Part]) -> list[Part]:
    """The parts with the lines that the files have now."""
    return [part if part.excerpt is None else Part("python", excerpt(*part.excerpt)) for part in parts]


def excerpt(file: str, names: Sequence[str]) -> str:
    """Functions of a file, without docstrings; a method is "Class.method". Raises ValueError for unknown names."""
    source = (ROOT / file).read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    texts: list[str] = []
    owner = ""
    for name in names:
        of_class, _, function = name.rpartition(".")
        scope: Sequence[ast.stmt] = tree.body
        head = ""
        if of_class:
            found = _named(tree.body, of_class, name)
            scope = found.body if isinstance(found, ast.ClassDef) else ()
            head = "" if of_class == owner else lines[found.lineno - 1] + "\n"
        text = "\n".join(_lines_of(_named(scope, function, name), lines))
        texts.append(text if of_class and not head else f"{head}{text}")
        if len(texts) > 1:
            texts[-1] = ("\n" if of_class and not head else "\n\n") + texts[-1]
        owner = of_class
    return f"# {file}: {', '.join(names)}\n" + "\n".join(texts) + "\n"


def _named(scope: Sequence[ast.stmt], name: str, whole: str) -> ast.FunctionDef | ast.ClassDef:
    for node in scope:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"there is no {whole}")


def _lines_of(node: ast.FunctionDef | ast.ClassDef, lines: Sequence[str]) -> list[str]:
    """The lines of a function, with its decorators and comments, without its docstring."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    kept = list(lines[first - 1 : node.end_lineno])
    doc = node.body[0]
    if ast.get_docstring(node) is not None:
        del kept[doc.lineno - first : (doc.end_lineno or doc.lineno) - first + 1]
    return kept


# ---- running --------------------------------------------------------------------------------------------------------


def run(parts: Sequence[Part], folder: Path | None) -> list[Part]:
    """The parts with what their blocks print now. folder : of the pictures; None: they are not drawn"""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(INTO, names)
    made: list[Part] = []
    printed = ""
    for place, part in enumerate(parts):
        if printed and part.text.strip():  # what was printed stands here, in the place of what was printed before
            made += [Part(None, "\n"), Part("", printed)] if made[-1].runs else [Part("", printed)]
            printed = ""
            if part.language == "":
                continue
            made += [Part(None, "\n")] if part.language is not None else []
        made.append(part)
        if part.excerpt is not None:
            names["into"](module_of(part.excerpt[0]), part.body)
        elif part.runs:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(part.body, f"block {place}", "exec"), names)
            printed = output.getvalue()
            if (picture := picture_after(parts, place)) and folder is not None:
                names["figure"].savefig(folder / picture, dpi=DPI)
    return made


def picture_after(parts: Sequence[Part], place: int) -> str | None:
    """The file of the picture that follows a block, or what the block prints."""
    for part in parts[place + 1 :]:
        if part.language is None and part.body.strip():
            picture = PICTURE.match(part.body)
            return None if picture is None else picture[1]
        if part.language not in ("", None):
            return None
    return None


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ---- notebooks -------------------------------------------------------------------------------------------------------


def notebook(parts: Sequence[Part], folder: Path) -> str:
    """The page as a notebook, with what its blocks printed and drew. folder : of the pictures"""
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        cells.append(
            {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source.strip("\n"), **more}
        )

    def add_code(source: str, outputs: Sequence[dict[str, Any]] = ()) -> None:
        add("code", source, execution_count=None, outputs=list(outputs))

    for place, part in enumerate(parts):
        if part.language is None:
            text = PICTURE.sub("\n", part.body, count=1) if _drawn_before(parts, place) else part.body
            if text.strip():
                add("markdown", text)
        elif part.excerpt is not None:
            add_code(f"%%into {module_of(part.excerpt[0])}\n{part.body}")
        elif part.runs:
            add_code(part.body, list(_outputs(parts, place, folder)))
        elif part.language or not _runs_before(parts, place):
            add("markdown", part.text)
        if len(cells) == 1:
            add_code(INTO + REGISTER)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _runs_before(parts: Sequence[Part], place: int) -> bool:
    """Whether this block is what the block before has printed."""
    before = [part for part in parts[:place] if part.language is not None or part.body.strip()]
    return bool(before) and before[-1].runs


def _drawn_before(parts: Sequence[Part], place: int) -> bool:
    return any(parts[at].runs and picture_after(parts, at) for at in range(max(0, place - 3), place))


def _outputs(parts: Sequence[Part], place: int, folder: Path) -> Iterator[dict[str, Any]]:
    after = next((part for part in parts[place + 1 :] if part.language is not None or part.body.strip()), None)
    if after is not None and after.language == "":
        yield {"output_type": "stream", "name": "stdout", "text": after.body}
    if (picture := picture_after(parts, place)) is not None:
        data = {"image/png": base64.b64encode((folder / picture).read_bytes()).decode()}
        yield {"output_type": "display_data", "data": data, "metadata": {}}


# ---- the command -----------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    return sorted(FOLDER.glob(f"*{SUFFIX}.md"))


def stale(page: Path, *, write: bool) -> list[str]:
    """What of a page differs from what the code has, prints and makes now. write : and renew it"""
    shown = page.read_text(encoding="utf-8")
    made = run(with_excerpts(parts_of(shown)), FOLDER if write else None)
    text = "".join(part.text for part in made)
    book = page.with_suffix(".ipynb")
    differing = [page.name] if text != shown else []
    if write:
        page.write_text(text, encoding="utf-8")
    book_text = notebook(made, FOLDER)
    if not book.exists() or book.read_text(encoding="utf-8") != book_text:
        differing.append(book.name)
    if write:
        book.write_text(book_text, encoding="utf-8")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of pages, such as flex (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "Agg")
    chosen = [page for page in pages() if not args.names or page.stem.removesuffix(SUFFIX) in args.names]
    if not chosen:
        sys.exit(f"algorithm_pages: there is no page of {', '.join(args.names)}")
    differing = []
    for page in chosen:
        log(page.stem)
        differing += stale(page, write=not args.check)
    for name in differing:
        print(f"docs/papers/{name} {'differs from the code' if args.check else 'is written'}")
    return 1 if differing and args.check else 0
