"""Parses the header of a GGUF file: its metadata, and where its tensors are.

The `gguf` package does the same in 20 to 60 times the time, because it makes numpy arrays of every string. docs/gguf.md
of ggml describes the layout: magic, version, counts, key-value pairs, tensor infos; numbers are little-endian.
"""

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from formats import FORMATS

# How to unpack a value, by its type in the file; strings (8) and arrays (9) have lengths.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FIRST_READ = 1 << 24  # bytes; few headers are longer
LONGEST_HEADER = 1 << 26  # bytes; longer ones than those of any model would take minutes and gigabytes
# (name, columns of a block, bytes of a block) of a tensor's type. Other types are looked up in the gguf package.
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)}
QUANTIZED = {
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    20: "iq4_nl",
    23: "iq4_xs",
}
BLOCKS = {number: FORMATS[name].parts[0] for number, name in QUANTIZED.items()}
TYPES |= {number: (QUANTIZED[number].upper(), block.columns, block.count) for number, block in BLOCKS.items()}

MOST_FILES = 1000  # of a split model
SPLIT_NAME = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # the slowest dimension first, as in torch
    type: str  # such as "Q4_K"
    start: int  # byte in the file
    row_bytes: int
    nbytes: int
    part: int = 0  # of a model that is split over several files: in which of them


class Parser:
    """Reads values from the beginning of a file, one after the other. Raises ValueError or struct.error at its end."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def number(self, code: str):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """An array of strings, in which invalid UTF-8 is written as \\xff: a name or one token of many may have it. A
        vocabulary has hundreds of thousands of strings, so this loop calls nothing of ours."""
        data, at = self.data, self.at
        found, length_at = [], struct.Struct("<Q").unpack_from
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
        item, count = self.number("I"), self.number("Q")
        if item == STRING:
            return self.strings(count)
        if item not in SCALARS:
            raise ValueError(f"an array of type {item}, which is not known")
        if count * np.dtype(SCALARS[item]).itemsize > len(self.data) - self.at:
            raise struct.error("the file ends in an array")
        array = np.frombuffer(self.data, np.dtype("<" + SCALARS[item]), count, self.at) if count else np.zeros(0)
        self.at += array.nbytes
        return array.tolist()


def read_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """(metadata, tensors by name) of an open file. Raises ValueError, with the tensor's name if there is one, for what
    is not a complete GGUF file."""
    size = os.fstat(file.fileno()).st_size
    length = FIRST_READ
    while True:
        file.seek(0)
        data = file.read(length)
        try:
            return parse(data, size)
        except struct.error:
            if len(data) >= size or len(data) < length:
                raise ValueError("truncated: the file ends in its header") from None
            if length >= LONGEST_HEADER:
                raise ValueError(f"its header is longer than {LONGEST_HEADER >> 20} MB") from None
            length *= 2


def parse(data: bytes, size: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The same, from the first bytes of a file of `size` bytes. Raises struct.error if the header is longer."""
    parser = Parser(data)
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    parser.at = 4
    version = parser.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known; known: 2 and 3 (little-endian)")
    n_tensors, n_fields = parser.number("Q"), parser.number("Q")
    metadata = {}
    for _ in range(n_fields):
        name = parser.string()
        if name in metadata:
            raise ValueError(f"the field {name} is there twice")
        metadata[name] = parser.value(parser.number("I"))
    entries = [read_info(parser) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {alignment!r} is no power of two")
    begin = -(-parser.at // alignment) * alignment
    return metadata, locate(entries, begin, alignment, size)


def read_info(parser: Parser) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type, offset) of a tensor."""
    name, n_dimensions = parser.string(), parser.number("I")
    if n_dimensions > 4:
        raise ValueError(f"tensor {name} has {n_dimensions} dimensions")
    shape = tuple(parser.number("Q") for _ in range(n_dimensions))[::-1]
    return name, shape, parser.number("I"), parser.number("Q")


def locate(entries: list, begin: int, alignment: int, size: int) -> dict[str, TensorInfo]:
    """The tensors by name, after checking that they are whole, aligned, and apart."""
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        type_name, columns, block = block_sizes(name, kind)
        if 0 in shape:
            raise ValueError(f"tensor {name} has the shape {shape}")
        rows, C = math.prod(shape[:-1]), shape[-1] if shape else 1
        if C % columns:
            raise ValueError(f"tensor {name} ({type_name}) has rows of {C} elements, which are no blocks of {columns}")
        row_bytes = C // columns * block
        start, end = begin + offset, begin + offset + rows * row_bytes
        if end > size:
            raise ValueError(f"truncated: tensor {name} ends at byte {end:,}, the file at {size:,}")
        if offset % alignment:
            raise ValueError(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        tensors[name] = TensorInfo(name, shape, type_name, start, row_bytes, end - start)
    by_place = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for first, second in zip(by_place, by_place[1:]):
        if first.start + first.nbytes > second.start:
            raise ValueError(f"tensors {first.name} and {second.name} overlap")
    return tensors


def block_sizes(name: str, kind: int) -> tuple[str, int, int]:
    """(name, columns of a block, bytes of a block) of a type of tensors."""
    if kind in TYPES:
        return TYPES[kind]
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        return known.name, *gguf.GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        raise ValueError(f"tensor {name} has type {kind}, which is not known") from None


def open_file(path: Path) -> BinaryIO:
    """An open regular file. (Reading a device or a pipe might never end.)"""
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "no file" if path.exists() else "not there"
        raise FileNotFoundError(f"it is {kind}")
    return open(path, "rb")


def split_files(path: Path) -> list[Path]:
    """The files of the model of which this is one, in their order: MODEL-00001-of-00003.gguf and so on, as
    llama-gguf-split names them. Any other file stands for itself."""
    match = SPLIT_NAME.fullmatch(path.name)
    count = 0 if match is None else int(match["count"])
    if not 1 <= count <= MOST_FILES:
        return [path]
    return [path.with_name(f"{match['model']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def gguf_name(path: Path) -> str:
    """The name of the model in a file: that of the file, without what llama-gguf-split adds."""
    match = SPLIT_NAME.fullmatch(path.name)
    return path.stem if match is None else match["model"]
