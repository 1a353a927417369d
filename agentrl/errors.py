"""Every error that agentrl raises on purpose.

    AgentRLError
    ├── ConfigError            a setting, path, row or template that cannot work: fix the input, then start again
    │   └── DataError          a data row or a gold answer that cannot be used
    ├── ContractError          user code broke a documented contract (reset/step shape, reward type, tool schema)
    ├── InfrastructureError    not the policy's fault: retried, never scored, never in a baseline
    │   ├── EngineError        an engine is lost, refused, or answered something inconsistent
    │   │   ├── RequestRefused a deterministic refusal of one request (context too long, bad id): never retried
    │   │   └── EngineLost     the connection to an engine is gone: what it had sent may go on at another
    │   ├── SandboxLost        the box is gone; says nothing about the program that ran in it
    │   └── DeadlineExceeded   a wait ran out; the message names what was waited for
    ├── LimitReached           a token, turn or time limit of the episode: the episode is truncated, not failed
    └── RunError               the run cannot go on: names the process, the reason and the remedy

An error's text says what, the value, what was expected, and the remedy.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Root of every error raised on purpose by agentrl."""


class ConfigError(AgentRLError):
    """A setting, path or template that cannot work."""


class DataError(ConfigError):
    """A data row or gold answer that cannot be used."""


class ContractError(AgentRLError):
    """User code broke a documented contract."""


class InfrastructureError(AgentRLError):
    """A fault that the policy did not cause: no verdict, retried."""


class EngineError(InfrastructureError):
    """An engine is lost or answered something inconsistent."""


class RequestRefused(EngineError):
    """The engine refused this request for a reason that a retry cannot change."""


class EngineLost(EngineError):
    """The connection to an engine is gone, or cannot be made."""


class SandboxLost(InfrastructureError):
    """The sandbox is gone; nothing is known about the program that ran in it."""


class DeadlineExceeded(InfrastructureError):
    """A wait ran out; the message names what was waited for."""


class LimitReached(AgentRLError):
    """The episode used up its tokens, turns or time."""


class RunError(AgentRLError):
    """The run cannot go on."""
