"""The README's moving picture shows the run that is committed, and moves without a script."""

from __future__ import annotations

import copy
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from make import moving_picture
from make.moving_picture import ALONE, NUMBERS, PICTURE, THROUGH, drawn, gain, mean_s, shown

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def numbers() -> dict[str, Any]:
    return json.loads(NUMBERS.read_text())  # type: ignore[no-any-return]


def test_the_picture_is_drawn_from_the_committed_run(numbers: dict[str, Any]) -> None:
    assert PICTURE.read_text() == drawn(numbers), "python scripts/lab moving_picture draws it"


def test_the_round_that_is_shown_is_the_median_one(numbers: dict[str, Any]) -> None:
    gains = sorted(map(gain, numbers["rounds"]))
    assert len(gains) % 2
    assert gain(shown(numbers["rounds"])) == gains[len(gains) // 2]


def test_the_picture_moves_by_css_alone_and_loads_nothing() -> None:
    text = PICTURE.read_text()
    root = ElementTree.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "style", "rect", "text", "g", "path"}
    assert not re.search(r"href|url\(|@import|\bon\w+=", text)
    assert len(text) < 300_000
    assert "prefers-color-scheme:dark" in text
    still, moving = text.split("@media (prefers-reduced-motion:no-preference)")
    assert "animation" not in still
    assert moving.count("animation:") == 3  # the covers, and the count of each side


def test_each_side_has_every_answer_of_the_run_once(numbers: dict[str, Any]) -> None:
    root = ElementTree.parse(PICTURE).getroot()
    rows = [path.get("d", "").count("M") for path in root.iter(f"{SVG}path") if path.get("class") in ("wait", "run")]
    assert rows == [numbers["questions"]] * 4
    words = [text.text for text in root.iter(f"{SVG}text")]
    for name in (ALONE, THROUGH):
        assert f"{numbers['engine']} {name}" in words
        assert f"mean latency {mean_s(shown(numbers['rounds'])[name]):.1f} s" in words


def test_the_count_of_answers_is_that_of_the_moment_in_the_run() -> None:
    """Two answers, after 1 and 3 of 4 s: the count changes after a quarter and three quarters of the sweep."""
    rules = moving_picture.counting([(0.5, 3.0, 7), (0.5, 1.0, 3)], until_s=4.0, place=0)
    at = [float(share) for share in re.findall(r"([\d.]+)%", rules)]
    sweep = 100 * moving_picture.SWEEP_S / (moving_picture.SWEEP_S + moving_picture.HOLD_S)
    assert at == pytest.approx([0, sweep / 4, 3 * sweep / 4], abs=0.01)
    assert re.findall(r"translateY\((-?\d+)px\)", rules) == ["0", "-24", "-48"]


def test_other_numbers_make_another_picture(numbers: dict[str, Any]) -> None:
    other = copy.deepcopy(numbers)
    for made in other["rounds"]:
        made[THROUGH][0][1] += 1.0
    assert drawn(other) != drawn(numbers)
