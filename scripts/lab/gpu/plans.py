"""How much a campaign measures, in full or in a rehearsal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CampaignPlan:
    """shapes           models of the part profile
    rows, contexts   of the timed steps: sequences, and cached columns that attention reads
    tokens, rounds   of the batches for the profile, see MeasuringPlan
    idle_s           seconds of measuring idle power
    answers, tokens_max  of Fig. 5: number of lengths, and the greatest length
    shape            model of the parts bins and energy
    batch_sizes, bins    of the part bins
    batches          number of full batches in each run of the part bins
    lengths          distribution of answer lengths, as in `llmserve simulate`
    sigma            of the lognormal error of realistic predictions
    loads, requests  of the part energy: shares of the throughput of full batches, and arrivals in each run
    prompts          number of prompts for the predictor
    seed             of every random draw
    """

    shapes: tuple[str, ...] = ("llama-8b", "llama-1b")
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (128, 512, 1024, 2048)
    tokens: int = 256
    rounds: int = 2
    idle_s: float = 5.0
    answers: int = 10
    tokens_max: int = 1000
    shape: str = "llama-1b"
    batch_sizes: tuple[int, ...] = (8, 32, 128)
    bins: tuple[int, ...] = (2, 4, 8, 16, 32)
    batches: int = 64
    lengths: str = "lognormal:4.6,0.7,512"
    sigma: float = 0.6
    loads: tuple[float, ...] = (0.1, 0.3)
    energy_batch: int = 8
    requests: int = 200
    prompts: int = 2000
    seed: int = 0

    def setting(self, *names: str) -> dict[str, Any]:
        """These fields, as a part's file keeps them."""
        return {name: value for name, value in asdict(self).items() if name in names}


FULL = CampaignPlan()
TINY = CampaignPlan(
    shapes=("tiny",),
    rows=(1, 2),
    contexts=(16, 64),
    tokens=16,
    rounds=1,
    idle_s=0.2,
    answers=3,
    tokens_max=30,
    shape="tiny",
    batch_sizes=(2,),
    bins=(2,),
    batches=4,
    lengths="lognormal:2.5,0.7,40",
    loads=(0.3,),
    energy_batch=2,
    requests=10,
    prompts=20,
)


def changed(plan: CampaignPlan, values: dict[str, Any]) -> CampaignPlan:
    """The plan with all values that are not None."""
    known = {field.name for field in fields(CampaignPlan)}
    return replace(plan, **{name: value for name, value in values.items() if name in known and value is not None})
