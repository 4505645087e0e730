"""The reference pages of settings and metrics agree with the code."""

import pytest
from make import reference_pages

from llmserve.settings.load import sections
from llmserve.settings.tree import COMMON, Config


@pytest.mark.parametrize("name", ["settings.md", "metrics.md"])
def test_a_page_is_generated_from_the_code(name: str) -> None:
    text = reference_pages.pages()[name]
    assert (reference_pages.FOLDER / name).read_text() == text, "python scripts/lab reference_pages writes it"


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
