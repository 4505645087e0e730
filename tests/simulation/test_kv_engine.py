"""A simulated engine with a KV cache: sums by hand, and a second engine that goes step by step and block by block."""

import heapq
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bins.profile import resolve
from llmserve.request import BLOCK_TOKENS, Batch, EngineInfo, Request
from llmserve.scheduling.messages import AnswerBegan, Event, RequestEnded
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.kv_engine import KVEngine, KVLimits
from llmserve.simulation.kv_pool import KVPool, Text, hashes


def costs(*, context: float = 0.0, prefill_s: float = 0.0) -> Costs:
    """A step takes 1 s and 0.5 s a sequence, and `context` a token of context; a token of a prompt 0.01 s."""
    steps = [1.0 + 0.5 * count for count in range(9)]
    return Costs(
        steps,
        [10.0] * 9,
        prefill_s,
        prefill_s_per_token=0.01,
        prefill_s_per_context_token=0.0001,
        step_s_per_context_token=context,
    )


def engine(
    texts: list[Text],
    answers: list[int],
    *,
    kv_tokens: int = 10**6,
    step_tokens: int = 100,
    sequences: int = 8,
    **kw: float,
) -> KVEngine:
    limits = KVLimits(kv_tokens, step_tokens, sequences)
    return KVEngine(EngineInfo("e", sequences, False), answers, costs(**kw), limits, texts=texts)


def own(request_id: int, tokens: int) -> Text:
    return ((request_id, tokens),)


def batch(*request_ids: int, turn: float | None = None) -> Batch:
    requests = tuple([Request(request_id) for request_id in request_ids])
    return Batch(1, 0, requests, 0.0, len(requests), turn=turn)


def events(engine: KVEngine) -> list[tuple[float, Event]]:
    seen = []
    while (at_s := engine.next_end_s) is not None:
        if (event := engine.end(at_s)) is not None:
            seen.append((at_s, event))
    return seen


def advance(engine: KVEngine, until_s: float) -> None:
    """Let the steps end that end before a time; no request does."""
    while (at_s := engine.next_end_s) is not None and at_s < until_s:
        assert engine.end(at_s) is None


def ends(engine: KVEngine) -> dict[int, float]:
    return {event.request_id: at_s for at_s, event in events(engine) if isinstance(event, RequestEnded)}


# ---- steps ----


def test_a_prompt_takes_its_tokens_and_their_positions_and_its_last_step_gives_a_token() -> None:
    alone = engine([own(0, 50)], [1])
    alone.start(batch(0), 2.0)
    assert ends(alone)[0] == pytest.approx(2 + 1 + 50 * 0.01 + 0.0001 * sum(range(50)))


def test_a_long_prompt_comes_in_chunks_of_a_step_each() -> None:
    alone = engine([own(0, 250)], [1])
    alone.start(batch(0), 0.0)
    assert ends(alone)[0] == pytest.approx(3 * 1 + 250 * 0.01 + 0.0001 * sum(range(250)))


def test_each_further_token_reads_one_more_token_of_context() -> None:
    alone = engine([own(0, 50)], [4], context=0.001)
    alone.start(batch(0), 0.0)
    prefill_s = 1 + 50 * 0.01 + 0.0001 * sum(range(50))
    assert ends(alone)[0] == pytest.approx(prefill_s + 3 * 1.5 + 0.001 * (51 + 52 + 53))


def test_a_request_alone_takes_the_time_that_is_said_of_it() -> None:
    profile = resolve("h100-llama-3.1-8b-contexts")
    alone = KVEngine(EngineInfo("e", 8, False), [500.4], Costs.of(profile, 8), KVLimits(10**6), texts=[own(0, 50_000)])
    alone.start(batch(0), 0.0)
    by_hand = 7 * 0.0065 + 50_000 * 26e-6 + 1.05e-9 * sum(range(50_000))
    by_hand += 499 * (0.0065 + 48e-6) + 52e-9 * sum(range(50_001, 50_500))
    assert float(alone.alone_s(500.4, 50_000)) == pytest.approx(by_hand, abs=1e-9)
    assert ends(alone)[0] == pytest.approx(by_hand, abs=1e-6)


