"""Engine profiles: seconds and joules of a batch, by its bin and its size.

    b             sequences that run together: the size of a batch
    L             steps of a batch: output tokens of its longest answer (a static batch runs all its rows to the end)
    tau(b)        s, one step: `step_s`
    eps(b)        J, one step, the whole draw of the machine: `step_j`
    T = prefill_s + L tau(b)      s, a batch
    J = prefill_j + L eps(b)      J, a batch

T and J are affine in L, so their means over the batches of a bin only need E[L]: the mean of the longest of b draws
from the bin's lengths (bins/risk.py). The power of an idle machine is `idle_w`.

These equations are for batches that run to their end. On refill engines, prefills overlap with the steps of other
requests and have no joules of their own: while n sequences have a slot, in prefill or not, the machine draws
eps(n) / tau(n) watts, `power_w`.
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

FIT_ERROR_MAX = 0.15  # above this error, plans from the profile are not reliable
VERSION = 1
ROUNDING = 1e-9  # relative: idle_w may exceed the least power by this much, for rounding

Steps = TypeVar("Steps", float, Floats)
EnergySource = Literal["measured", "published", "modelled", "unknown"]
TOKEN_COSTS = ("prefill_s_per_token", "prefill_s_per_context_token", "step_s_per_context_token")
ENERGY_FIELDS = ("step_j", "idle_w", "prefill_j")


# ---- how long a batch takes ---------------------------------------------------------------------------------------


def batch_s(longest: Steps, step_s: Steps | float, prefill_s: Steps | float) -> Steps:
    """Seconds of a static batch: prefill_s + longest * step_s. The only place with this equation. Arrays are broadcast.

    longest    output tokens of the longest answer, which is the number of steps
    step_s     seconds of a step at the batch's size
    prefill_s  seconds before the first step
    Source: Multi-Bin, Section 3, where a batch takes its longest answer's time; prefill and the dependence of the step
    on the size are additions.
    """
    return prefill_s + longest * step_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of batches of one model on one engine, in seconds.

    prefill_s  before a batch's first step, >= 0
    step_s     (sizes,) of a step of 1, 2, ... sequences, >= 0; () if unknown
    """

    prefill_s: float
    step_s: tuple[float, ...]

    def batch_s(self, longest: Steps, size: int, prompts_s: Steps | float = 0.0) -> Steps:
        """Seconds of a batch of `size` sequences, >= 1; sizes beyond the last known size take the last size's step.

        longest    output tokens of the longest answer: a number, or an array of any shape
        prompts_s  seconds that the prompts add to the prefill
        Raises IndexError when step_s is ().
        """
        return batch_s(longest, self.step_s[min(size, len(self.step_s)) - 1], self.prefill_s + prompts_s)


