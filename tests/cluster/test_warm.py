"""Ranks that wait with their libraries loaded."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from agentrl.cluster.warm import WarmRanks


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_rank_that_waits_becomes_the_one_that_is_wanted(tmp_path: Path) -> None:
    warm = WarmRanks(1, tmp_path)
    warm.fill()
    warm.fill()
    (waiting,) = (tmp_path / "warm").iterdir()
    env = {"AGENTRL_TOKEN": "x", "RANK": "7"}
    child = warm.start("rank 7", tmp_path / "no.json", env, tmp_path / "logs" / "rank-7.log")
    assert await child.wait() == 1
    assert "rank 7 failed at" in child.tail()
    assert "no.json" in child.tail()
    assert (waiting / "log").read_text() == ""
    # Without one that waits it is started as ever, and says the same.
    cold = warm.start("rank 8", tmp_path / "no.json", {**env, "RANK": "8"}, tmp_path / "logs" / "rank-8.log")
    assert await cold.wait() == 1
    assert "rank 8 failed at" in cold.tail()
    await warm.close()


async def test_those_that_wait_end_with_their_worker(tmp_path: Path) -> None:
    warm = WarmRanks(2, tmp_path)
    warm.fill()
    waiting = [rank.child for rank in warm._waiting]
    await warm.close()
    assert [child.poll() for child in waiting] == [-signal.SIGKILL] * 2, "they have nothing to lose: none is waited for"
    assert len(list((tmp_path / "warm").iterdir())) == 2
    warm.fill()
    await warm.close()
    assert len(list((tmp_path / "warm").iterdir())) == 4
