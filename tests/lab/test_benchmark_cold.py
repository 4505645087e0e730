"""The study of a cold server's first bursts: its prompts, its engine's answers, and what it reads of the server."""

from __future__ import annotations

import random

import pytest
from questions.cold import templates
from questions.cold.run import Readings

PAGE = """\
# HELP llmserve_prediction_trusted ...
llmserve_prediction_trusted{labels} {trusted}
llmserve_prediction_rank_correlation{labels} 0.75
llmserve_prediction_learnt_answers_total {learnt}
"""


def test_every_prompt_has_the_length_of_its_template() -> None:
    assert templates.tokens_of('[{"content": "Count from 1 to 25."}]') == 50
    lengths = {templates.tokens_of(prompt) for prompt in templates.drawn(500, random.Random(0))}
    assert min(lengths) < 10
    assert max(lengths) > 200
    with pytest.raises(ValueError, match="of no template"):
        templates.tokens_of("Tell me a story.")


@pytest.mark.parametrize("labels", ["", '{model="demo"}'])
def test_forecasts_are_in_force_if_they_are_trusted_at_every_reading_after_enough_answers(labels: str) -> None:
    readings = Readings("")
    for learnt, trusted, in_force in ((50, 0, True), (100, 1, True), (120, 0, False), (150, 1, False)):
        page = PAGE.replace("{labels}", labels).replace("{learnt}", str(learnt)).replace("{trusted}", str(trusted))
        readings.take(page)
        assert readings.in_force is in_force
    assert readings.rank_correlation == 0.75
