"""A causal language model and the loop that runs one static batch on it.

The loop replaces `model.generate`, because each row has its own sampling parameters, random numbers, limits and
stop strings, because each token must reach its client at once, and because a small model needs a low overhead
per step.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from llmserve.demo.fusing import fuse
from llmserve.demo.protocol import ChatMessage
from llmserve.demo.sampling import Sampler, Sampling
from llmserve.demo.static_batch import StaticBatch, StaticDecoder, Step
from llmserve.demo.text import TextStream, WholeText

# Up to this size a step's matrices are so small that a second thread costs more time than it saves.
_ONE_THREAD_PARAMETERS_MAX = 30_000_000

_WARM_COLUMNS = 2048  # steps of prompts with answers of up to so many tokens are captured before the first batch


class ModelLoadError(Exception):
    """The model cannot be loaded. The message fits on one line."""


class PromptError(ValueError):
    """The tokenizer or the chat template cannot process the prompt."""


class Delta(NamedTuple):
    """New text of one row after a step. finish_reason is None until the row ends."""

    text: str
    finish_reason: str | None


class DecodingRow:
    """One request of a batch. The worker thread calls `accept`; any thread may set `cancelled`."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        eos_ids: frozenset[int],
        text: TextStream | WholeText,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.output_tokens = 0  # without the end-of-sequence token
        self.cancelled = False
        self._ended = False
        self._eos_ids = eos_ids
        self._text = text

    @property
    def live(self) -> bool:
        """Whether the row needs further tokens."""
        return not (self._ended or self.cancelled)

    @property
    def may_go_on(self) -> bool:
        """Whether the row may need a further token after the next token."""
        return self.live and self.output_tokens + 1 < self.max_tokens

    def accept(self, token_id: int) -> Delta | None:
        """Append the row's next token. Returns None when the client gets no new text from this step."""
        if not self.live:
            return None
        if token_id in self._eos_ids:
            return self._end(self._text.flush(), "stop")
        self.output_tokens += 1
        text = self._text.push(token_id)
        if not self._text.stopped and self.output_tokens >= self.max_tokens:
            text += self._text.flush()  # the flushed text may complete a stop string
            if not self._text.stopped:
                return self._end(text, "length")
        if self._text.stopped:
            return self._end(text, "stop")
        return Delta(text, None) if text else None

    def _end(self, text: str, finish_reason: str) -> Delta:
        self._ended = True
        return Delta(text, finish_reason)


