import math

import pytest

from predictor.memory import Memory, Neighbours, RecentlyUsed, keys_of
from predictor.prompt import Prompt
from predictor.quantiles import LEVELS, MIDDLE

LONG = "Translate the following sentence into French, and say nothing else than the translation: " + "x" * 100
WIDE = tuple(math.log(100) + 0.1 * (i - MIDDLE) for i in range(LEVELS))  # 50 to 200 tokens


def of(lengths, capped=False):
    neighbours = Neighbours(32, 4)
    for length in lengths:
        neighbours.learn(math.log(length), capped)
    return neighbours


def tokens(logs):
    return [math.exp(log) for log in logs]


def test_a_request_has_keys_from_its_model_to_its_whole_text():
    assert len(keys_of(Prompt("short"))) == 2
    assert len(keys_of(Prompt("short", system="You are brief."))) == 3
    assert len(keys_of(Prompt(LONG, system="You are brief."))) == 5


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (Prompt(LONG, "m", "s"), 5),
        (Prompt(LONG + "y", "m", "s"), 4),
        (Prompt(LONG[:40] + "y" * 150, "m", "s"), 3),
        (Prompt("y" * 200, "m", "s"), 2),
        (Prompt(LONG, "m", "t"), 1),
        (Prompt(LONG, "n", "s"), 0),
        (Prompt(LONG, "m", "s", stop=("END",)), 0),
    ],
)
def test_requests_share_the_keys_of_their_common_part(other, shared):
    own_keys, other_keys = keys_of(Prompt(LONG, "m", "s")), keys_of(other)
    assert [a == b for a, b in zip(own_keys, other_keys, strict=True)] == [True] * shared + [False] * (5 - shared)


def test_different_stop_strings_are_different_applications_of_one_kind():
    first, second = keys_of(Prompt("a", "m", stop=("X",))), keys_of(Prompt("a", "m", stop=("X", "Y")))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]


def test_a_text_of_half_a_surrogate_pair_has_keys_too():
    assert len(keys_of(Prompt("\ud800", "\ud800", "\ud800", stop=("\ud800",)))) == 3


def test_a_key_forecasts_its_own_lengths():
    forecast = tokens(of([10, 20, 30, 40] * 8).forecast(WIDE))
    assert forecast[0] == pytest.approx(10, rel=0.1)
    assert forecast[-1] == pytest.approx(40, rel=0.1)


def test_a_few_equal_lengths_claim_less_certainty_than_many():
    few, many = (tokens(of([30] * count).forecast(WIDE)) for count in (8, 32))
    assert few[MIDDLE] == many[MIDDLE] == pytest.approx(30)
    assert few[0] < 28 < 32 < few[-1]
    assert few[0] < many[0] < 30 < many[-1] < few[-1]


def test_fewer_than_four_lengths_make_no_forecast():
    assert of([30] * 3).forecast(WIDE) is None


def test_capped_answers_only_raise_a_forecast():
    forecast = tokens(of([90] * 8, capped=True).forecast(WIDE))
    assert forecast[0] > 75  # the previous forecast was 50
    assert forecast[-1] == pytest.approx(tokens(WIDE)[-1])
    assert tokens(of([400] * 8, capped=True).forecast(WIDE))[MIDDLE] > 300


def test_old_lengths_are_forgotten():
    neighbours = of([10] * 32 + [500] * 36)
    assert tokens(neighbours.forecast(WIDE))[MIDDLE] == pytest.approx(500)
    assert neighbours.count == 32


def test_a_finer_key_is_opened_once_its_coarser_one_was_seen():
    memory, chain = Memory(100, 32, 512, 8), keys_of(Prompt(LONG, "m", "s"))
    opened = []
    for _ in range(5):
        memory.learn(chain, memory.judge(chain, None), 3.0, capped=False, predicted=False)
        opened.append(len(memory))
    assert opened == [1, 2, 3, 4, 4]


def test_the_least_recently_used_entry_is_dropped_first():
    recent = RecentlyUsed[str, list[int]](2, list)
    for key in ("a", "b", "a", "c"):
        recent.used(key).append(1)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == ([1, 1], None, [1], 2)


def test_a_memory_of_no_keys_still_knows_the_models_recent_lengths():
    memory, chain = Memory(0, 32, 512, 8), keys_of(Prompt(LONG, "m", "s"))
    for _ in range(20):
        memory.learn(chain, memory.judge(chain, None), 3.0, capped=False, predicted=False)
    assert len(memory) == 0
    assert memory.judge(chain, None).source == "recent"
