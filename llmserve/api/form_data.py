"""Where the fields of a multipart/form-data body are: the body goes to the engine as it came, and is not copied."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser

from llmserve.errors import BadRequest

FIELDS_MAX = 64
TEXT_BYTES_MAX = 1024  # of a field that is read as a text


class Form:
    """places : where the content of each field is, by name; of a field that is there twice the first"""

    def __init__(self, data: bytes, places: dict[str, slice]) -> None:
        self.places = places
        self._data = data

    def text(self, name: str) -> str:
        """The value of a short field; "" without one. Raises BadRequest."""
        place = self.places.get(name)
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
    at = data.find(delimiter)
    for _ in range(FIELDS_MAX):
        at += len(delimiter)
        if data[at : at + 2] == b"--":
            return Form(data, places)
        head_end = data.find(b"\r\n\r\n", at)
        following = data.find(b"\r\n" + delimiter, head_end + 2)
        if at < len(delimiter) or head_end < 0 or following < 0:
            raise BadRequest("the body is not complete multipart/form-data", code="invalid_value")
        head = BytesHeaderParser().parsebytes(data[at:head_end].lstrip())
        name = head.get_param("name", header="content-disposition")
        if isinstance(name, str):
            places.setdefault(name, slice(head_end + 4, max(head_end + 4, following)))
        at = following + 2
    raise BadRequest(f"the body has more than {FIELDS_MAX} fields", code="invalid_value")
