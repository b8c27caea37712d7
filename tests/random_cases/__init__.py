"""Random cases, and the laws that they are tested with. Outside pytest, the folders of the modules below are added to the path here."""

import sys
from pathlib import Path

for folder in (Path(__file__).parents[1], Path(__file__).parents[1] / "support"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
