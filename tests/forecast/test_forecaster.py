"""The forecaster as a library: the forecasts of a server, without one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import BadRequest
from llmserve.forecast import (
    CallForecast,
    Forecaster,
    dynamo_fields,
    llm_d_bucket,
    llm_d_headers,
    merged,
    vllm_fields,
    vllm_router_fields,
)
from llmserve.forecasts.call_forecast import CallForecast as Told

KINDS = {"write a long report about": 400, "say yes or no about": 3, "list some cities in": 40}
SOME = CallForecast(
    endpoint="/v1/chat/completions", output_tokens=20.0, expected_tokens=23.4, quantiles=(10.0, 20.0, 40.2)
)
NOTHING = CallForecast(endpoint="/v1/chat/completions")


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def answer(tokens: int, finish: str = "stop", prompt_tokens: int = 9) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice], "usage": usage}


def taught(forecaster: Forecaster, answers: int = 90) -> Forecaster:
    rng = random.Random(1)
    for number in range(answers):
        kind, tokens = list(KINDS.items())[number % 3]
        question = forecaster.ask(body(f"{kind} {rng.randrange(10**6)}"))
        question.answered(answer(max(1, round(tokens * rng.uniform(0.8, 1.2)))))
    return forecaster


def test_lengths_are_learnt_from_answers() -> None:
    forecaster = Forecaster()
    assert forecaster.ask(body("hello")).forecast.output_tokens is None
    taught(forecaster)
    told = {kind: forecaster.ask(body(f"{kind} 77")).forecast for kind in KINDS}
    long, short, middle = [told[kind].expected_tokens or 0.0 for kind in KINDS]
    assert 2 * short < middle < long / 4
    history = told["list some cities in"].sender
    assert history is not None
    assert history.answers == 90


def test_answers_may_be_json_bytes_or_a_number_of_tokens() -> None:
    forecasts = []
    for form in (lambda tokens: tokens, answer, lambda tokens: json.dumps(answer(tokens)).encode()):
        forecaster = Forecaster()
        for _ in range(8):
            forecaster.ask(json.dumps(body("a question", n=2))).answered(form(60))
        forecasts.append(forecaster.ask(body("a question")).forecast.output_tokens)
    assert forecasts == [pytest.approx(30.0)] * 3, "the tokens are those of both choices"


def test_an_error_teaches_nothing() -> None:
    forecaster = Forecaster()
    for wrong in (b"", b"<html>", {"error": {"message": "no"}}, {"usage": None}, 0):
        forecaster.ask(body("x")).answered(wrong)
    assert forecaster.ask(body("x")).forecast.output_tokens is None


def test_all_endpoints_are_known_and_others_refused() -> None:
    forecaster = Forecaster()
    assert forecaster.ask({"model": "m", "prompt": "p"}, "/v1/completions").forecast.answers == 1
    assert forecaster.ask({"model": "m", "input": "p"}, "/v1/embeddings").forecast.answers == 0
    with pytest.raises(BadRequest, match="there is no endpoint"):
        forecaster.ask({}, "/v1/nothing")
    with pytest.raises(BadRequest, match="messages"):
        forecaster.ask({"model": "m"})


def test_what_was_learnt_is_kept(tmp_path: Path) -> None:
    kept = taught(Forecaster(tmp_path / "kept"))
    kept.save()
    again = Forecaster(tmp_path / "kept")
    for kind in KINDS:
        question = body(f"{kind} 5")
        assert again.ask(question).forecast == kept.ask(question).forecast


def test_the_forecast_is_the_servers_type() -> None:
    assert CallForecast is Told


def test_the_library_loads_neither_torch_nor_a_server() -> None:
    heavy = ("torch", "starlette", "uvicorn", "onnxruntime")
    script = f"import sys, llmserve.forecast; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- adapters ----


def test_vllm_runs_the_request_of_the_fewest_tokens_first() -> None:
    assert vllm_fields(SOME) == {"priority": 23}
    two = CallForecast(endpoint="", answers=2, expected_tokens=23.4)
    assert vllm_fields(two) == {"priority": 47}
    assert vllm_fields(NOTHING) == {}


def test_vllm_router_and_dynamo_are_told_a_quantile() -> None:
    context = {"program_id": "p", "expected_output_length": 20}
    assert vllm_router_fields(SOME, "p") == {"vllm_xargs": {"agentic_context": context}}
    assert vllm_router_fields(NOTHING, "p") == {"vllm_xargs": {"agentic_context": {"program_id": "p"}}}
    assert dynamo_fields(SOME) == {"nvext": {"agent_hints": {"osl": 20}}}
    assert dynamo_fields(SOME, 0.9) == {"nvext": {"agent_hints": {"osl": 40}}}
    assert dynamo_fields(NOTHING) == {}


def test_llm_ds_bucket_is_short_or_long_only_where_that_is_likely() -> None:
    buckets = {(100.0, 499.0): "SHORT", (100.0, 900.0): "UNKNOWN", (2000.0, 9e3): "LONG", (1999.0, 9e3): "UNKNOWN"}
    objectives = {"SHORT": "fast", "LONG": "patient"}
    for quantiles, bucket in buckets.items():
        told = CallForecast(endpoint="", quantiles=quantiles, output_tokens=quantiles[0])
        assert llm_d_bucket(told) == bucket
        name = objectives.get(bucket)
        assert llm_d_headers(told, objectives) == ({"x-llm-d-inference-objective": name} if name else {})
    assert llm_d_bucket(NOTHING) == "UNKNOWN"


def test_fields_of_the_body_stay() -> None:
    own = body("x", nvext={"agent_hints": {"priority": 5}, "other": 1}, priority=3)
    both = merged(own, {**dynamo_fields(SOME), **vllm_fields(SOME)})
    assert both == {**own, "nvext": {"agent_hints": {"priority": 5, "osl": 20}, "other": 1}}
    assert own["nvext"] == {"agent_hints": {"priority": 5}, "other": 1}, "the body itself is not changed"
