"""What is checked inside a process group: `python -m tests.train.worker JOB.json`, one process a rank.

Each check leaves what it found in `result-<world>.json`; tests/train/test_deepspeed.py asserts on it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.train.__main__ import prepare_environment

prepare_environment()

import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # noqa: E402

from agentrl.errors import AgentRLError  # noqa: E402
from agentrl.train import algorithm, experience, persist  # noqa: E402
from agentrl.train.adapt import choose_trained, sources  # noqa: E402
from agentrl.train.algorithm import Algorithm, Metrics, Output  # noqa: E402
from agentrl.train.batch import Batch, pack  # noqa: E402
from agentrl.train.broadcast import Broadcaster  # noqa: E402
from agentrl.train.deepspeed import Backend  # noqa: E402
from agentrl.train.export import buckets  # noqa: E402
from agentrl.train.feed import Feed  # noqa: E402
from agentrl.train.functional import Denominators, token_weights  # noqa: E402
from agentrl.train.model import load_policy  # noqa: E402
from agentrl.train.options import AlgorithmOptions, LoraOptions, TrainerJob, TrainOptions  # noqa: E402
from agentrl.train.plan import Item, make_plan  # noqa: E402
from agentrl.train.state import State  # noqa: E402
from agentrl.types import Context, Group, Sampled, Segment, Trajectory, Version  # noqa: E402
from tests.train.drawing import describe, draw, episode, random_group  # noqa: E402
from tests.train.inside import await_path, cut_error, held_back, leave, refusals  # noqa: E402
from tests.train.receiver import Receiver  # noqa: E402

BUDGETS = {1: 1 << 20, 2: 90}
"""One rank packs everything in one pass; two ranks cut it finely, into passes of which the last are dummies."""

SEED = 3
PARTLY: dict[str, dict[str, Any]] = {
    "frozen": {"frozen": ("model.embed_tokens.weight", "model.layers.0.*")},
    "lora": {"lora": LoraOptions(rank=2, alpha=8.0), "weight_decay": 0.0},
    "offloaded": {"offload_optimizer": True},
}
"""What may be trained instead of everything, and where it may be kept."""


class Alone:
    """Stands in for a backend where the passes of all ranks are in one list."""

    rank, world = 0, 1

    def predict(self, batches: object) -> list[Output]:
        raise AssertionError("no pass is needed")

    def reference(self, batches: object) -> list[Tensor]:
        raise AssertionError("no pass is needed")

    def sum(self, values: Tensor) -> Tensor:
        return values


def passes(world: int, chosen: Algorithm, seed: int, *, split: bool = False) -> list[list[Batch]]:
    """Every rank's passes of a random batch."""
    rng = np.random.default_rng(seed)
    groups = [random_group(i, rng, samples=3, split=split) for i in range(3)]
    taken = describe(groups, 0)
    plan = make_plan(taken, ranks=world, minibatches=1, budget=BUDGETS[world], longest=None)
    credits = {i: chosen.credit(entry) for i, entry in enumerate(taken.groups)}
    return [[pack(p, dict(enumerate(groups)), credits, version=0) for p in rank] for rank in plan.passes[0]]


def batches(rank: int, world: int, chosen: Algorithm, seed: int) -> list[Batch]:
    """This rank's passes of a random batch, advantages and loss weights filled in."""
    ranks = passes(world, chosen, seed)
    flat = experience.estimate(Alone(), chosen, [[b for r in ranks for b in r]], 3)[0]
    start = sum(len(r) for r in ranks[:rank])
    return flat[start : start + len(ranks[rank])]


def whole_weights(backend: Backend, bucket: int = 1 << 28) -> dict[str, Tensor]:
    return {name: tensor.float().cpu().clone() for name, tensor in backend.weights(bucket)}


def plain_adamw(folder: Path, options: TrainOptions, chosen: Algorithm) -> dict[str, Tensor]:
    """The same steps without DeepSpeed, on one rank and one pass."""
    unset_hf_deepspeed_config()
    policy = load_policy(folder, torch.float32)
    choose_trained(policy.model, options, SEED)
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
    )
    for step in range(3):
        optimizer.zero_grad()
        for batch in batches(0, 1, chosen, step):
            loss, _ = chosen.loss(batch, policy(batch))
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm)
        optimizer.step()
    return {name: source.whole().float() for name, source in sources(policy.model).items()}


