"""From rows to clusters of near duplicates to the sides of a split."""

import os
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from predictor.dataset import Row, Splits, split_rows
from predictor.errors import DatasetError
from predictor.prompt import Prompt
from predictor.splitting import near_duplicates, representatives
from predictor.text import normalised

ROOT = Path(__file__).resolve().parents[2]
FILLER = [f"prompt {i}" for i in range(100)]  # enough to leave no side empty
FACTORIAL = "write a python program that computes the factorial of a given whole number using recursion only please"
CHINESE = "请用简单的语言向一个小学生解释为什么天空在白天是蓝色的而在傍晚的时候却会变成红色,并且举出两个生活中的例子"
URL = "https://example.com/archive/2023/11/annual-report-on-the-state-of-the-harbour/chapter-7/page-12.html"
CAPITAL = "tell me in one short sentence what the name of the capital city of the country of france is"


def row(prompt: str, group: str = "") -> Row:
    return Row(Prompt(prompt), output_tokens=1, group=group)


def side(splits: Splits, prompt: str, group: str = "") -> str:
    sides = {"train": splits.train, "validation": splits.validation, "held_out": splits.held_out}
    (name,) = [name for name, rows in sides.items() if row(prompt, group) in rows]
    return name


def together(rows: list[Row], seeds: int = 60) -> bool:
    """Whether the rows are on one side for every seed; by chance two rows are with probability 0.66 ** 60."""
    for seed in range(seeds):
        splits = split_rows([*rows, *map(row, FILLER)], seed)
        if len({side(splits, entry.prompt.text, entry.group) for entry in rows}) > 1:
            return False
    return True


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def jaccard(a: str, b: str) -> float:
    """By definition, for texts of 3 words or more."""
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def near_pairs(texts: list[str]) -> set[tuple[str, str]]:
    """All near pairs, by brute force."""
    sets = {text: shingles(text) for text in sorted(set(texts))}
    overlapping = ((a, b) for a, b in combinations(sets, 2) if not sets[a].isdisjoint(sets[b]))
    return {(a, b) for a, b in overlapping if jaccard(a, b) >= 0.7}


