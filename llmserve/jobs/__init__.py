"""Batch jobs: files of requests that wait in the one queue of the server, and survive whatever dies."""
