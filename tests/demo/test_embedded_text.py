"""Which text of an answer may be sent at which time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.demo.text import TextStream


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def pieces(tokenizer, text: str, stop: tuple[str, ...] = ()) -> list[str]:
    """The pieces of the text as they are sent, and the rest at its end."""
    stream = TextStream(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), stop)
    sent = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        sent.append(stream.push(token))
        if stream.stopped:
            return sent
    return [*sent, stream.flush()]


def spelled(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The same with one token per character."""
    stream = TextStream(lambda ids: "".join(map(chr, ids)), stop)
    sent = []
    for character in text:
        sent.append(stream.push(ord(character)))
        if stream.stopped:
            break
    return [*sent, stream.flush()], stream.stopped


def test_an_incomplete_character_is_held_back(tokenizer):
    text = "1 € is 日本 😀!"
    sent = pieces(tokenizer, text)
    assert "".join(sent) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in sent)
    assert "😀" in sent  # sent as one piece, with its last token


def test_a_character_that_never_becomes_complete_is_sent_at_the_end(tokenizer):
    emoji = tokenizer("😀", add_special_tokens=False)["input_ids"]
    assert len(emoji) > 1
    stream = TextStream(tokenizer.decode)
    assert [stream.push(token) for token in emoji[:-1]] == [""] * (len(emoji) - 1)
    assert set(stream.flush()) == {"\N{REPLACEMENT CHARACTER}"}


def test_bytes_that_are_no_text_do_not_hold_the_answer_back_endlessly(tokenizer):
    start = tokenizer("😀", add_special_tokens=False)["input_ids"][0]
    stream = TextStream(tokenizer.decode)
    assert "".join(stream.push(start) for _ in range(100)).count("\N{REPLACEMENT CHARACTER}") > 50


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=60))
def test_pieces_join_to_the_text_whatever_it_is(tokenizer, text: str):
    sent = pieces(tokenizer, text)
    assert "".join(sent) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in sent)


@settings(deadline=None, max_examples=200)
@given(text=st.text("abö", max_size=40), stop=st.text("abö", min_size=1, max_size=4))
def test_the_answer_ends_before_the_first_stop_string_wherever_tokens_end(tokenizer, text: str, stop: str):
    assert "".join(pieces(tokenizer, text, (stop,))) == text.partition(stop)[0]


def test_only_the_possible_start_of_a_stop_string_is_held_back():
    sent, stopped = spelled("aXXbXYc", stop=("XYZ", "XXX"))
    assert sent == ["a", "", "", "XXb", "", "", "XYc", ""]
    assert not stopped


def test_the_first_complete_stop_string_ends_the_answer():
    assert spelled("one two", stop=("two", "e")) == (["o", "n", "", ""], True)


def test_text_after_a_stop_string_in_the_same_token_is_dropped():
    stream = TextStream(lambda ids: "".join(("Hi ", "there. And", " more")[i] for i in ids), stop=(".",))
    assert [stream.push(0), stream.push(1), stream.stopped] == ["Hi ", "there", True]
    assert stream.flush() == ""


def test_the_space_before_the_first_word_survives():
    def decode(ids: list[int]) -> str:
        return "".join((" Hello", " world")[i] for i in ids).removeprefix(" ")  # SentencePiece does so, too

    assert TextStream(decode, prompt_ids=[0]).push(1) == " world"
