"""The store of files and batches: rows, and files that only grow.

batches     : batches in the database, as clients use them
database    : the database of the store
files       : files in the database
folder      : the folder of the store
owner       : batches in the database, as the servers that work on them use them
ownership   : which servers are alive
rows        : statements on files and batches within a transaction
servers     : the servers that share a store
tables      : the tables of the store, in SQLite or PostgreSQL
upload_quota : what uploads may write while they arrive
"""
