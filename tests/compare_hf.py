"""Compares our model with its Hugging Face source, tensor by tensor: the tool for adding a model family.

    python tests/compare_hf.py CHECKPOINT HF_SOURCE [--prompt TEXT | --prompt_ids 5,17,33]

Both run over the same token ids. There is one line for each tensor, in order of computation:

                                    difference       scale
    embedding                                0        1.93
    layer 0, attention_norm           2.38e-07        3.12
    ...
    layer 3, attention.out                0.81         4.2  <-- first above 1e-04
    ...
    they part at layer 3, attention.out: difference 0.81 of 4.2

The difference is the largest of any element, and the scale is the largest absolute value of the source's tensor. Two
tensors are the same if difference <= tolerance * max(1, scale). Tensors above the arrow are right, and those below may
differ only because of it. q, k and v are projections; k_cache is k after norm and RoPE; attention.out.input is the
output of the heads; mlp.down.input is that of the activation; output is that of the whole layer. A tensor that only one
side has gets no verdict, nor have queries and keys of which RoPE rotates a part, since we store them in another order.

Rounding counts as a difference: convert a source that is not bfloat16 with --dtype float32; another --dtype here needs
a higher --tolerance. A sliding window matters only in a longer prompt. Exit code 0: the same; 1: they part; 2: error.
"""

import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint import DTYPES, Checkpoint
from cli import ArgumentParser, UserError, number, run_command
from costs import check_memory, total_weight_bytes
from engine import check_prompt
from generate import token_ids
from load import load_model, open_checkpoint

# Our name: Hugging Face's, in order of computation. A module's name stands for its output, .input for
# its input. A family with other names in transformers needs them here.
FIRST = {"embedding": "model.embed_tokens"}
LAYER = {  # under blocks.N and model.layers.N
    "attention_norm": "input_layernorm",
    # the rows of attention.qkv
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "attention.k_cache": "self_attn.keys",  # in the source's own cache
    "attention.out.input": "self_attn.o_proj.input", "attention.out": "self_attn.o_proj",
    "delta_net.out": "linear_attn.out_proj",
    "short_conv.inputs": "conv.in_proj", "short_conv.out": "conv.out_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",  # the rows of mlp.gate_up
    "mlp.down.input": "mlp.down_proj.input", "mlp.down": "mlp.down_proj",
    "experts": "sparse_mlp",
    "output": "output",
}  # fmt: skip
LAST = {"norm": "model.norm", "logits": "logits"}


def record(model: nn.Module) -> dict[str, Tensor]:
    """A dictionary that the next run of the model fills with the inputs and outputs of every module, by name."""
    tensors = {}

    def hook(name):
        def note(module, args, out):
            if isinstance(out, tuple):
                out = out[0]
            tensors[name] = out
            tensors[f"{name}.output"] = out
            if args:
                tensors[f"{name}.input"] = args[0]

        return note

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    return tensors


