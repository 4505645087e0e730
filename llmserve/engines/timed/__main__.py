"""`python -m llmserve.engines.timed`: see server.py."""

import sys

from llmserve.errors import ConfigError
from llmserve.runtime.extras import need

if __name__ == "__main__":
    try:
        need("timed", "aiohttp", why="the timed engine")
    except ConfigError as error:
        sys.exit(f"llmserve.engines.timed: error: {error}")
    from llmserve.engines.timed.server import main

    main()
