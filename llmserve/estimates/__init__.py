"""When something starts or ends, and how many engines are wanted.

engines_wanted : pure: how many engines a model wants
estimator      : when requests start and end: positions in the queue, waits, the rest of what runs, for all who ask
of_key         : when the calls of one key end and start, kept for a second
waiting_rows   : rows of GET /admin/queue, for the server and for llmserve queue
"""
