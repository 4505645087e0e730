"""Prompts -> token ids: the cut of long prompts, and a small tokenizer trained on the prompts themselves."""

import string
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from predictor.text import CHARACTERS_PER_TOKEN, head_and_tail

PAD, UNKNOWN, CLS, SEP = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
NUMBERS = [str(number) for number in range(1001)]


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_length_tokens: int) -> list[list[int]]:
    """Token ids of each prompt, special tokens included, at most `max_length_tokens` each.

    A prompt that is too long keeps its first and its last tokens, as many of each ([CLS] and [SEP] among them): the
    task of a long prompt is named before or after the material, seldom in its middle.
    """
    if not prompts:
        return []
    texts = [head_and_tail(prompt, max_length_tokens * CHARACTERS_PER_TOKEN) for prompt in prompts]
    ids = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    return [_both_ends(each, max_length_tokens) for each in ids]


def train_tokenizer(prompts: Iterable[str], words_max: int) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer: frequent words and the numbers 0 to 1000 are tokens, all else is spelt.

    Whole numbers let an embedding hold a number's value, which "count from 17 to 134" needs. `words_max` bounds the
    words, most frequent first, each seen twice at least. The same prompts in the same order give the same tokenizer,
    which tokenizers.trainers.WordPieceTrainer, whose ties fall differently in each run, does not.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    seen = Counter(
        word
        for prompt in prompts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(prompt))
    )
    words = [word for word, count in seen.most_common(words_max) if count > 1]
    letters = sorted({*string.ascii_lowercase, *string.digits, *string.punctuation, *"".join(words)})
    endings = [f"##{letter}" for letter in letters]
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *NUMBERS, *letters, *endings, *words])
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer.model = models.WordPiece(ids, unk_token=UNKNOWN)
    tokenizer.post_processor = processors.BertProcessing((SEP, ids[SEP]), (CLS, ids[CLS]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, cls_token=CLS, sep_token=SEP
    )


def _both_ends(ids: list[int], room: int) -> list[int]:
    """`ids`, or its first and last tokens when there are more than `room`."""
    if len(ids) <= room:
        return ids
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :]
