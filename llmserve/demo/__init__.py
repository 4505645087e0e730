"""The embedded engine: a small local model behind an OpenAI-compatible server, in a separate process.

batching : static batches of members that arrive separately, each over its own connection
server   : the HTTP server: OpenAI's endpoints in front of one model and one worker thread

Start the engine with `python -m llmserve.demo`. The engine needs no GPU and uses static batching: the requests of a
batch run together, as one padded tensor, until the longest request has ended.
"""

KEY_VARIABLE = "EMBEDDED_API_KEY"  # the key below /v1; without the variable no key is needed
