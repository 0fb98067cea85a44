"""What many heads cost beside one."""

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention import Mask
from config.schema import ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import in_turn, plain_ticks
from model import MultiHeadAttention, build_model

KERNEL_NAMES = {"reference": "definition", "fused": "fused kernel"}


def attention_layer(n_head: int, width: int, kernel: str) -> MultiHeadAttention:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=2, n_layer=1, n_head=n_head, d_model=width, kernel=kernel, position="none")
    return build_model(config).decoder.blocks[0].attention


def attend(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    return layer(*layer.queries_keys_values(x), Mask(x.shape[1], x.shape[1], causal=False))


def bytes_kept(function, *arguments) -> int:
    """What a forward pass keeps in memory for the backward pass, every tensor's storage once."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(*arguments)
    del result
    return sum(kept.values())


class FreeLunch(Claim):
    id = "M2"
    english = "Many heads cost the same as one at equal width: a free lunch in parameters and computation."
    korean = "전체 폭이 같다면 헤드를 늘려도 파라미터와 연산량은 헤드 하나일 때와 같다. 공짜 점심이다."
    prediction = (
        "One attention layer of width 256 on 512 tokens with 1 to 32 heads: parameters and the products' FLOPs, as "
        "torch counts them, agree exactly, and so do time and memory of a forward and backward pass, by the definition "
        "and by the fused kernel."
    )
    rule = (
        "does not hold if parameters or FLOPs differ by more than 1 % among 1 to 32 heads. Holds if, besides, time and "
        "memory are at most 25 % above one head's, by both kernels and at every number of heads; holds with a "
        "condition (of products alone) if not"
    )
    counts, width, length = (1, 2, 4, 8, 16, 32), 256, 512

    def measure(self) -> Numbers:
        torch.manual_seed(0)
        x = torch.randn(1, self.length, self.width, requires_grad=True)
        layers = {(n, k): attention_layer(n, self.width, k) for n in self.counts for k in KERNEL_NAMES}
        runs = {key: (lambda layer=layer: attend(layer, x).sum().backward()) for key, layer in layers.items()}
        flops = []
        for n in self.counts:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attend(layers[n, "reference"], x)
            flops.append(counter.get_total_flops())
        seconds = in_turn(runs)
        return {
            "heads": list(self.counts),
            "parameters": [sum(p.numel() for p in layers[n, "fused"].parameters()) for n in self.counts],
            "flops": flops,
            "formula": 8 * self.length * self.width**2 + 4 * self.length**2 * self.width,
            "exponentials": [n * self.length**2 for n in self.counts],
            "seconds": {kernel: [seconds[n, kernel] for n in self.counts] for kernel in KERNEL_NAMES},
            "bytes": {k: [bytes_kept(attend, layers[n, k], x) for n in self.counts] for k in KERNEL_NAMES},
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        if any(max(numbers[name]) > 1.01 * min(numbers[name]) for name in ("parameters", "flops")):
            return FAILS
        costs = [values for name in ("seconds", "bytes") for values in numbers[name].values()]
        return HOLDS if all(max(values) <= 1.25 * values[0] for values in costs) else CONDITION

    def finding(self, numbers: Numbers) -> str:
        heads, eight, told = numbers["heads"], numbers["heads"].index(8), []
        for kernel, name in KERNEL_NAMES.items():
            time, memory = ([v / of[kernel][0] for v in of[kernel]] for of in (numbers["seconds"], numbers["bytes"]))
            told.append(
                f"by the {name} 8 heads take {time[eight]:.2f} × the time of one and {memory[eight]:.2f} × its memory, "
                f"{heads[-1]} heads {time[-1]:.2f} × and {memory[-1]:.2f} ×"
            )
        meaning = {
            HOLDS: "So more heads add at most a quarter here, in time as in memory.",
            CONDITION: "So the lunch is free in parameters and products alone. What grows with the heads are the maps, "
            "which the fused kernel computes too but does not keep.",
            FAILS: "So more heads are not free even in parameters and products.",
        }[self.verdict(numbers)]
        ends = [f"{min(of):,} to {max(of):,}" for of in (numbers["parameters"], numbers["flops"])]
        return (
            f"Parameters: {ends[0]}; FLOPs of the products: {ends[1]} (8·T·C² + 4·T²·C = {numbers['formula']:,}). They "
            f"leave out the softmax, a T × T map for each head: {numbers['exponentials'][0]:,} exponentials with one "
            f"head, {numbers['exponentials'][-1]:,} with {heads[-1]}. Measured, {'; '.join(told)}. {meaning}"
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        columns = {f"time, {name} (ms)": numbers["seconds"][kernel] for kernel, name in KERNEL_NAMES.items()}
        columns |= {f"memory, {name} (MiB)": numbers["bytes"][kernel] for kernel, name in KERNEL_NAMES.items()}
        rows = [["heads", "parameters", "MFLOPs", "exponentials", *columns]]
        counts = (numbers[name] for name in ("heads", "parameters", "flops", "exponentials"))
        for n, parameters, flops, exponentials, *costs in zip(*counts, *columns.values(), strict=True):
            rows.append([str(n), f"{parameters:,}", f"{flops / 1e6:,.1f}", f"{exponentials:,}"])
            rows[-1] += [f"{1000 * cost:.1f}" for cost in costs[:2]] + [f"{cost / 2**20:.1f}" for cost in costs[2:]]
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        heads, panels = numbers["heads"], {"seconds": "Time", "bytes": "Memory kept for backward"}
        for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
            for kernel, label in KERNEL_NAMES.items():
                axes.plot(heads, [v / numbers[name][kernel][0] for v in numbers[name][kernel]], "o-", label=label)
            axes.plot(heads, [f / numbers["flops"][0] for f in numbers["flops"]], "k:", label="FLOPs of the products")
            axes.set(xscale="log", yscale="log", xlabel="number of heads (equal width)", title=title)
            axes.set_ylabel("relative to one head (×)")
            plain_ticks(axes.xaxis, heads)
            plain_ticks(axes.yaxis, [0.5, 1, 2, 4, 8, 16])
            axes.legend(loc="upper left")
        figure.suptitle("One attention layer, width 256, 512 tokens, divided into more and more heads")


CLAIMS = [FreeLunch()]
