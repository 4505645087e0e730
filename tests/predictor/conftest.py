from pathlib import Path
from typing import Any

import pytest
from untrained_predictor import export_untrained


@pytest.fixture(scope="session")
def random_predictor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a loadable, untrained predictor."""
    return export_untrained(tmp_path_factory.mktemp("predictor"))


@pytest.fixture
def wide_predictor(tmp_path: Path) -> Path:
    """The folder of a predictor, one of whose products has a huge input, of which it makes nothing."""

    def widen(model: Any) -> None:
        last = model.encoder.encoder.layer[-1]
        last.intermediate.dense.bias.data[0] = 1e5
        last.output.dense.weight.data *= 1000  # its other inputs decide what is predicted
        last.output.dense.weight.data[:, 0] = 0
        model.head.weight.data *= 10

    return export_untrained(tmp_path / "wide", widen)
