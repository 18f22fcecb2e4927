"""What every kind of checkpoint is read as: our config.json, and tensors under our names that nobody has read yet.

A reader (convert/from_hf.py, convert/from_meta.py, convert/from_gguf.py) finds out what a checkpoint holds, and here it is checked
that it is exactly what its config asks for.  Only then are weights read, one at a time.
"""
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from model import Config, Transformer, check

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


class Stored(NamedTuple):
    """A tensor of the checkpoint, still on disk."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]        # -> it, of this shape and dtype
    pieces: Callable[[], Iterable] = None   # -> the same, some rows at a time, where it takes more memory than its file


def assemble(model: dict, spec: dict | None, template: str | None, source: str, family: str) -> dict:
    """Our config.json.  Rows beyond the tokens are padding; end ids beyond them cannot be emitted and are left out."""
    if spec:
        model["tokens"] = spec.pop("size")
        if "" in spec["special_tokens"]:
            raise ValueError(f"special token {spec['special_tokens']['']} is empty text: it would be found everywhere")
        # A <pad> that was added without a row for it: the model cannot have seen it, and nobody will write it.
        rowless = {t: i for t, i in spec["special_tokens"].items() if i >= model["vocab_size"] and i != spec["bos"]}
        if model["tokens"] == model["vocab_size"] + len(rowless) > model["vocab_size"]:
            print(f"left out: special tokens that the embedding has no row for: {', '.join(rowless)}")
            spec["special_tokens"] = {t: i for t, i in spec["special_tokens"].items() if t not in rowless}
            spec["shown"] = [i for i in spec["shown"] if i < model["vocab_size"]]
            model["tokens"] = model["vocab_size"]
        if model["tokens"] > model["vocab_size"]:
            raise ValueError(f"the tokenizer has {model['tokens']} tokens, the embedding {model['vocab_size']} rows")
        stops = set(spec["eos"]) | {spec["special_tokens"][t] for t in END_OF_TURN if t in spec["special_tokens"]}
        spec["eos"] = sorted(i for i in stops if 0 <= i < model["tokens"])      # -1 is how some configs write `none`
    return {"model": model, "tokenizer": spec, "chat_template": template, "source": source, "family": family}


def fit(model: dict, shapes: dict[str, tuple], table: dict[str, str], layer: str) -> dict[str, str]:
    """{source's name: ours}.  ValueError, in the source's names, unless it has exactly the weights its config asks for;
    `layer` is what stands before a layer's number in them."""
    ours, back = {}, {our: their for their, our in table.items()}
    for name in shapes:
        found = re.fullmatch(rf"(?:{re.escape(layer)}(\d+)\.)?(.+)\.(weight|bias)", name)
        if found and found[2] in table:
            ours[name] = (f"layers.{found[1]}." if found[1] else "") + f"{table[found[2]]}.{found[3]}"
    largest = max((n for shape in shapes.values() for n in shape), default=0)   # before a layer too many is even built
    for key in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim"):
        if model[key] > (most := len(shapes) if key == "layers" else largest):
            raise ValueError(f"the config asks for {key} {model[key]}, the weights have room for {most} at most")
    with torch.device("meta"):
        want = {name: tuple(p.shape) for name, p in Transformer(Config(**model)).named_parameters()}
    if unknown := sorted(name for name in shapes if ours.get(name) not in want):
        raise ValueError(f"weights that the config has no place for: {', '.join(unknown)}")
    if missing := sorted(want.keys() - set(ours.values())):
        parts = [re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)", name).groups() for name in missing]
        names = [(f"{layer}{n}." if n else "") + f"{back[module]}.{kind}" for n, module, kind in parts]
        raise ValueError(f"missing weights: {', '.join(names)}")
    for name, our in ours.items():
        if shapes[name] != want[our]:
            raise ValueError(f"{name} has shape {shapes[name]}, the config asks for {want[our]}")
    return ours


def refuse_unknown(source: dict, known: set[str], lacking: dict[str, str]) -> None:
    """ValueError that names a field nobody here reads, unless it is off: null, false or empty.  It might change what
    the model computes; `lacking` says what the network has not got for the fields where that is certain."""
    on = {k: v for k, v in source.items() if not (v is None or v is False or v in ("", [], {}))}
    for key in sorted(on.keys() - known, key=lambda key: key not in lacking):      # what tells most comes first
        text = f"{key} {on[key]!r:.80} of the checkpoint's config"
        if key in lacking:
            raise ValueError(f"{text} is not supported: the network here has no {lacking[key]}")
        raise ValueError(f"{text} is unknown: it may change what the model computes")


def unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k (heads * D, ...) from interleaved pairs (2j, 2j + 1), as GGUF's llama and Meta's own files have
    them, to halves (j, j + D/2)."""
    return w.view(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values, whatever their types; two NaN are equal too: a damaged weight stored twice is one weight."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def number(source: dict, key: str, default=None) -> float:
    value = default if source.get(key) is None else source[key]
    if value is None:
        raise ValueError(f"{key} is missing from the checkpoint's config")
    check(f"{key} of the checkpoint's config", value, float)
    if value >= 2**63:                                  # JSON's whole numbers have no end, torch's do
        raise ValueError(f"{key} of the checkpoint's config is too large: {value:.3g}" if isinstance(value, float) else
                         f"{key} of the checkpoint's config is too large: a number of {len(str(value))} digits")
    return value


def whole(source: dict, key: str, default=None) -> int:
    value = number(source, key, default)
    if value != int(value):
        raise ValueError(f"{key} must be a whole number in the checkpoint's config, not {value!r}")
    return int(value)


def read_json(path: Path, missing: dict | None = None) -> dict:
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))       # some editors put a mark in front
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        return value
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: this is no Hugging Face checkpoint folder") from None
    except (ValueError, RecursionError) as error:       # the second: a million brackets
        raise ValueError(f"{path} is damaged ({error})") from None
