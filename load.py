"""A checkpoint -> a model, its tokenizer and its chat template: a folder convert_weights.py wrote, or one it could convert.

The second kind is converted in memory, each time: nothing is written, and loading takes longer.
"""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import tokenizer as tokenizers
from convert.from_gguf import read_gguf
from convert.from_hf import read_hf
from convert.from_meta import read_meta
from convert.hf_tokenizer import check_tokenizer
from convert.source import Stored, read_json
from model import Config, Transformer, build, default_dtype, inverse_frequencies, load_model, read_config


class Checkpoint(NamedTuple):
    """What is known of a checkpoint before its weights are read."""
    config: dict                            # our config.json
    tokens: tokenizers.Tokenizer
    read: Callable[..., Transformer]        # (device, dtype) -> the model
    read_one: Callable[[str], Tensor]       # a weight, by our name

    @property
    def template(self) -> str | None:
        return self.config.get("chat_template")

    def load(self, device="cpu", dtype=None) -> Transformer:
        """dtype None: float32 on the CPU, else bfloat16.  On the device meta it has no weights: enough to count bytes, and to
        find what cannot work before anything large is read."""
        if torch.device(device).type != "meta":
            return self.read(device, dtype)
        c = Config(**self.config["model"])
        self.read_one("norm.weight")                        # a file that is cut short cannot even be opened
        with torch.device("meta"):
            model = Transformer(c).to(dtype)
            model.freq = inverse_frequencies(c).to("meta")
        return model.eval().requires_grad_(False)


def open_checkpoint(path) -> Checkpoint:
    """Raises ValueError for what is no checkpoint, is damaged, or is one that this engine does not compute."""
    path = Path(path)
    if not convertible(path):
        if not isinstance((config := read_config(path)).get("chat_template"), str | None):
            raise ValueError(f"{path / 'config.json'}: chat_template is not text: convert the checkpoint again")
        return Checkpoint(config, tokenizers.load(path), lambda device, dtype: load_model(path, device, dtype),
                          lambda name: read_tensor(path / "model.safetensors", name))
    with tempfile.TemporaryDirectory() as scratch:
        config, stored = read_source(path, Path(scratch), with_tokenizer=True)
        (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        check_tokenizer(Path(scratch))
        tokens = tokenizers.load(scratch)
    return Checkpoint(config, tokens, lambda device, dtype: read_model(config, stored, device, dtype),
                      lambda name: stored[name].read())


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


def read_tensor(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}. Convert the checkpoint again") from None


def read_model(config: dict, stored: dict[str, Stored], device, dtype) -> Transformer:
    """One tensor at a time: each is cast and moved before the next is read."""
    dtype = dtype or default_dtype(device)
    return build(Config(**config["model"]), {n: s.read().to(device, dtype) for n, s in stored.items()}, device, dtype)
