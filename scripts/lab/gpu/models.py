"""Llamas of real size with random weights: a step costs what a step of the real model costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from gpu.shapes import CONTEXT, SHAPES
from llmserve.demo.fusing import fuse
from llmserve.demo.generation import DecodingRow, LanguageModel
from llmserve.demo.sampling import Sampling


def config_of(shape: str) -> LlamaConfig:
    of = SHAPES[shape]
    return LlamaConfig(
        num_hidden_layers=of.layers,
        hidden_size=of.width,
        intermediate_size=of.inner,
        num_attention_heads=of.heads,
        num_key_value_heads=of.key_heads,
        head_dim=of.size,
        vocab_size=of.vocabulary,
        tie_word_embeddings=of.tied,
        max_position_embeddings=CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_llama(shape: str, device: str) -> Any:
    """On the device: bfloat16 on a GPU, float32 on a CPU."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of a CPU: a rehearsal shares it with its client
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    return model.eval().requires_grad_(False)


def fused_llama(shape: str, device: str, *, compiles: bool) -> Any:
    """With fewer kernels in a step: see llmserve's fusing.py. A CPU compiles nothing."""
    model = random_llama(shape, device)
    fuse(model) if compiles and device != "cpu" else fuse(model, lambda function: function)
    return model


def tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """A word that is a number is that token; every other word is token 0."""
    words = Tokenizer(WordLevel({str(number): number for number in range(SHAPES[shape].vocabulary)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast


class ObedientModel(LanguageModel):
    """Answers with as many tokens as the prompt's last token says, or as max_tokens where that is 0.

    The model gets random tokens in place of the prompt, as many: equal rows would let a GPU draw less.
    """

    def __init__(self, tokenizer: Any, model: Any, **options: Any) -> None:
        super().__init__(tokenizer, model, **options)
        self._draws = random.Random(0)

    def row(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        streamed: bool = True,
    ) -> DecodingRow:
        drawn = self._draws.choices(range(self.vocabulary_size), k=len(prompt_ids))
        return super().row(drawn, prompt_ids[-1] or max_tokens, sampling, stop, ignore_eos, streamed)
