"""Batch jobs: files of requests that wait in the one queue of the server, and survive the death of any process.

endpoints  : the endpoints of files and batches
objects    : OpenAI's file and batch objects, and the statuses of a batch
part       : batch jobs: a store of files and batches whose lines run beside the requests of clients
service    : the batch jobs of a server, as its endpoints use them
submission : how a line of a batch becomes a request of its key
sums       : sums of batch jobs for the page
uploads    : multipart bodies that go to the disk as they arrive, and are never in memory as a whole
"""
