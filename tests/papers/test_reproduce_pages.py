"""The pages of scripts/reproduce.py: the table on top, the reasons, and pages that are written again."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import reproduce
from matplotlib.figure import Figure
from papers.page import NOT_EXPLAINED, About, Page, Section, disagreements, rows_of, verdict
from papers.rows import Report, Row, Rows, claim, in_parts

from llmserve.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = Rows(
    [
        Row("Fig. 11", {}, "throughput", "1/s", 3.0, 3.0, kind="derived"),
        Row("Fig. 9", {}, "throughput", "1/s", 3.0, 3.0),
        Row("Fig. 9", {}, "power", "W", 40.0),
        Row("Fig. 3", {"k": 1, "edges": "even"}, "latency", "ms", 38.9, 42.0, low=38.8, high=39.0),
        Row("Fig. 3", {"k": 2}, "latency", "ms", 20.0, 21.0),
        claim("Fig. 3", {"k": 2}, "latency rises", False),
        Row("Profiles", {}, "slope", "ms", 0.2),
    ]
)
REASONS = {"Fig. 3": {"latency": "It depends on the machine."}}
ABOUT = About("python scripts/reproduce.py tiny", "2 shared CPU cores", 1, 12.0, True, datetime.date(2026, 11, 22))


def test_the_table_on_top_says_what_agrees_and_what_does_not_and_why() -> None:
    head, _, *lines = [line for line in verdict(ROWS, REASONS).splitlines() if line.startswith("|")]
    assert head == "| figures and tables | agree | what does not agree | why |"
    cases = "38.9 instead of 42 (k=1, edges=even); 20 instead of 21 (k=2)"
    assert lines == [
        "| Fig. 9; Fig. 11 | 1 of 1 published, 1 of 1 derived |  |  |",
        f"| Fig. 3 | 0 of 3 published | latency: {cases} | It depends on the machine. |",
        f"|  |  | latency rises: does not hold (k=2) | {NOT_EXPLAINED} |",
        "| Profiles | nothing to compare with |  |  |",
    ]


def test_each_row_that_does_not_agree_is_named() -> None:
    assert disagreements(ROWS) == [
        "Fig. 3, k=1, edges=even: latency (ms): expected: 42, measured: 38.9 [38.8, 39]",
        "Fig. 3, k=2: latency (ms): expected: 21, measured: 20",
        "Fig. 3, k=2: latency rises: expected: said, measured: does not hold",
    ]


@pytest.mark.parametrize("quick", [True, False])
def test_a_page_is_read_back_for_how_it_was_measured(quick: bool) -> None:
    about = About(ABOUT.command, ABOUT.machine, 3, 12.0, quick, ABOUT.date)
    assert About.read(f"# Title\n\nText.\n\n{about.text()}\n\n## Section\n") == about
    with pytest.raises(ValueError, match="does not say"):
        About.read("# Title\n")


def test_shares_of_parts_follow_their_work() -> None:
    reported: list[tuple[str, float]] = []
    parts = [("short", 1.0, lambda: ROWS.of("Fig. 9")), ("long", 3.0, lambda: ROWS.of("Fig. 3"))]
    measured = list(in_parts(parts, lambda name, share: reported.append((name, share))))
    assert [row.figure for row in measured] == [*2 * ["Fig. 9"], *3 * ["Fig. 3"]]
    assert reported == [("short", 0.0), ("long", 0.25)]


# ---- pages that are written again -------------------------------------------------------------------------------


def figure(rows: Rows) -> Figure:
    return Figure()


def tiny(options: reproduce.Options) -> reproduce.Reproduction:
    """A reproduction in no time, whose page says whether there was a trace."""

    def measure(seed: int, quick: bool, report: Report) -> Rows:
        report("all", 0.0)
        return Rows([*ROWS, Row("Fig. 9", {"seed": seed}, "a third", "1", 1 / 3)])

    sections = (Section("Fig. 9", lambda rows: f"{len(rows)} rows.", rows_of("Fig. 9"), ("fig9", figure)),)
    page = Page("Tiny", lambda rows: f"Trace: {options.trace}.", sections, REASONS)
    return reproduce.Reproduction(measure, page)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a quick run with a trace wrote."""
    monkeypatch.setitem(reproduce.REPRODUCTIONS, "shepherd", ("Tiny", tiny))
    reproduce.main(["shepherd", "--quick", "--trace", "calls.csv", "--output-folder", str(tmp_path)])
    return tmp_path


