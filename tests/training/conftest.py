"""`training` is a folder of the repository, not of the installed package: make it importable for a bare `pytest`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
