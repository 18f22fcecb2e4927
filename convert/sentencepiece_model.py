"""Writes a sentencepiece model for a vocabulary that comes without one: out of a GGUF, or out of tokenizer.json.

The file is one protobuf message, sentencepiece_model.proto's ModelProto; the few kinds of fields it needs are encoded
here.
"""
import struct
from pathlib import Path

import sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)      # a piece's type, also in a GGUF


def write_model(path: Path, pieces: list[tuple[str, float, int]], add_dummy_prefix: bool, bos: int, eos: int,
                unk: int) -> None:
    """A BPE model of these (piece, score, type), in order of id: of all neighbours, those merge first whose union has
    the highest score.  Text is not normalised: only a blank becomes "▁", and add_dummy_prefix puts one in front.
    USER_DEFINED pieces are found in any text before it is split, CONTROL pieces never.  bos, eos: a CONTROL piece's id,
    or -1 for none.  Raises ValueError where sentencepiece cannot use such a vocabulary."""
    none = pieces[unk][0]               # no control piece, so that its id is -1; a name left out would stand for <s>
    name = lambda i: none if i < 0 else pieces[i][0]
    bpe, falls_back_to_bytes = 2, any(kind == BYTE for _, _, kind in pieces)
    trainer = b"".join((field(3, bpe), field(4, len(pieces)), field(35, falls_back_to_bytes),
                        field(40, unk), field(41, bos), field(42, eos), field(43, -1),
                        field(45, none), field(46, name(bos)), field(47, name(eos)), field(48, none)))
    normalizer = field(1, "identity") + field(3, add_dummy_prefix) + field(4, False) + field(5, True)
    model = b"".join(field(1, field(1, text) + field(2, float(score)) + field(3, kind)) for text, score, kind in pieces)
    model += field(2, trainer) + field(3, normalizer)
    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"sentencepiece cannot use this vocabulary ({error})") from None
    path.write_bytes(model)


def as_control(model: bytes, ids: set[int]) -> bytes:
    """A sentencepiece model with these pieces made CONTROL.  Of a protobuf field that occurs twice the last one counts,
    so another type is put behind each."""
    out, at, id = [], 0, 0
    while at < len(model):
        start, size, shift = at + 1, 0, 0                   # every field of ModelProto has a length
        while True:
            size |= (model[start] & 127) << shift
            start, shift = start + 1, shift + 7
            if model[start - 1] < 128:
                break
        data, piece = model[start:start + size], model[at] == 1 << 3 | 2
        out.append(field(1, data + field(3, CONTROL)) if piece and id in ids else model[at:start + size])
        at, id = start + size, id + piece
    return b"".join(out)


def field(number: int, value: int | float | str | bytes) -> bytes:
    """One field of a protobuf message: its number and wire type, then the value."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % 2**64)              # negative numbers in two's complement
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(n: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    return bytes([n]) if n < 128 else bytes([n % 128 | 128]) + varint(n >> 7)
