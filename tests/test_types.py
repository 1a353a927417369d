"""The nouns are valid by construction, and their views agree with their segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types import (
    Context,
    Demonstration,
    Episode,
    Group,
    Sampled,
    Segment,
    Stop,
    Trajectory,
    Turn,
    Version,
)
from agentrl.wire import decode_group, encode_group

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
versions = st.builds(Version, st.integers(1, 3), st.integers(0, 50))


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(ids)
    kind = draw(st.sampled_from(["context", "sampled", "demonstration"]))
    if kind == "sampled":
        logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
        source = Sampled(draw(versions), draw(st.sampled_from([0.5, 1.0])), draw(st.booleans()))
        return Segment(np.array(tokens), np.array(logprobs, np.float32), source)
    return Segment(np.array(tokens), None, Context() if kind == "context" else Demonstration())


trajectories = st.lists(segments(), min_size=1, max_size=5).map(lambda s: Trajectory(tuple(s)))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    def episode(sample: int) -> Episode:
        played = draw(st.lists(trajectories, max_size=3))
        turns = tuple(
            Turn(i, i, len(t), draw(st.one_of(st.none(), st.floats(-2, 2))), parts={"exact": 0.5})
            for i, t in enumerate(played)
        )
        stop = draw(st.sampled_from(list(Stop)))
        return Episode(7, sample, 0, 11, {"q": "北京"}, ({"role": "user", "content": "q"},), turns, tuple(played), stop)

    return Group(7, 1, 2, "calc", tuple(episode(k) for k in range(draw(st.integers(1, 3)))))


@given(trajectories)
def test_views_have_one_entry_a_token(trajectory: Trajectory) -> None:
    n = len(trajectory)
    views = (trajectory.loss_mask, trajectory.logprobs, trajectory.versions, trajectory.temperatures)
    assert all(view.shape == (n,) for view in (trajectory.tokens, *views))
    at = 0
    for segment in trajectory.segments:
        part = slice(at, at + len(segment))
        at += len(segment)
        sampled = isinstance(segment.source, Sampled)
        assert (trajectory.versions[part] >= 0).all() == sampled
        trained = isinstance(segment.source, Demonstration) or (
            isinstance(segment.source, Sampled) and segment.source.trained
        )
        assert (trajectory.loss_mask[part] == trained).all()


@given(groups())
def test_a_group_survives_the_wire(group: Group) -> None:
    assert decode_group(encode_group(group)) == group


@given(groups())
def test_the_short_form_keeps_what_a_trainer_reads(group: Group) -> None:
    short = decode_group(encode_group(group, messages=False))
    for full, lean in zip(group.episodes, short.episodes, strict=True):
        assert lean.trajectories == full.trajectories
        assert lean.turns == full.turns
        assert lean.messages == ()


@given(groups())
def test_age_counts_scored_and_trained_tokens_only(group: Group) -> None:
    expected = [
        number
        for episode in group.episodes
        if episode.scored
        for trajectory in episode.trajectories
        for number in trajectory.versions[trajectory.loss_mask & (trajectory.versions >= 0)]
    ]
    assert group.oldest_version == min(expected, default=None)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "source", "message"),
    [
        ([], None, Context(), "non-empty"),
        ([[1]], None, Context(), "1-D"),
        ([-1], None, Context(), ">= 0"),
        ([1], [-0.1], Context(), "no log-probs"),
        ([1, 2], None, Sampled(Version(1, 0)), "missing_logprobs"),
        ([1, 2], [-0.1], Sampled(Version(1, 0)), "2 tokens but 1"),
        ([1], [float("nan")], Sampled(Version(1, 0)), "finite"),
        ([1], [0.5], Sampled(Version(1, 0)), "<= 0"),
    ],
)
def test_a_wrong_segment_is_refused(tokens: object, logprobs: object, source: Context, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(np.array(tokens), None if logprobs is None else np.array(logprobs), source)


def test_a_segment_cannot_be_changed_afterwards() -> None:
    mine = np.array([1, 2], np.int32)
    segment = Segment(mine, None, Context())
    mine[0] = 9
    assert segment.tokens[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        segment.tokens[0] = 5


@pytest.mark.parametrize("label", ["", "1", "1.", ".1", "a.b", "1.2.3", "-1.0", "1.0 "])
def test_a_malformed_version_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"incarnation\.number"):
        Version.parse(label)


@given(versions)
def test_a_version_reads_back(version: Version) -> None:
    assert Version.parse(str(version)) == version


def test_an_unscored_episode_has_no_reward() -> None:
    def episode(stop: Stop, *rewards: float | None) -> Episode:
        turns = tuple(Turn(i, None, 0, r) for i, r in enumerate(rewards))
        return Episode(0, 0, 0, 1, {}, (), turns, (), stop)

    assert episode(Stop.FINISHED, 0.25, 0.5).reward == 0.75
    assert episode(Stop.MAX_TURNS, 0.25).reward == 0.25
    assert episode(Stop.FINISHED, 0.25, None).reward is None
    assert episode(Stop.ENV_ERROR, 0.25).reward is None


def test_a_turn_must_lie_in_its_trajectory() -> None:
    trajectory = Trajectory((Segment(np.array([1, 2]), None, Context()),))
    with pytest.raises(ValueError, match="past its trajectory"):
        Episode(0, 0, 0, 1, {}, (), (Turn(0, 0, 3, 1.0),), (trajectory,), Stop.FINISHED)
    with pytest.raises(ValueError, match="names trajectory 1 of 1"):
        Episode(0, 0, 0, 1, {}, (), (Turn(0, 1, 1, 1.0),), (trajectory,), Stop.FINISHED)
    with pytest.raises(ValueError, match="not finite"):
        Turn(0, 0, 1, float("inf"))
