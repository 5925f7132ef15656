"""Parses the header of a GGUF file: its metadata, and where its tensors are.

The reader of the `gguf` package takes 20 to 60 times as long, because it makes numpy arrays of
every string.
docs/gguf.md of ggml describes the layout: magic, version, counts, key-value pairs, tensor infos;
numbers are little-endian.
"""

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# The struct codes of the types of values that have a fixed size, by their numbers in the file.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9
# Bytes. No model has such a long header, and parsing a longer one would take minutes and gigabytes.
LONGEST_HEADER = 1 << 26
SPLIT_NAME = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # the slowest dimension first, as in torch
    type: str  # such as "Q4_K"
    row_bytes: int
    nbytes: int
    start: int  # the tensor's first byte, counted from the end of the header until that is known
    part: int = 0  # which file of a split model holds the tensor


class Parser:
    """Reads values from the beginning of a file, one after the other. At the end of the data, it
    raises ValueError or struct.error."""

    def __init__(self, data: bytes):
        self.data = data
        self.at = 0  # the next byte to read

    def number(self, code: str):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """The next strings of an array. Invalid UTF-8, which tokens and names may have, becomes \\xff.

        A vocabulary has hundreds of thousands of strings, so this loop calls no function of ours.
        """
        data = self.data
        at = self.at
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > len(data):
                raise struct.error("the file ends in a string")
            found.append(data[start:at].decode("utf-8", "backslashreplace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}, which is not known")

        item = self.number("I")
        count = self.number("Q")
        if item == STRING:
            return self.strings(count)
        if item not in SCALARS:
            raise ValueError(f"an array of type {item}, which is not known")
        if count * np.dtype(SCALARS[item]).itemsize > len(self.data) - self.at:
            raise struct.error("the file ends in an array")
        array = np.frombuffer(self.data, np.dtype("<" + SCALARS[item]), count, self.at)
        self.at += array.nbytes
        return array.tolist()


def read_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """(metadata, tensors by name) of an open file.

    Raises ValueError if it is not a complete GGUF file; the message names the tensor if there is one.
    """
    parser = Parser(file.read(LONGEST_HEADER))
    if parser.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    parser.at = 4
    try:
        version = parser.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not known; known: 2 and 3 (little-endian)")
        n_tensors = parser.number("Q")
        metadata = {}
        for _ in range(parser.number("Q")):
            name = parser.string()
            metadata[name] = parser.value(parser.number("I"))
        tensors = [read_info(parser) for _ in range(n_tensors)]
    except struct.error:
        raise ValueError(f"truncated: its header ends neither in the file nor in {LONGEST_HEADER >> 20} MB") from None

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {alignment!r} is not a power of two")
    begin = -(-parser.at // alignment) * alignment
    locate(tensors, begin, os.fstat(file.fileno()).st_size)
    return metadata, {tensor.name: tensor for tensor in tensors}


def read_info(parser: Parser) -> TensorInfo:
    """The next tensor. (Importing gguf takes 0.1 s, which other models need not wait for.)"""
    import gguf

    name = parser.string()
    shape = tuple(parser.number("Q") for _ in range(parser.number("I")))[::-1]
    number = parser.number("I")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"tensor {name} has type {number}, which is not known") from None
    columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    C = shape[-1] if shape else 1
    if C % columns:
        raise ValueError(f"tensor {name} ({kind.name}) has rows of {C} elements, which is not a multiple of {columns}")
    row_bytes = C // columns * block_bytes
    nbytes = math.prod(shape[:-1]) * row_bytes
    return TensorInfo(name, shape, kind.name, row_bytes, nbytes, start=parser.number("Q"))


def locate(tensors: list[TensorInfo], begin: int, size: int):
    """Complete the starts of tensors, and check that these are whole and do not overlap: a damaged file
    must not give wrong weights.

    begin: the byte of the file from which their offsets count. size: the bytes of the file.
    """
    end = begin
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        tensor.start += begin
        if tensor.start < end:
            raise ValueError(f"tensor {tensor.name} begins at byte {tensor.start:,}, inside the tensor before it")
        end = tensor.start + tensor.nbytes
        if end > size:
            raise ValueError(f"truncated: tensor {tensor.name} ends at byte {end:,}, the file at {size:,}")


def is_gguf(path: Path) -> bool:
    """Whether a path leads to a GGUF file: its suffix says so, or else its first four bytes.

    Ollama calls its files sha256-..., and links to files may have any name.
    """
    if path.suffix.lower() == ".gguf" or not path.is_file():
        return path.suffix.lower() == ".gguf" and not path.is_dir()
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def split_files(path: Path) -> list[Path]:
    """The files of the model to which this file belongs, in their order.

    llama-gguf-split names them MODEL-00001-of-00003.gguf and so on. A file with another name is the
    only one of its model.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    count = 0 if match is None else int(match["count"])
    if count == 0:
        return [path]
    return [path.with_name(f"{match['model']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def gguf_name(path: Path) -> str:
    """The name of the model in a file: the file's name without .gguf, and without what
    llama-gguf-split adds to it."""
    match = SPLIT_NAME.fullmatch(path.name)
    return re.sub(r"\.gguf$", "", path.name, flags=re.I) if match is None else match["model"]
