"""The stages of a call: what each decides, which refusal comes first, and where large bodies are read."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import pytest

from llmserve.errors import BadRequest, RequestError
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.stages import (
    Admission,
    default_deadline,
    forwarded_identity,
    is_large,
    own_stream,
    reading,
    refuse_streams,
    share_of_all,
    share_of_stream,
)
from llmserve.request import Request, Terms
from llmserve.settings.deadlines import DefaultDeadlines
from llmserve.tenants.key_file import KeyFile
from llmserve.tenants.limits import KeyLimits
from llmserve.wire.headers import ASKER_HEADER
from llmserve.wire.terms import header_of

CHAT = ENDPOINTS["/v1/chat/completions"]
READING = reading(BodyLimits(), b"secret")
PROGRAM = {"program": 11, "parent": 12, "kind": 13, "step": 2}
TERMS = Terms("ann", "ann//+1", 0.25, "ann/app", 1.5, 7.0, receipt=True, background=True, after_tokens=3.0, **PROGRAM)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def refuse(code: str) -> Any:
    def stage(draft: Draft) -> None:
        raise RequestError(code, code=code)

    return stage


def test_the_first_stage_that_refuses_a_call_is_the_one_that_its_client_hears_of() -> None:
    admission = Admission(last=[own_stream, refuse("first"), refuse("second")])
    with pytest.raises(RequestError, match="first"):
        admission.decide(Draft(CHAT))


def test_a_feature_adds_a_stage_to_the_end_of_a_list() -> None:
    admission = Admission(body=[READING], last=[own_stream])
    admission.last.append(refuse_streams)
    draft = Draft(CHAT, body=body(stream=True))
    admission.read(draft)
    with pytest.raises(RequestError, match="cannot stream"):
        admission.decide(draft)


def test_the_call_is_what_the_stages_have_decided() -> None:
    draft = Draft(CHAT, body=body(max_tokens=5, priority=2), key="ann", slo_s=2.0, route_queue="m @e")
    Admission(body=[READING]).read(draft)
    draft.model, draft.share = "other", "s"
    call = Admission(last=[own_stream]).decide(draft)
    assert (call.model, call.prompt.sender, call.terms.key) == ("other", "ann", "ann")
    assert (call.terms.stream_name, call.terms.share, call.route_queue, call.priority) == ("ann", "s", "m @e", 2)
    assert call.bounds.output_tokens_max == 5
    assert json.loads(call.wire.body)["model"] == "other", "the engine gets the name of the model that serves the call"


def test_a_clients_stream_has_the_keys_name_before_it() -> None:
    for key, stream, name in (("ann", "app", "ann/app"), ("", "app", "app"), ("ann", "", "ann"), ("", "", "")):
        draft = Draft(CHAT, key=key, stream_name=stream)
        own_stream(draft)
        assert draft.stream_name == name


def test_a_deadline_of_the_clients_own_stays() -> None:
    fill_in = default_deadline(DefaultDeadlines(("key:ann=1000", "5000")))
    for key, own, slo_s in (("ann", None, 1.0), ("bob", None, 5.0), ("ann", 0.5, 0.5)):
        draft = Draft(CHAT, key=key, slo_s=own)
        fill_in(draft)
        assert draft.slo_s == slo_s


def test_a_share_is_of_whom_fair_by_names() -> None:
    account = KeyLimits(KeyFile()).acquire("")
    draft = Draft(CHAT, account=account, stream_name="app", priority=1)
    share_of_stream(draft)
    assert (draft.share, draft.weight) == ("app//+1", 0.25)


def test_the_weight_of_nobodys_share_stays_out_of_journals_and_headers() -> None:
    draft = Draft(CHAT, account=KeyLimits(KeyFile()).acquire(""))
    share_of_all(draft)
    request = Request(1, share=draft.share, weight=draft.call().terms.weight)
    assert b"weight" not in msgspec.json.encode(request) + msgspec.json.encode(draft.terms)


def test_the_terms_that_a_gateway_forwards_arrive_as_they_were() -> None:
    header = header_of(TERMS).split(b": ", 1)[1].strip().decode("latin-1")
    draft = Draft(CHAT, {ASKER_HEADER: header}, key="/gateway", stream_name="of the gateway", slo_s=9.0)
    forwarded_identity(draft)
    assert draft.terms == TERMS


def test_a_gateway_that_asks_for_itself_has_no_key_and_its_own_headers() -> None:
    draft = Draft(CHAT, key="/gateway", stream_name="own", slo_s=9.0)
    forwarded_identity(draft)
    assert draft.terms == Terms(stream_name="own", slo_s=9.0)


@pytest.mark.parametrize("header", ["", "{", '{"weight":"x"}', '{"key":"\xe9"}'])
def test_a_header_that_no_gateway_writes_is_refused(header: str) -> None:
    with pytest.raises(BadRequest, match=ASKER_HEADER):
        forwarded_identity(Draft(CHAT, {ASKER_HEADER: header}))


def test_large_bodies_are_read_in_a_thread_one_at_a_time() -> None:
    threads: list[int] = []
    running, together = 0, 0

    def read_slowly(draft: Draft) -> None:
        nonlocal running, together
        running += 1
        together = max(together, running)
        threads.append(threading.get_ident())
        time.sleep(0.01)
        running -= 1
        READING(draft)

    async def read_several() -> None:
        admission = Admission(body=[read_slowly])
        large = body(messages=[{"role": "user", "content": "x" * 300_000}])
        drafts = [Draft(CHAT, body=large) for _ in range(3)]
        await asyncio.gather(*[admission.read_in_thread(draft) for draft in drafts])
        assert [len(draft.prompt.text) for draft in drafts] == 3 * [300_000]
        with pytest.raises(BadRequest, match="messages"):
            await admission.read_in_thread(Draft(CHAT, body=large.replace(b"messages", b"massages")))
        assert threading.get_ident() not in threads
        assert (is_large(large), is_large(body())) == (True, False)

    asyncio.run(read_several())
    assert together == 1


def test_a_journal_says_nothing_of_what_no_stage_decides() -> None:
    draft = Draft(CHAT, account=KeyLimits(KeyFile()).acquire(""))
    share_of_stream(draft)  # without a stream there is no share
    terms = draft.terms
    request = Request(1, weight=terms.weight, after_tokens=terms.after_tokens)
    assert msgspec.json.encode(request) == b'{"id":1}'
