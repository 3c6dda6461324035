"""The fault suite: what happens to a repository when things go wrong, in figures.

``python -m tests.fault --full`` runs every fault at the size of its bar and records the figures;
``tests/test_fault.py`` runs a short version of each.
"""

import os
import sys
from pathlib import Path

# The modules beside this package go by their plain names, as under pytest.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# A fault of a service must meet whoever pulls from it.
os.environ["KVGRAFT_CACHE_DIR"] = "off"
