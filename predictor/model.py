"""The network: a BERT-family encoder and one linear layer that predicts the length of the answer.

    z_1 = w_1 . h + b_1,  z_i = z_{i-1} + softplus(w_i . h + b_i)      h: the mean of the encoder's last hidden states
    length_i = unit x exp(z_i)                                         unit: the median training answer

With one output (`quantiles` = 1) this is the predictor of Multi-Bin, appendix C.1: one linear layer, trained with L1
loss on the output length; bins are applied afterwards, so that one model serves any number of bins. With Q outputs,
output i is the quantile at level (i + 1/2) / Q, so that the Q lengths are equally likely and the middle length is the
median. The steps between outputs are positive, so quantiles never cross. They are trained with the pinball loss
(Koenker and Bassett, Regression Quantiles, 1978), of which the L1 loss is the case Q = 1.

The exponential keeps every length positive. A factor of five is the same sum in the linear layer for short and for long
answers; equal-mass bins of lengths that span orders of magnitude need that relative precision. The unit makes learning
rates independent of the lengths of the answers.

An answer that was cut at its ceiling (max_tokens) would have been longer. For every answer with a known ceiling the
loss compares min(prediction, ceiling) with the observed length: a prediction above the ceiling is not wrong (Powell,
Censored Regression Quantiles, 1986).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from bins.calibration import midpoints

MODEL_FORGOTTEN = 0.1  # share of training lines with a hidden model, so that the network learns unknown models
STEP_MIN = 0.01  # least step between neighbouring quantiles of the untrained network, in z


class LengthConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is not typed
    """The configuration of a network.

    encoder : the encoder's own configuration, as a dictionary with its model_type.  quantiles : outputs; 1 for a point
    prediction.  length_unit : tokens, above 0.  model_tokens : ids that name a model; the last: "another model".
    """

    model_type = "length-predictor"

    encoder: dict[str, Any] = field(default_factory=dict)
    pooling: Literal["cls", "mean"] = "mean"
    quantiles: int = 1
    length_unit: float = 1.0
    model_tokens: list[int] = field(default_factory=list)


@dataclass
class LengthOutput(ModelOutput):  # type: ignore[misc]
    """lengths : (batch, quantiles) float, tokens, ascending.  loss : scalar, in length units; only with labels."""

    loss: Tensor | None = None
    lengths: Tensor | None = None


class LengthModel(PreTrainedModel):  # type: ignore[misc]
    """Token ids -> equally likely output lengths."""

    config_class = LengthConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True

    def __init__(self, config: LengthConfig, encoder: PreTrainedModel | None = None) -> None:
        """encoder : with its weights, for fine-tuning; None: a new encoder of config.encoder with random weights."""
        super().__init__(config)
        self.encoder = encoder or AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        if getattr(self.encoder, "pooler", None) is not None:
            self.encoder.pooler = None  # BERT's own pooler is not used
        self.head = nn.Linear(self.encoder.config.hidden_size, config.quantiles)
        self.register_buffer("levels", torch.tensor(midpoints(config.quantiles), dtype=torch.float32), persistent=False)
        self.post_init()

    def start_from(self, lengths: Sequence[int]) -> None:
        """Let the untrained head predict the quantiles of these lengths for every prompt.

        So all trainings begin with the same head, and their weights may be averaged.
        """
        z = np.log(np.quantile(lengths, midpoints(self.config.quantiles)) / self.config.length_unit)
        steps = [math.log(math.expm1(max(step, STEP_MIN))) for step in np.diff(z)]
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.copy_(torch.tensor([z[0], *steps]))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, ceilings: Tensor | None = None
    ) -> LengthOutput:
        """input_ids, attention_mask : (batch, tokens). labels : (batch,) output tokens. ceilings : (batch,) or inf."""
        if self.training and self.config.model_tokens:
            input_ids = self._forget_some_models(input_ids)
        predicted = self._relative(self.encoded(input_ids, attention_mask))
        lengths = predicted * self.config.length_unit
        if labels is None:
            return LengthOutput(lengths=lengths)
        actual = (labels.float() / self.config.length_unit).unsqueeze(1)
        if ceilings is not None:
            predicted = torch.minimum(predicted, ceilings.float().unsqueeze(1) / self.config.length_unit)
        return LengthOutput(loss=self._pinball(predicted, actual), lengths=lengths)

    def encoded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, tokens) ids and mask -> (batch, hidden), from which the head predicts."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self._pool(hidden, attention_mask).float()

    def lengths_of(self, encoded: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, quantiles) lengths, tokens."""
        return self._relative(encoded) * self.config.length_unit

    def _relative(self, encoded: Tensor) -> Tensor:
        return self._ascending(self.head(encoded)).exp()

    def _pinball(self, predicted: Tensor, actual: Tensor) -> Tensor:
        """Mean loss over answers and levels, on the square root of lengths when there are several levels.

        Doubled, so that the loss at the median is the absolute error. The root is a compromise: the few longest answers
        dominate errors in tokens, and relative errors neglect that long answers cost most.
        """
        if self.config.quantiles > 1:
            predicted, actual = 2 * predicted.sqrt(), 2 * actual.sqrt()
        short = actual - predicted
        return 2 * torch.maximum(self.levels * short, (self.levels - 1) * short).mean()

    def _ascending(self, z: Tensor) -> Tensor:
        if self.config.quantiles == 1:
            return z
        steps = nn.functional.softplus(z[:, 1:])
        return torch.cat([z[:, :1], z[:, :1] + steps.cumsum(dim=1)], dim=1)

    def _pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> (batch, hidden)"""
        if self.config.pooling == "cls":
            return hidden[:, 0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    def _forget_some_models(self, input_ids: Tensor) -> Tensor:
        """Hide the name of the model in some lines (predictor/encoding.py describes a line)."""
        names = torch.tensor(self.config.model_tokens, device=input_ids.device)
        forget = torch.rand(len(input_ids), 1, device=input_ids.device) < MODEL_FORGOTTEN
        return torch.where(torch.isin(input_ids, names) & forget, names[-1], input_ids)
