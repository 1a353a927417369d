"""One GPU, no network, at most 8 minutes: how fast training, publishing and generation are at the size of Qwen3-1.7B.

    python examples/benchmarks/gpu.py            # without a GPU: says so, {"gpu": false}
    python examples/benchmarks/gpu.py --toy      # the same on a CPU with a tiny model: shows that it runs, no more

The weights are random, bfloat16, in shared memory. Each part is a process of its own with its own time limit, so that
one that fails leaves the others' figures (its error is in the result, and the exit code is 1).

    train    the trainer's packed passes against sorted and plain padding, sequences of log-normal lengths (σ = 1, mean
             1k), budget 8k: `tokens_per_s_*`, `mfu_*` = FLOPs that the real tokens need / (seconds · peak). A forward
             pass takes 2 FLOPs a weight and token (the embedding's table none, the head's one), attention
             2·layers·heads·head width a token and token before it; backward twice that. `peak_tflops` is the data
             sheet's for a known name, `matmul_tflops` what a large product reaches here
    memory   `logprob_memory_ratio`: the log-prob step in chunks over whole logits, T = 8,192, V = 151,936
    engine   `publish_s`, `stall_s`: from the trainer's weights to the embedded engine on the same GPU (publish.py), and
             `decode_tokens_per_s` with 64 requests running
    modes    `async_over_sync`: seconds of synchronous training over asynchronous, trainer and engine on the same GPU
             (async_vs_sync.py without its waiting tools), a quarter of the layers and the tokenizer's small vocabulary:
             each of the two runs ends with a checkpoint

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentrl.conductor.trainer import has_gpu
from agentrl.testing.tiny import make_tiny_model

SHARED = Path("/dev/shm")
LIMITS = {"train": 150.0, "memory": 60.0, "engine": 110.0, "modes": 150.0}
"""Seconds a part may take; 470 in all."""
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "B200": 2250.0}
"""bfloat16 without sparsity, NVIDIA's data sheets (SXM forms)."""


class Size(NamedTuple):
    """A model's shape, and how much is measured with it."""

    layers: int = 28
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 8
    width: int = 128
    intermediate: int = 6144
    vocabulary: int = 151936
    sequences: int = 64
    budget: int = 8192
    rounds: int = 3
    requests: int = 64
    new_tokens: int = 256
    steps: int = 8

    @property
    def weights(self) -> int:
        """Matrices that a token is multiplied with, the output head among them."""
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    def flops(self, lengths: list[int]) -> float:
        """Forwards and backwards over whole sequences."""
        pairs = sum(n * n / 2 for n in lengths)
        forward = 2.0 * self.weights * sum(lengths) + 4.0 * self.layers * self.heads * self.width * pairs
        return 3.0 * forward


BIG = Size()
TOY = Size(2, 32, 4, 2, 8, 64, 512, sequences=8, budget=2048, rounds=2, requests=4, new_tokens=16, steps=3)


