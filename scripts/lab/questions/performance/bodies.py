"""What a hostile body of 4 MiB costs, in processor time of the process that parses it, against an earlier parser.

    python scripts/lab performance.bodies --before 6b992ca --output docs/results/bodies.json

Both parsers take turns, and the median of `--rounds` is reported. No row's time is held by anything but this process:
msgspec keeps the interpreter's lock while it decodes, so this is also what all other requests wait for.
`--before` is a revision whose llmserve/gateway/parse.py needs nothing but what is installed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any

from kit.arguments import add_results, parser_of
from kit.results import day_and_machine, rounded, write_json
from kit.tables import show

from llmserve.errors import BadRequest
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.parse import parse_call

Parser = Callable[..., Any]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BYTES = 4_190_000
PER_BODY_SHORT = 2000  # parses of the short body in one round


def fill(head: str, item: str, tail: str, last: str | None = None) -> bytes:
    """head, as many items as fit, the last item without its separator, tail."""
    last = item.rstrip(",") if last is None else last
    count = (BYTES - len(head) - len(tail)) // len(item.encode())
    return (head + item * count + last + tail).encode()


def chat(field: str = "", content: str = '"hi"') -> str:
    return '{"model":"m","messages":[{"role":"user","content":' + content + "}]" + field


CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a KV cache, and why does it grow with the length of an answer?"},
]
SHORT = json.dumps({"model": "m", "messages": CONVERSATION, "max_tokens": 200, "temperature": 0.7}).encode()
PROMPT, UNKNOWN, OPTIONS = '{"model":"m","prompt":[', chat(',"unknown":'), chat(',"stream":true,"stream_options":{}')
BODIES: dict[str, tuple[str, bytes]] = {
    "content: [{}, {}, ...]": (CHAT, fill(chat(content="[")[:-2], "{},", "]}]}")),
    "prompt: [[1], [1], ...]": (PLAIN, fill(PROMPT, "[1],", "]}")),
    "prompt: [1, 1, ...]": (PLAIN, fill(PROMPT, "1,", "]}")),
    "stream_options: {} and integers": (CHAT, fill(OPTIONS + ',"unknown":[', "1,", "]}")),
    "unknown field, lists in a list": (CHAT, fill(UNKNOWN + "[", "[],", "]}")),
    "messages, empty ones": (CHAT, fill('{"model":"m","messages":[', '{"role":"u","content":""},', "]}")),
    'prompt: ["", ...]': (PLAIN, fill(PROMPT, '"",', "]}")),
    "text parts": (CHAT, fill(chat(content="[")[:-2], '{"type":"text","text":"a"},', "]}]}")),
    'stop: ["a", ...]': (CHAT, fill(chat(',"stop":['), '"a",', "]}")),
    "one prompt of text": (PLAIN, fill('{"model":"m","prompt":"', "a ", '"}', last="")),
    "unknown field, lists in lists, 4 million deep": (CHAT, fill(UNKNOWN, "[", "", last="")),
    "unknown field, lists 900 deep, again and again": (CHAT, fill(UNKNOWN + "[", "[" * 900 + "]" * 900 + ",", "]}")),
    "unknown names at the top": (
        CHAT,
        (chat() + "".join(f',"k{number}":1' for number in range(BYTES // 12)) + "}").encode(),
    ),
    "one name again and again: model": (CHAT, fill(chat(), ',"model":"m"', "}", last="")),
    "one name again and again: stop": (CHAT, fill(chat(), ',"stop":["a","b"]', "}", last="")),
    "one name again and again: messages": (CHAT, fill(chat(), ',"messages":[{"role":"u"}]', "}", last="")),
    "seed, an integer of 4 million digits": (CHAT, fill(chat(',"seed":'), "9", "}", last="")),
    "token ids of 100 digits": (PLAIN, fill(PROMPT, "9" * 100 + ",", "]}")),
    "escapes \\u0000 in the prompt": (CHAT, fill(chat(content='"')[:-2], "\\u0000", '"}]}', last="")),
    "escaped quotes in the prompt": (PLAIN, fill('{"model":"m","prompt":"', '\\"', '"}', last="")),
    "surrogate pairs in the prompt": (CHAT, fill(chat(content='"')[:-2], "\\ud83d\\ude00", '"}]}', last="")),
    "half surrogates in an unknown field": (CHAT, fill(UNKNOWN + '"', "\\ud83d", '"}', last="")),
    "invalid UTF-8 at the end of Chinese text": (
        CHAT,
        fill(chat(content='"')[:-2], "\u4e2d", '"}]}', last="")[:-5] + b'\xff"}]}',
    ),
    "tools, empty ones": (CHAT, fill(chat(',"tools":['), "{},", "]}")),
    "tools, numbers": (CHAT, fill(chat(',"tools":['), "1,", "]}")),
    "response_format with unknown names": (CHAT, fill(chat(',"response_format":{"a":0'), ',"a":0', "}}", last="")),
    "stream_options with unknown names": (CHAT, fill(OPTIONS[:-1] + '"a":0', ',"a":0', "}}", last="")),
    "parts whose text is a list": (CHAT, fill(chat(content="[")[:-2], '{"text":[[],[],[]]},', "]}]}")),
    "2,000 text parts of 2,000 characters": (
        CHAT,
        (chat(content="[")[:-2] + ",".join(2000 * ['{"text":"' + 2000 * "a" + '"}']) + "]}]}").encode(),
    ),
}


def parser_at(revision: str) -> Parser:
    """parse_call of an earlier revision. It must be one module."""
    source = subprocess.run(
        ["git", "show", f"{revision}:llmserve/gateway/parse.py"], check=True, capture_output=True, text=True
    ).stdout
    module = ModuleType("parse_before")
    sys.modules[module.__name__] = module
    exec(compile(source, f"{revision}:parse.py", "exec"), module.__dict__)
    parser: Parser = module.__dict__["parse_call"]
    return partial(parser, prompt_chars_max=1_000_000)


def cpu_s(parser: Parser, path: str, data: bytes, times: int = 1) -> tuple[float, str]:
    """(processor seconds of one parse, how the body is answered)."""
    answer = "taken"
    began_s = time.process_time()
    for _ in range(times):
        try:
            parser(path, data)
        except BadRequest as error:
            answer = error.message[:100]
    return (time.process_time() - began_s) / times, answer


def measure(before: Parser, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, (path, data) in {**BODIES, "a short conversation": (CHAT, SHORT)}.items():
        times = PER_BODY_SHORT if data is SHORT else 1
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        answers: dict[str, str] = {}
        for number in range(rounds):
            both = [("before", before), ("after", partial(parse_call, limits=BodyLimits()))]
            for label, parser in both if number % 2 == 0 else both[::-1]:
                cost_s, answers[label] = cpu_s(parser, path, data, times)
                seconds[label].append(1e3 * cost_s)
        rows.append(
            {
                "body": name,
                "bytes": len(data),
                "cpu_ms_before": median(seconds["before"]),
                "cpu_ms": median(seconds["after"]),
                "answer_before": answers["before"],
                "answer": answers["after"],
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", required=True, metavar="REVISION", help="whose parser is compared")
    parser.add_argument("--rounds", type=int, default=3)
    add_results(parser)
    arguments = parser.parse_args()
    rows = measure(parser_at(arguments.before), arguments.rounds)
    show(
        None,
        ("body", "before, ms", "ms", "answer"),
        [(row["body"], f"{row['cpu_ms_before']:.4g}", f"{row['cpu_ms']:.4g}", row["answer"]) for row in rows],
        left=("answer",),
    )
    result = {**day_and_machine(), "before": arguments.before, "rounds": arguments.rounds, "rows": rounded(rows)}
    write_json(arguments.output, result)
