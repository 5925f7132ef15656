"""Writes a checkpoint with its matrices in 8 or 4 bits: `python quantize.py --mode int4`.

Read up from `main`: the command, which packs tensor by tensor; then GPTQ. The formats themselves are in formats.py.

A mode is a format of formats.py, and rounds each weight to the nearest level. int4-gptq (arXiv:2210.17323) writes the
same format as int4, but quantizes column by column, and adjusts the weights of the remaining columns to compensate for
each column's error. The adjustment is computed from the layer's inputs on calibration text.
"""

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import checkpoint as ck
from checkpoint import Checkpoint
from cli import ArgumentParser, UserError, announced, print_status, progress_bar, read_text, run_command, size_text
from cpu.memory import release_freed_memory
from engine import Engine, Request
from formats import FORMATS, GPTQ, Quantization, Scheme, int4_grid, matrices, pack, pack_nibbles
from layers import Linear
from load import open_checkpoint
from model import Transformer
from sampling import SamplingParams
from writer import Writer, print_written

# ---------------------------------------------------------------- GPTQ

GPTQ_BLOCK = 128  # columns that are quantized before the columns after the block are adjusted
SEQUENCES, SEQUENCE_LENGTH = 32, 512  # sequences of calibration text, tokens in each


def pack_gptq(w: Tensor, hessian: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Quantize w (N,C) with the scales and mins of int4, and levels that change the layer's outputs little.

    hessian: (C,C), the sum of x x^T over the layer's inputs. Returns the parts of int4. Columns with the largest
    inputs are quantized first, while many other columns can still compensate for them (GPTQ's "act-order"). The
    packed columns and groups keep their original order.
    """
    scales, mins = int4_grid(w, groupsize)
    C, size = w.shape[1], groupsize or w.shape[1]
    H = hessian.double()
    diagonal = H.diagonal()
    diagonal += 0.01 * diagonal.mean() + (diagonal == 0)  # dampening; an input that is always 0 would make H singular
    order = diagonal.argsort(descending=True)
    H = H[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H))
    U = torch.linalg.cholesky(inverse, upper=True).float()
    # From here on w is transposed, (C,N), so that each column of the layer is contiguous.
    w = w.float().t()[order].contiguous()
    step, minimum = (numbers.float().t()[order // size].contiguous() for numbers in (scales, mins))
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
def gptq(model: Transformer, sequences: list[list[int]], schemes: dict[str, Scheme | None]) -> dict[str, dict]:
    """Quantize the int4 matrices block by block, in one pass of the model over all sequences. Each block's inputs come
    from the blocks already quantized.

    sequences: lists of token ids of the same length. schemes: module name -> scheme; only int4 modules are quantized.
    Returns the packed tensors by module name, and replaces the model's weights by the rounded ones.
    """
    int4 = {name: scheme.groupsize for name, scheme in schemes.items() if scheme and scheme.format == "int4"}
    packed = {}
    tokens = torch.tensor(sequences)  # (n,S)
    input_pos = torch.arange(tokens.shape[1])[None]
    model.setup_caches(1, tokens.shape[1])
    x, ropes = model.block_inputs(tokens), model.positions.ropes(input_pos)
    for i, block in enumerate(model.blocks):
        run = partial(run_block, block, x, ropes[block.rope_table], input_pos)
        linears = {name: module for name, module in block.named_modules(prefix=f"blocks.{i}") if name in int4}
        hessians = collect_hessians(linears, run)
        for name, module in linears.items():
            C = module.in_features
            packed[name] = pack_gptq(module.weight, hessians[name], int4[name])
            module.weight.copy_(FORMATS["int4"].unpack(packed[name], int4[name] or C, C))
        x = run()
        print_status(f"block {i + 1} of {len(model.blocks)}")
    return packed


def run_block(block: nn.Module, x: Tensor, rope, input_pos: Tensor) -> Tensor:
    """A block's outputs (n,S,D) for n sequences, one after the other, because the cache has one row."""
    return torch.cat([block(states[None], rope, input_pos, None) for states in x])


def collect_hessians(linears: dict[str, Linear], run) -> dict[str, Tensor]:
    """For each layer by name, the sum of x x^T over its inputs x during run(), (C,C) float32."""
    sums = {name: torch.zeros(module.in_features, module.in_features) for name, module in linears.items()}

    def add(name, module, inputs):
        x = inputs[0].flatten(0, -2).float()
        sums[name].addmm_(x.T, x)

    hooks = [module.register_forward_pre_hook(partial(add, name)) for name, module in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def calibration_text(model: Transformer, tokenizer, path: Path | None) -> list[list[int]]:
    """SEQUENCES lists of SEQUENCE_LENGTH token ids, from a text file or else sampled from the model itself.

    Each sampled sequence begins with a random token. The seeds are fixed.
    """
    length = min(SEQUENCE_LENGTH, model.config.max_seq_length)
    if path is not None:
        ids = tokenizer.encode(read_text(path, f"--calibration_file {path}"))
        if max(ids, default=0) >= model.config.vocab_size:
            raise UserError(
                f"{path}: the text has token id {max(ids)}, but the vocabulary has {model.config.vocab_size} ids"
            )
        if len(ids) < 4 * length:
            raise UserError(f"--calibration_file {path} has {len(ids)} tokens, but at least {4 * length} are needed")
        gap = (len(ids) - length) / (SEQUENCES - 1)  # sequences are spread over the text, and may overlap
        return [ids[int(i * gap) : int(i * gap) + length] for i in range(SEQUENCES)]
    generator = torch.Generator().manual_seed(0)
    V = model.config.n_token or model.config.vocab_size
    first_tokens = torch.randint(0, V, (SEQUENCES, 1), generator=generator).tolist()
    requests = [Request(first, SamplingParams(seed=i), length - 1) for i, first in enumerate(first_tokens)]
    engine = Engine(model, SEQUENCES, length)
    for request in requests:
        engine.add(request)
    with progress_bar(SEQUENCES * (length - 1), "writing the calibration text", " tokens", delay=2) as bar:
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
    """Quantize a source, or a checkpoint directory, and write it to `out`. Returns the names of unquantized tensors.

    At most one tensor is in memory, or with int4-gptq the whole model. UserError, with the name, if a tensor cannot be
    packed.
    """

    source = source if isinstance(source, Checkpoint) else ck.open_directory(source)
    config = source.config
    if source.quantization is not None:
        raise UserError(
            f"{source.path} is quantized already ({source.quantization.mode}); "
            "quantize the checkpoint that it was made from"
        )
    if out.resolve() == source.path.resolve():
        raise UserError(f"--out {out} is the checkpoint to be quantized; name another directory")
    schemes = {name: quantization.scheme(name) for name, _ in matrices(ck.empty_model(config))}
    columns = min(module.in_features for _, module in matrices(ck.empty_model(config)))
    if quantization.groupsize > columns:
        raise UserError(
            f"--groupsize {quantization.groupsize} is more than the {columns} columns of the smallest matrix"
        )
    expected = sum(t.nbytes for t in ck.empty_model(config, quantization).state_dict().values())
    total = sum(t.nbytes for t in ck.empty_model(config).state_dict().values())
    gptq_packed = {}
    if quantization.mode == GPTQ:
        gptq_packed = run_gptq(source, schemes, calibration_file)
    kept, from_directory = [], source.path.is_dir()  # whose dtype is kept
    with Writer(out, expected) as writer, progress_bar(total, f"quantizing {source.name}", "B") as bar:
        weights = source.open_weights()
        for name in ck.empty_model(config).state_dict():
            tensor = weights.read(name)
            bar.update(4 * tensor.numel())
            if not all(torch.isfinite(x) for x in torch.aminmax(tensor)):  # aminmax makes no copy
                raise UserError(f"{source.path}: {name} holds NaN or infinity")
            module, _, kind = name.rpartition(".")
            scheme = schemes.get(module) if kind == "weight" else None
            if scheme is None:
                kept.append(name)
                dtype = tensor.dtype if from_directory else ck.dtype_of(name, tensor, config, torch.bfloat16)
                writer.add(name, tensor.to(dtype))
                continue
            try:
                packed = gptq_packed.pop(module, None) or pack(tensor, *scheme)
            except ValueError as error:
                raise UserError(f"{source.path}: {name} {error}") from None
            for part, value in packed.items():
                writer.add(f"{module}.{part}", value)
            release_freed_memory()
        writer.add_config(config, quantization)
        writer.add_tokenizer(source.tokenizer_files)
        source.files.check()
    return kept


def run_gptq(source: Checkpoint, schemes: dict[str, Scheme | None], calibration_file: Path | None) -> dict[str, dict]:
    """Quantize every int4 matrix of a checkpoint's blocks with GPTQ. Returns the packed tensors by module name."""
    ck.check_memory(source.config, "cpu", torch.bfloat16, SEQUENCES * SEQUENCE_LENGTH)
    model = ck.read_weights(source, source.empty_model())
    print_status("reading the calibration text" if calibration_file else "the model writes its calibration text")
    sequences = calibration_text(model, source.tokenizer, calibration_file)
    try:
        return gptq(model, sequences, schemes)
    except ValueError as error:
        raise UserError(f"{source.path}: a matrix of the model {error}") from None
    except torch.linalg.LinAlgError:
        raise UserError(f"{source.path}: the activations on the calibration text are too large or not finite") from None


def rounding_error(source: Checkpoint, quantization: Quantization) -> float:
    """How far rounding moves the weights of the first block: the root mean square, over that of the weights."""
    moved = size = 0.0
    weights = source.open_weights()
    for name, _ in matrices(source.empty_model()):
        scheme = quantization.scheme(name)
        if not name.startswith("blocks.0.") or scheme is None:
            continue
        tensor = weights.read(f"{name}.weight").float()
        C, parts = tensor.shape[1], pack(tensor, *scheme)
        difference = FORMATS[scheme.format].unpack(parts, scheme.groupsize or C, C) - tensor
        moved, size = moved + difference.square().sum().item(), size + tensor.square().sum().item()
    return (moved / size) ** 0.5 if size else 0.0


def open_dense(name: str | None, quantization: Quantization) -> Checkpoint:
    """The source of a command-line argument. The weights of a quantized .gguf file are dequantized, and one line says
    what rounding them again loses, and how large the result is."""
    source = open_checkpoint(name)
    if source.quantization is None or source.path.is_dir():
        return source
    before = source.quantization
    texts = [before.mode, before.head, *before.exceptions.values()]
    known = ", ".join(sorted({piece for text in texts for piece in text.split("+")} - {"none"}))
    dense = open_checkpoint(name, dequantize=True)
    try:
        with announced("comparing the weights of the first block before and after rounding"):
            error = rounding_error(dense, quantization)
    except ValueError:
        return dense  # quantize_checkpoint says which tensor cannot be packed
    nbytes = sum(size for _, size in source.files.sizes())
    result = ck.total_weight_bytes(source.config, torch.bfloat16, quantization)
    print_status(
        f"{source.path} is quantized already ({known}); rounding its weights again, to {quantization.mode}, changes "
        f"those of the first block by {error:.1%}; the checkpoint will have {size_text(result)}, the file has "
        f"{size_text(nbytes)}"
    )
    return dense


def main():
    parser = ArgumentParser(description="Write a checkpoint with its matrices in 8 or 4 bits.")
    add = parser.add_argument
    add("--checkpoint_path", help="as for generate.py (default: SmolLM2-135M-Instruct)")
    encoded = [name for name, format in FORMATS.items() if format.quantize is not None]
    add("--mode", choices=(*encoded, GPTQ), required=True, help="format of the matrices in the blocks")
    sizes = "columns that share a scale (32); 0: a whole row"
    add("--groupsize", type=int, choices=(0, 32, 64, 128), default=32, help=sizes)
    add("--head", choices=(*encoded, "none"), default="int8", help="format of the embedding and the output head (int8)")
    add(
        "--calibration_file",
        type=Path,
        help="calibration text for int4-gptq (default: text sampled from the model itself)",
    )
    add("--out", type=Path, help="the directory to write (beside the source, NAME-MODE-gGROUPSIZE)")
    args = parser.parse_args()
    if args.calibration_file and args.mode != GPTQ:
        parser.error(f"--calibration_file is for --mode {GPTQ}, not {args.mode}")
    try:
        quantization = Quantization(args.mode, args.groupsize, args.head)
    except ValueError as error:
        parser.error(str(error))
    source = open_dense(args.checkpoint_path, quantization)
    group = f"g{args.groupsize}" if args.groupsize else "channel"
    head = "" if args.head == "int8" else f"-head-{args.head}"
    is_directory = args.checkpoint_path is not None and Path(args.checkpoint_path).expanduser().is_dir()
    folder = source.path.resolve().parent if is_directory else ck.CHECKPOINTS
    out = args.out or folder / f"{source.name}-{args.mode}-{group}{head}"
    kept = quantize_checkpoint(source, out, quantization, args.calibration_file)
    kinds = sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in kept})
    print_status(f"not quantized: {', '.join(kinds)}")
    print_written(out)


if __name__ == "__main__":
    run_command(main)
