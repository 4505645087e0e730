"""Batches that run: their lines, from the input file to the results.

checking   : checks input files
estimates  : what a batch will take, by the beginning of its input file
feeding    : which lines of jobs enter the queue next, and when jobs will end
file_rows  : the lines of a file of requests, and which of them have a result
file_run   : runs the lines of a file through a cluster in this process
job        : a batch that this server works on, in memory
line_feed  : runs the lines of jobs through the server's queue, a few hundred at a time
line_index : the index of an input file
lines      : the lines of an input file, and the rows of output and error files
recorder   : makes results safe, in groups
refusals   : which refusals of a line have another cause than the line, so that it waits for another try
runner     : works on batches
validation : reads an input file once
"""
