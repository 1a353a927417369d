"""A scripted engine behind SGLang's HTTP protocol, with the faults that real servers show: for tests of clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from agentrl.engine.reply import merged_spans
from agentrl.engine.types import Span
from agentrl.types import Version


@dataclass(frozen=True, slots=True)
class Fault:
    """What one `/generate` does wrong after `after` tokens.

    `kind` is "abort" (an aborted reply), "late_abort" (one in the step of the last token, whose stop it hides), "reset"
    (the connection breaks), "status" (an error answer, `status` and `message`), "status_event" (the same as an event of
    a stream), "status_finish" (the same as the finish reason), "hang" (nothing more is said), "no_logprobs",
    "dropped_stop" (a damaged reply) or "deltas" (events of a stream that hold only what is new).
    """

    kind: str
    after: int = 0
    status: int = 503
    message: str = "busy"


@dataclass
class Running:
    """A live request: its tokens so far, and the version that made each."""

    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False


class ScriptedServer:
    """Serves `reply(prompt)` token by token; `faults` are used up by the next requests, in order.

    ```python
    async with ScriptedServer(lambda prompt: [5, 6, 7]) as server:
        server.faults.append(Fault("reset", after=1))
        completion = await EngineClient(server.url).generate(request)
    ```

    `calls` lists every control call (and its end, as "… done") and generation in order, `running` the live requests;
    at `holds_at` tokens each of these stands still until that is None again or something ends it, so that a test can
    act in the middle of it. `info_hangs` makes the whole server look frozen, with `sums_hang` only the question for
    checksums is never answered; `unanswered` counts such questions. Without `spans` and `pauses` it is as servers were
    before they had them.
    """

    def __init__(
        self,
        reply: Callable[[Sequence[int]], Sequence[int]],
        *,
        version: str = "1.0",
        token_delay: float = 0.0,
        spans: bool = True,
        pauses: bool = True,
        control_delay: float = 0.0,
        update_answers: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.reply = reply
        self.version = version
        self.token_delay = token_delay
        self.control_delay = control_delay
        self.spans = spans
        self.pauses = pauses
        self.update_answers = deque(update_answers)
        self.faults: deque[Fault] = deque()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[str, Running] = {}
        self.holds_at: int | None = None
        self.checksum = "0"
        self.checksum_of: Callable[[str], str] = str
        """The checksum of the weights in a folder; its path where it does not matter what it holds."""
        self.info_hangs = self.sums_hang = False
        self.unanswered = 0
        self.url = ""
        self._going = asyncio.Event()
        self._going.set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> ScriptedServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen, on a free port where none is given."""
        app = web.Application()
        app.add_routes([web.post("/generate", self._generate), web.get("/model_info", self._info)])
        app.add_routes([web.post(path, self._control) for path in _CONTROLS])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, bound = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{bound}"

    async def stop(self) -> None:
        """Stop at once, as a killed process would: running requests lose their connections."""
        if self._runner is not None:
            self._going.set()
            await self._runner.cleanup()
            self._runner = None

    async def _info(self, request: web.Request) -> web.Response:
        if self.info_hangs:
            await self._never()
        return web.json_response({"weight_version": self.version, "model_path": "scripted"})

    async def _control(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        self.calls.append((request.path, body))
        if not self.pauses and request.path in ("/pause_generation", "/continue_generation"):
            return web.json_response({"detail": "Not Found"}, status=404)
        await asyncio.sleep(self.control_delay)
        self.calls.append((request.path + " done", body))
        if request.path == "/pause_generation":
            self._going.clear()
            if body["mode"] == "abort":
                self._abort(lambda _: True)
        elif request.path == "/continue_generation":
            self._going.set()
        elif request.path == "/abort_request":
            # As SGLang: every request whose id begins so.
            self._abort(lambda rid: bool(body.get("abort_all")) or rid.startswith(body["rid"]))
        elif request.path == "/weights_checker":
            if self.info_hangs or self.sums_hang:
                await self._never()
            return web.json_response({"success": True, "ranks": [{"checksums": {"w": self.checksum}}]})
        elif request.path == "/update_weight_version":
            self.version = body["new_version"]
        elif request.path == "/update_weights_from_disk":
            if self.update_answers:
                status, message = self.update_answers.popleft()
                return web.json_response({"success": False, "message": message}, status=status)
            self.version = body["weight_version"]
            self.checksum = self.checksum_of(body["model_path"])
        return web.json_response({"success": True})

    async def _never(self) -> None:
        self.unanswered += 1
        await asyncio.sleep(3600)

    def _abort(self, match: Callable[[str], bool]) -> None:
        for rid, state in self.running.items():
            state.aborted |= match(rid)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.calls.append(("/generate", body))
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "status":
            return web.json_response({"error": {"message": fault.message}}, status=fault.status)
        await self._going.wait()  # as SGLang: what comes in a pause is held back, and no abort finds it there
        if body["rid"] in self.running:
            return web.json_response({"error": {"message": "duplicate rid"}}, status=400)
        state = self.running[body["rid"]] = Running()
        try:
            return await self._play(request, body, state, fault)
        finally:
            del self.running[body["rid"]]

    async def _play(
        self, request: web.Request, body: dict[str, Any], state: Running, fault: Fault | None
    ) -> web.StreamResponse:
        stream = web.StreamResponse() if body.get("stream") else None
        if stream is not None:
            await stream.prepare(request)
        finish = await self._tokens(body, state, fault, stream)
        if fault is not None and fault.kind in ("reset", "hang") and finish is None:
            if fault.kind == "hang":
                await asyncio.sleep(3600)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        answer = self._answer(body["rid"], state, finish, fault)
        if fault is not None and fault.kind == "status_event":
            answer = {"error": {"message": fault.message, "code": fault.status}}
        if stream is None:
            return web.json_response(answer)
        await stream.write(b"data: " + orjson.dumps(answer) + b"\n\ndata: [DONE]\n\n")
        return stream

    async def _tokens(
        self, body: dict[str, Any], state: Running, fault: Fault | None, stream: web.StreamResponse | None
    ) -> dict[str, Any] | None:
        """Make the tokens; the finish reason, or None where a fault breaks it off."""
        params = body["sampling_params"]
        stops = set(params.get("stop_token_ids", ()))
        deltas = fault if fault is not None and fault.kind == "deltas" else None
        for token in self.reply(body["input_ids"]):
            if fault is not None and len(state.tokens) == fault.after and fault.kind in _BREAKS:
                return _broken(fault)
            if len(state.tokens) >= params["max_new_tokens"]:
                return {"type": "length", "length": len(state.tokens)}
            await asyncio.sleep(self.token_delay)
            while not state.aborted and self._stands(len(state.tokens)):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            if state.aborted:
                return {"type": "abort", "message": "Aborted"}
            state.tokens.append(int(token))
            state.versions.append(self.version)
            if fault is not None and fault.kind == "late_abort" and len(state.tokens) == fault.after:
                return {"type": "abort", "message": "Aborted"}
            if token in stops:
                return {"type": "stop", "matched": token}
            if stream is not None:
                await stream.write(b"data: " + orjson.dumps(self._answer(body["rid"], state, None, deltas)) + b"\n\n")
        return {"type": "stop", "matched": state.tokens[-1] if state.tokens else None}

    def _stands(self, made: int) -> bool:
        return not self._going.is_set() or (self.holds_at is not None and made >= self.holds_at)

    def _answer(self, rid: str, state: Running, finish: dict[str, Any] | None, fault: Fault | None) -> dict[str, Any]:
        kind = "" if fault is None else fault.kind
        logprobs = [[-0.5, token, None] for token in state.tokens]
        meta: dict[str, Any] = {"id": rid, "finish_reason": finish, "weight_version": self.version}
        meta["output_token_logprobs"] = None if kind == "no_logprobs" else logprobs
        # As SGLang 0.5.23: only the last event of a stream has the spans.
        if self.spans and finish is not None:
            spans = merged_spans([Span(Version.parse(v), i, i + 1) for i, v in enumerate(state.versions)])
            meta["weight_versions"] = [{"version": str(s.version), "start": s.start, "end": s.end} for s in spans]
        tokens = state.tokens[:-1] if kind == "dropped_stop" else state.tokens
        if kind == "deltas":
            tokens, meta["output_token_logprobs"] = tokens[-1:], logprobs[-1:]
        return {"output_ids": tokens, "meta_info": meta}


_BREAKS = ("reset", "hang", "abort", "status_event", "status_finish")


def _broken(fault: Fault) -> dict[str, Any] | None:
    if fault.kind == "status_finish":
        return {"type": "abort", "message": fault.message, "status_code": fault.status}
    return {"type": "abort", "message": "Aborted"} if fault.kind == "abort" else None


_CONTROLS = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/abort_request",
    "/weights_checker",
)