def test_sequences_decode_first_and_prompts_get_the_rest_of_the_step() -> None:
    """The second prompt of 150 has 99 tokens of a step beside the first's token, then its last 51."""
    both = engine([own(0, 10), own(1, 150)], [4, 1])
    both.start(batch(0), 0.0)
    advance(both, 0.5)
    both.start(batch(1), 0.5)
    first_s = 1 + 0.1 + 0.0001 * sum(range(10))
    second_s = first_s + 1.5 + 0.99 + 0.0001 * sum(range(99))
    third_s = second_s + 1.5 + 0.51 + 0.0001 * sum(range(99, 150))
    assert ends(both) == pytest.approx({1: third_s, 0: third_s + 1.5})


def test_a_request_joins_at_the_end_of_the_step_in_progress() -> None:
    both = engine([own(0, 1), own(1, 1)], [10, 1])
    both.start(batch(0), 0.0)
    advance(both, 1.01 + 2 * 1.5 + 0.1)
    both.start(batch(1), 1.01 + 2 * 1.5 + 0.1)
    assert ends(both)[1] == pytest.approx(1.01 + 3 * 1.5 + 1.5 + 0.01)


def test_a_prefill_begins_with_its_fixed_seconds() -> None:
    alone = engine([own(0, 250)], [1], prefill_s=5.0)
    alone.start(batch(0), 0.0)
    assert ends(alone)[0] == pytest.approx(5 + 3 * 1 + 250 * 0.01 + 0.0001 * sum(range(250)))


def test_requests_beyond_the_sequences_wait_by_their_turns() -> None:
    full = engine([own(number, 1) for number in range(4)], [2, 2, 2, 2], sequences=1)
    for request_id, turn in ((0, None), (1, 3.0), (2, 2.0), (3, 1.0)):
        full.start(batch(request_id, turn=turn), 0.0)
    assert list(ends(full)) == [0, 3, 2, 1]


def test_a_stream_begins_with_the_last_step_of_its_prompt() -> None:
    limits = KVLimits(10**6, 100, 8)
    streaming = KVEngine(EngineInfo("e", 8, False), [2], costs(), limits, texts=[own(0, 50)], streaming={0})
    streaming.start(batch(0), 0.0)
    first, last = events(streaming)
    ended = RequestEnded("e", 0, "completed", 2, cached_tokens=0, decode_s=last[0] - first[0])
    assert (first[1], last[1]) == (AnswerBegan(0), ended)
    assert last[0] - first[0] == pytest.approx(1.5)


def test_an_aborted_request_leaves_at_the_end_of_the_step_and_gives_no_event() -> None:
    both = engine([own(0, 1), own(1, 1)], [10, 3])
    both.start(batch(0, 1), 0.0)
    advance(both, 1.5)
    both.abort(0, 1.5)
    assert ends(both) == pytest.approx({1: 1.02 + 2.0 + 1.5})
    assert both.pool.free == both.pool.blocks


def test_a_request_that_waits_is_aborted_at_once() -> None:
    full = engine([own(0, 1), own(1, 1)], [2, 2], sequences=1)
    full.start(batch(0, 1), 0.0)
    full.abort(1, 0.1)
    assert list(ends(full)) == [0]


def test_busy_time_and_energy_are_those_of_the_steps() -> None:
    alone = engine([own(0, 50)], [3])
    alone.start(batch(0), 4.0)
    ended_s = ends(alone)[0]
    assert alone.busy_s == pytest.approx(ended_s - 4.0)
    assert alone.energy_j(elapsed_s=100.0) == pytest.approx(10 * alone.busy_s)
    assert alone.utilisation(100.0) == pytest.approx(alone.busy_s / 800)


# ---- memory ----


def test_a_prefix_is_computed_once_and_the_last_token_always() -> None:
    system = ("system", 64)
    twice = engine([(system, (0, 10)), (system, (1, 10)), (system, (0, 10))], [1, 1, 1])
    for request_id in range(3):
        twice.start(batch(request_id), 10.0 * request_id)
        ended_s = ends(twice)[request_id]
        computed = (74, 10, 10)[request_id]
        assert ended_s - 10 * request_id == pytest.approx(1 + 0.01 * computed + 0.0001 * sum(range(74 - computed, 74)))
    assert (twice.prompt_tokens, twice.cached_tokens) == (3 * 74, 2 * 64)


