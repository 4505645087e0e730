"""OpenAI's completion protocol: JSON in, JSON out. No sockets, no model.

An unsupported parameter is an error, naming the parameter, if its value would change the answer; else it is ignored.
"""

import json
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llmserve.demo.sampling import Sampling
from llmserve.errors import BadRequest
from llmserve.wire.json_text import count_of, truth_of

_STOP_STRINGS_MAX = 4
_TOP_K_MAX = 1 << 30  # more than any vocabulary, and an integer that a tensor can hold

# Parameters that OpenAI or vLLM support and this engine does not, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt for the model's chat template, with at least one message."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A valid request. `prompt` is a conversation, a text or token ids; max_tokens None: no limit of the client."""

    prompt: Conversation | str | tuple[int, ...]
    model: str | None
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling
    ignore_eos: bool
    stream: bool
    include_usage: bool


def parse_call(raw: bytes, defaults: Sampling, *, chat: bool) -> CompletionCall:
    """Check a body and fill in the model's defaults. Raises BadRequest, naming the field."""
    fields = _Fields(_object(raw))
    fields.refuse_unsupported()
    max_tokens = fields.limit("max_tokens")
    if chat and fields.get("max_completion_tokens") is not None:
        max_tokens = fields.limit("max_completion_tokens")
    stream = fields.flag("stream")
    options = fields.mapping("stream_options")
    if options is not None and not stream:
        raise BadRequest("stream_options is only allowed with stream", param="stream_options")
    return CompletionCall(
        prompt=_conversation(fields.get("messages")) if chat else _prompt(fields.get("prompt")),
        model=fields.text("model"),
        max_tokens=max_tokens,
        stop=_stop(fields.get("stop")),
        sampling=_sampling(fields, defaults),
        ignore_eos=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=_Fields(options or {}).flag("include_usage"),
    )


class _Fields:
    """The fields of a JSON object. Each method checks type and range; null is the same as absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadRequest(f"{name} must be a number", param=name)
        if not low <= value <= high:
            raise BadRequest(f"{name} must be between {low:g} and {high:g}, not {value:g}", param=name)
        return float(value)

    def integer(self, name: str, low: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        value = count_of(value) if isinstance(value, int | float | str) else None
        if value is None:
            raise BadRequest(f"{name} must be an integer", param=name)
        if low is not None and value < low:
            raise BadRequest(f"{name} must be at least {low}, not {value}", param=name)
        return value

    def limit(self, name: str) -> int | None:
        """A limit of tokens; None for none, also when it is -1, as llama.cpp has it."""
        limit = self.integer(name, -1)
        if limit == 0:
            raise BadRequest(f"{name} must be at least 1, or -1 for no limit", param=name)
        return None if limit == -1 else limit

    def flag(self, name: str) -> bool:
        value = self.get(name)
        flag = truth_of(value) if isinstance(value, int | float | str) else None
        if flag is None and value is not None:
            raise BadRequest(f"{name} must be true or false", param=name)
        return bool(flag)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if not isinstance(value, str | None):
            raise BadRequest(f"{name} must be a string", param=name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.get(name)
        if not isinstance(value, dict | None):
            raise BadRequest(f"{name} must be an object", param=name)
        return value

    def refuse_unsupported(self) -> None:
        for name in self._body.keys() & _UNSUPPORTED.keys():
            if self._body[name] is not None and self._body[name] not in _UNSUPPORTED[name]:
                raise BadRequest(
                    f"this engine does not support {name}={json.dumps(self._body[name])[:80]}",
                    param=name,
                    code="unsupported_parameter",
                )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return body


def _sampling(fields: _Fields, defaults: Sampling) -> Sampling:
    top_p = fields.number("top_p", 0.0, 1.0, defaults.top_p)
    if top_p == 0:
        raise BadRequest("top_p must be above 0", param="top_p")
    repetition_penalty = fields.number("repetition_penalty", 0.0, 2.0, defaults.repetition_penalty)
    if repetition_penalty == 0:
        raise BadRequest("repetition_penalty must be above 0", param="repetition_penalty")
    top_k = fields.integer("top_k", -1)  # 0 and vLLM's -1 both mean no limit
    return Sampling(
        temperature=fields.number("temperature", 0.0, 2.0, defaults.temperature),
        top_p=top_p,
        top_k=defaults.top_k if top_k is None else min(max(top_k, 0), _TOP_K_MAX),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, defaults.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, defaults.frequency_penalty),
        repetition_penalty=repetition_penalty,
        seed=fields.integer("seed"),
    )


def _stop(value: Any) -> tuple[str, ...]:
    stop = [value] if isinstance(value, str) else value or []
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise BadRequest("stop must be a string or a list of strings", param="stop")
    if len(stop) > _STOP_STRINGS_MAX:
        raise BadRequest(f"stop must hold at most {_STOP_STRINGS_MAX} strings, not {len(stop)}", param="stop")
    if "" in stop:
        raise BadRequest("a stop string must not be empty", param="stop")
    return tuple(stop)


def _prompt(value: Any) -> str | tuple[int, ...]:
    """Return a prompt given as text, as token ids, or as a list with exactly one text or one list of token ids."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _encodable(value, "prompt")
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str | list) for item in value):
        raise BadRequest("this engine takes one prompt per request", param="prompt")
    raise BadRequest("prompt must be a string or a list of token ids", param="prompt")