def sentences(count: int, words: int, seed: int = 0) -> list[str]:
    """Unrelated sentences."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(2000)}" for _ in range(words)) for _ in range(count)]


# --- by prompt, never by row ------------------------------------------------------------------------------------


def test_a_prompt_falls_on_one_side_whatever_its_case_and_spacing() -> None:
    rows = [row(f"{prefix} {i}") for i in range(300) for prefix in ("Count to", "count  TO")]
    splits = split_rows(rows, seed=0)
    sides = [{r.prompt.text.split()[-1] for r in part} for part in (splits.train, splits.validation, splits.held_out)]
    assert sum(map(len, sides)) == 300
    assert set.union(*sides) == {str(i) for i in range(300)}


def test_a_prompts_side_depends_on_the_seed_and_not_on_the_other_rows() -> None:
    rows = [row(f"prompt {i}") for i in range(500)]
    splits = split_rows(rows, seed=1)
    second_split = split_rows([*rows[::-1], row("one more")], seed=1)
    assert set(splits.held_out) <= set(second_split.held_out) <= {*splits.held_out, row("one more")}
    assert set(split_rows(rows, seed=2).held_out) != set(splits.held_out)


def test_the_sides_of_prompts_without_near_duplicates_never_change() -> None:
    splits = split_rows([row(f"Count to {i}") for i in range(30)], seed=0)
    assert [entry.prompt.text for entry in splits.held_out] == [
        "Count to 3",
        "Count to 5",
        "Count to 17",
        "Count to 20",
    ]
    assert [entry.prompt.text for entry in splits.validation] == ["Count to 4", "Count to 27"]


def test_the_sides_have_the_requested_shares() -> None:
    splits = split_rows([row(f"prompt {i}") for i in range(10_000)], 0, validation_share=0.1, held_out_share=0.2)
    assert len(splits.validation) == pytest.approx(1000, abs=5 * 30)  # 5 standard deviations
    assert len(splits.held_out) == pytest.approx(2000, abs=5 * 40)


@pytest.mark.parametrize("prompts", [[], ["one"], ["one", "two"]])
def test_too_few_prompts_to_split_are_an_error(prompts: list[str]) -> None:
    with pytest.raises(DatasetError, match="too few different prompts"):
        split_rows(map(row, prompts), seed=0)


def test_a_prompt_that_is_half_of_a_surrogate_pair_has_a_side() -> None:
    assert side(split_rows([row("a \ud800 b c"), *map(row, FILLER)], seed=0), "a \ud800 b c")


# --- conversations ----------------------------------------------------------------------------------------------


def test_all_turns_of_a_conversation_fall_on_one_side() -> None:
    first = "how do I bake bread"
    assert together([row(first, first), row("and without any yeast at all", first), row("thanks", first)])


def test_conversations_that_share_a_turn_fall_on_one_side() -> None:
    assert together([row("now say it in French", "what is bread"), row("now say it in French", "what is water")])


def test_a_turn_falls_on_the_side_of_the_same_prompt_alone() -> None:
    assert together([row("now say it in French", "what is bread"), row("Now say it  in french")])


def test_a_mere_filler_turn_does_not_join_conversations() -> None:
    assert not together([row("please go on", "what is bread"), row("please go on", "what is water")])


@pytest.mark.parametrize("turn", [CHINESE, URL, f"summarise {URL}"])
def test_a_turn_of_few_words_is_no_filler_if_it_is_long(turn: str) -> None:
    assert together([row(turn, "what is bread"), row(turn, "what is water")])


def test_a_short_turn_without_spaces_is_filler() -> None:
    assert not together([row("请继续", "what is bread"), row("请继续", "what is water")])


# --- near duplicates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        FACTORIAL.replace("please", "thanks"),
        FACTORIAL.replace("write a", "create a"),
        "Now " + FACTORIAL.upper(),
        FACTORIAL + " and nothing else",
    ],
)
def test_near_duplicates_fall_on_one_side_whatever_the_seed(variant: str) -> None:
    assert jaccard(FACTORIAL, normalised(variant)) >= 0.7
    assert together([row(FACTORIAL), row(variant)])


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        (CHINESE, CHINESE + "谢谢"),
        (CHINESE, CHINESE.replace("两个", "三个")),
        (CHINESE[:40], CHINESE[:40].replace("天空", "大空")),
        (CHINESE, CHINESE.replace(",", "。 ")),  # a space does not separate words
        (URL, URL.replace("12", "13")),
    ],
)
def test_near_duplicates_without_spaces_fall_on_one_side_whatever_the_seed(text: str, variant: str) -> None:
    assert together([row(text), row(variant)])


def test_different_texts_without_spaces_are_separate_clusters() -> None:
    rng = random.Random(0)
    texts = ["".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(40)) for _ in range(200)]
    assert representatives(texts) == {text: text for text in texts}


def test_prompts_below_the_similarity_are_separate_clusters() -> None:
    variant = FACTORIAL.replace("computes the factorial", "prints the square")
    assert 0.4 < jaccard(FACTORIAL, variant) < 0.7
    assert not together([row(FACTORIAL), row(variant)])


def test_the_similarity_may_be_reached_exactly() -> None:
    texts = ["a b c d e f g h i j", "b c d e f g h i j k l"]  # 7 shared shingles, 1 + 2 different ones
    assert jaccard(*texts) == 0.7
    assert near_duplicates(texts).shape == (1, 2)


def test_near_duplicates_of_near_duplicates_are_on_one_side() -> None:
    words = sentences(1, 60)[0].split()
    chain = [" ".join(words[i : i + 30]) for i in range(0, 31, 3)]
    assert jaccard(chain[0], chain[1]) >= 0.7
    assert jaccard(chain[0], chain[-1]) == 0
    assert set(representatives(chain).values()) == {min(chain)}


def test_the_conversations_of_near_duplicates_are_on_one_side() -> None:
    assert together([row("thanks", FACTORIAL), row("and in rust", FACTORIAL + " now")])


def test_short_texts_are_near_only_to_themselves() -> None:
    texts = ["a", "a b", "b", "a b c", "a b c d", ""]
    assert representatives(texts) == {text: text for text in texts}


def test_near_duplicates_agree_with_brute_force() -> None:
    rng = random.Random(1)
    texts = []
    for text in sentences(40, 25, seed=1):
        words = text.split()
        for _ in range(5):
            texts.append(" ".join(words))
            words[rng.randrange(25)] = "changed"
    texts = sorted(set(texts))
    near = near_pairs(texts)
    pairs = {(texts[min(pair)], texts[max(pair)]) for pair in near_duplicates(texts).tolist()}
    assert pairs <= near
    assert len(near) > 100
    cluster = representatives(texts)
    assert all(cluster[a] == cluster[b] for a, b in near)


def test_no_two_sides_share_a_near_duplicate() -> None:
    texts = []
    for i, text in enumerate(sentences(300, 20, seed=2)):
        variants = [text, f"please {text}", text.rsplit(" ", 1)[0], f"{text} now", f"please {text} now"]
        texts += variants[: 1 + i % 5]
    near = near_pairs(texts)
    assert len(near) > 1000
    for seed in range(20):
        splits = split_rows(map(row, texts), seed)
        sides = (splits.train, splits.validation, splits.held_out)
        number = {entry.prompt.text: i for i, rows in enumerate(sides) for entry in rows}
        assert len(number) == len(set(texts))
        assert all(number[a] == number[b] for a, b in near)


def test_large_clusters_do_not_favour_a_side() -> None:
    rows = [row(f"{text} {'again ' * n}") for text in sentences(300, 40) for n in range(8)]
    held_out = sum(len(split_rows(rows, seed).held_out) for seed in range(5)) / 5 / len(rows)
    assert held_out == pytest.approx(0.1, abs=5 * (0.1 * 0.9 / 1500) ** 0.5)  # 5 standard deviations, of clusters


# --- templates --------------------------------------------------------------------------------------------------


def test_a_template_does_not_chain_unrelated_prompts() -> None:
    texts = [f"write a short story for small children about {text} that ends well" for text in sentences(500, 8)]
    assert representatives(texts) == {text: text for text in texts}


def test_prompts_that_are_almost_equal_to_their_template_are_one_cluster() -> None:
    (template,) = sentences(1, 200)
    texts = [f"{template} {text}" for text in sentences(1000, 10, seed=3)]
    assert len(set(representatives(texts).values())) == 1


def test_near_duplicates_are_found_among_a_templates_many_prompts() -> None:
    (template,) = sentences(1, 40)
    texts = [f"{template} {text}" for text in sentences(1000, 20, seed=4)]
    assert 0.4 < jaccard(*texts[:2]) < 0.7
    variants = [text.rsplit(" ", 1)[0] + " other" for text in texts]
    cluster = representatives([*texts, *variants])
    assert all(cluster[a] == cluster[b] for a, b in zip(texts, variants, strict=True))
    assert len(set(cluster.values())) == 1000


# --- independent of order and process ---------------------------------------------------------------------------------


def test_neither_the_order_of_the_rows_nor_their_copies_matter() -> None:
    texts = [variant for text in sentences(200, 20) for variant in (text, f"{text} now", f"please {text}")]
    rows = [row(text, texts[i - i % 9]) for i, text in enumerate(texts)]
    splits = split_rows(rows, seed=0)
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows, len(rows))
        second_split = split_rows([*shuffled, *shuffled[:50]], seed=0)
        assert set(second_split.train) == set(splits.train)
        assert set(second_split.validation) == set(splits.validation)
        assert set(second_split.held_out) == set(splits.held_out)


def test_a_new_prompt_moves_only_its_near_duplicates() -> None:
    texts = sentences(300, 20)
    splits = split_rows(map(row, texts), seed=0)
    second_split = split_rows(map(row, [*texts, f"a {texts[0]}"]), seed=0)
    moved = [text for text in texts if side(splits, text) != side(second_split, text)]
    assert set(moved) <= {texts[0]}


def test_every_process_splits_the_same_way() -> None:
    program = """
from predictor.dataset import Row, split_rows
from predictor.prompt import Prompt
texts = [f"{i} {' '.join(f'w{i * k * k % 997}' for k in range(20))} {end}" for i in range(400) for end in ("a", "b")]
print([row.prompt.text for row in split_rows([Row(Prompt(text), 1, group=texts[i // 20 * 20]) for i, text
    in enumerate(texts)], seed=0).held_out])
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 100


def test_joined_pairs_have_the_first_as_their_representative() -> None:
    assert representatives(["d", "b"], [("d", "c"), ("c", "a")]) == {"a": "a", "b": "b", "c": "a", "d": "a"}
    assert representatives([]) == {}
