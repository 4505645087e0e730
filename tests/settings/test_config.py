"""Flags override the environment, the environment the file, the file the defaults; errors suggest the nearest name."""

import argparse
import contextlib
import io
import re
from pathlib import Path

import msgspec
import pytest
from configured import load_config

from llmserve import __main__ as command
from llmserve.__main__ import main
from llmserve.errors import ConfigError
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.load import add_flags, convert, flag_of, sections, service_variables
from llmserve.settings.tree import COMMON, Config, EngineConfig


def test_without_settings_the_defaults_hold() -> None:
    assert load_config({}, {}, None) == Config()


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text('[scheduling]\nbatch_size = 2\nbins = 3\nrelease = "full"\n[server]\nport = 1234\n')
    config = load_config({"bins": "5"}, {"LLMSERVE_BINS": "4", "LLMSERVE_BATCH_SIZE": "16"}, str(file))
    assert (config.scheduling.bins, config.scheduling.batch_size) == (5, 16)
    assert (config.scheduling.release, config.server.port) == ("full", 1234)


def test_several_engines_come_from_repeated_flags_a_toml_list_or_commas(tmp_path: Path) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text('[engines]\nengine = ["http://a", "http://b"]\n')
    both = ("http://a", "http://b")
    assert load_config({"engine": list(both)}, {}, None).engines.engine == both
    assert load_config({}, {}, str(file)).engines.engine == both
    assert load_config({}, {"LLMSERVE_ENGINE": "http://a, http://b"}, None).engines.engine == both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scheduling]\nbatch_sise = 2\n", r"unknown key 'batch_sise' in \[scheduling\]; did you mean batch_size\?"),
        ("[schedulling]\nbins = 2\n", r"unknown table \[schedulling\]; did you mean scheduling\?"),
        ("bins = 2\n", r"unknown table \[bins\]"),
        ("[scheduling\n", "cannot read the configuration"),
        (
            "[engines]\nreplan_every_s = 60\n",
            "replan_every_s was removed: `llmserve up CLUSTER.toml` plans groups again",
        ),
        ('[scheduling]\nbins = "many"\n', r"bins \(.*llmserve.toml\): expected a whole number, at least 1, not 'many'"),
        ("[scheduling]\nbins = 0\n", r"bins \(.*llmserve.toml\): expected a whole number, at least 1, not 0"),
        ('[scheduling]\nrelease = "soon"\n', r"release .*not 'soon'"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_key_and_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config({}, {}, str(file))


def test_a_setting_that_was_removed_is_an_error_that_says_what_to_use_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="LLMSERVE_REPLAN_EVERY_S was removed: `llmserve up CLUSTER"):
        load_config({}, {"LLMSERVE_REPLAN_EVERY_S": "60"}, None)
    with pytest.raises(SystemExit):
        command.main(["serve", "--plan", "plan.json", "--replan-every-s", "60"])
    assert "--replan-every-s was removed: `llmserve up CLUSTER.toml` plans groups again" in capsys.readouterr().err


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config({}, {}, "/nowhere/llmserve.toml")


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown variable LLMSERVE_PRT; did you mean LLMSERVE_PORT"):
        load_config({}, {"LLMSERVE_PRT": "1", "PATH": "/bin"}, None)


def test_the_error_of_a_wrong_variable_names_the_variable() -> None:
    with pytest.raises(
        ConfigError, match=r"port \(the environment\): expected a whole number, at least 0, at most 65535, not '70000'"
    ):
        load_config({}, {"LLMSERVE_PORT": "70000"}, None)


def test_vllms_arguments_are_a_list_or_a_shell_string(tmp_path: Path) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text('[engines]\nengine_args = ["--max-model-len", "1024"]\n')
    assert load_config({}, {}, str(file)).engines.engine_args == ("--max-model-len", "1024")
    text = """--enforce-eager --override-generation-config '{"top_k": 1, "top_p": 0.9}'"""
    args = load_config({}, {"LLMSERVE_ENGINE_ARGS": text}, None).engines.engine_args
    assert args == ("--enforce-eager", "--override-generation-config", '{"top_k": 1, "top_p": 0.9}')
    with pytest.raises(ConfigError, match="engine_args: No closing quotation"):
        load_config({}, {"LLMSERVE_ENGINE_ARGS": "'--enforce-eager"}, None)


