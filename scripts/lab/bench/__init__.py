"""What the laboratory's benchmarks and reproductions share.

Importing it puts scripts/ on the path: measuring an engine is a script that users run too.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]  # of the repository
SCRIPTS = ROOT / "scripts"

if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))
