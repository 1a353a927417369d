"""JSON over HTTP to one engine: connections, deadlines and what a failure is called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson
from yarl import URL

from agentrl.engine.post import Answer, Poster
from agentrl.errors import DeadlineExceeded, EngineLost

_JSON = {"Content-Type": "application/json"}


class Http:
    """Connections to one base URL, opened when first used."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url, self._token = url, token
        self._urls: dict[str, URL] = {}  # parsing one costs as much as writing a small body
        parsed = URL(url)
        # TLS, and whatever else is unusual, is aiohttp's.
        plain = parsed.scheme == "http" and parsed.host is not None and parsed.path == "/" and token is None
        self._poster = Poster(str(parsed.host), parsed.port or 80) if plain else None
        self._session: aiohttp.ClientSession | None = None

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """aiohttp's request context; its errors pass unchanged."""
        return self._open().post(self._url(path), data=_json(body), headers=_JSON)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST and wait for the whole answer, however long it takes. aiohttp's errors, or the same as `Poster`'s."""
        if self._poster is not None:
            return await self._poster.post(path, _json(body))
        async with self.post(path, body) as response:
            return Answer(response.status, await response.read())

    async def call(
        self, path: str, body: Mapping[str, Any] | None, timeout: float, what: str
    ) -> tuple[int, dict[str, Any]]:
        """POST `body`, or GET where it is None: status and answer. EngineLost, or DeadlineExceeded naming `what`."""
        try:
            async with asyncio.timeout(timeout):
                context = self._open().get(self._url(path)) if body is None else self.post(path, body)
                async with context as response:
                    return response.status, json_object(await response.read())
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.url} did not answer {path} within {timeout:g} s (waited for {what})"
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineLost(f"{self.url}{path} cannot be reached: {error!r}") from error

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        if self._poster is not None:
            self._poster.close()
            await asyncio.sleep(0)  # the event loop closes their sockets in its next round
        if self._session is not None:
            session, self._session = self._session, None  # a call meanwhile opens a new one, not this
            await session.close()

    def _url(self, path: str) -> URL:
        known = self._urls.get(path)
        if known is None:
            known = self._urls[path] = URL(self.url + path)
        return known

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Servers close idle connections after 5 s; ours goes first, so that a request never meets a closed one.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
            )
        return self._session


def _json(body: Mapping[str, Any]) -> bytes:
    # Arrays as they are: a prompt of 32,000 tokens costs a fifth of what its list would.
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


async def sse_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, without the closing [DONE]."""
    buffer = b""
    async for chunk in response.content.iter_any():
        buffer += chunk
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield data


def json_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object; anything else under the key `message`."""
    if not body.strip():
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {"message": body[:500].decode(errors="replace")}
    return value if isinstance(value, dict) else {"message": value}


def error_text(body: bytes) -> str:
    """What an error answer says, in SGLang's two forms."""
    answer = json_object(body)
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)
