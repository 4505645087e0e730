"""Where requests and batches wait.

deadline_queue : A queue by deadline, and the batches of it that can be in time (Shepherd, Section 5.2 and Appendix C)
formed_queue   : the formed batches of one model
model_queues   : waiting requests of one model in one group, and its answer lengths
waiting        : where requests wait
window_queue   : windows
"""
