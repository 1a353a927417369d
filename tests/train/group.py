"""Process groups of tests/train/worker.py, and what they found."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent.parent
SECONDS = 900
"""For a group of each size, side by side; some twenty of one core each where nothing else runs."""


class Outcome(NamedTuple):
    """The folder in which the groups worked, and what each (world, rank) found."""

    work: Path
    results: dict[tuple[int, int], dict[str, Any]]


def run_groups(work: Path, model: Path, checks: Mapping[int, Sequence[str]]) -> Outcome:
    """Run the named checks in a group of each size, all at once."""
    with contextlib.ExitStack() as stack:
        processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        for world, names in checks.items():
            store = stack.enter_context(meeting_place(world))
            for rank, process in enumerate(_start(world, work, model, names, store)):
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes[world, rank] = process
        _await(processes, work)
    results = {
        (world, rank): json.loads((work / f"result-{world}-{rank}.json").read_text()) for world, rank in processes
    }
    return Outcome(work, results)


@contextlib.contextmanager
def meeting_place(world: int) -> Iterator[dict[str, str]]:
    """The environment in which so many ranks meet, at a store that is kept here.

    As torchrun does: no port is chosen before somebody listens at it, and no rank depends on how long another lives.
    """
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    here = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    yield {**here, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def _await(processes: Mapping[tuple[int, int], subprocess.Popen[bytes]], work: Path) -> None:
    """Until all have ended well. The first that fails is told at once: the others of its group would wait for it."""
    until = time.monotonic() + SECONDS
    left = dict(processes)
    while left:
        ended = {place: code for place, process in left.items() if (code := process.poll()) is not None}
        assert not any(ended.values()), "\n".join(
            f"rank {rank} of {world} ended with {code}: {(work / f'log-{world}-{rank}').read_text()[-3000:]}"
            for (world, rank), code in ended.items()
        )
        left = {place: process for place, process in left.items() if place not in ended}
        assert time.monotonic() < until, f"not within {SECONDS} s: {sorted(left)}"
        time.sleep(0.05)


def _start(
    world: int, work: Path, model: Path, checks: Sequence[str], store: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    job = work / f"job-{world}.json"
    job.write_text(json.dumps({"model": str(model), "work": str(work), "checks": list(checks)}))
    common = {**store, "OMP_NUM_THREADS": "1"}
    for rank in range(world):
        with (work / f"log-{world}-{rank}").open("wb") as log:
            yield subprocess.Popen(
                [sys.executable, "-m", "tests.train.worker", str(job)],
                cwd=ROOT,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )


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
