"""Engines: every one is an OpenAI-compatible HTTP server somewhere.

additions    : what the front-end adds to the bodies of requests, and which of it an engine takes
dialects     : what each kind of engine says and takes: a table, and the readers of what engines tell
engine       : the interface between the pool of engines and an engine: `ask`, `probe` and `close`
group_server : the client of a gateway: another llmserve server, used as if it were an engine
kinds        : the kinds of engines: the embedded engine, vLLM that llmserve starts, servers that run already
measuring    : runs batches on one engine and measures each, as data for a profile
nearby       : finds engines that run on this machine, on their usual ports
openai       : the client of any OpenAI-compatible server: vLLM, SGLang, llama.cpp, TGI, ...
part         : the engines of a server: those that llmserve starts, and those that run already
power        : the energy that this machine's GPUs draw, by NVML
process      : an engine server as a child process: started, watched, restarted, and ended with llmserve
probing      : probes of an engine: its program, its health, its models, its load
slots        : learns how many requests an engine runs at once, from its answers and from what it tells
vllm         : vLLM servers that llmserve starts, each with its own GPUs
"""
