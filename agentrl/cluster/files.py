"""Folders by name over HTTP, each file with its size and checksum: models, weights and checkpoints between hosts."""

from __future__ import annotations

import asyncio
import hmac
import os
import shutil
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import aiohttp
import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from agentrl.errors import ConfigError, InfrastructureError

BLOCK = 1 << 20
QUIET_SECONDS = 10.0
"""A server that sends nothing for so long is given up, and the next one asked."""
SIGN_SECONDS = 2.0
"""A server that still reads a folder to list it says so, with a blank, as often as this."""
Listing = Mapping[str, tuple[int, int]]
"""Relative path → (bytes, CRC-32)."""
Wire = TypeVar("Wire", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TransferFailed(InfrastructureError):
    """A folder could not be had from any of its servers."""


class _Held(NamedTuple):
    folder: Path
    listing: asyncio.Future[Listing]


class Shelf:
    """The folders that this process serves."""

    def __init__(self, find: Callable[[str], Path | None] = lambda name: None) -> None:
        """`find` tells where a folder is that was not put here but made by another process."""
        self.bytes_per_second: float | None = None
        """What all downloads from here may take of the link together; None for all that it gives."""
        self._held: dict[str, _Held] = {}
        self._find = find
        self._free_at = 0.0

    def put(self, name: str, folder: Path, listing: Listing | None = None) -> None:
        """Serve `folder` as `name`; it is read once for the checksums where they are not given."""
        if (held := self._held.get(name)) is not None and held.folder == folder:
            return
        future: asyncio.Future[Listing]
        if listing is None:
            future = asyncio.ensure_future(asyncio.to_thread(list_folder, folder))
            future.add_done_callback(lambda f: f.cancelled() or f.exception())  # told to those who ask for it
        else:
            future = asyncio.get_running_loop().create_future()
            future.set_result(listing)
        self._held[name] = _Held(folder, future)

    def drop(self, name: str) -> Path | None:
        """Serve it no longer; its folder, which stays."""
        held = self._held.pop(name, None)
        return held.folder if held else None

    def folder(self, name: str) -> Path | None:
        """Where it is, None where it is not held."""
        held = self._held.get(name)
        return held.folder if held else None

    def names(self) -> list[str]:
        """What is held."""
        return list(self._held)

    def routes(self) -> list[web.RouteDef]:
        """For an application below /files, behind `guard`."""
        return [
            web.get("/{name}", self._list),
            web.get("/{name}/{path:.+}", self._file),
        ]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        # Also where it is held: a group that was started again makes the same checkpoint anew, in another folder.
        if (found := self._find(name)) is not None:
            self.put(name, found)
        held = self._held.get(name)
        if held is None:
            return answer(404, {"error": f"there is no folder {name!r} here"})
        if (await asyncio.wait((held.listing,), timeout=SIGN_SECONDS))[0]:
            told = self._listed(name, held)
            return answer(200 if "files" in told else 404, told)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while not (await asyncio.wait((held.listing,), timeout=SIGN_SECONDS))[0]:
            await response.write(b" ")
        await response.write(orjson.dumps(self._listed(name, held)))
        await response.write_eof()
        return response

    def _listed(self, name: str, held: _Held) -> dict[str, object]:
        try:
            return {"files": held.listing.result()}
        except OSError as error:
            self.drop(name)
            return {"error": f"folder {name!r} cannot be read: {error}"}

    async def _file(self, request: web.Request) -> web.StreamResponse:
        held, path = self._held.get(request.match_info["name"]), request.match_info["path"]
        if held is None:
            return answer(404, {"error": f"there is no folder {request.match_info['name']!r} here"})
        # Only what is listed: no path of the request ever reaches the file system by itself.
        if path not in await asyncio.shield(held.listing):
            return answer(404, {"error": f"folder {request.match_info['name']!r} has no file {path!r}"})
        if self.bytes_per_second is None:
            return web.FileResponse(held.folder / path, chunk_size=BLOCK)
        return await self._slowly(request, held.folder / path, self.bytes_per_second)

    async def _slowly(self, request: web.Request, path: Path, rate: float) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with path.open("rb") as file:
            while block := file.read(1 << 14):
                now = asyncio.get_running_loop().time()
                self._free_at = max(now, self._free_at) + len(block) / rate
                await asyncio.sleep(self._free_at - now)
                await response.write(block)
        await response.write_eof()
        return response


def list_folder(folder: Path) -> Listing:
    """Every file below `folder`; reads them all."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, _crc(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


async def fetch(
    http: aiohttp.ClientSession, urls: Sequence[str], name: str, target: Path, *, merge: bool = False
) -> Listing:
    """Get folder `name` from the first of `urls` that has it whole; it is at `target` whole or not at all.

    With `merge`, `target` is there already and the files are added to it. TransferFailed with every server's reason.
    """
    reasons = []
    for url in urls:
        aside = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
        try:
            listing = await _listing(http, url, name)
            for path, (size, crc) in listing.items():
                await _file(http, f"{url}/files/{name}/{path}", aside / path, size, crc)
            await asyncio.to_thread(_settle, aside, target, list(listing), merge)
            return listing
        except (aiohttp.ClientError, TimeoutError, OSError, TransferFailed) as error:
            reasons.append(f"{url}: {type(error).__name__}: {error}")
        finally:
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
    raise TransferFailed(f"folder {name!r} could not be had: {'; '.join(reasons) or 'nobody has it'}")


def _settle(aside: Path, target: Path, paths: Sequence[str], merge: bool) -> None:
    if not merge:
        shutil.rmtree(target, ignore_errors=True)
        aside.mkdir(parents=True, exist_ok=True)  # an empty folder is one too
        aside.rename(target)
        return
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (aside / path).replace(target / path)


async def _listing(http: aiohttp.ClientSession, url: str, name: str) -> Listing:
    # The first to ask waits until the server has read it all, and hears a blank from time to time.
    async with http.get(f"{url}/files/{name}") as response:
        body = orjson.loads(await response.read())
        if response.status != 200 or "files" not in body:
            raise TransferFailed(f"it answered {response.status}: {body.get('error')}")
    found = {str(path): (int(size), int(crc)) for path, (size, crc) in body["files"].items()}
    for path in found:
        if (parts := PurePosixPath(path)).is_absolute() or ".." in parts.parts:
            raise TransferFailed(f"it names a file outside the folder: {path!r}")
    return found


async def _file(http: aiohttp.ClientSession, url: str, target: Path, size: int, crc: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    found, length = 0, 0
    async with http.get(url) as response:
        if response.status != 200:
            raise TransferFailed(f"{url} answered {response.status}")
        with target.open("wb") as out:
            async for block in response.content.iter_chunked(BLOCK):
                found, length = zlib.crc32(block, found), length + len(block)
                out.write(block)
    if (length, found) != (size, crc):
        raise TransferFailed(f"{url} has {length} bytes with CRC {found:08x}, expected {size} with {crc:08x}")


def open_http(token: str) -> aiohttp.ClientSession:
    """Connections to workers and conductor, with the token on every request."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=QUIET_SECONDS),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
    )


def guard(token: str) -> Middleware:
    """Middleware: nobody without the cluster's token."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
            return answer(
                401, {"error": "wrong or missing token: all of a cluster have the same $AGENTRL_CLUSTER_TOKEN"}
            )
        return await handler(request)

    return check


async def read_body(model: type[Wire], request: web.Request) -> Wire:
    """The request's body; 400 where it is not what it should be."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        said = orjson.dumps({"error": str(error)}).decode()
        raise web.HTTPBadRequest(text=said, content_type="application/json") from error


def answer(status: int, body: object) -> web.Response:
    """A JSON answer."""
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def read_token(file: Path | None) -> str:
    """The cluster's secret; ConfigError says how to make one."""
    how = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))', and give it to every worker"
    if file is None:
        token, where = os.environ.get("AGENTRL_CLUSTER_TOKEN", ""), "$AGENTRL_CLUSTER_TOKEN"
    else:
        where = str(file)
        try:
            token = file.read_text()
        except OSError as error:
            raise ConfigError(f"the cluster's token cannot be read from {file}: {error.strerror}; {how}") from error
    if len(token := token.strip()) < 16:
        raise ConfigError(f"{where} holds no token of at least 16 characters (it has {len(token)}); {how}")
    return token
