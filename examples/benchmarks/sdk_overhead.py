"""What the SDK costs a turn: CPU time and turns a second of 5-turn episodes against an engine that costs nothing.

    python examples/benchmarks/sdk_overhead.py                                 # direct, openai client, bare aiohttp
    python examples/benchmarks/sdk_overhead.py --verifiers path/to/venv/bin/python   # and `verifiers`, in its own venv

Every side plays the same episodes: a user's question, 40 sampled tokens a turn, one new message after each, against one
scripted engine that is a process of its own and answers over HTTP. `direct` is the session that the shelf's agents get,
`openai` the real openai client over loopback HTTP (client and server in one process, so `cpu_ms_per_turn_openai` counts
both), `bare` an aiohttp client that posts a prompt's tokens and reads the reply. `instant` is the direct session
without an engine's HTTP. Garbage is collected as in the processes of a run, on all sides. The last line is JSON, for
512 episodes at once where no number is named.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.session import Session
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.client import EngineClient
from agentrl.engine.types import Completion, Engine, GenerateRequest, OnTokens, Span
from agentrl.process import collect_seldom
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Int32Array, Message, Version

TURNS = 5
TOKENS = 40
QUESTION = "hello, what is two and two?"
NEXT = "Please go on with the next question, if any."
CONCURRENT = (64, 512, 2048)


def answer_tokens(template: ChatTemplate) -> Int32Array:
    """`[40]` what every turn samples."""
    letters = template.encode_text("a b c d e f g h " * 20)[: TOKENS - 1]
    return np.concatenate((letters, template.encode_text("<|im_end|>")))


class Instant:
    """An engine in this process that answers at once."""

    def __init__(self, template: ChatTemplate) -> None:
        tokens = answer_tokens(template)
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


async def ours(template: ChatTemplate, n: int, engine: Engine, *, http: bool) -> tuple[float, float]:
    """By the direct session or by the openai client."""
    endpoint = Endpoint(engine, template, EndpointOptions(context_length=1 << 15))
    if http:
        await endpoint.start()

    async def play(i: int) -> None:
        session = endpoint.open(f"{n}-{http}-{i}", seed=abs(i))
        await episode(session, session.openai() if http else session)

    await play(-1)
    found = await timed(n, play)
    await endpoint.stop()
    return found


async def bare(template: ChatTemplate, n: int, url: str) -> tuple[float, float]:
    """No SDK: aiohttp posts to the engine."""
    prompt = template.encode([{"role": "user", "content": QUESTION}], generation=True).tolist()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def play(i: int) -> None:
            for _ in range(TURNS):
                async with client.post(f"{url}/generate", json={"input_ids": prompt}) as response:
                    await response.json()

        await play(-1)
        return await timed(n, play)


def verifiers(python: str, n: int, url: str, model: Path) -> dict[str, float]:
    """The same episodes by `verifiers`, in the interpreter that has it."""
    script = str(Path(__file__).with_name("verifiers_overhead.py"))
    command = [python, script, "--episodes", str(n), "--turns", str(TURNS), "--url", f"{url}/v1", "--model", str(model)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve(template: ChatTemplate) -> None:
    """The scripted engine: SGLang's `/generate` and vLLM's, both with an answer made before; prints its URL."""
    tokens = answer_tokens(template).tolist()
    meta = {
        "finish_reason": {"type": "stop", "matched": tokens[-1]},
        "weight_version": "1.0",
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": "1.0", "start": 0, "end": TOKENS}],
    }
    sglang = json.dumps({"output_ids": tokens, "meta_info": meta}).encode()
    rows = {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in tokens]}
    vllm = json.dumps({"choices": [{"token_ids": tokens, "finish_reason": "stop", "logprobs": rows}]}).encode()
    info = json.dumps({"weight_version": "1.0", "model_path": "scripted"}).encode()
    models = json.dumps({"object": "list", "data": []}).encode()

    def answer(body: bytes) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=body, content_type="application/json")

        return handle

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/generate", answer(sglang))
    app.router.add_post("/inference/v1/generate", answer(vllm))
    app.router.add_get("/model_info", answer(info))
    app.router.add_get("/v1/models", answer(models))
    listening = socket.create_server(("127.0.0.1", 0), backlog=8192)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    web.run_app(app, sock=listening, print=None, access_log=None)


async def measure(template: ChatTemplate, url: str, sizes: Sequence[int]) -> dict[str, float]:
    """All sides but `verifiers`, once."""
    out: dict[str, float] = {}
    for n in sizes:
        at = "" if n == 512 else f"_{n}"
        engine = EngineClient(url)
        out[f"cpu_ms_per_turn_instant{at}"], _ = await ours(template, n, Instant(template), http=False)
        out[f"cpu_ms_per_turn{at}"], out[f"turns_per_s{at}"] = await ours(template, n, engine, http=False)
        out[f"cpu_ms_per_turn_openai{at}"], out[f"turns_per_s_openai{at}"] = await ours(template, n, engine, http=True)
        out[f"cpu_ms_per_turn_bare{at}"], out[f"turns_per_s_bare{at}"] = await bare(template, n, url)
        await engine.close()
    return out


def best(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least time and the highest rate of several rounds: what other processes cost only ever adds."""
    return {name: (max if "per_s" in name else min)(found[name] for found in rounds) for name in rounds[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a folder with a ChatML tokenizer and template")
    parser.add_argument("--verifiers", default=None, help="a Python interpreter that has `verifiers`; needs Qwen3's")
    parser.add_argument("--serve", action="store_true", help="be the scripted engine; the script starts it itself")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, of which the best of each figure counts")
    parser.add_argument("--episodes", type=int, nargs="+", default=CONCURRENT, help="how many at once; 512 is a must")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_tiny_model(Path(folder), max_length=8192)
        template = ChatTemplate.load(model)
        if options.serve:
            serve(template)
            return
        command = [sys.executable, __file__, "--serve", "--model", str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            try:
                assert engine.stdout is not None
                url = engine.stdout.readline().strip()
                collect_seldom()
                out = best([asyncio.run(measure(template, url, options.episodes)) for _ in range(options.repeat)])
                out["ratio_vs_bare"] = out["turns_per_s"] / out["turns_per_s_bare"]
                if options.verifiers is not None:
                    found = best([verifiers(options.verifiers, 512, url, model) for _ in range(options.repeat)])
                    out |= {f"{name}_verifiers": value for name, value in found.items()}
                    out["ratio_vs_verifiers"] = out["turns_per_s"] / found["turns_per_s"]
            finally:
                engine.terminate()
    print(json.dumps({key: round(value, 3) for key, value in out.items()}))


if __name__ == "__main__":
    main()