@torch.no_grad()
def run_ours(checkpoint: Checkpoint, ids: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Our tensors by name, with the parts of fused ones."""
    model = load_model(checkpoint, dtype=dtype, kernels="torch")  # fused blocks would bypass hooks
    model.setup_caches(1, len(ids))
    tensors = record(model)
    tensors["logits"] = model(torch.tensor([ids]), torch.arange(len(ids))[None], all_logits=True)

    for i, block in enumerate(model.blocks):
        parts = {}
        if block.mlp_name == "mlp":
            gate, up = tensors[f"blocks.{i}.mlp.gate_up"].chunk(2, dim=-1)
            parts = {"mlp.gate": gate, "mlp.up": up}
        if not block.mixer.state.is_recurrent:
            H, K, E = model.config.heads(i)
            gates = H * E if model.config.attention_gate else 0  # they follow the queries
            qkv = tensors[f"blocks.{i}.attention.qkv"]
            q, _, k = qkv[..., : (H + K) * E + gates].split([H * E, gates, K * E], dim=-1)
            v = qkv[..., -K * E :]  # the keys, if they are the values, too
            keys = block.mixer.cache.k[:, :, : len(ids)]  # (1,K,S,E)
            parts |= {"attention.q": q, "attention.k": k, "attention.v": v, "attention.k_cache": keys}
        tensors |= {f"blocks.{i}.{name}": part for name, part in parts.items()}

    if model.config.rotary_dim not in (None, model.config.head_dim):
        # Our heads have the elements that are rotated in another order.
        for name in [name for name in tensors if re.search(r"attention\.([qk]|[qk]_norm|k_cache)$", name)]:
            del tensors[name]
    return tensors


@torch.no_grad()
def run_source(path: Path, ids: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The source's tensors by transformers' names."""
    import transformers  # takes seconds, so only after the arguments are checked

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
    options["experts_implementation"] = "eager"  # the usual one needs sizes that are multiples of 4
    folder = path
    if path.is_file():
        folder = path.parent
        options["gguf_file"] = path.name
    auto_model = transformers.AutoModelForCausalLM
    try:
        model, report = auto_model.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # of many types, from several libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"transformers cannot load {path}: {reason}") from None
    if report["missing_keys"]:  # transformers initializes them at random
        raise UserError(f"{path} lacks tensor {min(report['missing_keys'])}")
    if max(ids) >= model.get_input_embeddings().num_embeddings:
        raise UserError(f"token id {max(ids)} is outside the vocabulary of {path}")

    tensors = record(model.eval())
    # Without a config it keeps all keys, also of sliding layers, but it does not know recurrent layers.
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    is_hybrid = not {"linear_attention", "conv"}.isdisjoint(kinds)
    cache = transformers.DynamicCache(config=model.config if is_hybrid else None)
    tensors["logits"] = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    for i, layer in enumerate(cache.layers):
        if hasattr(layer, "keys"):
            tensors[f"model.layers.{i}.self_attn.keys"] = layer.keys
    for name in [name for name in tensors if name.endswith(".mlp.experts")]:
        mlp = name.removesuffix(".experts")
        tensors[f"{mlp.removesuffix('mlp')}sparse_mlp"] = tensors[mlp]
    return tensors


def pairs(ours: dict[str, Tensor], source: dict[str, Tensor]):
    """(label, our tensor, the source's tensor) in order of computation, with None for a missing tensor."""
    for mine, its in FIRST.items():
        yield mine, ours.get(mine), source.get(its)
    i = 0
    while f"blocks.{i}" in ours or f"model.layers.{i}" in source:
        for mine, its in LAYER.items():
            its_tensor = source.get(f"model.layers.{i}.{its}")
            yield f"layer {i}, {mine}", ours.get(f"blocks.{i}.{mine}"), its_tensor
        i += 1
    for mine, its in LAST.items():
        yield mine, ours.get(mine), source.get(its)


def compare(ours: dict[str, Tensor], source: dict[str, Tensor], tolerance: float) -> bool:
    """Print the table and the verdict. Returns whether all tensors are the same."""
    tolerance_text = re.sub(r"\.?0+e", "e", f"{tolerance:e}")  # 1e-04
    parted = None
    print(f"{'':<32}{'difference':>12}{'scale':>12}")
    for label, mine, its in pairs(ours, source):
        if mine is None or its is None:
            if mine is not its:
                side = "the source" if mine is None else "ours"
                print(f"{label:<32}only in {side}")
            continue
        if mine.shape != its.shape:
            same = False
            verdict = f"shape {tuple(mine.shape)}, the source's {tuple(its.shape)}"
            line = f"{label:<32}{verdict}"
        else:
            difference = (mine.float() - its.float()).abs().max().item()
            scale = its.float().abs().max().item()
            same = difference <= tolerance * max(1, scale)  # False for NaN
            verdict = f"difference {difference:.3g} of {scale:.3g}"
            line = f"{label:<32}{difference:>12.3g}{scale:>12.3g}"
        if not same and parted is None:
            parted = f"they part at {label}: {verdict}"
            line += f"  <-- first above {tolerance_text}"
        print(line)
    print(parted or f"the same within {tolerance_text} everywhere")
    return parted is None


def choose_ids(args, checkpoint: Checkpoint) -> list[int]:
    config = checkpoint.config
    if args.prompt is not None:
        ids = checkpoint.tokenizer.encode(args.prompt)
    elif args.prompt_ids is not None:
        ids = args.prompt_ids
    else:
        ids = [(7 + 31 * i) % config.vocab_size for i in range(min(12, config.max_seq_length))]

    check_prompt(ids, config, config.max_seq_length)
    return ids


def main(argv=None) -> int:
    description = "Compare a checkpoint with its Hugging Face source, tensor by tensor."
    parser = ArgumentParser(description=description)
    add = parser.add_argument
    add("checkpoint", help="a checkpoint directory, or what --checkpoint_path of generate.py takes")
    add("hf_source", type=Path, help="the Hugging Face directory or .gguf file that it was made from")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="a text, for the checkpoint's tokenizer")
    prompt.add_argument("--prompt_ids", type=token_ids, help="token ids: 5,17,33 (12 of the vocabulary)")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations (float32)")
    at_least_0 = number(float, "at least 0 and finite", lambda t: 0 <= t < float("inf"))
    add("--tolerance", type=at_least_0, default=1e-4, help="relative to the scale, at least 1 (1e-4)")
    args = parser.parse_args(argv)

    source = args.hf_source.expanduser()
    if not (source.is_dir() or (source.is_file() and source.suffix == ".gguf")):
        raise UserError(f"{source} is neither a directory nor a .gguf file; give the checkpoint's source")
    checkpoint = open_checkpoint(args.checkpoint, dequantize=True)
    dtype = DTYPES[args.dtype]
    ids = choose_ids(args, checkpoint)
    model = checkpoint.empty_model()
    check_memory(total_weight_bytes(model, dtype), model.cache_bytes(1, len(ids), dtype), "cpu")
    ours = run_ours(checkpoint, ids, dtype)
    is_same = compare(ours, run_source(source, ids, dtype), args.tolerance)
    return 0 if is_same else 1


if __name__ == "__main__":
    run_command(main)
