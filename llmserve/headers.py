"""What a client, or a front-end before this one, says of a request in its headers rather than in its body."""

SLO_HEADER = "x-llmserve-slo-ms"  # the answer is wanted within so many milliseconds
STREAM_HEADER = "x-llmserve-stream"  # whose requests these are, where the client's key does not say
STREAM_CHARS_MAX = 64
PREDICTED_HEADER = "x-llmserve-predicted-tokens"  # a client that knows its answer's length better than the predictor

# and what the answer's headers say of how it was served
BIN_HEADER = "x-llmserve-bin"
BATCH_HEADER = "x-llmserve-batch"
QUEUE_HEADER = "x-llmserve-queue-ms"
ENGINE_HEADER = "x-llmserve-engine"

# A static-batching engine learns from BATCH_HEADER and this which requests belong together.
BATCH_SIZE_HEADER = "x-llmserve-batch-size"
