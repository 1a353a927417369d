"""`python -m agentrl.engine.embedded --model FOLDER --port 30000`: the embedded engine as a process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from agentrl.engine.embedded.app import App, serve
from agentrl.engine.embedded.linear import CPU, computed_in
from agentrl.engine.embedded.model import KVCache, Model
from agentrl.engine.embedded.parameters import load_weights
from agentrl.engine.embedded.scheduler import Scheduler
from agentrl.engine.embedded.sequence import Decode
from agentrl.engine.embedded.shape import read_shape, rope_tables
from agentrl.errors import ConfigError
from agentrl.process import collect_seldom, keep_freed_memory
from agentrl.types import Version

_SWITCH_SECONDS = 0.0005
"""The HTTP thread gives way to the generating one after so long: with Python's 5 ms, each operation of a step may wait
for a request to be read."""


def build(
    folder: Path,
    *,
    version: Version,
    dtype: torch.dtype,
    max_running: int,
    context_length: int | None = None,
    device: torch.device = CPU,
) -> App:
    """The engine over the model in `folder`, computing on `device`."""
    shape = read_shape(folder, context_length)
    weights = load_weights(folder, shape, dtype, device)
    compute = computed_in(dtype, device)
    cache = KVCache(shape, 2 * max_running, compute, device)
    cos, sin = rope_tables(folder, shape, shape.context)
    decode = _decoder(folder)
    model = Model(shape, cache, cos, sin, compute)
    scheduler = Scheduler(model, weights, str(version), cache, max_running=max_running, decode=decode)
    return App(scheduler, shape, folder, dtype, decode is not None, device)


def chosen_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one; ConfigError for one that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device = 'cuda', and torch sees no GPU: use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _decoder(folder: Path) -> Decode | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


async def run(app: App, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT, or until generation fails; the exit code."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def generate() -> None:
        try:
            app.scheduler.run()
        except BaseException:
            traceback.print_exc()
            loop.call_soon_threadsafe(end, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    thread = threading.Thread(target=generate, name="generate", daemon=True)
    thread.start()
    async with serve(app, host, port):
        print(f"embedded engine ready on http://{host}:{port}", flush=True)
        code = await ended
        app.scheduler.stop()
        await asyncio.to_thread(thread.join, 5.0)
    return code


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="agentrl.engine.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--version", type=Version.parse, default=Version(1, 0))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sys.setswitchinterval(_SWITCH_SECONDS)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    try:
        device = chosen_device(args.device)
        if device == CPU:
            keep_freed_memory()
        app = build(
            args.model,
            version=args.version,
            dtype=dtype,
            max_running=args.max_running,
            context_length=args.context_length,
            device=device,
        )
        collect_seldom()  # a search in one thread stops the other: no token for tenths of a second
        return asyncio.run(run(app, args.host, args.port))
    except (ConfigError, OSError) as error:
        print(f"embedded engine: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
