"""MCP servers as tools: real server processes, over their pipes and over HTTP, alive, slow, frozen and dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, ContractError
from agentrl.mcp import McpClient, McpServer, ToolServerLost, shared_client
from agentrl.tool import run_tools
from agentrl.types import Message

pytest.importorskip("mcp")
PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
STDIO = McpServer(command=(sys.executable, PROGRAM, "stdio"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Serving() as serving:
        yield serving.url


class Serving:
    """A server of its own process until the block ends. Its port is bound here: nobody else can get it first."""

    def __init__(self) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
            number = listening.fileno()
            self.process = subprocess.Popen([sys.executable, PROGRAM, "http", str(number)], pass_fds=(number,))

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


async def gone(pid: int) -> None:
    """Wait until no process has this id: who waits for it is a thread of the event loop's."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


def calls(*asked: tuple[str, dict[str, Any]]) -> Message:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(asked)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


async def texts(client: McpClient, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    return [message["content"] for message in await run_tools(client.tools(), calls(*asked))]


KINDS = ["stdio", pytest.param("http", marks=pytest.mark.slow)]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> McpServer:
    return STDIO if request.param == "stdio" else McpServer(url=request.getfixturevalue("url"))


@pytest.mark.parametrize("server", KINDS, indirect=True)
async def test_the_tools_of_a_real_server(server: McpServer) -> None:
    async with McpClient(server) as client:
        (add,) = client.tools(only=("add",))
        function = add.schema["function"]
        assert function["name"] == "add"
        assert "Add two numbers" in function["description"]
        assert function["parameters"]["required"] == ["a"]
        assert function["parameters"]["properties"]["b"]["type"] == "integer"
        said = await texts(
            client, ("add", {"a": 3}), ("fail", {"why": "no luck"}), ("add", {"a": "three"}), ("nothing", {})
        )
        assert said[0] == "4"
        assert said[1].startswith("error: ")
        assert "no luck" in said[1]
        assert said[2].startswith("error: ")
        assert "valid integer" in said[2]
        assert said[3].startswith("error: there is no tool 'nothing'")
        # The state that the reward looks at; what is fixed is sent and not shown.
        (note,) = client.tools(only=("note",), fixed={"book": "mine"})
        assert list(note.schema["function"]["parameters"]["properties"]) == ["text"]
        assert note.schema["function"]["parameters"]["required"] == ["text"]
        await run_tools([note], calls(("note", {"text": "a"}), ("note", {"text": "b", "book": "yours"})))
        answer = await client.call("state", {"book": "mine"})
        assert sorted(answer.data["notes"]) == ["a", "b"]
        assert not answer.failed
        with pytest.raises(ContractError, match="has no tools"):
            client.tools(only=("nosuch",))
    with pytest.raises(ToolServerLost, match="closed"):
        await client.call("add", {"a": 1})


@pytest.mark.slow
@pytest.mark.parametrize("server", ["stdio", "http"], indirect=True)
async def test_a_slow_call_is_an_observation_and_the_server_goes_on(
    server: McpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.mcp.PROBE_SECONDS", 60.0)
    async with McpClient(server) as client:
        client.server = client.server.model_copy(update={"call_seconds": 0.3})
        slow = client.tools(only=("wait",))
        (answer,) = await run_tools(slow, calls(("wait", {"seconds": 600})))
        assert answer["content"] == "error: wait did not finish within 0.3 s"
        client.server = client.server.model_copy(update={"call_seconds": 60.0})
        assert await texts(client, ("wait", {"seconds": 0.0}), ("add", {"a": 1})) == ["done", "2"]


@pytest.mark.slow
async def test_a_server_that_dies_is_a_fault_at_once_with_what_it_said() -> None:
    async with McpClient(STDIO) as client:
        with pytest.raises(ToolServerLost, match=r"ended during a call.*asked to die"):
            await run_tools(client.tools(), calls(("die", {}), ("wait", {"seconds": 60})))
        with pytest.raises(ToolServerLost, match="ended during a call"):
            await client.call("add", {"a": 1})


@pytest.mark.slow
async def test_a_frozen_server_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.mcp.PROBE_SECONDS", 0.5)
    async with McpClient(STDIO) as client:
        pid = (await client.call("state", {"book": ""})).data["pid"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ToolServerLost, match="answers no more"):
            await client.call("add", {"a": 1}, seconds=0.5)
    await gone(pid)


@pytest.mark.slow
async def test_a_dead_http_server_is_a_fault() -> None:
    with Serving() as serving:
        async with McpClient(McpServer(url=serving.url)) as client:
            assert await texts(client, ("add", {"a": 1})) == ["2"]
            serving.process.kill()
            serving.process.wait()
            with pytest.raises(ToolServerLost):
                await run_tools(client.tools(), calls(("add", {"a": 1})))
    with pytest.raises(ToolServerLost, match="did not start"):
        await McpClient(McpServer(url=serving.url)).__aenter__()


async def test_a_program_that_is_no_server() -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        await McpClient(McpServer(command=("/no/such/program",))).__aenter__()
    broken = McpServer(command=(sys.executable, "-c", "import sys; sys.exit('the key is missing')"))
    with pytest.raises(ToolServerLost, match=r"(?s)did not start.*the key is missing"):
        await McpClient(broken).__aenter__()
    mute = McpServer(command=(sys.executable, "-c", "import sys; sys.stdin.read()"), start_seconds=0.5)
    with pytest.raises(ToolServerLost, match=r"did not list its tools within 0\.5 s"):
        await McpClient(mute).__aenter__()


@pytest.mark.slow
async def test_one_shared_server_for_episodes_side_by_side_and_a_new_one_when_it_is_lost() -> None:
    async def episode(book: str) -> int:
        async with shared_client(STDIO) as client:
            (note,) = client.tools(only=("note",), fixed={"book": book})
            await run_tools([note], calls(("note", {"text": book})))
            found = (await client.call("state", {"book": book})).data
            assert found["notes"] == [book]
            return int(found["pid"])

    pids = await asyncio.gather(*(episode(name) for name in "abc"))
    assert len(set(pids)) == 1
    await gone(pids[0])
    async with shared_client(STDIO) as first:
        with pytest.raises(ToolServerLost):
            await first.call("die", {})
        async with shared_client(STDIO) as second:
            assert second is not first
            assert (await second.call("add", {"a": 1})).data == {"result": 2}


async def test_a_cancelled_opening_leaves_no_process(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = f"import os, sys; open({str(told)!r}, 'w').write(str(os.getpid())); sys.stdin.read(); sys.stdin.read()"
    task = asyncio.ensure_future(McpClient(McpServer(command=(sys.executable, "-c", program))).__aenter__())
    while not (told.exists() and told.read_text()):  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(int(told.read_text()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either a command or a url"),
        ({"command": ("a",), "url": "b"}, "either a command or a url"),
        ({"url": "b", "env": {"a": "b"}}, "no effect on a server at a url"),
        ({"command": ("a",), "headers": {"a": "b"}}, "headers have no effect"),
    ],
)
def test_a_server_is_a_command_or_a_url(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        McpServer(**given)