def test_a_session_finds_its_earlier_prompts_and_answers() -> None:
    session = engine([(("s", 40),), (("s", 100),)], [25, 1])
    for request_id in range(2):
        session.start(batch(request_id), 100.0 * request_id)
        ends(session)
    assert session.cached_tokens == 64  # of the 40 + 24 tokens that were computed; the last answered token was not


def test_what_was_freed_first_is_evicted_first_from_its_end() -> None:
    """Ten blocks: two texts of 4 and 3 blocks are cached; a third of 5 needs 2 of the first's, its last."""
    full = engine([own(0, 64), own(1, 48), own(2, 70), own(0, 65), own(1, 49)], [1] * 5, kv_tokens=160)
    for request_id in range(3):
        full.start(batch(request_id), 100.0 * request_id)
        ends(full)
    assert full.pool.evicted == 2
    assert (full.pool.cached_tokens(own(0, 65)), full.pool.cached_tokens(own(1, 49))) == (32, 48)


def test_a_prompt_that_does_not_fit_waits_for_the_whole_of_its_room() -> None:
    full = engine([own(0, 64), own(1, 100)], [3, 1], kv_tokens=160)
    full.start(batch(0, 1), 0.0)
    first_s, second_s = ends(full).values()
    assert second_s == pytest.approx(first_s + 1 + 1.0 + 0.0001 * sum(range(100)))
    assert full.preemptions == 0


def test_the_last_sequence_is_preempted_and_computes_its_answer_again() -> None:
    """Four blocks: each prompt has one; the first needs a third when both have grown to two."""
    full = engine([own(0, 16), own(1, 16)], [30, 20], kv_tokens=64)
    full.start(batch(0, 1), 0.0)
    both_s = 1 + 0.32 + 2 * 0.0001 * sum(range(16))
    grown_s = both_s + 16 * 2.0  # each has 17 tokens of answer: 33 tokens with the next
    alone_s = grown_s + 13 * 1.5
    again_s = alone_s + 1 + 0.01 * (33 - 16) + 0.0001 * sum(range(16, 33))  # the first block was not needed
    assert ends(full) == pytest.approx({0: alone_s, 1: again_s + 2 * 1.5})
    assert (full.preemptions, full.pool.free) == (1, 4)


def test_a_request_that_no_cache_could_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0 has 70 tokens, more than the KV cache of e"):
        engine([own(0, 60)], [10], kv_tokens=64).start(batch(0), 0.0)


# ---- beside an engine that goes step by step and block by block ----


@dataclass
class Sessions:
    """Requests of sessions. gaps_s : by request id, after the end of the session's request before. after : its next."""

    gaps_s: list[float]
    after: dict[int, int]

    def first(self) -> list[tuple[float, int]]:
        """A heap of the first arrivals."""
        later = set(self.after.values())
        return sorted((gap_s, number) for number, gap_s in enumerate(self.gaps_s) if number not in later)

    def go_on(self, ahead: list[tuple[float, int]], request_id: int, now_s: float) -> None:
        if (number := self.after.get(request_id)) is not None:
            heapq.heappush(ahead, (now_s + self.gaps_s[number], number))


@dataclass(eq=False)
class Plain:
    """A sequence of the plain engine. names : of its blocks' contents, from the beginning.  slots : its blocks"""

    request_id: int
    names: list[object]
    tokens: int
    answer: int
    answered: int = 0
    computed: int = 0
    target: int = 0
    slots: list["Slot"] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """A block: how many use it, and the name of its contents."""

    used: int = 0
    name: object = None


