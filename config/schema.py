"""Every option of Byeol: its type, its default, what it means and what is allowed.

Five sections, `model`, `data`, `optim`, `train` and `log`, make a `Config`. Presets (the `*.toml` beside this file)
and the command line fill them; a checkpoint's settings come back through them. Nothing is coerced, nothing unknown is
accepted, and two values that cannot meet are refused together. None always means "derived": `resolve` says from what.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of options. What would have no effect is refused: an option in `NEEDS` may differ from its default
    only if another one has one of the values named there."""

    NEEDS: ClassVar[dict[str, tuple[str, set[str]]]] = {}

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for option, (other, values) in self.NEEDS.items():
            value, found = getattr(self, option), getattr(self, other)
            if value != type(self).model_fields[option].default and found not in values:
                raise ValueError(f"{option} = {value} needs {other} = {' or '.join(sorted(values))}, it is {found}")
        return self


class RopeScaling(Section):
    """How rotary frequencies are stretched so that a model reads further than it was trained (Hugging Face's forms)."""

    NEEDS = {
        "factor": ("kind", {"linear", "ntk", "yarn", "llama3"}),
        "original_max_seq_len": ("kind", {"yarn", "llama3"}),
        "low_freq_factor": ("kind", {"llama3"}),
        "high_freq_factor": ("kind", {"llama3"}),
        "beta_fast": ("kind", {"yarn"}),
        "beta_slow": ("kind", {"yarn"}),
    }

    kind: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    """none; linear (positions divided by factor); ntk (theta grown instead); yarn (arXiv 2309.00071); llama3."""
    factor: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """How many times further than original_max_seq_len."""
    original_max_seq_len: PositiveInt = 8192
    """The context the unscaled model was trained on (yarn, llama3)."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_seq_len / low_freq_factor are stretched in full."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_seq_len / high_freq_factor are left alone."""
    beta_fast: PositiveFloat = 32.0
    """yarn: dimensions that turn more often than this over the original context are left alone."""
    beta_slow: PositiveFloat = 1.0
    """yarn: dimensions that turn less often than this over the original context are stretched in full."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "none" and self.factor == 1:
            raise ValueError(f"kind = {self.kind} needs a factor above 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be greater than "
                f"low_freq_factor = {self.low_freq_factor}"
            )
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} must be greater than beta_slow = {self.beta_slow}")
        return self


class ModelConfig(Section):
    """The shape of the network. The defaults are Llama's choices at the size of a laptop."""

    NEEDS = {
        "rope_theta": ("position", {"rope"}),
        "n_encoder_layer": ("kind", {"encoder_decoder"}),
        "source_vocab_size": ("kind", {"encoder_decoder"}),
    }

    kind: Literal["decoder", "encoder_decoder"] = "decoder"
    """decoder (a GPT) or encoder_decoder (the Transformer of 2017)."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding. Omitted: the tokenizer's."""
    source_vocab_size: PositiveInt | None = None
    """Rows of the encoder's embedding, where data.target_tokenizer gives the two sides a tokenizer each. Omitted: the
    source tokenizer's."""
    max_seq_len: PositiveInt = 256
    """The training context, in tokens; longer pairs are left out. Only learned positions end there."""
    n_layer: PositiveInt = 6
    """Blocks of the decoder."""
    n_encoder_layer: PositiveInt | None = None
    """Blocks of the encoder (encoder_decoder only). Omitted: n_layer."""
    n_head: PositiveInt = 6
    """Query heads."""
    n_kv_head: PositiveInt | None = None
    """Key and value heads: n_head is multi-head, 1 multi-query, in between grouped-query attention. Omitted: n_head."""
    head_dim: PositiveInt | None = None
    """Width of a head. Omitted: d_model / n_head."""
    d_model: PositiveInt = 384
    """Width of the residual stream."""
    d_ff: PositiveInt | None = None
    """Width of the feed-forward. Omitted: 4 d_model; for swiglu 8/3 d_model, rounded up to a multiple of 32."""
    window: PositiveInt | None = None
    """Sliding window: a token sees itself and the window - 1 before it (an encoder, and who looks at it, sees all).
    Omitted: everything before it."""
    position: Literal["sinusoidal", "learned", "rope", "none"] = "rope"
    """How a token knows its place: sinusoidal (2017, added), learned (GPT-2), rope (rotary), none."""
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = RopeScaling()
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """LayerNorm (2017, GPT-2) or RMSNorm (Llama)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in every norm."""
    norm_position: Literal["pre", "post"] = "pre"
    """pre: x + f(norm(x)), a norm at the end (GPT-2); post: norm(x + f(x)), none at the end (2017)."""
    activation: Literal["relu", "gelu", "swiglu", "relu2"] = "swiglu"
    """Of the feed-forward: relu (2017), gelu (GPT-2's tanh form), swiglu (Llama), relu2 (squared ReLU)."""
    qk_norm: bool = False
    """RMSNorm on the queries and keys of each head, before the rotation (Qwen3)."""
    attention_scale: PositiveFloat | None = None
    """What multiplies q.k before the softmax. Omitted: 1 / sqrt(head_dim)."""
    bias: bool = False
    """Biases in every linear layer and LayerNorm (never in the head)."""
    tie_embeddings: bool = True
    """The head is the embedding, transposed."""
    dropout: Share = 0.0
    """Share of the embeddings and of each sublayer's output that is zeroed in training."""
    kernel: Literal["auto", "reference", "fused", "matmul", "blocked"] = "auto"
    """How attention is computed: reference (the equation), fused (torch's), matmul, blocked (a sliding window in time
    that grows with length times window; all else as auto), auto (whichever is faster here)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        n_kv_head = self.n_kv_head or self.n_head
        if n_kv_head > self.n_head:
            raise ValueError(f"n_kv_head = {n_kv_head} must not be greater than n_head = {self.n_head}")
        if self.n_head % n_kv_head:
            raise ValueError(f"n_head = {self.n_head} must be a multiple of n_kv_head = {n_kv_head}")
        if self.head_dim is None and self.d_model % self.n_head:
            raise ValueError(f"d_model = {self.d_model} must be a multiple of n_head = {self.n_head}, or give head_dim")
        head_dim = self.head_dim or self.d_model // self.n_head
        if self.position == "rope" and head_dim % 2:
            raise ValueError(f"position = rope needs an even head_dim, it is {head_dim}")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"position = sinusoidal needs an even d_model, it is {self.d_model}")
        if self.position != "rope" and self.rope_scaling.kind != "none":
            raise ValueError(
                f"rope_scaling.kind = {self.rope_scaling.kind} needs position = rope, it is {self.position}"
            )
        return self

    def resolve(self, vocab_size: int | None = None, source_vocab_size: int | None = None) -> "ModelConfig":
        """A copy in which everything derived is a number. `vocab_size` (the tokenizer's) fills an omitted one, and
        `source_vocab_size` (that of the sources, if they have their own) another."""
        hidden = -(-self.d_model * 8 // 3 // 32) * 32 if self.activation == "swiglu" else 4 * self.d_model
        head_dim = self.head_dim or self.d_model // self.n_head
        derived = {
            "vocab_size": self.vocab_size or vocab_size,
            "source_vocab_size": self.source_vocab_size or source_vocab_size,
            "n_encoder_layer": self.n_encoder_layer or (self.n_layer if self.kind == "encoder_decoder" else None),
            "n_kv_head": self.n_kv_head or self.n_head,
            "head_dim": head_dim,
            "d_ff": self.d_ff or hidden,
            "attention_scale": self.attention_scale or head_dim**-0.5,
        }
        return self.model_copy(update=derived)


class DataConfig(Section):
    """The text, and how it becomes numbers."""

    source: str = "stories"
    """stories, pydoc, a file (.txt, .md, .jsonl, .parquet; pairs also .tsv), a folder of them, https://….txt, or
    hub:NAME[:SUBSET][:SPLIT] (Hugging Face). Pairs alone: copy, reverse, sort, numbers."""
    tokenizer: str = "bpe"
    """bytes, chars, bpe (byte-level, trained on the corpus), or the name of a tiktoken encoding such as gpt2."""
    target_tokenizer: str | None = None
    """Of pairs: another tokenizer for the targets, of the same kinds. Omitted: both sides share one."""
    bpe_vocab_size: Annotated[int, Field(ge=258, le=2**24)] = 2048
    """Ids of each trained bpe, end of text included; other tokenizers do not mind it."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the documents, evenly spread, that is kept for validation; of a single text, its end."""
    text_field: str | None = None
    """Which field of hub:, .jsonl or .parquet rows holds the text. Omitted: text, or the only one that holds any."""
    source_field: str = "source"
    """Which field of a pair's row holds the source; translation.en is the field en inside translation."""
    target_field: str = "target"
    """Which field of a pair's row holds the target."""
    max_tokens: PositiveInt = 2_000_000
    """Where a generated or streamed corpus (stories, copy, hub:, …) ends, in tokens (of pairs, both sides together); a
    file is always read whole."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        built_in, fetched = self.source in ("stories", "pydoc"), self.source.startswith(("http://", "https://"))
        text = self.source.lower().endswith((".txt", ".md", ".tsv")) and not self.source.startswith("hub:")
        if self.text_field not in (None, "text") and (built_in or fetched or text):  # "text": found anyway
            raise ValueError(
                f"text_field = {self.text_field} needs rows with fields (.jsonl, .parquet or hub:NAME), "
                f"source is {self.source}"
            )
        return self


class OptimConfig(Section):
    """How weights change."""

    NEEDS = {
        "betas": ("name", {"adamw", "muon"}),
        "matrix_learning_rate": ("name", {"muon"}),
        "decay_fraction": ("schedule", {"wsd"}),
        "min_learning_rate": ("schedule", {"cosine", "wsd", "noam"}),
    }

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """adamw; muon for the matrices inside the blocks, with adamw for all else; or plain sgd."""
    learning_rate: PositiveFloat = 3e-3
    """The highest learning rate."""
    matrix_learning_rate: PositiveFloat = 0.02
    """muon: the highest learning rate of the matrices inside the blocks."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where the schedule ends."""
    warmup_steps: NonNegativeInt = 50
    """Steps over which the rate rises linearly to its peak; a shorter run rises all the way."""
    schedule: Literal["cosine", "wsd", "constant", "noam"] = "cosine"
    """After the warm-up: cosine; wsd (stable, then linear decay over decay_fraction); constant; noam (1/sqrt(step))."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.4
    """wsd: the share of all steps, at the end, over which the rate falls."""
    weight_decay: NonNegativeFloat = 0.1
    """On matrices only: never on norms or biases."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)  # not strict: TOML has no tuple, only [ ]
    """AdamW's averaging of the gradient and of its square."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; 0: off."""
    label_smoothing: Share = 0.0
    """Share of each target spread over the vocabulary (training only)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate} must not be greater than "
                f"learning_rate = {self.learning_rate}"
            )
        return self


class TrainConfig(Section):
    """How long, how much at a time, and on what."""

    run_dir: str | None = None
    """Folder of the run. Omitted: the next free runs/PRESET, runs/PRESET-2, ..."""
    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    max_minutes: NonNegativeFloat = 0.0
    """End in so many minutes from the first step on, evaluations included, with the schedule complete; 0: no limit."""
    batch_size: PositiveInt = 32
    """Sequences of a step, all processes together."""
    micro_batch_size: PositiveInt | None = None
    """Sequences of one forward and backward pass of one process; divides batch_size. Omitted: each makes one."""
    eval_interval: NonNegativeInt = 250
    """Steps between validations over the whole split (one always ends the run); 0: only at the end."""
    checkpoint_interval: NonNegativeInt = 250
    """Steps between checkpoints, besides one before each validation; 0: no others."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay; the best one always does."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the weights, the batches and dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda if there is one, else mps, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the matrix products (autocast); weights, optimizer and loss stay float32. auto: bfloat16 where it is fast."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile, which needs a C++ compiler. auto: on a CUDA GPU, and where a decoder trains for
    minutes on a CPU."""
    init_from: Annotated[str, Field(min_length=1)] | None = None
    """Begin with the weights, the architecture and the tokenizer of a run, or of a model in Hugging Face's layout: its
    folder, or its name on the Hub. Omitted: fresh ones."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How several processes (torchrun) share a model: ddp, each holds all of it; fsdp (FSDP2), each a slice of all
    weights, gradients and moments."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_batch_size and (over := self.batch_size % self.micro_batch_size):
            sizes = self.batch_size - over, self.batch_size - over + self.micro_batch_size
            raise ValueError(
                f"batch_size = {self.batch_size} must be a multiple of micro_batch_size = {self.micro_batch_size}; the "
                f"nearest: {' and '.join(str(size) for size in sizes if size)}"
            )
        return self


class LogConfig(Section):
    """What is told, and where."""

    NEEDS = {"wandb_project": ("wandb", {"offline", "online"})}

    interval: PositiveInt = 10
    """Steps between lines of progress."""
    sample_tokens: Annotated[int, Field(ge=0, le=10_000)] = 60
    """Tokens written by the model after each validation, to watch it learn (of pairs: some translations); 0: none."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases."""
    wandb_project: str = "byeol"
    """Its project there."""


class Config(Section):
    """Everything a run is made of."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()
