"""What leaves the trainer: weights for the engines, checkpoints for itself. Collective, so a failure is everyone's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from agentrl.errors import RunError
from agentrl.train import checkpoint, export
from agentrl.train.deepspeed import Backend
from agentrl.train.feed import Feed
from agentrl.train.options import TrainerJob
from agentrl.train.state import State


def write_weights(backend: Backend, base: Path, target: Path) -> None:
    """The present weights as a Hugging Face folder at `target`, there whole or not at all."""
    weights = backend.weights()
    if backend.rank == 0:
        together(backend, target, lambda: export.write_folder(target, base, backend.shapes, weights))
    else:
        for _ in weights:
            pass
        together(backend, target, _nothing)


def save(backend: Backend, job: TrainerJob, state: State, feed: Feed | None = None) -> Path:
    """A checkpoint of `state`; returns its folder. Every rank writes its part, rank 0 the rest and the commit.

    The conductor is asked first: a group that was given up for lost must not put its checkpoint in another's place.
    Without a `feed` nobody is there to be asked.
    """
    lead = backend.rank == 0
    apart = feed is not None and job.commit == "conductor"
    first = os.environ.get("LOCAL_RANK", "0") == "0" if apart else lead  # of those who share the folder
    source = checkpoint.aside(job.checkpoints_dir, state.step)
    together(backend, source, (lambda: _fresh(source)) if first else _nothing)
    write_weights(backend, job.model_dir, source / "model")
    tensors, common = backend.state()
    part = source / checkpoint.state_file(backend.rank, backend.world)
    together(backend, part, lambda: save_file(tensors, part))
    content = {
        "version": str(state.version(job.incarnation)),
        "take": state.take,
        "cursor": state.cursor,
        "world": backend.world,
        "state": common,
    }

    version, keep = state.version(job.incarnation), job.train.keep_checkpoints
    whole = checkpoint.folder(job.checkpoints_dir, state.step)

    def commit() -> None:
        nonlocal whole
        if feed is not None and apart:
            whole = Path(feed.commit(state.step, version, content, keep))
            return
        if feed is not None:
            feed.permit(state.step, version)
        checkpoint.commit(job.checkpoints_dir, state.step, content, keep=keep)

    together(backend, source, commit if lead else _nothing)
    if apart and first:
        shutil.rmtree(source, ignore_errors=True)
    return whole


def restore(backend: Backend, folder: Path) -> State:
    """Take over the checkpoint in `folder`, whatever the number of ranks it was saved by."""
    found = checkpoint.read(folder, thorough=backend.rank == 0)
    backend.restore(found.path, dict(found.state), found.world)
    return State(step=found.number, take=found.take, cursor=dict(found.cursor), saved=found.number)


def together(backend: Backend, path: Path, write: Callable[[], object]) -> None:
    """Run `write` and raise on every rank where it failed on any."""
    failure: OSError | None = None
    try:
        write()
    except OSError as error:
        failure = error
    except SafetensorError as error:
        failure = OSError(str(error))
    everywhere = backend.sum(torch.tensor(float(failure is not None))).item() == 0
    if failure is not None:
        raise checkpoint.disk_error(path, failure) from failure
    if not everywhere:
        raise RunError(f"another rank could not write below {path.parent}: its log has the cause")


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _nothing() -> None:
    return None
