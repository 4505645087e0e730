"""The timed engine: an OpenAI-compatible server without a model. Start it with `python -m llmserve.engines.timed`.

answer : the bytes of the timed engine's answers, of each kind of endpoint
body   : what the timed engine reads of a request, of every endpoint
server : a timed engine without a model
"""