def _conversation(value: Any) -> Conversation:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    return Conversation(tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value)))


def _message(item: Any, param: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise BadRequest(f"{param} must be an object", param=param)
    role = item.get("role")
    if role == "developer":  # OpenAI's newer name for system; chat templates of open models lack this role
        role = "system"
    if role not in ("system", "user", "assistant"):
        raise BadRequest(f"{param}.role must be system, user or assistant", param=f"{param}.role")
    return ChatMessage(role, _content(item.get("content"), f"{param}.content"))


def _content(value: Any, param: str) -> str:
    if isinstance(value, str):
        return _encodable(value, param)
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a string or a list of text parts", param=param)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f'{param} may hold {{"type": "text", "text": ...}} parts only', param=param)
    return _encodable("".join(part["text"] for part in value), param)


def _encodable(text: str, param: str) -> str:
    """Refuse lone surrogates: JSON can express half a character, but a tokenizer cannot read half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{param} is not valid Unicode", param=param) from None
    return text


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts, without the end-of-sequence token."""

    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Writer:
    """Writes the JSON of one answer, whole or as server-sent events."""

    DONE = b"data: [DONE]\n\n"

    def __init__(self, model: str, *, chat: bool, include_usage: bool) -> None:
        self._chat = chat
        self._include_usage = include_usage
        prefix = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(self, text: str, finish_reason: str, usage: TokenUsage) -> bytes:
        """Return the whole answer."""
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        kind = "chat.completion" if self._chat else "text_completion"
        answer = {**self._head, "object": kind, "choices": [choice], "usage": usage.as_json()}
        return msgspec.json.encode(answer)

    def opening(self) -> bytes:
        """Return the event that names the role; empty for a plain completion."""
        return self._choice({"delta": {"role": "assistant", "content": ""}}, None) if self._chat else b""

    def text(self, text: str) -> bytes:
        """Return an event with a piece of the answer."""
        return self._choice({"delta": {"content": text}} if self._chat else {"text": text}, None)

    def closing(self, finish_reason: str, usage: TokenUsage) -> bytes:
        """Return the last events: the finish reason, the token usage if requested, and `[DONE]`."""
        events = self._choice({"delta": {}} if self._chat else {"text": ""}, finish_reason)
        if self._include_usage:
            events += self._event({"choices": [], "usage": usage.as_json()})
        return events + self.DONE

    @staticmethod
    def error(body: Mapping[str, Any]) -> bytes:
        """Return the last event of an interrupted answer. OpenAI's clients raise the event as an exception."""
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _choice(self, content: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return self._event({"choices": [choice]})

    def _event(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: " + msgspec.json.encode({**self._head, "object": kind, **fields}) + b"\n\n"
