"""The demo model's corpus: prompts, each with its only right answer. Standard library only.

Every answer, and its length, is a function of the prompt: "Count from 3 to 9." has one right answer. Answers can
therefore be checked by exact match, and lengths can be predicted, as a demonstration of length-aware batching
needs. A length is drawn first (lognormal, 2 to 400 tokens), then a family that allows the length, then the prompt.
The lengths are therefore widely spread for any set of families.

The hash of a prompt decides its split (`is_held_out`), so no prompt is in both splits, for any seeds.
llmserve/demo/prompts.txt, for `llmserve bench`, has the first 2,000 held-out prompts of seed 0.
"""

import hashlib
import math
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NUMBER_MAX = 250  # the tokenizer has one token per number 0..250; the corpus has no larger number
TARGET_TOKENS_MEDIAN, TARGET_TOKENS_SIGMA, TARGET_TOKENS_MAX = 65.0, 1.5, 400
CHAT_SHARE = 0.08
HELD_OUT_SHARE = 0.1

# Answers recite a list in this order, from the first item, and start over after the last item. No word is in two
# lists, so that a word determines the next word.
LISTS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in {
        "animals": "ant bear cat dog eagle fox goat horse iguana jaguar kangaroo lion mouse newt otter panda "
        "quail rabbit seal tiger urchin viper wolf zebra",
        "fruits": "apple banana cherry date fig grape guava kiwi lemon lime mango melon nectarine papaya peach "
        "pear pineapple plum raspberry strawberry",
        "vegetables": "artichoke bean beetroot broccoli cabbage carrot celery cucumber garlic kale leek lettuce "
        "onion parsnip pea potato pumpkin radish spinach turnip",
        "colors": "amber beige black blue brown crimson gray green indigo magenta maroon pink purple red scarlet "
        "teal turquoise white yellow",
        "cities": "Amsterdam Berlin Cairo Dublin Geneva Helsinki Istanbul Jakarta Kyoto Lisbon Madrid Nairobi "
        "Oslo Paris Quito Rome Seoul Tokyo Vienna Warsaw",
        "countries": "Argentina Brazil Canada Denmark Egypt France Germany Hungary India Japan Kenya Latvia "
        "Mexico Norway Oman Peru Romania Spain Thailand Uruguay Vietnam Zambia",
        "instruments": "accordion banjo cello drum flute guitar harp lute mandolin oboe piano recorder saxophone "
        "trumpet ukulele violin xylophone",
        "tools": "anvil axe chisel drill file hammer knife ladder mallet pliers rake saw screwdriver shovel "
        "spade wrench",
        "sports": "archery badminton boxing cricket diving fencing golf hockey judo karate rowing rugby sailing "
        "skiing soccer surfing tennis volleyball wrestling",
        "flowers": "aster begonia daisy iris jasmine lavender lily marigold orchid pansy peony poppy rose "
        "snowdrop sunflower tulip violet",
    }.items()
}
WORDS: tuple[str, ...] = tuple(word for words in LISTS.values() for word in words)
# A word is one token, so the model must learn the letters of each word. Few, short words are learnt in minutes.
SPELLABLE: tuple[str, ...] = tuple(w for kind in ("animals", "fruits", "colors") for w in LISTS[kind] if len(w) <= 6)


@dataclass(frozen=True, slots=True)
class Example:
    """A user message and the only right answer to it."""

    prompt: str
    answer: str
    family: str


# --- phrasing ---------------------------------------------------------------------------------------------

_OPENERS = ("",) * 10 + (
    "please ", "please ", "could you ", "can you ", "would you ", "now ", "I want you to ", "I need you to ",
    "hey, ", "hi, ", "kindly ", "go ahead and ", "I'd like you to ", "just ", "okay, ", "your task: ",
)  # fmt: skip
_CLOSERS = (".", ".", ".", "", "", "!", " please.", ", please.", ". Thanks!", ". Thank you.", " for me.")
_TELL = ("write", "write down", "give me", "show me", "print", "tell me", "output", "say", "type", "produce")


