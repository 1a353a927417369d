"""What is kept of episodes, and how it is found again."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.monitor.archive import Archive
from agentrl.monitor.episodes import BadQuery, Episodes, NotKept
from agentrl.monitor.sample import Shape, make_sample_run
from agentrl.train.trace import Place, TokenTrace, encode_traces
from agentrl.types import Context, Episode, Group, Sampled, Segment, SplitReason, Stop, Trajectory, Turn, Version


def group(position: int, *, text: str = "hello", reward: float = 1.0, stop: Stop = Stop.FINISHED) -> Group:
    context = Segment(np.array([7, 8, 9]), None, Context())
    one = Segment(np.array([1, 2]), np.array([-0.5, -1.0]), Sampled(Version(1, 3)))
    two = Segment(np.array([4]), np.array([-2.0]), Sampled(Version(1, 4), trained=False))
    episode = Episode(
        group=position,
        sample=0,
        attempt=0,
        seed=1,
        row={"id": text},
        messages=({"role": "user", "content": text},),
        turns=(Turn(0, 0, 5, reward, parts={"right": reward}),),
        trajectories=(Trajectory((context, one)), Trajectory((two,), SplitReason.TEMPLATE)),
        stop=stop,
    )
    return Group(position, 0, 0, "Sums", (episode,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "episodes.sqlite"


def test_an_episode_is_found_with_what_training_made_of_its_tokens(path: Path) -> None:
    nan = float("nan")
    trace = TokenTrace(
        Place(5, 0, 0),
        np.array([nan, nan, nan, 0.7, 0.7], np.float32),
        np.array([nan, nan, nan, -0.5, -1.1], np.float32),
    )
    archive = Archive(path, limit=1 << 20)
    archive.group(group(5), "pooled", step=6)
    archive.taken(6, [5])
    archive.trace(6, 1, encode_traces([trace]))
    archive.close(100)
    episodes = Episodes(path)
    page = episodes.page({"trained": "6", "version": "3"})
    assert page["total"] == 1
    (row,) = page["rows"]
    told = dict(zip(page["columns"], row, strict=True))
    assert (told["reward"], told["sampled"], told["tokens"], told["splits"]) == (1.0, 3, 6, "template")
    assert (told["oldest"], told["newest"], told["trained"], told["row"]) == (3, 4, 6, '{"id":"hello"}')
    whole = episodes.episode(told["id"])
    assert whole["messages"] == [{"role": "user", "content": "hello"}]
    assert whole["turns"][0]["parts"] == {"right": 1.0}
    assert [t["reason"] for t in whole["trajectories"]] == ["start", "template"]
    tokens = episodes.tokens(told["id"], 0, 2, 10)
    assert tokens.ids == [9, 1, 2]
    assert tokens.kinds == ["context", "sampled", "sampled"]
    assert tokens.versions == [None, "1.3", "1.3"]
    assert tokens.logprobs == [None, -0.5, -1.0]
    assert tokens.advantages == [None, pytest.approx(0.7), pytest.approx(0.7)]
    assert tokens.ratios == [None, 1.0, pytest.approx(np.exp(-0.1), abs=1e-4)]
    assert episodes.tokens(told["id"], 1, 0, 10).kinds == ["untrained"]
    assert episodes.tokens(told["id"], 1, 0, 10).ratios == [None]
    with pytest.raises(NotKept, match="2 trajectories"):
        episodes.tokens(told["id"], 2, 0, 1)


def test_a_resume_takes_back_what_later_steps_made_of_tokens(path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    for position in (1, 2):
        archive.group(group(position), "pooled", step=position)
        archive.taken(position, [position])
        archive.trace(position, 0, encode_traces([]))
    archive.resumed(1)
    archive.close(100)
    episodes = Episodes(path)
    assert episodes.page({"trained": "1"})["total"] == 1
    assert episodes.page({"trained": "2"})["total"] == 0
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT step FROM traces").fetchall() == [(1,)]
    db.close()


def test_the_newest_attempt_of_a_row_is_the_one_that_was_trained(path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    for reward in (0.0, 1.0):
        archive.group(group(3, reward=reward), "pooled", step=1)
    archive.taken(1, [3])
    archive.close(100)
    page = Episodes(path).page({"trained": "1"})
    assert [row[page["columns"].index("reward")] for row in page["rows"]] == [1.0]


def test_the_oldest_bodies_go_when_the_limit_is_reached_and_the_index_stays(path: Path) -> None:
    archive = Archive(path, limit=3000)
    for position in range(40):
        archive.group(group(position, text=f"{position} " * 50), "pooled", step=1)
    archive.trace(1, 0, bytes(2500))
    archive.close(100)
    episodes = Episodes(path)
    assert episodes.page({})["total"] == 40
    with pytest.raises(NotKept, match="keep_mb"):
        episodes.episode(1)
    with sqlite3.connect(path) as db:
        (size,) = db.execute("SELECT (SELECT SUM(LENGTH(body)) FROM bodies)").fetchone()
        assert db.execute("SELECT COUNT(*) FROM traces").fetchone() == (0,)
    db.close()
    assert 0 < size <= 3000
    assert episodes.episode(40)["row"]["id"].startswith("39 ")


def test_a_row_that_is_no_json_is_left_out_and_counted(path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    archive.group(group(1, text="\ud800"), "pooled", step=1)
    archive.group(group(2), "pooled", step=1)
    archive.close(100)
    assert archive.left_out == 1
    assert Episodes(path).page({})["total"] == 1


def test_a_file_that_cannot_be_written_is_told_and_nothing_is_raised(tmp_path: Path) -> None:
    told: list[str] = []
    archive = Archive(tmp_path / "missing" / "episodes.sqlite", limit=1, on_error=told.append)
    archive.group(group(1), "pooled", step=1)
    archive.close(100)
    archive.group(group(2), "pooled", step=1)
    assert len(told) == 1
    assert "no longer kept" in told[0]


def test_filters_and_order(path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    archive.group(group(1, reward=0.2), "pooled", step=1)
    archive.group(group(2, reward=0.8, text="<b>x</b>"), "filtered", step=2)
    archive.group(group(3, stop=Stop.SANDBOX_LOST), "given_up", step=2)
    archive.group(group(4), "evaluated", step=2, kind="eval")
    archive.close(100)
    episodes = Episodes(path)

    def found(**query: str) -> list[int]:
        page = episodes.page(query)
        assert page["total"] == len(page["rows"])
        return [row[page["columns"].index("position")] for row in page["rows"]]

    assert found() == [4, 3, 2, 1]
    assert found(order="reward") == [1, 2, 4, 3]
    assert found(order="-reward", kind="train") == [2, 1, 3]
    assert found(reward_min="0.5", kind="train") == [2]
    assert found(text="<b>") == [2]
    assert found(failed="1") == found(stop="sandbox_lost") == [3]
    assert found(step="2", fate="filtered") == [2]
    assert found(version="9") == []
    assert episodes.page({"limit": "1", "offset": "1"})["total"] == 4
    assert episodes.versions({"step": "1"}) == {"1.3": 2, "1.4": 1}
    assert episodes.facets()["stop"] == {"finished": 3, "sandbox_lost": 1}
    assert episodes.failures() == []
    for query in ({"order": "row; DROP TABLE episodes"}, {"reward_min": "x"}, {"limit": "-1"}):
        with pytest.raises(BadQuery):
            episodes.page(query)


def test_failures_that_differ_in_numbers_alone_are_one(path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    for position, error in enumerate(("box 1.2 was lost", "box 17 was lost", "boom")):
        (episode,) = group(position).episodes
        archive.group(Group(position, 0, 0, "Sums", (replace(episode, error=error),)), "pooled", step=1)
    archive.close(100)
    found = [(failure["count"], failure["stop"]) for failure in Episodes(path).failures()]
    assert found == [(2, "finished"), (1, "finished")]


def test_a_copy_in_a_folder_that_may_not_be_written_is_read(path: Path, tmp_path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    archive.group(group(1), "pooled", step=1)
    archive.close(100)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "episodes.sqlite").write_bytes(path.read_bytes())
    copy.chmod(0o500)
    assert Episodes(copy / "episodes.sqlite").page({})["total"] == 1
    copy.chmod(0o700)


def test_a_reader_sees_what_a_living_writer_adds(path: Path) -> None:
    archive = Archive(path, limit=1 << 20)
    episodes = Episodes(path)
    assert episodes.page({})["total"] == 0
    archive.group(group(1), "pooled", step=1)
    end = time.monotonic() + 60
    while episodes.page({})["total"] == 0:
        assert time.monotonic() < end
        time.sleep(0.02)
    archive.close(100)
    episodes.close()


def test_the_sample_run_is_whole(tmp_path: Path) -> None:
    make_sample_run(tmp_path / "run", Shape(steps=5, groups=3, samples=2))
    episodes = Episodes(tmp_path / "run" / "episodes.sqlite")
    facets = episodes.facets()
    assert facets["count"] == 5 * 3 * 2 + 2
    assert set(facets["fate"]) == {"pooled", "filtered", "evaluated"}
    (first,) = episodes.page({"trained": "3", "limit": "1"})["rows"]
    assert any(a is not None for a in episodes.tokens(first[0], 0, 0, 100).advantages)
