"""`llmserve doctor`: each finding in the readings that call for it, a running server, and configurations."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from engines.lying import LyingEngine, http
from front import StartFront, until

from bins.profile import Curve, Profile
from llmserve.__main__ import main
from llmserve.commands import doctor
from llmserve.doctor import running as doctor_running
from llmserve.doctor.finding import Finding
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError, NoAnswer
from llmserve.observe.scrape import Scrape
from llmserve.settings.tree import ServerConfig

HEALTHY = """
llmserve_build_info{version="0"} 1
llmserve_engine_ready{engine="a"} 1
llmserve_engine_slots{engine="a"} 8
llmserve_engine_slots_known{engine="a"} 1
llmserve_engine_load_known{engine="a"} 1
llmserve_engine_circuit_open{engine="a"} 0
llmserve_engine_requests_total{engine="a",model="m",outcome="completed"} 1000
llmserve_engine_requests_total{engine="a",model="m",outcome="fault"} 1
llmserve_requests_total{outcome="completed"} 1000
llmserve_prediction_trusted 1
llmserve_prediction_window_answers 256
llmserve_prediction_rank_correlation 0.6
llmserve_prediction_forecasts_total{source="learner"} 1000
llmserve_order{settings="boost"} 1
llmserve_waiting_seconds_bucket{engine="a",model="m",le="0.01"} 300
llmserve_waiting_seconds_bucket{engine="a",model="m",le="1.0"} 500
llmserve_waiting_seconds_count{engine="a",model="m"} 1000
process_cpu_seconds_total 10
process_open_fds 10
process_max_fds 1000
"""


def findings(*lines: str, seconds: float = 100.0) -> list[Finding]:
    """The findings in a healthy server's reading, in which these samples have replaced those of the same labels."""
    names = {line.rpartition(" ")[0] for line in lines}
    kept = [line for line in HEALTHY.split("\n") if line.rpartition(" ")[0] not in names]
    return doctor_running.findings(Scrape("\n".join([*kept, *lines, ""])), seconds)


def test_a_healthy_server_has_no_finding() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("line", "level", "code"),
    [
        ('llmserve_engine_ready{engine="a"} 0', "wrong", "engine_down"),
        ('llmserve_engine_circuit_open{engine="a"} 1', "wrong", "circuit_open"),
        ('llmserve_engine_requests_total{engine="a",model="m",outcome="fault"} 20', "wrong", "engine_fails"),
        ('llmserve_engine_requests_total{engine="a",model="m",outcome="lost"} 20', "wrong", "engine_fails"),
        ('llmserve_engine_slots_known{engine="a"} 0', "note", "slots_growing"),
        ('llmserve_engine_load_known{engine="a"} 0', "note", "engine_without_metrics"),
        ('llmserve_engine_pace_ratio{engine="a",model=""} 2.1', "wrong", "profile_off"),
        ('llmserve_engine_pace_ratio{engine="a",model=""} 0.5', "wrong", "profile_off"),
        ("llmserve_prediction_trusted 0", "slow", "forecasts_not_trusted"),
        ("llmserve_prediction_rank_correlation 0.1", "note", "forecasts_weak"),
        ('llmserve_prediction_fallbacks_total{reason="slow"} 100', "slow", "predictor_falls_back"),
        (
            'llmserve_waiting_seconds_bucket{engine="a",model="m",le="0.01"} 990',
            "note",
            "order_cannot_help",
        ),
        ('llmserve_rejections_total{reason="queue_full"} 30', "wrong", "refused_queue_full"),
        ('llmserve_rejections_total{reason="tokens_per_minute"} 300', "note", "refused_tokens_per_minute"),
        ('llmserve_connections_cut_total{reason="stalled"} 3', "note", "cut_stalled"),
        ('llmserve_engine_kept_programs{engine="a"} 0', "note", "memory_not_told"),
        ('llmserve_engine_oversized_programs_total{engine="a"} 3', "slow", "program_above_memory"),
        ('llmserve_program_returns_total{kept="late"} 80', "note", "programs_return_late"),
        ("llmserve_state_failures_total 1", "wrong", "state_not_saved"),
        ("process_cpu_seconds_total 90", "slow", "front_end_busy"),
        ("llmserve_relays 2\nprocess_cpu_seconds_total 90", "slow", "scheduler_busy"),
        ("llmserve_relays 2\nllmserve_relay_cpu_seconds_total 180", "slow", "relays_busy"),
        ("process_open_fds 900", "wrong", "files_run_out"),
    ],
)
def test_each_reading_has_its_finding(line: str, level: str, code: str) -> None:
    (finding,) = findings(line)
    assert (finding.level, finding.code) == (level, code)
    assert finding.what.endswith(".")
    assert finding.remedy.endswith(".")


PROMPTS = 'llmserve_prompt_tokens_total{engine="a",model="m",cached="%s"} %d'
EXPECTED = 'llmserve_forecast_cached_tokens_total{engine="a",model="m"} %d'


