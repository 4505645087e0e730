"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from many_processes import running_engine


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The URL of a timed engine, one for all tests of a module."""
    with running_engine() as (url, _):
        yield url
