"""The energy of GPUs: counters and integrated power, the GPUs that count, and lost GPUs."""

from __future__ import annotations

import logging
import sys

import pytest
from fake_nvml import FakeNvml, Gpu, NVMLError

from llmserve.engines.power import GpuEnergy


def test_a_counter_is_read_in_millijoules_since_it_was_opened():
    gpu = Gpu(energy_mj=5_000_000)
    energy = GpuEnergy(FakeNvml(gpu))
    assert energy.energy_j(0.0) == 0.0
    gpu.energy_mj = 5_001_500
    assert energy.energy_j(1.0) == 1.5


def test_a_counter_is_preferred_to_the_power():
    gpu = Gpu(energy_mj=0, power_mw=999_000)
    energy = GpuEnergy(FakeNvml(gpu))
    energy.sample(0.0)
    gpu.energy_mj = 2_000
    assert energy.energy_j(10.0) == 2.0


def test_a_counter_that_stands_still_can_be_left_aside():
    energy = GpuEnergy(FakeNvml(Gpu(energy_mj=0, power_mw=100_000)), counters=False)
    assert energy.integrates
    energy.sample(0.0)
    assert energy.energy_j(2.0) == pytest.approx(200)
    assert not GpuEnergy(FakeNvml(Gpu(energy_mj=0, power_mw=100_000))).integrates


def test_power_is_integrated_between_samples_with_the_trapezoid_rule():
    gpu = Gpu(power_mw=100_000)
    energy = GpuEnergy(FakeNvml(gpu))
    assert energy.energy_j(10.0) == 0.0
    gpu.power_mw = 300_000
    energy.sample(12.0)  # 2 s from 100 to 300 W: 400 J
    gpu.power_mw = 200_000
    assert energy.energy_j(12.5) == pytest.approx(400 + 125)
    assert energy.energy_j(12.5) == pytest.approx(400 + 125)


def test_gpus_are_summed_each_by_counter_or_power():
    counted, sampled = Gpu(energy_mj=0, uuid="GPU-a"), Gpu(power_mw=50_000, uuid="GPU-b", name="Fake P100")
    energy = GpuEnergy(FakeNvml(counted, sampled))
    assert energy.names == ("Fake H100", "Fake P100")
    energy.sample(0.0)
    counted.energy_mj = 7_000
    assert energy.energy_j(2.0) == pytest.approx(7 + 100)


@pytest.mark.parametrize("last_mj", [90_000, 2**64 - 1], ids=["driver-reset", "wrap-around"])
def test_a_counter_that_goes_backwards_counts_from_zero_again(last_mj: int):
    gpu = Gpu(energy_mj=last_mj - 1_000)
    energy = GpuEnergy(FakeNvml(gpu))
    gpu.energy_mj = last_mj
    assert energy.energy_j(1.0) == 1.0
    gpu.energy_mj = 250
    assert energy.energy_j(2.0) == 1.25
    gpu.energy_mj = 500
    assert energy.energy_j(3.0) == 1.5


@pytest.mark.parametrize("reading", ["energy_mj", "power_mw"])
def test_a_gpu_that_is_lost_keeps_its_last_value_is_logged_once_and_may_come_back(
    reading: str, caplog: pytest.LogCaptureFixture
):
    lost, well = Gpu(**{reading: 0}, uuid="GPU-a"), Gpu(energy_mj=0, uuid="GPU-b")
    energy = GpuEnergy(FakeNvml(lost, well))
    energy.sample(0.0)
    setattr(lost, reading, 4_000)
    well.energy_mj = 1_000
    before_j = energy.energy_j(1.0)
    assert before_j == (5.0 if reading == "energy_mj" else 3.0)
    lost.lost = True
    with caplog.at_level(logging.WARNING, "llmserve"):
        assert [energy.energy_j(2.0), energy.energy_j(3.0)] == [before_j, before_j]
        well.energy_mj = 2_000
        assert energy.energy_j(4.0) == before_j + 1.0
    assert [record.getMessage() for record in caplog.records] == [
        "the energy of GPU Fake H100 cannot be read any more: GPU is lost"
    ]
    lost.lost = False
    energy.sample(5.0)  # the power while the GPU was lost is unknown
    setattr(lost, reading, 6_000)
    assert energy.energy_j(6.0) == before_j + 1.0 + (2.0 if reading == "energy_mj" else 5.0)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("a", "b", "c")),
        ("2,0", ("c", "a")),
        ("1, 1", ("b",)),
        ("GPU-bb02", ("b",)),
        ("GPU-c", ("c",)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("a",)),  # CUDA ignores all entries after an invalid one
        ("GPU-", ()),  # an ambiguous name
        ("MIG-bb02", ()),
    ],
)
def test_only_the_gpus_that_cuda_shows_are_counted(visible: str | None, names: tuple[str, ...]):
    gpus = [Gpu(energy_mj=0, uuid=f"GPU-{name}{name}0{index + 1}", name=name) for index, name in enumerate("abc")]
    assert GpuEnergy(FakeNvml(*gpus), visible).names == names


def test_open_reads_the_environment(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml(Gpu(energy_mj=0, name="a"), Gpu(energy_mj=0, name="b"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    energy = GpuEnergy.open()
    assert energy is not None
    assert energy.names == ("b",)
    assert nvml.open == 1
    energy.close()
    assert nvml.open == 0


def test_open_counts_the_given_gpus_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*[Gpu(energy_mj=0, name=name) for name in "abc"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    energy = GpuEnergy.open("2,0")
    assert energy is not None
    assert energy.names == ("c", "a")


@pytest.mark.parametrize(
    "nvml", [None, FakeNvml(driver=False), FakeNvml(), FakeNvml(Gpu())], ids=["package", "driver", "gpu", "reading"]
)
def test_without_a_gpu_that_can_be_read_there_is_nothing_to_open(
    nvml: FakeNvml | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None makes the import fail
    assert GpuEnergy.open() is None
    assert nvml is None or nvml.open == 0


def test_a_failing_driver_is_an_error_for_explicit_requests():
    with pytest.raises(NVMLError, match="Driver Not Loaded"):
        GpuEnergy(FakeNvml(driver=False))
