"""Why a group of ranks ended: the one whose error came first, not the one that died of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from agentrl.child import Child
from agentrl.conductor.cause import RankEnd, codes_by_rank, death, first_error, first_to_fail, group_death, remedy
from tests.conductor.kit import finished, lines, make_place, start

LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2113"
SUMMARY = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
""".splitlines()


def rank(number: int, at: float | None, text: str = "", code: int | None = 1) -> RankEnd:
    said = [] if at is None else [f"agentrl.train: rank {number} failed at {at}: {text}", "Traceback (…):", text]
    return RankEnd(number, Path(f"trainer-{number}.log"), ["loads", *said], code)


def test_the_first_error_is_the_cause_whoever_died_first() -> None:
    ends = [rank(0, 5.0, LOST), rank(1, 5.2, "ValueError: boom"), rank(2, 5.1, LOST), rank(3, 6.0, "ValueError: late")]
    first = group_death("the trainer", 1, ends)
    assert first is not None
    assert first.text.startswith("the trainer ended with exit code 1: rank 1 failed first: ValueError: boom\n")
    assert "the end of trainer-1.log:\n  | loads" in first.text
    assert first.own


def test_a_rank_that_was_killed_says_nothing_and_is_named() -> None:
    codes = codes_by_rank(SUMMARY)
    assert codes == {0: 1, 1: -9}
    killed = group_death("the trainer", 1, [rank(0, 5.0, LOST, codes[0]), rank(1, None, code=codes[1])])
    assert killed is not None
    assert killed.text.startswith("the trainer ended with exit code 1: rank 1 was killed by SIGKILL\n")
    assert not killed.own, "it says nothing of whether it will happen again"


def test_where_all_lost_each_other_the_first_one_says_so() -> None:
    ended = first_to_fail([rank(0, 5.5, LOST), rank(1, 5.0, LOST), rank(2, None, code=-15), rank(3, None, code=None)])
    assert ended is not None
    assert ended.rank == 1
    assert group_death("the trainer", 1, [rank(0, None, code=-15)]) is None


def test_the_first_exception_of_a_log_is_the_last_of_its_chain() -> None:
    chain = ["KeyError: 'a'", "", "The above exception was the direct cause of the following exception:", "", "Tr:"]
    assert first_error([*chain, "agentrl.errors.DataError: row 3 has no 'a'", "OSError: later"]) == (
        "agentrl.errors.DataError: row 3 has no 'a'"
    )
    assert first_error(["[rank1]: ValueError: x"]) == "ValueError: x"
    assert first_error(["all is well"]) is None


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("it ended: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "lower this"),
        ("rank 1 was killed by SIGKILL\nthe end", r"the kernel may have .* \(dmesg tells\): then lower this"),
        ("ModuleNotFoundError: No module named 'x'", "install what is missing for /"),
        ("OSError: [Errno 28] No space left on device", "free some space"),
        ("RuntimeError: Timed out waiting 600000ms for recv operation", "raise train.collective_timeout"),
        ("ValueError: mine\n  | MemoryError of long ago", "mend the cause"),
    ],
)
def test_each_kind_of_error_has_its_remedy(text: str, advice: str) -> None:
    assert re.match(advice, remedy(text, "lower this"))


async def test_a_child_is_judged_by_its_own_part_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier life\n")
    child = Child("the helper", [sys.executable, "-c", "raise KeyError('mine')"], log=log)
    text = death(child, await child.wait())
    child.kill()
    assert text.startswith("the helper ended with exit code 1: KeyError: 'mine'\n")
    assert "earlier life" not in text


BROKEN = """
import os
from agentrl.train.algorithm import Algorithm

class Broken(Algorithm):
    def loss(self, batch, out):
        if os.environ["RANK"] == "1":
            raise ValueError("the second rank's own fault")
        return super().loss(batch, out)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_real_ranks_have_a_log_each_and_the_faulty_one_is_named(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    (place / "broken.py").write_text(BROKEN)
    settings = ("train.ranks=2", "algorithm.name=broken:Broken", "eval.every=1000", "monitor.trainer_restarts=0")
    code, output = finished(start(place, "train", "run.toml", *settings))
    assert code == 1, output
    logs = place / "runs" / "r" / "logs"
    told = output[output.index("error: ") :].splitlines()
    assert told[0].endswith("rank 1 failed first: ValueError: the second rank's own fault"), output
    assert f"the end of {logs / 'trainer-1.log'}:" in told[1]
    assert "what to do: " in told[-1]
    own = (logs / "trainer-1.log").read_text()
    assert "in loss" in own
    assert "the second rank's own fault" not in (logs / "trainer-0.log").read_text()
    assert "rank 0" not in own
    (fault,) = lines(place / "runs" / "r", "fault")
    assert "rank 1 failed first" in fault["error"]
