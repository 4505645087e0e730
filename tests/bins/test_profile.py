"""Engine profiles: curves, costs of batches, published numbers, files, and fits that recover their data's source."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from bins.curve import Curve
from bins.fitting import Observation, fit
from bins.profile import PROFILES, Profile, StepTimes, longest_tokens, resolve

H100 = PROFILES["h100-llama-3.1-8b"]
P4 = PROFILES["p4-googlenet"]


def profile(**changes: Any) -> Profile:
    plain = Profile(
        "plain", Curve.affine(1e-3, 9e-3), Curve.affine(0.1, 0.9), 50.0, source="Made up.", energy_source="modelled"
    )
    return replace(plain, **changes)


# ---- curves -------------------------------------------------------------------------------------------------------


def test_an_affine_curve_is_a_line():
    assert Curve.affine(2.0, 3.0).at([1, 4, 10]).tolist() == [5.0, 11.0, 23.0]


def test_a_table_is_interpolated_constant_before_its_first_size_and_linear_after_its_last():
    table = Curve.table([2, 4, 8], [10, 20, 22])
    assert table.at([1, 2, 3, 4, 6, 8, 12]).tolist() == [10, 10, 15, 20, 21, 22, 24]


def test_a_table_of_one_size_is_constant():
    assert Curve.table([8], [0.5]).at([1, 8, 64]).tolist() == [0.5, 0.5, 0.5]


def test_a_curve_keeps_the_shape_of_the_sizes():
    for curve in (Curve.affine(2.0, 3.0), Curve.table([1, 2], [3, 4])):
        assert curve.at(4).shape == ()
        assert curve.at([[1, 2, 3]]).shape == (1, 3)


def test_a_fit_of_points_on_a_line_finds_it_without_error_and_keeps_them():
    curve = Curve.fit([32, 1, 8], [35, 4, 11])
    assert (curve.slope, curve.intercept) == pytest.approx((1.0, 3.0), rel=1e-12)
    assert curve.error == pytest.approx(0.0, abs=1e-12)
    assert (curve.sizes, curve.values) == ((32, 1, 8), (35, 4, 11))


def test_a_fit_weighs_small_sizes_like_large_ones():
    """Least squares of relative residuals, compared with numpy's fit: scaling a value scales its residual."""
    sizes, values = np.array([1, 2, 4, 8, 512]), np.array([1.2, 1.1, 1.6, 2.2, 90.0])
    slope, intercept = np.polyfit(sizes, values, 1, w=1 / values)
    curve = Curve.fit(sizes, values)
    assert (curve.slope, curve.intercept) == pytest.approx((slope, intercept), rel=1e-9)
    assert curve.error == pytest.approx(np.mean(np.abs((slope * sizes + intercept) / values - 1)))


def test_a_fit_never_decreases_and_is_never_negative():
    assert Curve.fit([1, 2, 3], [3, 2, 1]).slope == 0.0
    assert Curve.fit([2, 3, 4], [1, 4, 9]).intercept == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve.affine(-1, 5), "must not fall with the size, but its slope is -1"),
        (lambda: Curve.affine(1, -1), "must be positive, but is 0 at size 1"),
        (lambda: Curve.affine(1, float("nan")), "intercept must be a finite number, not nan"),
        (lambda: Curve.affine(1, 1, -0.1), "error must be at least 0"),
        (lambda: Curve.table([], []), "at least one size"),
        (lambda: Curve.table([1, 2], [1]), "as many values as sizes, not 1 and 2"),
        (lambda: Curve.table([2, 1], [1, 2]), "strictly increasing"),
        (lambda: Curve.table([0, 1], [1, 2]), "positive and strictly increasing"),
        (lambda: Curve.table([1, 2], [2, 1]), "non-decreasing"),
        (lambda: Curve.table([1, 2], [0, 1]), "positive and non-decreasing"),
        (lambda: Curve.fit([4, 4], [1, 2]), "at least two different sizes; there is only 4"),
        (lambda: Curve.fit([], []), "at least two different sizes; there is none"),
        (lambda: Curve.fit([1, 2], [1, 0]), "positive finite sizes and values"),
        (lambda: Curve.fit([1, 2], [1]), "one value for each size"),
        (lambda: Curve.affine(1, 1).at([0, 2]), "sizes must be at least 1, not 0"),
        (lambda: Curve.affine(1, 1).times(0), "factor must be positive"),
        (lambda: Curve("cubic"), "one of affine, table, not 'cubic'"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_make_no_curve_are_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=12))
