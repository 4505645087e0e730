"""Where the fields of a multipart/form-data body are: the body goes to the engine as it came, and is not copied."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value

from llmserve.errors import BadRequest

FIELDS_MAX = 64
TEXT_BYTES_MAX = 1024  # of a field that is read as a text


class Form:
    """places : where the content of each field is, by name.  repeated : fields that are there more than once

    Readers differ in which of two fields of one name counts, so that a limit would look at one, and the engine at the
    other: what is read here must be there once.
    """

    def __init__(self, data: bytes, places: dict[str, slice], repeated: set[str]) -> None:
        self._data, self._places, self._repeated = data, places, repeated

    def place(self, name: str) -> slice | None:
        """Where the content of a field is; None without one. Raises BadRequest."""
        if name in self._repeated:
            raise BadRequest(f"`{name}`: the field is there more than once", param=name, code="invalid_value")
        return self._places.get(name)

    def text(self, name: str) -> str:
        """The value of a short field; "" without one. Raises BadRequest."""
        place = self.place(name)
        if place is None:
            return ""
        if place.stop - place.start > TEXT_BYTES_MAX:
            raise BadRequest(f"`{name}`: more than {TEXT_BYTES_MAX:,} bytes", param=name, code="invalid_value")
        try:
            return self._data[place].decode()
        except UnicodeDecodeError:
            raise BadRequest(f"`{name}`: not UTF-8", param=name, code="invalid_value") from None


def read_form(data: bytes, content_type: str) -> Form:
    """Find the fields. content_type : the header, with the boundary. Raises BadRequest."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        raise BadRequest("the body must be multipart/form-data", code="invalid_value")
    delimiter = b"--" + boundary.encode()
    places: dict[str, slice] = {}
    repeated: set[str] = set()
    at = len(data) - len(data.lstrip(b"\r\n"))
    if not data.startswith(delimiter, at):
        raise _incomplete()
    for _ in range(FIELDS_MAX):
        at += len(delimiter)
        if data.startswith(b"--", at):
            return Form(data, places, repeated)
        if not data.startswith(b"\r\n", at):
            raise _incomplete()
        head_end = data.find(b"\r\n\r\n", at)
        following = data.find(b"\r\n" + delimiter, head_end + 4)
        if head_end < 0 or following < 0:
            raise _incomplete()
        name = _name_of(data[at + 2 : head_end])
        if name in places:
            repeated.add(name)
        places[name] = slice(head_end + 4, following)
        at = following + 2
    raise BadRequest(f"the body has more than {FIELDS_MAX} fields", code="invalid_value")


def _incomplete() -> BadRequest:
    return BadRequest("the body is not complete multipart/form-data", code="invalid_value")


def _name_of(head: bytes) -> str:
    """The name of a field, which every reader must find alike. Raises BadRequest."""
    parts = BytesHeaderParser().parsebytes(head)
    parameters = parts.get_params(failobj=[], header="content-disposition")
    names = [value for key, value in parameters if key.lower() == "name"]
    if len(parts.get_all("content-disposition", [])) != 1 or len(names) != 1:
        raise BadRequest("each field needs one Content-Disposition with one name", code="invalid_value")
    return collapse_rfc2231_value(names[0])
