"""The settings of `llmserve serve`, how they are read, and what they make of a scheduler.

by_model     : settings with a value for all models or for single models
deadlines    : default deadlines of requests
dispatch     : the settings of dispatching by latency and energy, and the solvers that make plans from these settings
jobs         : the settings of batch jobs
load         : settings from flags, which win over the environment, a TOML file and defaults, in this order
policies     : creates a scheduler from a configuration
policy_names : releases and orders by name; MODULE:FUNCTION names a custom order
tree         : the settings of `llmserve serve`
"""
