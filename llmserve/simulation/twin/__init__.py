"""The twin: the very scheduler, driven through the server's own last minutes under other settings."""
