"""Settings for all models or for one."""

import pytest

from llmserve.settings.by_model import by_model


def test_a_plain_value_holds_for_every_model_without_its_own() -> None:
    assert by_model("profile", ()) == {}
    assert by_model("profile", ("a", "model:org/m:8b=dir/x=1", "model:n=b")) == {
        "": "a",
        "org/m:8b": "dir/x=1",
        "n": "b",
    }


@pytest.mark.parametrize("text", ["model:m", "model:=x", "model:m=", "model:"])
def test_a_malformed_setting_for_a_model_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match=f"^profile: '{text}' is not `model:ID=VALUE`"):
        by_model("profile", (text,))


@pytest.mark.parametrize("texts", [("a", "b"), ("model:m=a", "model:m=b")])
def test_two_settings_for_one_model_are_an_error(texts: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{texts[1]}' is a second value for the same"):
        by_model("profile", texts)
