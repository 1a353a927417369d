"""What a rollout needs of its neighbours: a session of the endpoint, and how environments and agents are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import AgentRLError
from agentrl.types import Row, Trajectory

if TYPE_CHECKING:
    from agentrl.tool import Tool


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened with.

    `id` is unique over the life of the run. `seed` is None where the engine may choose. `max_tokens` is the whole
    episode's. `deadline` is absolute, in `loop.time()` seconds.
    """

    id: str
    seed: int | None
    training: bool
    temperature: float
    max_tokens: int
    deadline: float


class Mark(NamedTuple):
    """A trajectory that grew, and its length now."""

    trajectory: int
    end: int


class Session(Protocol):
    """One episode's conversation with the policy: a `ChatClient` that records what was sampled.

    ```python
    spec = SessionSpec("4.0-3", seed=7, training=True, temperature=1.0, max_tokens=512, deadline=now + 60)
    session = open_session(spec)
    action = await agent.act(observation, session)
    session.marks()                       # ((0, 57),): trajectory 0 is 57 tokens long after this action
    trajectories = await session.close()
    ```
    """

    @property
    def chat(self) -> Any:
        """`chat.completions.create`, see `agentrl.agent.ChatClient`."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the session measured, for `Episode.metrics`."""
        ...

    @property
    def failure(self) -> AgentRLError | None:
        """The last error of a model call that was not the client's doing: over HTTP, an agent sees only its form."""
        ...

    def marks(self) -> tuple[tuple[int, int], ...]:
        """The trajectories that grew since the last call, in order, each with its length."""
        ...

    async def close(self) -> tuple[Trajectory, ...]:
        """End it; everything that was recorded."""
        ...


OpenSession = Callable[[SessionSpec], Session]
"""Opens a session; the conductor binds the endpoint to it."""
MakeEnv = Callable[[Row], Env]
"""A fresh environment from a data row."""
MakeOneAgent = Callable[[Sequence["Tool"]], Agent]
"""A fresh agent, given the environment's tools after `reset`; an `Agent` class is one."""


class AgentByRow(NamedTuple):
    """Of a mixture: which agent plays a row."""

    of: Callable[[Row], MakeOneAgent]


MakeAgent = MakeOneAgent | AgentByRow


def agent_of(make_agent: MakeAgent, row: Row) -> MakeOneAgent:
    """How the agent that plays `row` is made."""
    return make_agent.of(row) if isinstance(make_agent, AgentByRow) else make_agent
