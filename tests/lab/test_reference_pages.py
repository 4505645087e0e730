"""What the documents say by rote agrees with the code."""

import pytest
from kit import ROOT
from make import reference_pages
from make.lists import LISTS, with_lists

from llmserve.settings.load import sections
from llmserve.settings.tree import COMMON, Config


@pytest.mark.parametrize(
    "path", [*LISTS, *[f"docs/reference/{name}.md" for name in ("settings", "metrics", "modules")]]
)
def test_a_page_is_generated_from_the_code(path: str) -> None:
    assert (ROOT / path).read_text() == reference_pages.pages()[path], "python scripts/lab reference_pages writes it"


def test_a_list_is_written_between_its_marks() -> None:
    text = "a\n<!-- x: old -->\n1\n<!-- end of x -->\nb"
    made = with_lists(text, (("x", lambda: "2"),))
    assert "2" in made
    assert made.splitlines()[0] == "a"
    assert with_lists(made, (("x", lambda: "2"),)) == made
    with pytest.raises(ValueError, match="marks of `y`"):
        with_lists(text, (("y", lambda: ""),))


def test_every_setting_has_a_row() -> None:
    page = reference_pages.settings_page()
    names = [name for struct in sections(Config).values() for name in struct.__struct_fields__]
    sections_only = page[page.index("\n## ") :]
    rows = [line.split("|")[1].strip() for line in sections_only.splitlines() if line.startswith("| ")]
    assert [row.strip("*") for row in rows if row != "setting"] == names
    assert {row.strip("*") for row in rows if row.startswith("**")} == COMMON


def test_the_metrics_of_every_source_have_a_row() -> None:
    names = [line.split("`")[1] for line in reference_pages.metrics_page().splitlines() if line.startswith("| `")]
    assert len(names) == len(set(names)) > 40
    for name in ("llmserve_requests_total", "llmserve_energy_joules_total", "llmserve_dispatch_plans_total"):
        assert name in names
