"""The backend: ZeRO-3, and the only place that knows DeepSpeed.

Collective: all ranks call the same methods in the same order, with equal numbers of batches.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import (
    groups,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig

from agentrl.errors import ConfigError
from agentrl.train import adapt, shards
from agentrl.train.adapt import choose_trained, sources
from agentrl.train.algorithm import Largest, Mean, Metrics, Output
from agentrl.train.batch import Batch
from agentrl.train.bound import ended_after
from agentrl.train.export import Shape, buckets
from agentrl.train.meeting import MEET_SECONDS, apart, gather
from agentrl.train.model import DTYPES, Policy, check_exact, load_policy, longest_sequence, read_config
from agentrl.train.options import TrainOptions

Loss = Callable[[Batch, Output], tuple[Tensor, Metrics]]
GATHER_BYTES = 256 << 20
"""Weights gathered at once for a hand-over; a single larger tensor comes alone."""
LOAD_SECONDS = 1800.0
"""How long a rank may wait for one that reads a large model; a load in which nothing moves is ended long before."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class StepResult(NamedTuple):
    """One optimizer step. Not applied: a loss or gradient was not finite, and no weight or moment changed."""

    loss: float
    grad_norm: float
    applied: bool
    metrics: dict[str, float]


class Backend:
    """A policy on this rank's device, partitioned over the group; with a critic's head and a frozen reference if asked.

    `critic_rate` is the factor on the learning rate of the critic's head; None: no critic. `reference` is the folder
    of the policy that `reference` answers for; None: there is none. `seed` is for adapters, where they are trained.
    """

    def __init__(
        self,
        folder: Path,
        options: TrainOptions,
        *,
        critic_rate: float | None = None,
        reference: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.options = options
        self.device = _join_group(options.collective_timeout)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if options.dtype == "fp16" and not get_accelerator().is_fp16_supported():
            raise ConfigError(f"train.dtype = 'fp16' does not work on {self.device.type}: use 'bf16' or 'fp32'")
        config = _config(options, self.world)
        # from_pretrained partitions while it loads only while this object lives.
        alive = HfDeepSpeedConfig(config)
        policy = load_policy(
            folder, DTYPES[options.dtype], checkpointing=options.checkpointing, critic=critic_rate is not None
        )
        choose_trained(policy.model, options, seed)
        frozen = None if reference is None else load_policy(reference, DTYPES[options.dtype]).requires_grad_(False)
        del alive
        optimizer = torch.optim.AdamW(
            _decay_groups(policy, options.weight_decay, critic_rate or 1.0),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            fused=True,
        )
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
        self._engine: Any = engine
        self._policy = policy
        self._reference: Any = None
        if frozen is not None:
            self._reference, *_ = deepspeed.initialize(model=frozen.eval(), config=config)
            self._reference.eval()
        self.longest = longest_sequence(folder, options.max_sequence)
        self._sources = sources(policy.model)
        self.shapes = tuple(Shape(n, tuple(s.weight.ds_shape), s.weight.dtype) for n, s in self._sources.items())
        check_exact(policy, int(read_config(folder)["vocab_size"]), self.device)
        dist.barrier()  # whoever has loaded waits here, and not in a later phase, where a rank may wait for long
        _limit(options.collective_timeout)

    # ---- passes --------------------------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Log-probs `[T]` of each batch under the present weights, without gradient."""
        return [out.logprobs for out in self.predict(batches)]

    def predict(self, batches: Sequence[Batch]) -> list[Output]:
        """What the present weights say about each batch, without gradient, on the CPU."""
        self._engine.eval()
        with torch.no_grad():
            found = [_on_cpu(self._engine(batch.to(self.device))) for batch in batches]
        self._engine.train()
        return found

    def reference(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Log-probs `[T]` of each batch under the frozen reference."""
        with torch.no_grad():
            return [self._reference(batch.to(self.device)).logprobs.cpu() for batch in batches]

    def step(self, batches: Sequence[Batch], loss: Loss, *, lr: float, entropy_gradient: bool = False) -> StepResult:
        """One optimizer step on the sum of the batches' losses over all ranks."""
        engine = self._engine
        engine.train()
        for group in engine.optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        total = torch.zeros((), device=self.device)
        metrics: list[Metrics] = []
        for index, batch in enumerate(batches):
            batch = batch.to(self.device)
            engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            value, measured = loss(batch, engine(batch, entropy_gradient))
            # ZeRO-3 averages over ranks; losses carry global denominators already, so their gradients are to be summed.
            engine.backward(value * self.world, scale_wrt_gas=False)
            total += value.detach().float()
            metrics.append(measured)
        engine.step()
        norm = engine.get_global_grad_norm()
        return StepResult(
            loss=float(self.sum(total)),
            grad_norm=float("nan") if norm is None else float(norm),
            applied=bool(engine.was_step_applied()),
            metrics=self._reduce(metrics),
        )

    def _reduce(self, parts: Sequence[Metrics]) -> dict[str, float]:
        names = sorted(parts[0])
        means = [n for n in names if isinstance(parts[0][n], Mean)]
        peaks = [n for n in names if isinstance(parts[0][n], Largest)]
        sums = torch.zeros(len(means), 2, device=self.device)
        tops = torch.full((len(peaks),), -torch.inf, device=self.device)
        for part in parts:
            for row, name in enumerate(means):
                sums[row] += torch.stack([x.float() for x in part[name]])
            for row, name in enumerate(peaks):
                tops[row] = torch.maximum(tops[row], part[name][0].float())
        dist.all_reduce(sums)
        dist.all_reduce(tops, op=dist.ReduceOp.MAX)
        values = (sums[:, 0] / sums[:, 1].clamp(min=1e-12)).tolist()
        return {**dict(zip(means, values, strict=True)), **dict(zip(peaks, tops.tolist(), strict=True))}

    # ---- small collectives ---------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        values = values.to(self.device, copy=True)
        dist.all_reduce(values)
        return values

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        size = torch.tensor([len(data) if data is not None else 0], device=self.device)
        dist.broadcast(size, 0)
        body = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if data:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(body, 0)
        return body.cpu().numpy().tobytes()

    # ---- weights and state ---------------------------------------------------------------------------------------

    def weights(self, bucket_bytes: int = GATHER_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, whole, in the order of `shapes`; gathered bucket by bucket.

        Frozen ones too, and adapters merged into theirs: what an engine is to serve.

        A tensor is valid until the next one is asked for. All ranks must exhaust the iterator.
        """
        for bucket in buckets(self.shapes, bucket_bytes):
            named = [(shape.name, self._sources[shape.name]) for shape in bucket]
            with deepspeed.zero.GatheredParameters([p for _, source in named for p in source.parameters]):
                for name, source in named:
                    yield name, source.whole()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's part of master weights and moments, flat; and what is common to all ranks."""
        optimizer = self._engine.optimizer
        flat = [p for p in optimizer.fp32_partitioned_groups_flat if p in optimizer.optimizer.state]
        steps = int(optimizer.optimizer.state[flat[0]]["step"]) if flat else 0
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        for name, parameter in self._trained():
            tensors[f"{name}/master"] = safe_get_local_fp32_param(parameter).detach().cpu().clone()
            for key in MOMENTS if steps else ():
                tensors[f"{name}/{key}"] = safe_get_local_optimizer_state(parameter, key).detach().cpu().clone()
        common: dict[str, Any] = {
            "optimizer_steps": steps,
            "sizes": {name: int(parameter.ds_numel) for name, parameter in self._trained()},
            "base": self._base(),
        }
        if self.options.dtype == "fp16":
            scaler = optimizer.loss_scaler
            common["scaler"] = [scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis]
        return tensors, common

    def restore(self, folder: Path, common: dict[str, Any], world: int) -> None:
        """Take over the state that `world` ranks saved in `folder`; bit-exact, whatever the number of ranks now."""
        optimizer = self._engine.optimizer
        sizes = {name: int(parameter.ds_numel) for name, parameter in self._trained()}
        if sizes != common["sizes"]:
            odd = sorted(set(sizes.items()) ^ set(common["sizes"].items()))[:3]
            raise ConfigError(
                f"checkpoint {folder} is of another model, of other train.trainable, train.frozen or train.lora, or of "
                f"an algorithm with a critic where this has none or the reverse: its trained weights differ, e.g. {odd}"
            )
        if (other := adapt.other_base(common.get("base"), self._base())) is not None:
            raise ConfigError(f"checkpoint {folder} holds trained weights alone, which rest on others: {other}")
        optimizer.checkpoint_event_prologue()
        steps = int(common["optimizer_steps"])
        if steps:
            for flat in optimizer.fp32_partitioned_groups_flat:
                optimizer.optimizer.state[flat] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32, device=flat.device),
                    **{key: torch.zeros_like(flat) for key in MOMENTS},
                }
        with shards.Reader(folder, world) as reader:
            for name, parameter in self._trained():
                span = (self.rank * parameter.ds_tensor.numel(), parameter.ds_tensor.numel(), sizes[name])
                master = reader.span(f"{name}/master", *span)
                safe_set_local_fp32_param(parameter, master)
                parameter.ds_tensor.data.copy_(master)
                for key in MOMENTS if steps else ():
                    safe_set_local_optimizer_state(parameter, reader.span(f"{name}/{key}", *span), key)
            if world == self.world:
                torch.set_rng_state(reader.whole("rng", self.rank))
        optimizer.checkpoint_event_epilogue()
        if self.options.dtype == "fp16" and "scaler" in common:
            scaler = optimizer.loss_scaler
            scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = common["scaler"]

    def _base(self) -> dict[str, Any]:
        """What the trained weights mean nothing without: how adapters count, and sums of what is frozen. Collective."""
        named: list[tuple[str, Any]] = list(self._policy.model.named_parameters())
        frozen = [(name, p) for name, p in named if not p.requires_grad]
        sums = torch.zeros(len(frozen), 2, dtype=torch.float64, device=self.device)
        for row, (_, parameter) in zip(sums, frozen, strict=True):
            part: Tensor = parameter.ds_tensor
            mine = part[: max(parameter.ds_numel - self.rank * part.numel(), 0)]  # without padding
            row[0] = mine.sum(dtype=torch.float64)
            row[1] = torch.linalg.vector_norm(mine, dtype=torch.float64).square()
        found = self.sum(sums).tolist() if frozen else []
        lora = self.options.lora
        return {
            "lora": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha},
            "dtype": self.options.dtype,
            "frozen": dict(zip([name for name, _ in frozen], found, strict=True)),
        }

    def _trained(self) -> list[tuple[str, Any]]:
        head = self._policy.value_head
        critic = [] if head is None else [(f"value_head.{name}", p) for name, p in head.named_parameters()]
        return [(name, p) for name, p in (*self._policy.model.named_parameters(), *critic) if p.requires_grad]

    def close(self) -> None:
        """Wait for the other ranks and leave the group."""
        dist.barrier()
        dist.destroy_process_group()


