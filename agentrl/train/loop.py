"""The training loop. Step n takes the n-th batch, trains on it, and makes version n of the weights.

    take → plan → fetch → pack (credit) → proximal → advantages → train → weights → metrics → checkpoint

Every rank runs it. Rank 0 speaks with the conductor and tells the others; each fetches the groups it needs by itself.
A step whose loss or gradients are not finite, or that has no token to train, changes no weight: it is counted, its
version has the weights of the one before, and it is not made a checkpoint: one that was due is made after the next
step, and at the end of the run it is the step before that is saved, whose weights these are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import orjson
import torch

from agentrl.errors import RunError
from agentrl.train import batch as translate
from agentrl.train import experience, manifest, persist, report
from agentrl.train.algorithm import Algorithm
from agentrl.train.batch import Batch
from agentrl.train.broadcast import Broadcaster
from agentrl.train.deepspeed import Backend, StepResult
from agentrl.train.feed import Feed, Over, Phases
from agentrl.train.manifest import Manifest
from agentrl.train.options import TrainerJob
from agentrl.train.plan import Plan, make_plan
from agentrl.train.recorder import Recorder
from agentrl.train.schedule import learning_rate
from agentrl.train.state import State
from agentrl.train.stop import Stop
from agentrl.types import Group, Version

MAX_SKIPPED = 20
"""Steps in a row without a finite gradient after which the run ends; fp16 needs a few to find its loss scale."""
TOLD_TO_STOP = "the trainer was told to stop"


class Trainer:
    """One rank of a run."""

    def __init__(
        self, job: TrainerJob, backend: Backend, algorithm: Algorithm, feed: Feed, phases: Phases, stop: Stop
    ) -> None:
        self.job, self.options = job, job.train
        self.backend, self.algorithm = backend, algorithm
        self.feed, self.phases, self.stop = feed, phases, stop
        self.state = State()
        self.recorder = Recorder()
        self.lead = backend.rank == 0
        grouped = job.hand_over and self.options.weights == "group"
        self.sender = Broadcaster(backend, feed) if grouped else None

    def run(self) -> str:
        """Train until the steps are done, the feed is over or a stop is asked for; returns which it was."""
        self.resume()
        state, phases = self.state, self.phases
        # Imitation asks once more at the end: for the held-out loss of the last weights.
        while state.step < self.options.steps or self.algorithm.demonstrations:
            step, started = state.step + 1, time.perf_counter()
            with phases.phase("take", step):
                taken = self.take(step)
            if isinstance(taken, Over):
                return self.finish(taken.reason)
            plan = self.plan(taken)
            with phases.phase("fetch", step):
                groups = self.fetch(taken, plan)
            with phases.phase("pack", step):
                minibatches = self.pack(taken, plan, groups)
            if not taken.learn:
                with phases.phase("evaluate", step):
                    self.evaluate([batch for batches in minibatches for batch in batches])
                continue
            with phases.phase("proximal", step):
                minibatches = experience.predict(self.backend, self.algorithm, minibatches)
            minibatches = experience.estimate(self.backend, self.algorithm, minibatches, len(taken.groups))
            with phases.phase("train", step):
                results = [self.train(batches, step) for batches in minibatches]
            changed = self.count(step, taken, results)
            with phases.phase("weights", step):
                self.hand_over()
            self.report(taken, plan, minibatches, results, time.perf_counter() - started)
            if changed and state.due(self.options.checkpoint_every):
                self.save(state)
        return self.finish(f"all {self.options.steps} steps are done")

    @property
    def version(self) -> Version:
        """The label of the present weights."""
        return self.state.version(self.job.incarnation)

    # ---- the parts, in the order of the loop -------------------------------------------------------------------------

    def resume(self) -> None:
        """Take over the checkpoint, where there is one to continue from, and hand its weights to the engines."""
        if self.job.resume is not None:
            with self.phases.phase("resume", 0):
                self.state = persist.restore(self.backend, self.job.resume)
                self.hand_over(resumed=True)

    def take(self, step: int) -> Manifest | Over:
        """The next batch, the same on every rank; asks until there is one."""
        while True:
            answer = b""
            if self.lead:
                with self.stop.interruptible():
                    found = self.feed.take(step, self.version)
                    answer = orjson.dumps({"over": found.reason}) if isinstance(found, Over) else found or b""
                if self.stop.asked:
                    self.feed.close()
                    answer = orjson.dumps({"over": TOLD_TO_STOP})
            # Also without an answer: the other ranks' wait must not grow into the collectives' timeout.
            answer = self.backend.broadcast(answer)
            if answer:
                data = orjson.loads(answer)
                return Over(data["over"]) if "over" in data else self._checked(manifest.parse(data), step)

    def _checked(self, taken: Manifest, step: int) -> Manifest:
        if taken.step != step or taken.version != self.version:
            raise RunError(
                f"asked for the batch of step {step} at version {self.version}, got that of step {taken.step} at "
                f"{taken.version}: this conductor feeds another trainer"
            )
        return taken

    def plan(self, taken: Manifest) -> Plan:
        """Which rank packs what; the same on every rank."""
        return make_plan(
            taken,
            ranks=self.backend.world,
            minibatches=self.options.minibatches,
            budget=self.options.tokens_per_microbatch,
            longest=self.backend.longest,
        )

    def fetch(self, taken: Manifest, plan: Plan) -> dict[int, Group]:
        """The groups that this rank's passes need, by place in the manifest."""
        rank = self.backend.rank
        places = sorted({item.group for minibatch in plan.passes for p in minibatch[rank] for item in p})
        found = self.feed.groups(taken.take, [taken.groups[place].id for place in places])
        return {place: found[taken.groups[place].id] for place in places}

    def pack(self, taken: Manifest, plan: Plan, groups: dict[int, Group]) -> list[list[Batch]]:
        """Credit, then tensors: this rank's passes of each minibatch."""
        credits = {place: self.algorithm.credit(group) for place, group in enumerate(taken.groups)}
        version, imitate, longest = taken.version.number, self.algorithm.demonstrations, self.backend.longest
        return [
            [
                translate.pack(items, groups, credits, version=version, demonstrations=imitate, longest=longest)
                for items in minibatch[self.backend.rank]
            ]
            for minibatch in plan.passes
        ]

    def evaluate(self, batches: Sequence[Batch]) -> None:
        """Report the mean negative log-likelihood of held-out tokens; nothing is learned from them."""
        found = self.backend.logprobs(batches)
        nll = [-(logprobs[batch.mask].double().sum()) for logprobs, batch in zip(found, batches, strict=True)]
        sums = torch.stack([torch.stack(nll).sum(), torch.stack([b.mask.sum() for b in batches]).sum().double()])
        total, tokens = self.backend.sum(sums).tolist()
        if self.lead:
            self.feed.metrics(
                self.state.step, self.version, {"eval/loss": total / max(tokens, 1), "eval/tokens": tokens}
            )

    def train(self, batches: Sequence[Batch], step: int) -> StepResult | None:
        """One optimizer step; None where no rank has a token to train."""
        if float(self.backend.sum(torch.stack([b.mask.sum().double() for b in batches]).sum())) == 0:
            return None
        rate, entropy = learning_rate(self.options, step), self.algorithm.entropy_gradient
        loss = self.recorder.watch(self.algorithm.loss, batches) if self.job.trace else self.algorithm.loss
        return self.backend.step(batches, loss, lr=rate, entropy_gradient=entropy)

    def count(self, step: int, taken: Manifest, results: Sequence[StepResult | None]) -> bool:
        """Count the step; whether it changed the weights and skipped nothing. RunError after too many skipped."""
        state = self.state
        applied = sum(r is not None and r.applied for r in results)
        skipped = sum(r is not None and not r.applied for r in results)
        state.trained(step, taken.take, taken.cursor, applied=applied, skipped=skipped)
        if state.skipped_in_a_row >= MAX_SKIPPED:
            raise RunError(
                f"{MAX_SKIPPED} steps in a row had a loss or gradient that is not finite, up to step {state.step}: "
                f"lower train.lr (now {self.options.lr}) or use bf16 or fp32, then resume from the last checkpoint"
            )
        return applied > 0 and not skipped

    def hand_over(self, *, resumed: bool = False) -> None:
        """Write the weights and tell the conductor, which publishes them and removes the folder when it is done.

        Over a group they are sent before: the folder is for engines that come later, or did not get all.
        """
        if not self.job.hand_over:
            return
        started = time.perf_counter()
        target = self.job.weights_dir / str(self.version)
        if self.sender is not None and not resumed:
            self.sender.send(self.state.step, self.version, target)
        persist.write_weights(self.backend, self.job.model_dir, target)
        if self.lead:
            self.feed.weights(self.state.step, self.version, str(target), time.perf_counter() - started)

    def report(
        self,
        taken: Manifest,
        plan: Plan,
        minibatches: Sequence[Sequence[Batch]],
        results: Sequence[StepResult | None],
        seconds: float,
    ) -> None:
        """Send the step's metrics."""
        counts = self.backend.sum(report.local_counts(minibatches)).tolist()
        several, sequences = self.backend.sum(report.version_metrics(minibatches)).tolist()
        spent = self.phases.drain()
        metrics = {
            **report.rollout_metrics(taken),
            **report.train_metrics([r for r in results if r is not None]),
            **dict(zip(report.COUNTS, counts, strict=True)),
            "staleness/several_versions_share": several / max(sequences, 1.0),
            "lr": learning_rate(self.options, self.state.step),
            "batch/fill": plan.fill,
            "batch/passes": sum(len(minibatch[0]) for minibatch in plan.passes),
            "batch/overlong": plan.overlong,
            "skipped_steps": self.state.skipped,
            **{f"seconds/{name}": value for name, value in spent.items()},
            "seconds/step": seconds,
            "tokens_per_second": counts[0] / seconds,
        }
        if self.lead:
            finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
            self.feed.metrics(self.state.step, self.version, finite)
        if self.job.trace:
            self.feed.trace(self.state.step, self.job.incarnation, self.backend.rank, self.recorder.encode())

    def save(self, state: State) -> None:
        """Write a checkpoint of the present weights under `state`, and tell the conductor."""
        with self.phases.phase("checkpoint", state.step):
            path = persist.save(self.backend, self.job, state, self.feed)
        self.state.saved = state.step
        if self.lead:
            version = state.version(self.job.incarnation)
            self.feed.checkpoint(state.step, version, str(path), state.take, state.cursor)

    def finish(self, reason: str) -> str:
        """Save what is not saved yet, unless the process is to end at once."""
        if reason != TOLD_TO_STOP and (unsaved := self.state.unsaved()) is not None:
            self.save(unsaved)
        return reason
