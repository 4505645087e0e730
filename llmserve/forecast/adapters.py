"""What a forecast says in the fields and headers of other programs: pure functions, which return what is to be added.

    vllm_fields         vLLM with `--scheduling-policy priority`      body: `priority`, the lower the earlier
    vllm_router_fields  vllm-router with program scheduling           body: `vllm_xargs.agentic_context`
    dynamo_fields       NVIDIA Dynamo                                 body: `nvext.agent_hints`
    llm_d_headers       llm-d's router                                header: `x-llm-d-inference-objective`
    llm_d_bucket        llm-d's router                                the value of its attribute `outlen-bucket`

Fields are nested where the program's are: `merged` adds them to a body that may have some of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from llmserve.forecasts.call_forecast import CallForecast

Fields = dict[str, Any]
Bucket = Literal["SHORT", "UNKNOWN", "LONG"]
SHORT_BELOW, LONG_FROM = 500, 2000  # tokens: the bounds of llm-d's buckets
BUCKET_LEVEL = 0.9  # llm-d takes a long answer called short for worse than the reverse
OBJECTIVE_HEADER = "x-llm-d-inference-objective"


def merged(body: Mapping[str, Any], fields: Mapping[str, Any]) -> Fields:
    """A body with further fields. Of two values for one field the body's own stays; objects are merged."""
    result: Fields = {**fields, **body}
    for name in fields.keys() & body.keys():
        if isinstance(fields[name], Mapping) and isinstance(body[name], Mapping):
            result[name] = merged(body[name], fields[name])
    return result


def vllm_fields(forecast: CallForecast) -> Fields:
    """vLLM's `priority`: the expected tokens of all answers, so that the shortest waiting request is next.

    {} where nothing is known: vLLM then takes 0, which is before all others. vLLM refuses any other value than 0 unless
    it was started with `--scheduling-policy priority`.
    """
    tokens = forecast.expected_tokens
    return {} if tokens is None else {"priority": max(1, round(tokens * forecast.answers))}


def vllm_router_fields(forecast: CallForecast, program_id: str, level: float = 0.5) -> Fields:
    """vllm-router's hint of one request of a program, with `--enable-program-scheduling`.

    program_id : without one the router reads no hint.  level : of the quantile that is told: the router keeps room for
    so many tokens
    """
    context: Fields = {"program_id": program_id}
    if (tokens := forecast.quantile(level)) is not None:
        context["expected_output_length"] = max(1, round(tokens))
    return {"vllm_xargs": {"agentic_context": context}}


def dynamo_fields(forecast: CallForecast, level: float = 0.5) -> Fields:
    """Dynamo's `osl`, the expected output tokens, which counts with `--router-track-output-blocks`."""
    tokens = forecast.quantile(level)
    return {} if tokens is None else {"nvext": {"agent_hints": {"osl": max(1, round(tokens))}}}


def llm_d_bucket(forecast: CallForecast, level: float = BUCKET_LEVEL) -> Bucket:
    """The bucket of llm-d's attribute `outlen-bucket`: SHORT only if so many of the likely lengths are below its bound,
    LONG if as many are above.
    """
    upper, lower = forecast.quantile(level), forecast.quantile(1.0 - level)
    if upper is None or lower is None:
        return "UNKNOWN"
    return "SHORT" if upper < SHORT_BELOW else "LONG" if lower >= LONG_FROM else "UNKNOWN"


def llm_d_headers(forecast: CallForecast, objectives: Mapping[Bucket, str]) -> dict[str, str]:
    """The header with which llm-d's flow control gives a request the priority of an InferenceObjective.

    objectives : names of InferenceObjectives by bucket; a bucket without one has no header
    """
    name = objectives.get(llm_d_bucket(forecast))
    return {} if name is None else {OBJECTIVE_HEADER: name}
