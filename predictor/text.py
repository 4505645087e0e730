"""Prompts as plain text, before any tokenizer sees them."""

import unicodedata

CHARACTERS_PER_TOKEN = 16
"""More than any ordinary text needs; how much of a long prompt is kept for each token that the model can read."""


def normalised(prompt: str) -> str:
    """The prompt without differences of case, of spacing and of Unicode form: equal for "the same prompt"."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def head_and_tail(prompt: str, characters_max: int) -> str:
    """The prompt, or its two ends when it is longer than `characters_max`. Always encodable as UTF-8.

    What is asked for usually stands at the beginning or at the end of a long prompt, and a bound on the text
    bounds the tokenizer's work, whatever a client sends.
    """
    if len(prompt) > characters_max:
        half = characters_max // 2
        prompt = prompt[: characters_max - half - 1] + " " + prompt[len(prompt) - half :]
    return prompt.encode("utf-8", "replace").decode()  # JSON lets a client send half of a surrogate pair
