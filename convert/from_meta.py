"""Meta's own folders (params.json, consolidated.00.pth, 01, ...) -> what convert/source.py describes.

The layout is that of https://github.com/meta-llama/llama (Llama 1, 2), .../codellama and .../llama-models (3 to 3.3).
"""
import base64
import re
import shutil
from pathlib import Path

import torch

from convert.from_hf import kept_one, pickled, unpickle
from convert.hf_tokenizer import LLAMA3, sentencepiece_spec
from convert.source import Stored, assemble, fit, number, read_json, refuse_unknown, same, unpermute, whole

META = {"tok_embeddings": "embed", "norm": "norm", "output": "lm_head",
        "attention_norm": "attn_norm", "attention.wq": "q", "attention.wk": "k", "attention.wv": "v",
        "attention.wo": "o", "ffn_norm": "ffn_norm",
        "feed_forward.w1": "gate", "feed_forward.w3": "up", "feed_forward.w2": "down"}
ROWS, COLUMNS = {"wq", "wk", "wv", "w1", "w3", "output"}, {"wo", "w2"}      # how shards split them; norms are copies
READ = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
        "rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor"}
NEUTRAL = {"max_batch_size", "max_seq_len", "model_parallel_size"}
LACKING = {"moe": "mixture of experts", "moe_args": "mixture of experts", "lora_args": "LoRA adapter",
           "quantization_args": "quantised weights", "vision_model": "vision encoder",
           "vision_chunk_size": "vision encoder", "vision_num_cross_attention_layers": "vision encoder",
           "sliding_window": "sliding-window attention"}
LLAMA3_ROWS = 128_256


def read_meta(src: Path, new: Path, with_tokenizer: bool):
    """-> (our config.json, {our name: Stored}); the tokenizer's file goes to folder `new`."""
    if not (src / "params.json").exists():
        raise ValueError(f"{src / 'params.json'} does not exist: Meta's weights cannot be read without it")
    params = read_json(src / "params.json")
    refuse_unknown(params, READ | NEUTRAL, LACKING)
    dim = whole(params, "dim")
    stored = join(meta_shards(src), dim)
    if "rope.freqs" in stored:
        del stored["rope.freqs"]
        print("ignored: rope.freqs, which model.py computes itself")
    if "tok_embeddings.weight" not in stored:
        raise ValueError("missing weights: tok_embeddings.weight")
    embed, head = stored["tok_embeddings.weight"], stored.get("output.weight")
    tied = head is None or head.shape == embed.shape and same(head.read(), embed.read())
    if tied and head:
        print("output.weight is tok_embeddings.weight: written once")
        del stored["output.weight"]
    model = meta_config(params, {name: s.shape for name, s in stored.items()}, tied)
    ours, weights = fit(model, {name: s.shape for name, s in stored.items()}, META, "layers."), {}
    for name, our in ours.items():
        heads = {"wq": model["heads"], "wk": model["kv_heads"]}.get(name.split(".")[-2])
        weights[our] = halves(stored[name], heads) if heads else stored[name]
    spec = meta_tokenizer(src, new, bool(params.get("use_scaled_rope"))) if with_tokenizer else None
    return assemble(model, spec, None, src.resolve().name, "llama"), weights


def halves(s: Stored, heads: int) -> Stored:
    return s._replace(read=lambda: unpermute(s.read(), heads))


# ---- params.json

def meta_config(params: dict, shapes: dict[str, tuple], tied: bool) -> dict:
    """params.json -> Config's fields, what it leaves open from the weights' shapes."""
    dim, heads = whole(params, "dim"), whole(params, "n_heads")
    rows, ffn = shapes["tok_embeddings.weight"][0], ffn_width(params)
    if params.get("vocab_size") not in (None, -1, rows):
        raise ValueError(f"vocab_size {params['vocab_size']} in params.json, yet tok_embeddings.weight has {rows} rows")
    if (have := shapes.get("layers.0.feed_forward.w1.weight", (ffn,))[0]) != ffn:
        raise ValueError(f"params.json makes the feed-forward {ffn} wide, w1 has {have} rows: a shard may be missing")
    context, theta, scaling = meta_rope(params, dim, rows)
    return dict(vocab_size=rows, dim=dim, layers=whole(params, "n_layers"), heads=heads,
                kv_heads=whole(params, "n_kv_heads", heads), head_dim=dim // heads, ffn_dim=ffn, context=context,
                norm_eps=number(params, "norm_eps", 1e-5), rope_theta=theta, rope_scaling=scaling, tie_embeddings=tied)


