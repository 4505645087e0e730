"""From prompts to token ids, and the tokenizer that is trained on prompts."""

from tokenizers import Tokenizer

from predictor.encoding import Encoding
from predictor.prompt import Prompt
from predictor.text import CHARACTERS_PER_TOKEN
from predictor.tokenizer import CLS, PAD, SEP, train_tokenizer

TOKENIZER = train_tokenizer(["zero"], words_max=100)
IDS = TOKENIZER.get_vocab()
SPECIAL = (IDS[CLS], IDS[SEP], IDS[PAD])
FREE = TOKENIZER.get_vocab_size()


def new_encoding(*prompts: Prompt, max_length_tokens: int = 8) -> Encoding:
    """The encoding for these training prompts."""
    return Encoding.for_prompts(prompts, max_length_tokens=max_length_tokens, vocabulary=FREE, special=SPECIAL)


def read(encoding: Encoding, prompt: Prompt) -> list[str | int]:
    """The encoded prompt: tokens of the vocabulary as text, added tokens as numbers from 0 on."""
    (line,) = encoding.encode(TOKENIZER, [prompt])
    return [TOKENIZER.id_to_token(id_) or id_ - FREE for id_ in line]


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    result: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return result


def test_a_too_long_prompt_keeps_its_head_and_its_tail() -> None:
    numbers = " ".join(str(number) for number in range(100))
    assert read(new_encoding(), Prompt(numbers)) == ["[CLS]", "0", "1", "2", "97", "98", "99", "[SEP]"]


def test_a_prompt_that_just_fits_is_unchanged() -> None:
    assert read(new_encoding(), Prompt("1 2 3 4 5 6")) == ["[CLS]", "1", "2", "3", "4", "5", "6", "[SEP]"]


def test_a_gigantic_prompt_costs_no_more_than_a_long_one() -> None:
    gigantic = "7 " + "x " * 10_000_000 + "9"
    assert read(new_encoding(max_length_tokens=6), Prompt(gigantic)) == ["[CLS]", "7", "x", "x", "9", "[SEP]"]
    assert len(gigantic) > 6 * CHARACTERS_PER_TOKEN


def test_features_that_training_never_saw_are_left_out() -> None:
    encoding = new_encoding(Prompt("a", model="only one"))
    assert encoding.added_tokens == 0
    assert read(encoding, Prompt("7", "other", "be brief", 900)) == ["[CLS]", "7", "[SEP]"]


def test_the_model_is_encoded_if_training_saw_several() -> None:
    encoding = new_encoding(Prompt("a", model="a"), Prompt("b", model="b"))
    assert encoding.added_tokens == 3
    assert [read(encoding, Prompt("7", model))[1] for model in ("a", "b", "never heard of", "")] == [0, 1, 2, 2]


def test_the_size_of_the_history_is_encoded_in_steps() -> None:
    encoding = new_encoding(Prompt("a", history_characters=5))
    sizes = [0, 1, 1_000, 1_001, 4_000, 16_000, 16_001, 10**9]
    assert [read(encoding, Prompt("7", history_characters=size))[1] for size in sizes] == [0, 1, 1, 2, 2, 3, 4, 4]


def test_a_system_prompt_precedes_the_text_and_takes_at_most_a_quarter() -> None:
    encoding = new_encoding(Prompt("a", system="s"), max_length_tokens=12)
    assert read(encoding, Prompt("7", system="")) == ["[CLS]", "7", "[SEP]"]
    long = Prompt("1 2 3 4 5 6 7 8 9", system="10 11 12 13")
    assert read(encoding, long) == ["[CLS]", "10", "11", "13", "[SEP]", "1", "2", "3", "7", "8", "9", "[SEP]"]


def test_no_text_can_spell_an_added_token() -> None:
    encoding = new_encoding(Prompt("a", model="a"), Prompt("b", model="b"))
    (line,) = encoding.encode(TOKENIZER, [Prompt("[CLS] a b 5 [model]", "a")])
    assert sum(id_ >= FREE for id_ in line) == 1


def test_lines_are_padded_to_the_longest() -> None:
    input_ids, attention_mask = new_encoding().padded([[5], [5, 6, 7]])
    assert input_ids.tolist() == [[5, IDS[PAD], IDS[PAD]], [5, 6, 7]]
    assert attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]


# --- the tokenizer ----------------------------------------------------------------------------------------------


def test_numbers_are_whole_tokens_and_unknown_words_are_spelt() -> None:
    tokenizer = train_tokenizer(["count", "Count from", "from"], words_max=100)
    assert tokens(tokenizer, "Count from 17 to 1000!") == ["count", "from", "17", "t", "##o", "1000", "!"]


def test_only_the_most_frequent_words_become_tokens_and_none_that_was_seen_once() -> None:
    tokenizer = train_tokenizer(["red red red blue blue green", "pink pink pink"], words_max=3)
    assert tokens(tokenizer, "red blue") == ["red", "blue"]
    assert tokens(tokenizer, "green")[:2] == ["g", "##r"]
