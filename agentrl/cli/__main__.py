"""`python -m agentrl.cli`: the same as `agentrl`."""

from __future__ import annotations

from agentrl.cli import main

main()
