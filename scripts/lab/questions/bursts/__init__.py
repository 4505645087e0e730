"""What a burst costs the short request behind it, before an engine that runs one request at a time."""