class LanguageModel:
    """A loaded tokenizer and model. At most one thread may tokenize and at most one may `run` at a time.

    On a GPU a batch has tensors of fixed size (static_batch.py). On a CPU the cache of a batch grows with its answers.
    """

    def __init__(
        self, tokenizer: Any, model: Any, *, static: bool | None = None, capture: Callable[[Step], Step] | None = None
    ) -> None:
        """Raises ValueError if the model does not allow tensors of fixed size.

        static   use tensors of fixed size (default: on a GPU)
        capture  of the steps with tensors of fixed size, as for StaticDecoder
        """
        self._tokenizer = tokenizer
        self._model = model
        on_gpu = next(model.parameters()).device.type != "cpu"
        self._static = StaticDecoder(model, capture) if (on_gpu if static is None else static) else None
        config = model.config.get_text_config(decoder=True)
        self.context_tokens = int(getattr(config, "max_position_embeddings", None) or 2048)
        self.vocabulary_size = int(config.vocab_size)
        self.defaults = _default_sampling(model.generation_config)
        self._max_new_tokens: int | None = model.generation_config.max_new_tokens
        self._eos_ids = _eos_ids(model.generation_config.eos_token_id, tokenizer.eos_token_id)

    @classmethod
    def load(
        cls, name: str, dtype: str = "float32", threads: int | None = None, device: str = "cpu"
    ) -> "LanguageModel":
        """Load a folder or a hub id. Raises ModelLoadError. threads None: chosen from the model's size."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
            ).to(device)
        except Exception as error:  # transformers raises many exception types for a folder or id without a model
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ModelLoadError(f"cannot load the model {name}: {reason}") from error
        model.eval().requires_grad_(False)
        small = sum(p.numel() for p in model.parameters()) <= _ONE_THREAD_PARAMETERS_MAX
        torch.set_num_threads(threads or (1 if small else os.cpu_count() or 1))
        if device != "cpu":
            fuse(model)
        try:
            return cls(tokenizer, model)
        except ValueError as error:
            raise ModelLoadError(f"cannot run the model {name} on {device}: {error}") from error

    def chat_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a conversation, in the model's chat template. Raises PromptError."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program, and may raise any exception
            raise PromptError(f"the model's chat template refuses these messages: {error}") from error
        return self._ids(text, add_special_tokens=False)  # the template has added the special tokens

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt, with the special tokens that the model expects."""
        return self._ids(text, add_special_tokens=True)

    def row(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        streamed: bool = True,
    ) -> DecodingRow:
        """Return a row for a request. The prompt must be shorter than the context.

        max_tokens None: the generation configuration's max_new_tokens, else as many tokens as fit into the context.
        streamed False: the text is decoded once, when the answer ends.
        """
        room = self.context_tokens - len(prompt_ids)
        assert 0 < len(prompt_ids) < self.context_tokens
        return DecodingRow(
            prompt_ids,
            min(max_tokens or self._max_new_tokens or room, room),
            sampling,
            frozenset() if ignore_eos else self._eos_ids,
            TextStream(self._decode, stop, prompt_ids) if streamed or stop else WholeText(self._decode, prompt_ids),
        )

    def run(self, rows: Sequence[DecodingRow], emit: Callable[[list[Delta | None]], None]) -> None:
        """Run a static batch until no row is live, and emit each row's delta (or None) after each step.

        A row that has ended stays in the tensors, as padding, to the end of the batch.
        """
        if not any(row.live for row in rows):
            return
        with torch.inference_mode():
            batch = self._batch(rows)
            sampler = Sampler([row.sampling for row in rows], [row.prompt_ids for row in rows])
            logits = batch.prefill()
            while True:
                ids = sampler.choose(logits)
                tokens = _read(ids)
                # A GPU runs the next step while the host delivers this step's tokens.
                ahead = self._static is not None and any(row.may_go_on for row in rows)
                if ahead:
                    logits = batch.step(ids)
                emit([row.accept(token) for row, token in zip(rows, tokens(), strict=True)])
                if not any(row.live for row in rows):
                    return
                if not ahead:
                    logits = batch.step(ids)

    def _batch(self, rows: Sequence[DecodingRow]) -> "_PaddedBatch | StaticBatch":
        if self._static is None:
            return _PaddedBatch(self._model, rows)
        return self._static.batch([row.prompt_ids for row in rows], max(row.max_tokens for row in rows))

    def warm_up(self, rows: int) -> None:
        """Do one-time work before the first client waits for it. rows : of the largest batch"""
        if self._static is not None:
            with torch.inference_mode():
                self._static.capture_all(rows, min(self.context_tokens, _WARM_COLUMNS))
        # A compiled kernel is specialised to one row and to one column: each combination is compiled at its first use.
        for count in sorted({1, rows}):
            for prompt in ([0], [0, 0]):
                batch = [self.row(prompt, 2, Sampling(seed=0), ignore_eos=True) for _ in range(count)]
                self.run(batch, lambda _: None)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class _PaddedBatch:
    """The tensors of one batch. Prompts are padded on the left, so that all rows write to the same column."""

    def __init__(self, model: Any, rows: Sequence[DecodingRow]) -> None:
        self._model = model
        self._columns = max(len(row.prompt_ids) for row in rows)
        total = self._columns + max(row.max_tokens for row in rows)
        self._prompts = torch.zeros(len(rows), self._columns, dtype=torch.int64)
        self._mask = torch.ones(len(rows), total, dtype=torch.int64)  # (rows, columns), 0 on padding
        for index, row in enumerate(rows):
            padding = self._columns - len(row.prompt_ids)
            self._prompts[index, padding:] = torch.tensor(row.prompt_ids)
            self._mask[index, :padding] = 0
        config = model.config.get_text_config(decoder=True)
        last = (getattr(config, "max_position_embeddings", None) or total) - 1
        # A row that has ended may grow beyond the context, as padding. Its positions must stay valid.
        self._positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0, max=last)
        self._cache = _growing_cache(model.config)
        self._parameters = inspect.signature(model.forward).parameters.keys()

    def prefill(self) -> torch.Tensor:
        """Return the logits (rows, vocabulary) after the prompts."""
        return self._forward(self._prompts, 0)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Append one token to each row, ids (rows,). Returns the logits (rows, vocabulary)."""
        self._columns += 1
        return self._forward(ids[:, None], self._columns - 1)

    def _forward(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        options: dict[str, Any] = {}
        if "position_ids" in self._parameters:
            options["position_ids"] = self._positions[:, first : self._columns]
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = 1
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask[:, : self._columns],
            past_key_values=self._cache,
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer that writes in place into buffers of doubling size, instead of one copy per token.

    With eight rows of a thousand tokens the copies would take longer than the model.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._length = 0
        self._key_buffer = key_states[:, :, :0]
        self._value_buffer = value_states[:, :, :0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._key_buffer.shape[-2]:
            self._key_buffer = _enlarged(self._key_buffer, start, self._length)
            self._value_buffer = _enlarged(self._value_buffer, start, self._length)
        self._key_buffer[:, :, start : self._length] = key_states
        self._value_buffer[:, :, start : self._length] = value_states
        self.keys = self._key_buffer[:, :, : self._length]
        self.values = self._value_buffer[:, :, : self._length]
        return self.keys, self.values


def _enlarged(buffer: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """Return a buffer (rows, heads, 2 * needed columns, size) with a copy of the first `used` columns."""
    rows, heads, _, size = buffer.shape
    larger = buffer.new_empty(rows, heads, 2 * needed, size)
    larger[:, :, :used] = buffer[:, :, :used]
    return larger


def _growing_cache(config: Any) -> Any:
    """Return transformers' cache for this model, with `_GrowingLayer` for plain attention layers.

    Sliding-window, linear-attention and other special layers stay unchanged.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _read(ids: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy the ids to the host. Return a function that waits for the copy, not for work queued behind it."""
    if ids.device.type == "cpu":
        return ids.tolist  # type: ignore[no-any-return]
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return read


def _default_sampling(generation_config: Any) -> Sampling:
    """Return the sampling parameters that the model's authors recommend as defaults."""
    if not generation_config.do_sample:
        return Sampling(temperature=0.0, repetition_penalty=generation_config.repetition_penalty or 1.0)
    return Sampling(
        temperature=_value_or(generation_config.temperature, 1.0),
        top_p=_value_or(generation_config.top_p, 1.0),
        top_k=_value_or(generation_config.top_k, 0),
        repetition_penalty=_value_or(generation_config.repetition_penalty, 1.0),
    )


def _value_or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _eos_ids(*values: int | list[int] | None) -> frozenset[int]:
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
