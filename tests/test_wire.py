"""Damaged bytes are an error, never a group."""

from __future__ import annotations

import numpy as np
import orjson
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


def test_the_first_form_is_still_read() -> None:
    """Pools that an earlier version wrote hold the arrays number by number."""
    raw = zstandard.ZstdDecompressor().decompress(_bytes())
    size = int.from_bytes(raw[:4], "little")
    header = orjson.loads(raw[4 : 4 + size])
    assert header.pop("planes") is True
    head = orjson.dumps(header)
    first = len(head).to_bytes(4, "little") + head + np.arange(50, dtype="<i4").tobytes()
    assert decode_group(zstandard.compress(first)) == decode_group(_bytes())