def test_a_fit_is_the_non_negative_least_squares_optimum(points: list[tuple[float, float]]):
    """Compared with Lawson and Hanson's algorithm, on arbitrary points."""
    sizes, values = np.array(points).T
    if np.unique(sizes).size < 2:
        return
    columns = np.column_stack([sizes, np.ones_like(sizes)]) / values[:, None]
    _, residual = nnls(columns, np.ones_like(values))
    curve = Curve.fit(sizes, values)
    own_error = np.linalg.norm(columns @ [curve.slope, curve.intercept] - 1)
    assert own_error == pytest.approx(residual, rel=1e-6, abs=1e-6)


# ---- costs of a batch -------------------------------------------------------------------------------------------


def test_a_batch_takes_its_prefill_and_a_step_of_its_size_for_each_token_of_its_longest_answer():
    """Multi-Bin, Section 3: 0.5 s of prefill, and 10 steps of 3 sequences, 30 ms each."""
    times = StepTimes(0.5, (0.01, 0.02, 0.03))
    assert times.batch_s(10, 3) == 0.5 + 10 * 0.03
    assert times.batch_s(10, 1, prompts_s=0.25) == 0.75 + 10 * 0.01, "reading the prompts counts as prefill"
    assert times.batch_s(np.array([0.0, 10.0]), 2).tolist() == [0.5, 0.7]


def test_a_batch_beyond_the_known_sizes_takes_the_steps_of_the_last():
    assert StepTimes(0.0, (1.0, 2.0)).batch_s(10, 8) == 20.0


def test_a_profile_gives_the_step_times_of_all_sizes():
    profile = Profile.timed("p", Curve.affine(0.001, 0.009), prefill_s=0.5, source="Made up.")
    times = profile.step_times(3)
    assert (times.prefill_s, times.step_s) == (0.5, tuple(profile.step_s.at([1, 2, 3]).tolist()))
    of_one = profile.latency_s([[7.0]], [1, 2, 3])[0]
    assert of_one.tolist() == [times.batch_s(7.0, size) for size in (1, 2, 3)], "the same seconds as its means"


def test_the_longest_of_a_batch_is_exact():
    """Compared with all equally likely batches."""
    sample = [3.0, 1.0, 10.0]
    for size in (1, 2, 4):
        every = [max(batch) for batch in product(sample, repeat=size)]
        assert longest_tokens([sample], [size])[0, 0] == pytest.approx(np.mean(every), rel=1e-12)


def test_the_longest_of_uniform_lengths_is_that_of_the_theory():
    """Multi-Bin, eq. 17: the longest of B draws from [0, 1] has mean B / (B + 1); n points shift it by 1 / (2 n)."""
    fine = (np.arange(10_000) + 0.5) / 10_000
    sizes = np.array([1, 8, 128])
    assert longest_tokens([fine], sizes)[0] == pytest.approx(sizes / (sizes + 1), abs=1e-4)


def test_a_batch_takes_its_longest_answer_times_the_step_after_the_prefill():
    engine_profile = profile(prefill_s=0.5, prefill_j=7.0)
    lengths = [[100], [10, 30]]  # second bin: the longest of two is 30 in three of four cases
    assert engine_profile.latency_s(lengths, [1, 2]) == pytest.approx(
        np.array([[0.5 + 100 * 0.010, 0.5 + 100 * 0.011], [0.5 + 20 * 0.010, 0.5 + 25 * 0.011]]), rel=1e-12
    )
    assert engine_profile.energy_j(lengths, [1, 2]) == pytest.approx(
        np.array([[7 + 100 * 1.0, 7 + 100 * 1.1], [7 + 20 * 1.0, 7 + 25 * 1.1]]), rel=1e-12
    )
    assert engine_profile.power_w([1, 2]) == pytest.approx([1.0 / 0.010, 1.1 / 0.011])


def test_relative_energy_is_one_watt_while_batches_run_including_prefill():
    engine_profile = timed()
    assert not engine_profile.energy_known
    assert engine_profile.power_w([1, 4, 8]).tolist() == [1.0, 1.0, 1.0]
    assert engine_profile.idle_w == 0.0
    assert engine_profile.energy_j([[10, 30]], [1, 4]) == pytest.approx(engine_profile.latency_s([[10, 30]], [1, 4]))


WAVES = {"step_s": Curve.table([1, 4, 8], [0.01, 0.04, 0.041]), "step_j": Curve.table([0.5, 2, 8], [1.0, 1.0, 2.0])}


