"""Which models share which GPUs: `llmserve plan`.

python scripts/plan_herd.py --instance instance.json --json
"""

import sys

from llmserve.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
