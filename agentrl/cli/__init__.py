"""The commands. Each one loads its config, checks it, runs, and tells what went wrong in one readable message."""

from __future__ import annotations

# In the order of the help.
from agentrl.cli import runs  # isort: split

from agentrl.cli import look  # isort: split

from agentrl.cli import author  # isort: split

from agentrl.cli.shared import app, tell
from agentrl.process import collect_seldom

__all__ = ["app", "author", "look", "main", "runs", "tell"]


def main() -> None:
    """The console script."""
    collect_seldom()
    app()
