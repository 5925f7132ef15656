"""Checkpoint directories: config.json, model.safetensors (in shards above 5 GB), the tokenizer's files.

Read `read_config` and `read_model` for reading, `Writer` for writing. Only safetensors is ever written.
"""

import dataclasses
import errno
import json
import os
import secrets
import shlex
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cli import HugePages, UserError, available_memory, print_status, progress_bar
from formats import Quantization, matrices, swap
from model import Config, RopeScaling, Transformer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SAFETENSORS_NAMES = FLOATS | {torch.int8: "I8", torch.uint8: "U8"}
SHARD_BYTES = 5_000_000_000
ABANDONED_S = 3600.0  # a writer whose files have not changed for this long is assumed dead
TARGET_CHECKS = 10  # a target that is not a checkpoint is looked at this often, 50 ms apart, before it is refused
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
OUR_FIELD = "n_kv_head"  # a field of our config.json that no other project's has

# ---------------------------------------------------------------- reading


def read_json(path: Path) -> dict:
    """The JSON object in a file; UserError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def is_ours(directory: Path) -> bool:
    """Whether a directory's config.json is a fastpath checkpoint's."""
    return OUR_FIELD in read_json(Path(directory) / "config.json")


def read_config(directory: Path) -> Config:
    """The Config of a checkpoint directory, whose config.json has the exact field names of Config."""
    path = Path(directory) / "config.json"
    fields = read_json(path)
    if OUR_FIELD not in fields:
        raise UserError(f"{path} is not the config of a fastpath checkpoint; convert it with convert_hf_checkpoint.py")
    fields.pop("quantization", None)
    return make_config(path, **fields)


def read_quantization(directory: Path) -> Quantization | None:
    """How the weights of a checkpoint directory are quantized, or None."""
    path = Path(directory) / "config.json"
    fields = read_json(path).get("quantization")
    try:
        quantization = None if fields is None else Quantization(**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if quantization is not None and quantization.exceptions:
        names = [name for name, _ in matrices(empty_model(read_config(directory)))]
        if unknown := sorted(quantization.exceptions.keys() - set(names)):
            raise UserError(f"{path}: quantization exceptions name {unknown[0]}, which is no matrix of the model")
    return quantization


def make_config(path: Path, **fields) -> Config:
    """A Config from the fields of a JSON file. UserError, with the file's path, if they are not valid."""
    try:
        if fields.get("rope_scaling") is not None and not isinstance(fields["rope_scaling"], RopeScaling):
            scaling = dict(fields["rope_scaling"])
            fields["rope_scaling"] = RopeScaling(**scaling | {"factors": tuple(scaling.get("factors", ()))})
        if fields.get("sliding_layers") is not None:
            fields["sliding_layers"] = tuple(fields["sliding_layers"])
        return Config(**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def safetensors_header(path: Path) -> dict[str, dict]:
    """name -> {dtype, shape, data_offsets} of a safetensors file. If it is truncated, a UserError names the tensor."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= size - 8 else None
        if header is None:
            raise ValueError("the header is cut short")
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            end = 8 + length + entry["data_offsets"][1]
            if end > size:
                raise UserError(f"{path} is truncated: tensor {name} ends at byte {end:,}, the file at {size:,}")
        with safe_open(path, "pt"):  # the library's own checks: overlaps, holes, dtypes
            return header
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None


def read_tensor(path: Path, name: str, part=None, copy=torch.clone) -> torch.Tensor:
    """A copy of one tensor of a safetensors file, or of a part of it (a tp.Slice).

    The file is opened for each tensor. The library maps the file, and pages that were read stay in the process until
    the mapping is closed: one mapping for all tensors would hold the whole file in memory besides the copies.
    """
    with safe_open(path, "pt") as file:
        return copy(file.get_tensor(name) if part is None else part.of(file.get_slice(name)))


def weight_files(directory: Path) -> dict[str, Path]:
    """tensor name -> the safetensors file that holds it, read from the index if there is one."""
    index = directory / INDEX
    if not index.exists():
        path = directory / "model.safetensors"
        return dict.fromkeys(safetensors_header(path), path)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map")
    found = {}
    for path in sorted({directory / str(name) for name in weight_map.values()}):
        if not path.exists():
            raise UserError(f"{path} is missing, though {INDEX} names it")
        found |= dict.fromkeys(safetensors_header(path), path)
    if missing := sorted(weight_map.keys() - found.keys()):
        raise UserError(f"{directory} lacks tensor {missing[0]}, which {INDEX} names")
    return {name: found[name] for name in weight_map}


def empty_model(config: Config, quantization: Quantization | None = None) -> Transformer:
    """The model on the meta device, with shapes and dtypes but without memory."""
    with torch.device("meta"):
        return swap(Transformer(config), quantization)


def total_weight_bytes(config: Config, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
    """Bytes of all weights, if those that are not quantized have this dtype."""
    state = empty_model(config, quantization).state_dict().values()  # unquantized weights are float32 here
    return sum(t.numel() * (dtype if t.dtype == torch.float32 else t.dtype).itemsize for t in state)


def checked_files(directory: Path, expected: dict[str, torch.Tensor]) -> dict[str, Path]:
    """weight_files of a directory, after checking that they hold exactly the expected tensors (on the meta device).

    Where float32 is expected, every floating-point dtype is allowed.
    """
    files = weight_files(directory)
    if missing := sorted(expected.keys() - files.keys()):
        raise UserError(f"{directory} lacks tensor {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1))
    if unknown := sorted(files.keys() - expected.keys()):
        raise UserError(f"{files[unknown[0]]} holds tensor {unknown[0]}, which the model of config.json does not have")
    for path in dict.fromkeys(files.values()):
        for name, entry in safetensors_header(path).items():
            tensor = expected[name]
            if tuple(entry["shape"]) != tuple(tensor.shape):
                shapes = f"{tuple(entry['shape'])}, but by config.json it should be {tuple(tensor.shape)}"
                raise UserError(f"{path}: {name} is {shapes}")
            allowed = FLOATS.values() if tensor.dtype == torch.float32 else (SAFETENSORS_NAMES[tensor.dtype],)
            if entry["dtype"] not in allowed:
                dtypes = f"{entry['dtype']}, but by config.json it should be {' or '.join(allowed)}"
                raise UserError(f"{path}: {name} is {dtypes}")
    return files


def read_model(directory: Path, device="cpu", dtype=torch.bfloat16, shard=None) -> Transformer:
    """The checkpoint's model with its weights on device, without caches and kernels. UserError for NaN and infinity.

    Weights that are not quantized get `dtype`, in which the model then computes. Besides the model, at most one tensor
    is in memory. shard: a tp.Shard, of which only the part of one rank is read.
    """
    directory = Path(directory)
    quantization = read_quantization(directory)
    model = empty_model(read_config(directory), quantization)
    expected = model.state_dict()
    files, weights = checked_files(directory, expected), {}
    parts = dict.fromkeys(files) if shard is None else shard.cut(model)
    total = total_weight_bytes(model.config, dtype, quantization) // (shard.ranks if shard else 1)
    # The kernels repack quantized weights one by one, and free each original. In one block it could not be freed alone.
    memory = HugePages(total) if torch.device(device).type == "cpu" and quantization is None else None
    with progress_bar(total, f"loading {directory.name}", "B", delay=2) as bar:
        for name, part in parts.items():
            new_dtype = dtype if expected[name].dtype == torch.float32 else expected[name].dtype
            copy = torch.clone if memory is None else lambda tensor: memory.copy(tensor.to(new_dtype))  # noqa: B023
            weights[name] = tensor = read_tensor(files[name], name, part, copy).to(device=device, dtype=new_dtype)
            # aminmax makes no copy, and its results are NaN if any element is NaN.
            if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):
                dtype_name = str(new_dtype).removeprefix("torch.")
                raise UserError(f"{files[name]}: {name} holds NaN or infinity in {dtype_name}")
            bar.update(tensor.nbytes)
    model.load_state_dict(weights, assign=True)
    if shard is not None:
        shard.connect(model)
    return model.eval()


def check_memory(config: Config, device, dtype: torch.dtype, cache_tokens: int, quantization=None, portion=1.0):
    """Raise UserError, with the bytes needed and free, if the weights and caches of a model do not fit on device.

    cache_tokens: the number of positions of all cache rows together. portion: the fraction of a split model that is on
    this device.
    """
    weights = total_weight_bytes(config, dtype, quantization) * portion
    caches = 2 * config.n_layer * cache_tokens * config.n_kv_head * config.head_dim * dtype.itemsize * portion
    free = available_memory(device)
    if weights + caches > free:
        raise UserError(
            f"the model needs {(weights + caches) / 1e9:.2f} GB on {device} ({weights / 1e9:.2f} weights, "
            f"{caches / 1e9:.2f} KV cache), but {free / 1e9:.2f} GB are free; take a smaller model, dtype, batch or "
            "--max_seq_length"
        )


# ---------------------------------------------------------------- writing


class ShardFile:
    """A safetensors file to which tensors are written one by one. Space is reserved for the header, written last."""

    HEADER_BYTES = 1 << 18  # the format allows spaces after the header
    MAX_TENSORS = 1000  # each takes less than 200 bytes of the header

    def __init__(self, path: Path):
        self.file, self.size = open(path, "wb"), 0  # noqa: SIM115
        self.header: dict[str, dict] = {}
        self.file.write(b" " * (8 + self.HEADER_BYTES))

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor may be added. The first tensor of a file always may."""
        return not self.header or (len(self.header) < self.MAX_TENSORS and self.size + tensor.nbytes <= SHARD_BYTES)

    def add(self, name: str, tensor: torch.Tensor):
        dtype, offsets = SAFETENSORS_NAMES[tensor.dtype], [self.size, self.size + tensor.nbytes]
        self.header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        self.file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        self.size += tensor.nbytes

    def close(self):
        metadata = {"__metadata__": {"format": "pt"}}  # transformers requires it
        header = json.dumps(metadata | self.header).encode()
        assert len(header) <= self.HEADER_BYTES
        self.file.seek(0)
        self.file.write(self.HEADER_BYTES.to_bytes(8, "little") + header)
        self.file.close()


class Writer:
    """Writes a checkpoint directory that is complete or does not exist: use it in a with statement.

    Everything goes into a directory beside the target (`self.path`), which is renamed to the target at the end of the
    block. An exception, Ctrl-C or SIGTERM removes it. Tensors are written one by one, and none is kept in memory.
    """

    def __init__(self, target: Path, expected_bytes: int = 0, replace: bool = True):
        """expected_bytes: the size of all tensors; a disk with less free space is refused before anything is written.
        replace: whether a checkpoint that is at the target in the end is replaced; otherwise it is kept."""
        self.target = Path(target).resolve()  # turns `.` into a name and follows links
        self.expected_bytes, self.replace = expected_bytes, replace
        # Processes on other machines and in other containers may write beside us, so a process id is not unique.
        token = secrets.token_hex(8)
        self.path = self.target.parent / f".{self.target.name}.{token}.tmp"
        self.old = self.target.parent / f".{self.target.name}.old.{token}.tmp"  # holds a checkpoint being replaced
        self.shards: list[ShardFile] = []  # only the last one is open

    def __enter__(self):
        try:
            self._begin()
        except BaseException:  # Ctrl-C as well
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return self

    def _begin(self):
        for _ in range(TARGET_CHECKS):
            if not os.path.lexists(self.target) or is_replaceable(self.target):
                break
            time.sleep(0.05)  # another writer may be moving its directory here
        else:
            raise UserError(f"{self.target} exists and is not a checkpoint directory; name another with --out")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.target)
            self.path.mkdir()
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise UserError(f"cannot write to {self.target.parent}: {error.strerror}") from None
        if free < self.expected_bytes:
            need = f"{self.expected_bytes / 1e9:.2f} GB"
            raise UserError(f"{self.target.parent} has {free / 1e9:.2f} GB free, but the checkpoint needs {need}")

    def add(self, name: str, tensor: torch.Tensor):
        """Write one tensor, into a new shard if the last one has no room for it."""
        if not self.shards or not self.shards[-1].has_room_for(tensor):
            if self.shards:
                self.shards[-1].close()
            self.shards.append(ShardFile(self.path / f"shard-{len(self.shards) + 1}"))
        self.shards[-1].add(name, tensor)

    def add_json(self, name: str, value: dict):
        (self.path / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def add_config(self, config: Config, quantization: Quantization | None = None):
        fields = None if quantization is None else dataclasses.asdict(quantization)
        self.add_json("config.json", dataclasses.asdict(config) | {"quantization": fields})

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
                with suppress(OSError):  # the rest of its buffer may not fit on the disk either
                    shard.file.close()
            shutil.rmtree(self.path, ignore_errors=True)  # after a success it is no longer there

    def _finish_shards(self):
        """Close the last shard, rename all of them to the file names of transformers, and write the index."""
        if self.shards:
            self.shards[-1].close()
        names = [f"model-{i + 1:05}-of-{len(self.shards):05}.safetensors" for i in range(len(self.shards))]
        if len(names) == 1:
            names = ["model.safetensors"]
        else:
            weight_map = {tensor: name for name, shard in zip(names, self.shards) for tensor in shard.header}
            total = sum(shard.size for shard in self.shards)
            self.add_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for i, name in enumerate(names):
            (self.path / f"shard-{i + 1}").rename(self.path / name)

    def _move_to_target(self):
        """Rename our directory to the target. Other writers may change the target between any two of these calls."""
        try:
            while True:
                try:
                    self.path.rename(self.target)  # fails unless nothing or an empty directory is there
                    return
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    if not self.replace:
                        return
                    shutil.rmtree(self.old, ignore_errors=True)
                    with suppress(FileNotFoundError):
                        self.target.rename(self.old)
        finally:
            with suppress(OSError):
                if self.old.exists() and not self.target.exists():  # interrupted between the two renames
                    self.old.rename(self.target)
            shutil.rmtree(self.old, ignore_errors=True)


def copy_tokenizer(source: Path, writer: Writer):
    """Copy a directory's tokenizer files as they are."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, writer.path / name)


def print_written(directory: Path):
    """Say on stderr how to run a checkpoint that a command has written. Its path alone goes to stdout, for scripts."""
    command = shlex.join(["python", "generate.py", "--checkpoint_path", str(directory)])
    print_status(f"checkpoint written; to run it: {command}")
    print(directory)


def is_replaceable(path: Path) -> bool:
    """Whether a path is an empty directory or a fastpath checkpoint. False if it disappears during the check."""
    try:
        return path.is_dir() and (not any(path.iterdir()) or is_ours(path))
    except (OSError, UserError):
        return False


def remove_abandoned(target: Path):
    """Delete the directories of killed writers of this target, that is, those that have not changed for an hour.

    (A writer may be on another machine, so its process cannot be looked for.) If a writer was killed after it had moved
    the previous checkpoint away, that checkpoint is put back.
    """
    for path in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):  # its writer may be removing it itself
            if time.time() - max(file.stat().st_ctime for file in (path, *path.iterdir())) < ABANDONED_S:
                continue
            if path.name.startswith(f".{target.name}.old.") and not target.exists():
                path.rename(target)
            shutil.rmtree(path, ignore_errors=True)
