"""The timed engine: an OpenAI-compatible server without a model. Start it with `python -m llmserve.engines.timed`.

answer : the bytes of the fake engine's answers, of each kind of endpoint
body   : what the fake engine reads of a request, of every endpoint
server : A timed engine without a model
"""
