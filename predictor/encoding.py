"""Prompts -> token ids: the same in training and in serving, and without torch or transformers.

    [CLS] [model] [history] system prompt [SEP] text [SEP]

What is not known of a request, or was never seen in training, has no place in its line: with one model in the training
data there is no [model], without conversations neither [history] nor system prompt. These tokens stand behind the
tokenizer's own vocabulary, so no text can spell them.
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
"""The largest history of each size but the last, characters."""
SYSTEM_SHARE = 4  # a system prompt gets at most this part (1/4) of the line

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a predictor reads prompts; part of its folder.

    max_length_tokens  of a line, special tokens included; longer texts keep their head and tail
    cls, sep, pad      ids of the special tokens
    models             token id by model name; {} when training saw at most one model
    other_model        token id for any other model; None together with {}
    history            token id by size of the history, smallest first; () when training saw no conversation
    reads_system       training saw system prompts
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
        """What the training prompts can teach. vocabulary : ids from here on are free. special : cls, sep, pad."""
        names: set[str] = set()
        has_history = has_system = False
        for prompt in prompts:
            names.add(prompt.model)
            has_history = has_history or prompt.history_characters > 0
            has_system = has_system or bool(prompt.system)
        known = sorted(names - {""}) if len(names) > 1 else []
        free = iter(range(vocabulary, vocabulary + len(known) + len(HISTORY_CHARACTERS) + 2))
        return cls(
            max_length_tokens,
            *special,
            models={name: next(free) for name in known},
            other_model=next(free) if known else None,
            history=tuple(next(free) for _ in range(len(HISTORY_CHARACTERS) + 1)) if has_history else (),
            reads_system=has_system,
        )

    @property
    def added_tokens(self) -> int:
        """Rows that the embeddings need beyond the tokenizer's vocabulary."""
        return len(self.models) + (self.other_model is not None) + len(self.history)

    @property
    def characters_max(self) -> int:
        """Of a text with more characters than this, only the two ends are looked at (`text.head_and_tail`)."""
        return self.max_length_tokens * CHARACTERS_PER_TOKEN

    def encode(self, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The line of each prompt, at most `max_length_tokens` ids.

        A text that is too long keeps its first and its last tokens, as many of each: the task of a long prompt is
        named before or after the material, seldom in its middle.
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
    """`ids`, or its first and last tokens when there are more than `room`."""
    if len(ids) <= room:
        return ids
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :]
