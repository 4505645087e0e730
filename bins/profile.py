"""Engine profiles: seconds and joules of a batch, by its bin and its size.

    b             sequences that run together: the size of a batch
    L             steps of a batch: output tokens of its longest answer (a static batch runs all its rows to the end)
    tau(b)        s, one step: `step_s`
    eps(b)        J, one step, everything that the machine draws meanwhile: `step_j`
    T = prefill_s + L tau(b)      s, a batch
    J = prefill_j + L eps(b)      J, a batch

Both are affine in L, so their means over the batches of a bin need E[L] only: the mean of the longest of b draws from
the bin's lengths (bins/risk.py). What the machine draws while nothing runs is apart: `idle_w`.

That is a batch that runs to its end. Where slots refill, prefills overlap with others' steps and have no joules of
their own: as long as n sequences have a slot, in prefill or not, the machine draws eps(n) / tau(n) watts, `power_w`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bins.curve import Curve, Floats, check_number
from bins.risk import risks

VERSION = 1
ROUNDING = 1e-9  # relative: the power of a profile modelled at a constant power is that power, to rounding

Steps = TypeVar("Steps", float, Floats)
EnergySource = Literal["measured", "published", "modelled", "unknown"]
ENERGY_FIELDS = ("step_j", "idle_w", "prefill_j")


# ---- how long a batch takes ---------------------------------------------------------------------------------------


def batch_s(longest: Steps, step_s: Steps | float, prefill_s: Steps | float) -> Steps:
    """Seconds of a static batch: prefill_s + longest * step_s. The one place that says so. Arrays are broadcast.

    longest    output tokens of its longest answer: the steps that it runs
    step_s     seconds of a step of as many sequences as it has
    prefill_s  seconds before its first step
    Source: Multi-Bin, Section 3, whose batch takes its longest answer's time; prefill and the step's dependence on the
    size are added to that.
    """
    return prefill_s + longest * step_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long batches of one model take on one engine: prefill and steps, in seconds.

    prefill_s  before a batch's first step, >= 0
    step_s     (sizes,) of a step of 1, 2, ... sequences, >= 0; () where nothing is known
    """

    prefill_s: float
    step_s: tuple[float, ...]

    def batch_s(self, longest: Steps, size: int, prompts_s: Steps | float = 0.0) -> Steps:
        """Seconds of a batch of `size` sequences, >= 1; those beyond the last known size take that one's step.

        longest    output tokens of its longest answer: a number, or an array of any shape
        prompts_s  seconds that its prompts add to the prefill
        Raises IndexError where step_s is ().
        """
        return batch_s(longest, self.step_s[min(size, len(self.step_s)) - 1], self.prefill_s + prompts_s)


