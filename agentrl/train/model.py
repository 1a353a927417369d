"""The policy: a Hugging Face causal language model that reads packed sequences and answers with log-probs.

Attention reads each sequence by itself (`attention.py`), which is exact. The output head gives log-probs and entropies
of chosen tokens in chunks, so that no `[T, V]` tensor is ever held. Rotary positions take less memory traffic
(`rotary.py`), and of the last layer only what is read is computed (`last.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentrl.errors import ConfigError
from agentrl.train.algorithm import Output
from agentrl.train.attention import ATTENTION, lay_out, packed_attention
from agentrl.train.batch import Batch
from agentrl.train.last import LastLayer
from agentrl.train.prefix import share
from agentrl.train.rotary import replace_rotary

CHUNK = 1 << 24
"""Logits held at once: each chunk reads the whole output head, and adds to the whole of its gradient."""
TILE = 1 << 18
"""Logits that a CPU takes through all steps before the next ones: as many as its cache holds."""
NEVER = -1e30
"""Log-prob of a token that a bias of -inf rules out: it adds 0 · NEVER = 0 to an entropy, where -inf would add NaN."""
LOUD = 200.0
"""A logit that no soft-capping leaves as it is."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TokenLogprobs(torch.autograd.Function):
    """log softmax(h·Wᵀ/τ) at chosen tokens, and the entropy: chunk by chunk, logits recomputed in the backward pass.

    hidden `[N, H]`, weight `[V, H]`, bias `[V]` or None, tokens `[N]`, temperature `[N]` → two float32 `[N]`.
    With z = h·Wᵀ/τ and p = softmax(z):  ∂logp/∂z = onehot - p,  ∂entropy/∂z = -p·(log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        logprobs, entropy, norms = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        heat = _heat(temperature)
        for rows in _chunks(len(hidden), CHUNK // len(weight)):
            for part, logits in _tiles(rows, F.linear(hidden[rows], weight, bias).float(), heat):
                norms[part] = norm = logits.logsumexp(1)
                log_probs = logits.sub_(norm[:, None])
                logprobs[part] = log_probs.gather(1, tokens[part, None]).squeeze(1)
                entropy[part] = -(log_probs.exp().mul_(log_probs.clamp_(min=NEVER))).sum(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, tokens, temperature, norms, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """See the class."""
        hidden, weight, bias, tokens, temperature, norms, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(norms) if grad_logprobs is None else grad_logprobs
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32: in bf16 the chunks' parts of the weight's gradient would be rounded one by one.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        heat = _heat(temperature)
        for rows in _chunks(len(hidden), CHUNK // len(weight)):
            grad = F.linear(hidden[rows], weight, bias).float()  # logits at first, tile by tile their gradient
            for part, tile in _tiles(rows, grad, heat):
                log_probs = tile.sub_(norms[part, None]).clamp_(min=NEVER)
                probs = log_probs.exp()
                if grad_entropy is not None:
                    log_probs.add_(entropy[part, None]).mul_(probs).mul_(-grad_entropy[part, None])
                    tile.sub_(probs.mul_(grad_logprobs[part, None]))
                else:
                    torch.mul(probs, -grad_logprobs[part, None], out=tile)
                tile.scatter_add_(1, tokens[part, None], grad_logprobs[part, None])
                if heat is not None:
                    tile.div_(heat[part, None])
            narrow = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = narrow @ weight
            if grad_weight is not None and narrow.dtype == grad_weight.dtype:
                grad_weight.addmm_(narrow.t(), hidden[rows])  # without a second tensor of the weight's size
            elif grad_weight is not None:
                grad_weight += narrow.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def _chunks(rows: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def _heat(temperature: Tensor) -> Tensor | None:
    """None where all are 1, as far as that can be told without waiting for a GPU."""
    return None if temperature.device.type == "cpu" and bool((temperature == 1).all()) else temperature


def _tiles(rows: slice, logits: Tensor, heat: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """The chunk's logits, at their temperatures, in parts of a few rows; whole on a GPU, where a call is dear."""
    size = TILE // logits.shape[1] if logits.device.type == "cpu" else len(logits)
    for at in _chunks(len(logits), size):
        part = slice(rows.start + at.start, rows.start + at.stop)
        yield part, logits[at] if heat is None else logits[at].div_(heat[part, None])


