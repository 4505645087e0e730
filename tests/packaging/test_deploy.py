"""The files of deploy/: they start command lines that the server accepts, and a stop leaves time to drain."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from configured import load_config

from llmserve import __version__
from llmserve.__main__ import parser
from llmserve.discovery import kubernetes
from llmserve.observe.table import TABLE
from llmserve.settings.load import sections
from llmserve.settings.tree import Config, EngineConfig
from llmserve.tenants.key_file import read_key_file

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "llmserve"
STATE = (ROOT / "llmserve" / "web" / "state.py").read_text()


def parsed(words: list[str]) -> Config:
    """The configuration of `llmserve serve` with these arguments. Raises on an unknown argument."""
    args, unknown = parser("serve").parse_known_args(["serve", *words])
    assert unknown == []
    fields = {name for struct in sections(Config).values() for name in struct.__struct_fields__}
    flags = {name: value for name, value in vars(args).items() if name in fields}
    return load_config(flags, {}, None)


def instructions(name: str) -> list[str]:
    """The arguments of each Dockerfile instruction of this name; continued lines are joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def image_words() -> list[str]:
    """The image's arguments of `llmserve serve`, before a user's flags."""
    (entry,) = instructions("ENTRYPOINT")
    program, command, *words = json.loads(entry)
    assert (program, command) == ("llmserve", "serve")
    return words


def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return parsed


def rendered(name: str) -> Any:
    """A template as YAML, with both branches of each condition and `x` for each value."""
    text = (CHART / "templates" / name).read_text()
    lines = [line for line in text.splitlines() if not re.fullmatch(r"\s*\{\{-.*\}\}", line)]
    return yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", "\n".join(lines)))


def unit() -> dict[str, str]:
    lines = (DEPLOY / "llmserve.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


# ---- Docker -------------------------------------------------------------------------------------------------------


def test_the_image_refuses_to_serve_without_keys_or_consent():
    served = parsed(image_words()).server
    assert (served.host, served.port, served.anonymous, served.api_key_file) == ("0.0.0.0", 8000, False, None)


def test_the_files_that_the_image_copies_exist_and_are_not_ignored():
    passed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    copied = {source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]}
    assert copied == passed
    assert all((ROOT / source).exists() for source in copied)


def test_images_may_be_named_by_their_digests():
    """A digest cannot be looked up without a registry, so the tags are defaults that a build argument replaces."""
    assert instructions("FROM") == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    default = instructions("ARG")[0]
    services = compose()["services"]
    assert services["llmserve"]["build"]["args"] == {"PYTHON_IMAGE": f"${{{default.replace('=', ':-')}}}"}
    assert services["vllm"]["image"].startswith("${VLLM_IMAGE:-")


def test_the_image_installs_only_packages_whose_hashes_it_compares():
    commands = [part for line in instructions("RUN") for part in line.split(" && ") if "pip install" in part]
    assert ["--no-deps" in command for command in commands] == [True, True]
    assert "--require-hashes --no-deps -r requirements/${LOCK}.lock" in commands[0]
    assert instructions("ARG")[1:] == ["LOCK=image"]


def test_the_command_for_the_file_of_keys_makes_a_private_file(tmp_path: Path):
    (command,) = re.findall(r"^#   (\(umask .*deploy/keys\))$", (DEPLOY / "compose.yaml").read_text(), re.MULTILINE)
    (tmp_path / "deploy").mkdir()
    subprocess.run(
        ["sh", "-c", command.replace("openssl rand -hex 24", "echo k")], cwd=tmp_path, check=True, timeout=10
    )
    assert (tmp_path / "deploy" / "keys").read_text() == "me: k\n"
    assert (tmp_path / "deploy" / "keys").stat().st_mode & 0o777 == 0o600


