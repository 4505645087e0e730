"""The scheduler: a pure state machine from events to actions.

admission    : which requests may wait
circuit      : circuit breakers of engines, and which request is at fault
engine_book  : engines that come, go or are expected
engines      : the load, room, pace and memory of each engine
fair         : the shares that compete for engines
group        : all queues and engines, and how batches form
lengths      : lengths of recent answers, by bin
limits       : how much may wait, for how long, and how often a request may run again
load         : waits, and what forecasts mean, for orders that follow the load
loaded_models : the models in an engine's memory, and how long loads take
memory       : which request may block an engine for its memory
messages     : all events and actions
moments      : means and products of what answers show, for regressions
planner      : when a new dispatch plan is wanted, and for which load
prefills     : the long prompts that an engine computes
rates        : arrivals, completions and service times, with a bounded memory
release      : when a bin releases a batch, and of which size
request_book : the state of each request, from its arrival to its end
reserve      : how many slots stay free for online requests
residency    : what each engine has in its prefix cache
rests        : engines that have refused requests, and rest
scheduler    : the entrance and the handlers of events
sharing      : of which models an engine takes requests that holds few of them at once
trust        : whether predictions rank answers
work         : the seconds of a slot that a request takes

choice/     : which batch starts next, and on which engine
programs/   : turns of agents, which are admitted by memory as wholes
queues/     : where requests and batches wait
"""
