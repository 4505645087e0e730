"""HTTP in, HTTP out. FastAPI and pydantic live only here."""
