"""Memory of the log-prob step: in chunks, as the trainer does it, against whole logits.

    python examples/benchmarks/logprob_memory.py [--tokens 2048] [--vocabulary 65536]

From hidden states to log-probs and entropies of the chosen tokens, and back to the gradients of hidden states and
output head. Each side is a process of its own and reports how much its peak resident memory grew over what it had when
inputs and weights were there (on a GPU: the allocator's peak). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from agentrl.train.model import Head


def chunked(head: Head, hidden: Tensor, tokens: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """The trainer's way."""
    found: tuple[Tensor, Tensor] = head(hidden, tokens, heat)
    return found


def whole(head: Head, hidden: Tensor, tokens: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook's."""
    logits = head(hidden).float() / heat[:, None]
    logprobs = logits.log_softmax(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1), entropy.detach()


SIDES = {"chunked": chunked, "full": whole}


def measure(side: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """One side's step in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = torch.randn(tokens, width, device=device).requires_grad_()
    head = Head(width, vocabulary, bias=False, device=device)
    chosen = torch.randint(0, vocabulary, (tokens,), device=device)
    heat = torch.ones(tokens, device=device)
    # Whatever the libraries set up at their first use is no part of the step.
    small = head(hidden[:2].detach(), chosen[:2], heat[:2])
    torch.autograd.backward(small[0].sum())
    head.zero_grad(set_to_none=True)
    before, begun = peak(device), time.process_time()
    logprobs, entropy = SIDES[side](head, hidden, chosen, heat)
    torch.autograd.backward(logprobs.sum())
    spent = time.process_time() - begun
    assert hidden.grad is not None
    return {
        "bytes": peak(device) - before,
        "cpu_seconds": spent,
        "logprobs": float(logprobs.sum()),
        "entropy": float(entropy.sum()),
        "gradient": float(hidden.grad.abs().sum()),
    }


def peak(device: torch.device) -> int:
    """The most memory that was in use until now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure both sides and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.tokens, options.vocabulary, options.hidden)
    if options.side:
        print(json.dumps(measure(options.side, *sizes)))
        return
    found: dict[str, Any] = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--tokens", str(sizes[0])]
        command += ["--vocabulary", str(sizes[1]), "--hidden", str(sizes[2])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[side] = json.loads(done.stdout.splitlines()[-1])
        print(side, json.dumps(found[side]))
    ours, theirs = found["chunked"], found["full"]
    for name in ("logprobs", "entropy", "gradient"):
        assert abs(ours[name] - theirs[name]) <= 1e-4 * abs(theirs[name]), name
    result = {
        "tokens": sizes[0],
        "vocabulary": sizes[1],
        "chunked_mib": round(ours["bytes"] / 2**20),
        "full_mib": round(theirs["bytes"] / 2**20),
        "cpu_seconds_ratio": round(ours["cpu_seconds"] / theirs["cpu_seconds"], 3),
        "ratio": round(ours["bytes"] / theirs["bytes"], 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