@pytest.mark.parametrize("slots_max", [None, 3, 6, 20])
@pytest.mark.parametrize("curves", [WAVES, {}, {"step_j": Curve.affine(0.1, 0.0)}, {"step_j": Curve.affine(0.0, 1.0)}])
def test_the_least_power_is_that_of_a_known_size(curves: dict[str, Curve], slots_max: int | None):
    """On a fine grid; without a largest size up to the last point of a curve, beyond which there is no measurement."""
    engine_profile = profile(**curves, slots_max=slots_max, idle_w=0.0)
    last = slots_max or (8 if curves is WAVES else 1)
    assert engine_profile.power_w_min == pytest.approx(
        engine_profile.power_w(np.arange(1000, 1000 * last + 1) / 1000).min(), rel=1e-12
    )


def test_idle_power_is_at_most_the_least_power():
    """profile() draws 100 W at every size."""
    assert profile(idle_w=100.0).idle_w == 100.0
    with pytest.raises(ValueError, match=r"idle_w must be at most .* runs, 100 W, not 100\.1"):
        profile(idle_w=100.1)
    falls = {"step_s": Curve.affine(1e-3, 9e-3), "step_j": Curve.affine(0.0, 1.0)}  # 62.5 W at 7
    assert profile(**falls, slots_max=7, idle_w=62.5).idle_w == 62.5
    with pytest.raises(ValueError, match=r"62\.5 W, not 63"):
        profile(**falls, slots_max=7, idle_w=63.0)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_larger_batches_never_take_less_time_or_energy(lengths: list[int]):
    sizes = np.arange(1, 40)
    for costs in (H100.latency_s([lengths], sizes)[0], H100.energy_j([lengths], sizes)[0]):
        assert (np.diff(costs) >= -1e-9 * costs[1:]).all()


