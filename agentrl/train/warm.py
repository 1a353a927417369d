"""A rank that has imported what takes seconds and waits to be told which one it is: `-m agentrl.train.warm FIFO`.

One line of JSON comes through the pipe, an `Order`; from there on it is `python -m agentrl.train`. Nothing is known of
a run before, so that a spare can wait for any.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agentrl.child import die_with_parent


class Order(BaseModel):
    """Which rank it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    """The path of `trainer.json`."""
    env: dict[str, str]
    """What `python -m agentrl.train` finds in its environment."""
    log: str
    """The file that its output goes to from here on."""


def main() -> int:
    """The exit code of the rank."""
    die_with_parent()
    with Path(sys.argv[1]).open("rb") as orders:
        from agentrl.train.__main__ import main as train
        from agentrl.train.__main__ import prepare_imports

        prepare_imports()
        from agentrl.train import algorithm, deepspeed, export, loop, stop  # noqa: F401

        line = orders.readline()
    order = Order.model_validate_json(line)
    os.environ.update(order.env)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.argv[1] = order.job
    return train()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as agentrl.train itself ends
