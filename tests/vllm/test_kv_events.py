"""`llmserve serve --kv-events` before a real vLLM that tells what its prefix cache stores and drops."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from server_process import Server
from vllm_on_cpu import running_vllm

from llmserve.engines.process import free_ports

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 32  # the smallest of vLLM on a CPU
CACHE_BLOCKS = 48  # 1,536 tokens: one prompt of a whole context, and a half
WITHIN_S = 60.0


class Engine(NamedTuple):
    """A vLLM server, and the sockets of its KV events."""

    url: str
    events: str
    replay: str


@pytest.fixture(scope="module")
def engine(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    ports = free_ports(2)
    events, replay = [f"tcp://127.0.0.1:{port}" for port in ports]
    bound = f"tcp://*:{ports[0]}"  # an address without a star is one that vLLM connects to
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": bound, "replay_endpoint": replay}
    args = ["--served-model-name", "llmserve-demo", "--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS)]
    args += ["--enable-prefix-caching", "--num-gpu-blocks-override", str(CACHE_BLOCKS), "--kv-events-config"]
    log = tmp_path_factory.mktemp("vllm-kv-events") / "log"
    with running_vllm(vllm_python, log, *args, json.dumps(told), "--enable-prompt-tokens-details") as url:
        yield Engine(url, events, replay)


def ask_directly(engine: Engine, content: str) -> None:
    """As another client of the engine does, which llmserve does not see."""
    body = {"model": "llmserve-demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{engine.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as response:
        assert response.status == 200


def total(server: Server, name: str, **labels: str) -> float:
    """The sum of a counter over all of its labels but these."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WITHIN_S) as response:
        rows = re.findall(rf"^{name}_total{{(.*)}} (\S+)$", response.read().decode(), re.M)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum([float(value) for said, value in rows if all(label in said for label in wanted)])


def counted(server: Server, event: str, least: float) -> float:
    """Wait until so many events are counted. Returns how many are."""
    until_s = time.monotonic() + WITHIN_S
    while (number := total(server, "llmserve_engine_cache_events", event=event)) < least:
        assert time.monotonic() < until_s, f"{number} of {least} {event}"
        time.sleep(0.05)
    return number


class Hits(NamedTuple):
    expected: float
    told: float


def hits_of(server: Server, content: str) -> Hits:
    """Ask, and return the tokens of the prompt that were expected in the cache, and those that vLLM tells."""
    before = total(server, "llmserve_forecast_cached_tokens")
    _, headers = server.chat(content, max_tokens=1)
    return Hits(total(server, "llmserve_forecast_cached_tokens") - before, float(headers["x-llmserve-cached-tokens"]))


def prompt(number: int) -> str:
    """Some 700 tokens, unlike the other prompts from the beginning on."""
    return f"{number} " + "Count from three to nine, and then from nine to three. " * 40


def test_what_vllm_drops_for_another_client_is_expected_no_more(engine: Engine) -> None:
    for number in range(3):
        ask_directly(engine, prompt(number))  # messages that llmserve has missed when it begins to listen
    flags: list[Any] = ["--engine", engine.url, "--kv-events", f"{engine.events},{engine.replay}"]
    server = Server(*flags, "--predictor", "none")
    try:
        server.chat(prompt(9), max_tokens=1)
        counted(server, "messages", 4.0)  # of four prompts
        assert total(server, "llmserve_engine_cache_events", event="missed") == 0, "the others were sent again"
        server.chat(prompt(10), max_tokens=1)
        counted(server, "tied", 1.0)

        again = hits_of(server, prompt(10))
        assert again.told > 400
        assert again.expected == pytest.approx(again.told, abs=200), "a block of a prompt, and one of vLLM's"

        messages = total(server, "llmserve_engine_cache_events", event="messages")
        for number in range(20, 24):
            ask_directly(engine, prompt(number))
        counted(server, "messages", messages + 4)
        counted(server, "dropped", 1.0)
        assert hits_of(server, prompt(10)) == Hits(0.0, 0.0)
    finally:
        server.close()
