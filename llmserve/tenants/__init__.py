"""Who a client is, and what it may use: keys, limits, budgets, shares.

authentication : API keys
buckets        : buckets of requests or tokens a minute, and what counts against the limits of a key
budgets        : what keys have spent of their budgets by day and month, in memory and in the usage file
guards         : who may use a path of the server's own API
key_editing    : creates, revokes and hashes keys in the file of keys
key_file       : the file of API keys
keys           : the keys and limits of a server, from its settings
limits         : the limits of each key
issuer_keys    : the keys of an identity provider, read again and again
part           : the files of keys, and the limits of each key
shares         : whose share of the engines pays for a request, and what the share weighs
tokens         : bearer tokens of an identity provider (JWT)
usage_file     : the SQLite file in which servers keep what keys have spent of their budgets
"""
