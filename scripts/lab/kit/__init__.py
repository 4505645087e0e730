"""The kit that the laboratory's benchmarks and reproductions share.

    client     send requests to a server, at once or each at its own time
    servers    start front-ends, engines and vLLM as child processes that end with the script
    progress   show progress: a bar in a terminal, plain lines without one
    rows       rows of measured numbers: groups, medians, ratios
    results    the order of rounds, and JSON files
    tables     Markdown tables, and tables for a terminal
    figures    the style of figures
    arguments  command lines
    postgres   a PostgreSQL server of a script's own

Importing this package puts the repository, which is measured, on the path.
"""

import sys
from pathlib import Path

LAB = Path(__file__).resolve().parents[1]
ROOT = LAB.parents[1]  # of the repository

if str(ROOT) not in sys.path:
    sys.path.insert(1, str(ROOT))
