"""Gymnasium, both ways: a `gymnasium.Env` as an environment, and an environment as a `gymnasium.Env`.

```python
class Lake(GymEnv):                                          # gymnasium → agentrl
    def make(self):
        return gymnasium.make("FrozenLake-v1", is_slippery=False)

register_env("Guess-v0", GuessNumber)                        # agentrl → gymnasium
env = gymnasium.make("Guess-v0")
observation, info = env.reset(seed=1)                        # texts in, texts out
```

Needs `pip install 'agentrl[envs]'`. docs/environments.md has the details.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import operator
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import gymnasium
import numpy as np

from agentrl.calling import Caller
from agentrl.check.actions import called, said
from agentrl.config import resolve_object
from agentrl.contract import checked_number, checked_reset, checked_step
from agentrl.env import Env
from agentrl.errors import ContractError, DataError
from agentrl.spaces import AnyText, instruction, read, written
from agentrl.types import Info, Message, Row, Step

Result = TypeVar("Result")
SIZES = {"train": 20_000, "eval": 256}
MOST_ROWS = 1000
_FIVE = "a gymnasium step must return five values (observation, reward, terminated, truncated, info)"
_TWO = "a gymnasium reset must return (observation, info)"


class GymEnv(Env):
    """A `gymnasium.Env` whose spaces can be written as text. Its calls run in one thread.

    ```toml
    [env]
    path = "agentrl.gym:GymEnv"
    args = {id = "FrozenLake-v1", kwargs = {is_slippery = false}, actions = ["left", "down", "right", "up"]}
    ```

    `id` and `kwargs` are `gymnasium.make`'s; a subclass may define `make` instead, and `describe` for observations that
    are no text by themselves. `actions` names the actions of a Discrete space. `task` stands before everything. With
    `ansi` the environment's own "ansi" rendering is shown. An answer that is no action is told so, costs `invalid` and
    does not step: a run's `max_turns` bounds that. A row may hold the `seed` of its episode.
    """

    def __init__(
        self,
        row: Row,
        *,
        id: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        task: str = "",
        ansi: bool = False,
        invalid: float = 0.0,
    ) -> None:
        super().__init__(row)
        self.id, self.kwargs, self.actions = id, dict(kwargs or {}), tuple(actions)
        self.task, self.ansi, self.invalid = task, ansi, invalid
        self.gym: gymnasium.Env[Any, Any] | None = None
        self.over = True
        self._caller = Caller()

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Seeds of episodes, even ones to train and odd ones to evaluate."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        return ({"seed": 2 * (seed * SIZES["train"] + n) + (split == "eval")} for n in range(SIZES[split]))

    def make(self) -> gymnasium.Env[Any, Any]:
        """The gymnasium environment; a fresh one for each instance."""
        if self.id is None:
            raise ContractError(f"{type(self).__name__} does not know which: give env.args.id, or define `make`")
        kwargs = {"render_mode": "ansi", **self.kwargs} if self.ansi else self.kwargs
        return gymnasium.make(self.id, **kwargs)

    def describe(self, observation: Any) -> str:
        """An observation as text; by its space, unless a subclass knows better."""
        assert self.gym is not None, "there is an observation, so there is an environment"
        return written(self.gym.observation_space, observation)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Begin; says what to do and the first observation."""
        return await self._caller(self._reset, seed, options)  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        """Read the action, and take it."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        return await self._caller(self._step, _text(action.get("content")))  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the gymnasium environment."""
        try:
            if self.gym is not None:
                await self._caller(self.gym.close)
        finally:
            self._caller.end()

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[list[Message], Info]:
        # The row's seed is the task; without any seed gymnasium goes on with the generator it has.
        if self.gym is None or seed is not None:
            seed = self.row.get("seed", seed)
        if self.gym is None:
            self.gym = self.make()
        result = self.gym.reset(seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ContractError(f"{_TWO}, got {result!r:.200}; and {_FIVE}")
        self.over = False
        told = "\n".join(text for text in (self.task, instruction(self.gym.action_space, self.actions)) if text)
        return [{"role": "user", "content": f"{told}\n\n{self._shown(result[0])}".strip()}], dict(result[1])

    def _step(self, text: str) -> Step:
        assert self.gym is not None, "reset comes before step"
        try:
            action = read(self.gym.action_space, text, self.actions)
        except ValueError as error:
            told = f"{error} {instruction(self.gym.action_space, self.actions)}".strip()
            return Step([{"role": "user", "content": told}], self.invalid, False, False, {"invalid_action": True})
        result = self.gym.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise ContractError(f"{_FIVE}, got {result!r:.200}: the old `done` is now terminated and truncated")
        observation, reward, terminated, truncated, info = result
        self.over = bool(terminated or truncated)
        shown: list[Message] = [] if self.over else [{"role": "user", "content": self._shown(observation)}]
        # Gymnasium allows both flags at once: what the task itself ended, nothing outside cut short.
        if isinstance(reward, np.ndarray) and reward.size == 1:
            reward = reward.item()
        earned = checked_number(reward, "step: a gymnasium environment's reward")
        return Step(shown, earned, bool(terminated), bool(truncated and not terminated), dict(info))

    def _shown(self, observation: Any) -> str:
        if not self.ansi:
            return self.describe(observation)
        assert self.gym is not None, "there is an observation, so there is an environment"
        return str(self.gym.render())


class AsGymnasium(gymnasium.Env[str, str]):
    """An environment as a `gymnasium.Env`: texts in, texts out.

    `env` is the class or its dotted path, `args` its arguments. `rows` are played in order, one a reset, over and over
    (by default the environment's own training rows, at most 1,000). `reset(seed=n)` begins at row n, and everything
    after it follows from n: `reset(seed=7)`, `reset()` gives the same two episodes each time. `options={"row": …}`
    chooses one; other options are the environment's. The new messages are joined to one text, and are in
    `info["messages"]` as they are; an action that is a JSON object `{"name": …, "arguments": …}` and names a tool is a
    call of it. No verdict is a reward of NaN.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (gymnasium's own contract)

    def __init__(
        self,
        env: type[Env] | str,
        rows: Iterable[Row] | None = None,
        *,
        args: Mapping[str, Any] | None = None,
        max_length: int = 1_000_000,
        render_mode: str | None = None,
    ) -> None:
        self.env_class: type[Env] = resolve_object(env) if isinstance(env, str) else env
        self.rows = list(itertools.islice(rows if rows is not None else self.env_class.rows("train", 0), MOST_ROWS))
        if not self.rows:
            raise DataError(f"{self.env_class.__name__}: there are no rows to play")
        self.args = dict(args or {})
        self.observation_space = AnyText(max_length)
        self.action_space = AnyText(max_length)
        self.render_mode = render_mode
        self.env: Env | None = None
        self.over = True
        self._next = 0
        self._said: list[Message] = []
        self._loop: _Loop | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The next row's first messages, as text."""
        seed = None if seed is None else operator.index(seed)
        super().reset(seed=seed)
        self.over = True  # until this one has begun
        if seed is not None:
            self._next = seed
        rest = dict(options or {})
        given = rest.pop("row", None)
        row = given if given is not None else self.rows[self._next % len(self.rows)]
        self._next += given is None
        # A row of its own, and a seed of its own for each episode that follows from the last one given.
        inner_seed = int(self.np_random.integers(2**31))
        messages, info = self._run(self._begin(copy.deepcopy(row), inner_seed, rest))
        self._said = list(messages)
        self.over = False
        # Copies: what a caller does to them must reach neither the rows nor later infos.
        told = {**info, "messages": messages, "row": row, "tools": self._schemas()}
        return _joined(messages), copy.deepcopy(told)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Gymnasium's five values."""
        if self.over or self.env is None:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset first")
        message = self._message(action)
        step = self._run(self._take(message))
        self._said += [message, *step.observation]
        self.over = step.terminated or step.truncated
        reward = float("nan") if step.reward is None else step.reward
        info = {**step.info, "messages": step.observation, "verdict": step.reward is not None}
        return _joined(step.observation), reward, step.terminated, step.truncated, copy.deepcopy(info)

    def render(self) -> str | None:
        """The conversation so far, where `render_mode` is "ansi"."""
        if self.render_mode != "ansi":
            return None
        return "\n".join(f"[{message['role']}] {message.get('content') or ''}" for message in self._said)

    def close(self) -> None:
        """Close the environment, and end its event loop."""
        if self._loop is not None:
            try:
                self._run(self._end())
            finally:
                self._loop.stop()
                self._loop = None

    async def _begin(self, row: Row, seed: int, options: dict[str, Any]) -> tuple[list[Message], Info]:
        await self._end()
        self.env = self.env_class(row, **self.args)
        self._caller = Caller()
        given = {"options": options} if options else {}
        return checked_reset(await self._caller(self.env.reset, seed=seed, **given))

    async def _take(self, message: Message) -> Step:
        assert self.env is not None, "reset comes before step"
        return checked_step(await self._caller(self.env.step, message))

    async def _end(self) -> None:
        if self.env is not None:
            env, self.env = self.env, None
            try:
                await self._caller(env.close)
            finally:
                self._caller.end()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop is None:
            self._loop = _Loop()
        return self._loop.run(work)

    def _schemas(self) -> list[dict[str, Any]]:
        return [] if self.env is None else [tool.schema for tool in self.env.tools]

    def _message(self, action: str) -> Message:
        names = {schema["function"]["name"] for schema in self._schemas()}
        if names:
            try:
                given = json.loads(action)
            except ValueError:
                given = None
            if isinstance(given, dict) and given.get("name") in names:
                return called(given["name"], given.get("arguments", {}), f"call_{len(self._said)}")
        return said(action)


def register_env(
    id: str, env: type[Env] | str, rows: Iterable[Row] | None = None, *, args: Mapping[str, Any] | None = None
) -> None:
    """Make `gymnasium.make(id)` give an `AsGymnasium` of `env`."""
    kept = None if rows is None else list(itertools.islice(rows, MOST_ROWS))
    settings = {"env": env, "rows": kept, "args": dict(args or {})}
    gymnasium.register(id=id, entry_point="agentrl.gym:AsGymnasium", kwargs=settings)


class _Loop:
    """An event loop in a thread: gymnasium is synchronous, and its caller may be in a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="agentrl-gymnasium")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30.0)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _text(content: Any) -> str:
    """What an assistant message says; of a list of parts, their texts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""


def _joined(messages: Sequence[Message]) -> str:
    texts = [message.get("content") or "" for message in messages]
    return "\n\n".join(text if isinstance(text, str) else json.dumps(text) for text in texts)
