"""An engine whose slots refill: transformers' continuous batching behind the embedded engine's HTTP server."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from gpu.models import random_llama
from gpu.shapes import PROMPT_WORDS, SHAPES
from llmserve.demo.generation import LanguageModel
from llmserve.demo.server import EmbeddedEngine, Reply
from llmserve.errors import RequestError

BLOCK = 64  # tokens that a block of the cache holds
BATCH_TOKENS_LEAST = 512
SILENCE_S = 60.0
WARM_TOKENS = 64


def refilling_model(shape: str, device: str) -> Any:
    model = random_llama(shape, device)  # continuous batching captures graphs by itself
    model.set_attn_implementation("sdpa")  # its paged form: no other attention is sure to be installed
    # Keys grow by a token with each step, and cuDNN plans anew for each length: 58 ms a step on an H200, 19 without.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return model


def started_manager(model: Any, slots: int, columns: int, *, graphs: bool) -> Any:
    """The manager, after a first burst that fills the slots: it captures graphs and allocates its cache.

    The cache is as large as the slots need. Left to itself it would take the whole memory, and a mask as large.
    graphs : False: none, also where transformers would capture some
    Raises RuntimeError when the burst is not answered.
    """
    options: dict[str, Any] = {} if graphs else {"use_cuda_graph": False}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            max_requests_per_batch=slots,
            block_size=BLOCK,
            num_blocks=slots * (columns // BLOCK + 2),
            max_batch_tokens=max(BATCH_TOKENS_LEAST, slots * (PROMPT_WORDS + 1)),  # all prompts at once
            allow_block_sharing=False,
            **options,
        ),
    )
    manager.start()
    rng = random.Random(0)
    waiting = set()
    for _ in range(2 * slots):
        prompt = [rng.randrange(1, SHAPES["tiny"].vocabulary) for _ in range(PROMPT_WORDS)]
        tokens = rng.randrange(1, max(2, min(WARM_TOKENS, columns - PROMPT_WORDS)))
        waiting.add(manager.add_request(prompt, max_new_tokens=tokens))
    while waiting:
        result = manager.get_result(timeout=SILENCE_S)
        if result is None or result.error:
            raise RuntimeError(f"the first burst was not answered: {getattr(result, 'error', 'silence')}")
        if result.is_finished():
            waiting.discard(result.request_id)
    return manager


class RefillEngine(EmbeddedEngine):
    """Hands each request to continuous batching as it comes, which runs it as soon as a slot is free."""

    def __init__(self, model: LanguageModel, name: str, manager: Any, *, queue_max: int) -> None:
        super().__init__(model, name, queue_max=queue_max)
        self._manager = manager
        self._numbers = itertools.count()
        self._ids: dict[Reply, str] = {}

    def cancel(self, reply: Reply) -> None:
        super().cancel(reply)
        if (request_id := self._ids.pop(reply, None)) is not None:
            self._manager.cancel_request(request_id)

    async def _run_batches(self) -> None:
        while True:
            for reply in await self._queue.take():
                self._hand_over(reply)

    def _hand_over(self, reply: Reply) -> None:
        self._ids[reply] = request_id = f"handed-{next(self._numbers)}"
        self._manager.register_result_handler(request_id, partial(self._answered, reply))
        row = reply.row
        self._manager.add_request(list(row.prompt_ids), request_id=request_id, max_new_tokens=row.max_tokens)

    def _answered(self, reply: Reply, result: Any) -> None:
        """Called on the event loop with each result of the request."""
        if not result.is_finished():
            return
        self._ids.pop(reply, None)
        self.metrics.output_tokens.inc(len(result.generated_tokens))
        for token in result.generated_tokens:
            if (delta := reply.row.accept(token)) is not None:
                reply.put(delta)
        if reply.row.live:  # no answer, or too short a one
            reason = result.error or f"{len(result.generated_tokens)} of {reply.row.max_tokens} tokens came"
            reply.put(RequestError(f"the engine failed on this request: {reason}", code="internal_error"))
