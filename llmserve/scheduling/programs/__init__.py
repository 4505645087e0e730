"""Programs: requests that belong together, such as the steps of an agent's turn with tool calls between.

ledger   : the memory of an engine, with what is kept for programs in a tool call
kinds    : what is still to come of a turn, learned by the kind of program
tools    : how long tools take, and for how long memory is worth keeping for their results
programs : admission of whole programs by memory, and their order
"""
