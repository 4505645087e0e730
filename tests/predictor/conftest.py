from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def random_predictor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a loadable, untrained predictor."""
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
    folder = tmp_path_factory.mktemp("predictor")
    export(LengthModel(config), tokenizer, Encoding(32, cls, sep, pad), [10, 20, 30], folder)
    return folder
