"""Batches that run: their lines, from the input file to the results.

runner        : claims batches and takes each through its statuses
job           : a batch that this server works on, in memory
loading       : what a job needs from the disk before its lines can run
input_checker : checks input files, in the turn of their keys
validation    : reads an input file once: what is wrong with its lines, and where each line is
input_index   : what a check has found, and where each line is, beside the input file
estimates     : what a batch will take, by the beginning of its input file
item_queue    : which lines enter the server's queue next, and when jobs will end
seats         : decides which jobs are in memory with their lines
item_feeder   : feeds the lines of jobs into the server's queue, a few hundred at a time
refusals      : which refusals of a line are worth another try
recorder      : makes results safe, in groups
jsonl         : the lines of an input file, and the rows of output and error files
local_file    : `llmserve batch run`: the lines of a file, and which of them have a result
local_run     : `llmserve batch run`: runs the lines of a file through a cluster in this process
"""
