"""Requests that no engine can hold are refused at once, by what is certain."""

import pytest

from llmserve.engines.engine import ServedModel
from llmserve.errors import BadRequest
from llmserve.gateway.fitting import check_fits
from llmserve.request import Bounds, EngineInfo


def asks(tokens_min: int, context_min: int, prompt_ids: int = 0, choices: int = 1) -> Bounds:
    return Bounds(choices, prompt_ids=prompt_ids, tokens_min=tokens_min, context_min=context_min)


def engine(tokens_max: int | None) -> EngineInfo:
    return EngineInfo(str(tokens_max), 1, False, tokens_max=tokens_max)


def check(bounds: Bounds, context: int | None, *sizes: int | None) -> str | None:
    """The wrong field; None: the call is taken."""
    try:
        check_fits(bounds, ServedModel("m", context), [engine(size) for size in sizes])
    except BadRequest as error:
        return error.param
    return None


@pytest.mark.parametrize(
    ("asked", "context", "sizes", "param"),
    [
        (asks(101, 101, prompt_ids=100), 101, (101,), None),
        (asks(102, 102, prompt_ids=101), 101, (1000,), "prompt"),
        (asks(102, 102, prompt_ids=101), None, (101, 50), "prompt"),
        (asks(102, 102, prompt_ids=101), None, (101, 102), None),
        (asks(102, 102, prompt_ids=101), None, (101, None), None),
        (asks(102, 102, prompt_ids=101), None, (), None),
        (asks(128, 1, choices=128), 8, (127,), "n"),
        (asks(128, 1, choices=128), 8, (128,), None),
        (asks(500, 500), 499, (1000,), "min_tokens"),
    ],
)
def test_only_what_fits_nowhere_is_refused(
    asked: Bounds, context: int | None, sizes: tuple[int | None, ...], param: str | None
) -> None:
    assert check(asked, context, *sizes) == param
