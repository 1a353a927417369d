"""Stand-ins with which the real runner plays simulated episodes: environment, agent and session.

Nothing of the length of a real episode is stored. A message's content is the number of tokens it stands for, and a
recorded segment holds one token whose id is the number of tokens it stands for, so that 8,192 episodes of 10,000 tokens
weigh as much as episodes of one word. Everything is drawn from the runner's own seeds: one plan gives one result.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import AgentRLError, ContractError, LimitReached
from agentrl.rollout.session import SessionSpec
from agentrl.simulate.cost import Workload
from agentrl.simulate.engine import Fleet, Line, Runs, VirtualEngine
from agentrl.types import Context, Group, Info, Message, Row, Sampled, Segment, Step, Trajectory

_HALF = np.full(1, -0.5, np.float32)


class VirtualEnv(Env):
    """Turns, tool times and rewards as the workload says."""

    def __init__(self, row: Row, work: Workload) -> None:
        super().__init__(row)
        self._work = work
        self._seed = 0
        self._equal = False
        self._turns = self._last = 0
        self._draw = random.Random()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The prompt; its name is the row's, because a group's prompt is in the cache once for all samples."""
        self._seed = seed or 0
        common = random.Random(self._seed)
        prompt = max(1, round(self._work.prompt.at(common.gauss(0.0, 1.0))))
        self._equal = common.random() < self._work.equal_share
        return [{"role": "user", "content": str(prompt), "difficulty": common.gauss(0.0, 1.0), "row": self._seed}], {}

    async def step(self, action: Message) -> Step:
        """Work for the tool's time."""
        if self._turns == 0:
            # The action's chance differs between the samples of a row, whose reset seed is the same.
            self._draw = random.Random(action["chance"])
            self._last = max(1, round(self._work.turns.at(self._draw.gauss(0.0, 1.0))))
        self._turns += 1
        seconds = self._work.tool.at(self._draw.gauss(0.0, 1.0))
        if seconds > 0:
            await asyncio.sleep(seconds)
        if self._turns >= self._last:
            return Step([], 1.0 if self._equal else self._draw.random(), True, False, {})
        told = max(0, round(self._work.observation.at(self._draw.gauss(0.0, 1.0))))
        return Step([{"role": "tool", "content": str(told)}], 0.0, False, False, {})


class VirtualAgent(Agent):
    """Passes new messages on, and nothing else."""

    async def act(self, observation: list[Message], client: Any) -> Message:
        """One action."""
        answer = await client.chat.completions.create(model="policy", messages=observation)
        if not isinstance(answer, dict):
            raise ContractError(f"a simulated agent needs a simulated session, got {answer!r:.100}")
        return answer


class VirtualSession:
    """One episode's place in an engine, and its record. A call costs `seconds` of the conductor, which is `line`."""

    failure: AgentRLError | None = None

    def __init__(self, fleet: Fleet, line: Line, seconds: float, work: Workload, spec: SessionSpec) -> None:
        self._spec = spec
        self._line, self._seconds = line, seconds
        self._work = work
        self._engine: VirtualEngine = fleet.assign()
        self._draw = random.Random(spec.seed)
        self._chance = self._draw.getrandbits(48)
        self._sampled = self._held = 0
        self._cached = 0
        self._flushes = -1
        self._difficulty = 0.0
        self._closed = False
        self._segments: list[Segment] = []
        self._marked = 0

    @property
    def chat(self) -> VirtualSession:
        """`chat.completions` is the session itself."""
        return self

    @property
    def completions(self) -> VirtualSession:
        """See `create`."""
        return self

    @property
    def metrics(self) -> Mapping[str, float]:
        """Nothing: the record says it all."""
        return {}

    async def create(self, *, messages: Sequence[Message], model: str) -> Message:
        """Sample one answer to the new messages."""
        left = self._spec.max_tokens - self._sampled
        if left <= 0:
            raise LimitReached(f"the episode's {self._spec.max_tokens} sampled tokens are used up")
        await self._line.work(self._seconds)
        told = sum(int(message["content"]) for message in messages)
        fresh = self._fresh(messages[0] if messages else {}, told)
        share = self._work.row_share
        z = sqrt(share) * self._difficulty + sqrt(1.0 - share) * self._draw.gauss(0.0, 1.0)
        tokens = min(left, max(1, round(self._work.response.at(z))))
        context = self._held + told
        runs = await self._engine.generate(context, fresh, tokens)
        self._record(told, runs)
        self._held = self._cached = context + tokens
        self._sampled += tokens
        return {"role": "assistant", "content": str(tokens), "chance": self._chance}

    def _fresh(self, first: Message, told: int) -> int:
        """Tokens that the engine has not in its cache."""
        if self._flushes != self._engine.flushes:  # published since: or this is the first turn
            self._flushes, self._cached = self._engine.flushes, 0
        if "row" in first:
            self._difficulty = first["difficulty"]
            if first["row"] in self._engine.prompts:
                return 0
            self._engine.prompts.add(first["row"])
        return self._held + told - self._cached

    def _record(self, told: int, runs: Runs) -> None:
        if told:
            self._segments.append(Segment(np.full(1, told, np.int32), None, Context()))
        for version, tokens in runs:
            source = Sampled(version, self._spec.temperature)
            self._segments.append(Segment(np.full(1, tokens, np.int32), _HALF, source))

    def marks(self) -> tuple[tuple[int, int], ...]:
        """The trajectory, where it grew."""
        grown, self._marked = len(self._segments) > self._marked, len(self._segments)
        return ((0, self._marked),) if grown else ()

    async def close(self) -> tuple[Trajectory, ...]:
        """What was recorded."""
        if not self._closed:
            self._closed = True
            self._engine.sessions -= 1
        return (Trajectory(tuple(self._segments)),) if self._segments else ()


class Batch:
    """What a simulated trainer reads off a batch's groups."""

    def __init__(self, groups: Sequence[Group], number: int) -> None:
        self.lengths: list[float] = []
        """Packed tokens of each sequence that is trained."""
        self.sampled = 0
        """Trained tokens."""
        self.stale: Counter[int] = Counter()
        """Trained tokens by their age in versions."""
        self.stops: Counter[str] = Counter()
        self.several = 0
        """Episodes with tokens of more than one version."""
        for group in groups:
            for episode in group.episodes:
                self.stops[episode.stop.value] += 1
                if episode.scored:
                    self._add(episode.trajectories, number)

    def _add(self, trajectories: Sequence[Trajectory], number: int) -> None:
        for trajectory in trajectories:
            length, versions = 0, set()
            for segment in trajectory.segments:
                tokens = int(segment.tokens[0])
                length += tokens
                if isinstance(segment.source, Sampled):
                    age = number - segment.source.version.number
                    self.sampled += tokens
                    self.stale[age] += tokens
                    versions.add(age)
            self.lengths.append(float(length))
            self.several += len(versions) > 1
