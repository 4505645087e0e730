"""The live cluster: a scheduler with asyncio, real engines and the monotonic clock.

cluster      : LiveCluster, put together from a scheduler, a fleet and a journal
driver       : the only caller of `Scheduler.handle`: events in, actions out, one timer
calls        : clients' calls from their arrival to the scheduler's last word on them
forwarding   : one answer on the way from an engine to the client
fleet        : the engines: probes, and the orders of their operator
engine_state : pure: the table of an engine's states, where its death is decided
watchdog     : finds the requests that an engine has lost while it goes on with others
silence      : pure: which silence of an answer is normal for an engine now
homes        : the groups of a gateway's plan: which has the requests of a stream and model
handle       : one engine: state, measurements, and running calls
membership   : which engines by URL there are, by the settings and by sources that find engines
known_models : which models are known, and how many engines list each
route_queues : queues beside a model's own, for calls that only some of its engines can serve
part         : the driver of a server, which takes other engines while it runs
routes       : which engines can serve a call
journal      : every step of the scheduler, in memory and in a file that replays
reports      : the scheduler's reports in the log, and errors for clients whose requests the scheduler fails
solving      : dispatch plans, made in threads
alarm        : one timer, set anew after each step
"""
