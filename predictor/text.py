"""Prompts as plain text, before any tokenizer."""

import unicodedata
from collections.abc import Sequence

Grid = Sequence[Sequence[str]]
"""The cells of a table, line by line; the first line is the head."""

CHARACTERS_PER_TOKEN = 16
"""Characters of a long prompt per token that the model can read: more than ordinary texts have."""


def normalised(prompt: str) -> str:
    """The prompt without differences of case, of spacing and of Unicode form: equal for equivalent prompts."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def head_and_tail(prompt: str, characters_max: int) -> str:
    """The prompt, or its two ends when it is longer than `characters_max`. Always encodable as UTF-8.

    The task of a long prompt is usually at its beginning or at its end. The bound on the text also bounds the
    tokenizer's work for any prompt of a client.
    """
    if len(prompt) > characters_max:
        half = characters_max // 2
        prompt = prompt[: characters_max - half - 1] + " " + prompt[len(prompt) - half :]
    return prompt.encode("utf-8", "replace").decode()  # replaces half surrogate pairs, which JSON may carry


def markdown(parts: Sequence[str | Grid]) -> str:
    """Texts and tables as a page has them."""
    return "\n\n".join(part if isinstance(part, str) else _markdown_table(part) for part in parts)


def _markdown_table(grid: Grid) -> str:
    head, *rest = grid
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])
