"""Sessions over somebody else's endpoint: an environment played by any model behind an OpenAI-compatible URL."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI

from agentrl.errors import AgentRLError, EngineError, RequestRefused
from agentrl.rollout.session import SessionSpec
from agentrl.types import Trajectory


class ApiSession:
    """A `Session` over an API: nothing is recorded, so episodes have no trajectories.

    `settings` go with each call that does not set them itself. `client` is shared and not closed here.
    """

    failure: AgentRLError | None = None

    def __init__(
        self, client: AsyncOpenAI, model: str, spec: SessionSpec, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._completions = _Completions(client, model, {"temperature": spec.temperature, **(settings or {})})
        self.chat = SimpleNamespace(completions=self._completions)
        self.base_url = str(client.base_url)
        self.api_key = client.api_key

    @property
    def metrics(self) -> Mapping[str, float]:
        """Calls and tokens, as the API reports them."""
        return {"calls": float(self._completions.calls), "sampled_tokens": float(self._completions.tokens)}

    def marks(self) -> tuple[tuple[int, int], ...]:
        """None: there are no tokens of ours."""
        return ()

    async def close(self) -> tuple[Trajectory, ...]:
        """Nothing to end."""
        return ()


class _Completions:
    def __init__(self, client: AsyncOpenAI, model: str, settings: Mapping[str, Any]) -> None:
        self._client, self._model, self._settings = client, model, settings
        self.calls = self.tokens = 0

    async def create(self, *, messages: Any, model: str = "", **settings: Any) -> Any:
        """One completion by the named model; a fault of network or server is infrastructure, not the policy's."""
        asked = {**self._settings, **settings}
        # Which of several agents asks is of interest to our own endpoint alone.
        extra = {key: value for key, value in (asked.pop("extra_body", None) or {}).items() if key != "agent"}
        if extra:
            asked["extra_body"] = extra
        asked.pop("agent", None)
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
