"""The trainer's ranks on workers that register; with it alone, `agentrl sft` and `agentrl replay` run on a cluster."""

from __future__ import annotations

from pathlib import Path

from agentrl.cluster.files import read_token
from agentrl.cluster.group import RemoteGroup
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.conductor.desk import Desk
from agentrl.conductor.feed import CommitRequest, FeedServer
from agentrl.errors import AgentRLError, ConfigError
from agentrl.train.options import TrainerJob


class Ranks:
    """One group at a time on the trainer workers of `hub`."""

    def __init__(self, hub: Hub, desk: Desk, silent_seconds: float) -> None:
        self._hub, self._desk, self._silent_seconds = hub, desk, silent_seconds
        self.group: RemoteGroup | None = None

    def start(self, job: TrainerJob, token: str) -> RemoteGroup:
        """A `MakeGroup`."""
        self.group = RemoteGroup(job, token, self._hub, silent_seconds=self._silent_seconds, keep_log=self._keep_log)
        return self.group

    async def commit(self, asked: CommitRequest) -> Path:
        """Make a checkpoint whole whose parts lie on several hosts."""
        if self.group is None:
            raise AgentRLError(f"the checkpoint of step {asked.step} belongs to no group that runs")
        return await self.group.commit(asked, self._desk.folder.checkpoints)

    def _keep_log(self, text: str) -> Path:
        log = self._desk.folder.logs / "trainer.log"
        with log.open("a", encoding="utf-8") as file:
            file.write(text)
        return log


class RanksAlone:
    """A run without engines whose ranks are elsewhere: a hub for its trainer workers."""

    def __init__(self, options: ClusterOptions, desk: Desk, *, run: str, silent_seconds: float) -> None:
        """ConfigError where the token cannot be read, or Ray is to place them."""
        if options.kind == "ray":
            raise ConfigError(
                "cluster.kind = 'ray' places the workers of `agentrl train` alone: set cluster.kind = 'external' here, "
                "and start `agentrl worker --role trainer` on the hosts"
            )
        self._desk = desk
        shared = desk.folder.path if options.shared_disk else None
        self._hub = Hub(options, read_token(options.token_file), run=run, note=desk.note, probe_dir=shared)
        self.ranks = Ranks(self._hub, desk, silent_seconds)

    async def open(self, feed: FeedServer) -> str:
        """Listen; the feed's URL."""
        url = await self._hub.start({"/feed": feed.application()})
        self._desk.note(f"waits for workers: agentrl worker --role trainer --conductor {url}")
        return f"{url}/feed"

    async def run(self) -> None:
        """Keep the workers, until cancelled."""
        await self._hub.run()

    async def close(self) -> None:
        """Let everybody go."""
        await self._hub.stop()
