"""Process groups of tests/train/worker.py, and what they found."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent.parent
SECONDS = 500
"""For a group of each size, side by side; some twenty of one core each where nothing else runs."""


class Outcome(NamedTuple):
    """The folder in which the groups worked, and what each (world, rank) found."""

    work: Path
    results: dict[tuple[int, int], dict[str, Any]]


def run_groups(work: Path, model: Path, checks: Mapping[int, Sequence[str]]) -> Outcome:
    """Run the named checks in a group of each size, all at once."""
    started = {world: _start(world, work, model, names) for world, names in checks.items()}
    results = {}
    try:
        for world, processes in started.items():
            for rank, process in enumerate(processes):
                code = process.wait(SECONDS)
                assert code == 0, (work / f"log-{world}-{rank}").read_text()[-3000:]
                results[world, rank] = json.loads((work / f"result-{world}-{rank}.json").read_text())
    finally:
        for process in itertools.chain(*started.values()):
            process.kill()
            process.wait()
    return Outcome(work, results)


def _start(world: int, work: Path, model: Path, checks: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    job = work / f"job-{world}.json"
    job.write_text(json.dumps({"model": str(model), "work": str(work), "checks": list(checks)}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        with (work / f"log-{world}-{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.train.worker", str(job)],
                    cwd=ROOT,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def check_export(folder: Path, probe: Path) -> None:
    """The folder is a whole model of transformers', with the log-probs that the trainer had."""
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o644}
    assert all(t.numel() > 0 for t in load_file(folder / "model.safetensors").values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    told = load_file(probe)
    for start, end in itertools.pairwise(told["seqlens"].tolist()):
        tokens = told["tokens"][start:end]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        expected = logits.log_softmax(1).gather(1, tokens[1:, None]).squeeze(1)
        mask = told["mask"][start + 1 : end]
        torch.testing.assert_close(told["logprobs"][start + 1 : end][mask], expected[mask], atol=1e-4, rtol=1e-4)


def distance(outcome: Outcome, one: str, other: str) -> float:
    """The largest difference between two sets of weights that the groups left."""
    a, b = (load_file(outcome.work / f"weights-{name}.safetensors") for name in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)
