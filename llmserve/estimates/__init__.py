"""When something starts or ends, and how many engines are wanted.

estimator      : when requests start and end: positions in the queue, waits, the rest of what runs, for all who ask
of_key         : when the calls of one key end and start, kept for a second
engines_wanted : pure: how many engines a model wants
"""