@pytest.mark.parametrize(
    ("lengths", "sizes", "message"),
    [
        ([], [1], "there is none"),
        ([[5], []], [1], "of bin 1 it is"),
        ([5, 6], [1], "of bin 0 it is 5"),
        ([[5], [float("nan")]], [1], "lengths of bin 1 must be finite"),
        ([[-1]], [1], "lengths of bin 0 must be finite and at least 0"),
        ([[5]], [0], "whole numbers of at least 1"),
        ([[5]], [1.5], "whole numbers of at least 1"),
        ([[5]], [33], "p4-googlenet runs 32 sequences at once at most, not 33"),
    ],
)
def test_invalid_lengths_and_sizes_are_named(lengths: Any, sizes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        P4.latency_s(lengths, sizes)


# ---- published profiles -------------------------------------------------------------------------------------------


def test_the_h100_has_these_step_times():
    assert H100.step_s.at([1, 64]) == pytest.approx([6.619e-3, 11.596e-3])
    assert H100.step_j.at([1, 64]) == pytest.approx([3.2285, 7.418])
    assert H100.idle_w < H100.power_w(1)
    assert (H100.prefill_s, H100.prefill_j) == (0.0, 0.0)
    assert "Prefill is not in it" in H100.source


def test_the_p4_gives_the_static_batches_of_table_i():
    """SMDP-J, static b = 8: 46.27 W at rho = 0.7, unstable from rho = 0.774 on, up to rounded coefficients."""
    seconds, joules = P4.latency_s([[1]], [8, 32])[0], P4.energy_j([[1]], [8, 32])[0]
    rate_max_per_s = 32 / seconds[1]
    assert 0.7 * rate_max_per_s * joules[0] / 8 == pytest.approx(46.27, rel=1e-3)
    assert (8 / seconds[0]) / rate_max_per_s == pytest.approx(0.774, abs=5e-4)


# ---- files --------------------------------------------------------------------------------------------------------


def fitted() -> Profile:
    batches = [Observation(size, tokens, 0.1 * size + tokens, 5.0 * tokens) for size in (1, 4) for tokens in (10, 20)]
    return fit(batches, name="fitted", idle_w=1.0, source="Made up.")


def timed() -> Profile:
    return Profile.timed("timed", Curve.table([1, 8], [0.01, 0.03]), prefill_s=0.2, slots_max=8, source="Made up.")


@pytest.mark.parametrize(
    "saved",
    [H100, P4, fitted(), profile(step_s=Curve.table([1, 8], [0.01, 0.02]), slots_max=16), timed()],
    ids=["h100", "p4", "fitted", "table", "timed"],
)
def test_a_saved_profile_comes_back_the_same(saved: Profile, tmp_path: Path):
    saved.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == saved
    assert resolve(str(tmp_path / "profile.json")) == saved


def test_the_file_of_an_unknown_energy_holds_neither_joules_nor_watts(tmp_path: Path):
    timed().save(tmp_path / "profile.json")
    members = json.loads((tmp_path / "profile.json").read_text())
    assert {"step_s", "prefill_s", "slots_max"} <= members.keys()
    assert members.keys().isdisjoint({"step_j", "prefill_j", "idle_w"})
    (tmp_path / "profile.json").write_text(json.dumps(members | {"prefill_s": "soon"}))
    with pytest.raises(ValueError, match="prefill_s must be a finite number, not 'soon'"):
        Profile.load(tmp_path / "profile.json")


def test_a_published_profile_is_found_by_its_name():
    assert resolve("p4-googlenet") is P4


def test_the_error_for_a_misspelt_name_suggests_the_right_one():
    with pytest.raises(ValueError, match=r"'h100-llama' is neither .* did you mean .*h100-llama-3\.1-8b\?"):
        resolve("h100-llama")
    with pytest.raises(
        ValueError,
        match=r"shipped profiles are h100-llama-3\.1-8b-contexts, h100-llama-3\.1-8b, h200-llama-1b, h200-llama-8b, "
        "p4-googlenet",
    ):
        resolve("/nowhere/x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefil_s": 1.0}, "unknown key 'prefil_s' in a profile; did you mean 'prefill_s'"),
        ({"idle_w": None}, "'idle_w' is missing in a profile"),
        ({"version": 99}, "its version is 99"),
        ({"idle_w": "90"}, "idle_w must be a finite number, not '90'"),
        ({"idle_w": -1}, "idle_w must be at least 0, not -1"),
        ({"idle_w": True}, "idle_w must be a finite number, not True"),
        ({"slots_max": 0}, "slots_max must be a whole number of at least 1"),
        ({"energy_source": "guessed"}, "one of measured, published, modelled, unknown, not 'guessed'"),
        ({"energy_source": "unknown"}, "'(step_j|idle_w)' is not allowed in a profile of unknown energy"),
        ({"idle_w": 488}, "idle_w must be at most .* runs, 487.76. W, not 488"),
        ({"source": ""}, "source must be a text"),
        ({"step_s": 3}, "step_s must be an object, not int"),
        ({"step_s": {"kind": "affine", "slop": 1}}, "unknown key 'slop' in step_s; did you mean 'slope'"),
        ({"step_s": {"slope": 1}}, "'kind' is missing in step_s"),
        ({"step_s": {"kind": "affine", "slope": -1}}, "step_s: a curve must not fall"),
        ({"step_s": {"kind": "table", "sizes": [1], "values": "3"}}, "values of step_s must be a list of numbers"),
        ({"step_s": {"kind": "table", "sizes": [1], "values": ["3"]}}, "a curve's values must be a finite number"),
    ],
)
def test_a_wrong_profile_file_is_an_error_with_its_path_and_key(change: dict[str, Any], message: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    H100.save(path)
    members = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in members.items() if value is not None}))
    with pytest.raises(ValueError, match=message) as refused:
        Profile.load(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_no_profile_is_an_error(tmp_path: Path):
    (tmp_path / "text").write_text("not JSON")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ValueError, match="is not JSON"):
        Profile.load(tmp_path / "text")
    with pytest.raises(ValueError, match="must be an object, not list"):
        Profile.load(tmp_path / "list")
    with pytest.raises(ValueError, match="cannot read the profile"):
        Profile.load(tmp_path)


# ---- fits ---------------------------------------------------------------------------------------------------------


def batches_of(true_profile: Profile, *, noise: float = 0.0, joules: bool = True) -> list[Observation]:
    """Observations of a known engine; noise: standard deviation of the relative errors."""
    rng = np.random.default_rng(1)
    observations = []
    for size, tokens in product((1, 2, 4, 8, 16, 32), (16, 64, 256)):
        seconds = true_profile.latency_s([[tokens]], [size])[0, 0] * (1 + noise * rng.standard_normal())
        energy = true_profile.energy_j([[tokens]], [size])[0, 0] * (1 + noise * rng.standard_normal())
        observations.append(Observation(size, tokens, seconds, energy if joules else None))
    return observations


