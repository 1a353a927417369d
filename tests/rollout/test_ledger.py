"""The pool on disk: takes, the edge of the bound, drops, resumes, retention, a full disk."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import ConfigError, RunError
from agentrl.rollout.pool import Pool, _stored
from agentrl.rollout.records import Ask, Candidate, State, TakeRule, choose
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version


def group_of(position: int, *labels: str, reward: float | None = 1.0, tokens: int = 4) -> Group:
    """One episode, one turn; a sampled segment a label."""
    context = Segment(np.arange(3, dtype=np.int32), None, Context())
    sampled = [
        Segment(np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32), Sampled(Version.parse(label)))
        for label in labels
    ]
    trajectory = Trajectory((context, *sampled))
    stop = Stop.FINISHED if reward is not None else Stop.ENV_ERROR
    turn = Turn(0, 0, len(trajectory), reward)
    messages = ({"role": "user", "content": "hé"},)
    return Group(position, 0, 0, "env", (Episode(position, 0, 0, 5, {"a": 1}, messages, (turn,), (trajectory,), stop),))


def rule(batch: int = 1, staleness: int = 2, *, wait: bool = False, running: Sequence[int] = ()) -> TakeRule:
    return TakeRule(batch=batch, staleness=staleness, wait=wait, max_asks=3, running=tuple(running))


@pytest.fixture
async def pool(tmp_path: Path) -> Pool:
    pool = await Pool.open(tmp_path / "pool.sqlite")
    await pool.resume(Version(1, 0))
    await pool.start("data")
    return pool


async def put(pool: Pool, *groups: Group) -> None:
    for group in groups:
        pool.ask(Ask(group.id, group.attempt))
        assert await pool.put(group)


def states(path: Path) -> dict[int, str]:
    db = sqlite3.connect(path)
    found = dict(db.execute("SELECT position, state FROM positions").fetchall())
    db.close()
    return found


async def test_the_edge_of_the_bound(pool: Pool) -> None:
    await put(pool, group_of(0, "1.5"), group_of(1, "1.5", "1.6"), group_of(2, "1.5"))
    for step, number in ((0, 6), (1, 7)):
        _, take = await pool.take(step, Version(1, number), rule())
        assert take is not None
        assert [g.id for g in take.groups] == [step]
    change, take = await pool.take(2, Version(1, 8), rule())
    assert take is None
    assert change.dropped == (Ask(2, 1),)


async def test_an_unscored_episode_does_not_age_its_group(pool: Pool) -> None:
    old = group_of(0, "1.0", reward=None).episodes[0]
    young = group_of(0, "1.9").episodes[0]
    await put(pool, Group(0, 0, 0, "env", (old, young)))
    _, take = await pool.take(0, Version(1, 9), rule(staleness=0))
    assert take is not None


async def test_the_oldest_go_first_and_a_take_is_repeatable(pool: Pool) -> None:
    await put(pool, group_of(0, "1.2"), group_of(1, "1.1"), group_of(2, "1.2"), group_of(3, "1.1"))
    change, take = await pool.take(7, Version(1, 2), rule(batch=3))
    assert take is not None
    assert change.new
    assert [g.id for g in take.groups] == [1, 3, 0]
    again, same = await pool.take(7, Version(1, 2), rule(batch=3))
    assert same == take
    assert not again.new
    with pytest.raises(RunError, match=r"step 7 was taken for weights 1\.2 and is asked for with 1\.3"):
        await pool.take(7, Version(1, 3), rule(batch=3))


async def test_bytes_are_the_group_without_its_chat_and_the_whole_is_kept(pool: Pool) -> None:
    group = group_of(0, "1.0")
    await put(pool, group)
    _, take = await pool.take(0, Version(1, 0), rule())
    assert take is not None
    assert take.groups[0].episodes[0].trajectories == group.episodes[0].trajectories
    assert take.groups[0].episodes[0].messages == ()
    assert await pool.group(0) == group
    with pytest.raises(KeyError, match="group 1 is not in take 1"):
        await pool.group_bytes(take.id, 1)


async def test_a_row_that_grows_too_old_again_and_again_is_given_up(pool: Pool) -> None:
    for attempt in range(3):
        pool.ask(Ask(0, attempt))
        assert await pool.put(group_of(0, f"1.{attempt * 10}"))
        change = await pool.published(Version(1, attempt * 10 + 3), rule())
        assert change.dropped == ((Ask(0, attempt + 1),) if attempt < 2 else ())
    assert change.given_up == (0,)


async def test_a_resume_undoes_later_takes_and_asks_abandoned_weights_again(pool: Pool, tmp_path: Path) -> None:
    cursors = []
    for step in range(3):
        await put(pool, group_of(step, f"1.{step}"))
        _, take = await pool.take(step, Version(1, step), rule())
        assert take is not None
        cursors.append(take.cursor)
        await pool.published(Version(1, step + 1), rule())
    await put(pool, group_of(3, "1.1"), group_of(4, "1.1", "1.3"))
    pool.ask(Ask(5, 0))
    pool.ask(Ask(6, 0))
    await pool.filter(group_of(6, "1.3"), "equal")
    # The checkpoint after step 0 holds version 1: takes 2 and 3 are undone, tokens of 1.2 and 1.3 are abandoned.
    await pool.resume(Version(2, 1), cursors[0])
    content = await pool.content()
    assert content.pooled == (1, 3)
    assert [asked.position for asked in content.waiting] == [2, 4, 5, 6]
    assert content.fresh == 7
    assert states(tmp_path / "pool.sqlite")[0] == "trained"
    _, take = await pool.take(1, Version(2, 1), rule(batch=2))
    assert take is not None
    assert take.id == 2
    # What still ran when the trainer died, and comes back with tokens of weights that are no ancestors.
    assert not await pool.put(group_of(5, "1.1", "1.2"))
    with pytest.raises(RunError, match="labels are never reused"):
        await pool.resume(Version(2, 1), cursors[0])


async def test_what_was_in_flight_is_asked_again_with_the_same_seed(pool: Pool, tmp_path: Path) -> None:
    for position in range(4):
        pool.ask(Ask(position, 0))
    assert await pool.put(group_of(3, "1.0"))  # 0, 1 and 2 run on
    pool.ask(Ask(4, 0))  # nothing is written after it
    await pool.close()
    again = await Pool.open(tmp_path / "pool.sqlite")
    await again.resume(Version(await again.incarnation() + 1, 0))
    content = await again.content()
    assert content.waiting == (Ask(0, 0), Ask(1, 0), Ask(2, 0))
    assert content.pooled == (3,)
    assert content.fresh == 4
    await again.close()


async def test_forgotten_groups_cannot_be_gone_back_to(pool: Pool) -> None:
    cursors = []
    for step in range(3):
        await put(pool, group_of(step, f"1.{step}"))
        _, take = await pool.take(step, Version(1, step), rule())
        assert take is not None
        cursors.append(take.cursor)
    assert await pool.retain(cursors[1]) == 2
    with pytest.raises(RunError, match="cannot go back to take 1"):
        await pool.resume(Version(2, 1), cursors[0])
    await pool.resume(Version(2, 2), cursors[1])
    assert (await pool.content()).pooled == (2,)
    assert (await pool.metrics())["stored_groups"] == 1


async def test_a_lost_pool_is_rebuilt_from_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    await put(pool, group_of(1, "1.0"))
    await put(pool, group_of(3, "1.0"))
    _, take = await pool.take(0, Version(1, 0), rule(batch=2))
    assert take is not None
    fresh = await Pool.open(tmp_path / "other.sqlite")
    await fresh.resume(Version(2, 1), take.cursor)
    assert await fresh.start("data") == 0
    content = await fresh.content()
    assert [asked.position for asked in content.waiting] == [0, 2]
    assert content.fresh == 4
    await put(fresh, group_of(0, "2.1"))
    _, second = await fresh.take(1, Version(2, 1), rule())
    assert second is not None
    assert second.id == take.id + 1
    with pytest.raises(ConfigError, match="is not the pool that the checkpoint was made with"):
        await pool.resume(Version(9, 1), second.cursor)
    await fresh.close()


async def test_other_data_begins_at_a_fresh_position(pool: Pool) -> None:
    await put(pool, group_of(0, "1.0"), group_of(2, "1.0"))
    await pool.resume(Version(2, 0))
    assert await pool.start("other data") == 3
    content = await pool.content()
    assert content.pooled == (0, 2)
    assert content.waiting == ()
    assert await pool.start("other data") == 3


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_a_clear_error_and_nothing_is_half_stored(pool: Pool, tmp_path: Path) -> None:
    await put(pool, group_of(0, "1.0"))
    large = np.random.default_rng(0).integers(0, 2**31, 500_000)
    segment = Segment(large.astype(np.int32), np.zeros(large.size, np.float32), Sampled(Version(1, 0)))
    trajectory = Trajectory((segment,))
    episode = Episode(1, 0, 0, 0, {}, (), (Turn(0, 0, len(trajectory), 1.0),), (trajectory,), Stop.FINISHED)
    with files_no_larger_than(1 << 20), pytest.raises(RunError, match=r"cannot be read or written.*Check free space"):
        await pool.put(Group(1, 0, 0, "env", (episode,)))
    assert states(tmp_path / "pool.sqlite") == {0: State.POOLED}
    await put(pool, Group(1, 0, 0, "env", (episode,)))
    assert (await pool.content()).pooled == (0, 1)


async def test_a_path_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="cannot be read or written"):
        await Pool.open(tmp_path / "file" / "pool.sqlite")


def test_a_step_waits_only_for_what_waiting_can_save() -> None:
    pooled = [Candidate(3, 1)]
    # η = 2, one place a step, now at version 1: two groups of version 0 run and must go at versions 1 and 2.
    assert choose(pooled, 1, rule(wait=True, running=[0, 0])) == []
    assert choose(pooled, 1, rule(wait=True, running=[0])) == [3]
    assert choose(pooled, 2, rule(wait=True, running=[0])) == []
    # The most urgent one is in the pool: waiting for the other would save nothing.
    assert choose([Candidate(3, 0)], 2, rule(wait=True, running=[0])) == [3]
    assert choose(pooled, 2, rule(wait=False, running=[0])) == [3]


def test_stored_bytes_are_few() -> None:
    size = len(_stored(group_of(0, "1.0", tokens=2000)).body)
    assert size / 2000 < 8


async def test_groups_of_abandoned_weights_are_kept_within_the_bound_where_asked(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path / "pool.sqlite", keep=2)
    await pool.resume(Version(1, 0))
    await pool.start("data")
    await put(pool, group_of(0, "1.4"), group_of(1, "1.5"), group_of(2, "1.6"), group_of(3, "1.3"))
    await pool.resume(Version(2, 4), None)  # the checkpoint holds version 4: 1.5 is one update off, 1.6 two
    assert (await pool.content()).pooled == (0, 1, 2, 3)
    assert await pool.put(group_of(4, "1.5", "2.4"))
    assert not await pool.put(group_of(5, "1.7"))
    change, take = await pool.take(5, Version(2, 5), rule(batch=4, staleness=2))
    # At version 5 the way to 1.5 is two updates, to 1.6 three: that one is asked again.
    assert change.dropped == (Ask(2, 1),)
    assert take is not None
    assert sorted(take.ids) == [0, 1, 3, 4]
    await pool.close()
