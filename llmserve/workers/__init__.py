"""Many processes, one scheduler: relays hold all connections, and one process decides.

A relay parses and admits clients' requests, and forwards engines' answers, with the same classes as a server of one
process. The scheduler process hears of arrivals, starts and ends; tokens never reach it.

messages   : what the processes tell each other
link       : carries messages over a socket, those of one turn of the event loop in one write
line       : a relay's link to the scheduler process, or to the next one
relayed_call : one call of a relay's client: what the relay does with it
relay_engines : a relay's clients of the engines
relay      : takes clients' requests to the scheduler process, and its decisions to their calls
remote_calls : calls of relays as the scheduler process sees them
desk       : the scheduler process's side of its relays
passing    : requests for the server itself pass through a relay to the scheduler process
balance    : relays pass connections to each other, so that all have about as many
running    : a relay as a process
part       : the desk as a part of the server
processes  : starts the processes, and starts those again that have died
"""