def _phrase(rng: random.Random, task: str, *, closed: bool = True) -> str:
    """Return a prompt for `task` (an imperative, lower case). closed=False: nothing follows the task's text."""
    opener = rng.choice(_OPENERS)
    question = opener.startswith(("could", "can", "would"))
    closer = "" if not closed else "?" if question else rng.choice(_CLOSERS)
    text = opener + task.replace("{tell}", rng.choice(_TELL)) + closer
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text


def _join(numbers: range) -> str:
    return ", ".join(map(str, numbers))


# --- families: (rng, approximate answer tokens) -> (prompt, answer) -----------------------------------------

_COUNT_UP = (
    "count from {a} to {b}", "count up from {a} to {b}", "count {a} to {b}", "count upwards from {a} to {b}",
    "start at {a} and count to {b}", "start at {a} and count up until {b}", "count from {a} until you reach {b}",
    "count from {a} through {b}", "begin at {a} and count up to {b}", "{tell} the numbers from {a} to {b}",
    "{tell} all numbers from {a} to {b}", "{tell} every number between {a} and {b}",
    "{tell} the whole numbers from {a} up to {b}", "{tell} the integers from {a} to {b}",
    "{tell} each integer from {a} through {b}", "{tell} the numbers {a} to {b} in order",
    "list the numbers from {a} to {b}", "enumerate {a} to {b}", "list all integers between {a} and {b}",
    "do a count from {a} to {b}", "{tell} {a} to {b} in ascending order",
)  # fmt: skip
_COUNT_TO = (
    "count to {b}", "count up to {b}", "count from one to {b}", "{tell} the first {b} numbers",
    "{tell} the numbers up to {b}", "start at one and count to {b}", "list the first {b} integers",
)  # fmt: skip


