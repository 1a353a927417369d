"""A model's last layer, of which only what is read is computed.

Every token of a history gives the last layer keys and values. Queries, and all that comes after attention, matter for
the tokens alone whose states are read: the trained ones, few of an agent's, whose histories are tools' words for the
most part. Of L layers that saves up to 1/L.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from agentrl.train.attention import Layout


class LastLayer:
    """Hooks on the last layer's attention, which learns who asks, and on its MLP, which then sees these tokens alone.

    What the layer says of other tokens means nothing. Nothing is done without `queries` in the pass's `Layout`.

    The steps are the same however many tokens ask. Ranks gather and release weights between a model's steps, and a
    checkpointed layer is computed again up to the last step that keeps something: where one rank took another step
    than the others, they would wait for each other.
    """

    def __init__(self, backbone: nn.Module, attention: nn.Module, mlp: nn.Module) -> None:
        self._asking: Tensor | None = None
        self._width = 0
        # Hooks on the parts and not on the layer: when a checkpointed layer is computed again, these run again.
        self._handles = [
            backbone.register_forward_pre_hook(self._forget),
            attention.register_forward_pre_hook(self._ask, with_kwargs=True),
            mlp.register_forward_pre_hook(self._narrow),
            mlp.register_forward_hook(self._widen),
        ]

    @staticmethod
    def of(backbone: nn.Module) -> LastLayer | None:
        """None where a model's last layer is not `self_attn` and `mlp`."""
        layers = getattr(backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            return None
        attention, mlp = (getattr(layers[-1], name, None) for name in ("self_attn", "mlp"))
        if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
            return None
        return LastLayer(backbone, attention, mlp)

    def remove(self) -> None:
        """Compute the whole layer from now on."""
        for handle in self._handles:
            handle.remove()

    def _forget(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        self._asking = None

    def _ask(self, _module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any] | None:
        layout: Layout | None = given.get("layout")
        if layout is None or layout.queries is None:
            return None
        self._asking = layout.queries.tokens
        return args, {**given, "queries": layout.queries}

    def _narrow(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._asking is None:
            return None
        if len(args) != 1 or args[0].dim() != 3:
            self._asking = None  # what else it is given may be for all tokens too
            return None
        self._width = args[0].shape[1]
        return (args[0].index_select(1, self._asking),)

    def _widen(self, _module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        if self._asking is None:
            return None
        hidden, *rest = out if isinstance(out, tuple) else (out,)  # a router says something besides
        whole = hidden.new_zeros(1, self._width, hidden.shape[2]).index_copy(1, self._asking, hidden)
        return (whole, *rest) if isinstance(out, tuple) else whole
