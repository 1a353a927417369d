"""Groups as bytes: a JSON header and the raw arrays behind it, compressed. Never pickles.

    [4 bytes: header length][header, JSON][all tokens, int32][all log-probs of sampled segments, float32]   -> zstd

Both arrays lie byte by byte: all lowest bytes first, the highest (sign and exponent) last. That compresses in half the
time and a tenth smaller than number by number, which the first form (a header without `planes`) had and is still read.

The pool stores these bytes and the trainer's ranks fetch them; `messages=False` leaves out what a trainer never reads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray

from agentrl.errors import AgentRLError
from agentrl.types import (
    Context,
    Demonstration,
    Episode,
    Group,
    Sampled,
    Segment,
    Source,
    SplitReason,
    Stop,
    Trajectory,
    Turn,
    Version,
)

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 31
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEEPEST = 100
"""Levels of a row that are kept as such."""
_LONG_INT = 10_000
"""Bits of an integer that is still written out; Python refuses above 4,300 digits."""


def encode_group(group: Group, *, messages: bool = True) -> bytes:
    """The group as bytes; `messages=False` drops the rows' data and the chat."""
    segments = [s for e in group.episodes for t in e.trajectories for s in t.segments]
    header = {
        "id": group.id,
        "attempt": group.attempt,
        "epoch": group.epoch,
        "env": group.env,
        "planes": True,
        "episodes": [_episode_header(e, messages) for e in group.episodes],
    }
    head = json_bytes(header)
    tokens = _planes([s.tokens.astype("<i4", copy=False) for s in segments])
    logprobs = _planes([s.logprobs.astype("<f4", copy=False) for s in segments if s.logprobs is not None])
    return zstandard.compress(b"".join((_LENGTH.pack(len(head)), head, tokens, logprobs)), 1)


def decode_group(data: bytes) -> Group:
    """The inverse of `encode_group`; raises AgentRLError where the bytes are damaged."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_BYTES)
        (size,) = _LENGTH.unpack_from(raw)
        header = orjson.loads(raw[_LENGTH.size : _LENGTH.size + size])
        lengths = [(s[0], s[1] == "s") for e in header["episodes"] for t in e["trajectories"] for s in t["segments"]]
        n_tokens = sum(n for n, _ in lengths)
        n_logprobs = sum(n for n, sampled in lengths if sampled)
        read = _from_planes if header.get("planes") else _plain
        tokens = read(raw, "<i4", n_tokens, _LENGTH.size + size)
        logprobs = read(raw, "<f4", n_logprobs, _LENGTH.size + size + 4 * n_tokens)
        return _group(header, tokens, logprobs)
    except (zstandard.ZstdError, struct.error, orjson.JSONDecodeError, KeyError, ValueError, IndexError) as error:
        raise AgentRLError(f"{len(data)} bytes are not a whole group: {error}") from error


def json_bytes(value: Any, option: int = 0) -> bytes:
    """Whatever rows and messages hold, as JSON: the same in every process. What JSON cannot say is text there."""
    option |= orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=_told, option=option)
    except TypeError:  # a huge integer, a lone surrogate, a key that is a tuple
        return orjson.dumps(_sayable(value), default=_told, option=option)


def legible(text: str) -> str:
    """`text` as it can be written anywhere: names of files may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _told(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return legible(_ADDRESS.sub("", str(value)))


def _sayable(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(value) if value.bit_length() < _LONG_INT else hex(value)
    if isinstance(value, dict | list | tuple) and depth > _DEEPEST:
        return f"{type(value).__name__} below {depth} others"
    if isinstance(value, dict):
        return {legible(str(key)): _sayable(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(inner, depth + 1) for inner in value]
    return value


def _planes(parts: Sequence[NDArray[Any]]) -> bytes:
    return np.concatenate(parts).view(np.uint8).reshape(-1, 4).T.tobytes() if parts else b""


def _from_planes(raw: bytes, dtype: str, count: int, offset: int) -> NDArray[Any]:
    found = np.frombuffer(raw, np.uint8, 4 * count, offset).reshape(4, count)
    return np.ascontiguousarray(found.T).view(dtype).reshape(count)


def _plain(raw: bytes, dtype: str, count: int, offset: int) -> NDArray[Any]:
    return np.frombuffer(raw, dtype, count, offset)


def _episode_header(episode: Episode, messages: bool) -> dict[str, Any]:
    return {
        "sample": episode.sample,
        "attempt": episode.attempt,
        "seed": episode.seed,
        "row": dict(episode.row) if messages else {},
        "messages": list(episode.messages) if messages else [],
        "turns": [[t.index, t.trajectory, t.end, t.reward, t.agent, dict(t.parts)] for t in episode.turns],
        "trajectories": [
            {
                "reason": t.reason.value,
                "agent": t.agent,
                "abandoned": t.abandoned,
                "segments": [_segment_header(s) for s in t.segments],
            }
            for t in episode.trajectories
        ],
        "stop": episode.stop.value,
        "metrics": dict(episode.metrics),
        "error": episode.error,
    }


def _segment_header(segment: Segment) -> list[Any]:
    source = segment.source
    if isinstance(source, Sampled):
        return [len(segment), "s", str(source.version), source.temperature, source.trained]
    return [len(segment), "d" if isinstance(source, Demonstration) else "c"]


def _source(header: list[Any]) -> Source:
    if header[1] == "s":
        return Sampled(Version.parse(header[2]), header[3], header[4])
    return Demonstration() if header[1] == "d" else Context()


def _group(header: dict[str, Any], tokens: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any]) -> Group:
    at_token = at_logprob = 0

    def segment(head: list[Any]) -> Segment:
        nonlocal at_token, at_logprob
        n, source = head[0], _source(head)
        ids = tokens[at_token : at_token + n]
        at_token += n
        if not isinstance(source, Sampled):
            return Segment(ids, None, source)
        probs = logprobs[at_logprob : at_logprob + n]
        at_logprob += n
        return Segment(ids, probs, source)

    episodes = [
        Episode(
            group=header["id"],
            sample=e["sample"],
            attempt=e["attempt"],
            seed=e["seed"],
            row=e["row"],
            messages=tuple(e["messages"]),
            turns=tuple(Turn(i, t, end, reward, agent, parts) for i, t, end, reward, agent, parts in e["turns"]),
            trajectories=tuple(
                Trajectory(
                    tuple(segment(s) for s in t["segments"]), SplitReason(t["reason"]), t["agent"], t["abandoned"]
                )
                for t in e["trajectories"]
            ),
            stop=Stop(e["stop"]),
            metrics=e["metrics"],
            error=e["error"],
        )
        for e in header["episodes"]
    ]
    return Group(header["id"], header["attempt"], header["epoch"], header["env"], tuple(episodes))
