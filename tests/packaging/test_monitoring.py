"""deploy/monitoring: the dashboard is that of the metrics' definitions, the rules are Prometheus', the commands run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from front import StartFront
from make import dashboard
from make.reference_pages import all_metrics
from promtool import PATH as PROMTOOL
from promtool import needs_promtool, promtool
from test_deploy import image_words, parsed

from llmserve import __version__
from llmserve.engines.timed.server import FakeEngine

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
KINDS = {name: kind for name, kind, _, _ in all_metrics()}


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return services


def series_in(expression: str) -> Iterator[str]:
    """The metrics that an expression names, without the suffix of a histogram's series."""
    for name in re.findall(r"\b(?:llmserve|process)_\w+", re.sub(r'"[^"]*"', "", expression)):
        yield re.sub(r"_(bucket|sum|count)$", "", name) if name not in KINDS else name


def expressions() -> Iterator[str]:
    for panel in json.loads(dashboard.FILE.read_text())["panels"]:
        yield from [target["expr"] for target in panel.get("targets", [])]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from [rule["expr"] for rule in group["rules"]]


def test_the_dashboard_is_up_to_date() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "run scripts/lab/make/dashboard.py"


def test_every_metric_of_the_dashboard_and_the_alerts_exists() -> None:
    named = [name for expression in expressions() for name in series_in(expression)]
    assert len(named) > 40
    assert sorted(set(named) - set(KINDS)) == []


def test_a_query_of_an_unknown_metric_a_wrong_kind_or_a_missing_label_is_an_error() -> None:
    with pytest.raises(KeyError):
        dashboard.rate("llmserve_no_such_total")
    with pytest.raises(ValueError, match="is a counter"):
        dashboard.value("llmserve_requests_total")
    with pytest.raises(ValueError, match="by"):
        dashboard.rate("llmserve_requests_total", "engine")


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.FILE.read_text())["panels"]:
        x, y, width, height = (panel["gridPos"][side] for side in "xywh")
        own = {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
        assert not cells & own
        assert x + width <= 24
        cells |= own


@needs_promtool
def test_prometheus_accepts_the_rules_its_configuration_and_every_query(tmp_path: Path) -> None:
    assert "11 rules found" in promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(FOLDER / "prometheus.yaml"))
    queries = [expression.replace("$__rate_interval", "1m").replace("$job", ".*") for expression in expressions()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(tmp_path / "queries.yaml"))


@needs_promtool
def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    failing = [
        {"series": 'llmserve_engine_requests_total{engine="a",outcome="fault"}', "values": "0+6x60"},
        {"series": 'llmserve_engine_requests_total{engine="a",outcome="completed"}', "values": "0+60x60"},
        {"series": 'llmserve_engine_requests_total{engine="b",outcome="fault"}', "values": "0+1x60"},
        {"series": 'llmserve_engine_requests_total{engine="b",outcome="completed"}', "values": "0+60x60"},
        {"series": 'llmserve_engine_ready{engine="a"}', "values": "1x60"},
        {"series": 'llmserve_engine_ready{engine="b"}', "values": "0x60"},
    ]
    fired = {"LlmserveEngineFails": "a", "LlmserveEngineDown": "b", "LlmserveNoEngine": None}
    rules = {group["rules"][0]["alert"]: group for group in yaml.safe_load(ALERTS.read_text())["groups"]}
    assert rules
    by_name = {rule["alert"]: rule for group in rules.values() for rule in group["rules"]}
    expected = [
        {
            "eval_time": "30m",
            "alertname": name,
            "exp_alerts": [
                {
                    "exp_labels": {"engine": engine, **by_name[name]["labels"]},
                    "exp_annotations": {
                        key: text.replace("{{ $labels.engine }}", engine)
                        for key, text in by_name[name]["annotations"].items()
                    },
                }
            ]
            if engine
            else [],
        }
        for name, engine in fired.items()
    ]
    case = {"interval": "1m", "input_series": failing, "alert_rule_test": expected}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


