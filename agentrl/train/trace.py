"""What a step made of each token, as bytes: kept for inspection, read by nobody who trains.

[4 bytes: header length][header, JSON][all advantages, float32][all log-probs, float32]   -> zstd
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import orjson
import zstandard

from agentrl.errors import AgentRLError
from agentrl.types import Float32Array

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 31


class Place(NamedTuple):
    """Which trajectory: the group's id, the episode's place in the group, the trajectory's place in the episode."""

    group: int
    episode: int
    trajectory: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrace:
    """Of one trajectory's tokens `[T]`, both NaN where the loss was not about the token.

    `advantages` as the loss used them; `logprobs` under the weights of the training forward pass, at the sampling
    temperature, so that exp(logprobs - behaviour) is how far the policy had moved since the token was sampled.
    """

    place: Place
    advantages: Float32Array
    logprobs: Float32Array


def encode_traces(traces: Sequence[TokenTrace]) -> bytes:
    """One rank's traces of a step."""
    head = orjson.dumps([[*trace.place, len(trace.advantages)] for trace in traces])
    arrays = [t.advantages for t in traces] + [t.logprobs for t in traces]
    raw = b"".join(a.astype("<f4", copy=False).tobytes() for a in arrays)
    return zstandard.compress(b"".join((_LENGTH.pack(len(head)), head, raw)), 1)


def decode_trace(data: bytes, place: Place) -> TokenTrace | None:
    """The trace of `place`, None where these bytes have none of it; AgentRLError where they are damaged."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_BYTES)
        (size,) = _LENGTH.unpack_from(raw)
        header = orjson.loads(raw[_LENGTH.size : _LENGTH.size + size])
        lengths = [int(entry[3]) for entry in header]
        places = [Place(*entry[:3]) for entry in header]
        if place not in places:
            return None
        index = places.index(place)
        at, n = sum(lengths[:index]), lengths[index]
        begin = _LENGTH.size + size + 4 * at
        advantages = np.frombuffer(raw, "<f4", n, begin)
        return TokenTrace(place, advantages, np.frombuffer(raw, "<f4", n, begin + 4 * sum(lengths)))
    except (zstandard.ZstdError, struct.error, orjson.JSONDecodeError, TypeError, ValueError, IndexError) as error:
        raise AgentRLError(f"{len(data)} bytes are no traces of a step: {error}") from error
