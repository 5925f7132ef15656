"""Turns the tensors of a file of another project into those of our model: names, rows, order.

A source of this folder yields (name, tensor) in any order. `assemble` knows from the model which tensors are needed,
in which shapes, and stacks q, k, v and gate, up as they arrive. A tensor that is left over, missing or of the wrong
shape is refused by name. families.py says how the tensors of each family are called.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from checkpoint import empty_model
from cli import UserError, and_more
from config import Config
from formats import Packed, Quantization, matrices, piece_rows
from sources.families import Layout

# Of the tensors of a source that is not quantized. Others, such as float8, need scales that are stored elsewhere.
DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Destination:
    """Where a tensor of the source goes: to some rows of one of our tensors."""

    target: str
    index: int  # its position among the tensors that are stacked there
    shape: torch.Size
    fold: Callable[[Config, torch.Tensor], torch.Tensor] | None  # how it is changed, or None


def destinations(config: Config, layout: Layout) -> dict[str, Destination]:
    """source name -> Destination, for every tensor that the model needs, in the model's order."""
    found = {}
    for target, tensor in empty_model(config).state_dict().items():
        layer, ours, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", target).groups()
        prefix = "" if layer is None else f"{layout.layer}{layer}."
        names = layout.names[ours]
        row_counts = piece_rows(config, ours) if len(names) > 1 else [tensor.shape[0]]
        for i, (name, rows) in enumerate(zip(names, row_counts)):
            shape = torch.Size([rows, *tensor.shape[1:]])
            found[f"{prefix}{name}.{kind}"] = Destination(target, i, shape, layout.folds.get(name))
    return found


def source_names(config: Config, layout: Layout) -> dict[str, list[str]]:
    """Our name of each matrix that can be quantized -> the source's names of the tensors that are stacked in it."""
    names: dict[str, list[str]] = {name: [] for name, _ in matrices(empty_model(config))}
    for name, place in destinations(config, layout).items():
        if (module := place.target.removesuffix(".weight")) in names:
            names[module].append(name)
    return names


def assemble(
    path, config: Config, layout: Layout, quantization: Quantization | None, tensors: Iterable, unneeded: Callable
) -> Iterator[tuple[str, Callable]]:
    """What Source.tensors yields, from the (name, tensor or Packed) of a source, which is called `path` in messages.

    unneeded: whether the tensor of a name, which the model does not have, may be left out.
    """
    places = destinations(config, layout)
    counts = defaultdict(int)
    for place in places.values():
        counts[place.target] += 1
    missing, stacks = dict.fromkeys(places), defaultdict(dict)
    for name, tensor in tensors:
        if name not in places and unneeded(name):
            continue
        shape, place = tuple(tensor.shape), places.get(name)
        if place is None:
            raise UserError(f"{path} holds tensor {name} {shape}, which the model does not have")
        if tensor.shape != place.shape:
            raise UserError(f"{path}: {name} is {shape}, but by its config it should be {tuple(place.shape)}")
        if missing.pop(name, name) is not None:
            raise UserError(f"{path} holds tensor {name} twice")
        stack = stacks[place.target]
        stack[place.index] = folded(place, config, checked(path, name, tensor))
        if len(stack) == counts[place.target]:
            pieces = [stack[i] for i in range(len(stack))]
            del stacks[place.target], stack, tensor
            scheme = quantization.scheme(place.target.removesuffix(".weight")) if quantization else None
            yield from stacked(place.target, pieces, isinstance(scheme, list))
    if missing:
        raise UserError(f"{path} lacks tensor {and_more(list(missing))}")


def checked(path, name: str, tensor: torch.Tensor | Packed) -> torch.Tensor | Packed:
    if not isinstance(tensor, Packed) and tensor.dtype not in DENSE_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{path}: {name} holds {kind}, expected floating-point numbers of 16, 32 or 64 bits")
    if not isinstance(tensor, Packed) and not all(map(torch.isfinite, tensor.aminmax())):  # which makes no copy
        raise UserError(f"{path}: {name} holds NaN or infinity")
    return tensor


def folded(place: Destination, config: Config, tensor: torch.Tensor | Packed) -> dict[str, torch.Tensor]:
    """The parts of a source's tensor, in the form that our model has."""
    kind = place.target.rpartition(".")[2]
    parts = tensor.parts if isinstance(tensor, Packed) else {kind: tensor}
    return {name: part if place.fold is None else place.fold(config, part) for name, part in parts.items()}


def stacked(target: str, pieces: list[dict[str, torch.Tensor]], in_several_formats: bool):
    """Yield the name of each tensor of a module and a function that reads it. Pieces in different formats are modules
    of their own (formats.StackedLinear)."""
    module = target.rpartition(".")[0]
    if in_several_formats:
        for i, piece in enumerate(pieces):
            yield from ((f"{module}.{i}.{kind}", partial(take, [part])) for kind, part in piece.items())
    else:
        for kind in pieces[0]:
            yield f"{module}.{kind}", partial(take, [piece[kind] for piece in pieces])


def take(pieces: list[torch.Tensor], part=None, copy: Callable = torch.clone) -> torch.Tensor:
    """A copy of tensors, stacked, or of a part of this stack (a tp.Slice)."""
    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return copy(whole if part is None else part.cut(whole)) if len(pieces) == 1 or part is not None else whole