class Head(nn.Linear):
    """The output head. ZeRO-3 gathers its weight around `forward`, so the chunks live inside it."""

    def forward(self, hidden: Tensor, tokens: Tensor | None = None, temperature: Tensor | None = None) -> Any:
        """Logits `[…, V]`; or, with `tokens` and `temperature` `[N]`, log-probs and entropies of hidden `[N, H]`."""
        if tokens is None or temperature is None:
            return F.linear(hidden, self.weight, self.bias)
        return TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, tokens, temperature
        )


class Policy(nn.Module):
    """What DeepSpeed wraps. With a critic, its head reads the same hidden states as the output head."""

    def __init__(self, model: nn.Module, *, critic: bool = False) -> None:
        super().__init__()
        self.model = model
        self.last = LastLayer.of(cast(Any, model).base_model)
        self.value_head: nn.Linear | None = None
        if critic:
            weight = cast(Any, model).get_output_embeddings().weight
            width = cast(Any, model).config.get_text_config().hidden_size
            self.value_head = nn.Linear(width, 1, dtype=weight.dtype)
            # From zero: the first values are 0 and not noise that the first advantages would carry.
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, batch: Batch, entropy_gradient: bool = False) -> Output:
        """Log-probs, entropies and, with a critic, values of the batch's trained tokens, `[T]`, 0 elsewhere."""
        rows = batch.trained
        hidden = self.hidden(batch.tokens, batch.positions, batch.cu_seqlens.diff().tolist(), rows - 1)
        found, entropy = self.head(hidden, batch.tokens[rows], batch.temperatures[rows])
        zeros = torch.zeros(len(batch.tokens), device=hidden.device)
        entropy = entropy if entropy_gradient else entropy.detach()
        values = None
        if self.value_head is not None:
            values = zeros.index_put((rows,), self.value_head(hidden).float().squeeze(1))
        return Output(zeros.index_put((rows,), found), zeros.index_put((rows,), entropy), values)

    def hidden(self, tokens: Tensor, positions: Tensor, lengths: list[int], read: Tensor) -> Tensor:
        """The last hidden states `[N, H]` of the tokens `read` `[N]`, each history computed once."""
        wanted = read.cpu().numpy()
        shared = share(tokens.cpu().numpy(), lengths, wanted)
        asked = None if self.last is None else shared.place[wanted]
        layout = lay_out(shared.lengths, shared.sequences, tokens.device, asked)
        computed, place = (torch.from_numpy(x).to(tokens.device) for x in (shared.computed, shared.place))
        backbone = cast(Any, self.model).base_model
        out = backbone(
            input_ids=tokens[computed][None], position_ids=positions[computed][None], use_cache=False, layout=layout
        )
        return cast(Tensor, out.last_hidden_state[0, place[read]])

    @property
    def head(self) -> Head:
        """The output head."""
        return cast(Head, cast(Any, self.model).get_output_embeddings())


