"""The parts of benchmark_grouped_refill.py.

slots     when freed slots are handed over
engine    the model, and vLLM servers with it
passes    loads, and the passes that send them
costs     what steps and interruptions of decoding cost, and from which answer length grouping loses
report    tables, and the figure
"""