def test_the_image_runs_as_an_unprivileged_user_and_is_stopped_with_a_signal_that_drains():
    assert instructions("USER") == ["10001:10001"]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_images_health_check_is_a_program_that_python_reads():
    (check,) = instructions("HEALTHCHECK")
    program = json.loads(check[check.index("[") :])[2]
    compile(program, "the health check", "exec")
    assert "/health" in program
    assert '"/health"' in STATE


def test_compose_starts_the_front_end_before_the_engine():
    services = compose()["services"]
    front, engine = services["llmserve"], services["vllm"]
    configured = parsed([*image_words(), *front["command"]])
    port = engine["command"][engine["command"].index("--port") + 1]
    assert configured.engines.engine == (f"http://vllm:{port}",)
    assert configured.server.api_key_file == f"/run/secrets/{front['secrets'][0]}"
    assert configured.server.state in [volume.partition(":")[2] for volume in front["volumes"]]
    assert float(front["stop_grace_period"].removesuffix("s")) > configured.server.drain_s
    build = front["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert front["image"] == f"llmserve:{__version__}"


# ---- systemd ------------------------------------------------------------------------------------------------------


def test_the_unit_starts_a_command_that_the_server_accepts():
    program, command, *words = shlex.split(unit()["ExecStart"])
    assert (Path(program).name, command) == ("llmserve", "serve")
    assert parsed(words).server.api_key_file == "/etc/llmserve/keys.toml"
    assert words[words.index("--config") + 1] == "/etc/llmserve/llmserve.toml"
    assert parsed(words).server.state == f"%S/{unit()['StateDirectory']}", "the unit's user may write here"


def test_the_units_header_makes_the_keys_that_the_server_reads_again_on_reload(tmp_path: Path):
    """systemd's credentials are copies made at the start: a reload would not see a new key."""
    text = (DEPLOY / "llmserve.service").read_text()
    commands = [line.split("    #")[0] for line in re.findall(r"^#   (.*keys\.toml.*)$", text, re.MULTILINE)]
    program = f"{shlex.quote(sys.executable)} -m llmserve"
    for command in commands:
        here = command.replace("/etc/llmserve", str(tmp_path)).replace("/opt/llmserve/bin/llmserve", program)
        subprocess.run(re.sub(r"^chgrp llmserve \S+ && ", "", here), shell=True, check=True, timeout=60)
    assert list(read_key_file(tmp_path / "keys.toml").keys) == ["me"]
    assert (tmp_path / "keys.toml").stat().st_mode & 0o777 == 0o640
    assert "LoadCredential" not in unit()
    assert unit()["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_units_settings_are_settings_and_its_stop_leaves_time_to_drain():
    settings = load_config({}, {}, str(DEPLOY / "llmserve.toml"))
    assert float(unit()["TimeoutStopSec"]) > settings.server.drain_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_accepts_the_unit(tmp_path: Path):
    text = (DEPLOY / "llmserve.service").read_text()
    (tmp_path / "llmserve.service").write_text(text.replace("/opt/llmserve/bin/llmserve", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "llmserve.service")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# ---- Helm ---------------------------------------------------------------------------------------------------------


def test_the_chart_has_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_every_value_that_a_template_names_has_a_default():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in (CHART / "templates").iterdir():
        text = path.read_text()
        assert text.count("{{") == text.count("}}")
        for name in re.findall(r"\.Values\.([\w.]+)", text):
            value = values
            for part in name.split("."):
                assert part in value, f"{path.name}: {name}"
                value = value[part]


def test_every_included_template_is_defined():
    defined = set(re.findall(r'define "([\w.]+)"', (CHART / "templates" / "_names.tpl").read_text()))
    for path in (CHART / "templates").iterdir():
        assert set(re.findall(r'include "([\w.]+)"', path.read_text())) <= defined


def test_the_charts_flags_are_flags_of_the_server():
    container = rendered("deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    words: list[str] = container["args"]
    words[words.index("--drain-s") + 1] = str(values["drainSeconds"])
    words[words.index("--metrics-port") + 1] = str(values["metricsPort"])
    words[words.index("--buffers-bytes-max") + 1] = str(values["buffersBytesMax"])
    assert words.pop() == "x", "one of .Values.args"
    configured = parsed([*image_words(), *words])
    assert configured.server.drain_s == values["drainSeconds"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert configured.server.api_key_file is not None
    assert str(Path(configured.server.api_key_file).parent) in mounts
    assert configured.server.state in mounts
    variables = {entry["name"].removeprefix("LLMSERVE_").lower() for entry in container["env"]}
    assert variables <= set(EngineConfig.__struct_fields__)


def test_the_charts_memory_holds_what_the_server_may_buffer():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    limit = values["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    limit_bytes = int(limit.removesuffix("Gi")) << 30
    assert 3 * values["buffersBytesMax"] + (200 << 20) <= limit_bytes


def test_the_charts_pod_is_probed_at_existing_paths_and_drains():
    pod = rendered("deployment.yaml")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["enableServiceLinks"] is False, "the Service's variables would count as settings"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert '"/ready"' in STATE
    assert container["ports"][0]["containerPort"] == parsed(image_words()).server.port
    text = (CHART / "templates" / "deployment.yaml").read_text()
    assert "terminationGracePeriodSeconds: {{ add .Values.drainSeconds .Values.preStopSeconds 10 }}" in text


def test_a_release_that_watches_for_engines_may_read_what_it_watches():
    role, account = rendered("role.yaml"), rendered("account.yaml")
    binding = rendered("rolebinding.yaml")
    assert (account["kind"], binding["roleRef"]["kind"], binding["subjects"][0]["kind"]) == (
        "ServiceAccount",
        role["kind"],
        "ServiceAccount",
    )
    allowed = {
        (group, kind): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
    }
    for path in (kubernetes.SLICES, kubernetes.PODS):
        assert allowed[_group(path), path.rpartition("/")[2]] >= {"list", "watch"}
    for path in kubernetes.POOLS:
        assert allowed[_group(path), "inferencepools"] >= {"get"}
    text = (CHART / "templates" / "_names.tpl").read_text()
    (pattern,) = re.findall(r'regexMatch "(.*?)"', text)
    watched = {entry: bool(re.search(pattern, entry)) for entry in ("k8s:a/b", "k8s+https:a", "inferencepool:a/b")}
    assert all(watched.values())
    assert not any(re.search(pattern, entry) for entry in ("http://k8s:8000", "dns:vllm:8000", "gpu=http://a"))


def _group(path: str) -> str:
    """The group of a path of Kubernetes' API; "": the core."""
    return path.split("/")[2] if path.startswith("/apis/") else ""


def test_the_chart_scales_by_a_metric_of_the_server_and_disrupts_one_pod_at_once():
    scaled = rendered("scaling.yaml")["spec"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["scaling"]
    (trigger,) = scaled["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1"), "one engine for each"
    (metric,) = re.findall(r"llmserve_\w+", values["query"])
    assert metric in {entry.full_name for entry in TABLE}
    assert rendered("disruption.yaml")["spec"]["maxUnavailable"] == 1


def test_two_releases_are_doors_before_a_group():
    """The commands in values.yaml: what each sets is a value, and the flags are those of a gateway and a group."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    commands = re.findall(r"helm install (?:.*\\\n)*.*", text)[1:3]
    assert len(commands) == 2
    for command in commands:
        assert {name.strip("'") for name in re.findall(r"--set '?(\w+)=", command)} <= values.keys()
    group = parsed(["--engine", "http://vllm:8000", "--gateway-key-file", "/etc/llmserve/gateway/key"])
    door = parsed(["--engine", "http://group:8000", "--engines-are-groups", "--api-key-file", "keys"])
    group.engines.check()
    door.engines.check()


def test_the_charts_service_leads_to_the_pod():
    service, deployment = rendered("service.yaml")["spec"], rendered("deployment.yaml")["spec"]
    ports = {port["name"] for port in deployment["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports
