"""Is it known which requests belong to one agent, when no ids are sent? docs/results/programs.md.

worlds : sessions of agents and chats, drawn or read
run    : each request of a world, counted to a program by the server's own code
"""
