"""What a step made of each token, as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.errors import AgentRLError
from agentrl.train.algorithm import Metrics, Output
from agentrl.train.batch import Batch, pack
from agentrl.train.plan import Item
from agentrl.train.recorder import Recorder
from agentrl.train.trace import Place, TokenTrace, decode_trace, encode_traces
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version


def test_each_trajectory_is_found_by_its_place() -> None:
    one = TokenTrace(Place(7, 0, 0), np.array([1, 2, np.nan], np.float32), np.array([-1, -2, np.nan], np.float32))
    two = TokenTrace(Place(7, 1, 0), np.array([5], np.float32), np.array([-5], np.float32))
    data = encode_traces([one, two])
    for trace in (one, two):
        found = decode_trace(data, trace.place)
        assert found is not None
        np.testing.assert_array_equal(found.advantages, trace.advantages)
        np.testing.assert_array_equal(found.logprobs, trace.logprobs)
    assert decode_trace(data, Place(7, 2, 0)) is None
    assert decode_trace(encode_traces([]), Place(1, 0, 0)) is None


@pytest.mark.parametrize("data", [b"", b"junk", encode_traces([])[:-3]])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(AgentRLError, match="no traces of a step"):
        decode_trace(data, Place(1, 0, 0))


def test_the_recorder_keeps_what_the_loss_was_given() -> None:
    context = Segment(np.array([1, 2]), None, Context())
    sampled = Segment(np.array([3, 4]), np.array([-0.5, -0.25]), Sampled(Version(1, 0)))
    trajectory = Trajectory((context, sampled))
    episode = Episode(9, 0, 0, 0, {}, (), (Turn(0, 0, 4, 1.0),), (trajectory,), Stop.FINISHED)
    group = Group(9, 0, 0, "E", (episode,))
    batch = pack([Item(0, 0, 0, 4)], {0: group}, {0: [{0: 1.0}]}, version=0)
    batch = batch.with_advantages(torch.tensor([0.0, 0.0, 0.75, 0.75]))
    dummy = pack([], {}, {}, version=0)

    def loss(given: Batch, out: Output) -> tuple[torch.Tensor, Metrics]:
        return out.logprobs.sum(), {}

    recorder = Recorder()
    watched = recorder.watch(loss, [batch, dummy])
    logprobs = torch.tensor([0.0, 0.0, -0.5, -1.25], requires_grad=True)
    value, _ = watched(batch, Output(logprobs, torch.zeros(4)))
    watched(dummy, Output(torch.zeros(2), torch.zeros(2)))
    assert value.requires_grad
    found = decode_trace(recorder.encode(), Place(9, 0, 0))
    assert found is not None
    np.testing.assert_array_equal(found.advantages, np.array([np.nan, np.nan, 0.75, 0.75], np.float32))
    np.testing.assert_array_equal(found.logprobs, np.array([np.nan, np.nan, -0.5, -1.25], np.float32))
    assert decode_trace(recorder.encode(), Place(9, 0, 0)) is None
