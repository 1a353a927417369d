"""What the SDK costs a turn: CPU time and turns a second of 5-turn episodes against an engine that costs nothing.

    python examples/benchmarks/sdk_overhead.py                                 # direct, openai client, bare aiohttp
    python examples/benchmarks/sdk_overhead.py --verifiers path/to/venv/bin/python   # and `verifiers`, in its own venv

Every side plays the same episodes: a user's question, 40 sampled tokens a turn, one new message after each. `direct` is
the session that the shelf's agents get, `openai` the real openai client over loopback HTTP in the same process (client
and server together; `cpu_ms_per_turn_openai` counts both), `bare` an aiohttp client that posts the prompt's tokens to
a scripted engine and does nothing else. The last line is JSON, for 512 episodes at once where no number is named.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.session import Session
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.types import Completion, GenerateRequest, OnTokens, Span
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Message, Version

TURNS = 5
TOKENS = 40
QUESTION = "hello, what is two and two?"
NEXT = "Please go on with the next question, if any."
CONCURRENT = (64, 512, 2048)


class Instant:
    """An engine that answers at once, in one array that is made before."""

    def __init__(self, template: ChatTemplate) -> None:
        letters = template.encode_text("abcdefgh " * 8)[: TOKENS - 1]
        tokens = np.concatenate((letters, template.encode_text("<|im_end|>")))
        logprobs = np.full(TOKENS, -0.5, np.float32)
        self.completion = Completion(tokens, logprobs, (Span(Version(1, 0), 0, TOKENS),), "stop", int(tokens[-1]))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """The same completion, after one round of the event loop."""
        await asyncio.sleep(0)
        return self.completion


async def episode(session: Session, client: Any) -> None:
    """Five turns of a plain agent."""
    messages: list[Message] = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=64)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": NEXT})
        session.marks()
    (trajectory,) = await session.close()
    assert int(trajectory.loss_mask.sum()) == TURNS * TOKENS


async def timed(n: int, play: Callable[[int], Awaitable[None]]) -> tuple[float, float]:
    """CPU milliseconds a turn, and turns a second, of `n` episodes at once."""
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(play(i) for i in range(n)))
    turns = n * TURNS
    return 1e3 * (time.process_time() - cpu) / turns, turns / (time.perf_counter() - began)


async def ours(template: ChatTemplate, n: int, *, http: bool) -> tuple[float, float]:
    """By the direct session or by the openai client."""
    endpoint = Endpoint(Instant(template), template)
    if http:
        await endpoint.start()

    async def play(i: int) -> None:
        session = endpoint.open(str(i), seed=i)
        await episode(session, session.openai() if http else session)

    await play(-1)
    found = await timed(n, play)
    await endpoint.stop()
    return found


async def bare(template: ChatTemplate, n: int) -> tuple[float, float]:
    """No SDK: aiohttp posts to a scripted engine in the same process."""
    answer = json.dumps({"output_ids": [7] * TOKENS, "logprobs": [-0.5] * TOKENS}).encode()
    prompt = template.encode([{"role": "user", "content": QUESTION}], generation=True).tolist()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
    await site.start()
    url = "http://{}:{}/generate".format(*runner.addresses[0][:2])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def play(i: int) -> None:
            for _ in range(TURNS):
                async with client.post(url, json={"input_ids": prompt}) as response:
                    await response.json()

        await play(-1)
        found = await timed(n, play)
    await runner.cleanup()
    return found


def verifiers(python: str, n: int) -> dict[str, float]:
    """The same environment by `verifiers`, in the interpreter that has it."""
    script = Path(__file__).with_name("verifiers_overhead.py")
    command = [python, str(script), "--episodes", str(n), "--turns", str(TURNS), "--tokens", str(TOKENS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


async def measure(template: ChatTemplate) -> dict[str, float]:
    """All sides but `verifiers`."""
    out: dict[str, float] = {}
    for n in CONCURRENT:
        at = "" if n == 512 else f"_{n}"
        out[f"cpu_ms_per_turn{at}"], out[f"turns_per_s{at}"] = await ours(template, n, http=False)
        out[f"cpu_ms_per_turn_openai{at}"], out[f"turns_per_s_openai{at}"] = await ours(template, n, http=True)
        out[f"cpu_ms_per_turn_bare{at}"], out[f"turns_per_s_bare{at}"] = await bare(template, n)
    out["ratio_vs_bare"] = out["turns_per_s"] / out["turns_per_s_bare"]
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a folder with a ChatML tokenizer and template")
    parser.add_argument("--verifiers", default=None, help="a Python interpreter that has `verifiers`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = ChatTemplate.load(options.model or make_tiny_model(Path(folder), max_length=8192))
        out = asyncio.run(measure(template))
    if options.verifiers is not None:
        found = verifiers(options.verifiers, 512)
        out["cpu_ms_per_turn_verifiers"], out["turns_per_s_verifiers"] = found["cpu_ms_per_turn"], found["turns_per_s"]
        out["ratio_vs_verifiers"] = out["turns_per_s"] / out["turns_per_s_verifiers"]
    print(json.dumps({key: round(value, 3) for key, value in out.items()}))


if __name__ == "__main__":
    main()
