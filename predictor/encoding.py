"""Prompts -> token ids: the same in training and in serving, and without torch or transformers.

    [CLS] [model] [history] system prompt [SEP] text [SEP]

The line omits what a request lacks, and what training never had: with one model in the training data there is no
[model], without conversations neither [history] nor system prompt. The ids of [model] and [history] follow the
tokenizer's vocabulary, so no text can produce them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from predictor.prompt import Prompt
from predictor.text import CHARACTERS_PER_TOKEN, head_and_tail

HISTORY_CHARACTERS = (0, 1_000, 4_000, 16_000)
"""Upper limits of the history's size classes except the last, characters."""
SYSTEM_SHARE = 4  # a system prompt gets at most 1/4 of the line

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a predictor reads prompts; part of its folder.

    max_length_tokens  longest line, with special tokens; longer texts keep their head and tail
    cls, sep, pad      ids of the special tokens
    models             token id by model name; {} when the training data had at most one model
    other_model        token id for any other model; None if `models` is {}
    history            token id by size class of the history, smallest first; () without conversations in training
    reads_system       whether the training data had system prompts
    """

    max_length_tokens: int
    cls: int
    sep: int
    pad: int
    models: dict[str, int] = field(default_factory=dict)
    other_model: int | None = None
    history: tuple[int, ...] = ()
    reads_system: bool = False

    @classmethod
    def for_prompts(
        cls, prompts: Iterable[Prompt], *, max_length_tokens: int, vocabulary: int, special: tuple[int, int, int]
    ) -> Self:
        """The encoding for these training prompts. vocabulary : first free id.  special : ids of cls, sep, pad."""
        names: set[str] = set()
        has_history = has_system = False
        for prompt in prompts:
            names.add(prompt.model)
            has_history = has_history or prompt.history_characters > 0
            has_system = has_system or bool(prompt.system)
        models = sorted(names - {""}) if len(names) > 1 else []
        free = iter(range(vocabulary, vocabulary + len(models) + len(HISTORY_CHARACTERS) + 2))
        return cls(
            max_length_tokens,
            *special,
            models={name: next(free) for name in models},
            other_model=next(free) if models else None,
            history=tuple(next(free) for _ in range(len(HISTORY_CHARACTERS) + 1)) if has_history else (),
            reads_system=has_system,
        )

    @property
    def added_tokens(self) -> int:
        """Number of embeddings beyond the tokenizer's vocabulary."""
        return len(self.models) + (self.other_model is not None) + len(self.history)

    @property
    def characters_max(self) -> int:
        """A text with more characters than this is cut to its two ends (`text.head_and_tail`)."""
        return self.max_length_tokens * CHARACTERS_PER_TOKEN

    def encode(self, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The line of each prompt, at most `max_length_tokens` ids.

        A longer text keeps its first and its last tokens, half of each: the task of a long prompt is usually before or
        after the material, seldom in the middle.
        """
        texts = self._pieces(tokenizer, [prompt.text for prompt in prompts])
        systems: list[list[int]] = [[]] * len(prompts)
        if self.reads_system:
            systems = self._pieces(tokenizer, [prompt.system for prompt in prompts])
        return [self._line(*parts) for parts in zip(prompts, texts, systems, strict=True)]

    def padded(self, lines: Sequence[Sequence[int]]) -> tuple[Ids, Ids]:
        """(lines, tokens) input ids and attention mask."""
        input_ids = np.full((len(lines), max(map(len, lines))), self.pad, dtype=np.int64)
        attention_mask = np.zeros_like(input_ids)
        for i, line in enumerate(lines):
            input_ids[i, : len(line)] = line
            attention_mask[i, : len(line)] = 1
        return input_ids, attention_mask

    def _pieces(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        cut = [head_and_tail(text, self.characters_max) for text in texts]
        return [encoded.ids for encoded in tokenizer.encode_batch(cut, add_special_tokens=False)]

    def _line(self, prompt: Prompt, text: list[int], system: list[int]) -> list[int]:
        line = [self.cls]
        if self.other_model is not None:
            line.append(self.models.get(prompt.model, self.other_model))
        if self.history:
            line.append(self.history[int(np.searchsorted(HISTORY_CHARACTERS, prompt.history_characters))])
        if system:
            line += [*_both_ends(system, self.max_length_tokens // SYSTEM_SHARE), self.sep]
        return [*line, *_both_ends(text, self.max_length_tokens - len(line) - 1), self.sep]


def _both_ends(ids: list[int], room: int) -> list[int]:
    """`ids`, or the first and last of them when there are more than `room`."""
    if len(ids) <= room:
        return ids
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :]