@pytest.mark.parametrize(
    ("engine", "embedded", "vllm", "urls"),
    [
        ((), True, False, ()),
        (("embedded",), True, False, ()),
        (("vllm",), False, True, ()),
        (("vllm", "http://a", "http://b"), False, True, ("http://a", "http://b")),
        (("http://a", "embedded"), True, False, ("http://a",)),
    ],
)
def test_an_engine_is_a_url_or_one_of_two_names(
    engine: tuple[str, ...], embedded: bool, vllm: bool, urls: tuple[str, ...]
) -> None:
    engines = EngineConfig(engine=engine, model="m")
    engines.check()
    assert (engines.has_embedded, engines.has_vllm, engines.urls) == (embedded, vllm, urls)


def test_a_url_may_name_a_worker_that_several_engines_share() -> None:
    engines = EngineConfig(engine=("gpu-0=http://a", "gpu-0=http://b/v1", "http://c/x=y", "gpu.1_b=http://d"))
    engines.check()
    assert engines.urls == ("http://a", "http://b/v1", "http://c/x=y", "http://d")
    assert [worker for worker, _ in engines.placed_urls] == ["gpu-0", "gpu-0", "", "gpu.1_b"]
    assert not engines.has_embedded


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (EngineConfig(engine=("gpu0=vllm",), model="m"), "only a URL can have a worker, not gpu0=vllm"),
        (EngineConfig(engine=("gpu0=embedded",)), "only a URL can have a worker, not gpu0=embedded"),
        (EngineConfig(engine=("gpu0=",)), "only a URL can have a worker, not gpu0=$"),
        (EngineConfig(engine=("embedded", "embedded=http://a")), "they cannot share a worker. Give --barrier"),
        (EngineConfig(engine=("vllm",)), "engine vllm needs --model"),
        (EngineConfig(engine=("vllm", "vllm"), model="m"), "is given twice"),
        (EngineConfig(replicas=2), "replicas: only for vLLM"),
        (EngineConfig(engine=("http://a",), engine_args=("--enforce-eager",)), "engine_args: only for vLLM"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(engines: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engines.check()


def test_profiles_and_predictors_may_be_given_by_model(tmp_path: Path) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text('[dispatch]\nprofile = ["a.json", "model:m=b.json"]\n[prediction]\npredictor = "none"\n')
    config = load_config({}, {}, str(file))
    assert config.dispatch.profile == ("a.json", "model:m=b.json")
    assert config.prediction.predictor == ("none",)
    flags = {"predictor": ["none", "model:m=folder"], "profile": ["h100-llama-3.1-8b"]}
    config = load_config(flags, {}, str(file))
    assert config.prediction.predictor == ("none", "model:m=folder")
    assert [profile.name for profile in config.dispatch.profiles().values()] == ["h100-llama-3.1-8b"]


def test_flags_are_the_unskipped_fields_of_a_section_and_show_their_values() -> None:
    parser = argparse.ArgumentParser(usage="")
    add_flags(parser, DispatchConfig, "dispatching", skip={"profile"}, energy_weight="none")
    help_ = " ".join(parser.format_help().split())
    assert "--profile" not in help_
    assert "--energy-weight X under --release table" in help_
    assert "(default none)" in help_
    assert "--latency-target-s X under --release table" in help_
    assert vars(parser.parse_args(["--latency-target-s", "3"])) == {"latency_target_s": "3"}


def help_of(*flags: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit, match="0"):
        main(["serve", *flags])
    return out.getvalue()


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE))


def test_the_help_shows_the_common_settings_and_help_all_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    common, every = help_of("--help"), help_of("--help-all")
    assert 2 * len(flags_in(common)) < len(flags_in(every))
    assert {flag_of(name) for name in COMMON} <= flags_in(common)
    names = {name for struct in sections(Config).values() for name in struct.__struct_fields__} - {"engine_args"}
    assert {flag_of(name) for name in names} <= flags_in(every)


