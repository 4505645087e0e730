"""Relay workers: what events and requests cost, and what is lost when processes are killed: docs/results/scale.md.

load   builds and runs the engine and the clients of load.c
sides  the front-ends that are compared
run    measures, and writes the page
page   the page
kills  kill -9 of relays and of the scheduler process under load
"""
