"""The live cluster: drives the scheduler with asyncio, real engines and the monotonic clock.

alarm        : one timer, set anew after each step
calls        : calls that engines run now
driver       : the live cluster drives the scheduler with asyncio, real engines and the monotonic clock
fleet        : the engines of a live cluster
journal      : the journal
known_models : which models are known, and how many engines list each
lanes        : queues beside a model's own, for calls that only some of its engines can serve
part         : the driver of a server, which takes other engines while it runs
reports      : what a live cluster says of the scheduler's reports, and to clients whose requests the scheduler fails
routes       : which engines can serve a call
solving      : makes the dispatch plans that a live scheduler asks for, in threads
"""