def make_model(folder: Path, size: Size, *, whole_vocabulary: bool = True) -> Path:
    """Random weights in the shape of a Qwen3, with the tiny model's tokenizer; its vocabulary, or the size's."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(folder, family="qwen3", max_length=8192)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.width,
        "intermediate_size": size.intermediate,
        "vocab_size": size.vocabulary if whole_vocabulary else config["vocab_size"],
        "dtype": "bfloat16",
    }
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(size: Size, work: Path) -> dict[str, Any]:
    """Packed against padded."""
    import numpy as np
    import torch

    from examples.benchmarks import packing

    rng = np.random.default_rng(0)
    lengths = [min(n, size.budget) for n in packing.draw_lengths(rng, size.sequences)]
    sides = packing.Sides(make_model(work / "model", size), packing.make_groups(lengths, rng), size.budget, "bf16")
    best = {side: min(sides.step(side)[1] for _ in range(size.rounds)) for side in sides.passes}
    matmul = matmul_tflops()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = next((tflops for known, tflops in PEAK_TFLOPS.items() if known in name), matmul)
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        "device": name,
        "parameters": size.weights,
        "peak_tflops": round(peak, 1),
        "matmul_tflops": round(matmul, 1),
        **{f"tokens_per_s_{side}": round(sides.tokens / seconds) for side, seconds in best.items()},
        **{f"mfu_{side}": round(size.flops(lengths) / seconds / (peak * 1e12), 4) for side, seconds in best.items()},
        "packed_over_sorted": round(best["sorted"] / best["packed"], 3),
        "packed_over_padded": round(best["padded"] / best["packed"], 3),
        "train_peak_gib": round(memory, 1),
    }


def matmul_tflops() -> float:
    """What a large bfloat16 product reaches."""
    import torch

    n, device = (8192, "cuda") if torch.cuda.is_available() else (512, "cpu")
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    spent = []
    for _ in range(5):
        begun = time.perf_counter()
        float((a @ b)[0, 0])  # waits for it
        spent.append(time.perf_counter() - begun)
    return 2.0 * n**3 / min(spent) / 1e12


def memory(size: Size, work: Path) -> dict[str, Any]:
    """The log-prob step's memory."""
    from examples.benchmarks import logprob_memory

    command = [sys.executable, logprob_memory.__file__, "--tokens", str(size.budget)]
    command += ["--vocabulary", str(size.vocabulary), "--hidden", str(size.hidden)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    told = json.loads(done.stdout.splitlines()[-1])
    return {
        "logprob_chunked_mib": told["chunked_mib"],
        "logprob_full_mib": told["full_mib"],
        "logprob_memory_ratio": told["ratio"],
    }


def engine(size: Size, work: Path) -> dict[str, Any]:
    """Publishing to the embedded engine, and its decoding."""
    from agentrl.engine.options import EngineOptions
    from agentrl.train.options import TrainOptions
    from examples.benchmarks import publish

    folder = make_model(work / "model", size)
    options = EngineOptions(dtype="bfloat16", context_length=1024, max_running=size.requests)
    told = asyncio.run(publish.measure(folder, work, size.rounds, TrainOptions(dtype="bf16"), options))
    rate = asyncio.run(decode(folder, work, size))
    return {key: told[key] for key in ("publish_s", "stall_s", "write_s")} | {"decode_tokens_per_s": round(rate)}


async def decode(folder: Path, work: Path, size: Size) -> float:
    """New tokens a second, all requests at once; the first round warms up."""
    from agentrl.engine.options import EngineOptions
    from agentrl.engine.server import start_engine
    from agentrl.types import Version
    from examples.benchmarks import publish

    options = EngineOptions(dtype="bfloat16", context_length=1024, max_running=size.requests)
    server = start_engine(options, folder, Version(1, 0), work / "decode.log")
    try:
        await server.wait_ready()
        client = server.client()
        seconds = 0.0
        for turn in range(2):
            begun = time.perf_counter()
            asked = [publish.ask(f"{turn}-{i}", size.new_tokens, 1.0) for i in range(size.requests)]
            made = await asyncio.gather(*(client.generate(request) for request in asked))
            seconds = time.perf_counter() - begun
        await client.close()
        return sum(len(completion.tokens) for completion in made) / seconds
    finally:
        await server.stop()


def modes(size: Size, work: Path) -> dict[str, Any]:
    """Asynchronous against synchronous."""
    from examples.benchmarks import async_vs_sync

    model = make_model(work / "model", size._replace(layers=max(1, size.layers // 4)), whole_vocabulary=False)
    path = work / "run.toml"
    agent = f'[agent]\npath = "{Path(async_vs_sync.__file__).resolve()}:Talker"\n'
    path.write_text(async_vs_sync.CONFIG.replace("MODEL", str(model)).replace("DIR", str(work)) + agent)
    common = [f"train.steps={size.steps}", 'train.dtype="bf16"', 'engine.dtype="bfloat16"', "monitor.page=false"]
    found = {
        "async": async_vs_sync.trained(path, "async", common),
        "sync": async_vs_sync.trained(path, "sync", [*common, "rollout.staleness=0"]),
    }
    rates = {f"{name}_tokens_per_s": round(run["trained_tokens"] / run["seconds"]) for name, run in found.items()}
    return {"async_over_sync": round(found["sync"]["seconds"] / found["async"]["seconds"], 3), **rates}


PARTS = {"train": train, "memory": memory, "engine": engine, "modes": modes}


def run_part(name: str, toy: bool) -> dict[str, Any]:
    """In a process of its own; what went wrong is in the result."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, *(["--toy"] if toy else [])]
    limit = None if toy else LIMITS[name]  # which are for time that is paid
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {f"{name}_error": f"not done within {limit:g} s"}
    if done.returncode:
        return {f"{name}_error": (done.stderr.strip() or done.stdout.strip())[-600:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {json.dumps(found)} in {time.monotonic() - begun:.0f} s", flush=True)
    return found


def main() -> int:
    """Measure what can be measured and print it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        from agentrl.train.__main__ import prepare_environment

        prepare_environment()
        with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as scratch:
            found = PARTS[options.part](TOY if options.toy else BIG, Path(scratch))
        print(json.dumps(found))
        return 0
    if not options.toy and not has_gpu():
        print("there is no GPU on this machine: nothing is measured")
        print(json.dumps({"gpu": False}))
        return 0
    begun = time.monotonic()
    result: dict[str, Any] = {"gpu": has_gpu(), "toy": options.toy}
    for name in options.parts:
        result |= run_part(name, options.toy)
    result["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(result))
    return 1 if any(key.endswith("_error") for key in result) else 0


if __name__ == "__main__":
    sys.exit(main())
