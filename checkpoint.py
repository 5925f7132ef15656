"""Models in files: Checkpoint stands for a model in files of any kind.

Read down: Checkpoint; `read_weights`, the loop that fills a model with its weights; how a checkpoint
directory (config.json, and model.safetensors in shards above 5 GB) is read; Writer, which writes one
so that it is complete or does not exist, even after a crash. The files of sources/ read GGUF files
and Hugging Face directories.
"""

import dataclasses
import errno
import json
import math
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backend import Installer
from cli import UserError, and_more, check_is_file, print_status, progress_bar, read_json
from config import PARTS, Config, RopeScaling
from formats import Quantization, Repacking, swap
from layers import LAYER_TABLE, LayerNorm, MappedTable, MatrixLayer, RMSNorm
from model import WHOLE_MODEL, Transformer
from sampling import RECOMMENDED
from text.tokenizer import TEMPLATE, TOOL_TEMPLATE, Tokenizer, TokenizerFiles, read_tokenizer_files

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SAFETENSORS_NAMES = FLOATS | {torch.int8: "I8", torch.uint8: "U8"}
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
MAPPED_VALUES = 1 << 24
# The directory of converted models and of the default model's file.
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
# The suffixes of a model's files. Other files of a directory may change while it is read.
MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".jinja")
DRAFT_LAYER = "mtp."  # the names of the MTP layer's tensors begin so
OUR_FIELD = "n_kv_head"  # a field of our config.json that no other project's config.json has

# ---------------------------------------------------------------- a model in files


@dataclass
class Checkpoint:
    """A model in files: its config, its tokenizer, and its weights, which are read one by one."""

    path: Path
    config: Config
    quantization: Quantization | None
    # open_weights(model) returns a DirectoryWeights or a sources.assemble.AssembledWeights, which has
    # checked that the files hold exactly the tensors of a whole model on the meta device. (For a GGUF
    # file, sources.opening.open_gguf has checked this before it made the model quantized.)
    open_weights: Callable[[Transformer], Any]
    read_tokenizer_files: Callable[[], TokenizerFiles]
    files: "FileStates"
    name: str = ""  # the model's name for users; "" means the name of the path
    # The sampling settings that the model's files recommend: see sampling.recommended_params.
    recommended: dict = field(default_factory=dict)
    # The whole model on the meta device, if it was made to open the files. The first load takes it.
    made_model: Transformer | None = None

    def __post_init__(self):
        self.name = self.name or self.path.resolve().name.removesuffix(".gguf")

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles:
        return self.read_tokenizer_files()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer_files)

    def without_mtp(self) -> "Checkpoint":
        """The model without the MTP layer, if it has one."""
        if not self.config.mtp:
            return self
        model = self.made_model
        self.made_model = None
        if model is not None:
            model.remove_mtp()
        return replace(self, config=replace(self.config, mtp=False), made_model=model)

    def empty_model(self, shard=WHOLE_MODEL, whole: Transformer | None = None) -> Transformer:
        """The model on the meta device, or one rank's part of it (shard: a tp.Shard).

        whole: the whole model, if it was made already. UserError if the model cannot be split.
        """
        if shard.ranks > 1:
            return empty_model(self.config, self.quantization, shard.fit(whole or self.empty_model()))
        model = self.made_model
        self.made_model = None
        return empty_model(self.config, self.quantization) if model is None else model


