"""A small tokenizer, trained on the prompts themselves."""

import string
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

PAD, UNKNOWN, CLS, SEP = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
NUMBERS = [str(number) for number in range(1001)]


def train_tokenizer(prompts: Iterable[str], words_max: int) -> Tokenizer:
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
    return tokenizer
