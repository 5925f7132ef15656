"""Writes checkpoint directories so that no crash leaves half of one: a directory is complete, or it
does not exist.

Read `Writer` first; ShardFile is one safetensors file, to which tensors are added one by one.
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

from checkpoint import GENERATION, INDEX, SAFETENSORS_NAMES, is_ours
from cli import UserError, print_status
from config import Config
from tokenizer import TEMPLATE, TOOL_TEMPLATE, TokenizerFiles

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
                need = f"{self.expected_bytes / 1e9:.2f} GB"
                has = f"{self.target.parent} has {free / 1e9:.2f} GB free"
                raise UserError(f"{has}, but the checkpoint needs {need}")
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
            why = f"{error.strerror}; nothing was left behind"
            raise UserError(f"cannot write {self.target}: {why}") from None
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
    """Delete the directories of killed writers of this target: those that have not changed for an hour.

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
