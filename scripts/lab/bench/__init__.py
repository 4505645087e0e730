"""What the laboratory's benchmarks and reproductions share.

    client     one way to ask a server, at once or each request at its time
    servers    front-ends, engines and vLLM as children that end with the script
    progress   what is being done: a bar in a terminal, plain lines without one
    results    rounds in turn, medians, JSON with a row a line
    tables     Markdown, and tables for a terminal
    figures    how figures look
    arguments  command lines

Importing it puts this repository, which is what is measured, on the path.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]  # of the repository

if str(ROOT) not in sys.path:
    sys.path.insert(1, str(ROOT))
