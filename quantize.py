"""Writes a checkpoint with its matrices in 8 or 4 bits: `python quantize.py --mode int4`.

Read up from `main`: the command, which packs tensor by tensor; then GPTQ. The formats themselves
are in formats.py.

A mode is a format of formats.py, and rounds each weight to the nearest level. int4-gptq
(arXiv:2210.17323) writes the same format as int4, but quantizes column by column, and adjusts the
weights of the remaining columns to compensate for each column's error. The adjustment is computed
from the layer's inputs on calibration text. For an expert, these are the inputs of the tokens that
have chosen it; without any, its weights are rounded.
"""

import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import checkpoint as ck
from checkpoint import Checkpoint, Writer, check_target, print_written
from cli import (
    ArgumentParser,
    UserError,
    add_model_name,
    and_more,
    print_status,
    progress_bar,
    read_text,
    run_command,
    size_text,
)
from costs import check_memory, total_weight_bytes
from engine import Engine, Request
from formats import FORMATS, GPTQ, Quantization, int4_grid, matrices, pack, pack_nibbles
from layers import ExpertStack, Linear, gated
from load import open_checkpoint
from model import Transformer
from sampling import SamplingParams

# ---------------------------------------------------------------- GPTQ

GPTQ_BLOCK = 128  # columns that are quantized before the columns after the block are adjusted
SEQUENCES = 32  # the number of sequences of calibration text
SEQUENCE_LENGTH = 512  # the number of tokens in each
# An expert may have fewer inputs than columns. Then the adjustment would fit these inputs only: with
# half as many independent inputs as columns, the error on other inputs was 1.6 times the error of
# rounding. So the Hessian is dampened by this share of its mean diagonal, with which it was 0.9
# times (0.5 times for inputs with a decaying spectrum, as real ones are). With more inputs than
# columns, the damping falls as 1 / inputs.
EXPERT_DAMPING = 0.5


