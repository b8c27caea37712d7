"""The ``salientpp`` command."""

from salientpp.cli.main import main

__all__ = ["main"]
