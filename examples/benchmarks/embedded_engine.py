"""The embedded engine against `transformers.generate`: new tokens a CPU-second, one thread, bfloat16, with log-probs.

    python examples/benchmarks/embedded_engine.py                                    # SmolLM2-135M, random weights
    python examples/benchmarks/embedded_engine.py --model .cache/models/smollm2-135m-instruct
    python examples/benchmarks/embedded_engine.py --model … --sglang path/to/venv/bin/python   # and a real SGLang

The embedded engine is asked as always: a server process, requests over HTTP; the CPU time is that of its process.
`transformers` gets one static batch in this process. Prompts have 64 tokens, differ from the first token on, and get 64
new ones; in `mixed`, 32 requests have 16 to 112 of each, and only the tokens that were asked for count. Both sides take
turns, `--repeat` times, and the best of each counts: what another process costs is noise that only ever adds.

The last line is JSON: tokens a CPU-second of each side, and `ratio_batch8`, `ratio_batch32`, `ratio_mixed`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer, start_engine
from agentrl.engine.types import GenerateRequest, Sampling
from agentrl.types import Version

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SECONDS = 1800.0


class Ask(NamedTuple):
    """One request: its prompt, and how many tokens it gets."""

    prompt: list[int]
    new: int


def prepared(folder: Path, source: Path | None) -> Path:
    """A model without an end token, so that every request gets all its tokens: `source`'s, or a random one."""
    if source is None:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2)).bfloat16().save_pretrained(folder)
    else:
        for path in (*source.resolve().glob("*.safetensors"), *source.resolve().glob("tokenizer*.json")):
            (folder / path.name).symlink_to(path)
    config = json.loads(((source or folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None, "bos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def workloads(vocab: int) -> dict[str, list[Ask]]:
    """Name → requests; no two prompts begin alike."""
    rng = np.random.default_rng(0)

    def ask(length: int, new: int) -> Ask:
        return Ask(rng.integers(100, vocab, length).tolist(), new)

    mixed = [ask(int(rng.integers(16, 113)), int(rng.integers(16, 113))) for _ in range(32)]
    return {"batch8": [ask(64, 64) for _ in range(8)], "batch32": [ask(64, 64) for _ in range(32)], "mixed": mixed}


class Served:
    """A server process that is asked over HTTP."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.rounds = 0

    def generate(self, asks: Sequence[Ask]) -> float:
        """CPU seconds of the server's process for these requests, all at once."""
        self.rounds += 1
        return asyncio.run(self._generate(asks))

    async def _generate(self, asks: Sequence[Ask]) -> float:
        client = self.server.client()
        deadline = asyncio.get_running_loop().time() + SECONDS
        # Other weights under the same numbers: nothing of an earlier round is cached.
        await client.update_from_disk(self.server.model_dir, Version(1, self.rounds))
        before = cpu_seconds(self.server.child.pid)

        async def one(i: int, ask: Ask) -> int:
            sampling = Sampling(max_tokens=ask.new, seed=i)
            request = GenerateRequest(f"{self.rounds}-{i}", str(i), np.array(ask.prompt, np.int32), sampling, deadline)
            return len((await client.generate(request)).tokens)

        made = await asyncio.gather(*(one(i, ask) for i, ask in enumerate(asks)))
        used = cpu_seconds(self.server.child.pid) - before
        assert list(made) == [ask.new for ask in asks]
        await client.close()
        return used


class Static:
    """`transformers.generate` over one padded batch."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(self, asks: Sequence[Ask]) -> float:
        """CPU seconds of this process for these requests: all run until the longest one ends."""
        began = time.process_time()
        longest = max(len(ask.prompt) for ask in asks)
        ids = torch.tensor([[0] * (longest - len(ask.prompt)) + ask.prompt for ask in asks])
        mask = torch.tensor([[0] * (longest - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks])
        new = max(ask.new for ask in asks)
        done = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        tokens = done.sequences[:, longest:]
        for at, logits in enumerate(done.logits):
            logits.float().log_softmax(-1).gather(1, tokens[:, at : at + 1])
        assert tokens.shape == (len(asks), new)
        return time.process_time() - began


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of the children it has: a real SGLang is several processes."""
    total = 0.0
    waiting = [pid]
    while waiting:
        here = Path("/proc") / str(waiting.pop())
        try:
            fields = (here / "stat").read_text().rpartition(")")[2].split()
            for task in (here / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it ended meanwhile
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(sides: dict[str, Served | Static], repeat: int, asked: dict[str, list[Ask]]) -> dict[str, float]:
    """New tokens a CPU-second of every side and workload."""
    out: dict[str, float] = {}
    for side in sides.values():
        side.generate([Ask(list(range(100, 116)), 4)] * 2)
    for name, asks in asked.items():
        tokens = sum(ask.new for ask in asks)
        for turn in range(repeat):
            for label, side in sides.items():
                rate = tokens / side.generate(asks)
                print(f"{name} {label}: {rate:.1f} tokens a CPU-second ({turn + 1} of {repeat})", flush=True)
                out[f"{label}_{name}"] = max(rate, out.get(f"{label}_{name}", 0.0))
        out[f"ratio_{name}"] = out[f"embedded_{name}"] / out[f"transformers_{name}"]
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a model folder; random weights where it is not given")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sglang", type=Path, default=None, help="a Python interpreter that has SGLang")
    parser.add_argument("--only", nargs="+", choices=("batch8", "batch32", "mixed"), help="these workloads alone")
    options = parser.parse_args()
    if options.sglang is not None and options.model is None:
        parser.error("--sglang needs --model: SGLang serves no model without a tokenizer")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        prepared(folder, options.model)
        vocab = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        engines = [EngineOptions(dtype="bfloat16", context_length=512)]
        if options.sglang is not None:
            engines.append(
                EngineOptions(kind="sglang", python=options.sglang, dtype="bfloat16", context_length=512, device="cpu")
            )
        servers = [start_engine(o, folder, Version(1, 0), Path(scratch) / f"{o.kind}.log") for o in engines]
        try:
            for server in servers:
                asyncio.run(server.wait_ready())
            sides: dict[str, Served | Static] = {server.options.kind: Served(server) for server in servers}
            sides["transformers"] = Static(folder)
            asked = {name: asks for name, asks in workloads(vocab).items() if name in (options.only or (name,))}
            out = measure(sides, options.repeat, asked)
        finally:
            for server in servers:
                asyncio.run(server.stop())
    print(json.dumps({key: round(value, 2) for key, value in out.items()}))


if __name__ == "__main__":
    main()
