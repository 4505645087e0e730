"""The model, and vLLM servers with it.

On a GPU the time of a prompt is that of a few steps; on one CPU core, whose arithmetic is slow beside its memory, the
time of a prompt is that of dozens of steps. Most weights of this model are therefore those of the vocabulary: each
step of decoding reads them, and of a prompt only the last token is multiplied with them.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kit.servers import MODEL_FOLDER, vllm

from questions.vllm.engines import engine_core_of, kept_off_the_first_core, move_engine_to_the_first_core

SLOTS_MAX = 16
CONTEXT_TOKENS = 2048
VOCABULARY = 65_536
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SETTINGS = {  # name -> flags of vLLM; "default" has --max-num-batched-tokens 2048 on a CPU
    "default": [],
    "small budget": ["--max-num-batched-tokens", "256"],
    "large budget": ["--max-num-batched-tokens", "16384"],
    "whole prompts": ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"],
}


@dataclass(frozen=True, slots=True)
class Engine:
    """thread : the system's id of the thread that computes"""

    url: str
    thread: int

    def cpu_s(self) -> float:
        """Time that the thread has computed so far, without the time in which other processes had its core."""
        return int(Path(f"/proc/{self.thread}/task/{self.thread}/schedstat").read_text().split()[0]) / 1e9


def make_model(folder: Path, seed: int) -> dict[str, int]:
    """Write a Llama with random weights and the demo model's tokenizer. Returns its numbers of weights.

    Vocabulary that the tokenizer does not know has weights of 0: no greedy answer contains it, yet it takes its time.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    config = LlamaConfig(
        **SHAPE,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    vocabulary = model.get_input_embeddings().weight
    with torch.no_grad():
        vocabulary[len(tokenizer) :] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {"weights": weights, "weights_of_vocabulary": vocabulary.numel(), "tokens_known": len(tokenizer)}


@asynccontextmanager
async def started(python: str, setting: str, folder: Path) -> AsyncIterator[Engine]:
    """A vLLM server. Its engine computes on the first core, all else runs on the other cores."""
    core = min(os.sched_getaffinity(0))
    apart = (os.cpu_count() or 1) > 1
    with kept_off_the_first_core(apart):
        server = vllm(
            python, f"vLLM, {setting}", SLOTS_MAX, *SETTINGS[setting], folder=folder, context_tokens=CONTEXT_TOKENS
        )
        async with server as running:
            if apart:
                move_engine_to_the_first_core(running, core)
            yield Engine(running.url, engine_core_of(running))


def read_bytes_per_s(megabytes: int = 256, repeats: int = 5) -> float:
    """Bandwidth of reading memory with one thread, the best of several passes over an array."""
    array = np.ones(megabytes * 2**20 // 4, np.float32)
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        np.dot(array, array)
        times.append(time.perf_counter() - begin_s)
    return float(array.nbytes / min(times))
