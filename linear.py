"""The linear layer, and a layout of its weights in which a CPU reads them fastest."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH_PACKING = 2**17  # weights; fewer stay in the processor's own memory, and packed they take longer
BLOCK = 64  # outputs; where they are not a multiple of it, oneDNN may take a quarter longer


class Linear(nn.Linear):
    """x Wᵀ + b, (…, inputs) -> (…, outputs). Within `packed` and without gradients, oneDNN computes it."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() or x.numel() != self.in_features or x.device.type != "cpu":
                return super().forward(x)
            # Of one row the compiler makes a loop of its own, instead of calling a library.
            y = (self.weight * x.flatten()).sum(-1)
            return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)
        return super().forward(x) if (pack := _fitting(x, (self,))) is None else pack.products(x)[0]


def joint(x: Tensor, layers: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
    """What each of these layers makes of `x`; of layers that are packed together, by one product."""
    if torch.compiler.is_compiling() or (pack := _fitting(x, layers)) is None:
        return tuple(layer(x) for layer in layers)
    return pack.products(x)


class _Pack:
    """The weights of layers that read the same input, one below another, in the layout of oneDNN."""

    def __init__(self, layers: tuple[Linear, ...]):
        self.layers, self.state, self.dtype = layers, self.state_of(layers), layers[0].weight.dtype
        self.sizes, bias = [layer.out_features for layer in layers], layers[0].bias
        weight = layers[0].weight
        if len(layers) > 1:
            weight = torch.cat([layer.weight for layer in layers])
            bias = None if bias is None else torch.cat([layer.bias for layer in layers])
        if missing := -sum(self.sizes) % BLOCK:
            weight = F.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        self.pieces = [*self.sizes, missing]
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias

    @staticmethod
    def state_of(layers: tuple[nn.Module, ...]) -> list:
        """What was packed: other after any change of a parameter."""
        parameters = [
            parameter for layer in layers for parameter in layer._parameters.values() if parameter is not None
        ]
        return [(id(parameter), parameter.data_ptr(), parameter._version) for parameter in parameters]

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        n_row = x.numel() // x.shape[-1]
        # oneDNN keeps what it prepared for each number of rows; so there are not more than eight up to a power of two.
        unit = 1 << max(n_row.bit_length() - 3, 0)
        if missing := -n_row % unit:
            rows = F.pad(x.reshape(n_row, -1), (0, 0, 0, missing))
            y = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            y = y[:n_row].view(*x.shape[:-1], -1)
        else:
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.split_with_sizes(y, self.pieces, dim=-1)[: len(self.sizes)]


_PACKS: dict[nn.Module, _Pack] = {}  # by the first layer; here and not in the layers, which people copy and save


def _fitting(x: Tensor, layers: tuple[nn.Module, ...]) -> _Pack | None:
    """What these layers are packed into, if it can stand for them: `x` is of their type, no gradients are recorded,
    nothing is cast, no hooks are waiting."""
    pack = _PACKS.get(layers[0])
    if pack is None or torch.is_grad_enabled() or x.dtype != pack.dtype or not x.is_cpu or not _is_packed(layers):
        return None
    if torch.is_autocast_enabled("cpu") or x.numel() == 0:
        return None
    # Those of a layer alone were called by whoever called it.
    hooked = len(layers) > 1 and any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    return None if hooked else pack


def _is_packed(layers: tuple[nn.Module, ...]) -> bool:
    """Just these layers, together, and they are still what they were."""
    pack = _PACKS.get(layers[0])
    return pack is not None and pack.layers == layers and pack.state == _Pack.state_of(layers)


def pack(model: nn.Module) -> dict[nn.Module, _Pack]:
    """The model's linear layers, packed, for `using`: a second copy of their weights, in blocks.

    A token takes as long as it takes to read the weights, and torch hands float32 rows to MKL, which reads with a
    quarter of the memory's bandwidth on some processors. Modules name layers to pack together in `joint_layers`.
    Packing takes as long as some tokens. What is packed already is left out, and where there is no memory for it all.
    """
    groups = [module.joint_layers for module in model.modules() if hasattr(module, "joint_layers")]
    grouped = {layer for group in groups for layer in group}
    groups += [(module,) for module in model.modules() if isinstance(module, Linear) and module not in grouped]
    groups = [group for group in groups if _can_be_packed(group) and not _is_packed(group)]
    try:
        with torch.no_grad():
            return {group[0]: _Pack(group) for group in groups}
    except (RuntimeError, MemoryError):  # torch has no class of its own for this on a CPU
        return {}


@contextmanager
def using(packs: dict[nn.Module, _Pack]) -> Iterator[None]:
    """Within, these stand for their layers. Weights must not change meanwhile; most changes are noticed, but not those
    of an optimizer that is fused."""
    _PACKS.update(packs)
    try:
        yield
    finally:
        for layer in packs:
            _PACKS.pop(layer, None)


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Within, `model` generates faster on a CPU: `pack` and `using`."""
    with using(pack(model)):
        yield


def _can_be_packed(layers: tuple[nn.Module, ...]) -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if any(type(layer) is not Linear or layer.weight.is_inference() for layer in layers):
        return False
    dtypes, devices = ({getattr(layer.weight, name) for layer in layers} for name in ("dtype", "device"))
    bfloat16 = dtypes == {torch.bfloat16} and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    large = sum(layer.weight.numel() for layer in layers) > WORTH_PACKING
    return large and devices == {torch.device("cpu")} and (dtypes == {torch.float32} or bfloat16)
