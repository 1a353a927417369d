"""The endpoint: sessions over an engine, and the HTTP app that serves them to any OpenAI client.

```
POST /v1/chat/completions                   Authorization: Bearer <session key>
POST /s/<session key>/v1/chat/completions   for clients that send a key of their own
POST /v1/completions                        one raw prompt, text or token ids; the same two ways
GET  /v1/models, /v1/models/<name>          the same two ways
```
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from openai import DEFAULT_CONNECTION_LIMITS, AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.parse import Format, detect_format
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.replay import Replays, Running
from agentrl.endpoint.reply import Reply, to_json, to_text_json
from agentrl.endpoint.request import ChatRequest, Refused, read_request, read_text_request
from agentrl.endpoint.session import Session, Terms
from agentrl.endpoint.stream import Streaming
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.types import Engine
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    ContractError,
    DeadlineExceeded,
    LimitReached,
    RequestRefused,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[[Mapping[str, Any]], ChatRequest]
Write = Callable[[Reply], dict[str, Any]]
_BACKLOG = 8192
_MAX_BODY = 256 << 20
_CLIENT_KEEPS = 60.0
"""Seconds without a call after which our client closes a connection; aiohttp's server keeps it longer, so that no
request meets a closed one."""


class Endpoint:
    """Gives sessions to agents; each records what it samples.

    ```python
    endpoint = Endpoint(engine, ChatTemplate.load(model_dir))
    session = endpoint.open("4.0-3", seed=7)             # direct: needs no server
    await endpoint.start()                               # session.base_url and session.openai() work from here on
    await endpoint.stop()
    ```
    `calls` are being answered over HTTP. ConfigError where the chat template cannot be continued exactly. `public`
    answers calls without a session's key too, each by itself, as any server does.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, options: EndpointOptions | None = None, *, public: bool = False
    ) -> None:
        self.engine = engine
        self.public = public
        self.options = options or EndpointOptions()
        self.renderer = Renderer(template)
        if self.options.unproven_template == "refuse":
            self.renderer.require_proof()
        self.stop_set = self.renderer.end_ids
        self.stop_ids = tuple(sorted(self.stop_set))
        self.stop_texts = {token: template.decode([token]) for token in self.stop_ids}
        self.vocab_size = template.vocab_size
        self.context_length = self.options.context_length or template.context_length
        auto = self.options.tool_format == "auto"
        self.tool_format = detect_format(template.source) if auto else Format(self.options.tool_format)
        self._sessions: dict[str, tuple[Session, Replays]] = {}
        self.calls = 0
        self._runner: web.AppRunner | None = None
        self._client: AsyncOpenAI | None = None
        self._url = ""

    def open(
        self,
        session_id: str,
        *,
        seed: int | None = None,
        training: bool = True,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        deadline: float | None = None,
    ) -> Session:
        """A session for one episode.

        `max_tokens` is what the whole episode may sample, `deadline` its end in `loop.time()` seconds; beyond either,
        calls raise LimitReached. Concurrent calls may each use what was left when they started. `seed` makes the
        calls' seeds.
        """
        terms = Terms(session_id, seed, training, temperature, max_tokens, deadline)
        session = Session(self, terms, f"sk-{secrets.token_urlsafe(24)}")
        self._sessions[session.api_key] = (session, Replays(self.options.retry_grace))
        return session

    async def forget(self, session: Session) -> None:
        """Stop serving a session and end its calls; `Session.close` does this."""
        known = self._sessions.pop(session.api_key, None)
        if known is not None:
            await known[1].close()

    @property
    def open_sessions(self) -> int:
        """Sessions that are not closed."""
        return len(self._sessions)

    @property
    def url(self) -> str:
        """`http://host:port`; ContractError before `start`."""
        if not self._url:
            raise ContractError(
                "the endpoint is not serving yet: await endpoint.start() first, or use the direct session"
            )
        return self._url

    def client(self, base_url: str, api_key: str) -> AsyncOpenAI:
        """An OpenAI client; all share one pool of connections, since building that costs tens of milliseconds."""
        if self._client is None:
            self._client = AsyncOpenAI(
                base_url=base_url,
                api_key=api_key,
                timeout=self.options.call_timeout,
                http_client=_http_client(self.options.max_calls),
            )
        return self._client.with_options(base_url=base_url, api_key=api_key)

    async def start(self) -> str:
        """Serve over HTTP; returns `http://host:port`."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_in_form])
        for prefix in ("", "/s/{key}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._text)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model}}", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.options.host, self.options.port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self.options.host}:{self.options.port}"
            raise ConfigError(f"the endpoint cannot listen on {where}: {error}; set endpoint.port = 0") from error
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"
        return self._url

    async def stop(self) -> None:
        """Stop serving; open sessions are closed."""
        for session, _ in list(self._sessions.values()):
            await session.close()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner, self._url = None, ""

    def _session_of(self, request: web.Request) -> tuple[Session, Replays] | None:
        key = request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return self._sessions.get(key)

    async def _models(self, request: web.Request) -> web.Response:
        if not self.public and self._session_of(request) is None:
            return _no_session()
        model = {"id": self.options.model_name, "object": "model", "created": 0, "owned_by": "agentrl"}
        if "model" in request.match_info:
            # Requests may name any model, so every name is one.
            return _json({**model, "id": request.match_info["model"]})
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, read_request, to_json)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, read_text_request, to_text_json)

    async def _serve(self, request: web.Request, read: Read, write: Write) -> web.StreamResponse:
        known = self._session_of(request)
        if known is None and not self.public:
            return _no_session()
        if self.calls >= self.options.max_calls:
            return _busy(self.calls)
        passing = None
        if known is None:
            passing = self.open(f"public-{secrets.token_hex(8)}", training=False)
            known = self._sessions[passing.api_key]
        session, replays = known
        self.calls += 1
        try:
            raw = await request.read()
            asked = read(_body(raw))
            again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            key = request.headers.get("Idempotency-Key")
            # An answer in one piece and a stream of it are different calls, whatever the client's key says.
            kind = f"{request.path} {asked.stream} {key is None} ".encode()
            name = kind + (raw if key is None else key.encode("utf-8", "surrogateescape"))

            def start() -> Running:
                return Streaming(session, asked) if asked.stream else Running(session.complete(asked))

            with replays.hold(name, again or key is not None, start) as running:
                if isinstance(running, Streaming):
                    return await _stream(request, running)
                return _json(write(await running.result()))
        except AgentRLError as error:
            return failure(error).response()
        except RecursionError:
            return failure(Refused("the body is nested too deeply")).response()
        finally:
            self.calls -= 1
            if passing is not None:
                await self.forget(passing)


async def _stream(request: web.Request, running: Streaming) -> web.StreamResponse:
    """Server-sent events. Errors before the first chunk are ordinary answers; a later one is the last event."""
    async with aclosing(running.chunks()) as parts:
        first = await anext(parts)
        running.answering = True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(_event(first))
        try:
            async for part in parts:
                await response.write(_event(part))
        except AgentRLError as error:
            await response.write(_event(failure(error).body))
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@web.middleware
async def _in_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPClientError as error:  # no such path or method, a body that is too large
        text = f"{request.method} {request.path}: {error.reason}"
        return _failure(error.status, text, "invalid_request_error").response()


def _event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _body(raw: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"the body is a JSON {type(body).__name__}; expected an object")
    return body


def _http_client(connections: int) -> Any:
    # The client's own limits are 1,000 calls at once and 5 s without a call, less than an engine or a tool may take.
    limits = type(DEFAULT_CONNECTION_LIMITS)(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_CLIENT_KEEPS
    )
    # aiohttp takes half the time of the client's default; openai 2.x has it only with its extra `aiohttp`.
    try:
        return DefaultAioHttpClient(limits=limits)
    except RuntimeError:
        return DefaultAsyncHttpxClient(limits=limits)


class Failure(NamedTuple):
    """An error in OpenAI's form."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    def response(self) -> web.Response:
        """As an HTTP answer."""
        answer = _json(self.body, self.status)
        answer.headers.update(self.headers)
        return answer


def failure(error: AgentRLError) -> Failure:
    """Only faults of the engine are 5xx. The client is told not to repeat a call: what can be retried was retried
    below."""
    if isinstance(error, LimitReached):
        return _failure(400, str(error), "invalid_request_error", code="context_length_exceeded", param="messages")
    if isinstance(error, (ContractError, RequestRefused)):
        param = error.param if isinstance(error, Refused) else None
        return _failure(400, str(error), "invalid_request_error", param=param)
    if isinstance(error, DeadlineExceeded):
        return _failure(504, str(error), "timeout_error", code="deadline_exceeded")
    return _failure(503, str(error), "server_error", code="engine_error")


def _no_session() -> web.Response:
    message = "no open session has this key; keys are valid until their episode ends"
    return _failure(401, message, "authentication_error", code="invalid_api_key").response()


def _busy(running: int) -> web.Response:
    made = _failure(429, f"{running} calls are running, which is endpoint.max_calls: ask again", "rate_limit_error")
    return made._replace(headers={"Retry-After": "1"}).response()


def _failure(status: int, message: str, kind: str, *, code: str | None = None, param: str | None = None) -> Failure:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Failure(status, body, {"x-should-retry": "false"})


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