def test_long_prompts_of_an_engine_that_tells_no_hits_have_a_note() -> None:
    (found,) = findings(PROMPTS % ("unknown", 2_000_000))
    assert (found.level, found.code) == ("note", "cache_not_told")
    assert findings(PROMPTS % ("unknown", 200_000)) == [], "prompts of 200 tokens are soon computed"


def test_expected_hits_that_do_not_come_are_slow() -> None:
    told = (PROMPTS % ("yes", 100_000), PROMPTS % ("no", 900_000))
    (found,) = findings(*told, EXPECTED % 600_000)
    assert (found.level, found.code) == ("slow", "prompts_computed_again")
    assert findings(*told, EXPECTED % 150_000) == [], "what is expected comes, more or less"


def test_requests_with_tools_that_never_go_on_lack_an_id() -> None:
    first, more = (
        'llmserve_program_requests_total{source="first"} 500',
        'llmserve_program_requests_total{source="answer"}',
    )
    computed, cached = PROMPTS % ("no", 500_000), PROMPTS % ("yes", 900_000)
    (found,) = findings(first, computed)
    assert (found.level, found.code) == ("note", "programs_not_seen")
    assert findings(first, f"{more} 900", computed) == []
    assert findings(first, computed, cached) == [], "their prompts are found in the cache"


def test_programs_that_return_in_time_or_fit_have_no_finding() -> None:
    assert (
        findings(
            'llmserve_engine_kept_programs{engine="a"} 7',
            'llmserve_engine_memory_tokens{engine="a"} 100000',
            'llmserve_engine_oversized_programs_total{engine="a"} 0',
            'llmserve_program_returns_total{kept="late"} 80',
            'llmserve_program_returns_total{kept="in_time"} 800',
        )
        == []
    )


def test_requests_that_wait_first_come_first_served_could_be_ordered() -> None:
    (finding,) = findings('llmserve_order{settings="fffs"} 1', 'llmserve_order{settings="boost"} 0')
    assert (finding.level, finding.code) == ("slow", "order_ignores_lengths")
    assert "50%" in finding.what


def test_deadlines_missed_are_a_share_of_all() -> None:
    met, missed = (
        f'llmserve_deadlines_total{{model="m",stream="",outcome="{outcome}"}}' for outcome in ("met", "missed")
    )
    assert findings(f"{met} 1000", f"{missed} 20") == []
    (finding,) = findings(f"{met} 900", f"{missed} 100")
    assert finding.code == "deadlines_missed"


def test_every_refusal_that_the_scheduler_makes_is_explained() -> None:
    from typing import get_args

    from llmserve.scheduling.messages import FailReason

    assert set(get_args(FailReason)) - set(doctor_running.REFUSALS) == {"draining"}


def test_what_is_now_is_the_growth_between_two_readings() -> None:
    later = Scrape('a_total{k="1"} 12\na_total{k="2"} 3\nb 4\n')
    later.since(Scrape('a_total{k="1"} 10\nb 3\n'))
    assert later.by("a_total", "k") == {"1": 2.0, "2": 3.0}
    assert later.sum("b") == 4.0


# ---- a running server ----


OF_THE_TESTS = "front_end_busy"
"""The server runs in the process of the tests, which may have kept a core busy ever since its start."""