class FileStates:
    """The identities, sizes and times of a model's files, to notice that one of them was replaced or
    changed while it was read."""

    def __init__(self, path: Path, *others: Path):
        """path: a file, or a directory, whose files with the suffixes MODEL_FILES count.
        others: further files of the same model."""
        self.path = path
        self.others = others
        self.found = self._look()

    def _look(self) -> list[tuple]:
        paths = [self.path, *self.others]
        if self.path.is_dir():
            paths = [file for file in sorted(self.path.iterdir()) if file.suffix in MODEL_FILES]
        stats = [(file.name, file.stat()) for file in paths if file.is_file()]
        return [(name, s.st_size, s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]

    def check(self):
        """Raise UserError if anything is different now."""
        with suppress(OSError):
            if self._look() == self.found:
                return
        raise UserError(f"{self.path} was changed while it was read; try again")

    @contextmanager
    def unchanged(self):
        """A context in which the files are read. If they have changed, a UserError says so, even if
        something else has failed because of it."""
        try:
            yield
        finally:
            self.check()

    def sizes(self) -> list[tuple[str, int]]:
        return [(name, size) for name, size, *_ in self.found]


# ---------------------------------------------------------------- reading the weights


def empty_model(config: Config, quantization: Quantization | None = None, shard=WHOLE_MODEL) -> Transformer:
    """The model, or a tp.Shard's part of it, on the meta device: tensors have no memory there."""
    with torch.device("meta"):
        model = Transformer(config, shard)
    return model if quantization is None else swap(model, quantization.scheme)


def read_weights(
    checkpoint: Checkpoint,
    model: Transformer,
    device="cpu",
    dtype=torch.bfloat16,
    installer: Installer | None = None,
    repacking: Repacking | None = None,
    whole: Transformer | None = None,
    weights=None,
) -> Transformer:
    """Fill a model that `Checkpoint.empty_model` has made, layer by layer. Returns the model.

    Weights that are not quantized get `dtype`, in which the model then computes. Besides the model,
    at most one layer is in memory. On CPUs, the table of model.LayerInputs stays in the file.
    installer: packs each layer for the kernels of the device.
    repacking: replaces layers whose formats have no kernels. whole: the whole model on the meta
    device, if `model` is a rank's part. weights: what checkpoint.open_weights(whole) has returned.
    UserError if a weight is NaN or infinity.
    """
    installer = installer or Installer(model)
    if whole is None:
        whole = model if model.shard.ranks == 1 else checkpoint.empty_model()
    if weights is None:
        weights = checkpoint.open_weights(whole)
    if torch.device(device).type == "cpu":
        for one in {whole, model}:
            map_table(one, weights)
    dtypes = tensor_dtypes(whole, dtype)
    parts = dict.fromkeys(dtypes)
    if model.shard.ranks > 1:
        parts = model.shard.slices(whole)
    model.activation_dtype = dtype if checkpoint.config.float32_norms else None

    total = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in model.state_dict().items())
    # Memory for all tensors at once, but none for quantized models: their tensors are freed one by one,
    # when the kernels have packed them.
    if checkpoint.quantization is None:
        installer.reserve(total)
    # The blocks are last, because the largest tensors, which are outside of them, need the most
    # memory while they are packed.
    ordered = sorted(dtypes, key=lambda name: name.startswith("blocks."))
    with progress_bar(total, f"loading {checkpoint.name}", "B", delay=2) as bar, checkpoint.files.unchanged():
        for layer, names in groupby(ordered, layer_of):
            for name in names:
                is_mapped = weights.is_mapped or parts[name] is not None
                tensor = weights.read(name, parts[name])
                tensor = installer.place(tensor, device, dtypes[name], is_mapped)
                check_finite(tensor, f"{checkpoint.path}: {name}")
                module, _, kind = name.rpartition(".")
                model.get_submodule(module).load_state_dict({kind: tensor}, strict=False, assign=True)
                bar.update(tensor.nbytes)
            del tensor  # so that the kernels can free what they pack
            if repacking is not None:
                repacking.replace(model, layer)
            installer.pack(layer)
    return model.eval()


def map_table(model: Transformer, weights):
    """Replace the table of model.LayerInputs by a layers.MappedTable. weights: as in `read_weights`. NaN in
    the table is found only when a token's logits are NaN, too."""
    if model.layer_inputs is None or isinstance(model.layer_inputs.table, MappedTable):
        return
    table = weights.map_layer(LAYER_TABLE, model.layer_inputs.table)
    model.layer_inputs.table = MappedTable(table)


