"""The embedded engine's HTTP side: SGLang's protocol on aiohttp, in a thread of its own beside the generating one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from aiohttp import web
from pydantic import ValidationError

from agentrl.engine.embedded.group import GroupRefused, Receiver
from agentrl.engine.embedded.linear import CPU
from agentrl.engine.embedded.parameters import Weights, checksums, load_weights
from agentrl.engine.embedded.protocol import (
    AbortBody,
    CheckBody,
    GenerateBody,
    LabelBody,
    PauseBody,
    UpdateBody,
    answer,
    read,
)
from agentrl.engine.embedded.sampler import Rule
from agentrl.engine.embedded.scheduler import Scheduler
from agentrl.engine.embedded.sequence import Live
from agentrl.engine.embedded.shape import ModelShape
from agentrl.errors import ConfigError

_SECONDS = 60.0
"""How long the generating thread may take to reach the next step before a control call gives up."""


class App:
    """The routes of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        shape: ModelShape,
        folder: Path,
        dtype: torch.dtype,
        can_decode: bool,
        device: torch.device = CPU,
    ) -> None:
        self.scheduler = scheduler
        self.shape = shape
        self.folder = str(folder)
        self._dtype, self._device = dtype, device
        self._receiver = Receiver(shape, dtype, device, self._received)
        self._can_decode = can_decode
        self._live: dict[str, Live] = {}
        self._loading = asyncio.Lock()
        self._in_place = False
        self._load_ms = 0.0

    def routes(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=1 << 28, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/update_weights_from_disk", self.update),
                web.post("/update_weight_version", self.label),
                *self._receiver.routes(),
                web.post("/abort_request", self.abort),
                web.post("/weights_checker", self.check),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/health", self.health),
            ]
        )
        return app

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One generation; a client that goes away aborts it."""
        body = await read(request, GenerateBody)
        replies: asyncio.Queue[tuple[dict[str, Any], bool]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(reply: dict[str, Any], last: bool) -> None:
            loop.call_soon_threadsafe(replies.put_nowait, (reply, last))

        live = self._request(body, send)
        self._live[live.rid] = live
        self.scheduler.do(lambda: self.scheduler.add(live))
        try:
            if body.stream:
                return await self._stream(request, replies)
            reply, _ = await replies.get()
            return answer(reply)
        except asyncio.CancelledError:
            self.scheduler.do(lambda: self.scheduler.abort(lambda x: x is live))
            raise
        finally:
            del self._live[live.rid]

    async def _stream(
        self, request: web.Request, replies: asyncio.Queue[tuple[dict[str, Any], bool]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        last = False
        while not last:
            reply, last = await replies.get()
            await response.write(b"data: " + orjson.dumps(reply) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _request(self, body: GenerateBody, send: Callable[[dict[str, Any], bool], None]) -> Live:
        params, n = body.sampling_params, len(body.input_ids)
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        rid = body.rid or secrets.token_hex(8)
        if rid in self._live:
            raise _Refused(f"rid {rid!r} is a live request's: use another")
        low, high = min(body.input_ids), max(body.input_ids)
        if low < 0 or high >= self.shape.vocab:
            raise _Refused(f"token ids {low}..{high} are not all in the vocabulary 0..{self.shape.vocab - 1}")
        if n + params.max_new_tokens > self.shape.context:
            raise _Refused(
                f"{n} prompt tokens and {params.max_new_tokens} new ones exceed the context of {self.shape.context}"
            )
        if stop and not self._can_decode:
            raise _Refused(f"stop strings {stop} need a tokenizer.json in {self.folder}")
        rule = Rule(
            temperature=params.temperature,
            seed=secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed % 2**64,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            top=body.top_logprobs_num,
        )
        return Live(
            rid=rid,
            prompt=np.array(body.input_ids, np.int32),
            budget=params.max_new_tokens,
            rule=rule,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.shape.eos),
            stop=tuple(stop),
            send=send,
            interval=params.stream_interval if body.stream else 0,
        )

    async def abort(self, request: web.Request) -> web.Response:
        """End the requests whose ids begin with the one given (as SGLang does), or all; also while paused."""
        body = await read(request, AbortBody)
        begun = body.rid or "\0"  # no id is none, not all
        await self._between_steps(lambda: self.scheduler.abort(lambda x: body.abort_all or x.rid.startswith(begun)))
        return answer({})

    # -- weights -----------------------------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        """Stop before the next token. Mode "abort" also ends every request with what it has."""
        mode = (await read(request, PauseBody)).mode
        self._in_place = mode == "in_place"

        def pause() -> None:
            self.scheduler.paused = True
            if mode == "abort":
                self.scheduler.abort(lambda _: True)

        await self._between_steps(pause)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Go on."""

        def resume() -> None:
            self.scheduler.paused = False

        await self._between_steps(resume)
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        """Load a folder beside the serving weights, then swap between two steps; a refused one changes nothing."""
        body = await read(request, UpdateBody)
        async with self._loading:
            started = time.monotonic()
            try:
                weights = await asyncio.to_thread(
                    load_weights, Path(body.model_path), self.shape, self._dtype, self._device
                )
            except ConfigError as error:
                return answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
            self._load_ms = 1e3 * (time.monotonic() - started)
            await self._between_steps(lambda: self._swap(weights, body))
        self.folder = body.model_path
        paused = len(self._live) if self.scheduler.paused else 0
        return answer({"success": True, "message": "Succeeded to update.", "num_paused_requests": paused})

    def _swap(self, weights: Weights, body: UpdateBody) -> None:
        if body.abort_all_requests:
            self.scheduler.abort(lambda _: True)
        version = self.scheduler.version if body.weight_version is None else body.weight_version
        self.scheduler.swap(weights, version, keep_kv=self._in_place and not body.flush_cache)

    async def _received(self, weights: Weights, label: str) -> None:
        """All buckets have come."""
        await self._between_steps(lambda: self.scheduler.swap(weights, label, keep_kv=False))

    async def label(self, request: web.Request) -> web.Response:
        """Name the weights it has."""
        body = await read(request, LabelBody)

        def relabel() -> None:
            if body.abort_all_requests:
                self.scheduler.abort(lambda _: True)
            self.scheduler.relabel(body.new_version)

        await self._between_steps(relabel)
        return answer({"success": True, "message": "", "new_version": body.new_version})

    async def check(self, request: web.Request) -> web.Response:
        """A checksum a tensor."""
        await read(request, CheckBody)
        sums = await asyncio.to_thread(checksums, self.scheduler.weights)
        return answer({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})

    # -- information -------------------------------------------------------------------------------------------------

    async def model_info(self, request: web.Request) -> web.Response:
        """The label and folder of the serving weights."""
        return answer({"model_path": self.folder, "weight_version": self.scheduler.version, "is_generation": True})

    async def server_info(self, request: web.Request) -> web.Response:
        """Counters."""
        scheduler = self.scheduler
        return answer(
            {
                "weight_version": scheduler.version,
                "running": scheduler.running,
                "waiting": scheduler.waiting,
                "paused": scheduler.paused,
                "load_ms": self._load_ms,
                "vocab_size": self.shape.vocab,
                "context_length": self.shape.context,
                **dataclasses.asdict(scheduler.counters),
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        """200 while the process lives: a generating thread that fails ends it."""
        return web.Response()

    async def _between_steps(self, action: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def act() -> None:
            action()
            loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(None))

        self.scheduler.do(act)
        await asyncio.wait_for(done, _SECONDS)


class _Refused(Exception):
    """A request that no retry can make right."""


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except (_Refused, ValidationError) as error:
        message = "; ".join(_says(e) for e in error.errors()) if isinstance(error, ValidationError) else str(error)
        return answer({"error": {"message": message, "type": "invalid_request_error", "code": 400}}, 400)
    except GroupRefused as error:
        return answer({"success": False, "message": str(error)}, 400)
    except TimeoutError:
        return answer({"error": {"message": "the generating thread did not come to the next step", "code": 503}}, 503)
    return response


def _says(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"


@contextlib.asynccontextmanager
async def serve(app: App, host: str, port: int) -> AsyncIterator[None]:
    """Serve while the context lasts."""
    # A client that goes away cancels its handler, which aborts the generation.
    runner = web.AppRunner(app.routes(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        # aiohttp's own backlog of 128 stalls hundreds of simultaneous connects.
        await web.TCPSite(runner, host, port, backlog=4096).start()
        yield
    finally:
        await runner.cleanup()
