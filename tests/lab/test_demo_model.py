"""The demo model: its corpus has true answers, its splits are disjoint, and the shipped model answers right."""

import itertools
import json
import re
import string
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from make import demo_corpus, train_demo_model
from make.demo_corpus import Example

from llmserve.commands.bench import drawn_prompts

ROOT = Path(__file__).resolve().parents[2]
MODEL_DIR = ROOT / "llmserve" / "demo" / "model"


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Right answers to the prompts, written without the generator's code. -------------------------------


def count_up(prompt: str) -> str:
    first, last = [1, *integers(prompt)][-2:]
    return ", ".join(str(n) for n in range(first, last + 1))


def count_down(prompt: str) -> str:
    first, last = [*integers(prompt), 1][:2]
    return ", ".join(str(n) for n in range(last, first + 1)[::-1])


def count_in_steps(prompt: str) -> str:
    step = int(re.findall(r"(?:by|of|add|every) (\d+)", prompt, re.IGNORECASE)[0])
    bounds = integers(prompt)
    bounds.remove(step)
    terms = [min(bounds)]
    while terms[-1] < max(bounds):
        terms.append(terms[-1] + step)
    assert terms[-1] == max(bounds)
    return ", ".join(map(str, terms))


def multiples(prompt: str) -> str:
    factor, last = integers(prompt)[0], integers(prompt)[-1]
    return ", ".join(str(n) for n in range(1, last + 1) if n % factor == 0)


def times_table(prompt: str) -> str:
    prompt = prompt.replace("from 1 to", "to")
    rows = int(re.findall(r"(?:to|with|first) (\d+)", prompt)[0])
    factors = integers(prompt)
    factors.remove(rows)
    (factor,) = factors
    return "\n".join(f"{factor} x {row} = {row * factor}" for row in range(1, rows + 1))


def numbered_list(prompt: str) -> str:
    (count,) = integers(prompt)
    (kind,) = [kind for kind in demo_corpus.LISTS if re.search(rf"\b{kind}\b", prompt)]
    items = itertools.islice(itertools.cycle(demo_corpus.LISTS[kind]), count)
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, start=1))


def repeat(prompt: str) -> str:
    (count,) = integers(prompt)
    text = re.findall(r"[\"'](\S.*\S)[\"']", prompt.replace("I'd ", ""))[0]
    return "\n".join(f"{i}. {text}" for i in range(1, count + 1))


def spell(prompt: str) -> str:
    words = [word for word in re.findall(r"[a-z]+", prompt) if word in demo_corpus.SPELLABLE]
    if len(words) == 1:
        return "-".join(words[0])
    return "\n".join(word + ": " + "-".join(word) for word in words)


def alphabet(prompt: str) -> str:
    letters = re.findall(r"\b[a-z]\b", re.sub(r"\bI('d| want| need)\b", "", prompt).lower()) or ["a", "z"]
    part = string.ascii_lowercase[ord(min(letters)) - ord("a") : ord(max(letters)) - ord("a") + 1]
    backwards = re.search(r"backwards|reverse|down to|back to", prompt, re.IGNORECASE)
    return ", ".join(part[::-1] if backwards else part)


def copy(prompt: str) -> str:
    return prompt.rpartition(": ")[2]


SOLVERS: dict[str, Callable[[str], str]] = {
    "count up": count_up,
    "count down": count_down,
    "count in steps": count_in_steps,
    "multiples": multiples,
    "times table": times_table,
    "numbered list": numbered_list,
    "repeat": repeat,
    "spell": spell,
    "alphabet": alphabet,
    "copy": copy,
}


@pytest.fixture(scope="module")
def corpus() -> list[Example]:
    return demo_corpus.examples(6000, seed=7)


def test_the_seed_determines_the_corpus() -> None:
    assert demo_corpus.examples(300, seed=3) == demo_corpus.examples(300, seed=3)
    assert demo_corpus.examples(300, seed=3) != demo_corpus.examples(300, seed=4)
    assert demo_corpus.prompts(50, seed=3) == [e.prompt for e in demo_corpus.examples(50, seed=3)]


@pytest.mark.parametrize("family", sorted(SOLVERS))
def test_answers_are_the_right_answers_to_their_prompts(corpus: list[Example], family: str) -> None:
    of_family = [example for example in corpus if example.family == family]
    assert len(of_family) > 100
    for example in of_family:
        assert example.answer == SOLVERS[family](example.prompt), example.prompt


def test_no_prompt_has_two_answers() -> None:
    answer_of: dict[str, str] = {}
    for example in itertools.islice(demo_corpus.stream(seed=11), 20_000):
        assert answer_of.setdefault(example.prompt.casefold(), example.answer) == example.answer, example.prompt


