"""What is planned: streams of requests to models, the GPUs for them and the limits of their groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError
from llmserve.herd import json_files
from llmserve.herd.arrays import ROUNDING
from llmserve.herd.names import no_duplicates

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests of one application to one model. Its name and model together are its own.

    gpus_needed  for its average load; or rate_per_s, with slo_s unless the model's goodput is measured
    """

    name: Name
    model: Name
    rate_per_s: NotNegative | None = None
    slo_s: Positive | None = None
    gpus_needed: NotNegative | None = None


class StreamColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Streams by the million: the fields of Stream, each a sequence (a numpy array, too) of one length."""

    name: Sequence[str]
    model: Sequence[str]
    rate_per_s: Sequence[NotNegative | None] | None = None
    slo_s: Sequence[Positive | None] | None = None
    gpus_needed: Sequence[NotNegative | None] | None = None


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A batch of b takes alpha_ms b + beta_ms. goodput_per_s : measured maximum of a GPU; None: from alpha and beta."""

    name: Name
    memory_gb: Positive
    alpha_ms: Positive
    beta_ms: NotNegative
    batch_size_max: Count = 128
    goodput_per_s: Positive | None = None


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be planned.

    gpus            of the cluster; gpu_memory_gb : of each, that models may fill
    group_gpus_max  GPUs that one scheduler can keep up with
    groups          at most
    affinity_max    most that two models of a group may diverge by (`divergence`), at least 1; None: any two go together
    """

    streams: tuple[Stream, ...] | StreamColumns
    models: tuple[Model, ...]
    gpus: Count
    gpu_memory_gb: Positive
    group_gpus_max: Count
    groups: Count
    affinity_max: Annotated[float, Meta(ge=1)] | None = None

    @classmethod
    def load(cls, path: str | Path) -> Instance:
        """From JSON. Raises ConfigError naming what is wrong in it."""
        return json_files.read(path, cls, PARTS, "instance")

    def save(self, path: str | Path) -> None:
        """Raises ConfigError when it cannot be written."""
        json_files.write(path, self, "instance")


PARTS: json_files.Parts = {"streams[": Stream, "streams": StreamColumns, "models[": Model}
LEAST = {  # that a number may be; None: more than 0
    "gpus": 1,
    "gpu_memory_gb": None,
    "group_gpus_max": 1,
    "groups": 1,
    "affinity_max": 1,
    "memory_gb": None,
    "alpha_ms": None,
    "beta_ms": 0,
    "batch_size_max": 1,
    "goodput_per_s": None,
}


def check(instance: Instance) -> None:
    """What the types cannot say; and what they say, for instances that were made in Python. Raises ConfigError."""
    if not instance.models:
        raise ConfigError("models: at least one is needed")
    no_duplicates([model.name for model in instance.models], "model")
    for owner, where in ((instance, ""), *((model, f"model {model.name!r}: ") for model in instance.models)):
        for field, least in LEAST.items():
            value = getattr(owner, field, None)
            if value is not None and not (math.isfinite(value) and (value > 0 if least is None else value >= least)):
                limit = "above 0" if least is None else f"of at least {least}"
                raise ConfigError(f"{where}{field} must be a finite number {limit}, not {value:g}")
    for model in instance.models:
        if model.memory_gb > instance.gpu_memory_gb * (1 + ROUNDING):
            raise ConfigError(
                f"model {model.name!r}: it takes {model.memory_gb:g} GB, and a GPU has {instance.gpu_memory_gb:g}"
            )
