"""Streams groups of episodes from the data into the pool, and batches from the pool to the trainer.

```python
pool = await Pool.open(run_dir / "pool.sqlite")
runner = Runner(options, pool=pool, rows=rows, seed=seed, env="guess", make_env=GuessNumber, make_agent=Agent,
                open_session=lambda s: endpoint.open(s.id, seed=s.seed, …))
version = Version(await pool.incarnation() + 1, checkpoint_number)   # the engines must serve this label first
await runner.start(version, checkpoint_cursor)     # also after a trainer's restart, while `run` goes on
streaming = asyncio.create_task(runner.run())      # until cancelled; raises RunError with the cause
take = await runner.take(step, version, wait=20)   # None: not yet; `runner.over`: never again
await runner.published(Version(1, 7))              # all engines serve it
await runner.retain(oldest_checkpoint_cursor)
```
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.data import env_of
from agentrl.reward.group import GroupReward
from agentrl.rollout.books import Books
from agentrl.rollout.gate import Gate, Stage
from agentrl.rollout.group import RunningGroup, cancel_all, compared, group_reward_of, play_group
from agentrl.rollout.health import Health
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import Player, Plays
from agentrl.rollout.pool import Pool, Take
from agentrl.rollout.records import Ask, TakeRule
from agentrl.rollout.schedule import Schedule, episode_seed, fingerprint
from agentrl.rollout.session import MakeAgent, MakeEnv, OpenSession
from agentrl.types import Group, Row, Stop, Version

OnGroup = Callable[[Group, str], None]
"""Told of every finished group and its fate: "pooled", "filtered", "given_up", "abandoned"."""

_LOOK_EVERY = 5.0


class Runner:
    """One data set, one environment, one pool. The books (gate, pool, waiting rows) are changed under one lock."""

    def __init__(
        self,
        options: RolloutOptions,
        *,
        pool: Pool,
        rows: Sequence[Row],
        seed: int,
        env: str,
        make_env: MakeEnv,
        make_agent: MakeAgent,
        open_session: OpenSession,
        on_group: OnGroup | None = None,
        player: Plays | None = None,
        group_reward: GroupReward | None = None,
    ) -> None:
        self.options = options
        self.pool = pool
        self.rows = rows
        self.seed = seed
        self.env = env
        self.version = Version(0, 0)
        self.counts: Counter[str] = Counter()
        self.gate = Gate(
            batch=options.groups_per_step,
            staleness=options.staleness,
            concurrency=options.concurrency,
            samples=options.started,
        )
        self.health = Health(options)
        # One is given where episodes run in other processes.
        self.player: Plays = player or Player(
            options, make_env=make_env, make_agent=make_agent, open_session=open_session
        )
        self._on_group = on_group
        self._group_reward = group_reward or group_reward_of(options)
        self._schedule = Schedule(len(rows), seed, epochs=options.epochs, shuffle=options.shuffle)
        self._waiting: dict[int, Ask] = {}
        self._fresh = 0
        self.data_start = 0
        """The position at which the present data begins: above 0 where a resumed run was given other rows."""
        self._running: dict[int, RunningGroup] = {}
        self._groups: set[asyncio.Task[Any]] = set()
        self._taken: dict[int, int] = {}
        """Groups with the trainer, and the version they were taken for."""
        self._admitting = False
        self._changed = asyncio.Event()
        self._more = asyncio.Event()
        self._books = Books(self._announce)

    # --- the conductor's calls

    async def start(self, version: Version, cursor: Mapping[str, Any] | None = None) -> None:
        """Begin incarnation `version.incarnation` from a checkpoint's cursor, or from the start of the data.

        The engines must serve `version` before the first new episode. Groups that run go on; those which turn out to
        hold tokens of abandoned weights are asked again.
        """
        await self._books.alone(self._start(version, cursor))

    async def take(self, step: int, version: Version, wait: float) -> Take | None:
        """The batch of `step`, waiting up to `wait` seconds; the same again for the same step.

        None: not yet. Raises what ended `run`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            self._books.check()
            self._changed.clear()
            take = await self._books.alone(self._take(step, version))
            left = until - loop.time()
            if take is not None:
                return take
            if left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return None

    async def published(self, version: Version) -> None:
        """Every engine serves `version`: room is made for what it trained on, and with `drop` what is too old goes."""
        if version.incarnation < self.version.incarnation:
            return  # the last word of a trainer that is gone
        # Room first: the engines idle until the next episode asks, and the ledger's durable write can follow.
        self.version = version
        self._left([position for position, number in self._taken.items() if number < version.number])
        self._begin_one()
        await self._books.alone(self._published(version))

    async def retain(self, cursor: Mapping[str, Any]) -> None:
        """Forget groups taken up to the oldest retained checkpoint, whose cursor this is."""
        await self.pool.retain(cursor)

    @property
    def exhausted(self) -> bool:
        """Whether no row is left to ask and none runs."""
        end = self._schedule.end
        return not self._waiting and not self._running and end is not None and self._fresh >= end

    @property
    def over(self) -> bool:
        """Whether there will be no further batch."""
        return self.exhausted and self.gate.count(Stage.POOLED) == 0

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the process and what is live now."""
        return {
            **{f"rollout_{name}": float(count) for name, count in sorted(self.counts.items())},
            "rollout_retries": float(self.player.retried),
            "rollout_running": float(len(self._running)),
            "rollout_pooled_now": float(self.gate.count(Stage.POOLED)),
            "rollout_taken_now": float(self.gate.count(Stage.TAKEN)),
            "rollout_episodes_now": float(self.gate.episodes),
        }

    def pool_state(self) -> str:
        """How full the pool is, in one line."""
        pooled, taken = self.gate.count(Stage.POOLED), self.gate.count(Stage.TAKEN)
        return f"{pooled} groups wait for the trainer, {taken} are with it, a batch is {self.options.groups_per_step}"

    def waits_for(self) -> str:
        """Who waits for what, in one line, for a watchdog or a status page."""
        now = asyncio.get_running_loop().time()
        oldest = sorted(self._running.values(), key=lambda group: group.began)[:3]
        ages = ", ".join(f"group {g.ask.position} for {now - g.began:.0f} s ({g.state(now)})" for g in oldest)
        rows = "no row is left to ask" if self.exhausted else f"{len(self._waiting)} rows to ask again"
        return f"{self.gate}; {rows}" + (f"; oldest: {ages}" if ages else "")

    # --- streaming

    async def run(self) -> None:
        """Play until cancelled. Raises RunError where nothing can be trained or nothing moves, with the cause."""
        self._admitting = True
        loops = [asyncio.create_task(self._admit()), asyncio.create_task(self._watch())]
        failed = asyncio.create_task(self._books.failed.wait())
        try:
            await asyncio.wait([*loops, failed], return_when=asyncio.FIRST_COMPLETED)
            for task in loops:
                if task.done():
                    self._books.fail_by(task)
            self._books.check()
        finally:
            self._admitting = False  # a publish that comes later begins nothing
            failed.cancel()
            await cancel_all([*loops, failed, *self._groups], 3 * self.options.close_seconds + 10.0)

    async def _admit(self) -> None:
        while True:
            await asyncio.sleep(self.health.pause)
            if not await self.gate.room(_LOOK_EVERY):
                continue
            async with self._books.shared():  # a resume changes what is to be asked next
                if not self.gate.open:
                    continue  # a publish was faster; `room` waits for what opens it again
                asked = self._next()
                if asked is not None:
                    self._begin(asked)
                    continue
                self._more.clear()
            try:
                async with asyncio.timeout(_LOOK_EVERY):
                    await self._more.wait()
            except TimeoutError:
                continue

    def _begin_one(self) -> None:
        """Begin a group now, not after the durable write that others would wait for; it is a step ahead of them."""
        if self.gate.open and self._admitting and self._books.open and not self.health.pause:
            asked = self._next()
            if asked is not None:
                self._begin(asked)

    def _next(self) -> Ask | None:
        if self._waiting:
            return self._waiting.pop(min(self._waiting))
        end = self._schedule.end
        if end is not None and self._fresh >= end:
            return None
        self._fresh += 1
        return Ask(self._fresh - 1, 0)

    def _begin(self, asked: Ask) -> None:
        loop = asyncio.get_running_loop()
        place = self._schedule.place(asked.position)
        group = RunningGroup(
            asked,
            place,
            episode_seed(self.seed, place, asked.attempt),
            self.rows[place.row],
            began=loop.time(),
            expired=loop.create_future(),
        )
        self.gate.enter(asked.position)
        self.pool.ask(asked)
        if not self._running:
            self.health.moved(loop.time())
        self._running[asked.position] = group
        self._books.spawn(self._groups, self._live(group), f"group {asked.position}")

    async def _live(self, group: RunningGroup) -> None:
        outcomes = await play_group(
            group,
            self.player,
            self.options,
            seed=self.seed,
            run=str(self.version.incarnation),
            newest=lambda: self.version.number,
            on_episode=lambda: self.gate.episode_done(group.ask.position),
        )
        if outcomes is None:
            await self._books.share(self._expire(group))
            return
        self.health.saw(outcomes)
        for outcome in outcomes:
            self.counts[f"stop_{outcome.episode.stop.value}"] += 1
        self.counts["timeouts"] += sum(o.episode.stop is Stop.TIME_LIMIT for o in outcomes)
        name = env_of(group.row, self.env)
        whole = Group(
            group.ask.position, group.ask.attempt, group.place.epoch, name, tuple(o.episode for o in outcomes)
        )
        if self._group_reward is not None:
            whole, error = await compared(whole, self._group_reward)
            self.health.wrong(group.ask.position, error)
        await self._books.share(self._settle(whole))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            now = asyncio.get_running_loop().time()
            if self._running and self.health.stalled(now):
                self._books.fail(self.health.stall(self.waits_for()))
            useless = self.counts["given_up"] + self.counts["filtered"]
            if self.over and self.gate.live == 0 and useless and not self.counts["pooled"]:
                self._books.fail(
                    self.health.failure(f"every row was asked and no group can be trained: {dict(self.counts)}")
                )

    # --- the books: each runs under the lock, to its end even where its caller is cancelled

    async def _start(self, version: Version, cursor: Mapping[str, Any] | None) -> None:
        self.version = version
        for group in self._running.values():
            if group.oldest is not None:
                group.oldest = min(group.oldest, 2 * version.number - group.oldest)
        await self.pool.resume(version, cursor, self._running)
        first = self.data_start = await self.pool.start(fingerprint(self.rows, self.seed, self.options.shuffle))
        self._schedule = Schedule(
            len(self.rows), self.seed, epochs=self.options.epochs, shuffle=self.options.shuffle, start=first
        )
        content = await self.pool.content()
        self.gate.restore(content.pooled, content.taken)
        self._waiting = {asked.position: asked for asked in content.waiting if asked.position >= first}
        for asked in content.waiting:
            if asked.position < first:
                await self.pool.give_up(asked.position, "the data changed")
        self._fresh = max(content.fresh, first)
        self._taken = dict.fromkeys(content.taken, version.number - 1)
        self._announce()

    async def _take(self, step: int, version: Version) -> Take | None:
        change, take = await self.pool.take(step, version, self._rule())
        self.counts["untrained"] += len(change.left)
        self._left(change.left)
        self._dropped(change.dropped, change.given_up)
        if take is not None and change.new:
            self.gate.taken(take.ids)
            self._taken.update(dict.fromkeys(take.ids, version.number))
            self.counts["taken"] += len(take.ids)
        return take

    async def _published(self, version: Version) -> None:
        if version.incarnation < self.version.incarnation:
            return  # a resume came in between
        change = await self.pool.published(version, self._rule())
        self._left([position for position in change.left if position in self._taken])
        self._dropped(change.dropped, change.given_up)
        if self.options.when_stale == "drop":
            for group in self._running.values():
                if group.oldest is not None and group.oldest + self.options.staleness < version.number:
                    group.expire()
        self._announce()

    def _left(self, positions: Sequence[int]) -> None:
        for position in positions:
            del self._taken[position]
            self.gate.leave(position)
        if positions:
            self._announce()

    def _dropped(self, dropped: Sequence[Ask], given_up: Sequence[int]) -> None:
        for position in [*(asked.position for asked in dropped), *given_up]:
            self.gate.leave(position)
        self._waiting.update((asked.position, asked) for asked in dropped)
        self.counts["dropped"] += len(dropped)
        self.counts["given_up"] += len(given_up)
        if dropped:
            self._announce()

    async def _expire(self, group: RunningGroup) -> None:
        reason = f"older than {self.options.staleness} versions while it ran"
        again = await self.pool.reask(group.ask, reason, self.options.max_asks)
        del self._running[group.ask.position]
        self._dropped([again] if again else [], [] if again else [group.ask.position])
        self.health.moved(asyncio.get_running_loop().time())
        self._announce()

    async def _settle(self, group: Group) -> None:
        fate = await self._fate(group)
        del self._running[group.id]
        if fate == "pooled":
            self.gate.pooled(group.id)
        else:
            self.gate.leave(group.id)
        if fate == "abandoned":
            self._waiting[group.id] = Ask(group.id, group.attempt)
        self.counts[fate] += 1
        if self._on_group is not None:
            self._on_group(group, fate)
        verdict = self.health.settled(fate, asyncio.get_running_loop().time())
        if verdict is not None:
            self._books.fail(verdict)
        self._announce()

    async def _fate(self, group: Group) -> str:
        rewards = [episode.reward for episode in group.episodes if episode.scored]
        if len(rewards) < self.options.needed:
            stops = Counter(e.stop.value for e in group.episodes if not e.scored)
            error = next((e.error for e in group.episodes if e.error is not None and not e.scored), "")
            tried = f"{len(rewards)} of {len(group.episodes)} episodes scored, {self.options.needed} needed"
            await self.pool.give_up(group.id, f"{tried}; {dict(stops)}; {error}"[:500])
            return "given_up"
        if self.options.filter_equal and len(set(rewards)) == 1:
            known = await self.pool.filter(group, f"all {len(rewards)} rewards are {rewards[0]}")
            return "filtered" if known else "abandoned"
        return "pooled" if await self.pool.put(group) else "abandoned"

    def _rule(self) -> TakeRule:
        running = tuple(
            self.version.number if group.oldest is None else group.oldest for group in self._running.values()
        )
        return TakeRule(
            batch=self.options.groups_per_step,
            staleness=self.options.staleness,
            wait=self.options.when_stale == "wait",
            max_asks=self.options.max_asks,
            running=running,
            last=self.exhausted,
        )

    def _announce(self) -> None:
        self._changed.set()
        self._more.set()
