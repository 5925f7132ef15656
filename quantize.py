"""Weights in 8 and 4 bits: how they are packed, the layers that use them, and the command that writes them.

Read down: the two formats (pack, unpack), GPTQ, the layers, `swap` (the walker that puts them into a model), the
command.

A matrix (N,K) is cut into groups of `groupsize` along K, the last one shorter where K is no multiple; G of them a row.
  int8  symmetric:  w = q * scale,        q -127..127;  weight int8 (N,K), scales float16 (N,G)
  int4  asymmetric: w = q * scale + min,  q 0..15;      packed uint8 (N,ceil(K/2)), the low nibble the even column;
                                                        scales, mins float16 (N,G)
That is the layout on disk, the same for every device. A groupsize of 0 is one group a row (per channel). Activations
stay as they are: what quantization costs is in the weights alone.

int8 and int4 take each weight to its nearest level. int4-gptq (arXiv:2210.17323) stores the same int4, but goes column
by column and lets the columns still to come make up for the error of each, as far as the layer's inputs, seen on
calibration text, say that they can.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels import linear_int4, linear_int8, unpack_int4, unpack_int8
from model import Embedding, Transformer

MODES = ("int8", "int4", "int4-gptq")
FORMATS = ("int8", "int4", "none")
GROUPSIZES = (0, 32, 64, 128)
PACKED_AT_ONCE = 1 << 20  # weights, of which there are a handful of float32 copies meanwhile


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized: the matrices of its blocks by mode, its embedding and output head by head."""

    mode: str
    groupsize: int
    head: str
    exceptions: dict[str, str] = field(default_factory=dict)  # module name to format, where a GGUF file mixes them

    def __post_init__(self):
        for name, known in (("mode", MODES), ("groupsize", GROUPSIZES), ("head", FORMATS)):
            if getattr(self, name) not in known or type(getattr(self, name)) is not type(known[0]):
                raise ValueError(f"quantization {name} must be one of {known}, not {getattr(self, name)!r}")
        if not isinstance(self.exceptions, dict) or not set(self.exceptions.values()) <= set(FORMATS):
            raise ValueError(f"quantization exceptions must name formats of {FORMATS}, not {self.exceptions!r}")

    def format(self, name: str) -> str:
        """ "int8", "int4" or "none" for the module of this name."""
        usual = self.head if name in ("embedding", "output") else self.mode.removesuffix("-gptq")
        return self.exceptions.get(name, usual)


class Packed(NamedTuple):
    """A quantized matrix and the shape it stands for."""

    shape: torch.Size
    parts: dict[str, Tensor]


# ---------------------------------------------------------------- the formats


def groups(w: Tensor, groupsize: int) -> Tensor:
    """(N,K) as (N,G,groupsize) float32; a short last group is filled up with its last column."""
    N, K = w.shape
    size = groupsize or K
    missing = -K % size
    w = torch.cat([w, w[:, -1:].expand(N, missing)], 1) if missing else w
    return w.float().reshape(N, -1, size)


def round_up_to_half(x: Tensor) -> Tensor:
    """float16 no less than x (at least 0, float32), so that the largest weight of a group stays within its grid."""
    half = x.to(torch.float16)
    return torch.where(half.float() < x, torch.nextafter(half, torch.full_like(half, float("inf"))), half)


def check_finite(w: Tensor, *stored: Tensor):
    if not torch.isfinite(w).all():
        raise ValueError("holds NaN or infinity")
    if not all(torch.isfinite(numbers).all() for numbers in stored):
        raise ValueError("holds weights too large for float16 scales")


