"""The page's web application: static files, and a JSON API that only reads.

Everything that a model, a tool or a row wrote goes out as JSON strings and is put on the page as text, never as markup;
the policy below forbids the browser to run or load anything that does not come from here.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web

from agentrl.errors import AgentRLError
from agentrl.monitor.episodes import BadQuery, NotKept, Tokens
from agentrl.monitor.openmetrics import CONTENT_TYPE, exposition
from agentrl.monitor.runs import Run
from agentrl.monitor.series import Cursor

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_TOKENS = 20_000

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(runs: Sequence[Run], token: str | None = None) -> web.Application:
    """The application over `runs`. With `token` None it must listen on a loopback address, and answers only requests
    that name one: a page from elsewhere whose name was made to point here is refused."""
    page = _Page(runs, token)
    app = web.Application(middlewares=[page.guard])
    app.router.add_get("/", page.index)
    app.router.add_get(r"/static/{name:[\w./-]+}", page.static)
    app.router.add_get("/metrics", page.metrics)
    app.router.add_get("/api/runs", page.runs)
    for path, handler in {
        "series": page.series,
        "config": page.config,
        "episodes": page.episodes,
        "facets": page.facets,
        "failures": page.failures,
        "versions": page.versions,
        r"groups/{group:\d{1,15}}": page.group,
        r"episodes/{episode:\d{1,15}}": page.episode,
        r"episodes/{episode:\d{1,15}}/tokens": page.tokens,
    }.items():
        app.router.add_get(r"/api/runs/{run:\d{1,6}}/" + path, handler)
    return app


class _Page:
    def __init__(self, runs: Sequence[Run], token: str | None) -> None:
        self._runs = list(runs)
        self._token = token
        self._files = {
            str(path.relative_to(STATIC)): path for path in STATIC.rglob("*") if path.is_file() and path.suffix in TYPES
        }

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who may ask, and what an error looks like."""
        try:
            refused = self._refused(request)
            response = refused or await handler(request)
        except BadQuery as error:
            response = _json({"error": str(error)}, 400)
        except NotKept as error:
            response = _json({"error": str(error)}, 404)
        except AgentRLError as error:
            response = _json({"error": str(error)}, 500)
        except web.HTTPException as error:
            response = _json({"error": error.reason}, error.status)
        response.headers.update(HEADERS)
        return response

    def _refused(self, request: web.Request) -> web.Response | None:
        if self._token is None:
            name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
            if name not in LOOPBACK_NAMES:
                return _json({"error": f"this page answers to localhost only, not to {request.host!r}"}, 403)
            return None
        cookie = f"agentrl-{request.url.port}"
        given = request.query.get("token", "") if request.path == "/" else ""
        if self._same(given):
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(cookie, given, httponly=True, samesite="Strict", path="/")
            return response
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._same(request.cookies.get(cookie, "")) or self._same(bearer):
            return None
        return _json({"error": "open the address with ?token=… that was printed when this page was started"}, 401)

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())

    # --- files

    async def index(self, request: web.Request) -> web.StreamResponse:
        """The page."""
        return self._file("index.html")

    async def static(self, request: web.Request) -> web.StreamResponse:
        """Its parts."""
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.StreamResponse:
        path = self._files.get(name)
        if path is None:
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")

    # --- data

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """OpenMetrics, of the first run."""
        run = self._runs[0]
        text = await asyncio.to_thread(lambda: exposition(run.state(), run.last(), run.folder.locked))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def runs(self, request: web.Request) -> web.StreamResponse:
        """All runs, in the order in which they were given."""
        found = await asyncio.to_thread(lambda: [{"id": i} | run.overview() for i, run in enumerate(self._runs)])
        return _json(found)

    async def series(self, request: web.Request) -> web.StreamResponse:
        """Rows and events after a cursor: `?keys=a,b&cursor=generation,stride,rows,events`."""
        text = request.query.get("cursor", "0,1,0,0")
        parts = text.split(",")
        if len(parts) != 4 or not all(part.isdecimal() and len(part) < 12 for part in parts):
            raise BadQuery(f"cursor = {text!r}: expected four whole numbers, as the last answer gave them")
        keys = [key for key in request.query.get("keys", "").split(",") if key]
        run = self._run(request)
        return await _answer(lambda: run.series(Cursor(*(int(part) for part in parts)), keys))

    async def config(self, request: web.Request) -> web.StreamResponse:
        """config.toml."""
        run = self._run(request)
        return await _answer(lambda: {"text": run.config_text()})

    async def episodes(self, request: web.Request) -> web.StreamResponse:
        """A page of the list."""
        run, query = self._run(request), _query(request)
        return await _answer(lambda: run.episodes.page(query))

    async def facets(self, request: web.Request) -> web.StreamResponse:
        """What can be filtered by."""
        return await _answer(self._run(request).episodes.facets)

    async def failures(self, request: web.Request) -> web.StreamResponse:
        """What went wrong, and how often."""
        return await _answer(self._run(request).episodes.failures)

    async def versions(self, request: web.Request) -> web.StreamResponse:
        """Sampled tokens by version, of the episodes that fit."""
        run, query = self._run(request), _query(request)
        return await _answer(lambda: run.episodes.versions(query))

    async def group(self, request: web.Request) -> web.StreamResponse:
        """A group's episodes."""
        run, group = self._run(request), int(request.match_info["group"])
        return await _answer(lambda: run.episodes.group(group))

    async def episode(self, request: web.Request) -> web.StreamResponse:
        """An episode by turn."""
        run, episode = self._run(request), int(request.match_info["episode"])
        return await _answer(lambda: run.episodes.episode(episode))

    async def tokens(self, request: web.Request) -> web.StreamResponse:
        """An episode by token: `?trajectory=0&start=0&count=2000`."""
        run, episode, query = self._run(request), int(request.match_info["episode"]), _query(request)
        trajectory, start, count = (
            _place(query, name, default) for name, default in (("trajectory", 0), ("start", 0), ("count", 2000))
        )

        def read() -> dict[str, Any]:
            found: Tokens = run.episodes.tokens(episode, trajectory, start, min(count, MAX_TOKENS))
            return found._asdict() | {"pieces": run.pieces(found.ids)}

        return await _answer(read)

    def _run(self, request: web.Request) -> Run:
        index = int(request.match_info["run"])
        if index >= len(self._runs):
            raise web.HTTPNotFound
        return self._runs[index]


def _query(request: web.Request) -> Mapping[str, str]:
    return dict(request.query)


def _place(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isdecimal() and len(text) < 12):
        raise BadQuery(f"{name} = {text!r}: expected a whole number >= 0")
    return int(text)


async def _answer(read: Callable[[], T]) -> web.Response:
    return await asyncio.to_thread(lambda: _json(read()))


def _json(value: object, status: int = 200) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body, status=status, content_type="application/json")