# ---- what an engine costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds and joules of a batch on one engine; see the module for the equations.

    name           of the engine: its hardware and model
    step_s         seconds of one step, by sequences that run together
    step_j         joules of one step, everything that the machine draws meanwhile
    idle_w         watts while nothing runs, at most what it draws while anything runs
    prefill_s      seconds that a batch spends before its first token
    prefill_j      joules that it takes for that
    slots_max      sequences that can run together at most; None: not known
    source         a sentence: where these numbers are from
    energy_source  measured on this engine, published by others, modelled from a power that was assumed, or unknown

    Where energy is unknown, joules and watts are relative, good for comparing policies and never to be shown; see
    `Profile.timed`.
    """

    name: str
    step_s: Curve
    step_j: Curve
    idle_w: float
    _: KW_ONLY
    prefill_s: float = 0.0
    prefill_j: float = 0.0
    slots_max: int | None = None
    source: str
    energy_source: EnergySource

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise ValueError(f"a profile's {name} must be a text, not {text!r}")
        for name in ("idle_w", "prefill_s", "prefill_j"):
            check_number(getattr(self, name), f"a profile's {name}", least=0.0)
        if self.energy_source not in get_args(EnergySource):
            sources = ", ".join(get_args(EnergySource))
            raise ValueError(f"a profile's energy_source is one of {sources}, not {self.energy_source!r}")
        if self.slots_max is not None and (type(self.slots_max) is not int or self.slots_max < 1):
            raise ValueError(f"a profile's slots_max must be a whole number of at least 1, not {self.slots_max!r}")
        if self.energy_known and self.idle_w > self.power_w_min * (1 + ROUNDING):
            raise ValueError(
                f"a profile's idle_w must be at most what is drawn while anything runs, {self.power_w_min:.6g} W at "
                f"the least, not {self.idle_w:.6g}"
            )

    @classmethod
    def timed(
        cls, name: str, step_s: Curve, *, prefill_s: float = 0.0, slots_max: int | None = None, source: str
    ) -> Profile:
        """A profile of which only times are known. Its energy is relative: 1 W while anything runs, 0 W otherwise."""
        return cls(
            name,
            step_s,
            step_j=step_s,
            idle_w=0.0,
            prefill_s=prefill_s,
            prefill_j=prefill_s,
            slots_max=slots_max,
            source=source,
            energy_source="unknown",
        )

    @property
    def energy_known(self) -> bool:
        """Whether its joules and watts are joules and watts."""
        return self.energy_source != "unknown"

    @property
    def power_w_min(self) -> float:
        """Least watts while anything runs, over the sizes that are known: from 1 to slots_max or the last point.

        Between points both curves are straight, and their quotient is monotone: it is least at one of them.
        """
        most = math.inf if self.slots_max is None else self.slots_max
        points = [1.0, *self.step_s.sizes, *self.step_j.sizes, self.slots_max or 1.0]
        return float(self.power_w([size for size in points if 1 <= size <= most]).min())

    def latency_s(self, lengths: Sequence[ArrayLike], sizes: ArrayLike) -> Floats:
        """Mean seconds of a batch: (bins, sizes), non-decreasing along sizes.

        lengths : for each bin a sample of output lengths in tokens.  sizes : (sizes,) whole, 1 .. slots_max.
        """
        b = self._sizes(sizes)
        return batch_s(longest_tokens(lengths, b), self.step_s.at(b), self.prefill_s)

    def step_times(self, sizes: int) -> StepTimes:
        """Of batches of 1 .. sizes sequences; slots_max is no bound here. sizes : >= 1."""
        return StepTimes(self.prefill_s, tuple(self.step_s.at(np.arange(1, sizes + 1)).tolist()))

    def at_pace(self, pace: float) -> Profile:
        """Of engines that take `pace` seconds for each second of this one, and draw as much meanwhile. pace : > 0."""
        return replace(
            self,
            step_s=self.step_s.times(pace),
            step_j=self.step_j.times(pace),
            prefill_s=pace * self.prefill_s,
            prefill_j=pace * self.prefill_j,
        )

    def energy_j(self, lengths: Sequence[ArrayLike], sizes: ArrayLike) -> Floats:
        """Mean joules of a batch: (bins, sizes), non-decreasing along sizes. lengths, sizes : as for latency_s."""
        b = self._sizes(sizes)
        return self.prefill_j + longest_tokens(lengths, b) * self.step_j.at(b)

    def power_w(self, sizes: ArrayLike) -> Floats:
        """Watts while b sequences run, in the shape of sizes."""
        b = self._sizes(sizes)
        return self.step_j.at(b) / self.step_s.at(b)

    def _sizes(self, sizes: ArrayLike) -> Floats:
        b = np.asarray(sizes, dtype=float)
        if self.slots_max is not None and (b > self.slots_max).any():
            raise ValueError(f"{self.name} runs {self.slots_max} sequences at once at most, not {np.max(b):g}")
        return b

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `Profile.load` and for reading; without joules and watts where they are relative."""
        whole = asdict(self) | {"step_s": _curve_fields(self.step_s), "step_j": _curve_fields(self.step_j)}
        if not self.energy_known:
            whole = {name: value for name, value in whole.items() if name not in ENERGY_FIELDS}
        Path(path).write_text(json.dumps({"version": VERSION, **whole}, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """A saved profile. Raises ValueError naming the file and the key that is unknown, missing or wrong."""
        try:
            found = json.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read the profile {path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"the profile {path} is not JSON: {error}") from error
        try:
            return _read_profile(found)
        except ValueError as error:
            raise ValueError(f"the profile {path}: {error}") from error


def longest_tokens(lengths: Sequence[ArrayLike], sizes: ArrayLike) -> Floats:
    """Mean output tokens of the longest of b answers: (bins, sizes).

    lengths : for each bin a sample x_(1) <= ... <= x_(n) of output lengths, in any order; finite, >= 0, n >= 1.
    sizes : (sizes,) whole numbers b >= 1.
    Exact for draws with replacement: sum_i x_(i) ((i/n)^b - ((i-1)/n)^b).
    """
    b = np.atleast_1d(np.asarray(sizes, dtype=float))
    if b.ndim != 1 or not (b >= 1).all() or (b != np.round(b)).any():
        raise ValueError(f"batch sizes must be whole numbers of at least 1 in one row, not {sizes!r}")
    if len(lengths) == 0:
        raise ValueError("lengths must hold a sample for each bin; there is none")
    return np.stack([_longest_of_sample(sample, index, b.astype(int)) for index, sample in enumerate(lengths)])


def _longest_of_sample(sample: ArrayLike, index: int, sizes: NDArray[np.intp]) -> Floats:
    drawn = np.asarray(sample, dtype=float)
    if drawn.ndim != 1 or drawn.size == 0:
        raise ValueError(f"lengths must hold a sample for each bin, but of bin {index} it is {sample!r}")
    if not (np.isfinite(drawn).all() and (drawn >= 0).all()):
        raise ValueError(f"the lengths of bin {index} must be finite and at least 0")
    ordered = np.sort(drawn)
    return np.array([risks(ordered, int(b)) for b in sizes])


# ---- reading and checking -----------------------------------------------------------------------------------------


def _read_profile(found: object) -> Profile:
    if isinstance(found, dict) and found.get("energy_source") == "unknown":
        members = _members(found, Profile, "a profile of unknown energy", also=("version",), without=ENERGY_FIELDS)
    else:
        members = _members(found, Profile, "a profile", also=("version",))
    if (version := members.pop("version")) != VERSION:
        raise ValueError(f"its version is {version!r}; this is version {VERSION}")
    members["step_s"] = _read_curve(members["step_s"], "step_s")
    if "step_j" in members:
        members["step_j"] = _read_curve(members["step_j"], "step_j")
        return Profile(**members)
    del members["energy_source"]
    return Profile.timed(**members)


def _read_curve(found: object, name: str) -> Curve:
    members = _members(found, Curve, name)
    for row in ("sizes", "values"):
        if row in members:
            if not isinstance(members[row], list):
                raise ValueError(f"{row} of {name} must be a list of numbers, not {members[row]!r}")
            members[row] = tuple(members[row])
    try:
        return Curve(**members)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _members(
    found: object, kind: type[Any], place: str, also: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A JSON object whose keys are the fields of a dataclass; those without a default must be there.

    also : further keys that must be there.  without : fields that must not.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{place} must be an object, not {type(found).__name__}")
    wanted = [field for field in fields(kind) if field.name not in without]
    known = [*also, *(field.name for field in wanted)]
    for key in found:
        if key in without:
            raise ValueError(f"{key!r} has no place in {place}")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            raise ValueError(f"unknown key {key!r} in {place}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for key in [*also, *(field.name for field in wanted if field.default is MISSING)]:
        if key not in found:
            raise ValueError(f"{key!r} is missing in {place}")
    return dict(found)


def _curve_fields(curve: Curve) -> dict[str, Any]:
    names = ("kind", "sizes", "values") if curve.kind == "table" else [field.name for field in fields(curve)]
    return {name: getattr(curve, name) for name in names}


# ---- published profiles -------------------------------------------------------------------------------------------

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="h100-llama-3.1-8b",
            step_s=Curve.affine(0.0790e-3, 6.54e-3, error=0.017),
            step_j=Curve.affine(0.0665, 3.162, error=0.019),
            idle_w=90.0,
            source=(
                "ML.ENERGY benchmark, Llama-3.1-8B-Instruct in bfloat16 on one H100, lm-arena-chat, batches of 8 to "
                "690: affine fits of the median inter-token latency (error 1.7 %) and of the energy of a step "
                "(error 1.9 %). Prefill is not in it: a batch begins with its first token, at no time and no energy. "
                "It publishes no idle power: 90 W is assumed, as idle H100s draw 70 to 120 W."
            ),
            energy_source="published",
        ),
        Profile(
            name="p4-googlenet",
            step_s=Curve.affine(0.3051e-3, 1.0524e-3),
            step_j=Curve.affine(19.899e-3, 19.603e-3),
            idle_w=0.0,
            source=(
                "SMDP-based dynamic batching, the basic scenario: GoogLeNet on a Tesla P4, one step (an inference) for "
                "each request, deterministic. The paper does not count idle power."
            ),
            energy_source="published",
            slots_max=32,
        ),
    )
}
"""By name."""


def resolve(name_or_path: str | Path) -> Profile:
    """A published profile by its name, else a saved one by its path. Raises ValueError when it is neither."""
    name = str(name_or_path)
    if name in PROFILES:
        return PROFILES[name]
    if Path(name).exists():
        return Profile.load(name)
    near = get_close_matches(name, PROFILES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"published ones are {', '.join(PROFILES)}"
    raise ValueError(f"{name!r} is neither a published profile nor a file; {hint}")