def pack_int8(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """w (N,K) to {"weight" int8 (N,K), "scales" float16 (N,G)}; ValueError for what is not finite."""
    g = groups(w, groupsize)
    scales = round_up_to_half(g.abs().amax(2) / 127)
    check_finite(w, scales)
    steps = scales.float()[:, :, None]
    q = torch.where(steps > 0, g / steps, 0).round_().clamp_(-127, 127).to(torch.int8)
    return {"weight": q.flatten(1)[:, : w.shape[1]].contiguous(), "scales": scales}


def int4_grid(w: Tensor, groupsize: int) -> tuple[Tensor, Tensor]:
    """(scales, mins) float16 (N,G): 16 levels from the least weight of each group to its greatest."""
    g = groups(w, groupsize)
    mins = g.amin(2).to(torch.float16)
    scales = round_up_to_half(((g.amax(2) - mins.float()) / 15).clamp(min=0))
    check_finite(w, scales, mins)
    return scales, mins


def pack_int4(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """w (N,K) to {"packed", "scales", "mins"} (shapes above), each weight to the nearest level."""
    scales, mins = int4_grid(w, groupsize)
    steps = scales.float()[:, :, None]
    q = torch.where(steps > 0, (groups(w, groupsize) - mins.float()[:, :, None]) / steps, 0)
    q = q.round_().clamp_(0, 15).to(torch.uint8).flatten(1)[:, : w.shape[1]]
    return {"packed": pack_nibbles(q), "scales": scales, "mins": mins}


def pack_nibbles(q: Tensor) -> Tensor:
    """uint8 (N,K) of 0..15 to (N,ceil(K/2))."""
    q = torch.nn.functional.pad(q, (0, q.shape[1] % 2))
    return q[:, 0::2] | q[:, 1::2] << 4


PACK = {"int8": pack_int8, "int4": pack_int4}


def pack(w: Tensor, format: str, groupsize: int) -> dict[str, Tensor]:
    """The same by blocks of rows, so that little more than w itself is ever in memory."""
    parts = [PACK[format](rows, groupsize) for rows in w.split(max(1, PACKED_AT_ONCE // w.shape[1]))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------- GPTQ

GPTQ_BLOCK = 128  # columns after which errors are passed on to all that follow
SEQUENCES, SEQUENCE_LENGTH = 32, 512  # of calibration text


def pack_gptq(w: Tensor, hessian: Tensor, groupsize: int) -> dict[str, Tensor]:
    """w (N,K) to what pack_int4 returns, on the same grid, chosen so that the layer's outputs change least.

    hessian: (K,K), the sum of x x^T over the layer's inputs. Columns go in the order of their inputs' size, so that the
    largest are rounded while the most others can still make up for them; the grid's groups stay as they are on disk.
    """
    scales, mins = int4_grid(w, groupsize)
    K, size = w.shape[1], groupsize or w.shape[1]
    H = hessian.double()
    diagonal = H.diagonal()
    diagonal += 0.01 * diagonal.mean() + (diagonal == 0)  # dampening; an input that is always 0 has no say
    order = diagonal.argsort(descending=True)
    H = H[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H))
    U = torch.linalg.cholesky(inverse, upper=True).float()
    # From here on transposed, (K,N), so that a column of w lies together.
    w = w.float().t()[order].contiguous()
    step, least = (numbers.float().t()[order // size].contiguous() for numbers in (scales, mins))
    levels = torch.empty_like(w)
    for start in range(0, K, GPTQ_BLOCK):
        end = min(start + GPTQ_BLOCK, K)
        errors = torch.empty_like(w[start:end])
        for i in range(start, end):
            level = torch.where(step[i] > 0, (w[i] - least[i]) / step[i], 0).round_().clamp_(0, 15)
            levels[order[i]] = level
            error = (w[i] - (level * step[i] + least[i])) / U[i, i]
            w[i + 1 : end] -= U[i, i + 1 : end, None] * error
            errors[i - start] = error
        w[end:] -= U[start:end, end:].t() @ errors
    return {"packed": pack_nibbles(levels.t().to(torch.uint8)), "scales": scales, "mins": mins}


@torch.no_grad()
def gptq(model: Transformer, sequences: list[list[int]], groupsize: int, formats: dict, done):
    """Pack the model's int4 matrices block by block, each on the inputs that the packed blocks before it give.

    sequences: token ids, all of one length. formats: "int4" or else by module name. Calls done(name, packed); the
    model's weights become what was packed.
    """
    tokens = torch.tensor(sequences)  # (n,S)
    model.setup_caches(1, tokens.shape[1])
    at = torch.arange(tokens.shape[1])[None]
    rope = model.rope(at)
    states = [model.embedding(row[None]).to(model.norm.weight.dtype) for row in tokens]  # n of (1,S,D)
    if model.embedding_norm is not None:
        states = [model.embedding_norm(x) for x in states]
    for i, block in enumerate(model.blocks):
        linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        linears = {name: module for name, module in linears.items() if formats[f"blocks.{i}.{name}"] == "int4"}
        hessians = collect(linears, lambda block=block, xs=states: [block(x, rope, at, None) for x in xs])
        for name, module in linears.items():
            packed = pack_gptq(module.weight, hessians[name], groupsize)
            w = unpack_int4(*packed.values(), groupsize or module.in_features, module.in_features)
            module.weight.copy_(w)
            done(f"blocks.{i}.{name}", packed)
        states = [block(x, rope, at, None) for x in states]


def collect(linears: dict[str, nn.Linear], run) -> dict[str, Tensor]:
    """The sum of x x^T over the inputs that each linear layer sees while run() runs, (K,K) float32."""
    sums = {name: torch.zeros(module.in_features, module.in_features) for name, module in linears.items()}

    def listen(name):
        def hook(module, inputs):
            x = inputs[0].flatten(0, -2).float()
            sums[name].addmm_(x.T, x)

        return hook

    hooks = [module.register_forward_pre_hook(listen(name)) for name, module in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def calibration_text(model: Transformer, tokenizer, path: Path | None) -> list[list[int]]:
    """SEQUENCES lists of SEQUENCE_LENGTH ids: of a text file, or else what the model itself says, seeded, when it
    begins with tokens drawn at random."""
    from checkpoint import UserError
    from generate import generate
    from sampling import Sampling

    length = min(SEQUENCE_LENGTH, model.config.max_seq_length)
    if path is not None:
        try:
            ids = tokenizer.encode(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--calibration_file {path} cannot be read: {error}") from None
        if max(ids, default=0) >= model.config.vocab_size:
            raise UserError(
                f"{path}: the tokenizer made id {max(ids)} of it, of {model.config.vocab_size} in the model"
            )
        if len(ids) < 4 * length:
            raise UserError(f"--calibration_file {path} has {len(ids)} tokens; at least {4 * length} are needed")
        gap = (len(ids) - length) / (SEQUENCES - 1)  # spread over the whole text, overlapping in a short one
        return [ids[int(i * gap) : int(i * gap) + length] for i in range(SEQUENCES)]
    chance = torch.Generator().manual_seed(0)
    V = model.config.n_token or model.config.vocab_size
    begin = torch.randint(0, V, (SEQUENCES, 1), generator=chance).tolist()
    if length == 1:
        return begin
    model.setup_caches(SEQUENCES, length)
    settings = Sampling.make(SEQUENCES, list(range(SEQUENCES)), 1.0, 0)
    return [start + ids for start, (ids, _) in zip(begin, generate(model, begin, settings, length - 1))]


# ---------------------------------------------------------------- the layers


class Int8Linear(nn.Module):
    """y = x unpack(weight)^T + bias."""

    def __init__(self, K: int, N: int, bias: bool, groupsize: int):
        super().__init__()
        self.in_features, self.out_features, self.groupsize = K, N, groupsize or K
        self.register_buffer("weight", torch.empty(N, K, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(N, -(-K // self.groupsize), dtype=torch.float16))
        self.register_buffer("bias", torch.empty(N) if bias else None)

    def forward(self, x: Tensor):
        return linear_int8(x, self.weight, self.scales, self.groupsize, self.bias)


class Int4Linear(nn.Module):
    """y = x unpack(packed)^T + bias."""

    def __init__(self, K: int, N: int, bias: bool, groupsize: int):
        super().__init__()
        self.in_features, self.out_features, self.groupsize = K, N, groupsize or K
        self.register_buffer("packed", torch.empty(N, -(-K // 2), dtype=torch.uint8))
        for name in ("scales", "mins"):
            self.register_buffer(name, torch.empty(N, -(-K // self.groupsize), dtype=torch.float16))
        self.register_buffer("bias", torch.empty(N) if bias else None)

    def forward(self, x: Tensor):
        return linear_int4(x, self.packed, self.scales, self.mins, self.groupsize, self.bias)


class Int8Embedding(Int8Linear):
    """A table that is looked up by rows, and with `logits` the output head, from one and the same tensor."""

    logits = Int8Linear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32
        return unpack_int8(self.weight[tokens], self.scales[tokens], self.groupsize)


class Int4Embedding(Int4Linear):
    """The same in 4 bits."""

    logits = Int4Linear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32
        rows = self.packed[tokens], self.scales[tokens], self.mins[tokens]
        return unpack_int4(*rows, self.groupsize, self.in_features)


LINEAR = {"int8": Int8Linear, "int4": Int4Linear}
EMBEDDING = {"int8": Int8Embedding, "int4": Int4Embedding}


def matrices(model: Transformer) -> list[tuple[str, nn.Module]]:
    """(name, module) of everything that quantization is about: the linear layers and the embedding table."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, Embedding))]


def swap(model: Transformer, quantization: Quantization | None) -> Transformer:
    """Put quantized layers, still without weights, in the place of the model's own; returns the model."""
    for name, module in matrices(model) if quantization else ():
        format = quantization.format(name)
        if format == "none":
            continue
        N, K = module.weight.shape
        kind = EMBEDDING[format] if isinstance(module, Embedding) else LINEAR[format]
        with torch.device("meta"):
            layer = kind(K, N, getattr(module, "bias", None) is not None, quantization.groupsize)
        model.set_submodule(name, layer)
    return model


def quantize_model(model: Transformer, quantization: Quantization) -> Transformer:
    """Quantize a loaded model of plain torch, layer by layer, 8-bit layers too; returns the model."""
    for name, module in list(model.named_modules()):
        eight = isinstance(module, Int8Linear)
        format = quantization.format(name)
        if format == "none" or not (eight or isinstance(module, (nn.Linear, Embedding))):
            continue
        is_table = isinstance(module, (Embedding, Int8Embedding))
        w = unpack_int8(module.weight, module.scales, module.groupsize) if eight else module.weight
        N, K = w.shape
        bias = getattr(module, "bias", None)
        layer = (EMBEDDING if is_table else LINEAR)[format](K, N, False, quantization.groupsize)
        layer.load_state_dict(pack(w, format, quantization.groupsize), assign=True)
        layer.bias = bias
        model.set_submodule(name, layer)
    return model


# ---------------------------------------------------------------- the command


def quantize_checkpoint(
    source: Path, out: Path, quantization: Quantization, calibration_file: Path | None = None
) -> list[str]:
    """Write the checkpoint directory `source` quantized as `out`, tensor by tensor; returns the tensors left as they
    are. UserError names a tensor that cannot be packed. int4-gptq holds the whole model, the others a tensor."""
    import checkpoint as ck
    from terminal import progress_bar

    config = ck.read_config(source)
    if (before := ck.read_quantization(source)) is not None:
        raise ck.UserError(f"{source} is quantized already ({before.mode}); take the checkpoint that it was made from")
    if out.resolve() == source.resolve():
        raise ck.UserError(f"--out {out} is the checkpoint that is to be quantized; name another")
    formats = {name: quantization.format(name) for name, _ in matrices(ck.empty_model(config))}
    least = min(module.weight.shape[1] for _, module in matrices(ck.empty_model(config)))
    if quantization.groupsize > least:
        raise ck.UserError(
            f"--groupsize {quantization.groupsize} is more than the {least} columns of the smallest matrix"
        )
    expected = sum(t.nbytes for t in ck.empty_model(config, quantization).state_dict().values())
    files = ck.checked_files(source, ck.empty_model(config).state_dict())
    total = sum(path.stat().st_size for path in set(files.values()))
    gptq_packed = {}
    if quantization.mode == "int4-gptq":
        gptq_packed = run_gptq(source, quantization.groupsize, formats, calibration_file)
    kept = []
    with ck.Writer(out, expected) as writer, progress_bar(total, f"quantizing {source.name}") as bar:
        for name, path in files.items():
            tensor = ck.read_tensor(path, name)
            bar.update(tensor.nbytes)
            if not all(torch.isfinite(x) for x in torch.aminmax(tensor)):  # which makes no copy
                raise ck.UserError(f"{path}: {name} holds NaN or infinity")
            module, _, kind = name.rpartition(".")
            format = formats.get(module, "none") if kind == "weight" else "none"
            if format == "none":
                kept.append(name)
                writer.add(name, tensor)
                continue
            try:
                packed = gptq_packed.pop(module, None) or pack(tensor, format, quantization.groupsize)
            except ValueError as error:
                raise ck.UserError(f"{path}: {name} {error}") from None
            for part, value in packed.items():
                writer.add(f"{module}.{part}", value)
            ck.release_freed_memory()
        writer.add_config(config, quantization)
        ck.copy_tokenizer(source, writer)
    return kept


def run_gptq(source: Path, groupsize: int, formats: dict, calibration_file: Path | None) -> dict[str, dict]:
    """Every int4 matrix of a checkpoint's blocks packed by GPTQ, by module name."""
    import checkpoint as ck
    from terminal import say
    from tokenizer import Tokenizer

    ck.check_memory(ck.read_config(source), "cpu", torch.bfloat16, SEQUENCES * SEQUENCE_LENGTH)
    model, packed = ck.load_model(source, dtype=torch.bfloat16, kernels="torch"), {}
    say("reading the calibration text" if calibration_file else "the model writes its calibration text")
    sequences = calibration_text(model, Tokenizer(source), calibration_file)

    def done(name, parts):
        packed[name] = parts
        if name.endswith("mlp.down"):
            say(f"block {int(name.split('.')[1]) + 1} of {len(model.blocks)}")

    try:
        gptq(model, sequences, groupsize, formats, done)
    except ValueError as error:
        raise ck.UserError(f"{source}: a matrix of the model {error}") from None
    except torch.linalg.LinAlgError:
        raise ck.UserError(f"{source}: the model's activations are not finite, or too large, on this text") from None
    return packed


def summary(kept: list[str]) -> str:
    """Which tensors stay as they are, by the last words of their names."""
    kinds = sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in kept})
    return f"not quantized: {', '.join(kinds)}" if kinds else "everything is quantized"


def main():
    from checkpoint import ArgumentParser
    from convert_hf_checkpoint import ensure_checkpoint
    from terminal import say

    parser = ArgumentParser(description="Write a checkpoint with its matrices in 8 or 4 bits.")
    add = parser.add_argument
    add("--checkpoint_path", help="as generate.py takes it; without it SmolLM2-135M-Instruct")
    add("--mode", choices=MODES, required=True, help="of the matrices of the blocks")
    sizes = "columns that share a scale (32); 0: all of a row"
    add("--groupsize", type=int, choices=GROUPSIZES, default=32, help=sizes)
    add("--head", choices=FORMATS, default="int8", help="of embedding and output head (int8)")
    text = "text for int4-gptq to see the layers' inputs on (else the model writes some itself)"
    add("--calibration_file", type=Path, help=text)
    add("--out", type=Path, help="the directory to write (beside the source, NAME-MODE-gGROUPSIZE)")
    args = parser.parse_args()
    if args.calibration_file and args.mode != "int4-gptq":
        parser.error(f"--calibration_file is for --mode int4-gptq, not {args.mode}")
    source = ensure_checkpoint(args.checkpoint_path)
    quantization = Quantization(args.mode, args.groupsize, args.head)
    group = f"g{args.groupsize}" if args.groupsize else "channel"
    head = "" if args.head == "int8" else f"-head-{args.head}"
    source = source.resolve()
    out = args.out or source.with_name(f"{source.name}-{args.mode}-{group}{head}")
    say(summary(quantize_checkpoint(source, out, quantization, args.calibration_file)))
    print(out)


if __name__ == "__main__":
    from checkpoint import run_command

    run_command(main)
