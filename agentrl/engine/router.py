"""Several engines as one: sessions stay where their prefix is cached, new weights go to all, lost engines are left out.

An engine serves while it answers and holds the current weights. One that is lost, hangs or refuses an update is
*fenced*: its requests go on elsewhere from the tokens so far, and it gets nothing new until it answers, has the current
weights, and its checksums equal those of an engine that serves, or that did last where it was alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.client import EngineClient
from agentrl.engine.failover import go_on_until
from agentrl.engine.reply import Progress
from agentrl.engine.seat import Seat, each, same, while_it_serves, within
from agentrl.engine.types import Completion, GenerateRequest, OnTokens
from agentrl.errors import DeadlineExceeded, EngineError, EngineLost
from agentrl.types import Version

Load = Callable[[EngineClient], Awaitable[None]]
_SESSIONS = 100_000
_MAX_LOSSES = 3
"""Engines that one request may lose before it is taken for the cause."""


class PublishReport(NamedTuple):
    """What a publish did. `stall_seconds` passed from the first pause to the last continuation: 0 where all engines
    swap between two tokens, and none paused."""

    version: Version
    updated: tuple[str, ...]
    failed: dict[str, str]
    """URL → reason of the engines that were fenced."""
    pause_seconds: float
    load_seconds: float
    stall_seconds: float


class Router:
    """An `Engine` over one or more engine servers, and the one place that changes their weights.

    ```python
    router = Router([server.client() for server in servers])
    completion = await router.generate(request)
    report = await router.publish(folder, Version(1, 7))
    await router.add(restarted.client())
    await router.close()
    ```

    Engines are asked for their model info every `check_every` seconds; one that does not answer `max_misses` times in
    a row is fenced, a refused connection fences at once. One that takes longer than `slow_seconds` to pause or to load
    is fenced too: the others go on, and it comes back when it has caught up.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        current: tuple[Path, Version] | None = None,
        check_every: float = 2.0,
        max_misses: int = 3,
        slow_seconds: float | None = None,
    ) -> None:
        if not clients:
            raise ValueError("a router needs at least one engine client")
        self.current = current
        """Folder and version that every serving engine holds; None until the first publish."""
        self._seats = [Seat(client) for client in clients]
        self._sessions: OrderedDict[str, Seat] = OrderedDict()
        self._check_every = check_every
        self._max_misses = max_misses
        self._slow_seconds = slow_seconds
        self._begin = clients[0].begin  # the limits are the model's: any client's will do, also one that has left
        self._changing = asyncio.Lock()
        self._check_now = asyncio.Event()
        self._some_serve = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._noted: tuple[Version, dict[str, str]] | None = None

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See `Engine.generate`."""
        self._watch()
        progress = self._begin(request)
        while True:
            seat = await self._seat(request, progress)
            try:
                return await self._run(seat, progress, on_tokens)
            except EngineLost as error:
                if progress.losses >= _MAX_LOSSES:
                    raise EngineError(
                        f"request {request.id} lost {progress.losses} engines in a row and may be the cause: {error}"
                    ) from error
                if not seat.fenced:
                    seat.fence(str(error))
                self._check_now.set()

    async def _run(self, seat: Seat, progress: Progress, on_tokens: OnTokens | None) -> Completion:
        guarded = len(self._seats) > 1
        done = await go_on_until(seat.lost, seat.client, progress, on_tokens, guarded=guarded)
        if done is not None:
            return done
        progress.losses += 1
        raise EngineLost(f"{seat.client.url} was fenced: {seat.fenced}")

    async def _seat(self, request: GenerateRequest, progress: Progress) -> Seat:
        while True:
            seat = self._sessions.get(request.session)
            if seat is not None and not seat.fenced:
                self._sessions.move_to_end(request.session)
                return seat
            serving = [s for s in self._seats if not s.fenced]
            if serving:
                return self._assign(request.session, min(serving, key=lambda s: (s.client.in_flight, s.sessions)))
            self._some_serve.clear()
            self._check_now.set()
            try:
                async with asyncio.timeout_at(request.deadline):
                    await self._some_serve.wait()
            except TimeoutError as error:
                reasons = "; ".join(f"{s.client.url}: {s.fenced}" for s in self._seats)
                raise DeadlineExceeded(
                    f"request {request.id}: no engine served until the deadline, at {len(progress.tokens)} of "
                    f"{progress.limit} tokens ({reasons})"
                ) from error

    def _assign(self, session: str, seat: Seat) -> Seat:
        before = self._sessions.pop(session, None)
        if before is not None:
            before.sessions -= 1
        self._sessions[session] = seat
        seat.sessions += 1
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)[1].sessions -= 1
        return seat

    # -- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, path: Path | str, version: Version, load: Load | None = None) -> PublishReport:
        """Give every serving engine the weights in `path`, by `load` where that is given.

        All pause but those that swap between two tokens, each loads once its pause is acknowledged, all go on whatever
        happened. EngineError where no engine took them: the old weights serve on. Where some did, the others are fenced
        and named in the report.
        """
        self._watch()
        async with self._changing:
            seats = [s for s in self._seats if not s.fenced]
            if not seats:
                reasons = "; ".join(f"{s.client.url}: {s.fenced}" for s in self._seats)
                raise EngineError(f"no engine serves, weights {version} went nowhere ({reasons})")
            begun = time.monotonic()
            failures: dict[Seat, BaseException] = {}
            pausing = [s for s in seats if not s.client.hot_swap]
            try:
                await each(pausing, lambda s: s.client.pause(), failures, self._slow_seconds)
                paused = time.monotonic()
                ready = [s for s in seats if s not in failures]
                take = load or (lambda client: client.update_from_disk(path, version))
                await each(ready, lambda s: take(s.client), failures, self._slow_seconds)
                loaded = time.monotonic()
            finally:
                # A fenced one goes on when it has caught up: a host that is gone must not hold up those that serve.
                going = [s for s in pausing if not s.fenced]
                await asyncio.shield(each(going, lambda s: s.client.resume(), failures, self._slow_seconds))
            updated = [s for s in seats if s not in failures]
            self._settle(version, updated, failures)
            self.current = (Path(path), version)
            return PublishReport(
                version,
                tuple(s.client.url for s in updated),
                {s.client.url: str(e) for s, e in failures.items()},
                paused - begun,
                loaded - paused,
                time.monotonic() - begun if pausing else 0.0,
            )

    def _settle(self, version: Version, updated: list[Seat], failures: dict[Seat, BaseException]) -> None:
        for seat, error in failures.items():
            # A refusal by all leaves all on the old weights; whatever else failed is in an unknown state.
            if updated or not isinstance(error, EngineError) or isinstance(error, EngineLost):
                seat.fence(f"weights {version} did not get in: {error}")
        self._check_now.set()
        if not updated:
            reasons = "; ".join(f"{s.client.url}: {e}" for s, e in failures.items())
            raise EngineError(f"no engine took weights {version}, the old ones serve on: {reasons}")

    async def add(self, client: EngineClient) -> None:
        """Let a started engine serve, once it has the current weights and that is proved. EngineError otherwise."""
        seat = Seat(client, fenced="not yet checked")
        while True:
            target = self.current
            try:
                await self._catch_up(seat, target)  # a publish goes on beside it: loading takes its time
            except EngineError:
                if self.current == target:
                    raise
                continue  # those weights are gone by now: the newer ones are what counts
            async with self._changing:
                if self.current == target:
                    await self._prove(seat)
                    self._seats.append(seat)
                    self._some_serve.set()
                    return

    def fence(self, url: str, reason: str) -> None:
        """Give an engine nothing more at once, also in the middle of a publish; unknown ones are no error."""
        for seat in self._seats:
            if seat.client.url == url.rstrip("/") and not seat.fenced:
                seat.fence(reason)
                self._check_now.set()

    async def remove(self, url: str) -> None:
        """Take an engine out; its requests go on elsewhere."""
        seat = next((s for s in self._seats if s.client.url == url.rstrip("/")), None)
        if seat is None:
            raise EngineError(f"no engine {url}: there are {[s.client.url for s in self._seats]}")
        seat.leaves = True
        # Before the lock, which it may hold while its host says nothing.
        if seat.catching_up is not None:
            seat.catching_up.cancel()
            await asyncio.wait((seat.catching_up,))
        async with self._changing:
            if seat in self._seats:
                self._seats.remove(seat)
            seat.fence("it was taken out")
        await seat.client.close()

    async def checksums(self) -> dict[str, dict[str, str]]:
        """URL → checksums of every serving engine: proof that a publish arrived."""
        serving = [s for s in self._seats if not s.fenced]
        sums = await asyncio.gather(*(s.client.checksums() for s in serving))
        return {s.client.url: found for s, found in zip(serving, sums, strict=True)}

    @property
    def serving(self) -> tuple[str, ...]:
        """URLs of the engines that serve now."""
        return tuple(s.client.url for s in self._seats if not s.fenced)

    @property
    def fenced(self) -> dict[str, str]:
        """URL → reason of the engines that serve nothing now."""
        return {s.client.url: s.fenced for s in self._seats if s.fenced}

    async def close(self) -> None:
        """Stop watching and close the clients' connections."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
            self._watching = None
        if behind := [s.catching_up for s in self._seats if s.catching_up is not None]:
            for task in behind:
                task.cancel()
            await asyncio.wait(behind)
        await asyncio.gather(*(s.client.close() for s in self._seats))

    # -- health ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._check_forever())

    async def _check_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._check_every):
                    await self._check_now.wait()
            except TimeoutError:
                pass
            self._check_now.clear()
            await asyncio.gather(*(self._check(seat) for seat in list(self._seats)))
            if any(not seat.fenced for seat in self._seats):
                self._some_serve.set()
                await self._note()
            elif self._check_now.is_set():
                await asyncio.sleep(min(0.2, self._check_every))

    async def _note(self) -> None:
        """Remember what a lone engine's weights add up to: no other could vouch for the one that replaces it."""
        serving = [s for s in self._seats if not s.fenced]
        current = self.current
        if len(serving) != 1 or current is None or (self._noted is not None and self._noted[0] == current[1]):
            return
        try:
            found = await while_it_serves(serving[0], serving[0].client.checksums())
            info = await while_it_serves(serving[0], serving[0].client.model_info())
            # Versions only go up: what it serves now it served all the while.
            if found is not None and info is not None and info.version == current[1]:
                self._noted = (current[1], found)
        except (EngineError, DeadlineExceeded):
            return  # its own check will find it

    async def _check(self, seat: Seat) -> None:
        if seat.fenced:
            if seat.leaves:
                return
            if seat.catching_up is None:
                seat.catching_up = asyncio.get_running_loop().create_task(self._come_back(seat))
            # One that loads for minutes must not keep the others from being asked.
            await asyncio.wait((seat.catching_up,), timeout=self._check_every)
            return
        try:
            # The round waits for every answer: one whose host is gone, which others notice sooner, gives none.
            if await while_it_serves(seat, seat.client.model_info()) is not None:
                seat.misses = 0
        except DeadlineExceeded as error:
            seat.misses += 1
            if seat.misses >= self._max_misses:
                seat.fence(f"no answer {seat.misses} times: {error}")
        except EngineError as error:
            seat.fence(str(error))

    async def _come_back(self, seat: Seat) -> None:
        """Let a fenced seat serve again once it has caught up; a failure is the new reason."""
        try:
            target = self.current
            await self._catch_up(seat, target)
            async with self._changing:
                if self.current == target and seat in self._seats:
                    await self._prove(seat)
                    self._some_serve.set()
        except (EngineError, DeadlineExceeded) as error:
            seat.fence(str(error))
        finally:
            seat.catching_up = None

    async def _catch_up(self, seat: Seat, target: tuple[Path, Version] | None) -> None:
        version = (await seat.client.model_info()).version
        await seat.client.resume()
        if target is not None and version != target[1]:
            await seat.client.update_from_disk(*target)

    async def _prove(self, seat: Seat) -> None:
        """Let a seat serve after it has, provably, the weights of one that serves, or of the one that did last."""
        async with within(self._slow_seconds, f"the proof of {seat.client.url}'s weights"):
            ours, theirs = await asyncio.gather(seat.client.checksums(), self._vouched(seat))
        if theirs is not None:
            same(ours, theirs[1], f"{seat.client.url} holds other weights than {theirs[0]}")
        seat.serve()

    async def _vouched(self, seat: Seat) -> tuple[str, dict[str, str]] | None:
        """What the weights should add up to, and who says so; None where nobody can.

        Publishes wait for this: a witness that is lost while it is asked is not waited for, the next one is.
        """
        while witness := next((s for s in self._seats if s is not seat and not s.fenced), None):
            try:
                if (found := await while_it_serves(witness, witness.client.checksums())) is not None:
                    return witness.client.url, found
            except EngineLost as error:
                witness.fence(str(error))
                self._check_now.set()
        if self._noted is not None and self.current is not None and self._noted[0] == self.current[1]:
            return f"those that served {self.current[1]}", self._noted[1]
        return None
