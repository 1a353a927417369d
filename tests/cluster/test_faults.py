"""What may befall a host, at the worst moments: while episodes are played, within a step, a publish, a checkpoint.

The host that trains is stopped at the moment looked for, and only then killed, cut off, or left frozen.
"""

from __future__ import annotations

import signal
from functools import partial

import pytest

from tests.cluster.aim import Aim, nothing_was_handed_in_late
from tests.cluster.hosts import Host
from tests.cluster.kit import PATIENCE, Cluster, ledger
from tests.conductor.kit import lines

ROLES = ("engine", "trainer")
STRIKES = [(moment, fault) for fault in ("cut", "freeze", "kill") for moment in ("rollouts", "step", "publish", "save")]
SETTINGS = (
    "train.ranks=1", "train.steps=100000", "train.checkpoint_every=1", "train.keep_checkpoints=9999",
    "eval.every=1000", "engine.count=2", "rollout.staleness=2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_host_lost_at_any_moment_costs_nothing_but_time(cluster: Cluster) -> None:
    conductor = cluster.train(*SETTINGS, lost=4.0)
    for host in (cluster.a, cluster.b):
        cluster.lend(host, *ROLES)
    aim = Aim(cluster, conductor)
    for moment, fault in STRIKES:
        target = aim.trains()
        host = target.host
        began, lost = len(lines(cluster.run, "begin")), aim.lost(host)
        late = aim.strike(target, moment, fault)
        cluster.until(partial(_is_lost, aim, host, lost + len(ROLES)), conductor)
        cluster.until(partial(aim.stepped_since, began + 1), conductor)
        if fault == "freeze":
            aim.comes_back_late(target, late)
            host.thaw()
        elif fault == "cut":
            host.mend()
        else:
            cluster.lend(host, *ROLES)
    conductor.send_signal(signal.SIGINT)
    conductor.wait(PATIENCE)
    assert ledger(cluster.run)["incarnations"] >= 1 + len(STRIKES)
    nothing_was_handed_in_late(cluster.run)


def _is_lost(aim: Aim, host: Host, times: int) -> bool:
    return aim.lost(host) >= times
