"""The campaign for a GPU, rehearsed on a CPU: the same code but for captured graphs and NVML."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engines.test_embedded_generation import ROTARY, Numbers, answers  # noqa: E402
from gpu import bins_part, energy_part, page, predictor_part, profile_part  # noqa: E402
from gpu.models import PROMPT_WORDS, SHAPES, load, prompt_for, random_llama  # noqa: E402
from gpu.plans import FULL, TINY  # noqa: E402
from gpu.steps import BadOutput, CampaignStep, Clock, Results, run_steps  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from bins.profile import Profile  # noqa: E402
from llmserve.engines.embedded.fusing import fuse  # noqa: E402
from llmserve.engines.embedded.generation import LanguageModel  # noqa: E402
from llmserve.engines.embedded.sampling import Sampling  # noqa: E402

ROOT = Path(__file__).parents[1]
CAMPAIGN = ROOT / "scripts/lab/gpu/campaign.py"
PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 1, 4, 1, 5, 9, 2, 6]]


# ---- the whole of it ----------------------------------------------------------------------------------------------


def rehearse(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CAMPAIGN), "--tiny", "--output", str(folder), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    done = rehearse(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_rehearsal_measures_every_part_and_draws_it(rehearsed: Path) -> None:
    for part, module in page.PARTS.items():
        content = json.loads((rehearsed / f"{part}.json").read_text())
        assert content["steps"], part
        assert not content["failed"]
        assert content["setting"].keys() == set(module.SETTING)
        assert content["runs"][0]["device"] == "pretended GPU"
        assert (rehearsed / f"{part}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_is_done_is_not_measured_again(rehearsed: Path) -> None:
    before = {path.name: json.loads(path.read_text())["steps"] for path in rehearsed.glob("*.json")}
    again = rehearse(rehearsed, "--minutes", "0.01")
    assert again.returncode == 0, again.stderr
    assert "bins: 6 of 6 steps are done" in again.stderr
    assert {path.name: json.loads(path.read_text())["steps"] for path in rehearsed.glob("*.json")} == before


@pytest.mark.slow
def test_results_of_other_settings_are_not_mixed(rehearsed: Path) -> None:
    other = rehearse(rehearsed, "--lengths", "uniform:5,50")
    assert other.returncode == 1
    assert "is of other settings" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.slow
def test_the_parts_say_what_was_measured(rehearsed: Path) -> None:
    profile = profile_part.profile(Results.read(rehearsed, "profile"), "tiny")
    assert profile.energy_source == "measured"
    assert profile.power_w_min == pytest.approx(240, rel=0.05)  # the pretended GPU always draws that
    gains = bins_part.gains(Results.read(rehearsed, "bins"))
    assert {(row["bins"], row["predictions"]) for row in gains} == {
        *((bins, "oracle") for bins in (1, 2, bins_part.WINDOW)),
        *((bins, "predicted") for bins in (2, bins_part.WINDOW)),
    }
    assert next(row for row in gains if row["bins"] == 1)["gain"] == 1.0
    saved = energy_part.savings(Results.read(rehearsed, "energy"))
    assert [row["release"] for row in saved] == list(energy_part.RELEASES)
    assert saved[2]["latency_target_s"] == pytest.approx(1.5 * saved[0]["latency_s_p95"], rel=1e-5)
    assert saved[2]["plans"] >= 1
    times = Results.read(rehearsed, "predictor").steps[predictor_part.TIMES]
    assert times["difference"] < 1e-4


@pytest.mark.slow
def test_the_page_has_a_table_for_each_part(rehearsed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "FULL", TINY)
    text = page.page(rehearsed)
    assert page.NOTHING not in text
    assert text.count("| ---") >= 4
    assert "The profile `h200-tiny`: a step" in text


def test_the_page_says_what_was_not_measured(tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert text.count(page.NOTHING) == len(page.PARTS)
    assert "|" not in text


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.RESULTS), "run scripts/lab/gpu/page.py"
    measured = Results.read(page.RESULTS, "profile").steps
    for shape in FULL.shapes:
        path = page.PROFILES / f"{profile_part.profile_name(shape)}.json"
        assert path.exists() == (f"{shape}: {profile_part.BATCHES}" in measured)
        if path.exists():
            assert Profile.load(path).name == path.stem


# ---- steps --------------------------------------------------------------------------------------------------------


def step(name: str, value: object, about_s: float = 0.0) -> CampaignStep:
    async def measure() -> object:
        if isinstance(value, Exception):
            raise value
        return value

    return CampaignStep(name, about_s, measure)


async def test_a_step_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path, "part", {"seed": 0})
    await run_steps([step("a", 1), step("b", ValueError("no such kernel")), step("c", 3)], results, Clock.of(1))
    assert results.steps == {"a": 1, "c": 3}
    assert results.failed == {"b": "ValueError: no such kernel"}
    assert "part, 2 of 3: b: failed" in capsys.readouterr().err
    again = Results(tmp_path, "part", {"seed": 0})
    await run_steps([step("a", 9), step("b", 2)], again, Clock.of(1))
    assert again.steps == {"a": 1, "b": 2, "c": 3}
    assert again.failed == {}


async def test_a_step_that_would_take_too_long_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path, "part", {})
    await run_steps([step("long", 1, about_s=100), step("short", 2, about_s=10)], results, Clock.of(1))
    assert results.steps == {"short": 2}
    assert "long: left for the next run" in capsys.readouterr().err


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, "part", {"rows": (1, 2)}).put("a", 1)
    assert Results(tmp_path, "part", {"rows": (1, 2)}).steps == {"a": 1}
    with pytest.raises(BadOutput, match="other settings"):
        Results(tmp_path, "part", {"rows": (1, 4)})


# ---- the models ---------------------------------------------------------------------------------------------------


def test_a_step_of_the_8b_shape_reads_15_gb() -> None:
    """Llama-3.1-8B has 8.03 billion weights, half a billion of which are embeddings of which a step reads a row."""
    assert SHAPES["llama-8b"].step_bytes(1, 0) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)
    assert SHAPES["llama-1b"].step_bytes(1, 0) == pytest.approx(2 * 1.236e9, rel=0.001)
    cached = SHAPES["llama-8b"].step_bytes(10, 100) - SHAPES["llama-8b"].step_bytes(10, 0)
    assert cached == 10 * 100 * 131_072


def test_the_weights_of_a_step_are_counted_as_the_model_has_them() -> None:
    model = random_llama("tiny", "cpu", fused=False)
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    embeddings = model.model.embed_tokens.weight.numel()
    assert SHAPES["tiny"].step_parameters == sum(w.numel() for w in model.parameters()) - norms - embeddings


def test_answers_have_the_length_that_the_prompt_says() -> None:
    model = load("tiny", "cpu")
    ids = model.text_ids(prompt_for(17))
    assert len(ids) == PROMPT_WORDS
    row = model.row(ids, 5, Sampling(temperature=0.0), ignore_eos=True)
    other = model.row(model.text_ids("no number"), 5, Sampling(temperature=0.0))
    model.run([row, other], lambda _: None)
    assert (row.output_tokens, other.output_tokens) == (17, 5)


def network() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**ROTARY)).eval()


def test_a_fused_model_answers_as_before() -> None:
    fused = network()
    assert fuse(fused, lambda function: function) == ["normalisation", "gate", "rotation"]
    expected = answers(LanguageModel(Numbers(), network(), static=True), PROMPTS, [20, 30, 10])
    assert answers(LanguageModel(Numbers(), fused, static=True), PROMPTS, [20, 30, 10]) == expected


def test_what_cannot_be_compiled_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def broken(function):
        def run(*inputs):
            raise RuntimeError("no C compiler is found")

        return run

    model = network()
    assert fuse(model, broken) == ["normalisation"]
    assert "no C compiler is found" in caplog.text
    assert answers(LanguageModel(Numbers(), model), PROMPTS[:1], [5])


def test_what_stops_compiling_at_a_later_shape_runs_plainly_from_there(caplog: pytest.LogCaptureFixture) -> None:
    def fragile(function):
        def run(*inputs, **options):
            if inputs[0].shape[-2] > 1:  # a prefill
                raise RuntimeError("no kernel for this shape")
            return function(*inputs, **options)

        return run

    fused = network()
    assert fuse(fused, fragile) == ["normalisation", "rotation"]  # the gate is tried with two rows at once
    expected = answers(LanguageModel(Numbers(), network(), static=True), PROMPTS, [20, 30, 10])
    assert answers(LanguageModel(Numbers(), fused, static=True), PROMPTS, [20, 30, 10]) == expected
    assert "no kernel for this shape" in caplog.text