def test_a_setting_hidden_from_the_help_is_still_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--patience", "3", "--show-config"]) == 0
    assert re.search(r"^patience = 3\.0 +# the command line$", capsys.readouterr().out, re.MULTILINE)


def test_the_shown_configuration_is_a_file_with_the_same_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_SLO_MS", "500,model:chat=60000")
    monkeypatch.setenv("LLMSERVE_ENGINE_API_KEY", "secret")
    assert main(["serve", "--engine", "http://127.0.0.1:1", "--edges", "10,20.5", "--show-config"]) == 0
    output = capsys.readouterr().out
    assert "secret" not in output
    for line in (
        r'engine = \["http://127.0.0.1:1"\] +# the command line',
        r"slo_ms = .* +# the environment",
        r'release = "greedy" +# default for engines whose slots refill',
        r"port = 8000 +# default",
        r"# model = +# default",
    ):
        assert re.search(f"^{line}$", output, re.MULTILINE), line
    monkeypatch.delenv("LLMSERVE_SLO_MS")
    monkeypatch.delenv("LLMSERVE_ENGINE_API_KEY")
    file = tmp_path / "shown.toml"
    file.write_text(output)
    assert main(["serve", "--config", str(file), "--show-config"]) == 0
    second_output = capsys.readouterr().out
    assert [line.rpartition("#")[0] for line in second_output.splitlines()] == [
        line.rpartition("#")[0] for line in output.splitlines()
    ]


def test_an_error_of_a_whole_section_keeps_its_message() -> None:
    class Pair(msgspec.Struct):
        low: int = 0
        high: int = 1

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low is above high")

    with pytest.raises(ConfigError, match="low is above high"):
        convert(Pair, {"low": "2"})


# ---- variables that are not ours ----

SERVICES = {  # as Kubernetes sets them in each pod, for the Services `llmserve`, `llmserve-metrics` and `llmserve-host`
    "LLMSERVE_SERVICE_HOST": "10.96.0.1",
    "LLMSERVE_SERVICE_PORT": "8000",
    "LLMSERVE_SERVICE_PORT_HTTP": "8000",
    "LLMSERVE_PORT": "tcp://10.96.0.1:8000",
    "LLMSERVE_PORT_8000_TCP": "tcp://10.96.0.1:8000",
    "LLMSERVE_PORT_8000_TCP_PROTO": "tcp",
    "LLMSERVE_PORT_8000_TCP_PORT": "8000",
    "LLMSERVE_PORT_8000_TCP_ADDR": "10.96.0.1",
    "LLMSERVE_METRICS_SERVICE_HOST": "fd00::1",
    "LLMSERVE_METRICS_PORT": "udp://[fd00::1]:53",
    "LLMSERVE_METRICS_PORT_53_UDP_ADDR": "fd00::1",
    "LLMSERVE_HOST_SERVICE_PORT_WEB_UI": "80",
    "LLMSERVE_HOST_PORT_80_SCTP": "sctp://10.0.0.1:80",
}


def test_variables_of_kubernetes_services_are_no_settings() -> None:
    ours = {"LLMSERVE_BATCH_SIZE": "4", "LLMSERVE_HOST": "::1", "LLMSERVE_METRICS_HOST": "::1"}
    assert load_config({}, {**SERVICES, **ours}, None) == load_config({}, ours, None)
    assert service_variables({**SERVICES, **ours, "PORT": "tcp://1.1.1.1:1"}) == sorted(SERVICES)


@pytest.mark.parametrize("variable", ["LLMSERVE_SERVICE", "LLMSERVE_METRICS_SERVICE_HOSTS", "LLMSERVE_PORT_8000"])
def test_a_variable_that_only_resembles_them_is_an_error(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {variable}"):
        load_config({}, {variable: "1"}, None)


def test_a_port_that_is_no_services_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match="port"):
        load_config({}, {"LLMSERVE_PORT": "http://10.96.0.1:8000"}, None)
