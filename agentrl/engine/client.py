"""One engine over HTTP: SGLang's protocol, which the embedded engine speaks too.

`generate` hides every interruption: a retract-pause is invisible, an aborted request goes on from its tokens with what
is left of its budget, a lost connection is cleared by an abort before anything is asked again, and a server that
answers 503 is waited for. All of it ends at the request's deadline, with an error that names what was waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp

from agentrl.engine.exchange import RETRIED, Reading, generate_body, not_served, refusal
from agentrl.engine.http import Http
from agentrl.engine.post import Unreachable
from agentrl.engine.reply import Decode, Part, Progress, start
from agentrl.engine.types import Completion, GenerateRequest, OnTokens
from agentrl.engine.weights import Limits, Shapes, check_shapes, model_config, weight_shapes
from agentrl.errors import ConfigError, DeadlineExceeded, EngineError, EngineLost
from agentrl.types import Version

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_STREAM_INTERVAL = 16
"""Tokens a stream event where the stream only guards against the engine's death."""
_NO_SUCH_CALL = frozenset({404, 405})
_ABORT_AGAIN, _ABORT_SECONDS = 1.0, 5.0
_LONG = 600.0  # bounded by the pause's own deadline


class ModelInfo(NamedTuple):
    """What an engine says of itself."""

    version: Version
    path: str


