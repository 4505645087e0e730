"""What the laboratory's benchmarks and reproductions share.

    client     one way to ask a server, at once or each request at its time
    servers    front-ends, engines and vLLM as children that end with the script
    progress   what is being done: a bar in a terminal, plain lines without one
    results    rounds in turn, medians, JSON with a row a line
    tables     Markdown, and tables for a terminal
    figures    how figures look
    arguments  command lines

Importing it puts this repository on the path, which is what is measured, and scripts/: measuring an engine is a script
that users run too.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]  # of the repository
SCRIPTS = ROOT / "scripts"

sys.path[1:1] = [path for path in (str(ROOT), str(SCRIPTS)) if path not in sys.path]
