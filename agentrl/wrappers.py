"""Wrappers: one concern each, around any environment.

```python
Guess = wrap(GuessNumber, partial(TimeLimit, turns=5), partial(RetryWithFeedback, tries=2))
```

`wrap` gives a class again, which is named in TOML (`env.path = "my_env.py:Guess"`), checked, played and trained like
any other. The first wrapper is the innermost. Plain `def` environments run in a thread, wrapped or not.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agentrl.calling import Caller
from agentrl.contract import checked_reset, checked_step
from agentrl.env import Env
from agentrl.errors import ConfigError, ContractError
from agentrl.types import Info, Message, Row, Step


class Wrapper(Env):
    """An environment around another one. A subclass changes what passes, in `started` and in `stepped`.

    ```python
    class Louder(Wrapper):
        async def stepped(self, action, step):
            return step._replace(observation=[{**m, "content": m["content"].upper()} for m in step.observation])
    ```

    A step after the end is refused here, whatever the inner environment would do.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env.row)
        self.env = env
        self.tools = env.tools
        self.reward_range = env.reward_range
        self.over = True
        self._caller = Caller()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start the inner environment."""
        messages, info = await self.inner_reset(seed, options)
        self.over = False
        return await self.started(messages), info

    async def step(self, action: Message) -> Step:
        """Step the inner environment, and change what it says."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        step = await self.stepped(action, checked_step(await self._caller(self.env.step, action)))
        self.over = step.terminated or step.truncated
        return step

    async def close(self) -> None:
        """Close the inner environment."""
        try:
            await self._caller(self.env.close)
        finally:
            self._caller.end()

    def oracle(self, messages: list[Message]) -> Message | str | None:
        """The inner environment's."""
        return self.env.oracle(messages)

    async def started(self, messages: list[Message]) -> list[Message]:
        """The first messages, as they are to be shown."""
        return messages

    async def stepped(self, action: Message, step: Step) -> Step:
        """What the inner environment's step becomes."""
        return step

    async def inner_reset(self, seed: int | None, options: dict[str, Any] | None = None) -> tuple[list[Message], Info]:
        """Reset the inner environment, and take over its tools, which it may make only now."""
        given = {} if options is None else {"options": options}
        messages, info = checked_reset(await self._caller(self.env.reset, seed=seed, **given))
        self.tools = self.env.tools
        return messages, info


def wrap(env_class: type[Env], *wrappers: Callable[[Env], Env]) -> type[Env]:
    """A class whose instances are `env_class`'s in these wrappers, the first one innermost.

    It takes the same arguments and has the same rows. Without wrappers it still refuses a step after the end.
    """

    class Wrapped(Wrapper):
        __doc__ = env_class.__doc__

        def __init__(self, row: Row, **args: Any) -> None:
            env = env_class(row, **args)
            for wrapper in wrappers:
                env = wrapper(env)
            super().__init__(env)

        @classmethod
        def rows(cls, split: str, seed: int) -> Iterable[Row]:
            return env_class.rows(split, seed)

    Wrapped.__name__, Wrapped.__qualname__ = env_class.__name__, env_class.__qualname__
    # What `[env.args]` is checked against.
    Wrapped.__signature__ = inspect.signature(env_class)  # type: ignore[attr-defined]
    return Wrapped


class TimeLimit(Wrapper):
    """Truncates after `turns` steps, or with the first step that ends `seconds` after the reset.

    `info["truncated_by"]` is "max_turns" or "time_limit". A step that hangs is not cut here: a run's
    `rollout.time_limit` does that.
    """

    def __init__(self, env: Env, *, turns: int | None = None, seconds: float | None = None) -> None:
        if (turns is None) == (seconds is None):
            raise ContractError(f"TimeLimit(turns={turns}, seconds={seconds}): give one of the two")
        if (turns or seconds or 0) <= 0:
            raise ContractError(f"TimeLimit(turns={turns}, seconds={seconds}): the limit must be above 0")
        super().__init__(env)
        self.turns, self.seconds = turns, seconds
        self._taken = 0
        self._until = 0.0

    async def started(self, messages: list[Message]) -> list[Message]:
        """Begin to count."""
        self._taken = 0
        self._until = time.monotonic() + (self.seconds or 0.0)
        return messages

    async def stepped(self, action: Message, step: Step) -> Step:
        """Truncate where the limit is reached and the task itself goes on."""
        self._taken += 1
        if self.turns is not None and self._taken >= self.turns:
            return _truncated(step, "max_turns")
        if self.seconds is not None and time.monotonic() >= self._until:
            return _truncated(step, "time_limit")
        return step