def _on_cpu(out: Output) -> Output:
    return Output(out.logprobs.cpu(), out.entropy.cpu(), None if out.values is None else out.values.cpu())


def _join_group(timeout: float) -> torch.device:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # Its shared-memory collectives compile for more than a minute, and wait for ever on a stale lock file.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        _meet(device, datetime.timedelta(seconds=timeout))
    _limit(max(timeout, LOAD_SECONDS))
    return device


def _meet(device: torch.device, limit: datetime.timedelta) -> None:
    """Have the ranks find each other, in all groups that are to come, before anything takes long."""
    world = int(os.environ["WORLD_SIZE"])
    gathered = gather(world)
    with ended_after(MEET_SECONDS, apart(world, MEET_SECONDS)):
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, timeout=limit, verbose=False, auto_mpi_discovery=False)
        # ZeRO's collectives go over a copy of the group, which it would make within the load.
        copy = groups._clone_world_group()
        for group in (None, copy):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        get_accelerator().synchronize()
    del gathered  # it kept the store until the group had its own


def _limit(seconds: float) -> None:
    """How long any collective may take from now on."""
    for group in c10d._world.pg_map:
        c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def _config(options: TrainOptions, world: int) -> dict[str, Any]:
    alone = world == 1
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False}
    if alone:
        # One rank holds everything anyway: never release a weight after its layer.
        zero |= {"stage3_param_persistence_threshold": 1 << 60, "stage3_max_live_parameters": 1 << 60}
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # torch's own fused AdamW steps on the host too; DeepSpeed's would be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "bf16": {"enabled": options.dtype == "bf16"},
        "fp16": {"enabled": options.dtype == "fp16", "initial_scale_power": 16},
        # In bf16 a sum over 64 passes would be off by 3 %, over 256 by 9: what is added is rounded away.
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _decay_groups(policy: Policy, decay: float, critic_rate: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, nor does the critic's head, which has its own factor on the rate.

    A partitioned parameter's true rank is in `ds_shape`; an adapter is not partitioned yet.
    """
    parameters: list[Any] = [p for p in policy.model.parameters() if p.requires_grad]
    ranks = [len(p.ds_shape if is_zero_param(p) else p.shape) for p in parameters]
    matrices = [p for p, rank in zip(parameters, ranks, strict=True) if rank > 1]
    vectors = [p for p, rank in zip(parameters, ranks, strict=True) if rank <= 1]
    head = [] if policy.value_head is None else list(policy.value_head.parameters())
    groups = [
        {"params": matrices, "weight_decay": decay, "rate": 1.0},
        {"params": vectors, "weight_decay": 0.0, "rate": 1.0},
        {"params": head, "weight_decay": 0.0, "rate": critic_rate},
    ]
    return [g for g in groups if g["params"]]
