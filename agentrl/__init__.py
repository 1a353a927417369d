"""Reinforcement learning of multi-turn LLM agents: your environment, your agent, asynchronous decoupled PPO.

Names are loaded when they are first used, so that `import agentrl` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Not on first use: importing the module `agentrl.tool` anywhere would bind the name to the module, not the decorator.
from agentrl.tool import Tool, run_tools, tool

if TYPE_CHECKING:
    from agentrl.agent import Agent, ChatClient
    from agentrl.env import Env
    from agentrl.reward.score import Reward, Score
    from agentrl.types import Message, Row, Step

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "ChatClient",
    "Env",
    "Message",
    "Reward",
    "Row",
    "Score",
    "Step",
    "Tool",
    "__version__",
    "run_tools",
    "tool",
]

_HOMES = {
    "Agent": "agentrl.agent",
    "ChatClient": "agentrl.agent",
    "Env": "agentrl.env",
    "Message": "agentrl.types",
    "Reward": "agentrl.reward.score",
    "Row": "agentrl.types",
    "Score": "agentrl.reward.score",
    "Step": "agentrl.types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
