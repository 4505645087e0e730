"""A copy of objects of Kubernetes' API, kept by lists and watch events. Pure.

A list has a version. A watch from this version tells every later change, and each event has the version up to which
the copy is then complete. The API remembers versions for some minutes; a watch from an older one is told that it has
expired (410), and a new list follows.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

GONE = 410


class Metadata(msgspec.Struct, rename="camel"):
    """version : of an object or of a list, which only the API understands"""

    name: str = ""
    version: str = msgspec.field(default="", name="resourceVersion")
    deletion_timestamp: str | None = None


class Expired(Exception):
    """The API tells no changes since the version: the objects must be listed again."""


class Refused(Exception):
    """The API tells an error. code : a status of HTTP"""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Status(msgspec.Struct):
    """An error in the API's words."""

    code: int = 0
    message: str = ""
    reason: str = ""


class _List(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    items: list[msgspec.Raw] | None = None


class _Named(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


T = TypeVar("T")


class Mirror(Generic[T]):
    """Objects of one kind, by name. version : up to which they are complete; "": they must be listed"""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self.objects: dict[str, T] = {}
        self.version = ""

    def listed(self, body: bytes) -> None:
        """Take a list. Raises msgspec.MsgspecError."""
        listed = msgspec.json.decode(body, type=_List)
        self.objects = {_name(item): msgspec.json.decode(item, type=self._kind) for item in listed.items or ()}
        self.version = listed.metadata.version

    def take(self, line: bytes) -> bool:
        """Take an event of a watch. Returns whether an object has changed.

        Raises Refused for an error that the API tells. Raises Expired or msgspec.MsgspecError when the objects must
        be listed again.
        """
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                self._refuse(msgspec.json.decode(event.object, type=Status))
            metadata = msgspec.json.decode(event.object, type=_Named).metadata
            if event.type in ("ADDED", "MODIFIED"):
                self.objects[metadata.name] = msgspec.json.decode(event.object, type=self._kind)
            elif event.type == "DELETED":
                self.objects.pop(metadata.name, None)
        except (Expired, msgspec.MsgspecError):
            self.version = ""
            raise
        self.version = metadata.version or self.version
        return event.type != "BOOKMARK"

    def _refuse(self, status: Status) -> None:
        if status.code == GONE or status.reason in ("Expired", "Gone"):
            raise Expired(status.message)
        raise Refused(status.code, status.message or status.reason)


def _name(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_Named).metadata.name
