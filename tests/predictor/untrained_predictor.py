"""A loadable predictor with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def export_untrained(
    folder: Path,
    change: Callable[[Any], None] = lambda model: None,
    *,
    unit: float = 50.0,
    quantiles: int = 5,
    room: int = 32,
) -> Path:
    """Export a network with random weights.

    change : of the network, before the export.  unit : tokens, about the lengths it predicts.  room : tokens it reads.
    """
    from transformers import BertConfig, set_seed

    from predictor.encoding import Encoding
    from predictor.export import export
    from predictor.model import LengthConfig, LengthModel
    from predictor.prompt import Prompt
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
    config = LengthConfig(encoder=encoder.to_diff_dict(), length_unit=unit, quantiles=quantiles)
    cls, sep, pad = (tokenizer.get_vocab()[token] for token in (CLS, SEP, PAD))
    model = LengthModel(config)
    change(model)
    export(
        model,
        tokenizer,
        Encoding(room, cls, sep, pad),
        [10, 20, 30],
        folder,
        [Prompt(f"count to {number}") for number in range(20)],
    )
    return folder
