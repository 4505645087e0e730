"""Simulation: the scheduler under a virtual clock, with workloads, engine models and reports.

cluster      : the simulated cluster drives the scheduler with a virtual clock
collector    : the garbage collector during a simulation
engine_model : the time and the energy that a simulated engine takes
estimates    : means and 95 % confidence intervals over several runs
figures      : figures of runs, as PNG files
kv_engine    : a simulated engine with a KV cache and chunked prefill
kv_pool      : the blocks of a KV cache, and which texts they hold
learning     : what a simulated server learns from answers
many         : many independent runs, in one process or in several
observed     : the batches in a journal, for an engine's profile
online       : the rows of a file as requests to a learner during a run
predictions  : predicted lengths: the real ones, or lengths with a predictor's errors
program_run  : one run of a world of programs
programs     : worlds of programs: sessions whose next request depends on the end of the one before
progress     : the progress of runs on a terminal
prompt_rows  : files of prompts and the lengths of their answers
report       : the results of a run, as a table or as a JSON object
scenario     : the settings of a simulation, and from them its requests and its engines
trace_files  : files of recorded requests, in the forms in which they are published
workload     : arrival times and answer lengths
"""
