"""`python -m llmserve.engines.timed`: see server.py."""

from llmserve.engines.timed.server import main

if __name__ == "__main__":
    main()
