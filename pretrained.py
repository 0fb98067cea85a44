"""Weights in and out, in Hugging Face's layouts: GPT-2, Llama, Mistral (a sliding window) and Qwen3 (QK-norm).

python -m pretrained import NAME|FOLDER RUN      a run that sample.py, bench.py and --train.init-from read
python -m pretrained export RUN FOLDER           a folder that transformers opens

One table for each layout says what every parameter is called on both sides. It is read in both directions, and nothing
may be left over on either.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from config import Config, ConfigError, ModelConfig, UserError, command, flatten, to_toml

if TYPE_CHECKING:
    import transformers


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line of `python -m pretrained`. Raises `UserError`."""
    parser = argparse.ArgumentParser(prog="python -m pretrained", description=(__doc__ or "").partition("\n")[0])
    parser.error = _refuse
    parser.add_argument("direction", choices=["import", "export"], help="into a run, or out of one")
    parser.add_argument("source", metavar="SOURCE", help="import: a folder or a name of the Hub; export: a run")
    parser.add_argument("target", metavar="TARGET", type=Path, help="a new folder: the run, or what others open")
    parser.add_argument("--checkpoint", metavar="NAME", help="export: best (default), last, or a step-NNNNNN")
    options = parser.parse_args(argv)
    if options.direction == "import" and options.checkpoint:
        parser.error("--checkpoint is of a run, for export")
    if options.direction == "export" and not (Path(options.source) / "config.toml").is_file():
        parser.error(f"{options.source} is no run: it has no config.toml")
    if options.target.exists() and (not options.target.is_dir() or any(options.target.iterdir())):
        parser.error(f"{options.target} is in use already; choose another")
    return options


def _refuse(message: str) -> NoReturn:
    raise UserError(message.removeprefix("argument "))


if __name__ == "__main__":  # mistakes are answered before torch takes its seconds to load
    OPTIONS = command(read_arguments)(sys.argv[1:])

import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from attention import rotary_angles
from checkpoint import (
    Tensors,
    load_model,
    load_weights,
    parameters_by_name,
    read_state,
    save_checkpoint,
    write_whole,
)
from config.schema import RopeScaling
from data.hub_tokenizer import read_tokenizer, special_ids, write_tokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from model import Decoder, build_model


class Pair(NamedTuple):
    """A module under both names, for its weight and, where it has one, its bias; * is the number of a layer."""

    ours: str  # [qkv]: three modules, in theirs one, with the rows of all three one below another
    theirs: str
    transposed: bool = False  # Conv1D keeps its matrix as (inputs, outputs)


GPT2 = (
    Pair("decoder.embed", "transformer.wte"),
    Pair("decoder.position", "transformer.wpe"),
    Pair("decoder.blocks.*.attention_norm", "transformer.h.*.ln_1"),
    Pair("decoder.blocks.*.attention.[qkv]_proj", "transformer.h.*.attn.c_attn", transposed=True),
    Pair("decoder.blocks.*.attention.o_proj", "transformer.h.*.attn.c_proj", transposed=True),
    Pair("decoder.blocks.*.feed_forward_norm", "transformer.h.*.ln_2"),
    Pair("decoder.blocks.*.feed_forward.up_proj", "transformer.h.*.mlp.c_fc", transposed=True),
    Pair("decoder.blocks.*.feed_forward.down_proj", "transformer.h.*.mlp.c_proj", transposed=True),
    Pair("decoder.norm", "transformer.ln_f"),
    Pair("lm_head", "lm_head"),
)
LLAMA = (  # Mistral and Qwen3 as well
    Pair("decoder.embed", "model.embed_tokens"),
    Pair("decoder.blocks.*.attention_norm", "model.layers.*.input_layernorm"),
    Pair("decoder.blocks.*.attention.q_proj", "model.layers.*.self_attn.q_proj"),
    Pair("decoder.blocks.*.attention.k_proj", "model.layers.*.self_attn.k_proj"),
    Pair("decoder.blocks.*.attention.v_proj", "model.layers.*.self_attn.v_proj"),
    Pair("decoder.blocks.*.attention.o_proj", "model.layers.*.self_attn.o_proj"),
    Pair("decoder.blocks.*.attention.q_norm", "model.layers.*.self_attn.q_norm"),
    Pair("decoder.blocks.*.attention.k_norm", "model.layers.*.self_attn.k_norm"),
    Pair("decoder.blocks.*.feed_forward_norm", "model.layers.*.post_attention_layernorm"),
    Pair("decoder.blocks.*.feed_forward.gate_proj", "model.layers.*.mlp.gate_proj"),
    Pair("decoder.blocks.*.feed_forward.up_proj", "model.layers.*.mlp.up_proj"),
    Pair("decoder.blocks.*.feed_forward.down_proj", "model.layers.*.mlp.down_proj"),
    Pair("decoder.norm", "model.norm"),
    Pair("lm_head", "lm_head"),
)

