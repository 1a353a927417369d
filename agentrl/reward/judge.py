"""A judge model as a reward, behind any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

import aiohttp

from agentrl.errors import ConfigError
from agentrl.reward.options import JudgeOptions
from agentrl.reward.score import Score
from agentrl.types import Row

_SCORE = re.compile(r"^\W*score\W*?[:=]\W*?(-?\d+(?:\.\d+)?)\s*(?:/\s*\d+)?\W*$", re.IGNORECASE | re.MULTILINE)
_FIRST_WAIT = 0.5
_PASSING_STATUS = frozenset({408, 409, 425, 429})


class _Passing(Exception):
    """A fault of the moment: worth another attempt."""


class _Refused(Exception):
    """The server will not answer this, however often it is asked."""


class Judge:
    """Asks a model for a score from `lowest` to `highest`, which becomes 0 to 1.

    ```toml
    [env.args.rewards.style]
    path = "agentrl.reward.judge:Judge"
    weight = 0.3
    seconds = 120
    args = {base_url = "http://127.0.0.1:8000/v1", model = "judge", budget_tokens = 2_000_000}
    ```

    No verdict, never 0, where the judge cannot be reached, gives no score, or its budget of tokens is spent.
    """

    def __init__(self, **options: Any) -> None:
        try:
            self.options = JudgeOptions(**options)
        except ValueError as error:
            raise ConfigError(f"judge: {error}") from error
        if self.options.highest <= self.options.lowest:
            raise ConfigError(f"judge: highest = {self.options.highest} is not above lowest = {self.options.lowest}")
        self.used_tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None

    async def __call__(self, completion: str, row: Row) -> Score:
        options = self.options
        try:
            prompt = options.prompt.format_map({**row, "completion": completion})
        except (KeyError, IndexError) as error:
            raise ConfigError(
                f"judge: the prompt names a field that the row lacks: {error}; has {sorted(row)}"
            ) from error
        wait, why = _FIRST_WAIT, "no attempt"
        for attempt in range(options.retries + 1):
            if attempt:
                await asyncio.sleep(wait)
                wait *= 2
            if options.budget_tokens is not None and self.used_tokens >= options.budget_tokens:
                return self._none(f"the budget of {options.budget_tokens} tokens is spent")
            try:
                reply, tokens = await self._ask(prompt)
            except _Passing as error:
                why = str(error)
                continue
            except _Refused as error:
                return self._none(str(error))
            if (value := self._value(reply)) is not None:
                return Score(value, {"tokens": float(tokens)}, {"judge_reply": reply})
            why = f"no score from {options.lowest:g} to {options.highest:g} in the reply {reply[-200:]!r}"
        return self._none(why)

    async def _ask(self, prompt: str) -> tuple[str, int]:
        """The reply, and the tokens it cost (an estimate from above where the server does not say)."""
        options = self.options
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        # A connection a request: nothing to close, and no loop to belong to. The judge's own work takes far longer.
        timeout = aiohttp.ClientTimeout(total=options.seconds)
        try:
            async with self._slot(), aiohttp.ClientSession(headers=self._headers(), timeout=timeout) as session:
                url = options.base_url.rstrip("/") + "/chat/completions"
                async with session.post(url, json=body) as response:
                    if response.status != 200:
                        why = f"the judge answered {response.status}: {(await response.text())[:300]}"
                        raise _Passing(why) if _passes(response.status) else _Refused(why)
                    reply = await response.json()
            content = reply["choices"][0]["message"]["content"] or ""
            usage = reply.get("usage") or {}
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        tokens = int(usage.get("total_tokens") or len(prompt) + options.max_tokens)
        self.used_tokens += tokens
        return str(content), tokens

    def _value(self, reply: str) -> float | None:
        # The judged text may hold lines of this form: only the judge's own last line counts.
        found = _SCORE.findall(reply.strip().splitlines()[-1]) if reply.strip() else []
        if not found:
            return None
        share = (float(found[-1]) - self.options.lowest) / (self.options.highest - self.options.lowest)
        return share if 0 <= share <= 1 else None

    def _none(self, why: str) -> Score:
        return Score(None, {}, {"judge_error": why})

    def _headers(self) -> dict[str, str]:
        name = self.options.api_key_env
        if name is None:
            return {}
        if not os.environ.get(name):
            raise ConfigError(f"judge: the environment variable {name} is empty: set the API key")
        return {"Authorization": f"Bearer {os.environ[name]}"}

    def _slot(self) -> asyncio.Semaphore:
        # A semaphore belongs to the loop it is used in; an evaluation after training runs in another one.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._loop, self._slots = loop, asyncio.Semaphore(self.options.concurrency)
        return self._slots


def _passes(status: int) -> bool:
    return status >= 500 or status in _PASSING_STATUS