def load_policy(folder: Path, dtype: torch.dtype, *, checkpointing: bool = False, critic: bool = False) -> Policy:
    """The model in `folder` as a policy; ConfigError where it is missing or of a kind that cannot be packed."""
    AttentionInterface.register(ATTENTION, packed_attention)
    read_config(folder)
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(f"{folder}: the output head is a {type(head).__name__}, expected torch.nn.Linear")
    if model.base_model is model:
        raise ConfigError(f"{folder}: {type(model).__name__} has no part that gives hidden states without its head")
    head.__class__ = Head
    replace_rotary(model)
    model.config.use_cache = False
    if checkpointing:
        # Renamed in transformers 5.2x: the old name warns there, the new one is missing before.
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return Policy(model, critic=critic)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ConfigError where there is none."""
    try:
        return cast(dict[str, Any], json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model folder {folder} has no readable config.json ({error}): give a folder in Hugging Face form"
        ) from error


def longest_sequence(folder: Path, wanted: int | None = None) -> int | None:
    """`wanted`, or the model's own limit on positions, where its config names one.

    ConfigError where that is more than the model can be packed with: some rotary embeddings change for all sequences
    of a pass, and for later ones, once the longest goes beyond a length.
    """
    config = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    limit = config.get("max_position_embeddings") if wanted is None else wanted
    rope = config.get("rope_parameters") or {}
    for part in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        kind, fixed = part.get("rope_type"), part.get("original_max_position_embeddings")
        fixed = config.get("max_position_embeddings") if fixed is None else fixed
        if kind in ("dynamic", "longrope") and fixed is not None and (limit is None or limit > fixed):
            raise ConfigError(
                f"{folder}: rotary embeddings of kind {kind!r} depend on the longest sequence of a pass beyond "
                f"{fixed} tokens, so that a sequence of up to {limit} cannot be packed: "
                f"set train.max_sequence = {fixed} or less"
            )
    return int(limit) if limit is not None else None


def check_exact(policy: Policy, vocabulary: int, device: torch.device) -> None:
    """ConfigError where packed log-probs differ from the unmodified model's on single sequences.

    A collective under ZeRO-3. It catches models that mix neighbours in a packed row by other ways than attention
    (state-space layers, convolutions) or that change logits after the head, also where these are small. A last layer
    that is wrong where only what is read is computed is computed whole from then on.
    """
    lengths = [5, 3, 7]
    tokens = torch.randint(0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    model = cast(Any, policy.model)
    rows = torch.tensor([i for i in range(sum(lengths)) if i not in (0, 5, 8)], device=device)
    ones = torch.ones(len(rows), device=device)
    training = policy.training
    policy.eval()
    with torch.no_grad():
        packed, _ = policy.head(policy.hidden(tokens, positions, lengths, rows - 1), tokens[rows], ones)
        ends = torch.tensor([3, 5, 11], device=device)
        few, _ = policy.head(policy.hidden(tokens, positions, lengths, rows[ends] - 1), tokens[rows[ends]], ones[ends])
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        plain = []
        for part in torch.split(tokens, lengths):
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1].float()
            plain.append(logits.log_softmax(1).gather(1, part[1:, None]).squeeze(1))
        changed = _changed_after_head(policy, part)
        model.set_attn_implementation(ATTENTION)
    policy.train(training)
    if changed > 1e-3:
        raise ConfigError(
            f"{type(model).__name__} changes logits after its output head (a logit of {LOUD:.0f} by up to "
            f"{changed:.3g}, as soft-capping or a scale does): this architecture cannot be trained packed"
        )
    worst = float((packed - torch.cat(plain)).abs().max())
    limit = 1e-3 if packed.dtype == policy.head.weight.dtype else 0.15
    if policy.last is not None and not float((few - packed[ends]).abs().max()) <= limit:
        policy.last.remove()
        policy.last = None
    if not worst <= limit:
        raise ConfigError(
            f"{type(model).__name__}: packed log-probs differ from the plain model's by up to {worst:.3g} "
            f"(limit {limit}): this architecture cannot be trained packed"
        )


def _changed_after_head(policy: Policy, tokens: Tensor) -> float:
    """By how much the model's logits differ from its head's, where these are up to `LOUD`."""
    loud: list[Tensor] = []

    def shout(_head: nn.Module, _given: object, logits: Tensor) -> Tensor:
        loud.append(torch.linspace(-LOUD, LOUD, logits.numel(), device=logits.device, dtype=logits.dtype))
        return loud[0].view_as(logits)

    handle = policy.head.register_forward_hook(shout)
    found = cast(Any, policy.model)(input_ids=tokens[None], use_cache=False).logits
    handle.remove()
    return float((found.flatten().float() - loud[0].float()).abs().max())
