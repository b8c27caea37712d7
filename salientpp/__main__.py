"""Runs ``python -m salientpp``."""

import sys

from salientpp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