def test_exactly_the_known_families_occur(corpus: list[Example]) -> None:
    assert {example.family for example in corpus} == {*SOLVERS, "chat"}


def test_splits_never_share_a_prompt_whatever_the_seeds() -> None:
    training = {e.prompt.casefold() for e in demo_corpus.examples(5000, seed=0, held_out=False)}
    held_out = {e.prompt.casefold() for e in demo_corpus.examples(1500, seed=99, held_out=True)}
    assert not training & held_out


def test_a_tenth_of_the_prompts_is_held_out(corpus: list[Example]) -> None:
    share = sum(demo_corpus.is_held_out(e.prompt) for e in corpus) / len(corpus)
    assert 0.08 < share < 0.12


def test_the_prompts_of_bench_are_the_corpus_held_out_ones() -> None:
    held_out = [example.prompt for example in demo_corpus.examples(2_000, seed=0, held_out=True)]
    assert (files("llmserve.demo") / "prompts.txt").read_text().splitlines() == held_out
    drawn = drawn_prompts(400, seed=1)
    assert len(set(drawn)) == 400
    assert drawn == drawn_prompts(400, seed=1) != drawn_prompts(400, seed=2)
    assert len(drawn_prompts(5_000, seed=1)) == 5_000


def test_a_list_word_has_one_successor() -> None:
    assert len(set(demo_corpus.WORDS)) == len(demo_corpus.WORDS)


# The shipped model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def ask(shipped: Any, *messages: dict[str, str]) -> str:
    model, tokenizer = shipped
    inputs = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_shipped_model_is_small(shipped: Any) -> None:
    model, _ = shipped
    assert model.num_parameters() < 5_000_000
    assert (MODEL_DIR / "model.safetensors").stat().st_size < 16_000_000


def test_shipped_model_has_generation_settings(shipped: Any) -> None:
    model, tokenizer = shipped
    assert not model.generation_config.do_sample
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tokenizer_takes_any_text_and_one_token_per_number(shipped: Any) -> None:
    _, tokenizer = shipped
    text = "naïve Ünïcode 日本 🙂\n\n\ttab  x 12345"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(len(tokenizer(str(n))["input_ids"]) == 1 for n in range(demo_corpus.NUMBER_MAX + 1))


def test_shipped_model_answers_held_out_prompts(shipped: Any) -> None:
    examples = [e for e in demo_corpus.examples(120, seed=5, held_out=True) if len(e.answer) < 120][:24]
    right = [ask(shipped, user(example.prompt)) == example.answer for example in examples]
    assert sum(right) >= 22  # at least 90 %: the model is measured on more prompts in docs/results/demo-model.md


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
        ("Please count down from 12 to 7", "12, 11, 10, 9, 8, 7"),
        ("List 3 animals as a numbered list.", "1. ant\n2. bear\n3. cat"),
        ("Spell the word horse.", "h-o-r-s-e"),
        ('Write "banana" 2 times.', "1. banana\n2. banana"),
        ("Repeat after me: the tiger likes lemon", "the tiger likes lemon"),
    ],
)
def test_shipped_model_answers_its_kinds_of_prompts(shipped: Any, prompt: str, answer: str) -> None:
    assert ask(shipped, user(prompt)) == answer


def test_shipped_model_says_what_it_is(shipped: Any) -> None:
    assert "llmserve demo model" in ask(shipped, user("What are you?"))


def test_earlier_turns_and_a_system_prompt_do_not_change_the_answer(shipped: Any) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    turns = [user("Hello!"), {"role": "assistant", "content": "Hello! What shall I count, spell or copy?"}]
    assert ask(shipped, system, *turns, user("Count from 8 to 12.")) == "8, 9, 10, 11, 12"


def test_published_accuracy_meets_the_promise() -> None:
    metrics = json.loads((ROOT / "docs" / "results" / "demo-model.json").read_text())
    assert metrics["exact"] >= 0.9
    assert metrics["held_out_prompts"] >= 1000


# Training -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quick_training_runs_from_corpus_to_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    options = ["--quick", "--output", str(tmp_path / "model"), "--checkpoint", str(tmp_path / "checkpoint.pt")]
    monkeypatch.setattr(sys, "argv", ["lab train_demo_model", *options])
    try:
        train_demo_model.main()
    finally:
        torch.set_num_threads(threads)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "demo-model.json", "demo-model.md",
    }  # fmt: skip
    assert json.loads((tmp_path / "model" / "demo-model.json").read_text())["training"]["steps"] == 4
