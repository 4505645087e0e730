"""Calls: requests of clients from their arrival to their end.

in_flight   : a client's call in flight, which gives the answer to the client
charges     : what calls use of the limits of their keys
log_fields  : what a line of the log says of a call
prompt_size : the estimated tokens of a prompt, and hashes of its beginning, without a tokenizer
origins     : which engine gave each response that engines keep, and for whom
"""
