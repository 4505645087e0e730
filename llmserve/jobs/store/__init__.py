"""The store of files and batches: rows in a database, and files that only grow.

batches      : batches in the database, as clients use them
files        : files in the database, as clients use them
owner        : batches in the database, as the servers that work on them use them
servers      : the servers that share a store, and which of them count as alive
rows         : statements on files and batches within a transaction
tables       : the tables of the store, and what each of their versions has added
database     : transactions, and what a database must do for the store
opening      : opens a database by its URL, and brings its tables to this version
sqlite       : SQLite as the store's database, for one server
postgresql   : PostgreSQL as the store's database, for several servers
folder       : the folder of the store's files
upload_quota : what uploads may write while they arrive
"""
