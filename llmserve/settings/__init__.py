"""The settings of `llmserve serve`, how they are read, and what they make of a scheduler.

by_model     : settings with a value for all models or for single models
deadlines    : default deadlines of requests
dispatch     : the section [dispatch], and the solvers that make plans from these settings
engines      : the section [engines]: the engines that run the requests
jobs         : the section [jobs]: batch jobs
limits       : the section [limits]: limits of requests and keys
live         : the section [live]: health probes of engines, and limits for slow clients
load         : settings from flags, which win over the environment, a TOML file and defaults, in this order
policies     : the section [scheduling], and the scheduler that the section describes
policy_names : releases and orders by name; MODULE:FUNCTION names a custom order
prediction   : the section [prediction]: what predicts the lengths of answers
server       : the section [server]: where the server listens, and for which clients
tree         : all sections together, which other rooms import from here
"""
