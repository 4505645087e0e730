"""Forms are read as Starlette reads them, on which most engines run, or not at all: limits look at that field."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from llmserve.errors import BadRequest
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call
from llmserve.wire.form_data import read_form

TYPE = "multipart/form-data; boundary=b"


def part(parameters: bytes, content: bytes) -> bytes:
    return b"--b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (parameters, content)


FILE = part(b'name="file"; filename="a.wav"', b"RIFF")
END = b"--b--\r\n"


async def starlettes(body: bytes) -> str | None:
    """The model of the form as Starlette reads it; None when it refuses the form."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    try:
        form = await MultiPartParser(Headers({"content-type": TYPE}), stream()).parse()
    except MultiPartException:
        return None
    model = form.get("model", "")
    return model if isinstance(model, str) else None


def ours(body: bytes) -> str | None:
    try:
        return read_form(body, TYPE).text("model")
    except BadRequest:
        return None


@pytest.mark.parametrize("field", ["model", "stream", "file"])
def test_a_field_that_is_read_must_be_there_once(field: str) -> None:
    once = part(b'name="model"', b"m") + part(b'name="stream"', b"true") + FILE
    again = part(b'name="%b"' % field.encode(), b"other")
    path, headers = "/v1/audio/transcriptions", {"content-type": TYPE}
    assert parse_call(path, once + END, BodyLimits(), headers).model == "m"
    for body in (once + again, again + once, once + again + again):
        with pytest.raises(BadRequest, match=f"`{field}`: the field is there more than once"):
            parse_call(path, body + END, BodyLimits(), headers)


def test_fields_that_nobody_reads_may_be_repeated() -> None:
    body = part(b'name="timestamp_granularities[]"', b"word") * 2 + part(b'name="model"', b"m") + FILE + END
    assert ours(body) == "m"


ODD = [
    *(b'name="model"', b"name=model", b'NAME="model"', b"name*=utf-8''model", b"name*0=mo; name*1=del", b'name="m"'),
    *(b'name="a"; name="model"', b'name="model"; name="a"', b'name="mo\\del"', b'name="m%6fdel"', b'filename="model"'),
    *(b'name="model"; filename="a"', b'name="x"\r\ncontent-disposition: form-data; name="model"', b'name="model', b""),
    b'name="model"\r\ncontent-type: text/plain\r\nx: name="a"',
]
CONTENTS = [
    b"one",
    b"",
    b"--b",
    b"x\r\n--bX",
    b"--b--",
    b"\r\n",
    b"\r\n\r\n",
    b'\r\nname="model"\r\n\r\ntwo',
    b"\n--b\n",
]


@given(
    st.lists(st.tuples(st.sampled_from(ODD), st.sampled_from(CONTENTS)), max_size=4),
    st.sampled_from([b"", b"\r\n", b"pre"]),
)
async def test_what_is_read_is_what_starlette_reads(parts: list[tuple[bytes, bytes]], before: bytes) -> None:
    body = before + b"".join([part(parameters, content) for parameters, content in parts]) + END
    model = ours(body)
    if model is not None:
        assert await starlettes(body) in (model, None)
