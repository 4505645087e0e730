"""Batches in tensors of fixed size, against the batches whose cache grows."""

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from demo.test_embedded_generation import CONFIGS, GREEDY, ROTARY, Numbers, answers  # noqa: E402

from llmserve.demo import static_batch  # noqa: E402
from llmserve.demo.generation import LanguageModel  # noqa: E402
from llmserve.demo.sampling import Sampling  # noqa: E402
from llmserve.demo.static_batch import StaticDecoder, grouped_attention  # noqa: E402

FULL = ["llama", "qwen3", "gpt2 with learned positions", "gpt neox"]
PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]


def network_of(name: str):
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


@pytest.fixture
def small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads multiples of eight columns, so that short answers need several steps' shapes."""
    monkeypatch.setattr(static_batch, "COLUMNS_STEP", 8)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.usefixtures("small_columns")
def test_answers_are_those_of_a_growing_cache(name: str) -> None:
    growing = LanguageModel(Numbers(), network_of(name), static=False)
    fixed = LanguageModel(Numbers(), network_of(name), static=True)
    tokens = [9, 30, 17]
    assert answers(fixed, PROMPTS, tokens) == answers(growing, PROMPTS, tokens)


@pytest.mark.usefixtures("small_columns")
def test_batches_of_other_sizes_follow_in_the_same_memory() -> None:
    growing = LanguageModel(Numbers(), network_of("llama"), static=False)
    fixed = LanguageModel(Numbers(), network_of("llama"), static=True)
    for prompts, tokens in (
        (PROMPTS, [4, 4, 30]),
        (PROMPTS[:1], [50]),
        (PROMPTS * 3, [12] * 9),
        (PROMPTS[1:], [20, 3]),
    ):
        assert answers(fixed, prompts, tokens) == answers(growing, prompts, tokens)


@pytest.mark.usefixtures("small_columns")
def test_steps_are_captured_once_for_each_shape() -> None:
    captures = []

    def capture(step):
        captures.append(step)
        step()  # as a GPU's capture does, to warm up
        return step

    decoder = StaticDecoder(network_of("llama"), capture)
    with torch.inference_mode():
        for rows in (3, 4, 1):  # three rows run as four
            batch = decoder.batch(PROMPTS[:1] * rows, 20)
            ids = batch.prefill().argmax(-1)
            for _ in range(19):
                ids = batch.step(ids).argmax(-1)
            assert ids.shape == (rows,)
    assert len(captures) == decoder.graphs == 2 * 3  # of 4 and 1 rows, each with 8, 16 and 24 columns


@pytest.mark.usefixtures("small_columns")
def test_steps_run_kernel_by_kernel_where_no_graph_can_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    def refuse(step):
        attempts.append(step)
        step()  # a capture fails in its middle: the step has written to the cache by then
        raise RuntimeError("operation not permitted when stream is capturing")

    def ids_of(decoder: StaticDecoder) -> list[list[int]]:
        with torch.inference_mode():
            batch = decoder.batch(PROMPTS, 20)
            ids = batch.prefill().argmax(-1)
            seen = [ids.tolist()]
            for _ in range(19):
                ids = batch.step(ids).argmax(-1)
                seen.append(ids.tolist())
        return seen

    expected = ids_of(StaticDecoder(network_of("llama")))
    assert ids_of(StaticDecoder(network_of("llama"), refuse)) == expected
    assert len(attempts) == 1, "what failed once is not tried for every shape"
    assert "cannot capture a graph" in caplog.text
    assert "operation not permitted when stream is capturing" in caplog.text


@pytest.mark.usefixtures("small_columns")
def test_a_batch_without_memory_leaves_all_memory_to_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = static_batch._ColumnsLayer.lazy_initialization

    def limited(layer, keys, values) -> None:
        if layer._places > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(layer, keys, values)

    monkeypatch.setattr(static_batch._ColumnsLayer, "lazy_initialization", limited)
    fixed = LanguageModel(Numbers(), network_of("llama"), static=True)
    with pytest.raises(torch.OutOfMemoryError):
        answers(fixed, PROMPTS * 4, [30] * 12)
    growing = LanguageModel(Numbers(), network_of("llama"), static=False)
    assert answers(fixed, PROMPTS, [9, 30, 17]) == answers(growing, PROMPTS, [9, 30, 17])


def test_a_model_with_sliding_windows_is_refused() -> None:
    with pytest.raises(ValueError, match="only full attention"):
        LanguageModel(Numbers(), network_of("mistral with a sliding window"), static=True)


def test_sampled_answers_are_those_of_a_growing_cache() -> None:
    def sampled(static: bool) -> list[str]:
        model = LanguageModel(Numbers(), network_of("llama"), static=static)
        rows = [model.row(prompt, 12, Sampling(seed=7, top_p=0.9, presence_penalty=0.3)) for prompt in PROMPTS]
        rows.append(model.row([1, 2], 5, GREEDY))
        texts = [""] * len(rows)

        def emit(deltas) -> None:
            for index, delta in enumerate(deltas):
                texts[index] += delta.text if delta else ""

        model.run(rows, emit)
        return texts

    assert sampled(True) == sampled(False)


def test_grouped_attention_copies_neither_keys_nor_values() -> None:
    """Each is read once where it lies: the cache is most of what a large batch's step reads."""
    rows, key_heads, shared, columns, size = 3, 2, 4, 16, 8
    cache = torch.randn(columns, rows, key_heads, size)
    keys = cache.permute(1, 2, 0, 3)
    assert keys.flatten(0, 1).data_ptr() == cache.data_ptr()
    query, values = torch.randn(rows, key_heads * shared, 1, size), torch.randn(rows, key_heads, columns, size)
    mask = torch.arange(columns) >= torch.tensor([0, 5, 15])[:, None, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1), attn_mask=mask
    )
    output, _ = grouped_attention(None, query, keys, values, mask)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_a_row_without_a_stream_gets_its_text_at_the_end() -> None:
    model = LanguageModel(Numbers(), transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**ROTARY)))
    streamed, whole = (model.row([5, 6], 7, GREEDY, streamed=streamed) for streamed in (True, False))
    pieces: list[list[str]] = [[], []]

    def emit(deltas) -> None:
        for texts, delta in zip(pieces, deltas, strict=True):
            texts += [delta.text] if delta else []

    model.run([streamed, whole], emit)
    assert len(pieces[0]) == 7
    assert pieces[1] == ["".join(pieces[0])]
