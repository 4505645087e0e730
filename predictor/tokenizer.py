"""A small tokenizer, trained on the prompts themselves."""

import string
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

PAD, UNKNOWN, CLS, SEP = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
NUMBERS = [str(number) for number in range(1001)]


def train_tokenizer(prompts: Iterable[str], words_max: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer: frequent words and the numbers 0 to 1000 are tokens, other words are spelt.

    With whole numbers as tokens an embedding can hold a number's value, which "count from 17 to 134" needs. The words
    are the `words_max` most frequent words that occur at least twice. The same prompts in the same order give the same
    tokenizer, unlike with tokenizers.trainers.WordPieceTrainer, which breaks ties differently in each run.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts = Counter(
        word
        for prompt in prompts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(prompt))
    )
    words = [word for word, count in counts.most_common(words_max) if count > 1]
    letters = sorted({*string.ascii_lowercase, *string.digits, *string.punctuation, *"".join(words)})
    endings = [f"##{letter}" for letter in letters]
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *NUMBERS, *letters, *endings, *words])
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer.model = models.WordPiece(ids, unk_token=UNKNOWN)
    tokenizer.post_processor = processors.BertProcessing((SEP, ids[SEP]), (CLS, ids[CLS]))
    return tokenizer
