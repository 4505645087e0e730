"""Reads a client's request into a draft. Checks only the fields that the gateway needs; the engine checks the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from llmserve.calls.prompt_blocks import prompt_blocks
from llmserve.errors import BadRequest
from llmserve.gateway.bodies import (
    OPTIONS,
    Body,
    BodyLimits,
    CompletionBody,
    StreamOptions,
    read_body,
    unreadable,
    value_or_none,
)
from llmserve.gateway.draft import NO_HEADERS, Draft
from llmserve.gateway.endpoints import ENDPOINTS, AnswerBody, Answers, FormFile, PromptFields
from llmserve.gateway.prompts import ReadPrompt
from llmserve.gateway.session_ids import SessionIds
from llmserve.programs.sources import Sent
from llmserve.programs.trail import Trail
from llmserve.request import Bounds, Call, Wire, Written
from llmserve.settings.deadlines import SLO_MS_MAX
from llmserve.wire.form_data import read_form
from llmserve.wire.headers import PREDICTED_HEADER, RECEIPT_HEADER, SLO_HEADER, STREAM_CHARS_MAX, STREAM_HEADER
from llmserve.wire.json_text import truth_of, without_bom
from llmserve.wire.raw_views import place_of
from predictor.prompt import Prompt

if TYPE_CHECKING:
    from llmserve.settings.tree import ApiConfig

FORWARDED_CHARS_MAX = 256
SESSION_IDS = SessionIds()
OPTIONS_BYTES_MAX = 1024  # of stream_options, which are parsed and written again
SENDER_CHARACTERS = 512  # of a prompt without an answer, by which senders without a key are told apart
USAGE_FIELD = b'"stream_options":{"include_usage":true},'

# ---- the call ------------------------------------------------------------------------------------------------------


def limits_of(config: ApiConfig) -> BodyLimits:
    return BodyLimits(**{name: getattr(config, name) for name in BodyLimits.__struct_fields__})


def parse_call(
    path: str, data: bytes, limits: BodyLimits, headers: Mapping[str, str] = NO_HEADERS, sender: str = ""
) -> Call:
    """The call of a request alone, before a server decides about it. Raises BadRequest, which names the field.

    headers : the client's, with lower-case names.  sender : name of the client's key
    """
    draft = Draft(ENDPOINTS[path], headers, body=data, key=sender)
    read_request(draft, limits)
    return draft.call()


def read_request(draft: Draft, limits: BodyLimits, secret: bytes = b"", session_ids: SessionIds = SESSION_IDS) -> None:
    """Fill in what the body and the client's headers say. Raises BadRequest, which names the field or the header.

    secret : of the hashes of the prompt's blocks
    """
    reads = draft.endpoint.reads
    if isinstance(reads, Answers):
        _read_answers(draft, reads, limits, secret, session_ids)
    else:
        _read_prompt(draft, reads, limits)
    draft.model = draft.prompt.model


def _read_answers(draft: Draft, reads: Answers, limits: BodyLimits, secret: bytes, session_ids: SessionIds) -> None:
    endpoint, headers, data = draft.endpoint, draft.headers, without_bom(draft.body)
    body: AnswerBody
    body, text = read_body(session_ids.decoder(reads), data, limits)
    output_tokens_max = body.output_tokens_max
    read = reads.read(body, body.stops(), output_tokens_max)
    _check_length(body.prompt_field, read, limits)
    choices, ids, least = body.answers * read.prompts, read.ids, body.output_tokens_certain
    if choices > limits.choices_max:
        raise _too_many_choices(body, read, limits.choices_max)
    if ids and body.truncates:
        ids = 0
    stream, written, sent = body.streams, None, data
    if stream and isinstance(body, Body) and _lacks_usage(body):
        sent, written = _with_usage(data, text, body.stream_options)
    draft.bounds = Bounds(
        choices,
        output_tokens_max,
        body.output_tokens_min(output_tokens_max),
        read.ids,
        ids + choices * least,
        math.ceil(ids / read.prompts) + least,
    )
    draft.tier, draft.priority = body.tier, body.level
    draft.prompt, draft.opening, draft.previous = read.prompt, read.opening, body.previous_response_id or ""
    draft.blocks, share = prompt_blocks(read.pieces, read.prompt.model, secret)
    draft.block_share = share / read.prompts
    draft.trail = read.trail
    if draft.blocks and read.prompts == 1 and isinstance(body, CompletionBody):
        draft.trail = Trail(blocks=draft.blocks, text=read.pieces[0])
    if not headers.keys().isdisjoint(session_ids.headers):
        _read_terms(draft, headers)
        _belongs(draft, body, session_ids.in_headers(headers))
    if (
        body.session_id
        or body.prompt_cache_key
        or body.metadata
        or body.nvext
        or body.program_id
        or body.session_params
        or session_ids.own_fields
    ):
        _belongs(draft, body, session_ids.in_body(body))
    passed = _forwarded(headers, endpoint.headers)
    draft.wire = Wire(endpoint.path, sent, stream, written, passed, "", endpoint.form)


def _read_prompt(draft: Draft, reads: PromptFields | FormFile, limits: BodyLimits) -> None:
    endpoint, headers, data = draft.endpoint, draft.headers, draft.body
    if isinstance(reads, FormFile):
        read = _read_form(reads, data, headers)
    else:
        data = without_bom(data)
        read = _read_fields(reads, data, limits)
    _check_length(reads.field, read.prompt, limits)
    draft.bounds = Bounds(0, prompt_ids=read.prompt.ids)
    draft.slo_s, draft.stream_name = _slo_s(headers), _stream_name(headers.get(STREAM_HEADER))
    draft.prompt, draft.opening = read.prompt.prompt, read.prompt.opening
    passed = _forwarded(headers, endpoint.headers)
    draft.wire = Wire(endpoint.path, data, read.stream, None, passed, read.content_type, endpoint.form)


def _read_terms(draft: Draft, headers: Mapping[str, str]) -> None:
    """Fill in what the client's headers say of an answer. Raises BadRequest."""
    draft.slo_s = _slo_s(headers)
    draft.predicted_tokens = _positive(PREDICTED_HEADER, headers.get(PREDICTED_HEADER), most=2.0**31)
    draft.stream_name = _stream_name(headers.get(STREAM_HEADER))
    draft.receipt = _flag(RECEIPT_HEADER, headers.get(RECEIPT_HEADER))


