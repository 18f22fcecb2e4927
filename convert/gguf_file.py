"""A GGUF file: its metadata, and where on disk its tensors are.

The gguf package's own reader believes every count that a file claims: an array of 2^60 numbers never ends.
Here nothing is read, and no memory taken, before it is known that the file is long enough to hold it.
"""
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch

SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
           12: "<f8"}       # GGUF's number for a type of value -> numpy's name
STRING, ARRAY = 8, 9
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Packed(NamedTuple):
    """A tensor, still on disk."""
    path: Path
    start: int                          # byte in the file
    shape: tuple[int, ...]              # outermost first; GGUF lists dimensions in reverse
    kind: gguf.GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size


def read_parts(path: Path) -> tuple[dict, dict[str, Packed]]:
    """-> (metadata, {name: tensor}) of a GGUF, all parts together where it was split.  Raises ValueError when a part is
    missing, damaged or of another model."""
    facts, tensors = parse(path)
    count = facts.get("split.count", 0)                             # 0: it was split, and is joined again
    if not isinstance(count, int) or count < 2:
        return facts, tensors
    name = re.fullmatch(rf"(.+)-00001-of-{count:05}\.gguf", path.name)
    if not name or facts.get("split.no") != 0:
        raise ValueError(f"{path} is one of {count} parts: name the first, ...-00001-of-{count:05}.gguf, "
                         "in a folder with the others")
    for i in range(1, count):
        part = path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf")
        part_facts, more = parse(part)
        if (part_facts.get("split.no"), part_facts.get("split.count")) != (i, count):
            raise ValueError(f"{part} is not part {i + 1} of {count}: its metadata says something else")
        if twice := sorted(tensors.keys() & more.keys()):
            raise ValueError(f"{part} repeats tensors of an earlier part: {', '.join(twice)}")
        tensors |= more
    if facts.get("split.tensors.count") != len(tensors):
        raise ValueError(f"{path}: its parts hold {len(tensors)} tensors, not {facts.get('split.tensors.count')}")
    return facts, tensors


def parse(path: Path) -> tuple[dict, dict[str, Packed]]:
    """Like read_parts, of one file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        with open(path, "rb") as file:
            return header(file)
    except (ValueError, KeyError) as error:
        reason = f"unknown type {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged or not GGUF ({reason}): download it again") from None


def header(file) -> tuple[dict, dict[str, Packed]]:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    if (version := scalar(file, "<u4")) not in (2, 3):
        raise ValueError(f"version {version:#x}: little-endian files of version 2 and 3 are read")
    tensor_count, fact_count = scalar(file, "<u8"), scalar(file, "<u8")
    facts, found, tensors = {}, {}, {}
    for _ in range(fact_count):
        key = string(file)
        if key in facts:
            raise ValueError(f"{key} is there twice")
        facts[key] = value(file, scalar(file, "<u4"))
    for _ in range(tensor_count):
        name = string(file)
        if name in found:
            raise ValueError(f"tensor {name} is there twice")
        dims = numbers(file, "<u8", scalar(file, "<u4"))
        found[name] = tuple(reversed(dims)), scalar(file, "<u4"), scalar(file, "<u8")
    align = facts.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"general.alignment {align!r} is not a power of two")
    data, size = -(-file.tell() // align) * align, os.fstat(file.fileno()).st_size
    for name, (shape, kind, offset) in found.items():
        tensors[name] = t = Packed(Path(file.name), data + offset, shape, gguf.GGMLQuantizationType(kind))
        if 0 in shape:
            raise ValueError(f"{name} has shape {shape}")
        if math.prod(shape[-1:]) % gguf.GGML_QUANT_SIZES[t.kind][0]:
            raise ValueError(f"rows of {name} {shape} are not whole blocks of {t.kind.name}")
        if t.start + t.nbytes > size:
            raise ValueError(f"{name} {shape} ends beyond the file")
    return facts, tensors


def take(file, n: int) -> bytes:
    if n > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("it ends too early")
    return file.read(n)


def numbers(file, kind: str, n: int) -> list:
    return np.frombuffer(take(file, n * np.dtype(kind).itemsize), kind).tolist()


def scalar(file, kind: str):
    return numbers(file, kind, 1)[0]


def string(file) -> str:
    return take(file, scalar(file, "<u8")).decode()


def value(file, kind: int):
    if kind == STRING:
        return string(file)
    if kind != ARRAY:
        return scalar(file, SCALARS[kind])
    kind, n = scalar(file, "<u4"), scalar(file, "<u8")
    return [string(file) for _ in range(n)] if kind == STRING else numbers(file, SCALARS[kind], n)


def pieces(t: Packed, rows: int = 1024):
    """The tensor, so many rows at a time (n, in): F32, F16 and BF16 as they are, anything else as the float32 numbers it
    stands for, which take several times what the file does."""
    total = math.prod(t.shape[:-1])
    width = t.nbytes // total
    for i in range(0, total, rows):
        n = min(rows, total - i)
        data = np.fromfile(t.path, np.uint8, n * width, offset=t.start + i * width)
        if t.kind.name in PLAIN:
            yield torch.from_numpy(data).view(PLAIN[t.kind.name]).view(n, -1)
        else:
            yield torch.from_numpy(gguf.quants.dequantize(data.reshape(n, width), t.kind))


def load(t: Packed) -> torch.Tensor:
    out = torch.empty(math.prod(t.shape[:-1]), t.shape[-1], dtype=PLAIN.get(t.kind.name, torch.float32))
    done = 0
    for piece in pieces(t):
        out[done:done + len(piece)] = piece
        done += len(piece)
    return out.view(t.shape)


def check_kinds(tensors: dict[str, Packed]) -> None:
    """ValueError unless `load` can read all of them: said before the first is read."""
    for kind in {t.kind for t in tensors.values()}:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ValueError(f"weights stored as {kind.name} are not supported: the gguf package cannot dequantise "
                             "them") from None
