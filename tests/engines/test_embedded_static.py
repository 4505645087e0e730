"""Batches in tensors of fixed size, against the batches whose cache grows."""

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from engines.test_embedded_generation import CONFIGS, GREEDY, ROTARY, Numbers, answers  # noqa: E402

from llmserve.engines.embedded import static_batch  # noqa: E402
from llmserve.engines.embedded.generation import LanguageModel  # noqa: E402
from llmserve.engines.embedded.sampling import Sampling  # noqa: E402
from llmserve.engines.embedded.static_batch import StaticDecoder, grouped_attention  # noqa: E402

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
