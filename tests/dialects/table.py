"""Dialects of the OpenAI API: what each kind of engine sends, byte for byte, as its documentation or source has it.

An entry says what an engine of one kind sends to probes, as a whole answer, as a stream, as an error and as a refusal.
tests/dialects/test_dialects.py drives each entry through every path. A new kind of engine is one more entry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

MODEL = "fake"
TEXT = "Hello, world"
OUTPUT_TOKENS = 2
CREATED = 1_790_000_000
DONE = b"data: [DONE]\n\n"


def data(content: Any, space: str = " ") -> bytes:
    """An event of a stream. space : between `data:` and the JSON"""
    return f"data:{space}{json.dumps(content)}\n\n".encode()


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """An object `chat.completion.chunk` of one choice. more : further fields of the choice"""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
    return {
        "id": "chatcmpl-7",
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": MODEL,
        "choices": [choice],
    }


def usage_chunk() -> dict[str, Any]:
    return {**chunk({}), "choices": [], "usage": USAGE}


def completion(**more: Any) -> dict[str, Any]:
    """A whole object `chat.completion`. more : further fields"""
    message = {"role": "assistant", "content": TEXT}
    return {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": CREATED,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
        **more,
    }


USAGE = {"prompt_tokens": 9, "completion_tokens": OUTPUT_TOKENS, "total_tokens": 9 + OUTPUT_TOKENS}
LISTED = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "nobody"}
NOT_FOUND = ("404 Not Found", "text/plain", b"404 page not found")
JSON = "application/json"


@dataclass(frozen=True)
class Refusal:
    """An answer with an error status. after_s : what its Retry-After says"""

    status: str
    body: bytes
    content_type: str = JSON
    after_s: int | None = None

    @property
    def code(self) -> int:
        return int(self.status.split()[0])


def refusal(status: str, content: Any, after_s: int | None = None) -> Refusal:
    return Refusal(status, json.dumps(content).encode(), JSON, after_s)


@dataclass(frozen=True)
class Dialect:
    """What one kind of engine sends.

    kind           its name
    models         the answer to GET /v1/models
    opening        events of a stream before the first text
    pieces         events with text, of one token each
    finish         the events after the text
    usage          the event of token counts, for clients that ask for the event
    finish_alone   `finish` for clients that do not ask for `usage`, where it is another
    done           ends a stream
    whole          an answer that is not streamed
    error_first    a stream of status 200 in which nothing was produced, for the engine's own fault
    error_between  what ends a stream when the engine fails in the middle of an answer
    busy           what a request gets when the engine's queue is full
    gone           what a request gets for a model that the engine does not have; None: the engine has one model for all
    probes         answers to other probes by path: (status, content type, body); a path that is not there is a 404
    """

    kind: str
    models: bytes
    opening: bytes
    pieces: tuple[bytes, ...]
    finish: bytes
    whole: bytes
    error_first: bytes
    error_between: bytes
    busy: Refusal
    gone: Refusal | None
    usage: bytes = b""
    finish_alone: bytes = b""
    done: bytes = DONE
    probes: dict[str, tuple[str, str, bytes]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.kind

    def stream(self, *, usage: bool) -> bytes:
        """A good stream. usage : with the event of token counts"""
        last = self.finish + self.usage if usage else self.finish_alone or self.finish
        return self.opening + b"".join(self.pieces) + last + self.done

    @property
    def broken(self) -> bytes:
        """A stream in which the engine fails after the first piece."""
        return self.opening + self.pieces[0] + self.error_between

    @property
    def whole_error(self) -> bytes:
        """What the first event of `error_first` says, as an answer that is not streamed."""
        line = next(line for line in self.error_first.splitlines() if line.startswith((b"data:", b"error:")))
        name, _, said = line.partition(b":")
        return said.strip() if name == b"data" else b'{"error":%b}' % said.strip()


def openai_pieces(space: str = " ", **more: Any) -> tuple[bytes, ...]:
    return tuple(data(chunk({"content": piece}, **more), space) for piece in ("Hello", ", world"))


def openai_list(*entries: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"object": "list", "data": entries or (LISTED,), **more}).encode()


def error(message: str, kind: str, code: Any, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code, **more}}


DEAD_CORE = "EngineCore encountered an issue. See stack trace for the root cause."
VLLM = Dialect(
    kind="vLLM",
    models=openai_list({**LISTED, "owned_by": "vllm", "root": MODEL, "parent": None, "max_model_len": 4096}),
    opening=data(chunk({"role": "assistant", "content": ""}, logprobs=None)),
    pieces=openai_pieces(logprobs=None),
    finish=data(chunk({"content": ""}, "stop", logprobs=None, stop_reason=None)),
    usage=data(usage_chunk()),
    whole=json.dumps(completion(prompt_logprobs=None, kv_transfer_params=None)).encode(),
    error_first=data(error(DEAD_CORE, "InternalServerError", 500)) + DONE,
    error_between=data(error(DEAD_CORE, "InternalServerError", 500)) + DONE,
    busy=refusal("503 Service Unavailable", error("The server is overloaded", "ServiceUnavailableError", 503)),
    gone=refusal("404 Not Found", error(f"The model `{MODEL}` does not exist.", "NotFoundError", 404)),
    probes={"/health": ("200 OK", "text/plain", b"")},
)

SGLANG = Dialect(
    kind="SGLang",
    models=openai_list({**LISTED, "owned_by": "sglang", "root": MODEL, "max_model_len": 32768}),
    opening=data(chunk({"role": "assistant", "content": ""}, "", logprobs=None, matched_stop=None)),
    # Versions of 2025 send an empty finish_reason until the last chunk.
    pieces=tuple(
        data(chunk({"role": None, "content": piece, "tool_calls": None}, "", logprobs=None, matched_stop=None))
        for piece in ("Hello", ", world")
    ),
    finish=data(chunk({"content": None}, "stop", logprobs=None, matched_stop=151645)),
    usage=data(usage_chunk()),
    whole=json.dumps(completion(metadata={"weight_version": "default"})).encode(),
    error_first=data(error("Abort in waiting queue", "InternalServerError", 503, object="error")) + DONE,
    error_between=data(error("Abort after memory ran out", "InternalServerError", 500, object="error")) + DONE,
    busy=refusal(
        "503 Service Unavailable",
        {"object": "error", "message": "The request queue is full.", "type": "Service Unavailable", "code": 503},
    ),
    gone=refusal(
        "404 Not Found", {"object": "error", "message": "no such model", "type": "NotFoundError", "code": 404}
    ),
    probes={"/health": ("200 OK", "text/plain", b"")},
)

LLAMA_CPP = Dialect(
    kind="llama.cpp",
    models=json.dumps(
        {
            "models": [{"name": MODEL, "model": MODEL, "capabilities": ["completion"]}],
            "object": "list",
            "data": [{**LISTED, "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192, "size": 1_321_083_008}}],
        }
    ).encode(),
    opening=data(chunk({"role": "assistant", "content": None})),
    pieces=openai_pieces(),
    finish=data(chunk({}, "stop")),
    usage=data({**usage_chunk(), "timings": {"predicted_n": 2}}),
    finish_alone=data(chunk({}, "stop")).replace(b"}\n\n", b',"timings":{"predicted_n": 2}}\n\n'),
    done=b"data: [DONE]\n",
    whole=json.dumps({**completion(), "timings": {"prompt_n": 9, "predicted_per_second": 74.1}}).encode(),
    error_first=data({"error": {"code": 500, "message": "Failed to decode the batch", "type": "server_error"}}) + DONE,
    error_between=data({"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}),
    busy=refusal(
        "503 Service Unavailable",
        {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}},
    ),
    gone=refusal("404 Not Found", {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}),
    probes={
        "/health": ("200 OK", JSON, b'{"status":"ok"}'),
        "/metrics": ("501 Not Implemented", JSON, b'{"error":{"code":501,"type":"not_supported_error"}}'),
    },
)

# Builds of 2025 write errors into a field `error` of the event stream, which clients skip.
LLAMA_CPP_2025 = replace(
    LLAMA_CPP,
    kind="llama.cpp of 2025",
    error_first=b'error: {"code":500,"message":"Failed to decode the batch","type":"server_error"}\n\n' + DONE,
    error_between=b'error: {"code":500,"message":"Compute error.","type":"server_error"}\n\n',
)

OLLAMA = Dialect(
    kind="Ollama",
    models=openai_list({**LISTED, "owned_by": "library"}),
    opening=b"",
    pieces=tuple(data(chunk({"role": "assistant", "content": piece})) for piece in ("Hello", ", world")),
    finish=data(chunk({"role": "assistant", "content": ""}, "stop")),
    usage=data(usage_chunk()),
    whole=json.dumps(completion(system_fingerprint="fp_ollama")).encode(),
    error_first=data({"error": {"message": "llama runner process has terminated", "type": "api_error"}}),
    error_between=data({"error": {"message": "llama runner process has terminated", "type": "api_error"}}),
    busy=refusal("503 Service Unavailable", {"error": "Server overloaded, please retry shortly (ref: 2deb9e4)"}),
    gone=refusal("404 Not Found", error(f'model "{MODEL}" not found, try pulling it first', "api_error", None)),
    probes={"/health": NOT_FOUND, "/metrics": NOT_FOUND, "/openapi.json": NOT_FOUND},
)

UNEXPECTED = ("200 OK", JSON, b'{"error":"Unexpected endpoint or method. (GET /health). Returning 200 anyway"}')
LM_STUDIO = Dialect(
    kind="LM Studio",
    models=openai_list({**LISTED, "owned_by": "organization_owner"}, {"id": "text-embedding-nomic", "object": "model"}),
    opening=b"",
    pieces=openai_pieces(logprobs=None),
    finish=data(chunk({}, "stop", logprobs=None)),
    usage=data(usage_chunk()),
    whole=json.dumps(completion(stats={}, system_fingerprint=MODEL)).encode(),
    error_first=b"event: error\n" + data({"error": {"message": "The model has crashed. (Exit code: 6)"}}),
    error_between=b"event: error\n" + data({"error": {"message": "The model has crashed. (Exit code: 6)"}}),
    busy=refusal("429 Too Many Requests", {"error": "Too many requests"}, 1),
    gone=refusal("404 Not Found", error(f"Model '{MODEL}' not found", "invalid_request_error", "model_not_found")),
    # Every path is answered with 200, and says in the body that there is nothing.
    probes={"/health": UNEXPECTED, "/metrics": UNEXPECTED, "/openapi.json": UNEXPECTED},
)

TGI = Dialect(
    kind="TGI",
    models=openai_list({**LISTED, "object": "model", "owned_by": MODEL}),
    opening=b"",
    pieces=tuple(data(chunk({"role": "assistant", "content": piece}), "") for piece in ("Hello", ", world")),
    finish=data(chunk({"role": "assistant", "content": ""}, "stop"), ""),
    usage=data(usage_chunk(), ""),
    whole=json.dumps(completion(system_fingerprint="3.3.6-sha-0be0e9b")).encode(),
    error_first=data({"error": "Request failed during generation: CANCELLED", "error_type": "generation"}, ""),
    error_between=data({"error": "Request failed during generation: CANCELLED", "error_type": "generation"}, ""),
    busy=refusal("429 Too Many Requests", {"error": "Model is overloaded", "error_type": "overloaded"}),
    gone=None,
    probes={"/health": ("200 OK", "text/plain", b"")},
)

LMDEPLOY = Dialect(
    kind="LMDeploy",
    models=openai_list({**LISTED, "owned_by": "lmdeploy", "root": MODEL, "permission": [{"id": "modelperm-1"}]}),
    opening=data({**chunk({"role": "assistant", "content": ""}, logprobs=None), "usage": None}),
    pieces=tuple(
        data({**chunk({"role": "assistant", "content": piece, "tool_calls": None}, logprobs=None), "usage": None})
        for piece in ("Hello", ", world")
    ),
    finish=data({**chunk({"content": ""}, "stop"), "usage": None}),
    usage=data(usage_chunk()),
    whole=json.dumps(completion()).encode(),
    error_first=data({"object": "error", "message": "the engine is sleeping", "type": "internal_error", "code": 500}),
    error_between=data({"object": "error", "message": "CUDA error", "type": "internal_error", "code": 500}),
    busy=refusal(
        "503 Service Unavailable",
        {"message": "Too many requests", "type": "service_unavailable_error", "code": 503, "object": "error"},
    ),
    gone=refusal(
        "404 Not Found",
        {"message": f"The model {MODEL!r} does not exist.", "type": "invalid_request_error", "object": "error"},
    ),
    probes={"/health": ("200 OK", "text/plain", b"")},
)

COSTLY = {"/health": ("401 Unauthorized", JSON, b'{"error":{"message":"No api key passed in.","code":"401"}}')}
LITELLM = Dialect(
    kind="LiteLLM",
    models=openai_list({**LISTED, "created": 1_677_610_602, "owned_by": "openai"}),
    opening=b"",
    pieces=tuple(data(chunk({"role": "assistant", "content": piece})) for piece in ("Hello", ", world")),
    finish=data(chunk({}, "stop")),
    usage=data(usage_chunk()),
    whole=json.dumps(completion(system_fingerprint=None)).encode(),
    error_first=data(error("litellm.InternalServerError: the provider gave up", "None", "500")),
    error_between=data(error("litellm.APIConnectionError: the connection is gone", "None", "500")),
    busy=refusal("429 Too Many Requests", error("No deployments available", "None", "429"), 5),
    # LiteLLM answers with 400 where other engines answer with 404.
    gone=refusal("400 Bad Request", error(f"Invalid model name passed in model={MODEL}", "None", "400")),
    probes=COSTLY,
)

FILTERS = {"hate": {"filtered": False, "severity": "safe"}}
AZURE = Dialect(
    kind="Azure OpenAI",
    models=openai_list({**LISTED, "owned_by": "openai", "status": "succeeded", "capabilities": {"inference": True}}),
    # The first chunk has no choices, and the last ones have no delta.
    opening=data(
        {
            "choices": [],
            "created": 0,
            "id": "",
            "model": "",
            "object": "",
            "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": FILTERS}],
        }
    ),
    pieces=openai_pieces(content_filter_results=FILTERS),
    finish=data(chunk({}, "stop", content_filter_results={})),
    usage=data(usage_chunk()),
    whole=json.dumps(completion(prompt_filter_results=[{"prompt_index": 0}])).encode(),
    error_first=data({"error": {"code": "InternalServerError", "message": "The server had an error."}}),
    error_between=data({"error": {"code": "InternalServerError", "message": "The server had an error."}}),
    busy=refusal("429 Too Many Requests", {"error": {"code": "429", "message": "Requests exceed the rate."}}, 7),
    gone=refusal("404 Not Found", {"error": {"code": "DeploymentNotFound", "message": "It does not exist."}}),
    probes={"/health": ("401 Unauthorized", JSON, b'{"statusCode":401,"message":"Access denied"}')},
)

PROCESSING = b": OPENROUTER PROCESSING\n\n"
OPENROUTER = Dialect(
    kind="OpenRouter",
    models=json.dumps({"data": [{"id": MODEL, "name": "Fake", "created": CREATED, "context_length": 8192}]}).encode(),
    opening=PROCESSING + PROCESSING + data(chunk({"role": "assistant", "content": ""}, native_finish_reason=None)),
    pieces=(openai_pieces(native_finish_reason=None)[0] + PROCESSING, openai_pieces(native_finish_reason=None)[1]),
    finish=data(chunk({"role": "assistant", "content": ""}, "stop", native_finish_reason="stop")),
    usage=data(usage_chunk()),
    whole=json.dumps({**completion(), "provider": "Someone"}).encode(),
    error_first=PROCESSING + data({"error": {"code": 502, "message": "The provider returned an error"}}),
    error_between=data(
        {**chunk({"content": ""}, "error"), "error": {"code": "server_error", "message": "The provider is gone"}}
    ),
    busy=refusal("429 Too Many Requests", {"error": {"code": 429, "message": "Rate limit exceeded"}}, 2),
    gone=refusal("404 Not Found", {"error": {"code": 404, "message": f"No endpoints found for {MODEL}."}}),
    probes={"/health": ("302 Found", "text/html", b"")},
)

DIALECTS = (VLLM, SGLANG, LLAMA_CPP, LLAMA_CPP_2025, OLLAMA, LM_STUDIO, TGI, LMDEPLOY, LITELLM, AZURE, OPENROUTER)
