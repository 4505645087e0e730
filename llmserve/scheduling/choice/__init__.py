"""Which batch starts next, and on which engine.

background    : lines of jobs
batch_times   : how long a batch would take, by its engine's speed and pace and its bin's answer lengths; and who is l
dispatch      : dispatch
fixed_choice  : which batch starts next, and on which engine, in one dispatch of a group by an order with fixed keys
moment_choice : which batch starts next, and on which engine, in one dispatch of a group by an order of the moment
orders        : order
"""
