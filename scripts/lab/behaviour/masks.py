"""What may differ between two runs of the same code: times, and ids that are drawn. Everything else is compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_NUMBER = rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"

MASKS: dict[str, re.Pattern[bytes]] = {  # name : what stands before the masked value, and the value
    "a date": re.compile(rb"()\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} [\d:]{8} GMT"),
    "a time of the log": re.compile(rb"()\b\d{4}-\d\d-\d\dT[\d:.]+Z"),
    "a unix time": re.compile(rb'("(?:created|created_at|expires_at|[a-z_]+_at)": ?)\d{9,}(?:\.\d+)?'),
    "waiting": re.compile(rb"(x-llmserve-queue-ms: )" + _NUMBER),
    "waiting, in a receipt": re.compile(rb'("queue_ms": ?|"x-llmserve-queue-ms": ?"?)' + _NUMBER),
    "when to try again": re.compile(rb"(retry-after: )\d+"),
    "when a bucket is full": re.compile(rb"(x-ratelimit-reset-\w+: )[\d.]+"),
    "what a bucket has": re.compile(rb"(x-ratelimit-remaining-tokens: )\d+"),
    "seconds in a message": re.compile(rb"()\b\d+(?:\.\d+)? (?:s|ms|seconds)\b(?!=)"),
    "a duration": re.compile(rb'("(?:\w+_s|\w+_ms|ms|s|seconds|slot_seconds)": ?)' + _NUMBER),
    "a time of the access log": re.compile(rb"(\b(?:ms|queue_ms|first_token_ms)=)[\d.]+"),
    "bytes of a head with a time": re.compile(rb"(queue_ms.*\bbytes(?:=|\":))\d+"),
    "bytes of times": re.compile(rb"((?:/metrics|/admin/usage)\b.*bytes(?:=|\":))\d+"),
    "the length of the metrics": re.compile(rb"(content-length: )\d{6,}"),
    "a client": re.compile(rb"()\b127\.0\.0\.1:\d+"),
    "a file's id": re.compile(rb"()\bfile-[\w-]+"),
    "a batch's id": re.compile(
        rb"()\bbatch_(?!days|tokens|active|bytes|files|size|wait|expired|store|req)[0-9a-f]{8,}"
    ),
    "a row's id": re.compile(rb"()\bbatch_req_[\w-]+"),
    "a response's id": re.compile(rb"()\bresp-\d+"),
    "a time in the metrics": re.compile(
        rb"(?m)^(llmserve_\w*seconds(?:_bucket|_sum|_total)?(?:\{[^}]*\})? )" + _NUMBER
    ),
    "a process in the metrics": re.compile(rb"(?m)^((?:process|python)_\w+(?:\{[^}]*\})? )" + _NUMBER),
    "a span": re.compile(rb"(traceparent: 00-\w{32}-)\w{16}"),
}
SENDERS = re.compile(rb'("sender":)(\d+)')
CONTENT_LENGTH = re.compile(rb"(content-length: )\d+")
JOURNAL_TIMES = re.compile(rb'(^\[|_s": ?|_s":\[)' + _NUMBER)


def masked(data: bytes, places: Mapping[str, str]) -> bytes:
    """An answer without what may differ. A chunked body is joined, because where it is cut is a matter of time.

    places : addresses and paths of this run -> their names
    """
    top, separator, body = _joined(data).partition(b"\r\n\r\n")
    shown = _masked(body, places)
    if shown != body:
        top = CONTENT_LENGTH.sub(rb"\1<a length>", top)
    return _masked(top, places) + separator + shown


def _masked(text: bytes, places: Mapping[str, str]) -> bytes:
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        text = text.replace(place.encode(), name.encode())
    for name, pattern in MASKS.items():
        text = pattern.sub(rb"\1<" + name.encode() + b">", text)
    return text


def masked_journal(lines: Iterable[bytes], places: Mapping[str, str]) -> bytes:
    """Events and actions in their order, without times. Senders, hashes with a drawn salt, are numbered."""
    numbers: dict[bytes, bytes] = {}
    text = b"\n".join(JOURNAL_TIMES.sub(rb"\1<t>", line) for line in lines)
    text = SENDERS.sub(lambda found: found[1] + numbers.setdefault(found[2], b"%d" % len(numbers)), text)
    for place, name in places.items():
        text = text.replace(place.encode(), name.encode())
    return text


def _joined(data: bytes) -> bytes:
    top, separator, rest = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in top or not separator:
        return data
    parts = []
    while rest:
        size, found, after = rest.partition(b"\r\n")
        try:
            count = int(size, 16)
        except ValueError:
            return data
        if not found or count == 0:
            parts.append(b"(end of the chunks)" + after)
            break
        parts.append(after[:count])
        rest = after[count + 2 :]
    return top + separator + b"".join(parts)
