"""Starting and stopping an engine server, embedded or SGLang, as a child process."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import weakref
from pathlib import Path
from typing import Protocol

from agentrl.child import Child, gpu_environment
from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.reply import Decode
from agentrl.engine.weights import model_limits, weight_shapes
from agentrl.errors import ConfigError, DeadlineExceeded, EngineError, EngineLost
from agentrl.types import Version

_CHUNK = 256
"""Tokens a request to servers that cannot retract: no more than these are ever aborted and asked again."""


class EngineServer:
    """One running server. `client()` speaks to it."""

    def __init__(
        self,
        options: EngineOptions,
        model_dir: Path,
        version: Version,
        *,
        url: str,
        child: Child,
        port: socket.socket | None = None,
    ) -> None:
        self.options = options
        self.model_dir = model_dir
        self.version = version
        self.url = url
        self.child = child
        self.names_versions = True
        """Whether replies say which weights made each token; `wait_ready` finds out."""
        # Until it listens itself, no other process is given its port.
        self._leave_port = None if port is None else weakref.finalize(self, port.close)

    def client(self) -> EngineClient:
        """A client that knows the model's limits, and refuses weights that do not fit it. A server that cannot say
        which weights made a token is paused by aborting."""
        return EngineClient(
            self.url,
            limits=model_limits(self.model_dir, self.options.context_length),
            model_dir=self.model_dir,
            decode=decoder(self.model_dir),
            pause_mode="retract" if self.names_versions else "abort",
            chunk_tokens=self.options.chunk_tokens or (None if self.names_versions else _CHUNK),
            load_timeout=self.options.load_timeout,
            hot_swap=self.options.hot_swap,
        )

    async def wait_ready(self) -> None:
        """Return when it serves. EngineLost with its log's end where it died, DeadlineExceeded where it is too slow."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.options.startup_timeout
        client = EngineClient(self.url, control_timeout=2.0)
        try:
            while loop.time() < deadline:
                code = self.child.poll()
                if code is not None:
                    raise EngineLost(f"{self.child.name} ended with code {code} while starting:\n{self.child.tail()}")
                try:
                    # Not /health: a paused SGLang answers 503 there after 20 s and is not dead.
                    info = await client.model_info()
                except (EngineLost, DeadlineExceeded):
                    await asyncio.sleep(0.1)
                    continue
                if info.version != self.version:
                    raise EngineError(
                        f"{self.url} serves version {info.version}, expected {self.version}: another's port?"
                    )
                try:
                    self.names_versions = await client.names_versions(max(1.0, deadline - loop.time()))
                except EngineLost:
                    await asyncio.sleep(0.1)
                    continue
                return
        finally:
            await client.close()
            if self._leave_port is not None:
                self._leave_port()
        raise DeadlineExceeded(
            f"{self.child.name} was not ready within {self.options.startup_timeout:g} s:\n{self.child.tail()}"
        )

    async def stop(self) -> int:
        """End it; its exit code."""
        return await self.child.stop()


def start_engine(options: EngineOptions, model_dir: Path, version: Version, log: Path, index: int = 0) -> EngineServer:
    """Start server number `index` on the weights in `model_dir`, labelled `version`; `wait_ready` says when it serves.

    ConfigError names a missing model, interpreter or a port in use.
    """
    model_limits(model_dir, options.context_length)
    weight_shapes(model_dir)
    held = _bound(options, index)
    try:
        port = int(held.getsockname()[1])
        child = _child(options, model_dir, version, log, index, port)
        return EngineServer(options, model_dir, version, url=f"http://{options.host}:{port}", child=child, port=held)
    except BaseException:
        held.close()
        raise


def _child(options: EngineOptions, model_dir: Path, version: Version, log: Path, index: int, port: int) -> Child:
    embedded = options.kind == "embedded"
    argv = (_embedded if embedded else _sglang)(options, model_dir, version, port)
    threads = str(options.threads)
    env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if not embedded:
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        env |= {"SGLANG_USE_CPU_ENGINE": "1"} if _on_cpu(options) else {}
        size = options.tensor_parallel
        env |= gpu_environment(options.gpus and options.gpus[index * size : (index + 1) * size])
    return Child(f"engine {index} ({options.kind})", argv, log=log, env=env)


def decoder(model_dir: Path) -> Decode | None:
    """Token ids to text by the model's tokenizer.json, None where it has none. Loaded when first used."""
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    loaded: list[_Tokenizer] = []

    def decode(ids: object) -> str:
        if not loaded:
            from tokenizers import Tokenizer

            loaded.append(Tokenizer.from_file(str(path)))
        return loaded[0].decode(list(ids), skip_special_tokens=False)  # type: ignore[call-overload]

    return decode


class _Tokenizer(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


def _bound(options: EngineOptions, index: int) -> socket.socket:
    """Bound to the server's port and not listening: the server may listen there, and nobody else."""
    wanted = 0 if options.port is None else options.port + index
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((options.host, wanted))
    except OSError as error:
        held.close()
        raise ConfigError(
            f"engine {index} cannot listen on {options.host}:{wanted} ({error.strerror}): choose another "
            "engine.port, or leave it out to have a free one chosen"
        ) from error
    return held


def _embedded(options: EngineOptions, model_dir: Path, version: Version, port: int) -> list[str]:
    argv = [sys.executable, "-m", "agentrl.engine.embedded", "--model", str(model_dir), "--host", options.host]
    argv += ["--port", str(port), "--version", str(version), "--dtype", options.dtype]
    argv += ["--max-running", str(options.max_running), "--threads", str(options.threads), "--device", options.device]
    return argv if options.context_length is None else [*argv, "--context-length", str(options.context_length)]


def _sglang(options: EngineOptions, model_dir: Path, version: Version, port: int) -> list[str]:
    python = str(options.python or sys.executable)
    if shutil.which(python) is None:
        raise ConfigError(f"engine.python {python} is no interpreter: name the one of the environment that has SGLang")
    argv = [python, "-m", "sglang.launch_server", "--model-path", str(model_dir), "--served-model-name", "policy"]
    argv += ["--host", options.host, "--port", str(port), "--weight-version", str(version), "--dtype", options.dtype]
    argv += ["--max-running-requests", str(options.max_running), "--skip-server-warmup"]
    if options.context_length is not None:
        argv += ["--context-length", str(options.context_length)]
    if options.tensor_parallel > 1:
        argv += ["--tp-size", str(options.tensor_parallel)]
    if _on_cpu(options):
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
        tokens = options.max_running * min(2048, model_limits(model_dir, options.context_length).context_length)
        argv += ["--max-total-tokens", str(min(tokens, 65536)), "--mem-fraction-static", "0.2"]
    elif options.memory_fraction is not None:
        argv += ["--mem-fraction-static", str(options.memory_fraction)]
    return [*argv, *options.extra_args]


def _on_cpu(options: EngineOptions) -> bool:
    gpu = os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd")
    return options.device == "cpu" or (options.device == "auto" and not gpu)
