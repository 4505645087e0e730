"""What programs say of themselves at GETs, as the documentation or source of the named version has it.

tests/dialects/test_recognition.py probes each. A path that is not named is a 404, or what `other` says.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.lying import LyingEngine, http

from llmserve.engines.dialects import NOTHING_TOLD, Priority, Told

NOT_FOUND = http(b"404 page not found", status="404 Not Found")
NOT_SUPPORTED = http(b'{"error":{"code":501,"type":"not_supported_error"}}', status="501 Not Implemented")
HTML = http(b"<!doctype html><html><title>Welcome</title></html>", "content-type: text/html")
CREATED = 1_790_000_000


def said(content: Any, *headers: str) -> bytes:
    return http(json.dumps(content).encode(), "content-type: application/json", *headers)


def metrics(*rows: str) -> bytes:
    return http("\n".join(["# HELP some help", *rows, ""]).encode(), "content-type: text/plain; version=0.0.4")


def models(*ids: str, owner: str, **more: Any) -> dict[str, Any]:
    entries = [{"id": id_, "object": "model", "created": CREATED, "owned_by": owner, **more} for id_ in ids]
    return {"object": "list", "data": entries}


@dataclass(frozen=True)
class Program:
    """A program and what is to be found.

    gets       answers by path.  other : to any other path
    shown      its kind and version
    told       what is read of it
    context    of its models
    untouched  paths that no probe may ask for
    """

    name: str
    gets: Mapping[str, bytes]
    shown: str
    told: Told = NOTHING_TOLD
    context: int | None = None
    other: bytes = NOT_FOUND
    untouched: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


VLLM = Program(
    "vLLM 0.32",
    {
        "/v1/models": said(models("qwen", owner="vllm", max_model_len=4096)),
        "/version": said({"version": "0.32.0"}),
        "/health": http(b""),
        "/openapi.json": said({"paths": {"/v1/chat/completions": {}}}),
        "/metrics": metrics(
            'vllm:num_requests_running{engine="0"} 3.0',
            'vllm:num_requests_waiting{engine="0"} 2.0',
            'vllm:cache_config_info{kv_cache_size_tokens="1280"} 1.0',
        ),
    },
    shown="vLLM 0.32.0",
    told=Told("0.32.0", running=3, waiting=2, tokens_max=1280),
    context=4096,
)

SGLANG_INFO = {
    "version": "0.5.12",
    "api_key": "the operator's",
    "max_running_requests": None,
    "max_total_num_tokens": 100_000,
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": False,
    "disable_priority_preemption": True,
    "internal_states": [{"effective_max_running_requests_per_dp": 64}, {"effective_max_running_requests_per_dp": 64}],
}
SGLANG_GETS = {
    "/v1/models": said(models("qwen", owner="sglang", max_model_len=32768)),
    "/server_info": said(SGLANG_INFO),
    "/health": http(b""),
    "/metrics": metrics(
        'sglang:num_running_reqs{dp_rank="0",model_name="qwen"} 5.0',
        'sglang:num_running_reqs{dp_rank="1",model_name="qwen"} 4.0',
        'sglang:num_queue_reqs{dp_rank="0",model_name="qwen"} 1.0',
    ),
}
SGLANG = Program(
    "SGLang 0.5.12 with --enable-metrics --enable-priority-scheduling",
    SGLANG_GETS,
    shown="SGLang 0.5.12",
    told=Told("0.5.12", slots=128, running=9, waiting=1, tokens_max=200_000, priority=Priority.HIGHER_FIRST),
    context=32768,
)
SGLANG_PLAIN = Program(
    "SGLang of 2025 without flags",
    {
        "/v1/models": SGLANG_GETS["/v1/models"],
        "/get_server_info": said({"version": "0.4.9", "max_running_requests": 48, "internal_states": [{}]}),
        "/health": http(b""),
        "/v1/loads": said({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.5}]}),
    },
    shown="SGLang 0.4.9",
    told=Told("0.4.9", slots=48, running=2, waiting=1, priority=Priority.NONE),
    context=32768,
)

LLAMA_MODELS = models("demo.gguf", owner="llamacpp", meta={"n_ctx": 2048, "n_ctx_train": 8192})
LLAMA_PROPS = {
    "default_generation_settings": {"params": {"temperature": 0.8}, "n_ctx": 2048},
    "total_slots": 2,
    "chat_template": "{{ messages }}",
    "build_info": "b6000-abcdef0",
    "is_sleeping": False,
}
LLAMA = Program(
    "llama.cpp's server with --metrics",
    {
        "/v1/models": said(LLAMA_MODELS, "server: llama.cpp"),
        "/props": said(LLAMA_PROPS),
        "/health": said({"status": "ok"}),
        "/metrics": metrics("llamacpp:requests_processing 2", "llamacpp:requests_deferred 3"),
    },
    shown="llama.cpp b6000",
    told=Told("b6000", slots=2, running=2, waiting=3, context_tokens=2048),
    context=2048,
    untouched=("/openapi.json", "/slots"),
)
LLAMA_SLOTS = Program(
    "llama.cpp's server without --metrics",
    {
        **LLAMA.gets,
        "/metrics": NOT_SUPPORTED,
        "/slots": said([{"id": 0, "n_ctx": 2048, "is_processing": True}, {"id": 1, "is_processing": False}]),
    },
    shown="llama.cpp b6000",
    told=Told("b6000", slots=2, running=1, context_tokens=2048),
    context=2048,
)
LLAMA_SILENT = Program(
    "llama.cpp's server with --no-slots, of a build whose /props names no slots",
    {
        **LLAMA.gets,
        "/props": said({"default_generation_settings": {"n_ctx": 512}}),
        "/metrics": NOT_SUPPORTED,
        "/slots": NOT_SUPPORTED,
    },
    shown="llama.cpp",
    told=Told(context_tokens=512),
    context=2048,
)
LLAMA_ROUTER = Program(
    "llama.cpp's server as a router",
    {
        "/v1/models": said(
            {
                "object": "list",
                "data": [
                    {"id": "a", "owned_by": "llamacpp", "created": CREATED, "status": {"value": "loaded", "args": []}},
                    {"id": "b", "owned_by": "llamacpp", "created": CREATED, "status": {"value": "unloaded"}},
                ],
            },
            "server: llama.cpp",
        ),
        "/props": said(
            {
                "role": "router",
                "max_instances": 4,
                "default_generation_settings": {"n_ctx": 0},
                "build_info": "b11434-x",
            }
        ),
        "/health": said({"status": "ok"}),
    },
    shown="llama.cpp's router b11434",
    told=Told("b11434", loaded=("a",), models_at_once=4),
    untouched=("/slots", "/metrics", "/openapi.json"),
)

OLLAMA = Program(
    "Ollama 0.33",
    {
        "/v1/models": said(
            {
                "object": "list",
                "data": [
                    {"id": "qwen3:8b", "object": "model", "created": CREATED, "owned_by": "library"},
                    {"id": "hf.co/someone/x:Q4_K_M", "object": "model", "created": CREATED, "owned_by": "someone"},
                ],
            }
        ),
        "/api/version": said({"version": "0.33.0"}),
        "/api/ps": said({"models": [{"name": "qwen3:8b", "model": "qwen3:8b", "size_vram": 5137025024}]}),
    },
    shown="Ollama 0.33.0",
    told=Told("0.33.0", loaded=("qwen3:8b",)),
    untouched=("/health", "/metrics", "/openapi.json"),
)
LM_STUDIO = Program(
    "LM Studio 0.4",
    {
        "/v1/models": said(models("qwen2-vl", "granite", owner="organization_owner")),
        "/api/v0/models": said({"data": [{"id": "qwen2-vl", "state": "loaded"}, {"id": "granite"}]}),
    },
    shown="LM Studio",
    told=Told(loaded=("qwen2-vl",)),
    other=said({"error": "Unexpected endpoint or method. Returning 200 anyway"}),
    untouched=("/health", "/metrics", "/openapi.json", "/props"),
)
LMDEPLOY = Program(
    "LMDeploy 0.16",
    {
        "/v1/models": said(models("internlm", owner="lmdeploy")),
        "/health": said({"status": "healthy"}),
        "/openapi.json": said({"paths": {"/v1/chat/completions": {}, "/health": {}}}),
        "/metrics": metrics(
            'lmdeploy:num_requests_running{engine="0",model_name="internlm"} 4.0',
            'lmdeploy:num_requests_waiting{engine="0",model_name="internlm"} 0.0',
        ),
    },
    shown="LMDeploy",
    told=Told(running=4, waiting=0),
)
TGI = Program(
    "TGI 3.3.7",
    {
        "/v1/models": said(models("bigscience/bloom", owner="bigscience/bloom")),
        "/info": said(
            {
                "model_id": "bigscience/bloom",
                "max_concurrent_requests": 128,
                "max_total_tokens": 2048,
                "router": "text-generation-router",
                "version": "3.3.7",
            }
        ),
        "/health": http(b""),
        "/metrics": metrics("tgi_batch_current_size 7"),
    },
    shown="TGI 3.3.7",
    told=Told("3.3.7", running=7, waiting=0, context_tokens=2048),
    context=2048,
)
TENSORRT_LLM = Program(
    "TensorRT-LLM",
    {
        "/v1/models": said(models("llama", owner="tensorrt_llm")),
        "/version": said({"version": "1.2.0"}),
        "/health": http(b""),
        "/metrics": said([{"iter": 154, "numActiveRequests": 1}]),
    },
    shown="TensorRT-LLM 1.2.0",
    told=Told("1.2.0"),
    untouched=("/metrics",),
)
LLAMA_SWAP = Program(
    "llama-swap v99",
    {
        "/v1/models": said(models("a", "b", owner="llama-swap", status={"value": "unloaded"})),
        "/api/version": said({"version": "99", "commit": "0bdb372", "build_date": "2026-08-22"}),
        "/running": said({"running": [{"model": "b", "state": "ready", "cmd": "llama-server"}]}),
        "/health": http(b"OK"),
    },
    shown="llama-swap 99",
    told=Told("99", loaded=("b",)),
    untouched=("/metrics",),
)
LITELLM = Program(
    "LiteLLM",
    {
        "/v1/models": said(models("gpt-4o", owner="openai")),
        "/openapi.json": said({"paths": {"/health": {}, "/health/liveliness": {}, "/v1/chat/completions": {}}}),
        "/health/readiness": said({"status": "healthy", "litellm_version": "1.80.0"}),
        "/health/liveliness": said("I'm alive!"),
    },
    shown="LiteLLM 1.80.0",
    told=Told("1.80.0"),
    untouched=("/health", "/metrics"),
)
LLMSERVE = Program(
    "llmserve in front of vLLM",
    {
        "/v1/models": said(models("qwen", owner="vllm", max_model_len=4096), "server: llmserve"),
        "/health": said({"status": "ok"}),
        "/openapi.json": said({"paths": {"/v1/chat/completions": {}, "/ready": {}}}),
    },
    shown="llmserve",
    context=4096,
    untouched=("/version", "/metrics"),
)
BEHIND_HTML = Program(
    "a proxy that answers 200 with HTML to anything but the API",
    {"/v1/models": said(models("openai/gpt-4o", "library/x:1", owner="library"))},
    shown="OpenAI-compatible server",
    other=HTML,
)
PLAIN = Program(
    "a server that nobody knows",
    {"/v1/models": said({"data": [{"id": "m"}]})},
    shown="OpenAI-compatible server",
)
HIDDEN_VLLM = Program(
    "a server that nobody knows, with vLLM's metrics",
    {"/v1/models": said({"data": [{"id": "m", "owned_by": "us"}]}), "/metrics": VLLM.gets["/metrics"]},
    shown="OpenAI-compatible server",
    told=Told(running=3, waiting=2, tokens_max=1280),
)
KEYED_LLAMA = Program(
    "llama.cpp's server whose probes need a key that is missing",
    {
        "/v1/models": said(LLAMA_MODELS),
        "/health": said({"status": "ok"}),
        **dict.fromkeys(("/props", "/metrics", "/slots"), http(b"{}", status="401 Unauthorized")),
    },
    shown="llama.cpp",
    context=2048,
)

PROGRAMS = (
    *(VLLM, SGLANG, SGLANG_PLAIN, LLAMA, LLAMA_SLOTS, LLAMA_SILENT, LLAMA_ROUTER, OLLAMA, LM_STUDIO, LMDEPLOY, TGI),
    *(TENSORRT_LLM, LLAMA_SWAP, LITELLM, LLMSERVE, BEHIND_HTML, PLAIN, HIDDEN_VLLM, KEYED_LLAMA),
)


class Running(LyingEngine):
    """A program that runs; `become` makes it another one at the same address."""

    def __init__(self, program: Program) -> None:
        super().__init__(self._complete)
        self.become(program)

    def become(self, program: Program) -> None:
        other = program.other
        self._probes = defaultdict(lambda: other, program.gets)

    def asked(self, path: str) -> int:
        return sum([head.startswith(f"GET {path} ".encode()) for head in self.heads])

    async def _complete(self, writer: asyncio.StreamWriter) -> None:
        writer.write(http(b'{"choices": [], "usage": {"completion_tokens": 3}}'))
        await writer.drain()
