"""The trainer's side of the feed: plain HTTP on loopback, see docs/architecture.md. Only rank 0 takes and reports."""

from __future__ import annotations

import http.client
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from agentrl.errors import RunError
from agentrl.train.still import Stillness
from agentrl.types import Group, Version
from agentrl.wire import decode_group

ANSWER_SECONDS = 90.0
"""How long an answer may take; a `/take` is held up to 20 s by the server."""
COMMIT_SECONDS = 3600.0
"""How long the conductor may take to fetch a checkpoint's parts."""
PATIENCE_SECONDS = 10.0
"""How long a feed that refuses connections is asked again before the trainer gives up."""
FETCHES = 8
"""Groups of a batch that one rank asks for at a time."""
BEAT_SECONDS = 5.0
MAX_TRACE_BYTES = 48 << 20
"""Below what the feed accepts; about 10 million tokens of one rank."""


class Over(NamedTuple):
    """The run is over."""

    reason: str


class WeightsGroup(NamedTuple):
    """A process group of rank 0 and the engines: `world` members, rank 0 included."""

    name: str
    world: int
    backend: str


class Feed:
    """One rank's connection to the conductor. Not thread-safe: a thread makes its own."""

    def __init__(
        self, url: str, token: str, *, patience: float = PATIENCE_SECONDS, answer: float = ANSWER_SECONDS
    ) -> None:
        self.url, self._token, self._patience, self._answer = url, token, patience, answer
        self._connection: http.client.HTTPConnection | None = None

    def take(self, step: int, version: Version) -> bytes | Over | None:
        """The manifest of `step` as JSON bytes; None where there is none yet: ask again."""
        status, body = self._call("POST", "/take", {"step": step, "version": str(version)}, (200, 204, 410))
        if status == 204:
            return None
        return body if status == 200 else Over(str(orjson.loads(body)["reason"]))

    def group(self, take: int, group: int) -> Group:
        """One group of a take, without its messages."""
        _, body = self._call("GET", f"/take/{take}/group/{group}", None, (200,))
        return decode_group(body)

    def groups(self, take: int, groups: Sequence[int]) -> dict[int, Group]:
        """Several groups of a take, a few at a time: a busy conductor lets each answer wait."""
        todo, found = deque(groups), dict[int, Group]()

        def some() -> None:
            feed = Feed(self.url, self._token, patience=self._patience, answer=self._answer)
            try:
                while todo:
                    try:
                        group = todo.popleft()
                    except IndexError:
                        return  # another thread had the last one
                    found[group] = feed.group(take, group)
            finally:
                feed.close()

        with ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch") as pool:
            for done in [pool.submit(some) for _ in range(min(FETCHES, len(groups)))]:
                done.result()
        return found

    def weights(self, step: int, version: Version, path: str, seconds: float) -> None:
        """A whole folder of weights is at `path`."""
        self._post("/weights", {"step": step, "version": str(version), "path": path, "seconds": seconds})

    def weights_group(self, held: str, address: str, port: int, backend: str) -> WeightsGroup | None:
        """The group to send weights over, which engines join at the store on `address`; None: not now."""
        body = {"held": held, "address": address, "port": port, "backend": backend}
        _, answer = self._call("POST", "/group", body, (200,))
        told = orjson.loads(answer)
        return WeightsGroup(told["name"], told["world"], told["backend"]) if told["name"] else None

    def receive(self, step: int, version: Version, path: str, buckets: Sequence[Mapping[str, Any]]) -> bool:
        """Have the engines receive these buckets, in order; whether they are about to."""
        body = {"step": step, "version": str(version), "path": path, "buckets": list(buckets)}
        _, answer = self._call("POST", "/receive", body, (200,))
        return bool(orjson.loads(answer)["go"])

    def metrics(self, step: int, version: Version, metrics: Mapping[str, float]) -> None:
        """What the step measured."""
        self._post("/metrics", {"step": step, "version": str(version), "metrics": dict(metrics)})

    def trace(self, step: int, incarnation: int, rank: int, body: bytes) -> None:
        """What the step made of this rank's tokens, see `agentrl.train.trace`; too large a one is left out."""
        if len(body) > MAX_TRACE_BYTES:
            return
        self._call("POST", f"/trace/{incarnation}/{step}/{rank}", body, (200,))

    def checkpoint(self, step: int, version: Version, path: str, take: int, cursor: Mapping[str, Any]) -> None:
        """A checkpoint's rename has happened."""
        body = {"step": step, "version": str(version), "path": path, "take": take, "cursor": dict(cursor)}
        self._post("/checkpoint", body)

    def permit(self, step: int, version: Version) -> None:
        """Ask whether this incarnation may still make a checkpoint; RunError where another one has begun."""
        self._post("/permit", {"step": step, "version": str(version)})

    def commit(self, step: int, version: Version, content: Mapping[str, Any], keep: int) -> str:
        """Have the conductor fetch every host's part of a checkpoint and make it whole; its folder there."""
        body = {"step": step, "version": str(version), "content": dict(content), "keep": keep}
        patient = Feed(self.url, self._token, answer=COMMIT_SECONDS)
        try:
            _, answer = patient._call("POST", "/commit", body, (200,))
        finally:
            patient.close()
        return str(orjson.loads(answer)["path"])

    def phase(self, rank: int, phase: str, step: int, still: float = 0.0, where: str = "") -> None:
        """A heartbeat; `still` is for how many seconds this rank has not moved from `where`."""
        self._post("/phase", {"rank": rank, "phase": phase, "step": step, "still": still, "where": where[:300]})

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self._call("POST", path, body, (200,))

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, expected: tuple[int, ...]
    ) -> tuple[int, bytes]:
        """Every call is idempotent at the server, so a lost connection is tried again."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        failing: float | None = None  # since when; an answer may have been waited for before, and for long
        while True:
            try:
                status, answer = self._exchange(method, path, data)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                now = time.monotonic()
                failing = failing or now
                if now > failing + self._patience:
                    raise RunError(
                        f"the conductor's feed {self.url} is lost: {method} {path} failed for {self._patience:.0f} s "
                        f"({type(error).__name__}: {error}); start the run again with --resume"
                    ) from error
                time.sleep(0.2)
                continue
            if status in expected:
                return status, answer
            if status in (502, 503, 504):
                failing = failing or time.monotonic()
                if time.monotonic() < failing + self._patience:
                    time.sleep(0.2)
                    continue
            text = answer[:500].decode(errors="replace")
            raise RunError(f"the feed answered {method} {path} with {status}, expected one of {expected}: {text}")

    def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        address = urlsplit(self.url)
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                address.hostname or "127.0.0.1", address.port, timeout=self._answer
            )
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        self._connection.request(method, address.path.rstrip("/") + path, data, headers)
        response = self._connection.getresponse()
        return response.status, response.read()


class Phases:
    """Says what this rank is doing, at every change and every 5 s, and counts the seconds of each phase.

    The beats come from a thread with its own connection: they go on while a collective or a disk blocks the loop. They
    also say for how long the thread that made this has stood still.
    """

    def __init__(self, url: str, token: str, rank: int) -> None:
        self.seconds: dict[str, float] = {}
        self._feed, self._rank = Feed(url, token), rank
        self._now = ("start", 0)
        self._stillness = Stillness(threading.current_thread())
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def phase(self, name: str, step: int) -> Phase:
        """`with phases.phase("fetch", step): …`"""
        return Phase(self, name, step)

    def enter(self, name: str, step: int) -> None:
        """A phase begins."""
        self._now = (name, step)
        self._changed.set()

    def drain(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        spent, self.seconds = self.seconds, {}
        return spent

    def close(self) -> None:
        """Stop the beats."""
        self._ended.set()
        self._changed.set()
        self._thread.join(2.0)

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._changed.clear()
            name, step = self._now
            try:
                self._feed.phase(self._rank, name, step, *self._stillness.look())
            except RunError:
                # The loop's own calls find out and end the rank with the cause; a missed beat is not one.
                pass
            self._changed.wait(BEAT_SECONDS)
        self._feed.close()


class Phase:
    """One phase, as a context manager."""

    def __init__(self, phases: Phases, name: str, step: int) -> None:
        self._phases, self._name, self._step, self._start = phases, name, step, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._phases.enter(self._name, self._step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent = time.perf_counter() - self._start
        self._phases.seconds[self._name] = self._phases.seconds.get(self._name, 0.0) + spent
