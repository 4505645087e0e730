"""When a bin should wait and when it should go: `llmserve solve`.

    python scripts/solve_dispatch.py --service deterministic --latency-ms 0.3051,1.0524 --energy-mj 19.899,19.603 \\
        --batch-min 1 --batch-max 32 --load 0.9 --energy-weight 1 --json
"""

import sys

from llmserve.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["solve", *sys.argv[1:]]))