class TokenLimit(Wrapper):
    """Truncates once the text of all messages, shown and answered, has `limit` tokens.

    `count` counts them: a function of a text, or a model folder, whose tokenizer then does. Exact to the text, without
    what a chat template adds; `rollout.max_tokens` limits what is sampled, to the token.
    """

    def __init__(self, env: Env, *, limit: int, count: Callable[[str], int] | str | Path) -> None:
        if limit <= 0:
            raise ContractError(f"TokenLimit(limit={limit}): the limit must be above 0")
        super().__init__(env)
        self.limit = limit
        self._count = _tokenizer(Path(count)) if isinstance(count, str | Path) else count
        self.used = 0

    async def started(self, messages: list[Message]) -> list[Message]:
        """Begin to count."""
        self.used = sum(self._count(text) for message in messages for text in _texts(message))
        return messages

    async def stepped(self, action: Message, step: Step) -> Step:
        """Count the answer and what is new; truncate where that is too much."""
        self.used += sum(self._count(text) for message in (action, *step.observation) for text in _texts(message))
        return _truncated(step, "max_tokens") if self.used >= self.limit else step


class ShapeReward(Wrapper):
    """Passes each step's reward through `shape(reward, step)`; "no verdict" stays none.

    ```python
    wrap(GuessNumber, partial(ShapeReward, shape=lambda reward, step: reward - 0.01))   # each turn costs a little
    ```
    """

    def __init__(self, env: Env, *, shape: Callable[[float, Step], float]) -> None:
        super().__init__(env)
        self.reward_range = None  # that of the shaped reward is not known
        self._shape = shape

    async def stepped(self, action: Message, step: Step) -> Step:
        """Shape the reward."""
        return step if step.reward is None else step._replace(reward=self._shape(step.reward, step))


class FormatObservation(Wrapper):
    """Passes every message that the environment says through `format`, first ones and later ones."""

    def __init__(self, env: Env, *, format: Callable[[Message], Message]) -> None:
        super().__init__(env)
        self._format = format

    async def started(self, messages: list[Message]) -> list[Message]:
        """Format the first messages."""
        return [self._format(message) for message in messages]

    async def stepped(self, action: Message, step: Step) -> Step:
        """Format what is new."""
        return step._replace(observation=[self._format(message) for message in step.observation])


class RetryWithFeedback(Wrapper):
    """Where an episode ended with less than `enough`, says so and lets the agent try the same task again.

    The inner environment is reset with the seed and options it had, so that the task is the same; its first messages
    are not repeated. A try that is followed by another earns nothing with its last step, and the tries after it are
    multiplied by `discount` each. `feedback` is a text, or a function of the failed step.
    """

    def __init__(
        self,
        env: Env,
        *,
        tries: int = 3,
        enough: float = 1.0,
        discount: float = 1.0,
        feedback: str | Callable[[Step], str] = "That is not right. Try again.",
    ) -> None:
        if tries < 1 or not 0 <= discount <= 1:
            raise ContractError(f"tries = {tries} must be at least 1 and discount = {discount} from 0 to 1")
        super().__init__(env)
        self.tries, self.enough, self.discount = tries, enough, discount
        self._feedback = feedback
        self._seed: int | None = None
        self._options: dict[str, Any] | None = None
        self._failed = 0
        self._earned = 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The first try."""
        # Without a seed one is drawn, from those before it: the next try is to be of the same task.
        drawn = self.generator(seed).randrange(2**31)
        self._seed, self._options = drawn if seed is None else seed, options
        self._failed, self._earned = 0, 0.0
        return await super().reset(seed=self._seed, options=options)

    async def stepped(self, action: Message, step: Step) -> Step:
        """Discount what is earned; after a failed try, begin the next."""
        if step.reward is None:
            return step
        self._earned += step.reward
        scale = self.discount**self._failed
        info = {**step.info, "tries": self._failed + 1}
        if not step.terminated or self._earned >= self.enough or self._failed + 1 >= self.tries:
            return step._replace(reward=step.reward * scale, info=info)
        self._failed += 1
        self._earned = 0.0
        text = self._feedback if isinstance(self._feedback, str) else self._feedback(step)
        await self.inner_reset(self._seed, self._options)
        return Step([*_answered(action, step), {"role": "user", "content": text}], 0.0, False, False, info)


def _truncated(step: Step, by: str) -> Step:
    if step.terminated or step.truncated:
        return step
    return step._replace(truncated=True, info={**step.info, "truncated_by": by})


def _answered(action: Message, step: Step) -> list[Message]:
    """The observation, with an answer to every call: a chat in which one is missing is refused by most templates."""
    answered = {message.get("tool_call_id") for message in step.observation}
    missing = [call for call in action.get("tool_calls") or [] if call.get("id") not in answered]
    done = [{"role": "tool", "tool_call_id": call.get("id") or "", "content": "done"} for call in missing]
    return [*done, *step.observation]


def _texts(message: Message) -> list[str]:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    written = [message.get("content"), message.get("reasoning_content")]
    return [str(text) for text in (*written, *(call.get(k) for call in calls for k in ("name", "arguments"))) if text]


def _tokenizer(folder: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer  # only those who count pay for it

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"TokenLimit(count={str(folder)!r}): there is no {path}; give a model folder or a function")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