def ffn_width(params: dict) -> int:
    """FeedForward's constructor in Meta's model.py: 2/3 of 4 dim, times the multiplier, rounded up to multiple_of."""
    multiple = whole(params, "multiple_of", 256)
    width = int(number(params, "ffn_dim_multiplier", 1.0) * int(2 * 4 * whole(params, "dim") / 3))
    return -(-width // multiple) * multiple


def meta_rope(params: dict, dim: int, rows: int) -> tuple[int, float, dict | None]:
    """-> (context, theta, our rope_scaling).  The files do not state the context; what is assumed is printed."""
    theta = number(params, "rope_theta", 500_000.0 if rows == LLAMA3_ROWS else 10_000.0)   # Meta's defaults
    if not params.get("use_scaled_rope"):
        if given := params.get("rope_scaling_factor"):
            raise ValueError(f"rope_scaling_factor {given!r} in params.json, yet use_scaled_rope is not true")
        context, why = plain_context(params, dim, rows, theta)
        print(f"assumed: context {context:,}, as {why}")
        return context, theta, None
    # Meta's own code has 8 for all; its 3.2 models of 1B and 3B (dim 2048, 3072) were trained with 32, as Meta says in
    # github.com/meta-llama/llama-models issue 166 and the config.json of its Hugging Face folders does.  See issue 241.
    factor = number(params, "rope_scaling_factor", 32.0 if dim in (2048, 3072) else 8.0)
    print(f"assumed: context 131,072 and RoPE stretched {factor:g} times beyond 8,192, as Llama 3.1 and later")
    return 131_072, theta, {"kind": "llama3", "factor": factor, "low_freq_factor": 1.0,
                            "high_freq_factor": number(params, "rope_high_freq_factor", 4.0),
                            "original_max_position_embeddings": 8192}


def plain_context(params: dict, dim: int, rows: int, theta: float) -> tuple[int, str]:
    """-> (context, whose it is).  Llama 1 and 2 have the same fields.  Only Llama 2 has n_kv_heads or a multiplier
    (70B); a norm_eps of 1e-5 is Llama 2's, except in Llama 1 65B (dim 8192).  An early Llama 2 7B chat says 1e-6
    (github.com/meta-llama/llama issue 771) and gets half its context: too short is safe, too long is gibberish."""
    if rows == LLAMA3_ROWS or theta == 500_000:
        return 8192, "Llama 3"
    if theta == 1_000_000:
        return 16_384, "Code Llama"
    grouped = params.get("n_kv_heads") is not None or params.get("ffn_dim_multiplier") is not None
    if theta == 10_000 and (grouped or params.get("norm_eps", 1e-5) == 1e-5 and dim != 8192):
        return 4096, "Llama 2"
    return 2048, "Llama 1: params.json does not show that it is a later one"


# ---- consolidated.*.pth

def meta_shards(src: Path) -> list[dict[str, Stored]]:
    files = sorted(src.glob("consolidated.*.pth"))
    wanted = [f"consolidated.{i:02}.pth" for i in range(max(1, len(files)))]
    if lost := sorted(set(wanted) - {f.name for f in files}):
        raise ValueError(f"{src / lost[0]} does not exist: the download is incomplete")
    kept = kept_one(unpickle)
    return [dict(pickled(file, kept)) for file in files]


def join(shards: list[dict[str, Stored]], dim: int) -> dict[str, Stored]:
    """The tensors that model-parallel shards hold parts of; each is put together when it is read."""
    for i, shard in enumerate(shards):
        if odd := sorted(shards[0].keys() ^ shard.keys()):
            raise ValueError(f"consolidated.{i:02}.pth and consolidated.00.pth do not both hold {', '.join(odd)}")
    return {name: joined(name, [shard[name] for shard in shards], dim) for name in shards[0]}


def joined(name: str, parts: list[Stored], dim: int) -> Stored:
    first, module = parts[0], name.split(".")[-2] if "." in name else name
    if any((p.shape, p.dtype) != (first.shape, first.dtype) for p in parts):
        raise ValueError(f"{name} differs in shape or type between shards: {', '.join(str(p.shape) for p in parts)}")
    axis = 0 if module in ROWS else 1 if module in COLUMNS else None
    if module == "tok_embeddings":          # split by columns in Llama 1 and 2, by rows in Llama 3
        axis = 0 if first.shape[1:] == (dim,) else 1
    if len(parts) == 1:
        return first
    if axis is None:
        return first._replace(read=lambda: copy_of(name, parts))
    if len(first.shape) != 2:
        raise ValueError(f"{name} has shape {first.shape}, not that of a matrix")
    shape = tuple(n * len(parts) if i == axis else n for i, n in enumerate(first.shape))
    return Stored(shape, first.dtype, lambda: torch.cat([p.read() for p in parts], axis))


def copy_of(name: str, parts: list[Stored]) -> torch.Tensor:
    """A tensor that every shard has in full."""
    w = parts[0].read()
    if not all(same(w, p.read()) for p in parts[1:]):
        raise ValueError(f"{name} must be the same in every consolidated.*.pth, and differs")
    return w


# ---- tokenizer.model

def meta_tokenizer(src: Path, new: Path, scaled: bool) -> dict:
    """Like hf_tokenizer, from tokenizer.model in the folder or, as Llama 1 and 2 are downloaded, the one above it.
    Every model starts a text with BOS."""
    path = next((p for p in (src / "tokenizer.model", src.resolve().parent / "tokenizer.model") if p.exists()), None)
    if path is None:
        raise ValueError(f"{src} has no tokenizer.model, nor the folder above: --no-tokenizer converts without one")
    lines = path.read_bytes().splitlines()
    if lines and re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+", lines[0]):
        return llama3_spec(path, lines, new, scaled)
    spec = sentencepiece_spec(path, new, {}, {}, {})
    names = {i: text for text, i in spec["special_tokens"].items()}
    # assemble makes </s> the end
    return spec | {"bos_token": names.get(spec["bos"]), "eos_token": "</s>", "shown": [], "eos": []}


def llama3_spec(path: Path, lines: list[bytes], new: Path, scaled: bool) -> dict:
    """tiktoken's `base64 rank` lines; the 256 special tokens, which Meta's tokenizer.py has in code, come after them.
    `scaled`: Llama 3.1 and later."""
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in map(bytes.split, lines)}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): download it again") from None
    if sorted(ranks.values()) != [*range(len(lines))]:
        raise ValueError(f"{path} is damaged: its ranks are not 0..{len(lines) - 1}")
    shutil.copyfile(path, new / "tokenizer.tiktoken")
    special = {token: len(lines) + i for i, token in enumerate(llama3_special_tokens(scaled))}
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    return {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": LLAMA3, "special_tokens": special,
            "bos": special[bos], "bos_token": bos, "eos": [special[eos]], "eos_token": eos, "shown": [],
            "normal_form": None, "size": len(lines) + len(special)}


def llama3_special_tokens(scaled: bool) -> list[str]:
    """In order of id, by the names in tokenizer.json of Meta's Hugging Face folders, so that a model from there and one
    from here have the same tokenizer; Meta's llama-models calls two unused ones <|step_id|> and <|image|>."""
    named = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>",
             9: "<|eot_id|>"}
    if scaled:
        named |= {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
    free = iter(range(256))
    return [named.get(i) or f"<|reserved_special_token_{next(free)}|>" for i in range(256)]
