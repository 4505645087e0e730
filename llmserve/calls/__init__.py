"""Calls: requests of clients from their arrival to their end.

charges        : what calls use of the limits of their keys
client_request : what is noted on a client's request from its head to its end
in_flight      : a client's call in flight, which gives the answer to the client
log_fields     : what a line of the log says of a call
origins        : which engine gave each response that engines keep, and for whom
prompt_blocks  : hashes of a prompt's blocks, by which prompts with the same beginning are known
prompt_size    : the estimated tokens of a prompt, and who sent it, without a tokenizer
"""
