"""One rank of the trainer: `torchrun --nproc-per-node N -m agentrl.train trainer.json`, or without torchrun for one.

The feed's token comes in $AGENTRL_TOKEN. Exit code 0 when the run is over, 1 with the cause on stderr.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from pathlib import Path

from pydantic import ValidationError

from agentrl.child import RANK_LOGS_VARIABLE, die_with_parent
from agentrl.errors import AgentRLError, ConfigError
from agentrl.process import keep_freed_memory
from agentrl.train.bound import say_failed
from agentrl.train.feed import Phases
from agentrl.train.options import TrainerJob


def read_job(path: Path) -> TrainerJob:
    """The job in `path`; ConfigError where it cannot be used. Before torch is imported, so that it fails at once."""
    try:
        job = TrainerJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"trainer job {path}: {error}") from error
    for what, folder in (("model", job.model_dir), ("reference", job.algorithm.reference)):
        if folder is not None and not (folder / "config.json").is_file():
            raise ConfigError(f"{what} folder {folder} has no config.json: give a folder in Hugging Face form")
    return job


def run(job: TrainerJob, token: str, phases: Phases) -> str:
    """Train; returns why it ended."""
    # Imported late: the environment set above decides which accelerator DeepSpeed sees.
    import torch

    from agentrl.train import algorithm, export
    from agentrl.train.deepspeed import Backend
    from agentrl.train.feed import Feed
    from agentrl.train.loop import Trainer
    from agentrl.train.stop import Stop

    if job.train.offload_optimizer and not torch.cuda.is_available():
        raise ConfigError("train.offload_optimizer has no effect without a GPU: all is in the host's memory: remove it")
    if not torch.cuda.is_available():
        keep_freed_memory()
    stop = Stop()
    stop.listen()
    chosen = algorithm.load(job.algorithm)
    with phases.phase("load", 0):
        backend = Backend(
            job.model_dir,
            job.train,
            critic_rate=job.algorithm.value_rate if chosen.critic else None,
            reference=(job.algorithm.reference or job.model_dir) if chosen.reference else None,
            seed=job.seed,
        )
        export.check_names(job.model_dir, backend.shapes)
    gc.freeze()  # what is loaded stays: a search for garbage cycles would walk all of it, in vain
    feed = Feed(job.feed_url, token)
    reason = Trainer(job, backend, chosen, feed, phases, stop).run()
    phases.close()
    backend.close()
    return reason


def prepare_imports() -> None:
    """What must be set before DeepSpeed is imported, whichever rank this is."""
    # Nothing here is compiled, but DeepSpeed decorates an optimizer that we do not use: four seconds of imports.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"


def prepare_environment() -> None:
    """What must be set before torch and DeepSpeed are imported."""
    prepare_imports()
    if "RANK" not in os.environ:  # not under torchrun: a group of one
        # Port 0 is any free one: nobody else has to know it.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)


def own_log() -> None:
    """Where torchrun's ranks share its output and $AGENTRL_RANK_LOGS names a folder: a log of this rank's own in it."""
    folder, rank = os.environ.get(RANK_LOGS_VARIABLE), os.environ.get("RANK")
    if folder is not None and rank is not None:
        file = os.open(Path(folder) / f"trainer-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def main() -> int:
    """The exit code."""
    die_with_parent()
    own_log()
    try:
        job, token = read_job(Path(sys.argv[1])), os.environ.get("AGENTRL_TOKEN", "")
        if not token:
            raise ConfigError("$AGENTRL_TOKEN is not set: the conductor passes the feed's token in it")
    except ConfigError as error:
        say_failed(type(error).__name__, str(error))
        print(f"agentrl.train: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    # From here on: a rank that hangs or is stopped while torch loads is missed too.
    phases = Phases(job.feed_url, token, int(os.environ.get("RANK", "0")))
    prepare_environment()
    # DeepSpeed calls collectives by names that torch has deprecated, three lines of warning each.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        # `record` puts the cause into torchrun's own summary, which is the last thing in the log.
        reason = record(run)(job, token, phases)
    except BaseException as error:
        say_failed(type(error).__name__, str(error))
        traceback.print_exc()
        if isinstance(error, AgentRLError):
            print(f"agentrl.train: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"agentrl.train: rank {os.environ['RANK']} ended: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads can abort the interpreter's shutdown after a clean run; everything is closed by now.
    os._exit(code)
