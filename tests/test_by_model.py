"""Settings for all models or for one."""

import pytest

from llmserve.by_model import by_model


def test_a_plain_value_is_of_every_model_that_has_none_of_its_own() -> None:
    assert by_model("profile", ()) == {}
    assert by_model("profile", ("a", "model:org/m:8b=dir/x=1", "model:n=b")) == {
        "": "a",
        "org/m:8b": "dir/x=1",
        "n": "b",
    }


@pytest.mark.parametrize("text", ["model:m", "model:=x", "model:m=", "model:"])
def test_what_only_begins_like_a_models_setting_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(ValueError, match=f"^profile: '{text}' is not `model:ID=VALUE`"):
        by_model("profile", (text,))


@pytest.mark.parametrize("texts", [("a", "b"), ("model:m=a", "model:m=b")])
def test_two_for_the_same_are_an_error(texts: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{texts[1]}' is a second value for the same"):
        by_model("profile", texts)
