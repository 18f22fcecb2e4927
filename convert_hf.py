"""Hugging Face folders -> what convert_source.py describes."""
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from convert_source import Stored, assemble, fit, number, read_json, whole
from convert_tokenizer import hf_tokenizer
from model import ROPE_SCALING

# The source's module names -> ours; model.layers.N. in front and .weight or .bias behind stay as they are.
HF = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "lm_head",
      "input_layernorm": "attn_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
      "self_attn.o_proj": "o", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
      "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_hf(src: Path, new: Path, with_tokenizer: bool):
    """-> (our config.json, {our name: Stored}); the tokenizer's file goes to folder `new`."""
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


def hf_weights(src: Path, model: dict) -> dict[str, Stored]:
    """Our weights in model.safetensors or its shards, every name and shape checked before any is read."""
    files, listed = [src / "model.safetensors"], {}
    if (index := src / "model.safetensors.index.json").exists() and not files[0].exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or any(not isinstance(f, str) or f != Path(f).name for f in listed.values()):
            raise ValueError(f"{index} has no weight_map, or one that names files outside the folder")
        files = [src / f for f in sorted(set(listed.values()))]
    found = {name: (file, *what) for file in files for name, what in slices(file)}
    if lost := sorted(listed.keys() - found.keys()):
        raise ValueError(f"{index} names weights that its files lack: {', '.join(lost)}")
    if other := sorted(f"{n} ({t})" for n, (_, _, t) in found.items() if t not in TYPES):
        raise ValueError(f"weights that are not plain floating point: {', '.join(other)}")
    stored = {n: Stored(shape, TYPES[kind], lambda file=file, n=n: tensor(file, n))
              for n, (file, shape, kind) in found.items() if not n.endswith("rotary_emb.inv_freq")}
    if ignored := len(found) - len(stored):
        print(f"ignored: {ignored} rotary_emb.inv_freq tensors, which model.py computes itself")
    head = stored.pop("lm_head.weight", None) if model["tie_embeddings"] else None
    ours = fit(model, {n: s.shape for n, s in stored.items()}, HF, "model.layers.")
    if head and not torch.equal(head.read(), stored["model.embed_tokens.weight"].read()):
        raise ValueError("tie_word_embeddings is true, yet lm_head.weight differs from model.embed_tokens.weight")
    return {our: stored[name] for name, our in ours.items()}


def tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as f:
        return f.get_tensor(name)


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
