"""The section [prediction]: what predicts the lengths of answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class PredictorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of answer lengths"""

    predictor: Annotated[
        tuple[str, ...],
        Meta(
            description="folder of a trained length predictor, or `none`: lengths are predicted from earlier answers. "
            "The prefix model:ID= limits the predictor to one model; repeat for several (default: the demo predictor "
            "with the demo model, else none)",
            extra={"metavar": "[model:ID=]FOLDER"},
        ),
    ] = ()
    predictor_budget_s: Annotated[
        float,
        Meta(gt=0, description="longest wait for a prediction; then the length is predicted from earlier answers"),
    ] = 1.0
    predictor_threads: Annotated[int, Meta(ge=1, description="CPU threads of the predictor's process")] = 1
    memory_keys: Annotated[
        int,
        Meta(
            ge=0,
            description="number of templates and applications whose recent answer lengths are remembered; 0: none, and "
            "nothing is learnt from the words of prompts",
        ),
    ] = 10_000
    record: Annotated[
        str | None,
        Meta(
            description="file to which prompts and answer lengths are appended, to train a predictor. The file has "
            "JSON lines with the parameters of each request, and never an answer"
        ),
    ] = None
