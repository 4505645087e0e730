"""The HTTP side of the front-end. Only this package imports FastAPI."""
