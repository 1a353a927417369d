"""Three hosts of a run: the conductor's and two that lend what they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import make_hosts, why_not
from tests.cluster.kit import Cluster
from tests.conductor.kit import make_place


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    place = make_place(tmp_path)
    with make_hosts(("c", "a", "b"), place) as (c, a, b):
        yield Cluster(place, c, a, b)
