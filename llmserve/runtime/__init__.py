"""What processes of llmserve need of their machine.

at_once      : tasks that run at once and fail as one
collecting   : the garbage collector, set for a process whose event loop must not be stalled
extras       : checks that the extras of the installation that a command needs are installed, before the command does
freed_memory : memory that was freed, given back to the system
installation : where this installation came from, and whether its top-level packages are its own
lasting      : background tasks that continue after an exception
logs         : the log on standard error
private_file : files for their owner's eyes only
"""
