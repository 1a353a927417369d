"""The endpoint: sessions over an engine, and the HTTP app that serves them to any OpenAI client.

POST /v1/chat/completions          Authorization: Bearer <session key>
POST /s/<session key>/v1/chat/completions
GET  /v1/models                    the same two ways
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web
from openai import AsyncOpenAI

from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.parse import Format, detect_format
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.replay import Replays
from agentrl.endpoint.reply import to_json
from agentrl.endpoint.request import ChatRequest, Refused, read_request
from agentrl.endpoint.session import Session, Terms
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

_BACKLOG = 8192
_MAX_BODY = 256 << 20


class Endpoint:
    """Gives sessions to agents; each records what it samples.

    ```python
    endpoint = Endpoint(engine, ChatTemplate.load(model_dir))
    session = endpoint.open("4.0-3", seed=7)             # direct: needs no server
    await endpoint.start()                               # session.base_url and session.openai() work from here on
    await endpoint.stop()
    ```
    ConfigError where the chat template cannot be continued exactly.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, options: EndpointOptions | None = None) -> None:
        self.engine = engine
        self.options = options or EndpointOptions()
        self.renderer = Renderer(template)
        if self.options.unproven_template == "refuse":
            self.renderer.require_proof()
        self.stop_set = self.renderer.end_ids
        self.stop_ids = tuple(sorted(self.stop_set))
        self.vocab_size = template.vocab_size
        self.context_length = self.options.context_length or template.context_length
        auto = self.options.tool_format == "auto"
        self.tool_format = detect_format(template.source) if auto else Format(self.options.tool_format)
        self._sessions: dict[str, tuple[Session, Replays]] = {}
        self._calls = 0
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
            self._client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=self.options.call_timeout)
        return self._client.with_options(base_url=base_url, api_key=api_key)

    async def start(self) -> str:
        """Serve over HTTP; returns `http://host:port`."""
        app = web.Application(client_max_size=_MAX_BODY)
        for prefix in ("", "/s/{key}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/v1/models", self._models)
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
        if self._session_of(request) is None:
            return _no_session()
        model = {"id": self.options.model_name, "object": "model", "created": 0, "owned_by": "agentrl"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        known = self._session_of(request)
        if known is None:
            return _no_session()
        if self._calls >= self.options.max_calls:
            return _error(429, f"{self._calls} calls are running, the limit", "rate_limit_error", retry_after=1)
        session, replays = known
        self._calls += 1
        try:
            raw = await request.read()
            asked = read_request(_body(raw))
            return await self._answer(request, session, replays, asked, raw)
        except AgentRLError as error:
            return error_response(error)
        finally:
            self._calls -= 1

    async def _answer(
        self, request: web.Request, session: Session, replays: Replays, asked: ChatRequest, raw: bytes
    ) -> web.StreamResponse:
        if asked.stream:
            raise Refused("streaming is not served yet: leave out stream", "stream")
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        key = request.headers.get("Idempotency-Key")
        reply = await replays.run(
            raw if key is None else key.encode(), again or key is not None, lambda: session.complete(asked)
        )
        return _json(to_json(reply))


def _body(raw: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"the body is a JSON {type(body).__name__}; expected an object")
    return body


def error_response(error: AgentRLError) -> web.Response:
    """An error in OpenAI's form. Only faults of the engine are 5xx, and the client is told not to repeat what cannot
    succeed."""
    if isinstance(error, LimitReached):
        return _error(400, str(error), "invalid_request_error", code="context_length_exceeded", param="messages")
    if isinstance(error, (ContractError, RequestRefused)):
        param = error.param if isinstance(error, Refused) else None
        return _error(400, str(error), "invalid_request_error", param=param)
    if isinstance(error, DeadlineExceeded):
        return _error(504, str(error), "timeout_error", code="deadline_exceeded")
    return _error(503, str(error), "server_error", code="engine_error")


def _no_session() -> web.Response:
    return _error(
        401,
        "no open session has this key; keys are valid until their episode ends",
        "authentication_error",
        code="invalid_api_key",
    )


def _error(
    status: int,
    message: str,
    kind: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after: int | None = None,
) -> web.Response:
    headers = {"x-should-retry": "false"} if retry_after is None else {"Retry-After": str(retry_after)}
    response = _json({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)
    response.headers.update(headers)
    return response


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
