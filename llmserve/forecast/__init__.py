"""The forecaster as a library: what a call will take, learnt from answers, for whatever routes or schedules calls.

    forecaster = Forecaster()
    question = forecaster.ask(body)                        # of /v1/chat/completions, or of the endpoint that is named
    answer = send({**body, **vllm_fields(question.forecast)})      # or another adapter's fields
    question.answered(answer)                              # or the number of the answer's tokens

adapters   : what a forecast says in the fields and headers of other programs
forecaster : forecasts of bodies, and what is learnt from their answers
"""

from llmserve.forecast.adapters import (
    dynamo_fields,
    llm_d_bucket,
    llm_d_headers,
    merged,
    vllm_fields,
    vllm_router_fields,
)
from llmserve.forecast.forecaster import Forecaster, Question
from llmserve.forecasts.call_forecast import CallForecast, SenderHistory, Work

__all__ = [
    "CallForecast",
    "Forecaster",
    "Question",
    "SenderHistory",
    "Work",
    "dynamo_fields",
    "llm_d_bucket",
    "llm_d_headers",
    "merged",
    "vllm_fields",
    "vllm_router_fields",
]
