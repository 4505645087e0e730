"""The laboratory's engines that come and go, over a short day."""

from __future__ import annotations

import pytest
from questions.fleet import scaling


@pytest.mark.parametrize("rule", ["all", "wanted", "utilisation"])
def test_every_request_ends_and_engines_come_and_go(rule: str) -> None:
    scaled = scaling.Scaled(150.0, 0, rule)
    scaled.run()
    assert len(scaled.met) > 300
    held = {engines for _, engines, _ in scaled.shown}
    if rule == "all":
        assert held == {scaling.ENGINES}
        assert scaled.starts == 0
    else:
        assert min(held) < scaling.PEAK_ENGINES
        assert scaled.starts > 2
        assert scaled.engine_s < scaling.ENGINES * 150.0
