"""The study of `tune`: what is chosen from one half of a trace is judged by the other half."""

from __future__ import annotations

from questions.tune import run as study

from llmserve.simulation.twin.choice import P99_BOUND


def test_a_choice_is_made_from_the_first_half_and_judged_by_the_second() -> None:
    row = study.judged({}, 600, {"trace": "Poisson, sigma 0.8", "load": 0.9, "seed": 7})
    assert row["requests"] == 300
    assert row["sure_p99"] > 0.0
    assert row["sure_over_best"] >= 1.0 or row["sure_p99"] > P99_BOUND, (
        "only a broken bound beats the best that keeps it"
    )
    choices, kept = study.tables([row])
    assert choices.count("\n") == 2
    assert "1 of 1" in kept or "0 of 1" in kept
