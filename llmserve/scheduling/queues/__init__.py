"""Where requests and batches wait.

binning           : which bin a request waits in, and how long the answers of each bin are
deadline_queue    : a bin by deadline, and the batches that can be in time (Shepherd, Section 5.2 and Appendix C)
formed_queue      : the formed batches of one model
model_queues      : waiting requests of one model, and its answer lengths
oldest            : the waiting requests of a model by age
preemptible_queue : waiting items of batch jobs
waiting           : requests, bins and formed batches
window_queue      : a bin whose batches are neighbours by length
"""
