"""HTTP headers of llmserve. Requests may carry these, from a client or from another front-end."""

from collections.abc import Mapping

SLO_HEADER = "x-llmserve-slo-ms"  # deadline, milliseconds after the arrival
STREAM_HEADER = "x-llmserve-stream"  # name of the stream, after the client's key and a slash; default: the key
STREAM_CHARS_MAX = 64
PREDICTED_HEADER = "x-llmserve-predicted-tokens"  # the client's own prediction, used instead of the predictor's
ASKER_HEADER = "x-llmserve-asker"  # from a gateway to a group: who asks, see terms.py
RECEIPT_HEADER = "x-llmserve-receipt"  # true: the last chunk of a stream has the headers below as a field, too

# Headers of an answer, which describe how it was served.
BIN_HEADER = "x-llmserve-bin"
BATCH_HEADER = "x-llmserve-batch"
QUEUE_HEADER = "x-llmserve-queue-ms"
ENGINE_HEADER = "x-llmserve-engine"
CACHED_HEADER = "x-llmserve-cached-tokens"  # tokens of the prompt in the engine's cache; not of streams

# A static-batching engine forms its batches by BATCH_HEADER and BATCH_SIZE_HEADER.
BATCH_SIZE_HEADER = "x-llmserve-batch-size"

PASSED_HEADERS = frozenset(  # of an engine's answer, lower case: meant for clients, or for proxies on the way to them
    (
        *(b"cache-control", b"x-accel-buffering", b"retry-after-ms", b"x-should-retry"),
        *(b"openai-model", b"openai-processing-ms", b"openai-version"),
    )
)
KEPT_HEADERS = PASSED_HEADERS.union(  # the few that are read of an engine's answer
    (b"content-type", b"retry-after", b"content-encoding", b"content-length", b"transfer-encoding"),
    [name.encode() for name in (BIN_HEADER, BATCH_HEADER, QUEUE_HEADER, ENGINE_HEADER, PREDICTED_HEADER)],
)
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Of every event stream, unless the engine says otherwise: without them nginx keeps a stream until its end."""
PACKINGS = frozenset((b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress", b"dcb", b"dcz"))


def is_packed(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body is packed. What servers send to keep proxies from packing, such as `none`, is no packing."""
    told = headers.get(b"content-encoding")
    return told is not None and not PACKINGS.isdisjoint([coding.strip() for coding in told.lower().split(b",")])
