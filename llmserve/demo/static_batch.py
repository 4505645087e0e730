"""A batch in tensors of fixed size: a GPU replays each step as one captured graph.

The floor of a step's time is the time to read the weights and the cache once. A step of a large model has a thousand
small kernels, and Python launches them more slowly than the GPU reads the weights. A captured graph launches all
kernels at once, but its tensors must keep their addresses and shapes. So the number of rows is rounded up to a power of
two, and the number of cached columns that attention reads to a multiple of COLUMNS_STEP. Each such pair has its own
graph, which is captured when a batch first needs it. Where a capture fails, steps run kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

log = logging.getLogger("llmserve.embedded")

ATTENTION = "llmserve_grouped"
"""The name of `grouped_attention` among transformers' attention functions."""
COLUMNS_STEP = 128  # attention reads the cache up to a multiple of this

Step = Callable[[], torch.Tensor]
"""Runs one step and returns its logits, (rows, vocabulary)."""


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for grouped queries. While decoding, it reads each key and value once and copies none.

    query           (rows, heads, columns, size); one column while decoding
    key, value      (rows, key heads, cached columns, size)
    attention_mask  (rows, 1, columns, cached columns), True where a query attends to a key; None: everywhere
    Returns (rows, columns, heads, size), and None: it keeps no weights. Source: grouped-query attention (Ainslie 2023).
    """
    rows, heads, columns, size = query.shape
    shared = heads // key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    if columns > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
        return output.transpose(1, 2).contiguous(), None
    grouped = (query * scale).reshape(rows * key.shape[1], shared, size)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)).view(rows, heads, 1, -1)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    output = torch.bmm(weights.view(rows * key.shape[1], shared, -1), value.flatten(0, 1))
    return output.view(rows, 1, heads, size), None


AttentionInterface.register(ATTENTION, grouped_attention)


class StaticDecoder:
    """Runs batches of one model in fixed tensors, one batch at a time: all batches share the memory of the cache.

    model    a model of transformers on its device, with full attention in every layer
    capture  returns a step that replays a given step; None: a CUDA graph on a GPU, the step itself on a CPU
    Raises ValueError for a model with other layers.
    """

    def __init__(self, model: Any, capture: Callable[[Step], Step] | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers or [DynamicLayer()]}
        if kinds != {"DynamicLayer"}:
            raise ValueError(f"layers of the kind {', '.join(sorted(kinds))} have no static cache, only full attention")
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.last_position = int(getattr(config, "max_position_embeddings", None) or 2048) - 1
        self._capture = capture or (captured if self.device.type == "cuda" else uncaptured)
        self._layers = [_ColumnsLayer() for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=self._layers)
        self._places = 0  # rows times columns that the cache has room for
        self._steps: dict[tuple[int, int], _StaticStep] = {}  # by rows and columns read
        self._captures = True  # until a capture fails

    @property
    def graphs(self) -> int:
        """Steps captured so far."""
        return len(self._steps)

    def batch(self, prompts: Sequence[Sequence[int]], tokens_max: int) -> StaticBatch:
        """Begin a batch whose answers have at most `tokens_max` tokens. The previous batch must have ended."""
        rows = 1 << (len(prompts) - 1).bit_length()
        longest = max(map(len, prompts))
        self._make_room(rows * _rounded(longest + tokens_max))
        return StaticBatch(self, prompts, rows, longest)

    def prefill(self, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocabulary) after the prompts. ids : (rows, columns).  start : (rows,) first used column."""
        columns = torch.arange(ids.shape[1], device=self.device)
        causal = columns[None, :] <= columns[:, None]
        mask = causal & (columns >= start[:, None])[:, None, None, :]
        # A query in the padding attends to itself: a softmax over no key is not a number.
        mask = mask | torch.eye(ids.shape[1], dtype=torch.bool, device=self.device)
        for layer in self._layers:
            layer.read = 0
        return self._forward(ids, (columns - start[:, None]).clamp(min=0, max=self.last_position), mask)

    def step(self, rows: int, column: int) -> _StaticStep:
        """The step that writes its keys and values to this column."""
        read = _rounded(column + 1)
        step = self._steps.get((rows, read))
        if step is None:
            step = self._steps[rows, read] = _StaticStep(self, rows, read)
        return step

    def capture_all(self, rows_max: int, columns_max: int) -> None:
        """Capture the steps of all batches of up to `rows_max` rows and `columns_max` tokens of prompt and answer.

        A step that was not captured here is captured during the first batch that needs it, and delays that batch.
        """
        rows = 1 << (rows_max - 1).bit_length()
        while rows:  # the largest first: it allocates memory for all
            batch = self.batch([[0]] * rows, columns_max - 1)
            ids = batch.prefill().argmax(dim=-1)
            for column in range(COLUMNS_STEP - 1, _rounded(columns_max), COLUMNS_STEP):
                batch.go_to(column)
                batch.step(ids)
            rows //= 2

    def randomise(self) -> None:
        """Fill the cache with random numbers, for measurements: a GPU may compute faster with zeros."""
        for layer in self._layers:
            for room in (layer.keys, layer.values):
                if room is not None:
                    room.normal_()

    def captured(self, step: Step) -> Step:
        """The captured step. After a first failure every new step stays as it is: slower, with the same answers."""
        if self._captures:
            try:
                return self._capture(step)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # drivers and kernels refuse a capture in many ways
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                log.warning("cannot capture a graph, so each step launches its kernels one by one: %s", reason)
                self._captures = False
        return step

    def decode(self, ids: torch.Tensor, start: torch.Tensor, column: torch.Tensor, read: int) -> torch.Tensor:
        """Logits (rows, vocabulary) of one more token in each row.

        ids, start  (rows,)
        column      (1,) where the token's keys and values are written
        read        columns of the cache that attention reads
        """
        columns = torch.arange(read, device=self.device)
        mask = (columns >= start[:, None]) & (columns <= column)
        for layer in self._layers:
            layer.read, layer.column = read, column
        positions = (column - start)[:, None].clamp(max=self.last_position)
        return self._forward(ids[:, None], positions, mask[:, None, None, :])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        try:
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        except torch.OutOfMemoryError:
            self._release()  # a later, smaller batch has all memory again
            raise
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _make_room(self, places: int) -> None:
        """Allocate a larger cache where needed. The graphs of the old cache hold its addresses, so they are dropped."""
        if places > self._places:
            self._release()
            self._places = places
            for layer in self._layers:
                layer.allocate(places)

    def _release(self) -> None:
        """Free the cache, and the graphs that use it."""
        self._steps.clear()
        self._places = 0
        for layer in self._layers:
            layer.allocate(0)


