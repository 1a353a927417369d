"""Workers with scripted engines, for tests of what is around engines and for measurements of it.

```python
worker = Worker(WorkerOptions("engine", hub.url, token, host="127.0.0.1"), folder, make_engine=ScriptedEngine)
task = asyncio.create_task(worker.run())
```
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from agentrl.cluster.tasks import EngineRun
from agentrl.conductor.engines import UNPUBLISHED
from agentrl.testing.scripted_server import ScriptedServer


def hello(prompt: Sequence[int]) -> Sequence[int]:
    """What a scripted engine says: the model's end-of-turn token is for the caller's sampling to stop at."""
    return [65, 66, 67, 68]


class ScriptedEngine(EngineRun):
    """An engine task whose engine is a `ScriptedServer`; its checksum is that of the weights it was told to load."""

    reply = staticmethod(hello)
    token_delay = 0.0
    server: ScriptedServer | None = None

    async def _go(self) -> None:
        await self._store.have(self.task.model)
        self.server = ScriptedServer(self.reply, version=str(UNPUBLISHED), token_delay=self.token_delay)
        self.server.checksum_of = _checksum
        await self.server.start()
        self.url = self.server.url
        self._tell("running")
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        text = await self._failed
        await self.server.stop()
        self._tell("ended", 1, text)

    def fail(self, text: str) -> None:
        """Die, with these last words."""
        self._failed.set_result(text)

    async def _kill(self) -> None:
        if self.server is not None:
            await self.server.stop()


def _checksum(folder: str) -> str:
    digest = hashlib.blake2b()
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