def _belongs(draft: Draft, body: AnswerBody, sent: Sent | None) -> None:
    """Note the ids of a session; those in headers come first, and count."""
    if sent is not None:
        if draft.trail is None:  # a first question, or a prompt without turns
            draft.trail = Trail(step=0 if isinstance(body, CompletionBody) else 1)
        draft.trail.sent = draft.trail.sent or sent


def _slo_s(headers: Mapping[str, str]) -> float | None:
    return _positive(SLO_HEADER, headers.get(SLO_HEADER), most=SLO_MS_MAX, scale=1e-3)


# ---- prompts without an answer -------------------------------------------------------------------------------------


class _Read(msgspec.Struct):
    """content_type : of the body; "" for JSON"""

    prompt: ReadPrompt
    stream: bool = False
    content_type: str = ""


def _read_fields(reads: PromptFields, data: bytes, limits: BodyLimits) -> _Read:
    """Read how long the prompt is: of text the characters of its JSON, else the number of its token ids."""
    body, _ = read_body(reads.decoder, data, limits)
    chars, ids, opening = 0, 0, ""
    for field in reads.fields:
        value = bytes(getattr(body, field))
        if b'"' in value:
            chars += len(value)
            opening = opening or value[:SENDER_CHARACTERS].decode(errors="replace")
        elif value:
            ids += value.count(b",") + 1
    return _Read(ReadPrompt(Prompt("", body.model or "", history_characters=chars), (opening,), chars, ids))


