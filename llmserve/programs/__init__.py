"""Which requests belong to one program: an agent's session, or a sub-agent of it, with its turns and steps.

known_programs : the programs of the last requests: which one a request belongs to
sources        : what clients send of their sessions, one entry a client
trail          : what one request says of the program that it belongs to, without ids
"""
