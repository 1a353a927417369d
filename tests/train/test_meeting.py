"""How ranks find each other, and what becomes of one that does not."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from torch._C._distributed_c10d import TCPStore

from tests.train.group import meeting_place

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[2]
RANK = """
import sys
from agentrl.train.__main__ import prepare_environment
prepare_environment()
import torch.distributed.distributed_c10d as c10d, torch
from pathlib import Path
from agentrl.train import deepspeed
from agentrl.train.options import TrainOptions

def limits():
    groups = [group._get_backend(torch.device("cpu")) for group in c10d._world.pg_map]
    print([group.options._timeout.total_seconds() for group in groups])

deepspeed.MEET_SECONDS = {meet}
deepspeed._join_group(777.0)
limits()
backend = deepspeed.Backend(Path(sys.argv[1]), TrainOptions(collective_timeout=777.0))
limits()
print([backend._engine.optimizer.dp_process_group in c10d._world.pg_map])
"""


def rank(model: Path, meet: float, **environment: str) -> subprocess.Popen[str]:
    """A process that joins its group and loads."""
    return subprocess.Popen(
        [sys.executable, "-c", RANK.format(meet=meet), str(model)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_limit_on_collectives_holds_for_the_group_that_zero_uses_once_all_have_loaded(tiny: Path) -> None:
    process = rank(tiny, 1000.0)
    told, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    loading, loaded, known = (orjson.loads(line.lower()) for line in told.splitlines() if line.startswith("["))
    assert loading == [1800.0, 1800.0]
    assert loaded == [777.0, 777.0]
    assert known == [True]


def test_a_rank_ends_where_all_have_come_and_one_does_not_connect(tiny: Path) -> None:
    """Another process comes to the store in the place of rank 1, late, and goes no further."""
    with meeting_place(2) as here:
        process = rank(tiny, 2.0, RANK="0", LOCAL_RANK="0", **here)
        store = TCPStore("127.0.0.1", int(here["MASTER_PORT"]), 2, False, datetime.timedelta(seconds=500))
        store.wait(["agentrl/come"])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)  # until the last one has come there is no limit of seconds
        assert store.add("agentrl/come", 1) == 2
        store.set("agentrl/all", "")
        _, errors = process.communicate(timeout=500)
    assert process.returncode == 1
    told = re.search(r"^agentrl.train: rank 0 failed at [\d.]+: RanksDoNotMeet: (.*)$", errors, re.MULTILINE)
    assert told is not None, errors
    assert told[1].startswith("all 2 ranks have come, but within 2 s this one was not connected to all others")
    assert told[1].endswith(" over GLOO_SOCKET_IFNAME=lo")
    assert "in _meet" in errors, "where each thread was"