class PlainEngine:
    """The same rules with a list of blocks in the order in which they became free, one step at a time."""

    def __init__(self, texts: list[Text], answers: list[int], costs: Costs, limits: KVLimits) -> None:
        self.costs, self.limits = costs, limits
        self.texts, self.answers = texts, answers
        self.free = [Slot() for _ in range(limits.kv_tokens // BLOCK_TOKENS)]
        self.cached: dict[object, Slot] = {}
        self.hits: dict[int, int] = {}  # when first admitted
        self.preemptions = 0

    def run(self, sessions: Sessions) -> dict[int, float]:
        ahead, now_s = sessions.first(), 0.0
        waiting: deque[Plain] = deque()
        running: list[Plain] = []
        ended = {}
        while ahead or waiting or running:
            if not waiting and not running:
                now_s = max(now_s, ahead[0][0])
            while ahead and ahead[0][0] <= now_s:
                waiting.append(self.sequence(heapq.heappop(ahead)[1]))
            decoding, chunks = self.step(waiting, running)
            now_s += self.costs.step_s[len(decoding)]
            for plain in decoding:
                now_s += self.costs.step_s_per_context_token * (plain.tokens + plain.answered)
                plain.computed = plain.tokens + plain.answered
                self.name(plain)
                plain.answered += 1
                plain.target = plain.computed
            for plain, tokens in chunks:
                for position in range(plain.computed, plain.computed + tokens):
                    now_s += self.costs.prefill_s_per_token + self.costs.prefill_s_per_context_token * position
                plain.computed += tokens
                plain.answered += plain.computed == plain.target
            for plain in [plain for plain in running if plain.answered >= plain.answer]:
                ended[plain.request_id] = now_s
                running.remove(plain)
                self.leave(plain)
                sessions.go_on(ahead, plain.request_id, now_s)
        return ended

    def sequence(self, request_id: int) -> Plain:
        text = self.texts[request_id]
        names: list[object] = []
        for name, tokens in text[:-1]:
            names += [(name, text[: text.index((name, tokens))])] * tokens
        tokens = sum([tokens for _, tokens in text])
        names += [(text[-1][0], text[:-1])] * (tokens + self.answers[request_id] - len(names))
        blocks = [
            (start, names[start + BLOCK_TOKENS - 1]) for start in range(0, len(names) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        ]
        return Plain(request_id, list(blocks), tokens, self.answers[request_id], target=tokens)

    def step(self, waiting: deque[Plain], running: list[Plain]) -> tuple[list[Plain], list[tuple[Plain, int]]]:
        preempted = False
        for plain in list(running):
            while plain in running and plain.computed >= plain.target:
                if self.take(plain, plain.tokens + plain.answered):
                    break
                last = running.pop()
                self.leave(last)
                last.computed, last.target = 0, last.tokens + last.answered
                waiting.appendleft(last)
                preempted = True
                self.preemptions += 1
        decoding = [plain for plain in running if plain.computed >= plain.target]
        budget = self.limits.step_tokens - len(decoding)
        chunks = []
        for plain in running:
            if plain.computed < plain.target and budget:
                chunks.append((plain, min(budget, plain.target - plain.computed)))
                budget -= chunks[-1][1]
                self.name(plain, plain.computed + chunks[-1][1])
        while waiting and budget and not preempted and len(running) < self.limits.sequences:
            plain = waiting[0]
            if not self.admit(plain):
                break
            running.append(waiting.popleft())
            chunks.append((plain, min(budget, plain.target - plain.computed)))
            budget -= chunks[-1][1]
            self.name(plain, plain.computed + chunks[-1][1])
        return decoding, chunks

    def admit(self, plain: Plain) -> bool:
        found: list[Slot] = []
        for name in plain.names[: (plain.target - 1) // BLOCK_TOKENS]:
            if name not in self.cached:
                break
            found.append(self.cached[name])
        needed = -(-plain.target // BLOCK_TOKENS) - len(found) + sum([not slot.used for slot in found])
        if needed > len(self.free):
            return False
        for slot in found:
            if not slot.used:
                self.free.remove(slot)
            slot.used += 1
        plain.slots = found
        plain.computed = BLOCK_TOKENS * len(found)
        self.hits.setdefault(plain.request_id, plain.computed)
        assert self.take(plain, plain.target)
        return True

    def take(self, plain: Plain, tokens: int) -> bool:
        more = -(-tokens // BLOCK_TOKENS) - len(plain.slots)
        if more > len(self.free):
            return False
        for _ in range(more):
            slot = self.free.pop(0)
            if self.cached.get(slot.name) is slot:
                del self.cached[slot.name]
            slot.name, slot.used = None, 1
            plain.slots.append(slot)
        return True

    def name(self, plain: Plain, computed: int | None = None) -> None:
        """The full blocks of what is computed can be found."""
        full = (plain.computed if computed is None else computed) // BLOCK_TOKENS
        for slot, name in zip(plain.slots[:full], plain.names, strict=False):
            if slot.name is None:
                slot.name = name
                self.cached.setdefault(name, slot)

    def leave(self, plain: Plain) -> None:
        for slot in reversed(plain.slots):
            slot.used -= 1
            if not slot.used:
                self.free.append(slot)
        plain.slots = []


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Text], list[int], Sessions, KVLimits]:
    """Sessions over two shared prefixes in a small cache; the requests of a session come one after the other."""
    blocks = draw(st.integers(12, 40))
    texts: list[Text] = []
    answers: list[int] = []
    gaps_s: list[float] = []
    last: dict[int, int] = {}
    after: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for number in range(draw(st.integers(1, 14))):
        session = draw(st.integers(0, 5))
        prefix = (("kind", session % 2), 20 + 30 * (session % 2))
        size = sizes.get(session, 0) + draw(st.integers(1, 60))
        answer = draw(st.integers(1, 40))
        if prefix[1] + size + answer > BLOCK_TOKENS * blocks:
            session, size, answer = 100 + number, 8, 4
        if session in last:
            after[last[session]] = number
        last[session] = number
        texts.append((prefix, (session, size)))
        answers.append(answer)
        sizes[session] = size + answer
        gaps_s.append(draw(st.sampled_from([0.0, 0.700123, 11.300457, 60.007891])))
    limits = KVLimits(BLOCK_TOKENS * blocks, draw(st.integers(10, 60)), draw(st.integers(1, 8)))
    return texts, answers, Sessions(gaps_s, after), limits


@given(worlds())
def test_stretches_and_runs_of_blocks_give_what_single_steps_and_blocks_give(
    world: tuple[list[Text], list[int], Sessions, KVLimits],
) -> None:
    texts, answers, sessions, limits = world
    fast = KVEngine(EngineInfo("e", 8, False), answers, costs(context=0.001), limits, texts=texts)
    ahead = sessions.first()
    got = {}
    while ahead or fast.next_end_s is not None:
        next_s = fast.next_end_s
        if next_s is None or (ahead and ahead[0][0] < next_s):
            at_s, number = heapq.heappop(ahead)
            fast.start(batch(number), at_s)
        elif isinstance(event := fast.end(next_s), RequestEnded):
            got[event.request_id] = next_s
            sessions.go_on(ahead, event.request_id, next_s)
    plain = PlainEngine(texts, answers, costs(context=0.001), limits)
    assert got == pytest.approx(plain.run(sessions))
    assert (fast.cached_tokens, fast.preemptions) == (sum(plain.hits.values()), plain.preemptions)
    assert fast.pool.free == fast.pool.blocks == len(plain.free)


# ---- the cache alone ----


def test_a_part_of_which_nothing_is_left_is_forgotten() -> None:
    pool = KVPool(4)
    for number in range(100):
        sequence = pool.admit(own(number, 33))
        assert sequence is not None
        sequence.computed = 33
        pool.release(sequence)
    assert len(pool._parts) <= 2


def test_texts_share_the_hashes_of_the_blocks_that_they_share() -> None:
    system = ("system", 300)
    one, other, longer = (hashes(text, 128) for text in ((system, (0, 500)), (system, (1, 500)), (system, (0, 600))))
    assert (len(one), len(longer)) == (6, 7)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False, False]
    assert longer[:6] == one
    assert len({*one, *other, *longer}) == 2 + 4 + 4 + 1


def test_answers_begin_by_an_event_only_where_the_scheduler_wants_to_hear_of_it() -> None:
    texts, limits = [own(0, 50), own(1, 50)], KVLimits(10**6, 100, 8)
    streaming = KVEngine(
        EngineInfo("e", 8, False),
        [2, 2],
        costs(),
        limits,
        texts=texts,
        streaming={0, 1},
        wants=lambda request_id: request_id == 1,
    )
    streaming.start(batch(0, 1), 0.0)
    began = [event for _, event in events(streaming) if isinstance(event, AnswerBegan)]
    assert began == [AnswerBegan(1)]