# ---- compose ----


def test_the_services_are_a_timed_engine_the_front_end_prometheus_and_grafana() -> None:
    services = compose()
    assert set(services) == {"engine", "llmserve", "prometheus", "grafana"}
    assert services["llmserve"]["image"] == services["engine"]["image"] == f"llmserve:{__version__}"
    config = parsed([*image_words(), *services["llmserve"]["command"]])
    words = services["engine"]["command"]
    assert config.engines.engine == (f"http://engine:{words[words.index('--port') + 1]}",)
    (scrape,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == [f"llmserve:{config.server.metrics_port}"]
    build = services["llmserve"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_every_mounted_file_exists_and_grafana_finds_its_dashboard() -> None:
    mounted = {}
    for service in compose().values():
        for volume in service.get("volumes", []):
            source, target, mode = volume.split(":")
            assert (FOLDER / source).is_file(), source
            assert mode == "ro"
            mounted[target] = FOLDER / source
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "provider.yaml").read_text())["providers"]
    assert mounted[f"{provider['options']['path']}/llmserve.json"] == dashboard.FILE
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["uid"] == dashboard.DATA["uid"]


def test_the_engines_command_runs(tmp_path: Path) -> None:
    service = compose()["engine"]
    _, *module = service["entrypoint"]
    words = [word if word != "8001" else "0" for word in service["command"]]
    engine = subprocess.Popen([sys.executable, *module, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline().startswith("llmserve fake engine: timed is ready at ")
    finally:
        engine.terminate()
        assert engine.wait(10) == 0
        engine.stdout.close()  # type: ignore[union-attr]


def test_the_command_in_the_comment_names_the_file() -> None:
    (command,) = re.findall(r"^#   (docker compose .*)$", (FOLDER / "compose.yaml").read_text(), re.M)
    words = shlex.split(command)
    assert (FOLDER.parents[1] / words[words.index("-f") + 1]).samefile(FOLDER / "compose.yaml")


# ---- Prometheus itself ----


@pytest.mark.slow
@needs_promtool
async def test_prometheus_scrapes_a_server_and_every_query_of_the_dashboard_has_an_answer(
    start_front: StartFront, tmp_path: Path
) -> None:
    """What compose.yaml runs, without its containers."""
    program = Path(str(PROMTOOL)).with_name("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with FakeEngine(step_s=0.001) as engine, AsyncExitStack() as stack:
        front = await start_front(engine)
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"][0]["targets"] = [front.url.removeprefix("http://")]
        config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(ALERTS)]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        flags = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        process = await asyncio.create_subprocess_exec(
            program, *flags, f"--web.listen-address={address}", stderr=asyncio.subprocess.DEVNULL
        )
        stack.push_async_callback(process.wait)
        stack.callback(process.terminate)

        async def asked(path: str, **query: str) -> Any:
            async with front.session.get(f"http://{address}/api/v1/{path}", params=query) as response:
                return (await response.json())["data"]

        async def served() -> list[Any]:
            async with front.post(stream=True, max_tokens=3) as response:
                await response.read()
            with contextlib.suppress(aiohttp.ClientError):
                return list((await asked("query", query="increase(llmserve_requests_total[5s]) > 0"))["result"])
            return []

        async with asyncio.timeout(60):
            while not await served():  # noqa: ASYNC110 (Prometheus tells nobody)
                await asyncio.sleep(0.1)
        queries = [query.replace("$__rate_interval", "5s").replace("$job", "llmserve") for query in expressions()]
        answers = {query: (await asked("query", query=query))["result"] for query in queries}
        rules = [rule for group in (await asked("rules"))["groups"] for rule in group["rules"]]
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
    answered = [query for query, result in answers.items() if result]
    first_row = [query for panel in dashboard.rows()["What users notice"] for query in panel.queries]
    assert len(answered) > 25
    assert {query.metric for query in first_row} - {name for query in answered for name in series_in(query)} == {
        "llmserve_rejections_total"  # nothing was refused
    }
