"""Starting and stopping engine servers, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.child import Child
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer, start_engine
from agentrl.errors import ConfigError, DeadlineExceeded, EngineLost
from agentrl.testing.scripted_server import Fault, ScriptedServer
from agentrl.types import Version
from tests.engine.kit import edit_json, request, until, vivid_model

V = Version(2, 5)


@pytest.mark.slow
async def test_a_server_serves_its_version_and_ends(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    server = start_engine(EngineOptions(dtype="bfloat16", max_running=2), model, V, tmp_path / "log")
    try:
        await server.wait_ready()
        client = server.client()
        assert (await client.model_info()).version == V
        done = await asyncio.gather(*(client.generate(request(f"r{i}", max_tokens=5)) for i in range(5)))
        assert all(c.spans[0].version == V for c in done)
        stop = await client.generate(request("stop", max_tokens=200, stop=("a", "e", "0", " ")))
        assert stop.finish == "length" or stop.matched in ("a", "e", "0", " ", 258)
        greedy = await client.generate(request("greedy", max_tokens=9, temperature=0.0))
        await client.close()
    finally:
        code = await server.child.stop(grace=60.0)
    assert code == 0
    await _the_end_token_ends(model, tmp_path, greedy.tokens.tolist())
    with pytest.raises(EngineLost, match="ended with code 0"):
        await server.wait_ready()


async def _the_end_token_ends(model: Path, tmp_path: Path, greedy: list[int]) -> None:
    edit_json(model / "generation_config.json", eos_token_id=[999, greedy[4]])
    server = start_engine(EngineOptions(dtype="bfloat16"), model, V, tmp_path / "log2")
    try:
        await server.wait_ready()
        client = server.client()
        done = await client.generate(request("eos", max_tokens=9, temperature=0.0))
        await client.close()
    finally:
        await server.stop()
    assert (done.finish, done.matched, done.tokens[-1]) == ("stop", greedy[4], greedy[4])
    assert len(done.tokens) <= 5


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*engine.port"):
            start_engine(EngineOptions(port=port), model, V, tmp_path / "log")


def test_a_missing_or_damaged_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        start_engine(EngineOptions(), tmp_path / "nowhere", V, tmp_path / "log")
    model = vivid_model(tmp_path / "m", 0)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="cut short"):
        start_engine(EngineOptions(), model, V, tmp_path / "log")
    weights.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        start_engine(EngineOptions(), model, V, tmp_path / "log")


@pytest.mark.slow
async def test_a_server_that_dies_while_starting_shows_its_log(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"mamba"'))
    server = start_engine(EngineOptions(), model, V, tmp_path / "log")
    with pytest.raises(EngineLost, match="model_type 'mamba'"):
        await server.wait_ready()


async def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\necho loading for ever\nexec sleep 600\n")
    idle.chmod(0o755)
    options = EngineOptions(kind="sglang", python=idle, startup_timeout=0.5)
    server = start_engine(options, model, V, tmp_path / "log")
    try:
        await until((tmp_path / "log").read_text)  # the guard and the shell start when they start
        with pytest.raises(DeadlineExceeded, match="loading for ever"):
            await server.wait_ready()
    finally:
        await server.stop()


async def test_a_server_that_starts_has_its_port_to_itself(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\nexec sleep 600\n")
    idle.chmod(0o755)
    server = start_engine(EngineOptions(kind="sglang", python=idle), model, V, tmp_path / "log")
    port = int(server.url.rpartition(":")[2])
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        async with ScriptedServer(lambda _: [5], version="2.5") as late:
            await late.stop()
            await late.start(port)  # as the server will
            await server.wait_ready()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
    finally:
        await server.stop()


def test_the_interpreter_of_sglang_must_exist(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    with pytest.raises(ConfigError, match=r"engine\.python"):
        start_engine(EngineOptions(kind="sglang", python=tmp_path / "none"), model, V, tmp_path / "log")


async def test_sglang_flags(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0)
    echo = tmp_path / "python"
    echo.write_text('#!/bin/sh\necho "$SGLANG_USE_CPU_ENGINE" "$@"\n')
    echo.chmod(0o755)
    options = EngineOptions(
        kind="sglang", python=echo, device="cuda", tensor_parallel=2, memory_fraction=0.5, extra_args=("--x", "1")
    )
    server = start_engine(options, model, V, tmp_path / "gpu")
    assert await server.child.wait() == 0
    said = (tmp_path / "gpu").read_text()
    for flag in ("--weight-version 2.5", "--tp-size 2", "--mem-fraction-static 0.5", "--x 1", "--dtype float32"):
        assert flag in said
    assert "cpu" not in said
    server = start_engine(EngineOptions(kind="sglang", python=echo, device="cpu"), model, V, tmp_path / "cpu")
    assert await server.child.wait() == 0
    said = (tmp_path / "cpu").read_text()
    assert said.startswith("1 -m sglang.launch_server")
    assert "--attention-backend torch_native" in said


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"python": sys.executable}, "no effect"),
        ({"extra_args": ["--x"]}, "no effect"),
        ({"count": 0}, "count"),
        ({"port": 65535, "count": 2}, "no room"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_options_without_effect_or_sense_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineOptions.model_validate(settings)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    model = vivid_model(tmp_path / "m", 0, max_length=128)
    with pytest.raises(ConfigError, match="longer than the model's 128"):
        start_engine(EngineOptions(context_length=256), model, V, tmp_path / "log")


@pytest.mark.parametrize("spans", [True, False])
async def test_what_an_old_server_cannot_do_is_found_at_start(tmp_path: Path, spans: bool) -> None:
    model = vivid_model(tmp_path / "m", 0)
    child = Child("old engine", ["sleep", "600"], log=tmp_path / "log")
    async with ScriptedServer(
        lambda prompt: [(prompt[-1] + 1 + i) % 280 for i in range(400)],
        version="2.5",
        token_delay=0.001,
        spans=spans,
        pauses=spans,
    ) as old:
        old.faults.append(Fault("status", status=503))  # not ready yet
        server = EngineServer(EngineOptions(), model, V, url=old.url, child=child)
        try:
            await server.wait_ready()
            assert server.names_versions == spans
            client = server.client()
            old.holds_at = 100
            task = asyncio.create_task(client.generate(request("r", [9], max_tokens=350)))
            await until(lambda: any(len(state.tokens) > 20 for state in old.running.values()))
            await client.pause()
            await client.update_from_disk(model, Version(2, 6))
            old.holds_at = None
            await client.resume()
            done = await task
            await client.close()
        finally:
            await server.stop()
    assert done.tokens.tolist() == [(10 + i) % 280 for i in range(350)]
    assert [s.version for s in done.spans] == [V, Version(2, 6)]
    asked = [body["sampling_params"]["max_new_tokens"] for path, body in old.calls if path == "/generate"]
    assert asked[2:] == [350] if spans else asked[2] == 256
