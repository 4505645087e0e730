"""The twin: the very scheduler, driven through the requests of a journal under other settings."""