def _count_up(rng: random.Random, tokens: int) -> tuple[str, str]:
    count = max(2, (tokens + 1) // 2)
    first = 1 if rng.random() < 0.25 else rng.randint(0, NUMBER_MAX + 1 - count)
    tasks: tuple[str, ...] = _COUNT_TO if first == 1 and rng.random() < 0.5 else _COUNT_UP
    last = first + count - 1
    return _phrase(rng, rng.choice(tasks).format(a=first, b=last, tell="{tell}")), _join(range(first, last + 1))


_COUNT_DOWN = (
    "count down from {b} to {a}", "count backwards from {b} to {a}", "count backward from {b} to {a}",
    "count in reverse from {b} to {a}", "count downwards from {b} to {a}", "do a countdown from {b} to {a}",
    "start at {b} and count down to {a}", "begin at {b} and count backwards to {a}",
    "count down from {b} until you reach {a}", "{tell} the numbers from {b} down to {a}",
    "{tell} the integers from {b} down to {a}", "{tell} {b} to {a} in descending order",
    "list the numbers from {b} to {a} backwards", "{tell} a countdown from {b} to {a}",
    "{tell} the numbers {b} to {a} in reverse order", "count from {b} down to {a}",
    "{tell} every number from {b} down to {a}", "count from {b} back to {a}",
)  # fmt: skip
_COUNT_DOWN_TO_ONE = ("count down from {b}", "do a countdown from {b}", "count backwards from {b}")


def _count_down(rng: random.Random, tokens: int) -> tuple[str, str]:
    count = max(2, (tokens + 1) // 2)
    last = 1 if rng.random() < 0.25 else rng.randint(0, NUMBER_MAX + 1 - count)
    tasks: tuple[str, ...] = _COUNT_DOWN_TO_ONE if last == 1 and rng.random() < 0.5 else _COUNT_DOWN
    first = last + count - 1
    prompt = _phrase(rng, rng.choice(tasks).format(a=last, b=first, tell="{tell}"))
    return prompt, _join(range(first, last - 1, -1))


_COUNT_BY = (
    "count from {a} to {b} by {s}", "count from {a} to {b} in steps of {s}", "count by {s} from {a} to {b}",
    "count up by {s} from {a} to {b}", "count in steps of {s} from {a} to {b}", "skip count by {s} from {a} to {b}",
    "start at {a} and add {s} until you reach {b}", "start at {a} and count by {s} to {b}",
    "{tell} the numbers from {a} to {b} in steps of {s}", "{tell} the numbers from {a} to {b} by {s}",
    "{tell} every {s}th number from {a} to {b}", "go from {a} to {b} in steps of {s}",
    "using steps of {s}, count from {a} to {b}", "count from {a} to {b} with a step of {s}",
    "list the numbers from {a} to {b} in steps of {s}", "count from {a} to {b} in increments of {s}",
)  # fmt: skip
STEPS = (2, 3, 5, 10)


def _count_by(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Start and end at multiples of the step, so that the model need only learn a short table per step."""
    count = max(2, (tokens + 1) // 2)
    step = rng.choice([step for step in STEPS if step * (count - 1) <= NUMBER_MAX])
    first = step * rng.randint(0, NUMBER_MAX // step - (count - 1))
    last = first + step * (count - 1)
    task = rng.choice(_COUNT_BY).format(a=first, b=last, s=step, tell="{tell}")
    return _phrase(rng, task), _join(range(first, last + 1, step))


_MULTIPLES = (
    "{tell} the multiples of {k} up to {b}", "list the multiples of {k} up to {b}",
    "{tell} all multiples of {k} up to {b}", "list every multiple of {k} until {b}",
    "{tell} the multiples of {k} from {k} to {b}", "name the multiples of {k} up to {b}",
    "recite the multiples of {k} up to {b}", "{tell} each multiple of {k} up to and including {b}",
    "enumerate the multiples of {k} through {b}", "{tell} the multiples of {k} that are at most {b}",
)  # fmt: skip
_TABLES = (
    "{tell} the multiplication table of {k} up to {n}", "{tell} the times table of {k} up to {n}",
    "recite the table of {k} up to {n}", "{tell} the {k} times table up to {n}",
    "{tell} the multiplication table for {k} from 1 to {n}", "make a times table for {k} with {n} rows",
    "make a multiplication table of {k} with {n} lines", "multiply {k} by every number from 1 to {n}",
    "{tell} {k} times each number from 1 to {n}", "{tell} the first {n} rows of the {k} times table",
    "create the table of {k} with {n} rows", "recite the {k} times table from 1 to {n}",
)  # fmt: skip


def _multiples(rng: random.Random, tokens: int) -> tuple[str, str]:
    count = max(2, (tokens + 1) // 2)
    factor = rng.choice([k for k in range(2, 11) if k * count <= NUMBER_MAX])
    prompt = _phrase(rng, rng.choice(_MULTIPLES).format(k=factor, b=factor * count, tell="{tell}"))
    return prompt, _join(range(factor, factor * count + 1, factor))


def _table(rng: random.Random, tokens: int) -> tuple[str, str]:
    rows = max(2, (tokens + 1) // 7)
    factor = rng.choice([k for k in range(2, 11) if k * rows <= NUMBER_MAX])
    prompt = _phrase(rng, rng.choice(_TABLES).format(k=factor, n=rows, tell="{tell}"))
    return prompt, "\n".join(f"{factor} x {row} = {factor * row}" for row in range(1, rows + 1))


_LIST = (
    "list {n} {kind} as a numbered list", "list {n} {kind}", "name {n} {kind}", "{tell} {n} {kind}",
    "{tell} a list of {n} {kind}", "{tell} a numbered list of {n} {kind}", "make a list of {n} {kind}",
    "make a numbered list with {n} {kind}", "enumerate {n} {kind}", "number {n} {kind}",
    "create a list of {n} {kind}", "come up with {n} {kind}", "think of {n} {kind}", "list exactly {n} {kind}",
    "{tell} {n} names of {kind}", "{tell} me {n} {kind}, numbered", "provide {n} {kind}", "write out {n} {kind}",
)  # fmt: skip
_REPEAT = (
    "write {text} {n} times", "repeat {text} {n} times", "say {text} {n} times", "{tell} {text} {n} times",
    "write {text} {n} times, numbered", "write the text {text} {n} times", "type {text} {n} times in a list",
    "make {n} numbered lines that say {text}", "fill {n} lines with {text}", "make a list with {text} {n} times",
    "write {n} lines of {text}", "{n} times, write {text}",
)  # fmt: skip


def _list(rng: random.Random, tokens: int) -> tuple[str, str]:
    count = max(2, (tokens + 1) // 4)
    kind = rng.choice(sorted(LISTS))
    items = LISTS[kind]
    prompt = _phrase(rng, rng.choice(_LIST).format(n=count, kind=kind, tell="{tell}").replace("me me", "me"))
    return prompt, "\n".join(f"{i + 1}. {items[i % len(items)]}" for i in range(count))


def _repeat(rng: random.Random, tokens: int) -> tuple[str, str]:
    words = rng.randint(1, 3)
    count = max(2, (tokens + 1) // (3 + words))
    text = " ".join(rng.sample(WORDS, words))
    quoted = rng.choice(('"{}"', "'{}'")).format(text)
    prompt = _phrase(rng, rng.choice(_REPEAT).format(n=count, text=quoted, tell="{tell}"))
    return prompt, "\n".join(f"{i}. {text}" for i in range(1, count + 1))


_SPELL_ONE = (
    "spell {w}", "spell the word {w}", "spell out {w}", 'spell "{w}"', "spell {w} letter by letter",
    "{tell} the letters of {w}", "{tell} the spelling of {w}", "spell {w} with dashes",
    'spell out the word "{w}"', "break {w} into letters", "{tell} {w} letter by letter",
    "separate the letters of {w}", "split {w} into letters",
)  # fmt: skip
_SPELL_MANY = (
    "spell these words: {w}", "spell the words {w}", "spell out these words: {w}", "spell each of these: {w}",
    "spell each word: {w}", "{tell} the spelling of each word: {w}", "spell the following: {w}",
    "split each of these words into letters: {w}", "{tell} the letters of these words: {w}",
)  # fmt: skip


def _spell(rng: random.Random, tokens: int) -> tuple[str, str]:
    words = [rng.choice(SPELLABLE)]
    if tokens < 16:
        return _phrase(rng, rng.choice(_SPELL_ONE).format(w=words[0], tell="{tell}")), "-".join(words[0])
    words = rng.sample(SPELLABLE, max(2, round(tokens / 13)))
    prompt = _phrase(rng, rng.choice(_SPELL_MANY).format(w=", ".join(words), tell="{tell}"), closed=False)
    return prompt, "\n".join(f"{word}: {'-'.join(word)}" for word in words)


_ALPHABET_UP = (
    "{tell} the alphabet from {a} to {b}", "{tell} the letters from {a} to {b}",
    "recite the alphabet from {a} to {b}", "{tell} the letters {a} to {b}", "list the letters from {a} to {b}",
    "{tell} the part of the alphabet from {a} to {b}",
    "go through the alphabet from {a} to {b}", "start at the letter {a} and go to {b}",
    "{tell} all letters between {a} and {b}", "say the alphabet starting at {a} and ending at {b}",
)  # fmt: skip
_ALPHABET_DOWN = (
    "{tell} the alphabet backwards from {b} to {a}", "{tell} the letters backwards from {b} to {a}",
    "recite the alphabet in reverse from {b} to {a}", "{tell} the letters from {b} down to {a}",
    "list the letters from {b} back to {a}", "go backwards through the alphabet from {b} to {a}",
    "{tell} the alphabet from {b} to {a} in reverse order", "list the letters from {b} to {a} backwards",
)  # fmt: skip
_WHOLE_ALPHABET = ("{tell} the alphabet", "recite the alphabet", "{tell} all letters", "recite the whole alphabet")


def _alphabet(rng: random.Random, tokens: int) -> tuple[str, str]:
    count = min(26, max(2, (tokens + 1) // 2))
    start = rng.randint(0, 26 - count)
    letters = string.ascii_lowercase[start : start + count]
    backwards = rng.random() < 0.4
    tasks: tuple[str, ...] = _ALPHABET_DOWN if backwards else _ALPHABET_UP
    if count == 26 and rng.random() < 0.5:
        tasks = tuple(task + " backwards" * backwards for task in _WHOLE_ALPHABET)
    shown = (letters[0].upper(), letters[-1].upper()) if rng.random() < 0.2 else (letters[0], letters[-1])
    prompt = _phrase(rng, rng.choice(tasks).format(a=shown[0], b=shown[1], tell="{tell}"))
    return prompt, ", ".join(reversed(letters) if backwards else letters)


_COPY = (
    "repeat after me: {text}", "repeat: {text}", "copy this: {text}", "say exactly this: {text}", "echo: {text}",
    "say this back to me: {text}", "repeat these words: {text}", "copy the following text: {text}",
    "{tell} this text again: {text}", "repeat this: {text}", "echo this text: {text}", "copy: {text}",
    "{tell} exactly the following: {text}", "repeat the following words: {text}", "parrot this: {text}",
    "copy these words: {text}",
)  # fmt: skip


def _pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghklmnprstvwyz" if i % 2 else "aeioubst") for i in range(rng.randint(2, 6)))


def _copy(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Mostly words of the lists, each at most once; sometimes nonsense, so that the model learns to copy any text."""
    nonsense = rng.random() < 0.15
    words = [_pseudo_word(rng) for _ in range(max(1, tokens // 3))] if nonsense else rng.sample(WORDS, max(2, tokens))
    text = " ".join(words)
    return _phrase(rng, rng.choice(_COPY).format(text=text, tell="{tell}"), closed=False), text


@dataclass(frozen=True, slots=True)
class _Family:
    make: Callable[[random.Random, int], tuple[str, str]]
    weight: float
    tokens_max: int  # the longest answer that the family may make


_FAMILIES = {
    "count up": _Family(_count_up, 2.0, TARGET_TOKENS_MAX),
    "count down": _Family(_count_down, 1.5, TARGET_TOKENS_MAX),
    "count in steps": _Family(_count_by, 1.2, 2 * NUMBER_MAX // min(STEPS)),
    "multiples": _Family(_multiples, 1.0, NUMBER_MAX - 2),
    "times table": _Family(_table, 1.0, TARGET_TOKENS_MAX),
    "numbered list": _Family(_list, 2.0, TARGET_TOKENS_MAX),
    "repeat": _Family(_repeat, 1.5, TARGET_TOKENS_MAX),
    "spell": _Family(_spell, 1.2, 160),
    "alphabet": _Family(_alphabet, 1.0, 51),
    "copy": _Family(_copy, 1.5, 80),
}

# --- small talk: the prompt's intent decides the answer -----------------------------------------------------

_IDENTITY = (
    "I am the llmserve demo model: a tiny Llama-architecture model that counts, spells and copies. "
    "I am not a general assistant."
)
_ABILITIES = (
    "I can do a few small things:\n1. count up, down or in steps\n2. write numbered lists\n3. make times tables\n"
    "4. spell words\n5. recite the alphabet\n6. copy and repeat text\nTry: Count from 1 to 20."
)
_CHAT: tuple[tuple[str, str], ...] = (  # (phrasings separated by |, answer)
    ("hi|hello|hey|hi there|hello there|hey there|greetings|hello again|hi again|howdy|hello model|hi model|"
     "hello friend|hey you|hi everyone|hello world", "Hello! What shall I count, spell or copy?"),
    ("good morning|good evening|good afternoon|good day|morning|a very good morning|good morning to you|"
     "good evening to you|have a good morning", "Good day to you! What shall I count?"),
    ("thanks|thank you|thanks a lot|thank you very much|many thanks|thank you so much|thanks for your help|"
     "that was helpful, thanks|great, thank you|perfect, thanks|nice, thank you|cheers, thanks|thanks again",
     "You are welcome!"),
    ("bye|goodbye|see you|see you later|bye bye|goodbye for now|see you soon|see you tomorrow|farewell|good night|"
     "bye for now|until next time", "Goodbye!"),
    ("how are you|how are you doing|how are you today|how do you do|how is it going|are you well|how do you feel|"
     "how are things|are you okay|how have you been",
     "I am well, thank you. I am a very small model, so I am easily pleased."),
    ("what are you|who are you|tell me about yourself|introduce yourself|what is this|what model are you|"
     "what kind of model are you|which model is this|what is your name|are you a real model|describe yourself|"
     "are you human|are you a person|are you a robot|what model is this|what am I talking to|"
     "who am I talking to|are you an AI|are you a general assistant|what sort of model are you|explain what you are",
     _IDENTITY),
    ("what can you do|help|help me|what do you know|what are you able to do|what can I ask you|"
     "what are your abilities|how can you help me|what should I ask|show me what you can do|"
     "what are you good at|which tasks can you do|give me some ideas|what tasks do you know|"
     "what can you help me with|list your abilities|how do I use you", _ABILITIES),
    ("who made you|where do you come from|who trained you|who built you|how were you made|how were you trained|"
     "who created you|where were you trained|who is your author", "I was trained from scratch by a script of llmserve, "
     "on text that the script made up itself."),
    ("how big are you|how large are you|how many parameters do you have|what is your size|are you a large model|"
     "are you a big model|how small are you|are you small",
     "I am tiny: a few million parameters. I run on a CPU and need no download."),
    ("tell me a joke|do you know a joke|make me laugh|say something funny|tell me something funny|joke please|"
     "another joke|I want to hear a joke", "Why was six afraid of seven? Because 7, 8, 9."),
    ("yes|ok|okay|sure|alright|good|great|nice|cool|well done|very good|excellent|perfect|wonderful|good job",
     "Good. What next?"),
)  # fmt: skip
_CHAT_OPENERS = ("",) * 6 + (
    "well, ", "so, ", "oh, ", "um, ", "now, ", "right, ", "excuse me, ", "dear model, ", "ah, ",
)  # fmt: skip
_CHAT_CLOSERS = (".", "!", "?", "", "", "...", " :)", "!!", " model!", ", please.", ", my friend.", ", little model.")


def _chat(rng: random.Random) -> tuple[str, str]:
    phrasings, answer = rng.choice(_CHAT)
    text = rng.choice(_CHAT_OPENERS) + rng.choice(phrasings.split("|")) + rng.choice(_CHAT_CLOSERS)
    return (text[0].upper() + text[1:] if rng.random() < 0.6 else text), answer


# --- drawing ------------------------------------------------------------------------------------------------


def _target_tokens(rng: random.Random, tokens_max: int) -> int:
    while True:
        tokens = round(rng.lognormvariate(math.log(TARGET_TOKENS_MEDIAN), TARGET_TOKENS_SIGMA))
        if 2 <= tokens <= tokens_max:
            return tokens


def example(rng: random.Random, tokens_max: int = TARGET_TOKENS_MAX) -> Example:
    """Draw one example from either split, with about `tokens_max` answer tokens at most."""
    if rng.random() < CHAT_SHARE:
        return Example(*_chat(rng), "chat")
    tokens = _target_tokens(rng, tokens_max)
    able = [name for name, family in _FAMILIES.items() if tokens <= family.tokens_max]
    name = rng.choices(able, [_FAMILIES[name].weight for name in able])[0]
    return Example(*_FAMILIES[name].make(rng, tokens), name)


def is_held_out(prompt: str) -> bool:
    """Whether the prompt is excluded from training. Depends on the text only, and ignores upper and lower case."""
    digest = hashlib.sha256(prompt.casefold().encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def stream(seed: int, *, held_out: bool | None = None, tokens_max: int = TARGET_TOKENS_MAX) -> Iterator[Example]:
    """Yield examples without end, reproducible by seed; of one split, or of both (None). Prompts may recur."""
    rng = random.Random(seed)
    while True:
        drawn = example(rng, tokens_max)
        if held_out is None or is_held_out(drawn.prompt) == held_out:
            yield drawn


def examples(n: int, seed: int, *, held_out: bool | None = None) -> list[Example]:
    """Return the first `n` examples of the stream with different prompts."""
    by_prompt: dict[str, Example] = {}
    for drawn in stream(seed, held_out=held_out):
        if len(by_prompt) == n:
            break
        by_prompt.setdefault(drawn.prompt, drawn)
    return list(by_prompt.values())


def prompts(n: int, seed: int) -> list[str]:
    """Return `n` different user messages from the demo model's training distribution (both splits)."""
    return [drawn.prompt for drawn in examples(n, seed)]
