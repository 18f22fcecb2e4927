"""GGUF as a file: what it claims is checked before it is believed, parts are joined, blocks mean what the format says.

"Kills:" names the bug that was planted once and made the test fail.
"""
import struct

import gguf
import numpy as np
import pytest
import torch

from convert import from_gguf
import convert_weights as cw
from convert import gguf_file
from checkpoints import checkpoint, logits, one_thread  # noqa: F401 (autouse)
from test_gguf import KIND, pack, refused, write_gguf


def q4_k(block: bytes) -> list[float]:
    """256 numbers of 4 bits in groups of 32: d * scale * number - dmin * least; scales and leasts of 6 bits."""
    d, dmin = struct.unpack("<2e", block[:4])
    s, out = block[4:16], []
    scales = [s[j] & 63 for j in range(4)] + [(s[j + 8] & 15) | (s[j] >> 6) << 4 for j in range(4)]
    leasts = [s[j + 4] & 63 for j in range(4)] + [s[j + 8] >> 4 | (s[j + 4] >> 6) << 4 for j in range(4)]
    for j in range(8):
        nibbles = [b >> 4 if j % 2 else b & 15 for b in block[16 + j // 2 * 32:][:32]]
        out += [d * scales[j] * q - dmin * leasts[j] for q in nibbles]
    return out


def q6_k(block: bytes) -> list[float]:
    """256 numbers of 6 bits, the low four in `ql`, the high two in `qh`; a scale for each 16."""
    ql, qh, scales, out = block[:128], block[128:192], struct.unpack("16b", block[192:208]), []
    d, = struct.unpack("<e", block[208:])
    for i in range(256):
        half, quarter, l = i // 128, i % 128 // 32, i % 32
        low = ql[half * 64 + quarter % 2 * 32 + l] >> quarter // 2 * 4 & 15
        high = qh[half * 32 + l] >> quarter * 2 & 3
        out.append(d * scales[i // 16] * ((low | high << 4) - 32))
    return out


@pytest.mark.parametrize("kind, read", [("Q4_K", q4_k), ("Q6_K", q6_k)])
def test_blocks_read_by_hand(tmp_path, kind, read):
    """Kills: a tensor read from the wrong place."""
    blocks, kind = pack(np.zeros((3, 512), np.float32), KIND[kind])
    (tmp_path / "t").write_bytes(b"abcde" + blocks.tobytes())
    ours = gguf_file.load(gguf_file.Packed(tmp_path / "t", 5, (3, 512), kind))
    size = gguf.GGML_QUANT_SIZES[kind][1]
    want = [[n for i in range(0, 2 * size, size) for n in read(row[i:i + size].tobytes())] for row in blocks]
    torch.testing.assert_close(ours, torch.tensor(want), rtol=1e-6, atol=1e-7)


def text(s: str) -> bytes:
    return struct.pack("<Q", len(s)) + s.encode()


def raw(facts=b"", n_facts=0, tensors=b"", n_tensors=0, version=3, room=4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_facts) + facts + tensors + bytes(room)


def info(dims, kind=0, offset=0) -> dict:
    return {"tensors": text("t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset), "n_tensors": 1}


BYTE_FACT = text("a") + struct.pack("<IB", 0, 1)


@pytest.mark.parametrize("data, message", [
    (b"GGUF", "too early"), (b"", "does not start"), (b"PK" * 99, "does not start"), (raw(version=1), "version"),
    (raw(version=3 << 24), "little-endian"), (raw(n_facts=1 << 60), "twice"), (raw(n_tensors=1 << 60), "twice"),
    *[(raw(text("a") + struct.pack("<IIQ", 9, of, 1 << 60), 1), "") for of in (0, 7, 8, 9, 10)],
    (raw(struct.pack("<Q", 1 << 60), 1), "too early"),
    (raw(text("a") + struct.pack("<IQ", 8, 1 << 60), 1), "too early"),
    (raw(text("a") + struct.pack("<I", 77), 1), "77"), (raw(BYTE_FACT * 2, 2), "twice"),
    (raw(text("general.alignment") + struct.pack("<II", 4, 3), 1), "alignment"),
    (raw(**info([1 << 60])), "beyond the file"), (raw(**info([1 << 40, 1 << 40])), "beyond the file"),
    (raw(**info([4], offset=1 << 60)), "beyond the file"), (raw(**info([4], offset=4093)), "beyond the file"),
    (raw(**info([1 << 60, 0])), "shape"), (raw(**info([33], kind=8)), "whole blocks of Q8_0"),
    (raw(**info([4], kind=999)), "999"), (raw(**info([4], kind=24)), "I8"), (raw(**info([1 << 31] * 9)), "beyond")])
def test_hostile(tmp_path, capsys, data, message):
    """Kills: counts believed (an array of 2^60 bytes never ends); an offset beyond the file; 0 * 2^60 numbers."""
    (tmp_path / "m.gguf").write_bytes(data)
    refused(tmp_path, capsys, message)


def test_cut_gguf_is_one_clear_error(tmp_path, capsys):
    """Kills: the file's length not looked at."""
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=260))
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 12_000, 401), len(whole) // 2, len(whole) - 32]:     # 12,000: metadata and tensors' headers
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        refused(tmp_path, capsys, "damaged")


def test_parts(tmp_path, capsys):
    """Kills: only the first part read; the parts' own numbers ignored."""
    reference = checkpoint(tmp_path / "hf", vocab_size=260)
    write_gguf(tmp_path / "m.gguf", reference, parts=8)
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    cw.convert(str(tmp_path / names[0]), tmp_path / "whole")
    tokens = torch.randint(258, (1, 9))
    with torch.no_grad():
        want = reference(tokens).logits[..., :258]
    torch.testing.assert_close(logits(tmp_path / "whole", tokens), want, rtol=0, atol=1e-4)
    refused(tmp_path, capsys, "name the first", names[1])
    (tmp_path / names[0]).rename(tmp_path / "m.gguf")
    refused(tmp_path, capsys, "name the first")
    (tmp_path / "m.gguf").rename(tmp_path / names[0])
    (tmp_path / names[2]).rename(tmp_path / "third")
    refused(tmp_path, capsys, f"{names[2]} does not exist", names[0])
    (tmp_path / names[2]).write_bytes((tmp_path / names[1]).read_bytes())
    refused(tmp_path, capsys, "is not part 3", names[0])


def test_a_tensor_is_dequantised_in_pieces(tmp_path, monkeypatch):
    """Kills: dequantised at once (it takes twice the memory of the result); the last piece left out."""
    rows = np.random.default_rng(0).integers(0, 60, (2500, 34), dtype=np.uint8)
    dequantize, sizes = gguf.quants.dequantize, []
    (tmp_path / "q").write_bytes(rows.tobytes())
    counted = lambda part, kind: sizes.append(len(part)) or dequantize(part, kind)
    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    got = gguf_file.load(gguf_file.Packed(tmp_path / "q", 0, (2500, 32), KIND.Q8_0))
    np.testing.assert_array_equal(got.numpy(), dequantize(rows, KIND.Q8_0))
    assert sum(sizes) == 2500 and max(sizes) <= 1024


def test_weights_are_not_read_before_they_are_written(tmp_path, monkeypatch):
    """Kills: tensors loaded while the config is read."""
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=260))
    monkeypatch.setattr(gguf_file, "load", lambda t: 1 / 0)
    _, stored = from_gguf.read_gguf(tmp_path / "m.gguf", tmp_path, True)
    with pytest.raises(ZeroDivisionError):
        stored["norm.weight"].read()


@pytest.mark.parametrize("kind, heads", [(KIND.F32, None), (KIND.F32, 30), (KIND.Q8_0, 30), (KIND.Q4_0, None)])
def test_pieces_are_the_whole(tmp_path, kind, heads):
    """A matrix is written in pieces of whole heads: a Q4_0 embedding alone takes seven times its file as float32.
    Kills: a piece that ends inside a head; the last piece left out."""
    values = np.random.default_rng(0).normal(size=(3000, 32)).astype(np.float32)
    packed = gguf.quants.quantize(values, kind)
    (tmp_path / "t").write_bytes(packed.tobytes())
    t = gguf_file.Packed(tmp_path / "t", 0, (3000, 32), kind)
    stored = from_gguf.weight(t, heads)
    pieces = list(stored.pieces())
    assert len(pieces) == 3 and max(map(len, pieces)) <= 1024
    assert torch.equal(torch.cat(pieces), stored.read())
    assert torch.equal(stored.read(), from_gguf.unpermute(gguf_file.load(t), heads) if heads else gguf_file.load(t))
