"""How much a campaign measures, in full or in a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CampaignPlan:
    """shapes           models of the part profile
    rows             sequences of its steps and batches: the first group is measured first, the last one last
    contexts         of its timed steps: cached columns that attention reads
    tokens, rounds   of the batches for the profile, see MeasuringPlan
    batch_s          seconds that each of them is repeated for: a counter of energy moves ten times a second
    idle_s           seconds of measuring idle power
    answers, tokens_max  of Fig. 5: number of lengths, and the greatest length
    shape            model of the parts bins, refill and energy
    batch_sizes, bins    of the part bins; the first of each are measured first
    batches          number of full batches in each run of the part bins
    lengths          distribution of answer lengths, as in `llmserve simulate`
    sigma            of the lognormal error of rough forecasts
    slots, burst     of the part refill: slots, the first are measured first, and requests at once
    loads, energy_s  of the part energy: shares of the throughput of full batches, and seconds of arrivals
    energy_batch     requests in a full batch there
    prompts          number of prompts for the predictor
    seed             of every random draw
    start_s          seconds of an engine's start, by the shape; for estimates
    """

    shapes: tuple[str, ...] = ("llama-8b", "llama-1b")
    rows: tuple[tuple[int, ...], ...] = ((1, 8, 32, 128), (2, 4, 16, 64), (256,))
    contexts: tuple[int, ...] = (128, 512, 2048)
    tokens: int = 384
    rounds: int = 2
    batch_s: float = 1.2
    idle_s: float = 5.0
    answers: int = 8
    tokens_max: int = 512
    shape: str = "llama-1b"
    batch_sizes: tuple[int, ...] = (32, 8, 128)
    bins: tuple[int, ...] = (8, 2, 4, 16, 32)
    batches: int = 24
    lengths: str = "lognormal:4.6,0.7,512"
    sigma: float = 0.6
    slots: tuple[int, ...] = (32, 8, 128)
    burst: int = 400
    loads: tuple[float, ...] = (0.1, 0.3)
    energy_s: float = 25.0
    energy_batch: int = 32
    prompts: int = 2000
    seed: int = 0
    start_s: Mapping[str, float] = field(default_factory=lambda: {"llama-8b": 30.0, "llama-1b": 20.0, "tiny": 5.0})

    def setting(self, *names: str) -> dict[str, Any]:
        """These fields, as a part's file keeps them."""
        return {name: value for name, value in asdict(self).items() if name in names}


FULL = CampaignPlan()
TINY = CampaignPlan(
    shapes=("tiny",),
    rows=((1, 2), (4,)),
    contexts=(16, 64),
    tokens=16,
    rounds=1,
    batch_s=0.02,
    idle_s=0.2,
    answers=3,
    tokens_max=40,
    shape="tiny",
    batch_sizes=(4,),
    bins=(2,),
    batches=4,
    lengths="lognormal:2.5,0.7,40",
    slots=(2,),
    burst=10,
    loads=(0.3,),
    energy_s=1.0,
    energy_batch=2,
    prompts=20,
)


def changed(plan: CampaignPlan, values: Mapping[str, Any]) -> CampaignPlan:
    """The plan with all values that are not None."""
    known = {field.name for field in fields(CampaignPlan)}
    return replace(plan, **{name: value for name, value in values.items() if name in known and value is not None})
