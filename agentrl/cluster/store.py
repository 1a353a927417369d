"""What a worker keeps: folders that it fetched, each once, and serves to others."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import aiohttp
from aiohttp import web

from agentrl.cluster.files import Shelf, TransferFailed, answer, fetch, read_body
from agentrl.cluster.protocol import Drop, Fetch, Source


class Store:
    """Folders by name below `scratch`."""

    def __init__(self, http: aiohttp.ClientSession, shelf: Shelf, scratch: Path) -> None:
        self._http, self._shelf, self._scratch = http, shelf, scratch
        self._fetching: dict[str, asyncio.Task[Path]] = {}

    async def have(self, source: Source) -> Path:
        """The folder, fetched if it is not here; TransferFailed where nobody has it."""
        if (folder := self._shelf.folder(source.name)) is not None:
            return folder
        if (task := self._fetching.get(source.name)) is None:
            task = self._fetching[source.name] = asyncio.ensure_future(self._fetch(source))
            task.add_done_callback(lambda _: self._fetching.pop(source.name, None))
        return await asyncio.shield(task)

    def held(self, name: str) -> Path | None:
        """The folder, None where it is not here."""
        return self._shelf.folder(name)

    async def _fetch(self, source: Source) -> Path:
        target = self._scratch / "folders" / source.name
        listing = await fetch(self._http, source.urls, source.name, target)
        self._shelf.put(source.name, target, listing)
        return target

    async def on_fetch(self, request: web.Request) -> web.StreamResponse:
        """`POST /fetch`: answered when the folder is here."""
        wanted = await read_body(Fetch, request)
        try:
            await self.have(wanted.source)
        except TransferFailed as error:
            return answer(502, {"error": str(error)})
        return answer(200, {})

    async def on_drop(self, request: web.Request) -> web.StreamResponse:
        """`POST /drop`: these folders are not needed any more."""
        for name in (await read_body(Drop, request)).names:
            folder = self._shelf.drop(name)
            if folder is not None and folder.is_relative_to(self._scratch):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return answer(200, {})
