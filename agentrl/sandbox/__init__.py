"""Sandboxes: the contract, the warm pool, what every kind of box is made of. The kinds are in `agentrl.sandboxes`."""

from agentrl.errors import SandboxLost
from agentrl.sandbox.check import check_sandbox
from agentrl.sandbox.facade import E2BStyle
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.pool import open_sandbox
from agentrl.sandbox.types import ExecResult, Sandbox, SandboxPool

__all__ = [
    "E2BStyle",
    "ExecResult",
    "Sandbox",
    "SandboxLost",
    "SandboxOptions",
    "SandboxPool",
    "check_sandbox",
    "open_sandbox",
]
