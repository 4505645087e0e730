from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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


def export_untrained(folder: Path, change: Callable[[Any], None] = lambda model: None) -> Path:
    """Export a network with random weights.  change : of the network, before the export."""
    from transformers import BertConfig, set_seed

    from predictor.encoding import Encoding
    from predictor.export import export
    from predictor.model import LengthConfig, LengthModel
    from predictor.tokenizer import CLS, PAD, SEP, train_tokenizer

    set_seed(0)
    tokenizer = train_tokenizer(["count to ten", "spell banana"], words_max=100)
    encoder = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    config = LengthConfig(encoder=encoder.to_diff_dict(), length_unit=50.0, quantiles=5)
    cls, sep, pad = (tokenizer.get_vocab()[token] for token in (CLS, SEP, PAD))
    model = LengthModel(config)
    change(model)
    export(model, tokenizer, Encoding(32, cls, sep, pad), [10, 20, 30], folder)
    return folder