def test_a_fit_recovers_the_observed_engine():
    true_profile = profile(prefill_s=0.04, prefill_j=6.0)
    fitted = fit(batches_of(true_profile), name="found", idle_w=50.0, source="Made up.", slots_max=64)
    assert (fitted.prefill_s, fitted.prefill_j) == pytest.approx((0.04, 6.0), rel=1e-9)
    assert (fitted.step_s.slope, fitted.step_s.intercept) == pytest.approx((1e-3, 9e-3), rel=1e-9)
    assert (fitted.step_j.slope, fitted.step_j.intercept) == pytest.approx((0.1, 0.9), rel=1e-9)
    assert (fitted.step_s.error, fitted.step_j.error) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert fitted.step_s.values == pytest.approx(true_profile.step_s.at(fitted.step_s.sizes), rel=1e-9)
    assert (fitted.energy_source, fitted.slots_max, fitted.idle_w) == ("measured", 64, 50.0)


def test_a_fits_error_is_that_of_its_predictions():
    """A relative noise of 3 % has a mean absolute value of 0.03 sqrt(2 / pi) = 2.4 %; the fit follows a part of it."""
    batches = batches_of(profile(prefill_s=0.04), noise=0.03)
    fitted = fit(batches, name="found", idle_w=0.0, source="Made up.")
    misses = [fitted.latency_s([[batch.tokens]], [batch.size])[0, 0] / batch.seconds - 1 for batch in batches]
    assert fitted.step_s.error == pytest.approx(np.mean(np.abs(misses)), rel=1e-9)
    assert 0.01 < fitted.step_s.error < 0.03


def test_without_joules_energy_is_the_assumed_power_times_the_time():
    batches = batches_of(profile(prefill_s=0.04), joules=False)
    fitted = fit(batches, name="found", idle_w=50.0, source="Made up.", busy_w=300.0)
    assert fitted.energy_source == "modelled"
    assert fitted.prefill_j == pytest.approx(300 * 0.04)
    assert fitted.power_w([1, 8, 32]) == pytest.approx([300.0] * 3)


def test_without_joules_and_without_a_power_the_fit_has_times_only():
    batches = batches_of(profile(prefill_s=0.04), joules=False)
    fitted = fit(batches, name="found", idle_w=50.0, source="Made up.", slots_max=32)
    assert fitted.step_s.at([1, 8]) == pytest.approx([0.010, 0.017])
    assert fitted == Profile.timed("found", fitted.step_s, prefill_s=fitted.prefill_s, slots_max=32, source="Made up.")
    assert fitted.energy_source == "unknown"


def test_with_one_length_the_prefill_is_unknown_and_set_to_zero():
    batches = [Observation(size, 50, 0.2 + 50 * (0.001 * size + 0.009)) for size in (1, 8)]
    fitted = fit(batches, name="found", idle_w=0.0, source="Made up.", busy_w=1.0)
    assert fitted.prefill_s == 0.0
    assert fitted.latency_s([[50]], [1, 8])[0] == pytest.approx([batch.seconds for batch in batches])


def test_terms_that_would_be_negative_are_dropped_and_the_others_fitted_again():
    """Times that grow faster than their tokens would need a negative prefill."""
    batches = [Observation(size, tokens, 0.01 * tokens**1.3) for size in (1, 4) for tokens in (10, 20, 40)]
    fitted = fit(batches, name="found", idle_w=0.0, source="Made up.", busy_w=1.0)
    assert fitted.prefill_s == 0.0
    tokens, seconds = np.array([(batch.tokens, batch.seconds) for batch in batches]).T
    alone = (tokens / seconds).sum() / ((tokens / seconds) ** 2).sum()  # least squares of one term
    assert fitted.step_s.at(1) == pytest.approx(alone, rel=1e-9)


def test_a_fit_of_one_size_is_refused():
    with pytest.raises(ValueError, match="at least two different sizes; there is only 4"):
        fit([Observation(4, 10, 1.0), Observation(4, 20, 2.0)], name="x", idle_w=0, source="x", busy_w=1)
    with pytest.raises(ValueError, match="there is none"):
        fit([], name="x", idle_w=0, source="x", busy_w=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1, 1), "at least one sequence, not 0"),
        ((1, 0, 1), "tokens must be positive"),
        ((1, 1, float("inf")), "seconds must be positive and finite"),
        ((1, 1, 1, -2.0), "joules must be positive"),
    ],
)
def test_an_impossible_batch_is_refused(values: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Observation(*values)
