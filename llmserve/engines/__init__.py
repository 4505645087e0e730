"""The workers: every engine is an OpenAI-compatible HTTP server somewhere."""
