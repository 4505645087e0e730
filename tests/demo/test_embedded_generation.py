"""The decoding loop against that of transformers, for several architectures."""

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from llmserve.demo.generation import LanguageModel  # noqa: E402
from llmserve.demo.sampling import Sampling  # noqa: E402

GREEDY = Sampling(temperature=0.0)
CONTEXT = 64
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
COMMON = SIZES | {"initializer_range": 0.3, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
ROTARY = COMMON | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**ROTARY),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**ROTARY, sliding_window=8),
    "qwen3": lambda: transformers.Qwen3Config(**ROTARY, head_dim=8),
    "gemma3, sliding and full": lambda: transformers.Gemma3TextConfig(
        **ROTARY, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2 with learned positions": lambda: transformers.GPT2Config(**COMMON, n_positions=CONTEXT),
    "gpt neox": lambda: transformers.GPTNeoXConfig(**COMMON, intermediate_size=64, max_position_embeddings=CONTEXT),
}


class Numbers:
    """A tokenizer whose texts are the token ids."""

    eos_token_id = None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    torch.manual_seed(3)
    network = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    return LanguageModel(Numbers(), network)


def answers(model: LanguageModel, prompts: Sequence[list[int]], tokens: Sequence[int]) -> list[list[int]]:
    """Greedy answers of a batch."""
    rows = [model.row(prompt, n, GREEDY) for prompt, n in zip(prompts, tokens, strict=True)]
    texts = [""] * len(rows)

    def emit(deltas) -> None:
        for index, delta in enumerate(deltas):
            texts[index] += delta.text if delta else ""

    model.run(rows, emit)
    return [[int(token) for token in text.split()] for text in texts]


def test_a_greedy_answer_is_that_of_transformers_generate(model: LanguageModel):
    prompt = [5, 17, 42, 8, 99, 3, 11, 64, 7, 23]
    expected = model._model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 10:].tolist()
    assert answers(model, [prompt], [20]) == [expected]


def test_a_padded_batch_has_the_same_answers_as_its_rows_alone(model: LanguageModel):
    prompts = [[5], [17, 42, 8, 99, 3, 11, 64, 7, 23, 12, 13], [4, 4, 4]]
    tokens = [30, 3, 12]
    alone = [answers(model, [prompt], [n])[0] for prompt, n in zip(prompts, tokens, strict=True)]
    assert answers(model, prompts, tokens) == alone


def test_a_row_that_has_filled_its_context_does_not_disturb_a_longer_one(model: LanguageModel):
    full = list(range(1, CONTEXT - 1))
    assert answers(model, [[5], full], [50, 2])[0] == answers(model, [[5]], [50])[0]


def test_a_batch_whose_rows_have_left_ends():
    torch.manual_seed(3)
    model = LanguageModel(Numbers(), transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval())
    rows = [model.row([5], 40, GREEDY), model.row([6, 7], 3, GREEDY)]
    steps = 0

    def emit(deltas) -> None:
        nonlocal steps
        steps += 1
        rows[0].cancelled = steps == 2 or rows[0].cancelled

    model.run(rows, emit)
    assert (steps, rows[0].output_tokens, rows[1].output_tokens) == (3, 2, 3)


def test_a_batch_without_present_rows_never_runs_the_model():
    model = LanguageModel(Numbers(), transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval())
    row = model.row([5], 40, GREEDY)
    row.cancelled = True
    model.run([row], lambda _: pytest.fail("a step was made"))


def test_a_sampling_model_recommends_its_own_parameters():
    network = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert LanguageModel(Numbers(), network).defaults == GREEDY
    network.generation_config = transformers.GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert LanguageModel(Numbers(), network).defaults == Sampling(temperature=0.6, top_p=0.9, top_k=20)
