"""`agentrl eval`: an environment played by any model behind an OpenAI-compatible URL, with the same episode loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI

from agentrl.conductor.evaluation import Evaluation, evaluate
from agentrl.errors import AgentRLError, EngineError, RequestRefused
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import Player
from agentrl.rollout.session import MakeAgent, MakeEnv, SessionSpec
from agentrl.types import Row, Trajectory


class ApiSession:
    """A `Session` over somebody else's endpoint: nothing is recorded, so episodes have no trajectories."""

    failure: AgentRLError | None = None

    def __init__(self, client: AsyncOpenAI, model: str, spec: SessionSpec) -> None:
        self.chat = SimpleNamespace(completions=_Completions(client, model, spec))

    @property
    def metrics(self) -> Mapping[str, float]:
        """Calls and tokens, as the API reports them."""
        completions: _Completions = self.chat.completions
        return {"calls": float(completions.calls), "sampled_tokens": float(completions.tokens)}

    def marks(self) -> tuple[tuple[int, int], ...]:
        """None: there are no tokens of ours."""
        return ()

    async def close(self) -> tuple[Trajectory, ...]:
        """Nothing to end."""
        return ()


class _Completions:
    def __init__(self, client: AsyncOpenAI, model: str, spec: SessionSpec) -> None:
        self._client, self._model, self._spec = client, model, spec
        self.calls = self.tokens = 0

    async def create(self, *, messages: Any, model: str = "", **settings: Any) -> Any:
        """One completion by the named model; a fault of network or server is infrastructure, not the policy's."""
        asked = {"temperature": self._spec.temperature, **settings}
        try:
            reply = await self._client.chat.completions.create(model=self._model, messages=messages, **asked)
        except (APIConnectionError, APITimeoutError) as error:
            raise EngineError(f"{self._client.base_url} cannot be reached: {error}") from error
        except APIStatusError as error:
            kind = RequestRefused if 400 <= error.status_code < 500 and error.status_code != 429 else EngineError
            raise kind(f"{self._client.base_url} answered {error.status_code}: {error.message}") from error
        self.calls += 1
        self.tokens += reply.usage.completion_tokens if reply.usage else 0
        return reply


async def evaluate_api(
    make_env: MakeEnv,
    make_agent: MakeAgent,
    rows: list[Row],
    *,
    base_url: str,
    api_key: str,
    model: str,
    samples: int,
    concurrency: int,
    temperature: float,
    max_turns: int,
    seed: int,
) -> Evaluation:
    """Play every row `samples` times against the model."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=2)
    player = Player(
        RolloutOptions(max_turns=max_turns),
        make_env=make_env,
        make_agent=make_agent,
        open_session=lambda spec: ApiSession(client, model, spec),
    )
    try:
        return await evaluate(
            player,
            rows,
            name="eval",
            samples=samples,
            seed=seed,
            temperature=temperature,
            concurrency=concurrency,
        )
    finally:
        await client.close()
