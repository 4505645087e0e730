"""When something would start or end, and how many engines are wanted.

engines_wanted : the same of a live cluster, for whoever starts and stops engines
position       : places in the queue
queue_times    : when a key's requests start and end, by the forecasts of what waits and runs
remaining      : how long a running call still takes, by its forecast and the tokens that its client has got
wanted         : how many engines a model wants
"""
