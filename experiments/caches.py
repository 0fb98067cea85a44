"""What keys and values cost: multi-head, grouped, multi-query, windows."""

from bisect import bisect_right
from functools import partial
from statistics import mean, median

import torch
from torch import Tensor

from cache import KVCache
from config.schema import ModelConfig
from experiments.claim import CONDITION, FAILS, HOLDS, Claim, Numbers, Verdict
from experiments.heads import by_heads
from experiments.lab import SEEDS, Batch, above, fit, in_turn, plain_ticks, slope, told, trained
from experiments.positions import CONTEXT, loss_of
from model import Decoder, build_model


def stored(config: ModelConfig, rows: int, length: int, dtype=torch.bfloat16, device=None) -> int:
    """Bytes of the storages that a cache of this model holds for `rows` texts of `length` tokens."""
    cache = KVCache.allocate(config, rows, length, dtype, device)
    return sum(tensor.untyped_storage().nbytes() for tensor in (*cache.keys, *cache.values))


def largest_batch(config: ModelConfig, length: int, memory: int) -> int:
    """How many texts of `length` tokens a cache may hold in `memory` bytes: 0, or the last that fits."""
    return bisect_right(range(1, memory), memory, key=lambda rows: stored(config, rows, length, device="meta"))


class CacheIsThePrice(Claim):
    id = "M7"
    english = "Multi-head attention pays with its cache: it grows with heads and length, and limits the batch."
    korean = "멀티 헤드 어텐션의 대가는 KV 캐시로 치른다. 캐시는 헤드 수와 길이에 비례해 커져서 배치 크기를 제한한다."
    prediction = (
        "The bytes that a cache of 6 layers really holds, in bfloat16, grow in proportion to the length and to the "
        "number of heads, 1 to 32, with a total width of 512 (as the essay divides it) as with heads of 64; the "
        "largest batch that fits into 1 GiB falls in proportion."
    )
    rule = (
        "fitted exponents within 0.05 of the predicted. Holds if length and heads, at both widths, have exponent 1 "
        "and length times largest batch is constant (exponent -1); holds with a condition if heads have it with "
        "heads of 64 alone; does not hold otherwise"
    )
    heads, lengths, memory = (1, 2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192), 2**30

    def measure(self) -> Numbers:
        def shape(n_head: int, head_dim: int) -> ModelConfig:
            return ModelConfig(n_layer=6, n_head=n_head, head_dim=head_dim, d_model=n_head * head_dim)

        return {
            "heads": list(self.heads),
            "fixed_width": [stored(shape(n, 512 // n), 1, 1024) for n in self.heads],
            "fixed_head": [stored(shape(n, 64), 1, 1024) for n in self.heads],
            "formula": [2 * 6 * n * 64 * 1024 * 2 for n in self.heads],
            "lengths": list(self.lengths),
            "by_length": [stored(shape(8, 64), 1, length) for length in self.lengths],
            "batches": [largest_batch(shape(8, 64), length, self.memory) for length in self.lengths],
        }

    def _exponents(self, numbers: Numbers) -> dict[str, float]:
        pairs = {"fixed_width": "heads", "fixed_head": "heads", "by_length": "lengths", "batches": "lengths"}
        return {name: slope(numbers[x], numbers[name]) for name, x in pairs.items()}

    def verdict(self, numbers: Numbers) -> Verdict:
        of = self._exponents(numbers)
        off = {name for name, p in of.items() if abs(p - (-1 if name == "batches" else 1)) > 0.05}
        return HOLDS if not off else CONDITION if off == {"fixed_width"} else FAILS

    def finding(self, numbers: Numbers) -> str:
        of, wide = self._exponents(numbers), numbers["fixed_width"]
        off = max(abs(a / b - 1) for a, b in zip(numbers["fixed_head"], numbers["formula"], strict=True))
        meaning = {
            HOLDS: "Many heads cost a large cache, whether each has 64 dimensions or all share 512.",
            CONDITION: "The condition: every further head adds its own width. Where all share 512 dimensions, "
            f"{numbers['heads'][-1]} heads have {wide[-1] / wide[0]:.2f} times the cache of one.",
            FAILS: "The cache does not grow, or limit the batch, as it is said to.",
        }[self.verdict(numbers)]
        return (
            f"{meaning} The cache grows with the power {of['by_length']:.2f} of the length; with the number of heads "
            f"it grows with the power {of['fixed_head']:.2f} if each has 64 dimensions, and {of['fixed_width']:.2f} if "
            "they share a width of 512. Bytes differ from 2 · layers · heads · head width · length · 2 bytes by "
            f"{off:.1%} at most. The largest batch in 1 GiB goes from {numbers['batches'][0]:,} texts of "
            f"{numbers['lengths'][0]:,} tokens to {numbers['batches'][-1]:,} of {numbers['lengths'][-1]:,}."
        )

    def table(self, numbers: Numbers) -> list[list[str]]:
        mib = [[f"{b / 2**20:.2f} MiB" for b in numbers[name]] for name in ("fixed_width", "fixed_head", "formula")]
        by_length = zip(numbers["lengths"], numbers["by_length"], numbers["batches"], strict=True)
        return [
            ["", "cache, width 512", "cache, heads of 64", "formula, heads of 64", "largest batch in 1 GiB (texts)"],
            *([f"heads: {n}, 1,024 tokens", *row, ""] for n, *row in zip(numbers["heads"], *mib, strict=True)),
            *([f"heads: 8, {n:,} tokens", f"{b / 2**20:.2f} MiB", "", "", f"{batch:,}"] for n, b, batch in by_length),
        ]

    def draw(self, numbers: Numbers, figure) -> None:
        heads, batch = figure.subplots(1, 2)
        for name, label in (("fixed_head", "64 dimensions a head"), ("fixed_width", "512, all heads together")):
            heads.plot(numbers["heads"], [b / 2**20 for b in numbers[name]], "o-", label=label)
        heads.set(xscale="log", yscale="log", xlabel="key/value heads", ylabel="cache of 1,024 tokens (MiB)")
        heads.set_title("The cache against the heads")
        plain_ticks(heads.xaxis, numbers["heads"])
        plain_ticks(heads.yaxis, [1, 2, 4, 8, 16, 32, 64])
        heads.legend()
        batch.plot(numbers["lengths"], numbers["batches"], "o-", color="C2")
        batch.set(xscale="log", yscale="log", xlabel="length of each text (tokens)", ylabel="largest batch (texts)")
        batch.set_title("8 heads of 64: what fits into 1 GiB")
        plain_ticks(batch.xaxis, numbers["lengths"])
        plain_ticks(batch.yaxis, numbers["batches"])


VARIANTS = {"MHA": {}, "GQA": {"n_kv_head": 2}, "MQA": {"n_kv_head": 1}, "SWA": {"window": 4}}
GIVEN_BACK = {"GQA": {"d_ff": 416}, "MQA": {"d_ff": 427}}  # of 352: the parameters that shared keys and values save
LONG = 8192  # tokens


def options(name: str, length: int) -> dict:
    return {k: length // v if k == "window" else v for k, v in VARIANTS[name].items()}


def one_of_the_past(seed: int, length: int = CONTEXT, rows: int = 32) -> Batch:
    """Noise (ids 8 to 15) with a single message (0 to 7) somewhere: every later position must tell the message."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_000 * (seed + 1) + step)
        tokens = torch.randint(8, 16, (rows, length), generator=generator)
        place = torch.randint(length, (rows, 1), generator=generator)
        message = torch.randint(8, (rows, 1), generator=generator)
        tokens.scatter_(1, place, message)
        later = torch.arange(length) >= place
        return tokens, torch.where(later, message, -100)

    return batch


@torch.no_grad()
def recall(name: str, steps: int = 300) -> list[float]:
    """The share of right answers at each distance from the message, 0 to CONTEXT - 1, after training on all."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=16, n_layer=2, n_head=8, d_model=64, max_seq_len=CONTEXT, **options(name, CONTEXT))
    model = build_model(config)
    with torch.enable_grad():
        fit(model, one_of_the_past(0), steps)
    right, asked = torch.zeros(CONTEXT), torch.zeros(CONTEXT)
    for step in range(8):
        tokens, targets = one_of_the_past(1, rows=512)(step)
        graded = targets >= 0
        distance = (graded.cumsum(1) - 1)[graded]
        right.index_add_(0, distance, (model(tokens).argmax(-1) == targets)[graded].float())
        asked.index_add_(0, distance, torch.ones(len(distance)))
    return (right / asked).tolist()


def decoding(name: str) -> tuple[Decoder, KVCache]:
    """A model and its cache, as full as after a text of LONG tokens: what is in it changes no time."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(vocab_size=256, n_layer=2, n_head=8, d_model=256, **options(name, LONG))).eval()
    cache = KVCache.allocate(model.config, 1, LONG + 256)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return model, cache


@torch.no_grad()
def decode(model: Decoder, cache: KVCache, tokens: int = 16) -> None:
    """Always from the same length on."""
    cache.row_lengths = [LONG]
    for _ in range(tokens):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)


class FewerKeys(Claim):
    id = "M8"
    english = "MQA saves memory to the extreme, GQA is the golden balance, and a sliding window lightens long contexts."
    korean = (
        "MQA는 메모리를 극한까지 아끼고 GQA는 성능과 효율의 균형점이며, 슬라이딩 윈도는 긴 문맥의 부담을 덜어 준다."
    )
    prediction = (
        "Against 8 heads with a key/value head each (MHA), at equal parameters: one key/value head for all (MQA, "
        "multi-query) keeps 1/8 of the cache, decodes faster and learns a little worse; two (GQA, grouped-query) keep "
        "1/4 and learn nearly as well, better than MQA; a window of a quarter of the text (SWA) has a cache that "
        "stops growing, and still reaches what lies far back."
    )
    rule = (
        "extreme: MQA's cache is 1/8 of MHA's and it decodes after 8,192 tokens at least 1.1 times as fast (the median "
        "of nine repetitions). Frugal: GQA's cache is at most half, its loss at most 1 % above MHA's; balance: MQA's "
        "loss is above GQA's by more than the three seeds differ. Light: SWA's cache is as large at twice the text; "
        "reach: one model recalls at least 90 % of messages from beyond layers × (window - 1) tokens. Holds if all are "
        "so; holds with a condition if extreme, frugal and light are; does not hold otherwise"
    )
    changed = (
        "GQA and MQA had fewer parameters at first and lost 5.7 and 7.9 %; now the feed-forward gets them back. The "
        "models became 128 wide instead of 64. Decoding was timed once, which told another order of GQA and MQA from "
        "run to run; now nine times, each with models and caches built anew, and the median ratio counts. None of this "
        "moved the verdict or a threshold."
    )
    repetitions = 9

    def measure(self) -> Numbers:
        seconds = [
            in_turn({name: partial(decode, *decoding(name)) for name in VARIANTS}, rounds=5)
            for _ in range(self.repetitions)
        ]
        window, found = options("SWA", CONTEXT)["window"], {}
        for name in VARIANTS:
            shape = options(name, CONTEXT) | GIVEN_BACK.get(name, {})
            models = [trained(by_heads(8, seed, **shape)) for seed in SEEDS]
            fixed = ModelConfig(n_layer=2, n_head=8, d_model=256, **options(name, LONG))
            found[name] = {
                "loss": list(map(loss_of, models)),
                "parameters": sum(p.numel() for p in models[0].parameters()),
                "bytes_per_token": stored(fixed, 1, LONG) / LONG,
                "growth": stored(fixed, 1, 2 * LONG) / stored(fixed, 1, LONG),
                "milliseconds": [1000 * found[name] / 16 for found in seconds],
                "recall": recall(name),
            }
        return {"variants": found, "reach": 2 * (window - 1), "window": window, "context": CONTEXT, "length": LONG}

    def _claims(self, numbers: Numbers) -> dict[str, bool]:
        mha, gqa, mqa, swa = (numbers["variants"][name] for name in VARIANTS)
        small = mqa["bytes_per_token"] * 8 <= mha["bytes_per_token"] * 1.01
        half = gqa["bytes_per_token"] * 2 <= mha["bytes_per_token"]
        return {
            "extreme": small and median(self._speed(numbers, "MQA", "MHA")) >= 1.1,
            "frugal": half and mean(gqa["loss"]) <= 1.01 * mean(mha["loss"]),
            "balance": above(mqa["loss"], gqa["loss"]),
            "light": swa["growth"] <= 1.01,
            "reach": self._recalled(numbers, "SWA")[1] >= 0.9,
        }

    def _speed(self, numbers: Numbers, name: str, other: str) -> list[float]:
        """How many times as fast as the other it decodes, in each repetition."""
        ours, others = (numbers["variants"][each]["milliseconds"] for each in (name, other))
        return [b / a for a, b in zip(ours, others, strict=True)]

    def _recalled(self, numbers: Numbers, name: str) -> tuple[float, float]:
        """The share of messages found within the window's reach, and beyond."""
        found, beyond = numbers["variants"][name]["recall"], numbers["reach"] + 1
        return mean(found[:beyond]), mean(found[beyond:])

    def verdict(self, numbers: Numbers) -> Verdict:
        are = self._claims(numbers)
        if not (are["extreme"] and are["frugal"] and are["light"]):
            return FAILS
        return HOLDS if are["balance"] and are["reach"] else CONDITION

    def finding(self, numbers: Numbers) -> str:
        are, (mha, gqa, mqa, _) = self._claims(numbers), numbers["variants"].values()
        failed = [f"*{part}*" for part, so in are.items() if not so]
        lead = {
            HOLDS: "",
            CONDITION: f"The condition: without {' and '.join(failed)}. ",
            FAILS: f"What fails of the five parts: {', '.join(failed)}. ",
        }[self.verdict(numbers)]
        more = mean(gqa["loss"]) / mean(mha["loss"]) - 1
        near, far = self._recalled(numbers, "SWA")
        return (
            f"{lead}MQA keeps {self._share(numbers, 'MQA'):.1%} of MHA's cache and decodes "
            f"{self._told_speed(numbers, 'MQA')} as fast, GQA {self._share(numbers, 'GQA'):.1%} and "
            f"{self._told_speed(numbers, 'GQA')} (median, lowest and highest of {len(mqa['milliseconds'])}); "
            f"{self._faster(numbers)}. GQA's loss is {abs(more):.1%} {'above' if more > 0 else 'below'} MHA's, "
            f"{'within' if more <= 0.01 else 'more than'} the 1 % that the rule allows; MQA's is {told(mqa['loss'])} "
            f"nats, GQA's {told(gqa['loss'])}: {'' if are['balance'] else 'not '}higher by more than the seeds differ. "
            f"SWA's cache {'stops growing' if are['light'] else 'grows on'}; with a window of {numbers['window']} and "
            f"two layers it recalls {near:.0%} of the messages up to {numbers['reach']} tokens back, layers × (window "
            f"- 1), and {far:.0%} beyond, where MHA recalls {self._recalled(numbers, 'MHA')[1]:.0%} (chance: 12.5 %)."
        )

    def _share(self, numbers: Numbers, name: str) -> float:
        return numbers["variants"][name]["bytes_per_token"] / numbers["variants"]["MHA"]["bytes_per_token"]

    def _told_speed(self, numbers: Numbers, name: str) -> str:
        speed = self._speed(numbers, name, "MHA")
        return f"{median(speed):.2f} × ({min(speed):.2f}–{max(speed):.2f})"

    def _faster(self, numbers: Numbers) -> str:
        speed = self._speed(numbers, "MQA", "GQA")
        if min(speed) <= 1 <= max(speed):
            return "which of the two decodes faster these times do not tell"
        how = "faster" if min(speed) > 1 else "more slowly"
        return f"MQA decodes {how} than GQA in each of {len(speed)} repetitions"

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [["variant", "parameters", "cache (bytes per token)", "cache at twice the text", "loss (nats)"]]
        rows[0] += ["ms per token (lowest–highest)", "recall in reach", "recall beyond"]
        for name, of in numbers["variants"].items():
            rows.append([name, f"{of['parameters']:,}", f"{of['bytes_per_token']:,.0f}", f"{of['growth']:.1f} ×"])
            times = of["milliseconds"]
            rows[-1] += [told(of["loss"]), f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})"]
            rows[-1] += [f"{share:.1%}" for share in self._recalled(numbers, name)]
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        pareto, memory = figure.subplots(1, 2)
        for place, (name, of) in enumerate(numbers["variants"].items()):
            loss, size = mean(of["loss"]), of["bytes_per_token"]
            reach = [[loss - min(of["loss"])], [max(of["loss"]) - loss]]
            pareto.errorbar([size], [loss], reach, marker="o", capsize=4, linestyle="none", label=name)
            said = f"{name}, {median(of['milliseconds']):.1f} ms"
            pareto.annotate(said, (size, loss), (6, 6), textcoords="offset points")
            memory.plot([100 * r for r in of["recall"]], linewidth=8 - 2 * place, label=name)
        pareto.set(xscale="log", xlabel=f"cache at {numbers['length']:,} tokens (bytes per token)")
        pareto.set(ylabel="validation loss (nats per token)", title="Loss against cache (median time of a token)")
        sizes = sorted({of["bytes_per_token"] for of in numbers["variants"].values()})
        pareto.set_xlim(sizes[0] / 1.5, sizes[-1] * 6)
        plain_ticks(pareto.xaxis, sizes)
        memory.axvline(numbers["reach"], color="black", linestyle=":", label=f"reach: {numbers['reach']} tokens")
        memory.axhline(12.5, color="gray", linestyle="--", label="chance")
        memory.set(xlabel="distance to the message (tokens)", ylabel="messages recalled (%)", ylim=(0, 105))
        memory.set_title("Recall with two layers")
        memory.legend(loc="center right", fontsize="small")


PUBLISHED = {  # config.json beside each model card: layers, heads, context, window; all have 8 kv heads, 128 wide
    "Llama 3 8B": ("meta-llama/Meta-Llama-3-8B", 32, 32, 8192, None),
    "Llama 3 70B": ("meta-llama/Meta-Llama-3-70B", 80, 64, 8192, None),
    "Mistral 7B v0.1": ("mistralai/Mistral-7B-v0.1", 32, 32, 32768, 4096),
}


class PublishedModels(Claim):
    id = "M9"
    english = "Llama 3 and Mistral replace pure multi-head attention (MHA): by MQA, GQA or a sliding window (SWA)."
    korean = "Llama 3와 Mistral은 순수한 MHA 대신 MQA, GQA, 슬라이딩 윈도 어텐션을 쓴다."
    prediction = (
        "Of the published configurations each has fewer key/value heads than heads or a window, its cache (allocated "
        "by our own KVCache in bfloat16, for a text of its full context) is at most half of what it would be with "
        "MHA and no window, and each of the three techniques is used by one of them."
    )
    rule = (
        "holds if every model uses a technique, has at most half the cache, and each technique is used by some "
        "model; holds with a condition if a technique is used by none; does not hold if a model uses none or saves "
        "less than half"
    )

    def measure(self) -> Numbers:
        models = {}
        for name, (card, n_layer, n_head, length, window) in PUBLISHED.items():
            options = {"n_layer": n_layer, "n_head": n_head, "n_kv_head": 8, "head_dim": 128, "d_model": 128 * n_head}
            options |= {"max_seq_len": length, "window": window}
            config = ModelConfig(**options)
            plain = config.model_copy(update={"n_kv_head": config.n_head, "window": None})
            models[name] = options | {
                "source": f"https://huggingface.co/{card}",
                "techniques": techniques(config),
                "bytes": stored(config, 1, length, device="meta"),
                "bytes_mha": stored(plain, 1, length, device="meta"),
            }
        return {"models": models}

    def _unused(self, numbers: Numbers) -> list[str]:
        used = {technique for of in numbers["models"].values() for technique in of["techniques"]}
        return [technique for technique in ("MQA", "GQA", "SWA") if technique not in used]

    def verdict(self, numbers: Numbers) -> Verdict:
        if any(not of["techniques"] or 2 * of["bytes"] > of["bytes_mha"] for of in numbers["models"].values()):
            return FAILS
        return CONDITION if self._unused(numbers) else HOLDS

    def finding(self, numbers: Numbers) -> str:
        said = "; ".join(
            f"{name} ({' and '.join(of['techniques']) or 'none of them'}) keeps {of['bytes'] / 2**30:.2f} GiB for "
            f"{of['max_seq_len']:,} tokens instead of {of['bytes_mha'] / 2**30:.2f}"
            for name, of in numbers["models"].items()
        )
        meaning = {
            HOLDS: "Each uses one of the three at least, and each of the three is used.",
            CONDITION: f"The condition: without {' and '.join(self._unused(numbers))}, which none of these uses.",
            FAILS: "Not each of them uses one of the three and halves its cache by it.",
        }[self.verdict(numbers)]
        return f"{meaning} {said}."

    def table(self, numbers: Numbers) -> list[list[str]]:
        rows = [["model", "source", "layers", "heads", "key/value heads", "head width", "window", "context (tokens)"]]
        rows[0] += ["cache (bytes per token)", "had it been MHA", "saving"]
        for name, of in numbers["models"].items():
            rows.append([name, of["source"], *(str(of[k]) for k in ("n_layer", "n_head", "n_kv_head", "head_dim"))])
            rows[-1] += [f"{of['window']:,}" if of.get("window") else "none", f"{of['max_seq_len']:,}"]
            rows[-1] += [f"{of[k] / of['max_seq_len']:,.0f}" for k in ("bytes", "bytes_mha")]
            rows[-1] += [f"{of['bytes_mha'] / of['bytes']:.3g} ×"]
        return rows

    def draw(self, numbers: Numbers, figure) -> None:
        axes, models = figure.subplots(), numbers["models"]
        labels = {"bytes_mha": "had it been MHA without a window", "bytes": "as published"}
        for side, (key, label) in enumerate(labels.items()):
            places = [place + 0.4 * side - 0.2 for place in range(len(models))]
            bars = axes.bar(places, [of[key] / of["max_seq_len"] / 1024 for of in models.values()], 0.4, label=label)
            axes.bar_label(bars, fmt="{:,.0f} KiB")
        names = [f"{n}\n{' + '.join(of['techniques'])}, {of['max_seq_len']:,} tokens" for n, of in models.items()]
        axes.set_xticks(range(len(models)), names)
        axes.set(xlabel="model and the context that it was published for", ylabel="cache (KiB per token, bfloat16)")
        axes.set_title("What published models keep of each token")
        axes.margins(y=0.1)
        axes.legend()


def techniques(config: ModelConfig) -> list[str]:
    shared = {1: ["MQA"], config.n_head: []}.get(config.n_kv_head or config.n_head, ["GQA"])
    return shared + (["SWA"] if config.window else [])


CLAIMS = [CacheIsThePrice(), FewerKeys(), PublishedModels()]
