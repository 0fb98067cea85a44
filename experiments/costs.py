"""What many heads cost beside one."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention import KERNELS, Mask
from config.schema import ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.lab import in_turn, machine, plain_ticks
from model import MultiHeadAttention, build_model

KERNEL_NAMES = {"reference": "definition", "fused": "fused kernel"}
PRODUCTS = "products", "fused attention"  # what computes more when heads are wider
PARTS = *PRODUCTS, "softmax"


def attention_layer(n_head: int, width: int, kernel: str) -> MultiHeadAttention:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=2, n_layer=1, n_head=n_head, d_model=width, kernel=kernel, position="none")
    return build_model(config).decoder.blocks[0].attention


def attend(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    return layer(*layer.queries_keys_values(x), Mask(x.shape[1], x.shape[1], causal=False))


def parts(n_head: int, length: int, width: int) -> dict[str, Callable[[], object]]:
    """What attention itself computes, forward and backward: the two products of its heads, the softmax of their maps,
    and the fused kernel, with heads of this width."""
    q, k, v = (torch.randn(1, n_head, length, width, requires_grad=True) for _ in range(3))
    maps = torch.randn(1, n_head, length, length, requires_grad=True)
    of_maps, of_heads, mask = torch.randn_like(maps), torch.randn_like(v), Mask(length, length, causal=False)

    def products() -> None:
        torch.autograd.grad(q @ k.mT, (q, k), of_maps)
        torch.autograd.grad(maps @ v, (maps, v), of_heads)

    return {
        "products": products,
        "softmax": lambda: torch.autograd.grad(maps.softmax(-1), maps, of_maps),
        "fused attention": lambda: torch.autograd.grad(KERNELS["fused"](q, k, v, mask), (q, k, v), of_heads),
    }


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
        "torch counts them, agree exactly, and so do the time of a forward and backward pass and the memory that the "
        "forward pass keeps for the backward one, by the definition and by the fused kernel."
    )
    rule = (
        "does not hold if parameters or FLOPs differ by more than 1 % among 1 to 32 heads. Holds if, besides, that "
        "time and memory are at most 25 % above one head's, by both kernels and at every number of heads; holds with a "
        "condition (of parameters and FLOPs alone) if not"
    )
    changed = (
        "A first finding laid the slowness of many heads on the softmax, which its numbers did not show. Now products "
        "and softmax are timed alone, too, and the most heads at twice their width (at first not compared per FLOP, "
        "and with gradients of one number repeated); freed memory is kept, as in training. The rule is as it was, "
        "and said *holds with a condition*."
    )
    counts, width, length = (1, 2, 4, 8, 16, 32), 256, 512

    def measure(self) -> Numbers:
        machine()  # which keeps freed memory, as in training
        torch.manual_seed(0)
        x = torch.randn(1, self.length, self.width, requires_grad=True)
        layers = {(n, k): attention_layer(n, self.width, k) for n in self.counts for k in KERNEL_NAMES}
        runs = {key: (lambda layer=layer: attend(layer, x).sum().backward()) for key, layer in layers.items()}
        flops = []
        for n in self.counts:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attend(layers[n, "reference"], x)
            flops.append(counter.get_total_flops())
        for n in self.counts:
            runs |= {(n, part): run for part, run in parts(n, self.length, self.width // n).items()}
        wider = parts(self.counts[-1], self.length, 2 * self.width // self.counts[-1])
        runs |= {("wider", part): wider[part] for part in PRODUCTS}
        seconds = in_turn(runs)
        return {
            "heads": list(self.counts),
            "parameters": [sum(p.numel() for p in layers[n, "fused"].parameters()) for n in self.counts],
            "flops": flops,
            "formula": 8 * self.length * self.width**2 + 4 * self.length**2 * self.width,
            "exponentials": [n * self.length**2 for n in self.counts],
            "seconds": {kernel: [seconds[n, kernel] for n in self.counts] for kernel in KERNEL_NAMES},
            "parts": {part: [seconds[n, part] for n in self.counts] for part in PARTS},
            "twice as wide": {part: seconds["wider", part] for part in PRODUCTS},
            "bytes": {k: [bytes_kept(attend, layers[n, k], x) for n in self.counts] for k in KERNEL_NAMES},
        }

    def verdict(self, numbers: Numbers) -> Verdict:
        if any(max(numbers[name]) > 1.01 * min(numbers[name]) for name in ("parameters", "flops")):
            return FAILS
        costs = [values for name in ("seconds", "bytes") for values in numbers[name].values()]
        return HOLDS if all(max(values) <= 1.25 * values[0] for values in costs) else CONDITION

    def finding(self, numbers: Numbers) -> str:
        heads, eight, verdict = numbers["heads"], numbers["heads"].index(8), self.verdict(numbers)
        told, dearer = [], []
        for kernel, name in KERNEL_NAMES.items():
            time, memory = ([v / of[kernel][0] for v in of[kernel]] for of in (numbers["seconds"], numbers["bytes"]))
            told.append(
                f"by the {name} 8 heads take {time[eight]:.2f} × the time of one and {memory[eight]:.2f} × the memory, "
                f"{heads[-1]} heads {time[-1]:.2f} × and {memory[-1]:.2f} ×"
            )
            pair = {"time": time, "memory": memory}
            dearer += [f"the {what} by the {name}" for what, values in pair.items() if max(values) > 1.25]
        meaning = {
            HOLDS: "More heads add at most a quarter here, in time as in memory.",
            CONDITION: f"The condition: it is true of parameters and FLOPs, not of {', '.join(dearer)}.",
            FAILS: "More heads are not free even in parameters and FLOPs.",
        }[verdict]
        return (
            f"{meaning} Measured, {'; '.join(told)}. The {numbers['flops'][0]:,} FLOPs of one head "
            f"(8·T·C² + 4·T²·C = {numbers['formula']:,}) leave out the softmax, a T × T map for each head, which the "
            f"fused kernel computes too but does not keep.{self._why(numbers) if verdict == CONDITION else ''}"
        )

    def _why(self, numbers: Numbers) -> str:
        """What makes the last doubling of the heads slower, if it is."""
        heads, alone, wide = numbers["heads"], numbers["parts"], numbers["twice as wide"]
        rise = {part: 1000 * (found[-1] - found[-2]) for part, found in alone.items()}
        most = max(("products", "softmax"), key=rise.get)
        if rise[most] <= 0:
            return ""
        times = ", ".join(
            f"{part} {1000 * seconds:.1f} ms instead of {1000 * alone[part][-1]:.1f}" for part, seconds in wide.items()
        )
        slow = [part for part, seconds in wide.items() if seconds < 1.9 * alone[part][-1]]
        narrow = f"So with heads of width {self.width // heads[-1]} each FLOP of {' and of '.join(slow)} takes longer."
        return (
            f" From {heads[-2]} to {heads[-1]} heads the softmax alone changes by {rise['softmax']:+.1f} ms, the "
            f"products alone, of equal FLOPs, by {rise['products']:+.1f}: it is more the {most}. As many heads of "
            f"twice the width have twice these FLOPs, and take: {times}. "
            f"{narrow if slow else 'So that heads are narrow does not explain what they cost.'}"
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        columns = {name: [f"{n:,}" for n in numbers[name]] for name in ("heads", "parameters", "exponentials")}
        columns["MFLOPs"] = [f"{n / 1e6:,.1f}" for n in numbers["flops"]]
        times = {f"time, {name} (ms)": numbers["seconds"][kernel] for kernel, name in KERNEL_NAMES.items()}
        times |= {f"{part} alone (ms)": numbers["parts"][part] for part in PARTS}
        columns |= {heading: [f"{1000 * time:.1f}" for time in found] for heading, found in times.items()}
        for kernel, name in KERNEL_NAMES.items():
            columns[f"kept for backward, {name} (MiB)"] = [f"{n / 2**20:.1f}" for n in numbers["bytes"][kernel]]
        return [list(columns), *map(list, zip(*columns.values(), strict=True))]

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
