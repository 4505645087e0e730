"""What clients send of their sessions: a table, one entry a client. To add a client, add an entry.

An entry names headers and fields of the body. A session may have several contexts at once, such as those of an agent
and of its sub-agents: where a client names the context, too, each is a program of its own. A site whose clients name
sessions in a way of their own has one more entry, by the setting `session_from`. Ids are hashed where they are
remembered; none is logged or kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from llmserve.errors import ConfigError

VALUE_CHARS_MAX = 256  # of an id; a longer one counts as none
FIELD_BYTES_MAX = 4 << 10  # of an object in the body that may hold an id
PROGRAM_HEADER = "x-llmserve-program"  # also of answers: the program to which the request was counted
SESSION_HEADER = "x-llmserve-session"
OWN, SITE = "llmserve", "site"
_TOLD = re.compile(r"[0-9a-f]{12}")


class Sent(NamedTuple):
    """The ids of one request, as its client has sent them.

    client   name of the entry
    context  one of several of the session; "" for the first, or the only one
    parent   the context in which this one was begun; without a context the session
    """

    client: str
    session: str
    context: str = ""
    parent: str = ""

    @property
    def told(self) -> int:
        """The program, if the client sends back what an answer has told; else 0."""
        sends_back = self.client == OWN and not self.session and _TOLD.fullmatch(self.context)
        return int(self.context, 16) if sends_back else 0


def as_sent(value: str) -> str:
    return value


_SESSION = re.compile(r"_session_([\w-]+)$")
_MADE_FOR_ONE = re.compile(r"(?=.*\d)[\w:.-]*[0-9a-fA-F-]{16,}[\w:.-]*")


def of_claude_user(value: str) -> str:
    """The session in the `user_id` of Claude Code: behind `_session_`, or a member of an object in JSON."""
    if value.startswith("{"):
        return _member(value.encode(), ("session_id",))
    match = _SESSION.search(value)
    return match[1] if match is not None else ""


def made_for_one(value: str) -> str:
    """An id that was drawn, such as a UUID. Words that many conversations share, such as an app's name, are none."""
    return value if _MADE_FOR_ONE.fullmatch(value) else ""


class Source(NamedTuple):
    """How a client names its sessions. The first name that a request has counts.

    client    name of the entry, in metrics
    sessions  headers
    contexts  headers that name one of several contexts of a session
    parents   headers that name the context in which this one was begun
    fields    places in the body, such as metadata.user_id, when no header has the session
    context_fields, parent_fields  likewise
    reads     finds the session in the value; "" for none
    """

    client: str
    sessions: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    context_fields: tuple[str, ...] = ()
    parent_fields: tuple[str, ...] = ()
    reads: Callable[[str], str] = as_sent


SOURCES = (
    Source(OWN, (SESSION_HEADER,), (PROGRAM_HEADER,)),
    Source(
        "claude_code",
        ("x-claude-code-session-id",),
        ("x-claude-code-agent-id",),
        ("x-claude-code-parent-agent-id",),
        ("metadata.user_id",),
        reads=of_claude_user,
    ),
    # Codex names the thread, and the root of its threads. Before 2026 both headers had one value, with underscores.
    Source(
        "codex",
        ("session-id", "session_id"),
        ("thread-id", "conversation_id"),
        ("x-codex-parent-thread-id",),
    ),
    Source(
        "dynamo",
        ("x-dynamo-session-id",),
        parents=("x-dynamo-parent-session-id",),
        fields=("nvext.agent_context.session_id",),
        context_fields=("nvext.agent_context.trajectory_id",),
        parent_fields=("nvext.agent_context.parent_trajectory_id",),
    ),
    # vllm-router's first header, also of OpenCode; then what OpenCode, Pi and others send beside or instead of it.
    Source("session_header", ("x-session-id", "x-session-affinity", "x-opencode-session")),
    Source("thunder_agent", fields=("program_id",)),
    Source("vllm", fields=("session_id", "session_params.session_id")),
    # OpenAI's clients also send keys that all their conversations share, to find a cached prefix.
    Source("prompt_cache_key", fields=("prompt_cache_key",), reads=made_for_one),
)
"""In the order in which they are tried: what names a context before what names only its session."""

_FORMS = {"header": re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII), "body": re.compile(r"[\w-]+(\.[\w-]+)*")}


class Sources:
    """The entries that a server reads, in their order.

    headers  all that may hold ids.  fields : of the body, likewise
    """

    def __init__(self, entries: Sequence[Source] = SOURCES) -> None:
        self.headers = tuple([name for entry in entries for name in (*entry.sessions, *entry.contexts)])
        self.fields = tuple(dict.fromkeys([place.partition(".")[0] for entry in entries for place in entry.fields]))
        self._in_headers = [entry for entry in entries if entry.sessions]
        self._in_body = [entry for entry in entries if entry.fields]

    def sent_in_headers(self, headers: Mapping[str, str]) -> Sent | None:
        """The ids in a request's headers, which have lower-case names; None: there are none."""
        for entry in self._in_headers:
            session, context = _first(headers, entry.sessions), _first(headers, entry.contexts)
            if session or context:
                return _sent(entry, session, context, _first(headers, entry.parents))
        return None

    def sent_in_body(self, fields: Mapping[str, bytes]) -> Sent | None:
        """The ids in a request's body; None: there are none. fields : the JSON of those of `fields` that it has"""
        for entry in self._in_body:
            for place in entry.fields:
                if session := entry.reads(_at(fields, place)):
                    context = [_at(fields, of_context) for of_context in entry.context_fields]
                    parent = [_at(fields, of_parent) for of_parent in entry.parent_fields]
                    return _sent(entry, session, "".join(context), "".join(parent))
        return None


KNOWN = Sources()


def sources_of(session_from: Iterable[str]) -> Sources:
    """The table with the entry of a site, behind llmserve's own headers. session_from : the setting

    Raises ConfigError.
    """
    names: dict[str, list[str]] = {"header": [], "body": []}
    for text in session_from:
        kind, _, name = text.partition(":")
        if kind not in _FORMS or _FORMS[kind].fullmatch(name) is None:
            raise ConfigError(
                f"session_from: {text!r} is not `header:NAME` or `body:FIELD`, such as body:metadata.chat"
            )
        names[kind].append(name.lower() if kind == "header" else name)
    if not any(names.values()):
        return KNOWN
    site = Source(SITE, tuple(names["header"]), fields=tuple(names["body"]))
    return Sources((SOURCES[0], site, *SOURCES[1:]))


def _sent(source: Source, session: str, context: str, parent: str) -> Sent:
    """A session's first context may have the name of the session, or none: it is the same."""
    return Sent(
        source.client, session, "" if context == session else context, "" if context and parent == session else parent
    )


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((_id_of(value) for name in names if (value := headers.get(name))), "")


def _at(fields: Mapping[str, bytes], place: str) -> str:
    name, *path = place.split(".")
    data = fields.get(name, b"")
    return _member(data, tuple(path)) if data and len(data) <= FIELD_BYTES_MAX else ""


def _member(data: bytes, path: tuple[str, ...]) -> str:
    """The id at this path of an object in JSON; "" for what is no id."""
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return _id_of(value)


def _id_of(value: Any) -> str:
    if type(value) is int:
        return str(value)
    return value if isinstance(value, str) and len(value) <= VALUE_CHARS_MAX else ""
