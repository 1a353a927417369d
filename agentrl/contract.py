"""Checks of what an environment and an agent return, at the moment they return it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from agentrl.errors import ContractError
from agentrl.types import Info, Message, Step

_RESET = "reset must return (messages, info): a list of chat messages and a dict"
_STEP = "step must return the five values (observation, reward, terminated, truncated, info)"


def checked_reset(result: Any, *, content: bool = True) -> tuple[list[Message], Info]:
    """What `Env.reset` returned; ContractError where it is something else. `content`: what messages hold is looked at
    too."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(f"{_RESET}, got {_shape(result)}; and {_STEP}")
    messages, info = result
    return _messages(messages, "reset", content), _info(info, "reset")


def checked_step(result: Any, *, content: bool = True) -> Step:
    """What `Env.step` returned; ContractError where it is something else."""
    if not isinstance(result, tuple) or len(result) != 5:
        hint = ""
        if isinstance(result, tuple) and len(result) == 4:
            hint = (
                ": the old four-value `done` is now two, terminated (the task ended) and truncated (it was cut short)"
            )
        raise ContractError(f"{_STEP}, got {_shape(result)}{hint}")
    observation, reward, terminated, truncated, info = result
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise ContractError(f"step: {name} must be a bool, got {flag!r}")
    return Step(
        _messages(observation, "step", content),
        None if reward is None else checked_number(reward, "step: the reward"),
        bool(terminated),
        bool(truncated),
        _info(info, "step"),
    )


LARGEST = 1e30
"""Of rewards: sums and squares of smaller ones stay within float64, advantages within float32."""


def checked_number(value: Any, what: str) -> float:
    """A finite float that training can add up in float32; ContractError otherwise."""
    # Compared before it is converted: a whole number may be larger than any float.
    if not isinstance(value, Real) or not -LARGEST <= value <= LARGEST:  # type: ignore[operator]
        shown = f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else repr(value)[:80]
        raise ContractError(
            f"{what} must be a finite number of at most {LARGEST:g}, or None for 'no verdict', got {shown}"
        )
    return float(value)


def checked_parts(info: Info) -> dict[str, float]:
    """`info["reward_parts"]`: what the reward is made of, by name; empty where there is none."""
    parts = info.get("reward_parts")
    if parts is None:
        return {}
    if not isinstance(parts, Mapping):
        raise ContractError(f"info['reward_parts'] must be a dict of names and numbers, got {parts!r}")
    return {str(name): checked_number(value, f"reward part {name!r}") for name, value in parts.items()}


def checked_action(action: Any) -> Message:
    """What `Agent.act` returned; ContractError where it is no assistant message."""
    if not isinstance(action, dict) or action.get("role") != "assistant":
        raise ContractError(
            f"act must return one assistant message (a dict with role 'assistant'), got {action!r:.200}"
        )
    return action


def _messages(messages: Any, where: str, content: bool) -> list[Message]:
    if not isinstance(messages, list):
        raise ContractError(f"{where}: the observation must be a list of chat messages, got {_shape(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ContractError(f"{where}: a chat message is a dict with a 'role', got {message!r:.200}")
        if content:
            _content(message.get("content"), where)
    # A copy, because agents keep and edit what they are given and environments may reuse it.
    return copy.deepcopy(messages)


def _content(content: Any, where: str) -> None:
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ContractError(
                f"{where}: a message's content is no valid Unicode: {error}; decode what you read with errors='replace'"
            ) from error
    elif content is not None and not (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        raise ContractError(f"{where}: a message's content must be text, got {_shape(content)} {content!r:.80}")


def _info(info: Any, where: str) -> Info:
    if not isinstance(info, dict):
        raise ContractError(f"{where}: info must be a dict, got {_shape(info)}")
    return info


def _shape(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