class EngineClient:
    """Speaks to one engine server.

    ```python
    client = EngineClient("http://127.0.0.1:30000", limits=model_limits(folder), model_dir=folder)
    completion = await client.generate(request)
    await client.pause(); await client.update_from_disk(folder, Version(1, 1)); await client.resume()
    await client.close()
    ```

    `limits` and `model_dir` let it refuse what would kill a real server: ids outside the vocabulary, weights of other
    names or shapes. `decode` is needed to see a stop string that straddles an interruption. `chunk_tokens` cuts a
    generation into requests of so many tokens, for servers that cannot retract (`pause_mode="abort"`). `token` goes
    with every request, to a server on another host that asks for it. `hot_swap` is for servers that load new weights
    beside those that serve and change them between two tokens: a publish need not pause them.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: Limits | None = None,
        model_dir: Path | None = None,
        decode: Decode | None = None,
        pause_mode: Literal["retract", "abort"] = "retract",
        chunk_tokens: int | None = None,
        control_timeout: float = 30.0,
        load_timeout: float = 300.0,
        token: str | None = None,
        hot_swap: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self.hot_swap = hot_swap
        self.version: Version | None = None
        self.in_flight = 0
        self._limits = limits
        self._model_dir = model_dir
        self._decode = decode
        self._pause_mode = pause_mode
        self._chunk = chunk_tokens
        self._control_timeout = control_timeout
        self._load_timeout = load_timeout
        self._http = Http(self.url, token)
        self._shapes: Shapes | None = None
        self._paused = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._asking = 0
        self._none_asking = asyncio.Event()
        self._none_asking.set()
        self._aborted_in_pause: list[str] = []
        self._background: set[asyncio.Task[None]] = set()

    # -- generation ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample until a stop or the budget; see `Engine.generate`."""
        return await self.go_on(self.begin(request), on_tokens)

    def begin(self, request: GenerateRequest) -> Progress:
        """Check the request; its progress can be carried from engine to engine with `go_on`."""
        vocab, context = self._limits if self._limits is not None else (None, None)
        return start(request, vocab, context, self._decode)

    async def go_on(
        self,
        progress: Progress,
        on_tokens: OnTokens | None = None,
        *,
        fail_over: bool = False,
        guarded: bool = False,
    ) -> Completion:
        """Generate the rest.

        With `fail_over` a lost engine raises EngineLost, otherwise it is tried again until the deadline. `guarded`
        streams, so that `progress` holds what a lost engine had sent.
        """
        self.in_flight += 1
        try:
            async with asyncio.timeout_at(progress.request.deadline):
                return await self._until_finished(progress, on_tokens, fail_over, guarded)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {progress.request.id}: the deadline passed at {len(progress.tokens)} of {progress.limit} "
                f"tokens while waiting for {progress.waiting_for} from {self.url}"
            ) from error
        finally:
            self.in_flight -= 1

    async def _until_finished(
        self, progress: Progress, on_tokens: OnTokens | None, fail_over: bool, guarded: bool
    ) -> Completion:
        pause = _FIRST_PAUSE
        while (ended := progress.ended()) is None:
            before = len(progress.tokens)
            asked = min(progress.left, self._chunk) if self._chunk and progress.continues else progress.left
            try:
                part = await self._attempt(progress, asked, on_tokens, fail_over, guarded)
            except (EngineLost, DeadlineExceeded) as error:  # the request's own deadline is a TimeoutError here
                progress.losses += 1
                if fail_over:
                    raise EngineLost(str(error)) from error
                part = None
            done = self._finished(progress, part, asked)
            if done is not None:
                return done
            if len(progress.tokens) > before:
                pause = _FIRST_PAUSE
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return ended  # by what a lost reply had brought

    def _finished(self, progress: Progress, part: Part | None, asked: int) -> Completion | None:
        if part is None:
            return None
        if part.finish == "abort":
            if part.status is not None and 400 <= part.status < 500:
                kind = refusal(progress, part.detail)
                raise kind(f"request {progress.request.id}: {self.url} refused it: {part.detail}")
            if part.status is not None and part.status not in RETRIED:
                raise EngineError(f"request {progress.request.id}: {self.url} gave it up: {part.detail}")
            progress.waiting_for = f"the rest after an abort ({part.detail or 'no reason given'})"
            progress.keep(part)
            return progress.ended()
        stop = progress.add(part)
        if stop is not None:
            return progress.completion("stop", stop)
        if part.finish == "length":
            ended = progress.ended()
            if ended is not None or len(part.tokens) == asked:
                return ended  # None at the end of a chunk
        return progress.completion(part.finish, part.matched)

    async def _attempt(
        self, progress: Progress, asked: int, on_tokens: OnTokens | None, fail_over: bool, guarded: bool
    ) -> Part | None:
        """One request to the server; None where it asks to come again."""
        if self._pause_mode == "abort":
            progress.waiting_for = "the end of a pause"
            await self._resumed.wait()
        if self.version is None:
            progress.waiting_for = "its weight version"
            await self.model_info()
        rid, pinned = progress.next_id(), self.version
        stream = on_tokens is not None or guarded
        interval = 1 if on_tokens is not None else _STREAM_INTERVAL
        body = generate_body(progress, rid, asked, interval if stream else None)
        reading = Reading(progress, self.url, self._limits, pinned, lambda: self.version, on_tokens)
        progress.waiting_for = "generated tokens"
        self._asking += 1
        self._none_asking.clear()
        try:
            if not stream:
                answer = await self._http.ask("/generate", body)
                if answer.status == 200:
                    return reading.whole(answer.body)
                not_served(progress, self.url, *answer)
                return None
            async with self._http.post("/generate", body) as response:
                if response.status == 200:
                    return await reading.stream(response)
                not_served(progress, self.url, response.status, await response.read())
                return None
        except (aiohttp.ClientConnectorError, Unreachable) as error:
            progress.waiting_for = "a connection"
            raise EngineLost(f"{self.url} refuses connections: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            # The server may still be generating: nothing is asked again before that request is certainly gone.
            progress.waiting_for = "an abort of the lost request"
            await self._clear(rid, fail_over)
            progress.keep(reading.safe)
            raise EngineLost(f"{self.url} dropped the connection of {rid}: {error!r}") from error
        except BaseException:
            progress.keep(reading.safe)
            self._later(self._abort_quietly(rid))
            raise
        finally:
            self._asking -= 1
            if self._asking == 0:
                self._none_asking.set()

    async def _clear(self, rid: str, fail_over: bool) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self.abort(rid)
                return
            except (EngineLost, DeadlineExceeded):
                if fail_over:
                    return  # the router fences this engine: it is not asked again before it answers
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    # -- control ---------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop between two tokens; running requests wait (or come back aborted and are resumed by `generate`)."""
        self._paused = True
        self._resumed.clear()
        if self._pause_mode == "retract":
            await self._control("/pause_generation", {"mode": "retract"}, "the pause")
            return
        # All replies come in before anything changes: such servers cannot say which weights made a token.
        try:
            async with asyncio.timeout(self._control_timeout):
                await self._abort_all()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.url} sent {self._asking} aborted replies not within {self._control_timeout:g} s of a pause"
            ) from error

    async def _abort_all(self) -> None:
        """Abort until nothing is asked any more: a request may reach the server after the abort that was meant for it.
        One that came after the pause is held back there, where no abort finds it: it is let in and aborted then.
        Servers that cannot pause only abort; new requests wait here in any case."""
        while True:
            status, answer = await self._http.call("/pause_generation", {"mode": "abort"}, _LONG, "the pause")
            if status in _NO_SUCH_CALL:
                await self._control("/abort_request", {"abort_all": True}, "the pause", _LONG)
            elif status != 200:
                raise EngineError(f"{self.url}/pause_generation answered {status}: {answer}")
            try:
                await asyncio.wait_for(self._none_asking.wait(), _ABORT_AGAIN)
                return
            except TimeoutError:
                pass
            if status == 200:
                await self._control("/continue_generation", {}, "the pause", _LONG)

    async def resume(self) -> None:
        """Go on after `pause`."""
        status, answer = await self._http.call("/continue_generation", {}, self._control_timeout, "the continuation")
        if status != 200 and not (self._pause_mode == "abort" and status in _NO_SUCH_CALL):
            raise EngineError(f"{self.url}/continue_generation answered {status}: {answer}")
        self._paused = False
        self._resumed.set()
        # SGLang forgets an abort for a request that arrived during the pause: it is said again.
        again, self._aborted_in_pause = self._aborted_in_pause, []
        for rid in again:
            await self.abort(rid)

    async def update_from_disk(self, path: Path | str, version: Version) -> None:
        """Load the weights in `path` and label them `version`. EngineError where the old ones still serve."""
        self._check_weights(Path(path))
        await self._load(str(path), version)

    async def _load(self, path: str, version: Version) -> None:
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        deadline = asyncio.get_running_loop().time() + self._load_timeout
        pause = _FIRST_PAUSE
        while True:
            status, answer = await self._http.call(
                "/update_weights_from_disk", body, self._load_timeout, f"weights {version}"
            )
            if status == 200 and answer.get("success", True):
                self.version = version
                return
            text = str(answer.get("message") or answer)
            busy = "flush" in text.lower() or "pending" in text.lower()
            if not busy or asyncio.get_running_loop().time() + pause > deadline:
                raise EngineError(f"{self.url} did not take weights {version} from {path} ({status}): {text}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def set_version(self, version: Version) -> None:
        """Label the weights it has, without touching a request."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body, "the label")
        self.version = version

    async def model_info(self) -> ModelInfo:
        """The label and folder of the weights it serves; answers while paused."""
        answer = await self._read("/model_info", "its model info")
        try:
            info = ModelInfo(Version.parse(str(answer["weight_version"])), str(answer.get("model_path", "")))
        except (KeyError, ValueError) as error:
            raise EngineError(
                f"{self.url}/model_info has no version of ours: {error}; start it by start_engine"
            ) from error
        self.version = info.version
        return info

    async def names_versions(self, timeout: float) -> bool:
        """Whether its replies say which weights made each token. SGLang does since 0.5.19, and can then retract; older
        servers need `pause_mode="abort"`. Found by one token of a request, which may take `timeout` seconds.
        EngineLost where it is not ready yet."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "rid": "abilities"}
        status, answer = await self._http.call("/generate", body, timeout, "a first token")
        if status != 200:
            kind = EngineLost if status in RETRIED else EngineError
            raise kind(f"{self.url}/generate answered {status} to a first request: {answer}")
        return bool((answer.get("meta_info") or {}).get("weight_versions"))

    async def counters(self) -> dict[str, Any]:
        """The server's own counters (`/server_info`)."""
        return await self._read("/server_info", "its counters")

    async def checksums(self) -> dict[str, str]:
        """A checksum a tensor, as the engine names them; equal weights in equal engines have equal ones."""
        answer = await self._control("/weights_checker", {"action": "checksum"}, "checksums", self._load_timeout)
        ranks = answer.get("ranks")
        if not ranks:
            raise EngineError(f"{self.url}/weights_checker sent no checksums: {answer}")
        return {f"{rank}/{name}": str(sum_) for rank, r in enumerate(ranks) for name, sum_ in r["checksums"].items()}

    async def abort(self, rid: str) -> None:
        """End the requests whose ids begin so; unknown ids are no error. Remembered while paused."""
        if self._paused:
            self._aborted_in_pause.append(rid)
        await self._control("/abort_request", {"rid": rid}, f"the abort of {rid}", _ABORT_SECONDS)

    async def close(self) -> None:
        """Wait for aborts that are under way and close the connections."""
        await asyncio.gather(*self._background)
        await self._http.close()

    # -- plumbing --------------------------------------------------------------------------------------------------

    def _check_weights(self, folder: Path) -> None:
        if self._model_dir is None:
            return
        if self._shapes is None:
            self._shapes = weight_shapes(self._model_dir)
        tied = bool(model_config(self._model_dir).get("tie_word_embeddings"))
        try:
            check_shapes(weight_shapes(folder), self._shapes, tied=tied)
        except ConfigError as error:
            raise EngineError(f"weights in {folder} were not offered to {self.url}: {error}") from error

    async def _control(
        self, path: str, body: Mapping[str, Any], what: str, timeout: float | None = None
    ) -> dict[str, Any]:
        status, answer = await self._http.call(path, body, timeout or self._control_timeout, what)
        if status != 200:
            raise EngineError(f"{self.url}{path} answered {status}: {answer}")
        return answer

    async def _read(self, path: str, what: str) -> dict[str, Any]:
        status, answer = await self._http.call(path, None, self._control_timeout, what)
        if status != 200:
            raise EngineError(f"{self.url}{path} answered {status}: {answer}")
        return answer

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self.abort(rid)
        except (EngineError, DeadlineExceeded):
            pass  # a server that cannot be told is gone, or drops the request when it sees the closed connection