# Settings that only have another name.
GPT2_SETTINGS = {
    "vocab_size": "vocab_size", "max_seq_len": "n_positions", "n_layer": "n_layer", "n_head": "n_head",
    "d_model": "n_embd", "d_ff": "n_inner", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
LLAMA_SETTINGS = {
    "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "head_dim": "head_dim",
    "d_model": "hidden_size", "d_ff": "intermediate_size", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
ACTIVATIONS = {"relu": "relu", "gelu": "gelu_new"}  # GPT-2's; the others' is silu, in SwiGLU

CLASSES = {"gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}  # by their model_type
# What no logits depend on: notes, the use of a model, its training. (The ids of special tokens are a tokenizer's.)
BESIDES = {
    "_name_or_path", "architectures", "dtype", "id2label", "label2id", "model_type", "output_attentions",
    "output_hidden_states", "pretraining_tp", "problem_type", "return_dict", "transformers_version", "use_cache",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range", "reorder_and_upcast_attn",
    "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward", "max_window_layers",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip
BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\..*rotary_emb\.inv_freq")  # in old files


# The way out


def to_hugging_face(model: Decoder, tokenizer: Tokenizer | None = None) -> "transformers.PreTrainedModel":
    """The same model as one of `transformers`, in evaluation mode, with a copy of the weights, in their type and on
    their device. Its special tokens are those of the `tokenizer`, and it writes no ids but those; without, it has none.

    Raises ValueError for a setting that `transformers` cannot express, UserError if it is not installed.
    """
    transformers = _transformers()
    c, head = model.config, model.lm_head.weight
    name = _name(c)
    special = special_ids(tokenizer) if tokenizer else {}
    config = getattr(transformers, f"{name}Config")(**_settings(c, name) | special)
    with torch.random.fork_rng(devices=()):  # its first weights are drawn, then overwritten
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=head.dtype)
    if c.position == "rope":
        frequencies = rotary_angles(torch.tensor(1), c.head_dim, c.rope_theta, c.rope_scaling)
        if not torch.allclose(theirs.model.rotary_emb.inv_freq, frequencies, rtol=1e-4, atol=0):
            raise ValueError(f"model.rope_scaling ({c.rope_scaling}) gives other frequencies in transformers")
    theirs.load_state_dict(_renamed(model.state_dict(), _table(c), c.n_layer), strict=True)
    if tokenizer and tokenizer.vocab_size < c.vocab_size:  # rows of padding are no tokens
        theirs.generation_config.suppress_tokens = [*range(tokenizer.vocab_size, c.vocab_size)]
    return theirs.to(head.device).eval()


def export(run: Path, folder: Path, checkpoint: str = "best") -> None:
    """Writes `folder`, which `AutoModelForCausalLM` and `AutoTokenizer` open: whole or not at all.

    Raises `UserError` for a run that no class of theirs can express, naming the setting.
    """
    model, tokenizer, config = load_model(run, checkpoint)
    try:
        theirs = to_hugging_face(model, tokenizer)
    except ValueError as error:
        raise UserError(f"{run} cannot be exported: {error}") from None
    fresh = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    _transformers().utils.logging.disable_progress_bar()
    theirs.save_pretrained(fresh)
    write_tokenizer(tokenizer, fresh)
    last = not (run / checkpoint).exists()  # a run that has no best yet, as load_model knows
    (fresh / "README.md").write_text(_card(run, run / ("last" if last else checkpoint), config, theirs), "utf-8")
    for file in fresh.iterdir():
        file.chmod(fresh.stat().st_mode & 0o666)  # readable for whom other files are
    if folder.exists():
        folder.rmdir()
    fresh.rename(folder)
    print(f"{run} is {type(theirs).__name__} in {folder}, with its tokenizer and a model card")


def _card(run: Path, checkpoint: Path, config: Config, theirs: "transformers.PreTrainedModel") -> str:
    """README.md: what it is, what was measured, how it is used; of a path on this machine it tells the end alone."""
    config = Config.model_validate(_without_folders(config.model_dump()))
    step = (state := read_state(checkpoint))["step"]
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines() if (run / "metrics.jsonl").exists() else []
    measured = [entry for entry in map(json.loads, lines) if entry["step"] == step and "val_loss" in entry]
    units = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
    table = [
        f"| {split} | {measured[-1][f'{name}_{key}']:.4f} {unit} |"
        for name, split in {"val": "validation", "held_out": "held-out combinations"}.items()
        for key, unit in units.items()
        if measured and f"{name}_{key}" in measured[-1]
    ]
    begun = f", beginning with `{config.train.init_from}`" if config.train.init_from else ""
    n_parameters = sum(parameter.numel() for parameter in theirs.parameters())
    trained = f"trained with Byeol on `{config.data.source}` ({state['tokens']:,} tokens){begun}"
    return CARD.format(
        name=run.resolve().name,
        what=f"{type(theirs).__name__}, {n_parameters:,} parameters, {trained if step else f'not trained here{begun}'}",
        step=f"{step:,}",
        measured="\n".join(table) or "| | no loss was measured |",
        config=to_toml(config),
    )


def _without_folders(value):
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{what}.

| loss after {step} steps | |
| --- | --- |
{measured}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")
ids = tokenizer("Once", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```

Its configuration:

```toml
{config}```
"""


# The way in


@dataclass(frozen=True)
class Source:
    """What training may begin with; the weights are read when they are asked for."""

    name: str
    model: ModelConfig
    data: dict[str, object]  # the options of `data` that its tokenizers answer to
    tokenizers: dict[str, Tokenizer]  # by their folders in a run
    weights: Callable[[], Tensors]


def open_source(name: str) -> Source:
    """A run, or a model in Hugging Face's layout: a folder, or a name of the Hub. Raises `UserError`."""
    if (Path(name) / "config.toml").is_file():
        model, _, config = load_model(name)
        data = {option: getattr(config.data, option) for option in ("tokenizer", "target_tokenizer", "bpe_vocab_size")}
        weights = {weight: parameter.detach() for weight, parameter in parameters_by_name(model).items()}
        return Source(name, config.model, data, run_tokenizers(Path(name), config), lambda: weights)
    folder = _folder(name)
    theirs = _read_config(folder)
    config, ends = _model_config(theirs, folder), theirs.eos_token_id
    tokenizer = read_tokenizer(folder, ends[0] if isinstance(ends, list) else ends)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{folder} has {tokenizer.vocab_size} ids in its tokenizer, and {config.vocab_size} embeddings")
    data = {"tokenizer": tokenizer.name, "target_tokenizer": None, "bpe_vocab_size": max(tokenizer.vocab_size, 258)}
    return Source(name, config, data, {"tokenizer": tokenizer}, partial(_read_weights, folder, config))


def from_hugging_face(source: "str | Path | transformers.PreTrainedModel") -> Decoder:
    """The same model as that of a folder, of a name of the Hub, or one of `transformers` in memory; in evaluation mode,
    with a copy of the weights in float32 on the CPU.

    Raises `UserError` unless every setting is one of ours, and every weight has its place and every place its weight.
    """
    if isinstance(source, str | Path):
        folder = _folder(str(source))
        config = _model_config(_read_config(folder), folder)
        return _built(config, _read_weights(folder, config), folder)
    where = Path(type(source).__name__)
    config = _model_config(source.config, where)
    return _built(config, _our_weights(source.state_dict(), config, where), where)


def import_run(name: str, run: Path) -> None:
    """Makes a `run` of a model that was trained elsewhere: it can be read, measured and begun with, but not resumed."""
    source = open_source(name)
    fresh = run.with_name(f".{run.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for folder, tokenizer in source.tokenizers.items():
        tokenizer.save(fresh / folder)
    config = Config.model_validate({"data": source.data, "train": {"init_from": name}, "model": source.model})
    model = _built(source.model, source.weights(), Path(name))
    counters = dict.fromkeys(("step", "tokens", "best_step", "metrics_bytes", "threads"), 0)
    state = {**counters, "seconds": 0.0, "best_loss": None, "scaler": {}, "torch": torch.__version__, "corpus": ""}
    state |= {"machine": {"device": "cpu", "dtype": "float32", "compile": "off"}, "config": config.model_dump()}
    state["tokenizers"] = {folder: tokenizer.fingerprint for folder, tokenizer in source.tokenizers.items()}
    save_checkpoint(fresh, model, torch.optim.SGD(model.parameters()), state)
    write_whole(fresh / "config.toml", to_toml(config))
    if run.exists():
        run.rmdir()
    fresh.rename(run)
    print(f"{name} is the run {run}; read it: python sample.py {run}")


def inherit(config: Config, given: Collection[str], source: Source) -> Config:
    """`config` with the architecture and the tokenizer of `source`; of the `model` only what its weights know nothing
    of may be chosen. Raises `ConfigError` for another option in `given` that says otherwise."""
    free = {"dropout", "kernel"} | (set() if source.model.position == "learned" else {"max_seq_len"})
    asked = dict(flatten(config.model_dump()))
    for option, value in flatten({"model": source.model.model_dump(), "data": source.data}):
        derived = asked[option] is None and option != "model.window"  # which means: whatever fits
        if option in given and option.partition(".")[2] not in free and not derived and asked[option] != value:
            raise ConfigError(
                f"{option} = {asked[option]} cannot be where train.init_from = {source.name}, which has {value}; leave "
                f"it out of the preset and the command line: architecture and tokenizer come from there"
            )
    chosen = {option: getattr(config.model, option) for option in sorted(free) if f"model.{option}" in given}
    return config.model_copy(
        update={"model": source.model.model_copy(update=chosen), "data": config.data.model_copy(update=source.data)}
    )


def run_tokenizers(run: Path, config: Config) -> dict[str, Tokenizer]:
    """Those that a run keeps, by their folders."""
    own = ["source_tokenizer"] if config.model.source_vocab_size is not None else []
    return {name: load_tokenizer(run / name) for name in ["tokenizer", *own]}


def _built(config: ModelConfig, weights: Tensors, where: Path) -> Decoder:
    with torch.random.fork_rng(devices=()):  # its first weights are drawn, then overwritten
        model = build_model(config)
    load_weights(model, weights, where)
    return model.eval()


def _folder(name: str) -> Path:
    """The folder itself, or where the Hub's files lie once they are fetched."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "model*.safetensors*", "*token*.json", "vocab.json", "merges.txt", "chat_template.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"there is no folder {name}, and from the Hugging Face Hub it did not come: {reason}") from None


def _read_config(folder: Path) -> "transformers.PretrainedConfig":
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text("utf-8"))
        kind = found.get("model_type")
        if kind not in CLASSES:
            raise UserError(f"{file}: model_type = {kind} is none of {', '.join(CLASSES)}")
        if "quantization_config" in found:
            raise UserError(f"{file}: quantization_config: quantised weights must be made numbers again first")
        return _transformers().AutoConfig.from_pretrained(folder)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(
            f"{folder} has neither a run's config.toml nor the config.json of Hugging Face's layout"
        ) from None
    except Exception as error:  # of many kinds: what can be wrong is theirs to say
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def _model_config(theirs: "transformers.PretrainedConfig", where: Path) -> ModelConfig:
    """Our configuration of such a model. Raises `UserError` unless it, translated back, is theirs again."""
    name = CLASSES.get(theirs.model_type)
    if name is None:
        raise UserError(f"{where}: model_type = {theirs.model_type} is none of {', '.join(CLASSES)}")
    names = GPT2_SETTINGS if name == "GPT2" else LLAMA_SETTINGS
    values = {ours: getattr(theirs, their) for ours, their in names.items()}
    if name == "GPT2":
        values |= {"norm": "layernorm", "position": "learned", "bias": True, "dropout": theirs.resid_pdrop}
        values["activation"] = "relu" if theirs.activation_function == "relu" else "gelu"
        values["attention_scale"] = None if theirs.scale_attn_weights else 1.0
    else:
        values |= {"qk_norm": name == "Qwen3", "bias": name == "Llama" and theirs.attention_bias} | _rotary(theirs)
        values["window"] = None if name == "Llama" else theirs.sliding_window
    try:
        config = ModelConfig.model_validate(values).resolve()
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(["model", *map(str, first["loc"])])
        raise UserError(f"{where} cannot be imported: {option} = {first['input']!s:.80}: {first['msg']}") from None
    expected = getattr(_transformers(), f"{name}Config")(**_settings(config, name)).to_dict()
    found = theirs.to_dict()
    found["n_inner"] = found.get("n_inner") or config.d_ff
    found["rope_parameters"] = expected.get("rope_parameters", {}) | _rope_parameters_of(theirs)
    for key in sorted(expected.keys() - BESIDES):
        if found.get(key) != expected[key]:
            raise UserError(f"{where} cannot be imported: {key} = {found.get(key)}, where Byeol has {expected[key]}")
    return config


def _rope_parameters_of(theirs: "transformers.PretrainedConfig") -> dict:
    """Theirs, without the old name of the kind."""
    return {key: value for key, value in (getattr(theirs, "rope_parameters", None) or {}).items() if key != "type"}


def _rotary(theirs: "transformers.PretrainedConfig") -> dict:
    found = _rope_parameters_of(theirs)
    kind = found.get("rope_type", "default")
    named = {key.replace("max_position_embeddings", "max_seq_len"): value for key, value in found.items()}
    options = {option: named[option] for option in RopeScaling.NEEDS if option in named}
    scaling = {"kind": "none" if kind == "default" else kind, **options}
    return {"rope_theta": found["rope_theta"], "rope_scaling": scaling}


def _read_weights(folder: Path, config: ModelConfig) -> Tensors:
    """All weights under our names, in the type that they have there."""
    index, stored = folder / "model.safetensors.index.json", {}
    try:
        files = {"model.safetensors"}
        if index.is_file():
            files = {*json.loads(index.read_text("utf-8"))["weight_map"].values()}
        for file in sorted(files):
            if not (folder / file).is_file():
                raise UserError(f"{folder} has no {file}; weights are read from safetensors alone")
            stored |= load_file(folder / file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {type(error).__name__}: {error}") from None
    return _our_weights(stored, config, folder)


def _our_weights(stored: Tensors, config: ModelConfig, where: Path) -> Tensors:
    """Weights by our names. Raises `UserError` for one that is missing, left over, or of another shape or kind."""
    table = _table(config)
    base = table[0].theirs.partition(".")[0]
    bare = not any(name.startswith(f"{base}.") for name in stored)  # GPT-2 as it was published: the model without head
    stored = {f"{base}.{name}" if bare and name != "lm_head.weight" else name: w for name, w in stored.items()}
    stored = {name: weight for name, weight in stored.items() if not BUFFERS.fullmatch(name)}
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in parameters_by_name(Decoder(config)).items()}
    head = stored.pop("lm_head.weight", None) if config.tie_embeddings else None
    if head is not None and not torch.equal(head, stored.get(f"{table[0].theirs}.weight", head)):
        raise UserError(f"{where}: tie_word_embeddings = True, but lm_head.weight is not the embedding")
    found = {}
    for ours, their, transposed in _parameters(table, config.n_layer):
        if ours[0] not in shapes:
            continue
        if (weight := stored.pop(their, None)) is None:
            raise UserError(f"{where} has no {their}")
        weight, rows = weight.t() if transposed else weight, [shapes[name][0] for name in ours]
        expected = (sum(rows), *shapes[ours[0]][1:])
        if weight.shape != expected or not weight.is_floating_point():
            raise UserError(f"{where}: {their} is {tuple(weight.shape)} of {weight.dtype}, not {expected} of floats")
        if not weight.float().isfinite().all():
            raise UserError(f"{where}: {their} has numbers that are not finite")
        found |= zip(ours, (part.contiguous() for part in weight.split(rows)), strict=True)
    if stored:
        raise UserError(f"{where}: {min(stored)} has no place in a model of its config.json")
    return found


# What both ways share


def _transformers():
    try:
        import transformers
    except ImportError:
        raise UserError("a model in Hugging Face's layout needs a package: pip install transformers") from None
    return transformers


def _table(config: ModelConfig) -> tuple[Pair, ...]:
    return GPT2 if config.norm == "layernorm" else LLAMA


def _parameters(table: tuple[Pair, ...], n_layer: int) -> Iterator[tuple[list[str], str, bool]]:
    """Of each parameter that a model can have: our names (more than one: joined, in this order), theirs, and whether
    theirs is transposed."""
    for ours, theirs, transposed in table:
        for layer, kind in product(range(n_layer) if "*" in ours else [0], ("weight", "bias")):
            our_name, their_name = (f"{name}.{kind}".replace("*", str(layer)) for name in (ours, theirs))
            parts = "qkv" if "[qkv]" in our_name else [""]
            yield [our_name.replace("[qkv]", part) for part in parts], their_name, transposed


def _renamed(weights: dict[str, torch.Tensor], table: tuple[Pair, ...], n_layer: int) -> dict[str, torch.Tensor]:
    weights, renamed = dict(weights), {}
    for ours, theirs, transposed in _parameters(table, n_layer):
        if ours[0] in weights:
            weight = torch.cat([weights.pop(name) for name in ours])
            renamed[theirs] = weight.t() if transposed else weight
    if weights:
        raise ValueError(f"{next(iter(weights))} has no name in Hugging Face's layout")
    return renamed


def _name(c: ModelConfig) -> str:
    """What `transformers` calls such a model. Raises ValueError where it has none."""
    allowed = {"kind": ["decoder"], "norm_position": ["pre"], "attention_scale": [c.head_dim**-0.5]}
    if c.norm == "layernorm":
        name = "GPT2"
        allowed |= {"position": ["learned"], "activation": ["gelu", "relu"], "bias": [True], "qk_norm": [False]}
        allowed |= {"window": [None], "n_kv_head": [c.n_head], "head_dim": [c.d_model / c.n_head]}
        allowed["attention_scale"].append(1.0)
    else:
        # Mistral without a window is a Llama whose width need not be a multiple of n_head.
        name = "Qwen3" if c.qk_norm else "Mistral" if c.window or c.d_model % c.n_head else "Llama"
        allowed |= {"position": ["rope"], "activation": ["swiglu"], "bias": [False]}
        if name == "Llama":
            allowed["bias"].append(True)
    for option, values in allowed.items():
        if (value := getattr(c, option)) not in values:
            only = " or ".join(map(str, values))
            raise ValueError(f"model.{option} = {value} cannot be expressed by transformers' {name}, only {only}")
    if c.window == 1:
        raise ValueError("model.window = 1 cannot be expressed by transformers: its cache would show more than that")
    return name


def _settings(c: ModelConfig, name: str) -> dict:
    """The arguments of its configuration."""
    table = GPT2_SETTINGS if name == "GPT2" else LLAMA_SETTINGS
    settings = {theirs: getattr(c, ours) for ours, theirs in table.items()}
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # a tokenizer's, not a model's
    if name == "GPT2":
        dropout = {"embd_pdrop": c.dropout, "resid_pdrop": c.dropout, "attn_pdrop": 0.0}
        settings |= {"activation_function": ACTIVATIONS[c.activation], "scale_attn_weights": c.attention_scale != 1}
        return settings | dropout
    settings |= {"hidden_act": "silu", "rope_parameters": _rope_parameters(c)}
    if name == "Llama":
        return settings | {"attention_bias": c.bias, "mlp_bias": c.bias}
    if name == "Qwen3":  # has a window in the layers from max_window_layers on
        settings |= {"use_sliding_window": c.window is not None, "max_window_layers": 0}
    return settings | {"sliding_window": c.window}


def _rope_parameters(c: ModelConfig) -> dict:
    scaling, kind, theta = c.rope_scaling, c.rope_scaling.kind, c.rope_theta
    if kind == "ntk":  # is nothing but a larger base
        kind, theta = "none", theta * scaling.factor ** (c.head_dim / max(c.head_dim - 2, 1))
    options = [option for option, (_, kinds) in scaling.NEEDS.items() if kind in kinds]
    parameters = {name.replace("max_seq_len", "max_position_embeddings"): getattr(scaling, name) for name in options}
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta, **parameters}


@command
def main(options: argparse.Namespace) -> None:
    if options.direction == "import":
        import_run(options.source, options.target)
    else:
        export(Path(options.source), options.target, options.checkpoint or "best")


if __name__ == "__main__":
    main(OPTIONS)