def _read_form(reads: FormFile, data: bytes, headers: Mapping[str, str]) -> _Read:
    content_type = headers.get("content-type", "")
    form = read_form(data, content_type)
    file = form.place(reads.field)
    if file is None:
        raise BadRequest(f"`{reads.field}` is required", param=reads.field, code="missing_required_parameter")
    ids = -(-(file.stop - file.start) // reads.bytes_per_token)
    prompt = ReadPrompt(Prompt("", form.text("model")), (f"{file.stop - file.start}",), 0, ids)
    return _Read(prompt, form.text("stream").lower() in ("true", "1"), content_type)


# ---- limits --------------------------------------------------------------------------------------------------------


def _check_length(field: str, read: ReadPrompt, limits: BodyLimits) -> None:
    most = limits.prompt_chars_max
    if read.chars > most:
        raise _too_long(field, read.chars, "characters", most)
    if read.ids > most:  # a token has one character at least
        raise _too_long(field, read.ids, "token ids", most)


def _too_long(field: str, count: int, unit: str, most: int) -> BadRequest:
    return BadRequest(
        f"the prompt has {count:,} {unit}; at most {most:,} are allowed (--prompt-chars-max)",
        param=field,
        code="context_length_exceeded",
    )


def _too_many_choices(body: AnswerBody, read: ReadPrompt, most: int) -> BadRequest:
    n = body.answers
    return unreadable(
        "n" if n > 1 else "prompt",
        f"{n:,} answers to each of {read.prompts:,} prompts are more than {most:,} in all (--choices-max)",
    )


def _lacks_usage(body: Body) -> bool:
    """Whether a stream would end without the counts of its tokens. False for options that the engine must reject.

    Raises BadRequest.
    """
    raw = body.stream_options
    if not raw:
        return True
    if len(memoryview(raw)) > OPTIONS_BYTES_MAX:
        raise unreadable("stream_options", f"more than {OPTIONS_BYTES_MAX:,} bytes")
    options: StreamOptions | None = value_or_none(OPTIONS, raw)
    if options is None:
        return bytes(raw) == b"null"
    return options.include_usage is None or truth_of(options.include_usage) is False


def _with_usage(data: bytes, text: bytes, options: Raw) -> tuple[bytes, Written]:
    """Return the body with stream_options.include_usage = true, and where; all other bytes stay the same.

    text : of which `options` is a view, of the same length as `data`.  options : empty if absent
    vLLM ignores continuous_usage_stats without include_usage. The field is removed, so that it stays without effect.
    """
    if not options:
        start = data.index(b"{") + 1
        return data[:start] + USAGE_FIELD + data[start:], Written(start, start + len(USAGE_FIELD), b"")
    place = place_of(options, text)
    changed = {**(json.loads(data[place]) or {}), "include_usage": True}
    changed.pop("continuous_usage_stats", None)
    new = json.dumps(changed).encode()
    written = Written(place.start, place.start + len(new), data[place])
    return data[: place.start] + new + data[place.stop :], written


def _stream_name(text: str | None) -> str:
    if text is None:
        return ""
    if len(text) > STREAM_CHARS_MAX or not text.isascii() or not text.isprintable():
        raise BadRequest(
            f"the header {STREAM_HEADER} must be printable ASCII, at most {STREAM_CHARS_MAX} characters",
            param=STREAM_HEADER,
            code="invalid_value",
        )
    return text


def _flag(header: str, text: str | None) -> bool:
    if text not in (None, "true", "false"):
        raise BadRequest(f"the header {header} must be true or false", param=header, code="invalid_value")
    return text == "true"


def _forwarded(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the client's headers that are sent to the engine. Too long or unprintable headers are dropped."""
    if headers.keys().isdisjoint(names):
        return ()
    return tuple([(name, value) for name in names if (value := headers.get(name)) and _is_plain(value)])


def _is_plain(value: str) -> bool:
    return len(value) <= FORWARDED_CHARS_MAX and value.isascii() and value.isprintable()


def _positive(header: str, text: str | None, most: float, scale: float = 1.0) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise BadRequest(
            f"the header {header} must be a positive number, at most {most:g}", param=header, code="invalid_value"
        )
    return value * scale
