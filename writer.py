"""Writes checkpoint directories so that no crash leaves half of one: complete under their name, or not there at all.

Read `Writer` first; ShardFile is one safetensors file, to which tensors are added one by one. Only safetensors is ever
written.
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

from checkpoint import INDEX, SAFETENSORS_NAMES, is_ours
from cli import UserError, print_status
from config import Config
from tokenizer import TEMPLATE, TOOL_TEMPLATE, TokenizerFiles

SHARD_BYTES = 5_000_000_000
ABANDONED_S = 3600.0  # a writer whose files have not changed for this long is assumed dead
TARGET_CHECKS = 10  # a target that is not a checkpoint is looked at this often, 50 ms apart, before it is refused


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
        # transformers requires the metadata.
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.header).encode()
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
            raise UserError(
                f"{self.target.parent} has {free / 1e9:.2f} GB free, "
                f"but the checkpoint needs {self.expected_bytes / 1e9:.2f} GB"
            )

    def add(self, name: str, tensor: torch.Tensor):
        """Write one tensor, into a new shard if the last one has no room for it."""
        if not self.shards or not self.shards[-1].has_room_for(tensor):
            if self.shards:
                self.shards[-1].close()
            self.shards.append(ShardFile(self.path / f"shard-{len(self.shards) + 1}"))
        self.shards[-1].add(name, tensor)

    def add_json(self, name: str, value: dict):
        (self.path / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def add_config(self, config: Config, quantization=None):
        fields = None if quantization is None else dataclasses.asdict(quantization)
        self.add_json("config.json", dataclasses.asdict(config) | {"quantization": fields})

    def add_tokenizer(self, files: TokenizerFiles):
        if files.json is not None or files.library is not None:
            data = files.library.to_str(pretty=True).encode() if files.json is None else files.json
            (self.path / "tokenizer.json").write_bytes(data)
        if files.model is not None:
            (self.path / "tokenizer.model").write_bytes(files.model)
        for name, template in ((TEMPLATE, files.template), (TOOL_TEMPLATE, files.tool_template)):
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