def pack_gptq(w: Tensor, hessian: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Quantize w (N,C) with the scales and mins of int4, and levels that change the layer's outputs
    little.

    hessian: (C,C), the sum of x x^T over the layer's inputs. Returns the parts of int4.

    Columns with the largest inputs are quantized first, while many other columns can still
    compensate for them (GPTQ's "act-order"). The packed columns and groups keep their order.
    """
    C = w.shape[1]
    scales, mins = int4_grid(w, groupsize)
    H = hessian.double()
    diagonal = H.diagonal()
    # Dampen H, which would be singular if an input were always 0.
    diagonal += 0.01 * diagonal.mean() + (diagonal == 0)
    order = diagonal.argsort(descending=True)
    H = H[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H))
    U = torch.linalg.cholesky(inverse, upper=True).float()

    # From here on w is transposed, (C,N), so that each column of the layer is contiguous.
    w = w.float().t()[order].contiguous()
    group = order // (groupsize or C)  # (C,)
    step = scales.float().t()[group].contiguous()  # (C,N)
    minimum = mins.float().t()[group].contiguous()
    levels = torch.empty_like(w)
    for start in range(0, C, GPTQ_BLOCK):
        end = min(start + GPTQ_BLOCK, C)
        errors = torch.empty_like(w[start:end])
        for i in range(start, end):
            level = torch.where(step[i] > 0, (w[i] - minimum[i]) / step[i], 0).round_().clamp_(0, 15)
            levels[order[i]] = level
            error = (w[i] - (level * step[i] + minimum[i])) / U[i, i]
            w[i + 1 : end] -= U[i, i + 1 : end, None] * error
            errors[i - start] = error
        w[end:] -= U[start:end, end:].t() @ errors

    return {"packed": pack_nibbles(levels.t().to(torch.uint8)), "scales": scales, "mins": mins}


@torch.no_grad()
def gptq(model: Transformer, sequences: list[list[int]], groupsize: int) -> dict[str, dict]:
    """Quantize the matrices of the blocks to int4, block by block, in one pass of the model over all
    sequences. Each block's inputs come from the blocks that are quantized already.

    sequences: lists of token ids of the same length. Returns the packed tensors by module name, and
    replaces the model's weights by the rounded ones.
    """
    packed = {}
    unreached = []
    tokens = torch.tensor(sequences)  # (n,S)
    input_pos = torch.arange(tokens.shape[1])[None]
    model.setup_caches(len(sequences), tokens.shape[1])
    x = model.block_inputs(tokens)  # (n,S,D)
    own = [None] * len(model.blocks)
    if model.layer_inputs is not None:
        own = model.layer_inputs(tokens, x).unbind(2)
    ropes = model.positions.ropes(input_pos)
    for i, block in enumerate(model.blocks):
        run = partial(run_block, block, x, ropes[block.rope_table], input_pos, own[i])
        hessians, expert_inputs = collect_inputs(block, run)
        for name, hessian in hessians.items():
            weight = block.get_submodule(name).weight
            packed[f"blocks.{i}.{name}"] = replace_weight(weight, pack_gptq(weight, hessian, groupsize), groupsize)
        for layer in block.sparse:
            found, missed = pack_experts(layer, torch.cat(expert_inputs), groupsize)
            packed |= {f"blocks.{i}.experts.{name}": parts for name, parts in found.items()}
            unreached += [f"expert {e} of layer {i}" for e in missed]
        x = run()
        print_status(f"block {i + 1} of {len(model.blocks)}")
    if unreached:
        print_status(f"no token of the calibration text chose these, which are rounded: {and_more(unreached)}")
    return packed


def replace_weight(weight: Tensor, parts: dict[str, Tensor], groupsize: int) -> dict[str, Tensor]:
    """Replace a weight (N,C) by the weight that int4 parts decode to. Returns the parts."""
    C = weight.shape[1]
    weight.copy_(FORMATS["int4"].unpack(parts, groupsize or C, C))
    return parts


def collect_inputs(block: nn.Module, run) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The sum of x x^T (C,C) float32 over the inputs x of each linear layer of a block during run(), by
    the layer's name; and the inputs (n,D) of its experts."""
    names = {module: name for name, module in block.named_modules() if type(module) is Linear}
    sums = {name: torch.zeros(module.in_features, module.in_features) for module, name in names.items()}
    expert_inputs = []

    def add(module, inputs):
        x = inputs[0].flatten(0, -2)
        if module in block.sparse:
            expert_inputs.append(x)
        else:
            x = x.float()
            sums[names[module]].addmm_(x.T, x)

    modules = [*names, *block.sparse]
    hooks = [module.register_forward_pre_hook(add) for module in modules]
    run()
    for hook in hooks:
        hook.remove()
    return sums, expert_inputs


def pack_experts(layer: nn.Module, x: Tensor, groupsize: int) -> tuple[dict[str, dict], list[int]]:
    """Quantize the experts of a layer, an experts.SparseMLP with inputs x (n,D), one after the other.

    Returns the packed tensors of gate_up and down, and the numbers of the experts that none of the
    inputs chose, whose weights are rounded.
    """
    ids, _ = layer.choose(x[None])
    ids = ids[0]  # (n,k)
    x = layer.normed(x)
    pieces = {"gate_up": [], "down": []}
    unreached = []
    for e in range(layer.X):
        h = x[(ids == e).any(1)]
        if len(h) == 0:
            unreached.append(e)
        gate, up = layer.gate_up.multiply_expert(h, e).chunk(2, dim=-1)
        pieces["gate_up"].append(pack_expert(layer.gate_up, e, h, groupsize))
        pieces["down"].append(pack_expert(layer.down, e, gated(layer.kind, gate, up), groupsize))

    packed = {}
    for name, parts in pieces.items():
        packed[name] = {part: torch.cat([piece[part] for piece in parts]) for part in parts[0]}
    return packed, unreached


def pack_expert(stack: ExpertStack, e: int, x: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Quantize the matrix of an expert, with GPTQ if it has inputs x (n,C), and replace its weights by
    the rounded ones."""
    n, C = x.shape
    N = stack.out_features // stack.n_expert
    weight = stack.weight[e * N : (e + 1) * N]
    if n == 0:
        return replace_weight(weight, pack(weight, "int4", groupsize), groupsize)
    hessian = x.float().T @ x.float()
    diagonal = hessian.diagonal()
    diagonal += EXPERT_DAMPING * min(1.0, C / n) * diagonal.mean()
    return replace_weight(weight, pack_gptq(weight, hessian, groupsize), groupsize)


def run_block(block: nn.Module, x: Tensor, rope, input_pos: Tensor, own: Tensor | None) -> Tensor:
    """Run a block on n sequences one after the other, which needs less memory. Returns its outputs
    (n,S,D). own (n,S,P): as in Block.forward."""
    outputs = []
    for i, states in enumerate(x):
        own_input = None if own is None else own[i, None]
        outputs.append(block(states[None], rope, input_pos, torch.tensor([i]), own_input))
    return torch.cat(outputs)


def release_memory():
    """Return freed memory to the system, if cpu/, which can, is there."""
    with suppress(ModuleNotFoundError):
        from cpu.memory import release_freed_memory

        release_freed_memory()


def calibration_text(model: Transformer, tokenizer, path: Path | None) -> list[list[int]]:
    """SEQUENCES lists of SEQUENCE_LENGTH token ids, from a text file, or sampled from the model.

    Each sampled sequence begins with a random token. The seeds are fixed.
    """
    length = min(SEQUENCE_LENGTH, model.config.max_seq_length)
    if path is not None:
        ids = tokenizer.encode(read_text(path, "--calibration_file"))
        if len(ids) < 4 * length:
            raise UserError(f"--calibration_file {path} has {len(ids)} tokens, but at least {4 * length} are needed")
        gap = (len(ids) - length) / (SEQUENCES - 1)  # spreads them over the text; they may overlap
        return [ids[int(i * gap) : int(i * gap) + length] for i in range(SEQUENCES)]

    V = model.config.n_token or model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    first_tokens = torch.randint(0, V, (SEQUENCES, 1), generator=generator).tolist()
    requests = [Request(first, SamplingParams(seed=i), length - 1) for i, first in enumerate(first_tokens)]
    engine = Engine(model, SEQUENCES, length)
    for request in requests:
        engine.add(request)
    total = SEQUENCES * (length - 1)
    with progress_bar(total, "writing the calibration text", " tokens", delay=2) as bar:
        while engine.has_requests:
            engine.step()
            bar.n = sum(len(request.new_tokens) for request in requests)
    if failed := next((request for request in requests if request.error), None):
        raise UserError(f"the model cannot write its calibration text: {failed.error}")
    return [request.prompt + request.new_tokens for request in requests]


# ---------------------------------------------------------------- the command


def quantize_checkpoint(
    source: Checkpoint | Path, out: Path, quantization: Quantization, calibration_file: Path | None = None
) -> list[str]:
    """Quantize a source, or a checkpoint directory, and write it to `out`. Returns the names of the
    tensors that are not quantized.

    At most one tensor is in memory, or with int4-gptq the whole model. Raises UserError, with the
    name, if a tensor cannot be packed.
    """
    if not isinstance(source, Checkpoint):
        source = ck.open_directory(source)
    config = source.config
    model = ck.empty_model(config)
    check_quantizable(source, out, model, quantization)

    schemes = {name: quantization.scheme(name) for name, _ in matrices(model)}
    gptq_packed = {}
    if quantization.mode == GPTQ:
        gptq_packed = run_gptq(source, quantization.groupsize, calibration_file)
    tensors = model.state_dict()
    dtypes = ck.tensor_dtypes(model, torch.bfloat16)
    expected = sum(t.nbytes for t in ck.empty_model(config, quantization).state_dict().values())
    total = sum(t.nbytes for t in tensors.values())
    kept = []
    with Writer(out, expected) as writer, progress_bar(total, f"quantizing {source.name}", "B") as bar:
        weights = source.open_weights(model)
        for name in tensors:
            tensor = weights.read(name)
            bar.update(4 * tensor.numel())
            if not all(torch.isfinite(x) for x in torch.aminmax(tensor)):  # aminmax makes no copy
                raise UserError(f"{source.path}: {name} holds NaN or infinity")
            module = name.removesuffix(".weight")
            scheme = schemes.get(module)
            if scheme is None:
                kept.append(name)
                if not source.path.is_dir():  # a directory's dtypes are kept
                    tensor = tensor.to(dtypes[name])
                writer.add(name, tensor)
                continue
            try:
                packed = gptq_packed.pop(module, None) or pack(tensor, *scheme)
            except ValueError as error:
                raise UserError(f"{source.path}: {name} {error}") from None
            for part, value in packed.items():
                writer.add(f"{module}.{part}", value)
            release_memory()
        writer.add_config(config, quantization, source.recommended)
        writer.add_tokenizer(source.tokenizer_files)
        source.files.check()
    return kept


def check_quantizable(source: Checkpoint, out: Path, model: Transformer, quantization: Quantization):
    """Raise UserError if a source cannot be quantized in this way. model: its empty model."""
    if source.quantization is not None:
        raise UserError(
            f"{source.path} is quantized already ({source.quantization.mode}); "
            "quantize the checkpoint that it was made from"
        )
    if out.resolve() == source.path.resolve():
        raise UserError(f"--out {out} is the checkpoint to be quantized; name another directory")
    columns = min(module.in_features for _, module in matrices(model))
    if quantization.groupsize > columns:
        raise UserError(
            f"--groupsize {quantization.groupsize} is more than the {columns} columns of the smallest matrix; "
            "with --groupsize 0, each row is a group"
        )


def run_gptq(source: Checkpoint, groupsize: int, calibration_file: Path | None) -> dict[str, dict]:
    """Quantize every int4 matrix of a checkpoint's blocks with GPTQ. Returns the packed tensors by
    module name."""
    model = source.empty_model()
    caches = model.cache_bytes(SEQUENCES, SEQUENCE_LENGTH, torch.bfloat16)
    check_memory(total_weight_bytes(model, torch.bfloat16, device=torch.device("cpu")), caches, "cpu")
    ck.read_weights(source, model)
    print_status("reading the calibration text" if calibration_file else "the model writes its calibration text")
    sequences = calibration_text(model, source.tokenizer, calibration_file)
    try:
        return gptq(model, sequences, groupsize)
    except ValueError as error:
        raise UserError(f"{source.path}: a matrix of the model {error}") from None
    except torch.linalg.LinAlgError:
        raise UserError(f"{source.path}: the activations on the calibration text are too large or not finite") from None


def open_dense(name: str | None, quantization: Quantization) -> Checkpoint:
    """Open the source of a command-line argument. The weights of a quantized .gguf file are
    dequantized, and a message says so."""
    source = open_checkpoint(name)
    if source.quantization is None or source.path.is_dir():
        return source
    before = source.quantization
    texts = "+".join([before.mode, before.head, *before.exceptions.values()])
    formats = ", ".join(sorted({*texts.split("+")} - {"none"}))
    nbytes = sum(size for _, size in source.files.sizes())
    result = total_weight_bytes(ck.empty_model(source.config, quantization), torch.bfloat16)
    print_status(
        f"{source.path} is quantized already ({formats}); its weights are rounded again, to {quantization.mode}; "
        f"the checkpoint will have {size_text(result)}, the file has {size_text(nbytes)}"
    )
    return open_checkpoint(name, dequantize=True)


def default_directory(args, source: Checkpoint) -> Path:
    """The value of --out if it is not given."""
    name = f"{source.name}-{args.mode}-"
    name += f"g{args.groupsize}" if args.groupsize else "channel"
    if args.head != "int8":
        name += f"-head-{args.head}"
    if args.checkpoint_path is not None and Path(args.checkpoint_path).expanduser().is_dir():
        return source.path.resolve().parent / name
    return ck.CHECKPOINTS / name


def main():
    parser = ArgumentParser(description="Write a checkpoint with its matrices in 8 or 4 bits.")
    add = parser.add_argument
    add_model_name(parser, add, "as for generate.py (default: SmolLM2-135M-Instruct)")
    encoded = [name for name, format in FORMATS.items() if format.quantize is not None]
    add("--mode", choices=(*encoded, GPTQ), required=True, help="format of the matrices in the blocks")
    sizes = "columns that share a scale (32); 0: a whole row"
    add("--groupsize", type=int, choices=(0, 32, 64, 128), default=32, help=sizes)
    head = "format of the embedding and the output head (int8)"
    add("--head", choices=(*encoded, "none"), default="int8", help=head)
    text = "calibration text for int4-gptq (default: text sampled from the model itself)"
    add("--calibration_file", type=Path, help=text)
    add("--out", type=Path, help="the directory to write (beside the source, NAME-MODE-gGROUPSIZE)")
    args = parser.parse_args()
    if args.calibration_file and args.mode != GPTQ:
        parser.error(f"--calibration_file is for --mode {GPTQ}, not {args.mode}")
    try:
        quantization = Quantization(args.mode, args.groupsize, args.head)
    except ValueError as error:
        parser.error(str(error))

    check_target(args.out)
    if args.calibration_file:
        read_text(args.calibration_file, "--calibration_file")
    source = open_dense(args.checkpoint_path, quantization)
    out = args.out or default_directory(args, source)
    kept = quantize_checkpoint(source, out, quantization, args.calibration_file)
    kinds = sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in kept})
    print_status(f"not quantized: {', '.join(kinds)}")
    print_written(out)


if __name__ == "__main__":
    run_command(main)
