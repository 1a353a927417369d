"""Damaged bytes are an error, never a group."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from agentrl.errors import AgentRLError
from agentrl.types import Context, Episode, Group, Segment, Stop, Trajectory
from agentrl.wire import decode_group, encode_group


def _bytes() -> bytes:
    trajectory = Trajectory((Segment(np.arange(50, dtype=np.int32), None, Context()),))
    return encode_group(Group(0, 0, 0, "e", (Episode(0, 0, 0, 1, {}, (), (), (trajectory,), Stop.FINISHED),)))


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_torn_bytes_are_refused(cut: int) -> None:
    with pytest.raises(AgentRLError, match="not a whole group"):
        decode_group(_bytes()[:cut])


def test_a_short_payload_is_refused() -> None:
    raw = zstandard.ZstdDecompressor().decompress(_bytes())
    with pytest.raises(AgentRLError, match="not a whole group"):
        decode_group(zstandard.compress(raw[:-4]))
