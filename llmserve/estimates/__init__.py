"""When something would start or end, and how many engines are wanted.

engines_wanted : how many engines each model of a live cluster wants, for whoever starts and stops engines; see wanted
position       : places in the queue
queue_times    : when a key's requests start and end, by the forecasts of what waits and runs
remaining      : how long a running call still takes, by its forecast and the tokens that its client has got
wanted         : how many engines a model wants
"""