def test_after_the_counts_the_rows_that_do_not_agree_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce.main(["shepherd", "--quick", "--output-folder", str(folder)])
    counts, head, *lines = capsys.readouterr().out.splitlines()
    assert counts == f"{folder / 'papers' / 'shepherd.md'}: agree 1 of 4 published, 1 of 1 derived"
    assert head == "3 do not agree (a quick run has few samples):"
    assert [line.strip() for line in lines] == disagreements(ROWS)


def test_a_page_written_again_from_its_rows_is_the_same(folder: Path) -> None:
    page, drawn = folder / "papers" / "shepherd.md", folder / "papers" / "shepherd-fig9.png"
    text = page.read_text()
    assert "Trace: calls.csv." in text
    assert text.index(verdict(ROWS, REASONS).splitlines()[-2]) < text.index("Trace:")
    drawn.unlink()
    reproduce.main(["shepherd", "--redraw", "--output-folder", str(folder)])
    assert page.read_text() == text
    assert drawn.exists()


def test_a_page_written_again_has_the_stored_rows_and_keeps_the_date_of_their_measurement(folder: Path) -> None:
    page = folder / "papers" / "shepherd.md"
    today = About.read(page.read_text())
    page.write_text(page.read_text().replace(today.date.isoformat(), "2020-02-03"))
    Rows([*ROWS, Row("Fig. 9", {}, "another", "", 8.25)]).write(folder / "results" / "shepherd.json")
    reproduce.main(["shepherd", "--redraw", "--output-folder", str(folder)])
    assert "|  | another |  |  | 8.25 |" in page.read_text()
    assert "Measured on 2020-02-03 on" in page.read_text()


@pytest.mark.parametrize(
    ("lost", "said"), [("results/shepherd.json", "there is no"), ("papers/shepherd.md", "No such")]
)
def test_without_rows_or_their_page_nothing_is_written_again(
    lost: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / lost).unlink()
    with pytest.raises(SystemExit):
        reproduce.main(["shepherd", "--redraw", "--output-folder", str(folder)])
    text = capsys.readouterr().err
    assert "--redraw" in text
    assert said in text
    assert lost in text


def test_a_file_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(options: reproduce.Options) -> reproduce.Reproduction:
        def measure(seed: int, quick: bool, report: Report) -> Rows:
            raise ConfigError("the trace is empty")

        return reproduce.Reproduction(measure, tiny(options).page)

    monkeypatch.setitem(reproduce.REPRODUCTIONS, "shepherd", ("Tiny", unreadable))
    with pytest.raises(SystemExit):
        reproduce.main(["shepherd", "--quick", "--output-folder", str(tmp_path)])
    assert "the trace is empty" in capsys.readouterr().err


# ---- the committed pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_a_committed_page_begins_with_the_verdict_of_its_rows_and_explains_what_does_not_agree(name: str) -> None:
    rows = Rows.read(DOCS / "results" / f"{name}.json")
    page = reproduce.REPRODUCTIONS[name][1](reproduce.Options(jobs=1, gsm8k=None)).page
    expected = verdict(rows, page.reasons)
    assert NOT_EXPLAINED not in expected
    assert (DOCS / "papers" / f"{name}.md").read_text().startswith(f"# {page.title}\n\n{expected}\n\n")


@pytest.mark.parametrize("name", list(reproduce.REPRODUCTIONS))
def test_reasons_are_for_rows_that_exist(name: str) -> None:
    rows = Rows.read(DOCS / "results" / f"{name}.json")
    page = reproduce.REPRODUCTIONS[name][1](reproduce.Options(jobs=1, gsm8k=None)).page
    for figure_name, by_quantity in page.reasons.items():
        for quantity in by_quantity:
            assert rows.of(figure_name, quantity), (figure_name, quantity)
