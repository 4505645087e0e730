"""Which batch starts next, and on which engine.

batch_lane    : items of batch jobs, from their arrival until they start, are due, or fail
batch_times   : how long a batch would take, and which requests are late by that
candidates    : the batches that an order of the moment compares
choice        : what the three choosers share: on which engine a batch may start now
dispatch      : starts batches; dispatch by an order with fixed keys
fixed_choice  : the next batch, by an order with fixed keys
moment_choice : the next batch, by an order of the moment
orders        : the keys by which batches are ordered, and what an order needs
placement     : on which engine a request costs least
preemption    : dispatch by an order of the moment, which may stop running batches
spare_choice  : the next items of batch jobs, in slots that no waiting request could take
"""
