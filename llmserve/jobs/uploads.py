"""Uploads: multipart bodies that go to the disk as they arrive, in a thread, and are never in memory as a whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from llmserve.errors import BadRequest, BodyTooLarge, RequestError, Unavailable
from llmserve.jobs.store.folder import NoRoom

if TYPE_CHECKING:
    from llmserve.jobs.store.folder import Appended

log = logging.getLogger("llmserve")

FILE_BYTES_MAX = 200 << 20
ENVELOPE_BYTES_MAX = 1 << 20  # of the fields and of what is around them
FIELD_BYTES_MAX = 4096
FIELDS_MAX = 32
WAITING_BYTES_MAX = 256 << 10  # that may wait for the disk before the client is held back
FILENAME_CHARS_MAX = 255


class FileForm:
    """The parser of a form with one file.

    on_file, on_data : called when the file begins, and with each piece of its bytes
    fields : the other fields so far.  filename : None before the file begins
    is_complete : whether the last boundary has arrived
    """

    def __init__(self, content_type: str, on_file: Callable[[], None], on_data: Callable[[bytes], None]) -> None:
        """Raise BadRequest for another content type."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadRequest("the body must be multipart/form-data", code="invalid_content_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._on_file, self._on_data = on_file, on_data
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_end": self._body_ends,
            },
        )
        self._header = [b"", b""]
        self._disposition = b""
        self._field: tuple[str, bytearray] | None = None  # name and value of the field that arrives
        self._in_file = False
        self._file_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body. Raises RequestError."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise BadRequest(f"the body is no multipart/form-data: {error}", code="invalid_body") from None

    # ---- the parser's callbacks ----

    def _part_begins(self) -> None:
        self._disposition, self._header = b"", [b"", b""]
        self._field, self._in_file = None, False

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]
        if len(self._header[1]) > FIELD_BYTES_MAX:
            raise BadRequest("a header within the body is too long", code="invalid_body")

    def _header_ends(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file":
            if self.filename is not None:
                raise BadRequest("`file`: there are two files", param="file", code="invalid_value")
            self.filename = options.get(b"filename", b"file").decode(errors="replace")[:FILENAME_CHARS_MAX]
            self._on_file()
            self._in_file = True
        elif len(self.fields) < FIELDS_MAX:
            self._field = name, bytearray()
        else:
            raise BadRequest("the body has too many fields", code="invalid_body")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file_bytes += end - start
            if self._file_bytes > FILE_BYTES_MAX:
                raise BodyTooLarge(f"a file has at most {FILE_BYTES_MAX:,} bytes")
            self._on_data(data[start:end])
        elif self._field is not None:
            self._field[1].extend(data[start:end])
            if len(self._field[1]) > FIELD_BYTES_MAX:
                raise BadRequest(f"`{self._field[0]}`: too long", param=self._field[0], code="invalid_value")

    def _part_ends(self) -> None:
        if self._field is not None:
            self.fields[self._field[0]] = self._field[1].decode(errors="replace")
            self._field = None

    def _body_ends(self) -> None:
        self.is_complete = True


class Upload:
    """A body in transit: its form is parsed as it arrives, and a thread writes the form's file.

    on_full   called with True when the client must wait, and with False when it need not any more
    form      what has arrived so far
    """

    bytes_max = FILE_BYTES_MAX + ENVELOPE_BYTES_MAX

    def __init__(self, content_type: str, new_file: Callable[[], Appended], key: str) -> None:
        self.key = key
        self.form = FileForm(content_type, self._begin_file, self._add)
        self.on_full: Callable[[bool], None] | None = None
        self._new_file = new_file
        self._file: Appended | None = None
        self._fed = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._failure: OSError | None = None
        self._full = self._discarded = self._handed = False

    def _begin_file(self) -> None:
        self._file = self._new_file()

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)

    # ---- the connection's calls ----

    def feed(self, data: bytes) -> RequestError | None:
        """Take the next bytes of the body. Returns the error with which the upload is refused."""
        try:
            self._feed(data)
        except RequestError as error:
            return error
        return None

    def _feed(self, data: bytes) -> None:
        self._fed += len(data)
        if self._fed > self.bytes_max:
            raise BodyTooLarge(f"a file has at most {FILE_BYTES_MAX:,} bytes")
        if self._failure is not None:
            raise self._storage_error(self._failure)
        self.form.feed(data)
        if self._waiting and self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        if self._waiting_bytes > WAITING_BYTES_MAX and not self._full:
            self._set_full(True)

    def discard(self) -> None:
        """Forget an upload that was not finished. May be called more than once."""
        if not self._discarded and not self._handed:
            self._discarded, self.on_full = True, None
            self._waiting.clear()
            if self._writing is None and self._file is not None:
                self._file.discard()

    # ---- the endpoint's call ----

    async def finish(self) -> Appended:
        """Write the rest; returns the file, which is the caller's from now on. Raises RequestError."""
        while self._writing is not None:
            await self._writing
        if self._failure is not None:
            raise self._storage_error(self._failure)
        if self._discarded:
            raise BadRequest("the client has left", code="client_left")
        if not self.form.is_complete:
            raise BadRequest("the body ends before its last boundary", code="invalid_body")
        if self._file is None:
            raise BadRequest("`file` is required", param="file", code="missing_required_parameter")
        self._handed = True
        return self._file

    def _set_full(self, full: bool) -> None:
        if full != self._full and self.on_full is not None:
            self._full = full
            self.on_full(full)

    @staticmethod
    def _storage_error(error: OSError) -> RequestError:
        if isinstance(error, NoRoom):
            return error.refusal
        return Unavailable(f"the file cannot be stored: {error.strerror}", code="disk", retry_after_s=5.0)

    async def _write(self) -> None:
        assert self._file is not None, "bytes of no file"
        try:
            while self._waiting and not self._discarded:
                parts, self._waiting = self._waiting, []
                self._waiting_bytes = 0
                await asyncio.to_thread(self._file.write, b"".join(parts))
                if self._waiting_bytes <= WAITING_BYTES_MAX:
                    self._set_full(False)
        except OSError as error:
            self._failure = error
            self._waiting.clear()
            self._set_full(False)
        finally:
            self._writing = None
            if self._discarded:
                self._file.discard()
