"""The commands: one module each, with `add_arguments` and `main`; llmserve/__main__.py imports the chosen one.

asking        : asks a running server for commands that look at it from outside
batch         : run a file of requests on an engine, without a server; or list, show and cancel batches
chat          : talk to a model of a running server
completion    : print what a shell needs to complete commands and flags
bench         : measure the throughput gain of bins on a real engine
doctor        : say in plain words what is wrong or slow in a running server, or in a configuration, with each remedy
down          : stop a cluster
evaluate      : evaluate a trained length predictor, or what a server learns from answers
help_text     : the form of --help, alike in all commands
plan          : choose which models share which GPUs (HERD)
profile       : measure the duration and energy of an engine's batches by size, and write a profile
queue         : show who waits in a running server
serve         : run the front-end
simulate      : run the server's scheduler under a virtual clock, with simulated engines
solve         : compute when a bin should wait and when it should release a batch
status        : show a cluster
train         : train a length predictor on prompts with the lengths of their answers
tune          : replay a server's journal under other orders, and say which one would have served its requests best
up            : start engines, groups and gateways on a Ray cluster, or bring a running cluster in line with its file
"""
