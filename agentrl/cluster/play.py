"""A rollout process: `python -m agentrl.cluster.play play.json`. Environments, agents and their endpoint live here.

It asks the conductor for episodes, and the engines for tokens; a finished episode goes back as bytes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import orjson

from agentrl.child import die_with_parent
from agentrl.cluster.files import open_http
from agentrl.cluster.follow import FollowedEngines
from agentrl.cluster.rollouts import HOLD_SECONDS, Job, Next, PlaySpec, Work, outcome_bytes
from agentrl.conductor.check import resolve_agents, resolve_env
from agentrl.conductor.config import RunConfig
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.client import EngineClient
from agentrl.engine.server import decoder
from agentrl.engine.weights import model_limits
from agentrl.errors import AgentRLError, EngineLost
from agentrl.process import collect_seldom
from agentrl.rollout.player import Player
from agentrl.rollout.session import Session, SessionSpec

PATIENCE_SECONDS = 10.0
"""How long a conductor that does not answer is asked again; the worker ends this process sooner."""


class Playing:
    """Everything that a rollout process has."""

    def __init__(self, spec: PlaySpec, token: str, http: aiohttp.ClientSession) -> None:
        self._spec, self._http = spec, http
        config = RunConfig.model_validate(spec.config)
        limits = model_limits(spec.model, config.engine.context_length)
        decode = decoder(spec.model)
        self._engines = FollowedEngines(lambda url: EngineClient(url, limits=limits, decode=decode, token=token))
        # Each rollout process has an endpoint of its own, for its own agents alone.
        options = config.endpoint.model_copy(update={"host": "127.0.0.1", "port": 0})
        self._endpoint = Endpoint(self._engines, ChatTemplate.load(spec.model), options)
        _, make_env = resolve_env(config.env)
        self._player = Player(
            config.rollout, make_env=make_env, make_agent=resolve_agents(config), open_session=self._open
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._broke: BaseException | None = None
        self._serial = -1
        self._got = 0

    async def run(self) -> None:
        """Play until the conductor refuses this process or does not answer."""
        await self._endpoint.start()
        try:
            while (work := await self._ask()) is not None and self._broke is None:
                if work.serial != self._serial:
                    self._serial = work.serial
                    self._engines.follow(work.engines)
                for job in work.cancel:
                    if (task := self._tasks.get(job)) is not None:
                        task.cancel()
                for fresh in work.jobs:
                    self._tasks[fresh.id] = asyncio.create_task(self._play(fresh))
                    self._tasks[fresh.id].add_done_callback(self._ended)
            if self._broke is not None:
                raise self._broke
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._endpoint.stop()
            await self._engines.close()

    def _open(self, spec: SessionSpec) -> Session:
        return self._endpoint.open(
            spec.id,
            seed=spec.seed,
            training=spec.training,
            temperature=spec.temperature,
            max_tokens=spec.max_tokens,
            deadline=spec.deadline,
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An episode that cannot be handed in would be waited for: with this process, it is asked again elsewhere."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke = self._broke or error

    async def _play(self, job: Job) -> None:
        try:
            body, error = outcome_bytes(await self._player.play(*job.parts()))
            query = {"lease": self._spec.lease, "generation": str(self._spec.generation), "job": str(job.id)}
            await self._post("/rollout/done", body, query, {"X-Error": error})
        finally:
            del self._tasks[job.id]

    async def _ask(self) -> Work | None:
        wanted = Next(
            lease=self._spec.lease,
            generation=self._spec.generation,
            serial=self._serial,
            got=self._got,
            sandboxes=self._player.sandboxes(),
        )
        body = await self._post("/rollout/next", wanted.model_dump_json().encode(), {}, {})
        if body is None:
            return None
        work = Work.model_validate(orjson.loads(body))
        self._got = work.number
        return work

    async def _post(self, path: str, body: bytes, query: dict[str, str], headers: dict[str, str]) -> bytes | None:
        """The answer; None where this process is over. Both calls may be repeated without harm."""
        give_up = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while True:
            try:
                async with self._http.post(
                    f"{self._spec.conductor}{path}",
                    data=body,
                    params=query,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=2 * HOLD_SECONDS + 5),
                ) as response:
                    if response.status == 410:
                        return None
                    response.raise_for_status()
                    return await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > give_up:
                    raise EngineLost(f"the conductor {self._spec.conductor} does not answer {path}: {error}") from error
                await asyncio.sleep(0.2)


async def play(spec: PlaySpec, token: str) -> None:
    """Play episodes for the conductor until it wants no more."""
    async with open_http(token) as http:
        await Playing(spec, token, http).run()


def main() -> int:
    """The exit code."""
    die_with_parent()
    collect_seldom()
    spec = PlaySpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        asyncio.run(play(spec, os.environ["AGENTRL_CLUSTER_TOKEN"]))
    except AgentRLError as error:
        print(f"agentrl rollout process: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
