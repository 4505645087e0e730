"""The pages "in one page": the lines are the code's, the printed numbers are those that the lines give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kit import ROOT
from make.algorithm_pages import INTO, Part, excerpt, notebook, pages, parts_of, run, with_excerpts

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)


def test_there_is_a_page_for_each_algorithm() -> None:
    names = [page.stem.removesuffix("-algorithm") for page in pages()]
    assert names == ["batchmonitor", "flex", "herd", "multibin", "smdp"]


@every_page
def test_the_lines_of_a_page_are_the_codes(page: Path) -> None:
    shown = parts_of(page.read_text())
    assert with_excerpts(shown) == shown, "python scripts/lab algorithm_pages renews them"
    assert sum(part.excerpt is not None for part in shown) >= 1


@every_page
def test_a_notebook_is_its_page(page: Path) -> None:
    book = page.with_suffix(".ipynb").read_text()
    assert book == notebook(parts_of(page.read_text()), page.parent), "python scripts/lab algorithm_pages writes it"
    cells = json.loads(book)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert any(output["output_type"] == "stream" for cell in cells for output in cell.get("outputs", ()))
    assert any(output["output_type"] == "display_data" for cell in cells for output in cell.get("outputs", ()))


@every_page
def test_a_page_says_what_the_papers_set_up_had(page: Path) -> None:
    text = page.read_text()
    assert "## Beside the paper's own numbers" in text
    assert "## What the paper's set-up had that this has not" in text


@pytest.mark.slow
@every_page
def test_a_page_prints_what_it_shows(page: Path) -> None:
    """In a process of its own, because a page puts its lines in the place of the library's."""
    name = page.stem.removesuffix("-algorithm")
    command = [sys.executable, "scripts/lab", "algorithm_pages", "--check", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- how pages are made ---------------------------------------------------------------------------------------------


def test_an_excerpt_has_the_lines_without_the_docstrings() -> None:
    lines = excerpt("bins/edges.py", ["OnlineEdges.bin_of"]).splitlines()
    assert lines == [
        "# bins/edges.py: OnlineEdges.bin_of",
        "class OnlineEdges:",
        "    def bin_of(self, length: float) -> int:",
        "        return bisect_right(self.edges, length)",
    ]


def test_an_excerpt_of_a_function_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"there is no OnlineEdges\.gone"):
        excerpt("bins/edges.py", ["OnlineEdges.gone"])


def test_what_a_block_prints_replaces_what_the_page_has() -> None:
    page = "a\n\n```python\nprint(6 * 7)\n```\n\n```\n41\n```\n\nb\n\n```python\nx = 1\nprint(x)\n```\n\nc\n"
    made = "".join(part.text for part in run(parts_of(page), None))
    assert made == page.replace("41", "42").replace("c\n", "```\n1\n```\n\nc\n")
    assert "".join(part.text for part in run(parts_of(made), None)) == made


def test_a_changed_cell_changes_what_the_library_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "algorithm_of_a_test.py").write_text(
        "STEP = 2\ndef twice(x):\n    return STEP * x\n"
        "class Rule:\n    kept = 5\n    def of(self, x):\n        return twice(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import algorithm_of_a_test as module  # type: ignore[import-not-found]

    names: dict[str, object] = {}
    exec(INTO, names)
    into = names["into"]
    assert callable(into)
    rule = module.Rule()
    into("algorithm_of_a_test", "def twice(x):\n    return 100 * STEP * x\n")
    assert rule.of(1) == 200
    into("algorithm_of_a_test", "class Rule:\n    def of(self, x):\n        return -twice(x)\n")
    assert rule.of(1) == -200
    assert module.Rule.kept == 5


def test_text_is_kept_as_it_is() -> None:
    page = "# a\n\n```\nplain\n```\n\n    indented\n"
    assert parts_of(page)[1] == Part("", "plain\n")
    assert "".join(part.text for part in parts_of(page)) == page
