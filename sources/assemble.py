"""Turns the tensors of another project's file into our model's tensors: names, rows, order.

The file is a GgufFile or an HfFiles, which read tensors by the names in the file. AssembledWeights
knows from the model which of them are needed and in which shapes, and stacks q, k, v and gate, up,
and the matrices of experts.
A tensor that is left over, missing or of the wrong shape is refused by name, except the tensors of an
MTP layer, which only drafts: without it, the model is the same. families.py says how the tensors of
each family are called.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint import can_draft, check_finite, check_shapes, empty_model, layer_of
from cli import UserError, print_status
from config import Config
from formats import piece_rows
from layers import MatrixLayer
from model import Transformer
from sources.families import Layout

# The dtypes of tensors that are not quantized. Others, such as float8, need scales that are stored
# elsewhere.
DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Destination:
    """Where a tensor of the file goes: to some rows of one of our tensors."""

    target: str  # the name of our tensor
    shape: torch.Size  # the shape that the tensor of the file must have
    # The function that changes the tensor while it is read, or None.
    fold: Callable[[Config, torch.Tensor], torch.Tensor] | None
    is_transposed: bool = False  # a tensor (X,C,N) with the matrices of all experts


def destinations(model: Transformer, layout: Layout, found: dict[str, tuple]) -> dict[str, Destination]:
    """name in the file -> Destination, for each tensor that the model needs, in its order.

    model: whole, not quantized, on the meta device. found: name -> shape of the tensors of the file.
    They show how it stores experts.
    """
    config = model.config
    places = {}
    for target, tensor in model.state_dict().items():
        module, _, kind = target.rpartition(".")
        prefix, ours = prefix_of(module, config, layout)
        if ours in layout.constants:
            continue
        if ours in EXPERT_STACKS:
            places |= expert_destinations(target, config, layout, found)
            continue
        if f"{ours}.{kind}" in layout.whole_names:
            names = [layout.whole_names[f"{ours}.{kind}"]]
            ending = ""
        else:
            names = layout.names[ours]
            ending = f".{kind}"

        row_counts = [tensor.shape[0]]
        if len(names) > 1:
            row_counts = piece_rows(model.get_submodule(module))
        for name, rows in zip(names, row_counts):
            shape = torch.Size([rows, *tensor.shape[1:]])
            places[f"{prefix}{name}{ending}"] = Destination(target, shape, layout.folds.get(name))
    return places


# The modules with the matrices of all experts of a layer: see experts.SparseMLP.
EXPERT_STACKS = ("experts.gate_up", "experts.down")


def expert_destinations(target: str, config: Config, layout: Layout, found: dict[str, tuple]) -> dict[str, Destination]:
    """`destinations` of the tensors that are stacked in one of EXPERT_STACKS, whose name is `target`."""
    prefix, ours = prefix_of(target.removesuffix(".weight"), config, layout)
    X = config.experts.n_expert
    D = config.dim
    F = config.experts.hidden_dim
    shapes = {"experts.gate_up": (2 * F, D), "experts.down": (D, F)}  # of an expert
    N, C = shapes[ours]

    fused = {module: prefix + name for module, name in layout.fused_experts.items()}
    if ours in fused and any(name in found for name in fused.values()):
        # If one of the two shapes is the same transposed, the other one is not.
        transposed = {module: (X, *reversed(shape)) for module, shape in shapes.items()}
        is_transposed = all(found.get(fused.get(module)) == shape for module, shape in transposed.items())
        shape = transposed[ours] if is_transposed else (X, N, C)
        return {fused[ours]: Destination(target, torch.Size(shape), None, is_transposed)}

    names = [f"{prefix}{name}.weight" for name in layout.names[ours]]
    N = N // len(names)
    if "{}" not in names[0]:
        return {name: Destination(target, torch.Size([X, N, C]), None) for name in names}
    every_name = [name.format(e) for e in range(X) for name in names]
    return {name: Destination(target, torch.Size([N, C]), None) for name in every_name}


def unread_keys(config: Config, layout: Layout) -> tuple[str, ...]:
    """How the names of keys and values begin that layers do not use, because they read the KV cache of another layer
    (Config.shared_kv_layers). Published files have them."""
    names = layout.names["attention.qkv"][1:] + layout.names.get("attention.k_norm", [])
    layers = [i for i in range(config.n_layer) if config.kv_layer(i) != i]
    return tuple(f"{layout.layer}{i}.{name}." for i in layers for name in names)


def prefix_of(module: str, config: Config, layout: Layout) -> tuple[str, str]:
    """How the names of a module's tensors begin in the file, and its key in Layout.names."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if block is not None:
        layer, ours = block.groups()
        return f"{layout.layer}{layer}.", ours
    if module.startswith("mtp.block."):
        return layout.draft_block.format(config.n_layer), module.removeprefix("mtp.block.")
    if module.startswith("mtp."):
        return layout.mtp_layer.format(config.n_layer), module
    return "", module


def with_mtp_layer(path: Path, config: Config, layout: Layout, found: dict[str, tuple]) -> Transformer:
    """The model on the meta device, with its MTP layer if the file has the layer's tensors.

    found: name -> shape of the layer's tensors. If they do not fit an mtp.MTPLayer, a line says that
    they are left out.
    """
    if not found:
        return empty_model(config)
    if layout.mtp_layer is None or config.recurrent is None:
        print_status(f"{path}: left out: tensors of a layer that drafts tokens (mtp): it is supported in Qwen3.5 only")
        return empty_model(config)
    if not can_draft():
        print_status(f"{path}: left out: tensors of a layer that drafts tokens (mtp): mixers/mtp.py is missing")
        return empty_model(config)

    model = empty_model(dataclasses.replace(config, mtp=True))
    places = destinations(model, layout, found)
    expected = {name: place.shape for name, place in places.items() if place.target.startswith("mtp.")}
    try:
        check_shapes(path, without_ones(found), without_ones(expected))
    except UserError as error:
        reason = str(error).removeprefix(str(path)).lstrip(": ")
        print_status(f"{path}: left out: tensors of a layer that drafts tokens (mtp): {reason}")
        model.remove_mtp()
    return model


