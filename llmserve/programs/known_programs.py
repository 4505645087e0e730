"""The programs of the last requests: which one a request belongs to, by its ids or by what it goes on from.

An id that the client sends is the client's word. Without ids, a request goes on from an earlier one whose answer made
the tool call whose result it brings, or is the response that it names, or whose prompt is the beginning of its own. If
the program of that earlier request is running, the new request is a branch: a program of its own, beside its parent.
Else it goes on, also from an earlier place, as when a person edits a message.

Prompts are remembered as hashes, the last MARKS_MAX of them. A first question without ids and tools is of no program:
its answer ends what there is. If it does go on, the second request begins a program. A prompt without turns does not
show that it is a first one, so each that is long enough to be known again has a program.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable

from llmserve.programs.sources import Sent
from llmserve.programs.trail import Ends, Trail

MARKS_MAX = 131_072  # places to go on from: some 25 MB
ALIKE_MAX = 32  # programs that may go on from one place: equal prompts
KINDS_MAX = 4_096
FORGOTTEN_AFTER_S = 12 * 3600.0
PAUSE_S = 60.0  # from the arrival of a completion, after which the next one begins a turn
ID_BYTES = 6
IDS = (1 << 8 * ID_BYTES) - 1
NOTHING = ("", b"")
BESIDE = "beside"
ANSWER, PROMPT, FIRST = "answer", "prompt", "first"
"""How a program was found where no id was sent: by a tool call or response, by the prompt, or not, for it is new."""


class KnownProgram:
    """A program, from its first request on.

    id       in journals and receipts, > 0
    parent   id of the program that it branched off, or that the client names; 0 for none
    running  requests that wait or run now
    mark     of its last prompt: where it goes on from
    step     of its last request
    tools    whether a request has offered tools
    seen_s   when its last request came
    """

    __slots__ = ("id", "mark", "parent", "running", "seen_s", "step", "tools")

    def __init__(self, id: int, parent: int) -> None:
        self.id, self.parent = id, parent
        self.mark = self.running = self.step = 0
        self.seen_s = 0.0
        self.tools = False

    def goes_on(self, trail: Trail, now_s: float) -> None:
        """Take one more request. A prompt without a person's message goes on with the turn; one without turns does so
        soon after the request before, for a person takes longer.
        """
        self.running += 1
        is_late = bool(trail.blocks) and now_s - self.seen_s > PAUSE_S
        self.step = 1 if is_late else trail.step or self.step + 1
        self.seen_s = now_s
        if trail.marks:
            self.mark = trail.marks[-1]
        if trail.about[1]:
            self.tools = True


class Places:
    """The programs that may go on from each place, those of the MARKS_MAX places that were noted last."""

    __slots__ = ("_programs",)

    def __init__(self) -> None:
        self._programs: OrderedDict[int, list[KnownProgram]] = OrderedDict()

    def get(self, place: int, now_s: float) -> list[KnownProgram]:
        return [program for program in self._programs.get(place, ()) if now_s - program.seen_s < FORGOTTEN_AFTER_S]

    def note(self, place: int, program: KnownProgram) -> None:
        alike = self._programs.get(place)
        if alike is None:
            self._programs[place] = [program]
            if len(self._programs) > MARKS_MAX:
                self._programs.popitem(last=False)
        elif program not in alike:
            alike.append(program)
            del alike[:-ALIKE_MAX]


class Member:
    """One request of a program, until it leaves."""

    __slots__ = ("_owner", "_places", "program")

    def __init__(self, program: KnownProgram, places: Places, owner: str) -> None:
        self.program = program
        self._places, self._owner = places, owner

    def left(self, names: Iterable[str] = ()) -> None:
        """The request has ended. names : ids of its answer and of the tool calls there, which the next one may bring"""
        self.program.running -= 1
        for name in names:
            self._places.note(hash((self._owner, name)), self.program)


class KnownPrograms:
    """secret : of the hashes, so that ids of programs are the same elsewhere; None: it is drawn

    count : called for each request with the client whose ids were sent, or with how the program was found
    """

    def __init__(self, secret: bytes | None = None, count: Callable[[str], object] = str) -> None:
        self._secret = secret or secrets.token_bytes(16)
        self._count = count
        self._last_id = secrets.randbelow(IDS)
        self._places = Places()
        self._ends = Ends(MARKS_MAX)
        self._sent: OrderedDict[int, KnownProgram] = OrderedDict()  # the one seen last is last
        self._kinds: OrderedDict[int, int] = OrderedDict()

    def arrived(self, trail: Trail, owner: str = "", previous: str = "", now_s: float = 0.0) -> Member:
        """The program of a request, which is running from now on. Its `left` must follow.

        owner : name of the client's key.  previous : id of the response that the request goes on from; "" for none
        """
        if trail.sent is not None:
            program = self._of_sent(trail, trail.sent, owner)
        else:
            if trail.blocks:
                trail.marks = self._ends.marks(trail)
            program = self._going_on(trail, owner, previous, now_s)
            if trail.marks:
                self._places.note(hash((owner, trail.marks[-1])), program)
        program.goes_on(trail, now_s)
        return Member(program, self._places, owner)

    def _of_sent(self, trail: Trail, sent: Sent, owner: str) -> KnownProgram:
        """What an agent asks beside its work, such as a title, has the same ids, no tools and a prompt of its own: it
        must not end the turn, so it is a program of its own.
        """
        self._count(sent.client)
        program = self._named_by(sent, owner)
        if program.tools and not trail.about[1] and program.mark not in trail.marks:
            program = self._named_by(sent._replace(context=f"{sent.context}\0{BESIDE}"), owner)
        return program

    def _named_by(self, sent: Sent, owner: str) -> KnownProgram:
        place = hash((owner, sent.client, sent.session, sent.context))
        program = self._sent.get(place)
        if program is None:
            own = sent.told or self._hash(owner, sent.client, sent.session, sent.context)
            program = self._sent[place] = KnownProgram(own, self._parent_of(sent, owner))
            if len(self._sent) > MARKS_MAX:
                self._sent.popitem(last=False)
        else:
            self._sent.move_to_end(place)
        return program

    def _parent_of(self, sent: Sent, owner: str) -> int:
        """The program in which this one was begun: another context of its session, or another session."""
        if sent.session and sent.context:
            return self._hash(owner, sent.client, sent.session, sent.parent)
        return self._hash(owner, sent.client, sent.parent, "") if sent.parent else 0

    def _going_on(self, trail: Trail, owner: str, previous: str, now_s: float) -> KnownProgram:
        """The program from which a request without ids goes on, or a new one."""
        by, mark, found = ANSWER, 0, self._named((previous, trail.tool_call), owner, now_s)
        if not found:
            by, (mark, found) = PROMPT, self._begun_alike(trail.marks, owner, now_s)
        self._count(by if found else FIRST)
        idle = [program for program in found if not program.running]
        if not idle:
            self._last_id = self._last_id % IDS + 1
            return KnownProgram(self._last_id, found[-1].id if found else 0)
        return next((program for program in idle if program.mark == mark), idle[-1])

    def _named(self, names: Iterable[str], owner: str, now_s: float) -> list[KnownProgram]:
        """The only program whose answer had one of these ids: some engines give one id to many tool calls."""
        for name in names:
            if name and len(found := self._places.get(hash((owner, name)), now_s)) == 1:
                return found
        return []

    def _begun_alike(self, marks: tuple[int, ...], owner: str, now_s: float) -> tuple[int, list[KnownProgram]]:
        """The mark of the longest beginning of the prompt that was a prompt itself, and the programs that sent it."""
        for mark in marks[-2::-1]:
            if found := self._places.get(hash((owner, mark)), now_s):
                return mark, found
        return 0, []

    def kind_of(self, trail: Trail) -> int:
        """A hash of the system prompt's beginning and the tools; 0 without either."""
        if trail.about == NOTHING:
            return 0
        place = hash(trail.about)
        kind = self._kinds.get(place)
        if kind is None:
            system, tools = trail.about
            kind = self._kinds[place] = self._hash(system, tools.decode(errors="replace"))
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        return kind

    def _hash(self, *parts: str) -> int:
        text = "\0".join(parts).encode(errors="replace")
        return int.from_bytes(hashlib.blake2b(text, digest_size=ID_BYTES, key=self._secret).digest()) or 1
