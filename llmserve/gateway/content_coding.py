"""Bodies that clients have packed: they are unpacked in a thread, one at a time, to no more than a body may have.

Content-Encoding names how a body is packed. Engines get the unpacked body, for few of them take another.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmserve.errors import BadRequest, BodyTooLarge, UnsupportedMediaType
from llmserve.http.exchange import Exchange

PIECE_BYTES = 1 << 16
MEMBERS_MAX = 1024  # of a gzip file, or frames: an empty one costs a few bytes
CODINGS_MAX = 2  # of one body
WINDOW_BYTES_MAX = 8 << 20  # RFC 9659
HEADER = "content-encoding"
GZIP, ZLIB, RAW_DEFLATE = 31, 15, -15  # zlib's names for the three formats: wbits

_WITH_ZSTD = importlib.util.find_spec("zstandard") is not None
ACCEPTED = ("gzip", "deflate", "zstd") if _WITH_ZSTD else ("gzip", "deflate")


def codings_of(exchange: Exchange[Any]) -> list[str]:
    """How the body is packed, in the order in which it was. Raises UnsupportedMediaType."""
    given = [name.strip().lower().removeprefix("x-") for name in exchange.headers.get(HEADER, "").split(",")]
    codings = [name for name in given if name not in ("", "identity")]
    if len(codings) > CODINGS_MAX or any(name not in ACCEPTED for name in codings):
        error = UnsupportedMediaType(
            f"`{HEADER}`: {exchange.headers[HEADER][:64]!r} cannot be read; this server takes {', '.join(ACCEPTED)}"
            + ("" if _WITH_ZSTD or "zstd" not in codings else ", and zstd with the extra llmserve[zstd]")
        )
        error.headers = ((b"accept-encoding", ", ".join(ACCEPTED).encode()),)
        raise error
    return codings


class Unpacker:
    """bytes_max : of an unpacked body, and of what is between two codings"""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._gate = asyncio.Lock()

    async def unpack(self, exchange: Exchange[Any], codings: Sequence[str]) -> None:
        """Put the unpacked body in the place of the packed one. Raises RequestError, or Refusal."""
        async with self._gate:
            body = await asyncio.to_thread(unpacked, exchange.body, codings, self._bytes_max)
        exchange.replace_body(body)


def unpacked(data: bytes, codings: Sequence[str], bytes_max: int) -> bytes:
    """Raises BadRequest, or BodyTooLarge as soon as it is."""
    for coding in reversed(codings):
        out = bytearray()
        try:
            for piece in _PIECES[coding](data):
                out += piece
                if len(out) > bytes_max:
                    raise BodyTooLarge(f"the unpacked body is larger than {bytes_max:,} bytes (--body-bytes-max)")
        except (zlib.error, EOFError) as error:
            raise BadRequest(f"the body is not {coding}: {error}", code="invalid_encoding") from None
        data = bytes(out)
    return data


def _gzip(data: bytes) -> Iterator[bytes]:
    return _inflated(data, GZIP)


def _deflate(data: bytes) -> Iterator[bytes]:
    """With zlib's header, as the standard says, or without, as some clients send it."""
    has_header = len(data) > 1 and data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return _inflated(data, ZLIB if has_header else RAW_DEFLATE)


def _inflated(data: bytes, wbits: int) -> Iterator[bytes]:
    """The pieces of all members. Each has PIECE_BYTES at most, however well it was packed."""
    unpacking, members = zlib.decompressobj(wbits), 1
    for start in range(0, len(data), PIECE_BYTES):
        rest = data[start : start + PIECE_BYTES]
        while rest:
            if unpacking.eof:
                if wbits != GZIP:
                    raise EOFError("there are bytes behind its end")
                rest = rest.lstrip(b"\0")  # padding of a file
                if not rest:
                    break
                members += 1
                if members > MEMBERS_MAX:
                    raise EOFError(f"it has more than {MEMBERS_MAX:,} members")
                unpacking = zlib.decompressobj(wbits)
            yield unpacking.decompress(rest, PIECE_BYTES)
            rest = unpacking.unused_data if unpacking.eof else unpacking.unconsumed_tail
    while not unpacking.eof:
        piece = unpacking.decompress(b"", PIECE_BYTES)  # what is unpacked but did not fit into the last piece
        if not piece:
            raise EOFError("it ends too early")
        yield piece


def _zstd(data: bytes) -> Iterator[bytes]:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).stream_reader(
        io.BytesIO(data), read_size=PIECE_BYTES, read_across_frames=True
    )
    try:
        while piece := reader.read(PIECE_BYTES):
            yield piece
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None


_PIECES: dict[str, Callable[[bytes], Iterator[bytes]]] = {"gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
