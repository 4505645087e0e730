"""Llamas of real size with random weights: a step costs what a step of the real model costs.

The text of an answer means nothing, so the prompt sets its length: the last word of the prompt is the number of tokens.
The length is not in max_tokens, because the scheduler reads that field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from llmserve.engines.embedded.fusing import fuse
from llmserve.engines.embedded.generation import DecodingRow, LanguageModel
from llmserve.engines.embedded.sampling import Sampling

H200_BYTES_PER_S = 4.8e12  # of its memory, by the data sheet
CONTEXT = 4096
PROMPT_WORDS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What fixes the cost of a Llama's step. size : of a head."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    size: int
    vocabulary: int
    tied: bool = False

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.size,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=CONTEXT,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )

    @property
    def step_parameters(self) -> int:
        """Weights that a step reads: all but the embeddings of other tokens."""
        attention = self.width * self.size * 2 * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.width * self.inner) + self.vocabulary * self.width

    @property
    def cached_numbers(self) -> int:
        """Numbers in the cache for each token."""
        return 2 * self.layers * self.key_heads * self.size

    def step_bytes(self, rows: int, context: int, number_bytes: int = 2) -> int:
        """What a step must read: the weights, and each row's cache, once."""
        return number_bytes * (self.step_parameters + rows * context * self.cached_numbers)


SHAPES = {
    "llama-8b": Shape(layers=32, width=4096, inner=14336, heads=32, key_heads=8, size=128, vocabulary=128_256),
    "llama-1b": Shape(layers=16, width=2048, inner=8192, heads=32, key_heads=8, size=64, vocabulary=128_256, tied=True),
    "tiny": Shape(layers=2, width=32, inner=64, heads=4, key_heads=2, size=8, vocabulary=CONTEXT),
}


def random_llama(shape: str, device: str, *, fused: bool) -> Any:
    """On the device: bfloat16 on a GPU, float32 on a CPU. fused : with fewer kernels, see llmserve's fusing.py."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of a CPU: a rehearsal shares it with its client
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape].config(), dtype=dtype)
    model.eval().requires_grad_(False)
    if fused:
        fuse(model) if device != "cpu" else fuse(model, lambda function: function)
    return model


def tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """A word that is a number is that token; every other word is token 0."""
    words = Tokenizer(WordLevel({str(number): number for number in range(SHAPES[shape].vocabulary)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast


def prompt_for(tokens: float) -> str:
    """A prompt of PROMPT_WORDS tokens whose answer has so many."""
    return f"{'word ' * (PROMPT_WORDS - 1)}{math.ceil(tokens)}"


class ObedientModel(LanguageModel):
    """Answers with as many tokens as the prompt's last token says, or as max_tokens where that is 0."""

    def row(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        streamed: bool = True,
    ) -> DecodingRow:
        return super().row(prompt_ids, prompt_ids[-1] or max_tokens, sampling, stop, ignore_eos, streamed)


def load(shape: str, device: str) -> ObedientModel:
    """The model with its tokenizer, in batches of fixed tensors on a CPU, too."""
    return ObedientModel(tokenizer(shape), random_llama(shape, device, fused=True), static=True)
