"""A checkpoint -> a model, its tokenizer and its chat template: a folder convert_weights.py wrote, or one it could convert.

The second kind is converted in memory, each time: nothing is written, and loading takes longer.
"""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tokenizer as tokenizers
from convert.from_gguf import read_gguf
from convert.from_hf import read_hf
from convert.from_meta import read_meta
from convert.hf_tokenizer import check_tokenizer
from convert.source import Stored, read_json
from model import Config, Transformer, build, default_dtype, load_model, read_config


class Checkpoint(NamedTuple):
    """What is known of a checkpoint before its weights are read."""
    config: dict                            # our config.json
    tokens: tokenizers.Tokenizer
    load: Callable[..., Transformer]        # (device, dtype) -> the model; dtype None: float32 on the CPU, else bfloat16

    @property
    def template(self) -> str | None:
        return self.config.get("chat_template")


def open_checkpoint(path) -> Checkpoint:
    """Raises ValueError for what is no checkpoint, is damaged, or is one that this engine does not compute."""
    path = Path(path)
    if not convertible(path):
        if not isinstance((config := read_config(path)).get("chat_template"), str | None):
            raise ValueError(f"{path / 'config.json'}: chat_template is not text: convert the checkpoint again")
        return Checkpoint(config, tokenizers.load(path),
                          lambda device="cpu", dtype=None: load_model(path, device, dtype))
    with tempfile.TemporaryDirectory() as scratch:
        config, stored = read_source(path, Path(scratch), with_tokenizer=True)
        (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        check_tokenizer(Path(scratch))
        tokens = tokenizers.load(scratch)
    return Checkpoint(config, tokens, lambda device="cpu", dtype=None: read_model(config, stored, device, dtype))


def convertible(path: Path) -> bool:
    """Whether this is somebody else's format.  What is neither is taken for a damaged folder of ours."""
    if path.is_file():
        return path.suffix == ".gguf"
    if is_meta(path):
        return True
    try:
        return "model" not in (config := read_json(path / "config.json")) and "model_type" in config
    except ValueError:
        return False


def is_meta(path: Path) -> bool:
    theirs = (path / "params.json").exists() or any(path.glob("consolidated.*.pth"))
    return theirs and not (path / "config.json").exists()       # a Hugging Face folder may keep Meta's files beside its own


def read_source(path: Path, new: Path, with_tokenizer: bool) -> tuple[dict, dict[str, Stored]]:
    """Somebody else's format -> (our config.json, {our name: tensor still on disk}); the tokenizer's file goes to folder
    `new`."""
    read = read_gguf if path.suffix == ".gguf" else read_meta if is_meta(path) else read_hf
    return read(path, new, with_tokenizer)


def read_model(config: dict, stored: dict[str, Stored], device, dtype) -> Transformer:
    """One tensor at a time: each is cast and moved before the next is read."""
    dtype = dtype or default_dtype(device)
    return build(Config(**config["model"]), {n: s.read().to(device, dtype) for n, s in stored.items()}, device, dtype)