async def codes(url: str, *words: str) -> tuple[int, dict[str, str]]:
    """Exit status, and the level of each finding by its code."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llmserve", "doctor", "--url", url, "--json", *words), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    found = {row["code"]: row["level"] for row in json.loads(output)["findings"]}
    found.pop(OF_THE_TESTS, None)
    return process.returncode, found


async def test_a_running_server_is_looked_at_from_outside(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        async with LyingEngine() as silent:
            front = await start_front(engine, silent.url, slots=None)
            status, found = await codes(front.url)
            assert status == 0
            assert found == {"slots_growing": "note"}
        await until(lambda: not all(front.cluster.engines_ready.values()))
        status, found = await codes(front.url, "--for-s", "0.1")
    assert status == 1
    assert found["engine_down"] == "wrong"


async def test_a_server_with_keys_is_asked_with_the_admin_key(start_front: StartFront, tmp_path: Path) -> None:
    for name in ("keys", "admin"):
        (tmp_path / name).write_text(f"me: sk-{name}\n")
    settings = ServerConfig(port=0, api_key_file=str(tmp_path / "keys"), admin_key_file=str(tmp_path / "admin"))
    async with FakeEngine() as engine:
        front = await start_front(engine, server=settings)
        with pytest.raises(ConfigError, match="--key-file"):
            await asyncio.to_thread(doctor.of_server, front.url, None, 0.0)
        found = await asyncio.to_thread(doctor.of_server, front.url, tmp_path / "admin", 0.0)
    (refused,) = [finding for finding in found if finding.code != OF_THE_TESTS]
    assert (refused.level, refused.code) == ("note", "refused_invalid_api_key")


def test_nobody_at_the_address_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    with pytest.raises(NoAnswer):
        doctor.scraped("http://127.0.0.1:9", None)


# ---- a configuration ----


def examined(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    file = tmp_path / "llmserve.toml"
    file.write_text(text)
    status = main(["doctor", "--config", str(file)])
    return status, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[server]\nprot = 1\n[engines]\nengine = ["http://127.0.0.1:9"]', "prot"),
        ('[engines]\nengine = ["ftp://127.0.0.1"]', "is not a URL"),
        ('[engines]\nengine = ["http://127.0.0.1:9"]', "does not answer"),
        ('[server]\napi_key_file = "/no/such"\n[engines]\nengine = ["http://127.0.0.1:9"]', "/no/such"),
        ('[server]\nhost = "0.0.0.0"\n[engines]\nengine = ["http://127.0.0.1:9"]', "anonymous"),
    ],
)
def test_what_does_not_start_is_wrong(text: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = examined(tmp_path, text, capsys)
    assert status == 1
    assert said.startswith("wrong ")
    assert what in said


async def test_the_engines_of_a_configuration_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        FakeEngine() as good,
        LyingEngine() as silent,
        LyingEngine(probes={"/v1/models": http(b'{"data": []}')}) as bare,
    ):
        urls = json.dumps([good.url, silent.url, bare.url])
        bare_name = bare.url.removeprefix("http://")
        text = f"""
            [engines]
            engine = {urls}
            [scheduling]
            order = "shortest"
            queue_requests_max = 2
            [prediction]
            memory_keys = 0
            [limits]
            concurrent_max = 3
            slo_ms = ["model:other=100"]
        """
        status, said = await asyncio.to_thread(examined, tmp_path, text, capsys)
    assert status == 1
    for part in (
        f"Engine {bare_name} lists no model.",
        "No engine serves the model other of --slo-ms",
        "The order shortest goes by lengths, but nothing predicts them.",
        "--queue-requests-max 2 is less than",
        "--concurrent-max 3 is less than",
    ):
        assert part in said, part


GOOD = {
    "server": 'state = "{folder}/state"',
    "engines": 'engine = ["{engine}"]\nslots = 8',
    "scheduling": "",
    "dispatch": "",
    "limits": "body_bytes_max = 5_000_000\nprompt_chars_max = 5_000_000",
    "live": "",
}
DEADLINES = GOOD["limits"] + '\nslo_ms = ["1000"]'


@pytest.mark.parametrize(
    ("sections", "level", "code"),
    [
        ({"engines": GOOD["engines"], "server": ""}, "note", "nothing_kept"),
        ({"server": GOOD["server"] + '\napi_key_file = "{folder}/keys"'}, "note", "metrics_need_a_key"),
        ({"limits": "body_bytes_max = 5_000_000\nprompt_chars_max = 10_000"}, "note", "limit_below_context"),
        ({"limits": "body_bytes_max = 10_000\nprompt_chars_max = 5_000_000"}, "note", "limit_below_context"),
        ({"live": "keep_alive_s = 0"}, "note", "no_keep_alive"),
        ({"scheduling": 'order = "edf"'}, "note", "no_deadlines"),
        ({"scheduling": 'order = "clockwork"', "limits": DEADLINES}, "slow", "no_profile"),
        ({"dispatch": 'profile = ["{folder}/unsteady.json"]'}, "slow", "profile_misfit"),
    ],
)
async def test_each_setting_has_its_finding(
    sections: dict[str, str], level: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("me: sk-me\n")
    (tmp_path / "keys").chmod(0o600)
    unsteady = Curve.fit([1, 2, 4, 8], [0.01, 0.1, 0.01, 0.01])  # one size ran on a busy machine
    Profile.timed("unsteady", unsteady, slots_max=8, source="a test").save(tmp_path / "unsteady.json")
    async with FakeEngine() as engine:
        text = "\n".join([f"[{name}]\n{lines}" for name, lines in {**GOOD, **sections}.items()])
        text = text.replace("{folder}", str(tmp_path)).replace("{engine}", engine.url)
        (tmp_path / "llmserve.toml").write_text(text)
        status = await asyncio.to_thread(main, ["doctor", "--config", str(tmp_path / "llmserve.toml"), "--json"])
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["level"], finding["code"], status) == (level, code, 0)
    assert finding["what"].endswith(".")
    assert finding["remedy"].endswith(".")


async def test_an_engine_that_refuses_the_key_needs_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine(api_key="sk-engine") as engine:
        text = f'[engines]\nengine = ["{engine.url}"]\nslots = 8\n'
        status, said = await asyncio.to_thread(examined, tmp_path, text, capsys)
    assert status == 1
    assert "--engine-api-key" in said


def test_before_any_engine_is_up_that_is_wrong() -> None:
    reading = "\n".join([line for line in HEALTHY.split("\n") if "engine_ready" not in line])
    (finding,) = doctor_running.findings(Scrape(reading), 100.0)
    assert (finding.level, finding.code) == ("wrong", "no_engine")


async def test_a_good_configuration_has_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine() as engine:
        text = f'[server]\nstate = "{tmp_path}/state"\n[engines]\nengine = ["{engine.url}"]\nslots = 8\n'
        text += "[limits]\nbody_bytes_max = 5_000_000\nprompt_chars_max = 5_000_000\n"
        assert await asyncio.to_thread(examined, tmp_path, text, capsys) == (0, "Nothing is wrong.")
    assert not (tmp_path / "state").exists(), "nothing is started"