def without_ones(shapes: dict[str, tuple]) -> dict[str, tuple[int, ...]]:
    """Shapes without the dimensions of size 1, which some files have and others lack."""
    return {name: tuple(size for size in shape if size != 1) for name, shape in shapes.items()}


class AssembledWeights:
    """The weights of a model in a file of another project. UserError if they do not fit the model."""

    def __init__(self, path: Path, file: Any, model: Transformer, layout: Layout, unneeded: Callable[[str], bool]):
        """path: for messages. file: a GgufFile or an HfFiles. model: as in `destinations`: not quantized,
        because its shapes are compared with the shapes of the file. unneeded: whether a tensor of this
        name, which the model does not have, may be left out."""
        self.path = path
        self.file = file
        self.is_mapped = file.is_mapped
        self.config = model.config

        found = file.shapes()
        self.constants = {}  # our tensors that the file lacks
        for name, tensor in model.state_dict().items():
            value = layout.constants.get(prefix_of(layer_of(name), model.config, layout)[1])
            if value is not None:
                self.constants[name] = torch.full(tensor.shape, value)
        self.places = destinations(model, layout, found)
        # The names of tensors that the model does not need
        unread = unread_keys(model.config, layout)
        self.left_out = [name for name in found if name not in self.places]
        self.left_out = [name for name in self.left_out if unneeded(name) or name.startswith(unread)]
        needed = {name: shape for name, shape in found.items() if name not in self.left_out}
        expected = {name: place.shape for name, place in self.places.items()}
        check_shapes(path, without_ones(needed), without_ones(expected))

        # The name of our tensor (of a whole, not quantized model) -> the names of the file's tensors that
        # are stacked in it
        self.stacks = defaultdict(list)
        for name, place in self.places.items():
            self.stacks[place.target].append(name)

    def read(self, name: str, part=None) -> torch.Tensor:
        """One of our tensors, or a part of it (a tp.Slice).

        name: as in the model that is loaded, such as "blocks.0.attention.qkv.weight", or for a quantized
        part "blocks.0.attention.qkv.blocks", or for one of the pieces of a formats.StackedLinear
        "blocks.0.attention.qkv.1.blocks".
        """
        if name in self.constants:
            return self.constants[name]
        stack = self.stack_of(name)
        kind = name.rpartition(".")[2]
        if len(stack) > 1 and layer_of(name).endswith(EXPERT_STACKS):
            whole = self.read_experts(stack, kind)
        else:
            pieces = [self.read_piece(stored, kind) for stored in stack]
            whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return whole if part is None else part.cut(whole)

    def map_layer(self, name: str, layer: MatrixLayer) -> MatrixLayer:
        """A layer of this name on the meta device, or another one in its place, filled with a tensor that stays
        in the mapped file."""
        stored = self.stacks[f"{name}.weight"][0]
        return self.file.map_layer(stored, layer)

    def stack_of(self, name: str) -> list[str]:
        """The names of the file's tensors that `read` stacks in one of our tensors. A quantized part comes
        from the tensors that are the weight of the matrix."""
        layer = layer_of(name)
        *piece, kind = name.removeprefix(f"{layer}.").split(".")
        stack = self.stacks.get(f"{layer}.{kind}") or self.stacks[f"{layer}.weight"]
        return [stack[int(piece[0])]] if piece else stack

    def read_experts(self, names: list[str], kind: str) -> torch.Tensor:
        """The matrices of all experts, one below the other, from several tensors. Besides them, one
        tensor is in memory at a time."""
        holds_all = len(self.places[names[0]].shape) == 3  # each tensor holds a matrix of every expert
        X = self.config.experts.n_expert
        whole = None
        for i, name in enumerate(names):
            piece = self.read_piece(name, kind)
            if holds_all:
                piece = piece.view(X, -1, piece.shape[-1])
            if whole is None:
                N, C = piece.shape[-2:]
                outer = (X, len(names)) if holds_all else (len(names),)
                whole = piece.new_empty(*outer, N, C)
            if piece.dtype != whole.dtype:
                whole = whole.to(torch.promote_types(whole.dtype, piece.dtype))
            place = whole[:, i] if holds_all else whole[i]
            place.copy_(piece)
        return whole.view(-1, whole.shape[-1])

    def read_piece(self, name: str, kind: str) -> torch.Tensor:
        """A tensor of the file, changed into the form that our model has.

        The matrices of experts (X,N,C) become one matrix (X*N,C). kind: "weight", "bias", or a
        quantized part, whose values the file checks.
        """
        place = self.places[name]
        tensor = self.file.read(name, kind)
        if kind in ("weight", "bias"):
            check_dense(tensor, f"{self.path}: {name}")
            tensor = tensor.view(place.shape)
            if place.is_transposed:
                tensor = tensor.transpose(1, 2)
            if tensor.dim() == 3:
                tensor = tensor.flatten(0, 1)
        return tensor if place.fold is None else place.fold(self.config, tensor)


def check_dense(tensor: torch.Tensor, name: str):
    if tensor.dtype not in DENSE_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{name} holds {kind}, expected floating-point numbers of 16, 32 or 64 bits")
    check_finite(tensor, name)