class StaticBatch:
    """One batch. Prompts are padded on the left, so that all rows write to the same column.

    Rows without a prompt fill the batch up to a power of two. The returned logits leave these rows out.
    """

    def __init__(self, decoder: StaticDecoder, prompts: Sequence[Sequence[int]], rows: int, longest: int) -> None:
        self._decoder = decoder
        self._asked = len(prompts)
        self._column = longest
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        start = torch.full((rows,), longest - 1)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            start[row] = longest - len(prompt)
        self._prompts = ids.to(decoder.device)
        self._start = start.to(decoder.device)

    def prefill(self) -> torch.Tensor:
        """Logits (rows, vocabulary) after the prompts."""
        return self._decoder.prefill(self._prompts, self._start)[: self._asked]

    def go_to(self, column: int) -> None:
        """Let the next step write to this column, for measurements: the cost of a step depends on its column alone."""
        self._column = column

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocabulary) after one more token in each row. The next step overwrites them."""
        step = self._decoder.step(len(self._start), self._column)
        logits = step.run(ids, self._start, self._column)
        self._column += 1
        return logits[: self._asked]


class _StaticStep:
    """A step for one number of rows and of read columns, with its input tensors."""

    def __init__(self, decoder: StaticDecoder, rows: int, read: int) -> None:
        self._ids = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        self._start = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        self._column = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        self._decoder = decoder
        self._read = read
        self._replay: Step | None = None

    def run(self, ids: torch.Tensor, start: torch.Tensor, column: int) -> torch.Tensor:
        self._ids[: len(ids)] = ids
        self._start.copy_(start)
        self._column.fill_(column)
        if self._replay is None:  # the capture's warm-up writes to the cache, so it needs the real input
            self._replay = self._decoder.captured(self._decode)
        return self._replay()

    def _decode(self) -> torch.Tensor:
        return self._decoder.decode(self._ids, self._start, self._column, self._read)


class _ColumnsLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, as (columns, rows, heads, size). A step that reads more columns needs no copy.

    read    number of columns that attention reads; 0 during a prefill, which uses its own keys and values
    column  (1,) column of the next token
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self.column: torch.Tensor | None = None
        self._places = 0

    def allocate(self, places: int) -> None:
        self._places = places
        self.keys = self.values = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_zeros(self._places, *key_states.shape[1::2])
        self.values = value_states.new_zeros(self._places, *value_states.shape[1::2])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values (rows, heads, columns, size). Return those that attention reads, in the same order."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, _, columns, _ = key_states.shape
        if not self.read:
            for room, states in ((self.keys, key_states), (self.values, value_states)):
                self._by_column(room, rows)[:columns] = states.permute(2, 0, 1, 3)
            return key_states, value_states
        for room, states in ((self.keys, key_states), (self.values, value_states)):
            self._by_column(room, rows).index_copy_(0, self.column, states.permute(2, 0, 1, 3))
        keys, values = (
            self._by_column(room, rows)[: self.read].permute(1, 2, 0, 3) for room in (self.keys, self.values)
        )
        return keys, values

    def _by_column(self, room: torch.Tensor, rows: int) -> torch.Tensor:
        columns = len(room) // rows
        return room[: columns * rows].view(columns, rows, *room.shape[1:])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.read or query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def captured(step: Step) -> Step:
    """Capture a step as a CUDA graph, after two runs on another stream: libraries initialise in the first runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def uncaptured(step: Step) -> Step:
    """No capture: the step itself, which launches its kernels one by one."""
    return step


def _rounded(columns: int) -> int:
    return -(-columns // COLUMNS_STEP) * COLUMNS_STEP
