"""Folders between processes: whole or not at all, with the token, and nothing outside them."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from agentrl.cluster import files
from agentrl.cluster.files import Listing, Shelf, TransferFailed, fetch, guard, list_folder, open_http, read_token
from agentrl.errors import ConfigError

TOKEN = "a-token-for-the-tests-only"


class Server:
    """A shelf on loopback."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        files = web.Application(middlewares=[guard(TOKEN)])
        files.add_routes(self.shelf.routes())
        app = web.Application()
        app.add_subapp("/files", files)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server(Shelf())
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_http(TOKEN) as session:
        yield session


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def a_folder(place: Path) -> Path:
    (place / "sub").mkdir(parents=True)
    (place / "weights").write_bytes(bytes(range(256)) * 9000)
    (place / "sub" / "config.json").write_text("{}")
    (place / "empty").write_bytes(b"")
    return place


async def test_a_folder_arrives_whole(server: Server, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    source = a_folder(tmp_path / "source")
    server.shelf.put("w", source)
    listing = await fetch(http, ["http://127.0.0.1:9", server.url], "w", tmp_path / "target")
    assert listing == list_folder(source) == list_folder(tmp_path / "target")
    assert names(tmp_path) == {"source", "target"}


async def test_a_damaged_file_is_asked_of_the_next_server(
    server: Server, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    damaged = Server(Shelf())
    await damaged.start()
    good, bad = a_folder(tmp_path / "good"), a_folder(tmp_path / "bad")
    server.shelf.put("w", good)
    damaged.shelf.put("w", bad, list_folder(bad))
    (bad / "weights").write_bytes(bytes(256 * 9000))
    with pytest.raises(TransferFailed, match="CRC"):
        await fetch(http, [damaged.url], "w", tmp_path / "target")
    assert not (tmp_path / "target").exists()
    await fetch(http, [damaged.url, server.url], "w", tmp_path / "target")
    assert list_folder(tmp_path / "target") == list_folder(good)
    await damaged.stop()


async def test_parts_of_several_hosts_are_merged(server: Server, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"host{number}").mkdir()
        (tmp_path / f"host{number}" / f"state-{number}").write_text(str(number))
        server.shelf.put(f"part-{number}", tmp_path / f"host{number}")
    (tmp_path / "whole").mkdir()
    await asyncio.gather(*(fetch(http, [server.url], f"part-{n}", tmp_path / "whole", merge=True) for n in (0, 1)))
    assert names(tmp_path / "whole") == {"state-0", "state-1"}


@pytest.mark.parametrize("path", ["../secret", "..%2Fsecret", "/etc/passwd", "sub/../../secret"])
async def test_nothing_outside_a_folder_is_served(
    server: Server, http: aiohttp.ClientSession, tmp_path: Path, path: str
) -> None:
    (tmp_path / "secret").write_text("s")
    server.shelf.put("w", a_folder(tmp_path / "source"))
    async with http.get(f"{server.url}/files/w/{path}") as response:
        assert response.status == 404


async def test_a_listing_that_points_outside_is_refused(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    evil = Server(Shelf())
    await evil.start()
    evil.shelf.put("w", tmp_path, {"../stolen": (1, 0)})
    with pytest.raises(TransferFailed, match="outside"):
        await fetch(http, [evil.url], "w", tmp_path / "target")
    await evil.stop()


async def test_nothing_without_the_token(server: Server, tmp_path: Path) -> None:
    server.shelf.put("w", a_folder(tmp_path / "source"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ä"}):
        async with aiohttp.ClientSession(headers=headers) as stranger:
            for path in ("/files/w", "/files/w/weights"):
                async with stranger.get(server.url + path) as response:
                    assert response.status == 401


def test_a_token_is_needed_and_not_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_CLUSTER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="make one with"):
        read_token(None)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    (tmp_path / "token").write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_token(tmp_path / "token")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "nothing")


async def test_a_listing_that_takes_long_gives_signs_of_life(
    server: Server, http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = threading.Event()

    def slowly(folder: Path) -> Listing:
        assert heard.wait(60)
        return list_folder(folder)

    monkeypatch.setattr(files, "SIGN_SECONDS", 0.005)
    monkeypatch.setattr(files, "list_folder", slowly)
    server.shelf.put("large", a_folder(tmp_path / "large"))
    async with http.get(f"{server.url}/files/large") as response:
        assert await response.content.readexactly(1) == b" "
        heard.set()
        told = await response.read()
    assert orjson.loads(told)["files"]["weights"][0] == 256 * 9000


async def test_what_is_made_again_elsewhere_is_served_from_there(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """A group lost a host while its checkpoint was fetched; the next one comes to the same step on this host."""
    made = [tmp_path / "trainer-1", tmp_path / "trainer-2"]
    for number, folder in enumerate(made):
        folder.mkdir()
        (folder / f"state-{number}").write_text("x")
    server = Server(Shelf(lambda name: made[0]))
    await server.start()
    assert list(await fetch(http, [server.url], "checkpoint-2", tmp_path / "one")) == ["state-0"]
    shutil.rmtree(made.pop(0))
    assert list(await fetch(http, [server.url], "checkpoint-2", tmp_path / "two")) == ["state-1"]
    await server.stop()
