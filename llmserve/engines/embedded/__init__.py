"""The embedded engine: a small local model behind an OpenAI-compatible server, in a process of its own.

Started with `python -m llmserve.engines.embedded`. It needs no GPU, and batches statically: the requests of
one batch run together, as one padded tensor, until the longest of them has ended.
"""