class Checks:
    def __init__(self, folder: Path, work: Path, rank: int, world: int) -> None:
        self.folder, self.work, self.rank, self.world = folder, work, rank, world
        self.found: dict[str, Any] = {}
        self.options = TrainOptions(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
        self.chosen = algorithm.load(AlgorithmOptions(aggregation="sequence_mean"))

    def job(self, checkpoints: str) -> TrainerJob:
        return TrainerJob(
            run="worker",
            train=self.options,
            algorithm=self.chosen.options,
            model_dir=self.folder,
            feed_url="",
            weights_dir=self.work / "weights",
            checkpoints_dir=self.work / checkpoints,
        )

    def run(self, names: Sequence[str]) -> None:
        """`method` or `method:argument`, in the order given."""
        for name in names:
            method, *argument = name.split(":")
            getattr(self, method)(*argument)

    def partly(self, name: str) -> None:
        """Part of the weights, or adapters: as one process with AdamW, resumed exactly, and published whole."""
        options = self.options.model_copy(update=PARTLY[name])
        backend = Backend(self.folder, options, seed=SEED)
        before = whole_weights(backend)
        for seed in (0, 1):
            self.step(backend, seed)
        saved = persist.save(backend, self.job(f"{name}-{self.world}"), State(step=2, take=1))
        self.step(backend, 2)
        after = whole_weights(backend)
        again = Backend(self.folder, options, seed=SEED + 1)
        persist.restore(again, saved)
        self.step(again, 2)
        resumed = whole_weights(again)
        probe = batches(0, 1, self.chosen, 77)[0]
        logprobs = backend.logprobs([probe])[0]
        found = {
            "refused": refusals(again, saved),
            "moved": sorted(n for n in after if not torch.equal(after[n], before[n])),
            "resume_is_exact": all(torch.equal(after[n], resumed[n]) for n in after),
            "trained": sum(backend.state()[1]["sizes"].values()),
        }
        persist.write_weights(backend, self.folder, self.work / f"export-{name}-{self.world}")
        if self.rank == 0:
            plain = plain_adamw(self.folder, options, self.chosen)
            found["distance_to_adamw"] = max(float((after[n] - plain[n]).abs().max()) for n in plain)
            save_file(after, self.work / f"weights-{name}-{self.world}.safetensors")
            self.keep_probe(f"{name}-{self.world}", probe, logprobs)
        self.found[name] = found

    def serve(self, name: str) -> None:
        """An export after three steps, and what the trainer itself would say: the likeliest tokens, one by one."""
        options = self.options.model_copy(update={**PARTLY.get(name, {}), "lr": 5e-3})
        backend = Backend(self.folder, options, seed=SEED)
        for seed in range(3):
            self.step(backend, seed, lr=options.lr)
        persist.write_weights(backend, self.folder, self.work / f"served-{name}")
        rng = np.random.default_rng(0)
        said = []
        for length in (1, 9, 40):
            prompt = rng.integers(0, 200, length).tolist()
            said.append({"prompt": prompt, **self.greedy(backend, prompt, 24)})
        if self.rank == 0:
            (self.work / f"served-{name}.json").write_text(json.dumps(said))

    def greedy(self, backend: Backend, prompt: list[int], count: int) -> dict[str, Any]:
        policy, tokens = backend._policy, torch.tensor(prompt)
        with torch.no_grad():
            for _ in range(count):
                place = torch.arange(len(tokens))
                tokens = torch.cat(
                    [tokens, policy.head(policy.hidden(tokens, place, [len(tokens)], place[-1:])).argmax(1)]
                )
        context = Segment(tokens[: len(prompt)].numpy().astype(np.int32), None, Context())
        chosen = tokens[len(prompt) :].numpy().astype(np.int32)
        sampled = Segment(chosen, np.zeros(count, np.float32), Sampled(Version(1, 0)))
        played = episode([Trajectory((context, sampled))], [(0, 0, len(tokens), 1.0)])
        items = [Item(0, 0, 0, len(tokens))]
        batch = pack(items, {0: Group(0, 0, 0, "greedy", (played,))}, {0: [{0: 1.0}]}, version=0)
        return {"tokens": chosen.tolist(), "logprobs": backend.logprobs([batch])[0][batch.mask].tolist()}

    def keep_probe(self, name: str, probe: Batch, logprobs: Tensor) -> None:
        found = {"tokens": probe.tokens, "logprobs": logprobs, "mask": probe.mask, "seqlens": probe.cu_seqlens}
        save_file(found, self.work / f"probe-{name}.safetensors")

    def critic_and_reference(self) -> None:
        """Episodes in three pieces, spread over ranks: values, penalties and whitening as in one process."""
        chosen = algorithm.load(AlgorithmOptions(name="ppo", kl_coef=0.3, discount=0.9, whiten="group"))
        backend = Backend(self.folder, self.options, critic_rate=chosen.options.value_rate, reference=self.folder)
        for seed in range(3):
            mine = passes(self.world, chosen, seed, split=True)[self.rank]
            ready = experience.estimate(backend, chosen, experience.predict(backend, chosen, [mine]), 3)[0]
            metrics = backend.step(ready, chosen.loss, lr=self.options.lr).metrics
        self.found["critic_metrics"] = metrics
        found = {**whole_weights(backend), **self.critic_head(backend)}
        saved = persist.save(backend, self.job(f"v{self.world}"), State(step=1, take=1))
        again = Backend(self.folder, self.options, critic_rate=chosen.options.value_rate)
        persist.restore(again, saved)
        self.found["critic_restored"] = all(torch.equal(found[n], t) for n, t in self.critic_head(again).items())
        if self.rank == 0:
            save_file(found, self.work / f"weights-critic-{self.world}.safetensors")

    def critic_head(self, backend: Backend) -> dict[str, Tensor]:
        """Its master weights, from all ranks."""
        state, common = backend.state()
        found = {}
        for name in ("value_head.weight", "value_head.bias"):
            part = state[f"{name}/master"]
            spread = torch.zeros(self.world, len(part))
            spread[self.rank] = part
            found[name] = backend.sum(spread).flatten()[: common["sizes"][name]]
        return found

    def step(self, backend: Backend, seed: int, loss: Any = None, lr: float | None = None) -> Any:
        mine = batches(self.rank, self.world, self.chosen, seed)
        return backend.step(mine, loss or self.chosen.loss, lr=self.options.lr if lr is None else lr)

    def train_save_and_resume(self) -> None:
        backend = Backend(self.folder, self.options)
        self.found["passes"] = len(batches(self.rank, self.world, self.chosen, 0))
        self.found["metrics"] = [self.step(backend, seed).metrics for seed in (0, 1)]
        saved = persist.save(backend, self.job(f"c{self.world}"), State(step=2, take=9, cursor={"row": 56}))
        self.step(backend, 2)
        after = whole_weights(backend)
        small = whole_weights(backend, bucket=1)
        self.found["buckets_agree"] = all(torch.equal(after[n], small[n]) for n in after)
        persist.write_weights(backend, self.folder, self.work / f"export-{self.world}")
        probe = batches(0, 1, self.chosen, 77)[0]
        logprobs = backend.logprobs([probe])[0]

        again = Backend(self.folder, self.options)
        state = persist.restore(again, saved)
        self.found["state"] = [state.step, state.take, state.cursor]
        self.step(again, 2)
        resumed = whole_weights(again)
        self.found["resume_is_exact"] = all(torch.equal(after[n], resumed[n]) for n in after)
        if self.rank == 0:
            save_file(after, self.work / f"weights-{self.world}.safetensors")
            self.keep_probe(f"{self.world}", probe, logprobs)
            plain = plain_adamw(self.folder, self.options, self.chosen)
            self.found["distance_to_adamw"] = max(float((after[n] - plain[n]).abs().max()) for n in plain)

    def other_number_of_ranks(self, name: str = "") -> None:
        """Go on from what the other group saved, of two ranks and of one."""
        other = 3 - self.world
        saved = self.work / (f"{name}-{other}" if name else f"c{other}") / "step-0000002"
        await_path(saved)
        options = self.options.model_copy(update=PARTLY[name] if name else {})
        backend = Backend(self.folder, options, seed=SEED + 2)
        persist.restore(backend, saved)
        self.step(backend, 2)
        weights = whole_weights(backend)
        if self.rank == 0:
            label = f"{name}-" if name else ""
            save_file(weights, self.work / f"weights-{label}{other}-then-{self.world}.safetensors")

    def nothing_moves_at_rate_zero(self) -> None:
        backend = Backend(self.folder, self.options)
        before = whole_weights(backend)
        mine = batches(self.rank, self.world, self.chosen, 5)
        with_proximal = [b.with_proximal(p) for b, p in zip(mine, backend.logprobs(mine), strict=True)]
        results = [backend.step(with_proximal, self.chosen.loss, lr=0.0) for _ in range(2)]
        after = whole_weights(backend)
        self.found["rate_zero"] = results[1].metrics
        self.found["rate_zero_unmoved"] = all(torch.equal(before[n], after[n]) for n in before)

    def not_finite(self) -> None:
        backend = Backend(self.folder, self.options)
        self.step(backend, 0)
        before, steps = whole_weights(backend), backend.state()[1]["optimizer_steps"]

        def poisoned(batch: Batch, out: Output) -> tuple[Tensor, Metrics]:
            loss, metrics = self.chosen.loss(batch, out)
            # On one rank only: all must agree to skip.
            return (loss * float("nan") if self.rank == self.world - 1 else loss), metrics

        bad = self.step(backend, 1, poisoned)
        after = whole_weights(backend)
        self.found["nan_applied"] = bad.applied
        self.found["nan_unmoved"] = all(torch.equal(before[n], after[n]) for n in before)
        self.found["nan_steps"] = [steps, backend.state()[1]["optimizer_steps"]]
        self.found["after_nan_applied"] = self.step(backend, 2).applied

    def bf16(self) -> None:
        backend = Backend(self.folder, self.options.model_copy(update={"dtype": "bf16"}))
        result = self.step(backend, 0)
        self.found["bf16_finite"] = bool(np.isfinite(result.loss)) and result.applied
        self.found["bf16_state"] = sorted({str(t.dtype) for n, t in backend.state()[0].items() if n != "rng"})
        self.found["cut"] = cut_error(backend, batches(self.rank, self.world, self.chosen, 0), self.chosen.loss)
        self.found["bf16_weights"] = sorted({str(t.dtype) for _, t in backend.weights()})

    def one_rank_cannot_write(self) -> None:
        backend = Backend(self.folder, self.options)

        def full() -> None:
            raise OSError(28, "No space left on device")

        action: Callable[[], object] = full if self.rank == self.world - 1 else (lambda: None)
        try:
            persist.together(backend, self.work / "somewhere" / "file", action)
        except AgentRLError as error:
            self.found["full_disk"] = str(error)

    def imitation(self) -> None:
        """The negative log-likelihood of demonstrations falls; context stays out of it."""
        chosen = algorithm.load(AlgorithmOptions(name="sft"))
        backend = Backend(self.folder, self.options)
        group = Group(0, 0, 0, "sft", (episode([draw("cccdddcd")], []),))
        batch = pack([Item(0, 0, 0, 8)], {0: group}, {0: [{}]}, version=0, demonstrations=True)
        weights = token_weights(batch.mask, batch.episode_tokens, Denominators(4 * self.world, 1), "token_mean")
        results = [backend.step([batch.with_weights(weights)], chosen.loss, lr=0.02) for _ in range(6)]
        self.found["nll"] = [r.metrics["nll"] for r in results]
        self.found["nll_loss"] = [r.loss for r in results]

    def weights_over_a_group(self) -> None:
        """Many small buckets to one plain receiver; then one that leaves in the middle, and a new group after it."""
        backend = Backend(self.folder, self.options)
        receiver = Receiver()
        sender = Broadcaster(backend, Feed(receiver.url, "token"), bucket_bytes=5000)
        sent = [sender.send(1, Version(1, 1), self.work)]
        if self.rank == 0:
            receiver.done()
        whole = whole_weights(backend)
        self.found["group_buckets"] = receiver.buckets
        self.found["group_same"] = all(torch.equal(t, receiver.tensors.get(n, t + 1)) for n, t in whole.items())
        receiver.leave_after = 1
        with held_back(backend, len(buckets(backend.shapes, 5000)[0]), receiver.left):
            sent.append(sender.send(2, Version(1, 2), self.work))
        receiver.leave_after = None
        sent.append(sender.send(3, Version(1, 3), self.work))
        self.found["group_sent"] = sent

    def fp16(self) -> None:
        """The loss scale is found by skipping; then steps are applied, and the scale survives a checkpoint."""
        options = self.options.model_copy(update={"dtype": "fp16"})
        accelerator = type(get_accelerator())
        accelerator.is_fp16_supported = lambda _: False
        try:
            Backend(self.folder, options)
        except AgentRLError as error:
            self.found["fp16_refused"] = str(error)
        # A processor without fp16 computes it all the same, slowly.
        accelerator.is_fp16_supported = lambda _: True
        backend = Backend(self.folder, options)
        applied = [self.step(backend, seed).applied for seed in range(6)]
        self.found["fp16_weights"] = sorted({str(t.dtype) for _, t in backend.weights()})
        tensors, common = backend.state()
        self.found["fp16_applied"] = [sum(applied), common["optimizer_steps"], applied[-1]]
        self.found["fp16_state"] = sorted({str(t.dtype) for n, t in tensors.items() if n != "rng"})
        saved = persist.save(backend, self.job(f"h{self.world}"), State(step=1, take=1))
        again = Backend(self.folder, options)
        persist.restore(again, saved)
        self.found["fp16_scaler"] = [common["scaler"], again.state()[1]["scaler"]]

    def recomputed_activations(self) -> None:
        weights = []
        for checkpointing in (False, True):
            backend = Backend(self.folder, self.options.model_copy(update={"checkpointing": checkpointing}))
            self.step(backend, 0)
            weights.append(whole_weights(backend))
        self.found["recompute_distance"] = max(float((weights[0][n] - t).abs().max()) for n, t in weights[1].items())


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checks = Checks(Path(job["model"]), Path(job["work"]), rank, world)
    checks.run(job["checks"])
    leave(Path(job["work"]), rank, world, checks.found)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
