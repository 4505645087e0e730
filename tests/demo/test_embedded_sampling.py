"""The choice of the next token."""

import math
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from llmserve.demo.sampling import Sampler, Sampling  # noqa: E402

PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor([[math.log(p) for p in PROBABILITIES]])
DRAWS = 4000


def token_counts(sampling: Sampling) -> Counter[int]:
    """Counts of the chosen tokens; rows differ only in their seeds."""
    rows = [replace(sampling, seed=seed) for seed in range(DRAWS)]
    return Counter(Sampler(rows, [[]] * DRAWS).choose(LOGITS.expand(DRAWS, -1)).tolist())


def assert_frequencies(counts: Counter[int], expected: list[float]) -> None:
    for token, probability in enumerate(expected):
        deviation = math.sqrt(DRAWS * probability * (1 - probability))
        assert abs(counts[token] - DRAWS * probability) <= 5 * deviation, (token, counts)


def test_temperature_zero_is_the_most_probable_token():
    assert token_counts(Sampling(temperature=0.0)) == {0: DRAWS}


def test_tokens_come_with_their_probabilities():
    assert_frequencies(token_counts(Sampling()), PROBABILITIES)


def test_temperature_flattens_or_sharpens():
    squares = [p**2 for p in PROBABILITIES]
    assert_frequencies(token_counts(Sampling(temperature=0.5)), [s / sum(squares) for s in squares])


def test_top_k_keeps_the_k_most_probable():
    assert_frequencies(token_counts(Sampling(top_k=2)), [0.625, 0.375, 0, 0])


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.4, [1, 0, 0, 0]), (0.79, [0.625, 0.375, 0, 0]), (0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])],
)
def test_top_p_keeps_the_fewest_tokens_that_hold_the_mass(top_p: float, expected: list[float]):
    assert_frequencies(token_counts(Sampling(top_p=top_p)), expected)


def test_top_p_counts_the_mass_that_top_k_has_left():
    assert token_counts(Sampling(top_k=2, top_p=0.6)) == {0: DRAWS}


def test_greedy_and_sampled_rows_share_a_batch():
    rows = [Sampling(temperature=0.0), Sampling(temperature=2.0, seed=3), Sampling(temperature=0.0)]
    sampler = Sampler(rows, [[]] * 3)
    chosen = [sampler.choose(LOGITS.expand(3, -1)).tolist() for _ in range(50)]
    assert {a for a, _, _ in chosen} == {c for _, _, c in chosen} == {0}
    assert len({b for _, b, _ in chosen}) > 1


def test_a_seeded_row_draws_the_same_beside_any_neighbours():
    alone = Sampler([Sampling(seed=5)], [[]])
    among = Sampler([Sampling(seed=1, top_p=0.7), Sampling(seed=5), Sampling(temperature=0)], [[]] * 3)
    for _ in range(50):
        assert alone.choose(LOGITS).item() == among.choose(LOGITS.expand(3, -1))[1].item()


def test_rows_without_a_seed_differ():
    samplers = [Sampler([Sampling()], [[]]) for _ in range(2)]
    first, second = ([sampler.choose(LOGITS).item() for _ in range(200)] for sampler in samplers)
    assert first != second


def test_presence_penalty_applies_once_and_frequency_penalty_per_occurrence():
    logits = torch.tensor([[1.0, 0.5, 0.1]])
    presence = Sampler([Sampling(temperature=0.0, presence_penalty=0.7)], [[0]])
    assert [presence.choose(logits).item() for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler([Sampling(temperature=0.0, frequency_penalty=0.3)], [[0]])
    assert [frequency.choose(logits).item() for _ in range(5)] == [0, 0, 1, 0, 1]


def test_repetition_penalty_counts_the_prompt_too():
    logits = torch.tensor([[1.0, 0.9, -0.1]])
    sampler = Sampler([Sampling(temperature=0.0, repetition_penalty=2.0)], [[0]])
    assert [sampler.choose(logits).item() for _ in range(3)] == [1, 0, 0]


def test_penalties_do_not_change_the_neighbours():
    logits = torch.tensor([[1.0, 0.5, 0.1]]).expand(2, -1)
    sampler = Sampler([Sampling(temperature=0.0, presence_penalty=2.0), Sampling(temperature=0.0)], [[], []])
    assert [sampler.choose(logits).tolist() for _ in range(3)] == [[0, 0], [1, 0], [2, 0]]
