"""The network: a BERT-family encoder and one linear layer, trained with L1 loss on the answer's length.

Source: Multi-Bin, appendix C.1 (a fine-tuned BERT, one linear layer, L1 loss; bins are applied afterwards, so that
one model serves any number of bins).

    z = w . h + b            h: the encoder's last hidden state, its mean over the tokens or the one at [CLS]
    length = unit x exp(z)   unit: the median training answer, which is what z = 0 and so the untrained network says
    loss = mean |length - label| / unit

The exponential keeps every length positive and lets the linear layer say "five times as long" by adding the same
amount for short and for long answers; equal-mass bins of lengths that span orders of magnitude need that relative
precision. The loss stays the paper's, on the length itself. The unit makes learning rates independent of how long the
answers are.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput


class LengthConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is not typed
    """What a saved predictor needs to know besides its weights.

    encoder : the encoder's own configuration, as a dictionary with its model_type.
    length_unit : tokens, above 0. max_length_tokens : longer prompts keep their head and tail (special tokens count).
    """

    model_type = "length-predictor"

    encoder: dict[str, Any] = field(default_factory=dict)
    pooling: Literal["cls", "mean"] = "mean"
    length_unit: float = 1.0
    max_length_tokens: int = 512


@dataclass
class LengthOutput(ModelOutput):  # type: ignore[misc]
    """lengths : (batch,) float, tokens. loss : scalar, mean absolute error in length units; with labels only."""

    loss: Tensor | None = None
    lengths: Tensor | None = None


class LengthModel(PreTrainedModel):  # type: ignore[misc]
    """Token ids -> predicted output tokens."""

    config_class = LengthConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True

    def __init__(self, config: LengthConfig, encoder: PreTrainedModel | None = None) -> None:
        """With an encoder, its weights are kept (fine-tuning); without, they are random, from config.encoder."""
        super().__init__(config)
        self.encoder = encoder or AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        self.encoder.pooler = None  # BERT's own pooler, where there is one, would only be dead weight
        self.head = nn.Linear(self.encoder.config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> LengthOutput:
        """input_ids, attention_mask : (batch, tokens). labels : (batch,) output tokens."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        units = self.head(self._pool(hidden, attention_mask)).squeeze(-1).exp()
        lengths = units * self.config.length_unit
        if labels is None:
            return LengthOutput(lengths=lengths)
        loss = nn.functional.l1_loss(units, labels.to(units.dtype) / self.config.length_unit)
        return LengthOutput(loss=loss, lengths=lengths)

    def _pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> (batch, hidden)"""
        if self.config.pooling == "cls":
            return hidden[:, 0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)
