"""A tiny random Llama and its tokenizer, built on demand."""

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and runs through the green forest",
    "a short answer is a good answer, and a long answer takes a long time to write",
    "Hello, how are you today? I am fine, thank you very much for asking!",
    "ÄÖÜ äöü ß éèê ñ — “quotes” … €5",
]
CONTEXT_TOKENS = 256
EOS_PROMPT = "Please stop soon."  # the model's greedy answer to it ends after EOS_AFTER tokens
EOS_AFTER = 6


def build_tokenizer():
    """Byte-level BPE, so that most characters beyond ASCII take several tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(SENTENCES * 10, vocab_size=512, min_frequency=2, special_tokens=SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(vocabulary_size: int):
    """Random weights, spread widely enough that answers vary with the prompt and no ties occur."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny_llama(folder: Path) -> None:
    """Write a model folder. The token that ends answers is chosen so that EOS_PROMPT has a short answer."""
    import torch

    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": EOS_PROMPT}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        answer = model.generate(prompt, do_sample=False, max_new_tokens=EOS_AFTER + 1)[0, prompt.shape[1] :].tolist()
    assert answer[EOS_AFTER] not in answer[:EOS_AFTER], answer
    model.generation_config.eos_token_id = [answer[EOS_AFTER]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
