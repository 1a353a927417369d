"""The learning rate of each step."""

from __future__ import annotations

import math

from agentrl.train.options import TrainOptions


def learning_rate(options: TrainOptions, step: int) -> float:
    """The rate of step 1, 2, …: rising linearly over the warm-up, then by the schedule, 0 just after the last step."""
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    done = (step - 1 - options.warmup_steps) / max(options.steps - options.warmup_steps, 1)
    return options.lr * (1 - done if options.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)