def check_finite(tensor: torch.Tensor, name: str):
    """UserError if a tensor of floating-point numbers holds NaN or infinity."""
    # aminmax makes no copy, and its results are NaN if any element is NaN.
    if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{name} holds NaN or infinity in {dtype}")


def tensor_dtypes(model: Transformer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """name -> dtype, of the tensors of a model (on the meta device) whose unquantized weights get `dtype`."""
    dtypes = {}
    for name, tensor in model.state_dict().items():
        module = model.get_submodule(name.rpartition(".")[0])
        is_norm = isinstance(module, (RMSNorm, LayerNorm))
        is_float32 = getattr(module, "is_float32", False) or (is_norm and model.config.float32_norms)
        dtypes[name] = tensor.dtype
        if tensor.dtype == torch.float32 and not is_float32:
            dtypes[name] = dtype
    return dtypes


def layer_of(name: str) -> str:
    """The module of a tensor. A piece of a formats.StackedLinear belongs to that StackedLinear."""
    module = name.rpartition(".")[0]
    return re.sub(r"(\.[a-z_]+)\.\d+$", r"\1", module)


# ---------------------------------------------------------------- a checkpoint directory


def open_directory(directory: Path) -> Checkpoint:
    """A checkpoint directory of ours. Its weights are looked at only when they are read."""
    directory = Path(directory)
    files = FileStates(directory)
    config = read_config(directory)
    quantization = read_quantization(directory)
    weights = partial(DirectoryWeights, directory)
    tokenizer = partial(read_tokenizer_files, directory)
    recommended = read_recommended(directory)
    return Checkpoint(directory, config, quantization, weights, tokenizer, files, recommended=recommended)


def read_recommended(directory: Path) -> dict:
    """The sampling settings in a directory's generation_config.json, which transformers writes, too."""
    path = directory / GENERATION
    fields = read_json(path) if path.exists() else {}
    return {name: fields[name] for name in (*RECOMMENDED, "do_sample") if name in fields}


class DirectoryWeights:
    """The weights of a checkpoint directory. UserError if the tensors are not exactly the model's."""

    is_mapped = True  # a tensor is a part of a mapped file

    def __init__(self, directory: Path, model: Transformer):
        """model: whole, on the meta device."""
        self.files = checked_files(directory, model.state_dict())
        self.reader = SafetensorsReader()

    def read(self, name: str, part=None) -> torch.Tensor:
        """The tensor with this name, or one rank's part of it (a tp.Slice), in the mapped file's memory."""
        return self.reader.read(self.files[name], name, part)

    def map_layer(self, name: str, layer: MatrixLayer) -> MatrixLayer:
        """Fill a layer of this name, which is on the meta device, with tensors in the mapped files. Returns it."""
        names = [f"{name}.{kind}" for kind in layer.state_dict()]
        # Each has a mapping of its own, of which nothing else is read.
        state = {one.rpartition(".")[2]: SafetensorsReader().read(self.files[one], one) for one in names}
        layer.load_state_dict(state, assign=True)
        return layer


def is_ours(directory: Path) -> bool:
    """Whether a directory's config.json is a fastpath checkpoint's."""
    return OUR_FIELD in read_json(Path(directory) / "config.json")


def read_config(directory: Path) -> Config:
    """The Config of a checkpoint directory, whose config.json has the exact field names of Config."""
    path = Path(directory) / "config.json"
    fields = read_json(path)
    if OUR_FIELD not in fields:
        raise UserError(f"{path} is not the config of a fastpath checkpoint")
    fields.pop("quantization", None)
    config = make_config(path, **fields)
    return config if can_draft() else replace(config, mtp=False)


def can_draft() -> bool:
    """Whether mixers/mtp.py is there. If it was deleted, models are read without their MTP layer."""
    try:
        return find_spec("mixers.mtp") is not None
    except ModuleNotFoundError:  # all of mixers/ was deleted
        return False


def read_quantization(directory: Path) -> Quantization | None:
    """How the weights of a checkpoint directory are quantized; None if they are not."""
    path = Path(directory) / "config.json"
    fields = read_json(path).get("quantization")
    if fields is None:
        return None
    try:
        return Quantization(**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def make_config(path: Path, **fields) -> Config:
    """A Config from the fields of a JSON file. If they are not valid, a UserError names the file."""
    try:
        for name, kind in ({"rope_scaling": RopeScaling} | PARTS).items():
            part = fields.get(name)
            if part is not None and not isinstance(part, kind):
                fields[name] = kind(**with_tuples(dict(part)))
        return Config(**with_tuples(fields))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def with_tuples(fields: dict) -> dict:
    """Fields with their lists turned into tuples, because JSON knows only lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def safetensors_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of the tensors of a safetensors file, such as ((3, 5), "BF16")."""
    check_is_file(path)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is truncated, or not a readable safetensors file: {error}") from None


class SafetensorsReader:
    """Reads tensors of safetensors files, which are mapped: a tensor needs no memory of its own.

    To open a file of 30,000 tensors, such as the matrices of many experts, takes 0.08 s, so a file
    stays open for the next tensor. But the pages of a mapping that were read stay in the process until
    the mapping is closed with its last tensor, so one mapping for all tensors would hold the whole file
    in memory. So a file is opened again before more than MAPPED_VALUES values of it were read.
    """

    def __init__(self):
        self.path: Path | None = None
        self.file = None  # the open file with this path
        self.mapped = 0  # how many values of it were read

    def read(self, path: Path, name: str, part=None) -> torch.Tensor:
        """One tensor of a file, or a part of it (a tp.Slice)."""
        try:
            if path != self.path:
                self._open(path)
            # All of them, also for a part: a part of each row touches all pages.
            values = math.prod(self.file.get_slice(name).get_shape())
            if self.mapped + values > MAPPED_VALUES:
                self._open(path)
            self.mapped += values
            return self.file.get_tensor(name) if part is None else part.cut(self.file.get_slice(name))
        except SafetensorError as error:  # a dtype that torch does not have, such as F6_E2M3
            raise UserError(f"{path}: {name} cannot be read: {error}") from None

    def _open(self, path: Path):
        self.file = safe_open(path, "pt")
        self.path = path
        self.mapped = 0


def weight_paths(directory: Path, whole: str = "model.safetensors") -> list[Path]:
    """The files that hold a directory's tensors: the one named `whole`, or else the shards of its index.

    If both are there, the index belongs to an older model: save_pretrained does not delete it, and
    transformers ignores it.
    """
    index = directory / f"{whole}.index.json"
    if (directory / whole).exists() or not index.exists():
        return [directory / whole]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or any(Path(str(name)).name != name for name in names.values()):
        raise UserError(f"{index}: weight_map does not say which file of this directory holds each tensor")
    paths = sorted({directory / name for name in names.values()})
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} is missing, though {index.name} names it")
    return paths


def checked_files(directory: Path, expected: dict[str, torch.Tensor]) -> dict[str, Path]:
    """tensor name -> file, after checking that a directory holds exactly the expected tensors.

    expected: tensors on the meta device. For float32, every floating-point dtype is allowed.
    """
    has_mtp = any(name.startswith(DRAFT_LAYER) for name in expected)  # otherwise the layer is left out
    files = {}
    found = {}  # name -> (shape, dtype)
    for path in weight_paths(directory):
        header = safetensors_header(path)
        files |= dict.fromkeys(header, path)
        found |= {name: header[name] for name in header if has_mtp or not name.startswith(DRAFT_LAYER)}
    shapes = {name: shape for name, (shape, _) in found.items()}
    check_shapes(directory, shapes, {name: tensor.shape for name, tensor in expected.items()})
    for name, (_, dtype) in found.items():
        allowed = [SAFETENSORS_NAMES[expected[name].dtype]]
        if expected[name].dtype == torch.float32:
            allowed = list(FLOATS.values())
        if dtype not in allowed:
            right = " or ".join(allowed)
            raise UserError(f"{files[name]}: {name} is {dtype}, but by its config it should be {right}")
    return files


def check_shapes(path: Path, found: dict[str, tuple], expected: dict[str, tuple]):
    """UserError if the tensors of a model's files (name -> shape) are not exactly the expected ones."""
    if others := [name for name in found if name not in expected]:
        raise UserError(f"{path} holds tensor {others[0]} {found[others[0]]}, which the model does not have")
    for name, shape in found.items():
        if tuple(shape) != tuple(expected[name]):
            right = tuple(expected[name])
            raise UserError(f"{path}: {name} is {shape}, but by its config it should be {right}")
    if missing := [name for name in expected if name not in found]:
        raise UserError(f"{path} lacks tensor {and_more(missing)}")


# ---------------------------------------------------------------- writing a checkpoint directory

SHARD_BYTES = 5_000_000_000
ABANDONED_S = 3600.0  # a writer whose files have not changed for this long is assumed dead


class ShardFile:
    """A safetensors file to which tensors are written one by one.

    The header is at the beginning of the file and is written last, so space is reserved for it.
    """

    HEADER_BYTES = 1 << 18  # the format allows spaces after the header
    MAX_TENSORS = 1000  # each takes less than 200 bytes of the header

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115
        self.size = 0  # the bytes of all tensors so far
        self.header: dict[str, dict] = {}
        self.file.write(b" " * (8 + self.HEADER_BYTES))

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor may be added. (The first tensor of a file always may.)"""
        return len(self.header) < self.MAX_TENSORS and self.size + tensor.nbytes <= SHARD_BYTES

    def add(self, name: str, tensor: torch.Tensor):
        start = self.size
        self.size += tensor.nbytes
        self.header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self.size],
        }
        self.file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())

    def close(self):
        # transformers requires the metadata.
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.header).encode()
        assert len(header) <= self.HEADER_BYTES
        self.file.seek(0)
        self.file.write(self.HEADER_BYTES.to_bytes(8, "little") + header)
        self.file.close()


class Writer:
    """Writes a checkpoint directory that is complete or does not exist: use it in a with statement.

    Everything goes into a directory beside the target (`self.path`), which is renamed to the target
    at the end of the block. An exception, Ctrl-C or SIGTERM removes it. Tensors are written one by
    one, and none is kept in memory.
    """

    def __init__(self, target: Path, expected_bytes: int = 0):
        """expected_bytes: the size of all tensors. If the disk has less free space, nothing is written."""
        self.target = Path(target).resolve()  # turns `.` into a name and follows links
        self.expected_bytes = expected_bytes
        # Processes on other machines and in other containers may write beside us, so that a process
        # id would not be unique.
        token = secrets.token_hex(8)
        self.path = self.target.parent / f".{self.target.name}.{token}.tmp"
        # The place of the previous checkpoint while it is being replaced.
        self.old = self.target.parent / f".{self.target.name}.old.{token}.tmp"
        self.shards: list[ShardFile] = []  # only the last one is open

    def __enter__(self):
        check_target(self.target)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.target)
            free = shutil.disk_usage(self.target.parent).free
            if free < self.expected_bytes:
                raise UserError(
                    f"{self.target.parent} has {free / 1e9:.2f} GB free, but the checkpoint needs "
                    f"{self.expected_bytes / 1e9:.2f} GB"
                )
            self.path.mkdir()
        except OSError as error:
            raise UserError(f"cannot write to {self.target.parent}: {error.strerror}") from None
        except (KeyboardInterrupt, SystemExit):  # before the with block, which would remove the directory
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return self

    def add(self, name: str, tensor: torch.Tensor):
        """Write one tensor, into a new shard if the last one has no room for it."""
        if not self.shards or not self.shards[-1].has_room_for(tensor):
            if self.shards:
                self.shards[-1].close()
            self.shards.append(ShardFile(self.path / f"shard-{len(self.shards) + 1}"))
        self.shards[-1].add(name, tensor)

    def add_json(self, name: str, value: dict):
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (self.path / name).write_text(text + "\n", encoding="utf-8")

    def add_config(self, config: Config, quantization=None, recommended: dict | None = None):
        """recommended: as in Checkpoint."""
        if recommended:
            self.add_json(GENERATION, recommended)
        fields = None if quantization is None else dataclasses.asdict(quantization)
        self.add_json("config.json", dataclasses.asdict(config) | {"quantization": fields})

    def add_tokenizer(self, files: TokenizerFiles):
        if files.json is not None:
            (self.path / "tokenizer.json").write_bytes(files.json)
        elif files.library is not None:
            text = files.library.to_str(pretty=True)
            (self.path / "tokenizer.json").write_bytes(text.encode())
        if files.model is not None:
            (self.path / "tokenizer.model").write_bytes(files.model)
        templates = {TEMPLATE: files.template, TOOL_TEMPLATE: files.tool_template}
        for name, template in templates.items():
            if template is not None:
                (self.path / name).write_text(template, encoding="utf-8")
        if files.settings is not None:
            self.add_json("tokenizer_config.json", files.settings)

    def __exit__(self, kind, error, traceback):
        try:
            if error is not None:
                raise error
            self._finish_shards()
            self._move_to_target()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise UserError(f"cannot write {self.target}: {error.strerror}; nothing was left behind") from None
        finally:
            for shard in self.shards:
                with suppress(OSError):  # what is left in its buffer may not fit on the disk either
                    shard.file.close()
            shutil.rmtree(self.path, ignore_errors=True)  # after a success it is no longer there

    def _finish_shards(self):
        """Close the last shard, rename all of them as transformers names them, and write the index."""
        if self.shards:
            self.shards[-1].close()
        count = len(self.shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        else:
            weight_map = {}
            for name, shard in zip(names, self.shards):
                weight_map |= dict.fromkeys(shard.header, name)
            total = sum(shard.size for shard in self.shards)
            self.add_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for i, name in enumerate(names):
            (self.path / f"shard-{i + 1}").rename(self.path / name)

    def _move_to_target(self):
        """Rename our directory to the target."""
        try:
            if self.target.exists():
                self.target.rename(self.old)
            self.path.rename(self.target)
        finally:
            if self.old.exists() and not self.target.exists():  # interrupted between the two renames
                self.old.rename(self.target)
            shutil.rmtree(self.old, ignore_errors=True)


def check_target(target: Path | None):
    """UserError if no checkpoint directory can be written there. Commands call this before long work; a
    Writer looks again. None: the target is not known yet."""
    if target is None:
        return
    if os.path.lexists(target) and not is_replaceable(target):
        raise UserError(f"{target} exists and is not a checkpoint directory; name another with --out")
    parent = next(parent for parent in Path(target).resolve().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to {parent}")


def print_written(directory: Path):
    """Print on stderr how to run a checkpoint, and on stdout its path alone, for scripts."""
    command = shlex.join(["python", "generate.py", "--checkpoint_path", str(directory)])
    print_status(f"checkpoint written; to run it: {command}")
    print(directory)


def is_replaceable(path: Path) -> bool:
    """Whether a path is an empty directory or a fastpath checkpoint. False if it has disappeared."""
    try:
        return path.is_dir() and (not any(path.iterdir()) or is_ours(path))
    except (OSError, UserError):
        return False


def remove_abandoned(target: Path):
    """Delete the directories of this target's writers that have not changed for an hour: they were killed.

    (A writer may be on another machine, so its process cannot be looked for.) If a writer was killed
    after it had moved the previous checkpoint away, that checkpoint is put back.
    """
    for path in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):  # its writer may be removing it
            changed = max(file.stat().st_ctime for file in (path, *path.iterdir()))
            if time.time() - changed < ABANDONED_S:
                continue
            if path.name.startswith(f".{target.name}.old.") and not target.exists():
                path.rename(target)
            shutil.rmtree(path, ignore_errors=True)