# ---- what an engine costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds and joules of a batch on one engine; see the module for the equations.

    name           name of the engine: its hardware and model
    step_s         seconds of one step, by the number of sequences that run together
    step_j         joules of one step, the whole draw of the machine
    idle_w         watts while nothing runs, at most the least power while anything runs
    prefill_s      seconds of a batch before its first token
    prefill_j      joules of a batch before its first token
    slots_max      largest number of sequences that can run together; None: unknown
    prefill_s_per_token          further seconds of a prefill, for each token of the prompt
    prefill_s_per_context_token  further seconds of such a token, for each token before it
    step_s_per_context_token     further seconds of a step, for each token of the contexts of its sequences
    source         a sentence: the origin of these numbers
    energy_source  measured on this engine, published by others, modelled from an assumed power, or unknown

    If energy is unknown, joules and watts are relative: they compare policies and must never be shown; see
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
    prefill_s_per_token: float = 0.0
    prefill_s_per_context_token: float = 0.0
    step_s_per_context_token: float = 0.0
    source: str
    energy_source: EnergySource

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise ValueError(f"a profile's {name} must be a text, not {text!r}")
        for name in ("idle_w", "prefill_s", "prefill_j", *TOKEN_COSTS):
            check_number(getattr(self, name), f"a profile's {name}", least=0.0)
        if self.energy_source not in get_args(EnergySource):
            sources = ", ".join(get_args(EnergySource))
            raise ValueError(f"a profile's energy_source is one of {sources}, not {self.energy_source!r}")
        if self.slots_max is not None and (type(self.slots_max) is not int or self.slots_max < 1):
            raise ValueError(f"a profile's slots_max must be a whole number of at least 1, not {self.slots_max!r}")
        if self.energy_known and self.idle_w > self.power_w_min * (1 + ROUNDING):
            raise ValueError(
                f"a profile's idle_w must be at most the least power while anything runs, {self.power_w_min:.6g} W, "
                f"not {self.idle_w:.6g}"
            )

    @classmethod
    def timed(
        cls,
        name: str,
        step_s: Curve,
        *,
        prefill_s: float = 0.0,
        slots_max: int | None = None,
        source: str,
        **costs: float,
    ) -> Profile:
        """A profile with times only. Its energy is relative: 1 W while anything runs, 0 W otherwise.

        costs : TOKEN_COSTS, by name
        """
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
            **costs,
        )

    @property
    def energy_known(self) -> bool:
        """False when joules and watts are only relative."""
        return self.energy_source != "unknown"

    @property
    def power_w_min(self) -> float:
        """Least watts while anything runs, over the known sizes: from 1 to slots_max or the last point.

        Between two points both curves are straight and their quotient is monotone, so the minimum is at a point.
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
        """Step times of batches of 1 .. sizes sequences; slots_max is no bound here. sizes : >= 1."""
        return StepTimes(self.prefill_s, tuple(self.step_s.at(np.arange(1, sizes + 1)).tolist()))

    def at_pace(self, pace: float) -> Profile:
        """Profile of engines that take `pace` seconds for each second of this one, at the same power. pace : > 0."""
        return replace(
            self,
            step_s=self.step_s.times(pace),
            step_j=self.step_j.times(pace),
            prefill_s=pace * self.prefill_s,
            prefill_j=pace * self.prefill_j,
            **{name: pace * getattr(self, name) for name in TOKEN_COSTS},
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

    @property
    def misfit(self) -> str:
        """What to do about a fit that misses the measured steps; "" for a good fit."""
        if self.step_s.error <= FIT_ERROR_MAX:
            return ""
        return (
            f"the fit misses the measured steps by {self.step_s.error:.0%}: other work disturbed the engine, or there "
            "were too few batches. Measure again: llmserve profile, with more --rounds"
        )

    def save(self, path: str | Path) -> None:
        """Write the profile as readable JSON for `Profile.load`, without joules and watts if they are relative."""
        members = asdict(self) | {"step_s": _curve_fields(self.step_s), "step_j": _curve_fields(self.step_j)}
        if not self.energy_known:
            members = {name: value for name, value in members.items() if name not in ENERGY_FIELDS}
        Path(path).write_text(json.dumps({"version": VERSION, **members}, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """A saved profile. Raises ValueError, which names the file and the key that is unknown, missing or wrong."""
        try:
            document = json.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read the profile {path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"the profile {path} is not JSON: {error}") from error
        try:
            return _read_profile(document)
        except ValueError as error:
            raise ValueError(f"the profile {path}: {error}") from error


def longest_tokens(lengths: Sequence[ArrayLike], sizes: ArrayLike) -> Floats:
    """Mean output tokens of the longest of b answers: (bins, sizes).

    lengths : for each bin a sample x_(1) <= ... <= x_(n) of output lengths, in any order; finite, >= 0, n >= 1.
    sizes : (sizes,) whole numbers b >= 1.
    Exact for b draws with replacement: sum_i x_(i) ((i/n)^b - ((i-1)/n)^b).
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


def _read_profile(document: object) -> Profile:
    if isinstance(document, dict) and document.get("energy_source") == "unknown":
        members = _members(document, Profile, "a profile of unknown energy", also=("version",), without=ENERGY_FIELDS)
    else:
        members = _members(document, Profile, "a profile", also=("version",))
    if (version := members.pop("version")) != VERSION:
        raise ValueError(f"its version is {version!r}; only version {VERSION} can be read")
    members["step_s"] = _read_curve(members["step_s"], "step_s")
    if "step_j" in members:
        members["step_j"] = _read_curve(members["step_j"], "step_j")
        return Profile(**members)
    del members["energy_source"]
    return Profile.timed(**members)


def _read_curve(document: object, name: str) -> Curve:
    members = _members(document, Curve, name)
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
    document: object, kind: type[Any], place: str, also: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The members of a JSON object whose keys are a dataclass's fields; fields without a default are required.

    also : further required keys.  without : forbidden fields.  Raises ValueError on other keys and missing keys.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{place} must be an object, not {type(document).__name__}")
    allowed = [field for field in fields(kind) if field.name not in without]
    keys = [*also, *(field.name for field in allowed)]
    for key in document:
        if key in without:
            raise ValueError(f"{key!r} is not allowed in {place}")
        if key not in keys:
            near = get_close_matches(key, keys, n=1)
            raise ValueError(f"unknown key {key!r} in {place}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for key in [*also, *(field.name for field in allowed if field.default is MISSING)]:
        if key not in document:
            raise ValueError(f"{key!r} is missing in {place}")
    return dict(document)


def _curve_fields(curve: Curve) -> dict[str, Any]:
    names = ("kind", "sizes", "values") if curve.kind == "table" else [field.name for field in fields(curve)]
    return {name: getattr(curve, name) for name in names}


# ---- shipped profiles -------------------------------------------------------------------------------------------

PROFILES: Mapping[str, Profile] = {
    path.stem: Profile.load(path) for path in sorted(Path(__file__).with_name("profiles").glob("*.json"))
}
"""By name: the files of bins/profiles, whose names are the profiles' own."""


def resolve(name_or_path: str | Path) -> Profile:
    """A shipped profile by its name, else a saved profile by its path. Raises ValueError for neither."""
    name = str(name_or_path)
    if name in PROFILES:
        return PROFILES[name]
    if Path(name).exists():
        return Profile.load(name)
    near = get_close_matches(name, PROFILES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped profiles are {', '.join(PROFILES)}"
    raise ValueError(f"{name!r} is neither a shipped profile nor a file; {hint}")
