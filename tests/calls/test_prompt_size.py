"""Sizes and senders of prompts, without a tokenizer."""

import pytest
from calls import a_call
from msgspec.structs import replace

from llmserve.calls import prompt_size
from llmserve.calls.prompt_size import (
    PromptTokens,
    PromptTokensByModel,
    sender_hash,
)
from llmserve.request import Call
from predictor.prompt import Prompt


def call(text: str, system: str = "", history: int = 0, model: str = "m") -> Call:
    return a_call("/v1/chat/completions", b"{}", Prompt(text, model, system, history), stream=False)


def test_tokens_of_a_prompt_follow_the_engines_own_counts() -> None:
    tokens = PromptTokens()
    assert tokens.estimate(call("x" * 400)) == 100
    for _ in range(50):
        tokens.observe(call("x" * 30, "y" * 20, 50), 50)
    assert tokens.estimate(call("x" * 400)) == pytest.approx(200)


def test_tokens_are_counted_per_model_and_unused_models_are_forgotten() -> None:
    tokens = PromptTokensByModel(models_max=2)
    for model in ("a", "b", "a", "c"):
        tokens.observe(call("x" * 100, model=model), 50)
    assert [tokens.estimate(call("x" * 100, model=model)) for model in "abcd"] == [50, 25, 50, 25]
    assert len(tokens) == 2


def test_sizes_of_the_latest_models_survive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_size, "SAVED_MAX", 2)
    before, after = PromptTokensByModel(), PromptTokensByModel()
    for model in "abc":
        before.observe(call("x" * 100, model=model), 50)
    after.restore(before.state())
    assert [after.estimate(call("x" * 100, model=model)) for model in "abc"] == [25, 50, 50]
    with pytest.raises(ValueError, match="no prompt sizes"):
        after.restore({"models": ["a"]})


def test_a_sender_is_the_key_or_without_keys_the_prompt() -> None:
    def sender(text: str, key: str = "", secret: bytes = b"s") -> int:
        whole = call(text)
        return sender_hash(replace(whole, prompt=replace(whole.prompt, sender=key)), secret)

    assert sender("a", "alice") == sender("b", "alice") != sender("a", "bob")
    assert sender("a") == sender("a") != sender("b")
    assert sender("x" * 5_000 + "a") != sender("x" * 5_000 + "b"), "prompts with a long common beginning"
    assert sender("a", secret=b"t") != sender("a")
