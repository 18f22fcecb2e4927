"""Hugging Face folders -> what convert/source.py describes."""
import re
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from convert.hf_tokenizer import hf_tokenizer
from convert.source import Stored, assemble, fit, number, read_json, refuse_unknown, same, whole
from model import ROPE_SCALING

# The source's module names -> ours; model.layers.N. in front and .weight or .bias behind stay as they are.
HF = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "lm_head",
      "input_layernorm": "attn_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
      "self_attn.o_proj": "o", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
      "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# Every field of config.json is read, or does not change what the model computes, or stops the conversion.
READ = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "max_position_embeddings", "max_sequence_length", "rms_norm_eps", "rope_theta",
        "rope_scaling", "rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "hidden_act",
        "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "auto_map"}
NEUTRAL = set("""
    architectures transformers_version torch_dtype dtype use_cache initializer_range pretraining_tp max_window_layers
    attention_dropout hidden_dropout residual_dropout embd_pdrop resid_pdrop attn_pdrop gradient_checkpointing
    attn_implementation use_flash_attention use_flash_attn cache_implementation is_llama_config unsloth_fixed
    model_max_length tokenizer_class name_or_path transformers.js_config neftune_noise_alpha
    is_decoder is_encoder_decoder tie_encoder_decoder return_dict use_return_dict output_attentions output_hidden_states
    torchscript chunk_size_feed_forward id2label label2id problem_type finetuning_task task_specific_params prefix
    temperature top_k top_p typical_p do_sample max_length max_new_tokens min_length num_beams num_beam_groups
    diversity_penalty early_stopping length_penalty repetition_penalty no_repeat_ngram_size num_return_sequences
    encoder_no_repeat_ngram_size output_scores return_dict_in_generate remove_invalid_values bad_words_ids
    suppress_tokens begin_suppress_tokens exponential_decay_length_penalty""".split())
LACKING = {             # a field of other families -> what it asks for
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "moe_num_experts",
                     "num_experts_per_tok"), "mixture of experts"),
    "rope_interleaved": "RoPE over interleaved pairs", "no_rope_layers": "layers without RoPE",
    "use_parallel_residual": "parallel residual", "parallel_attn": "parallel residual", "layer_norm_eps": "LayerNorm",
    "logit_scale": "logit scaling", "logits_scaling": "logit scaling", "final_logit_softcapping": "logit soft-capping",
    "attn_logit_softcapping": "soft-capping of attention", "query_pre_attn_scalar": "scale of attention but head_dim's",
    "attention_multiplier": "scale of attention but head_dim's", "embedding_multiplier": "embedding multiplier",
    "scale_emb": "embedding multiplier", "residual_multiplier": "residual multiplier",
    "scale_depth": "residual multiplier", "clip_qkv": "clipping of q, k and v", "quantization": "quantised weights",
    "quantization_config": "quantised weights: convert the original checkpoint", "vision_config": "vision encoder"}
KNOWN = ("llama", "mistral", "qwen2", "qwen3")      # whose defaults, for fields that a config.json leaves out, we know

# Families with the names and fields of a Llama whose code computes something else: found by converting a random model
# of every family of transformers 5.24 that could be built small, and comparing logits.
OTHER = {"ernie4_5": "RoPE over interleaved pairs", "helium": "RoPE over interleaved pairs",
         "gemma": "scaled embeddings and norms of 1 + weight"}


def read_hf(src: Path, new: Path, with_tokenizer: bool):
    """-> (our config.json, {our name: Stored}); the tokenizer's file goes to folder `new`."""
    if not src.is_dir():
        raise ValueError(f"{src} is not a folder, nor a .gguf file, nor `smollm2`")
    if (src / "adapter_config.json").exists():
        raise ValueError(f"{src} holds an adapter (adapter_config.json): merge it into its model and convert that")
    raw = read_json(src / "config.json")
    try:
        refuse_other_networks(raw)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{src / 'config.json'} is damaged ({error})") from None
    stored = hf_weights(src)
    try:
        model = hf_config(raw, stored)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{src / 'config.json'} is damaged ({error})") from None
    weights = fit_hf(stored, model)
    spec, template = hf_tokenizer(src, new, raw) if with_tokenizer else (None, None)
    return assemble(model, spec, template, src.resolve().name, str(raw.get("model_type"))), weights


# ---- config.json

def refuse_other_networks(raw: dict) -> None:
    """ValueError for a config.json that asks for anything this network does not compute, or might."""
    family = raw.get("model_type")
    if not isinstance(family, str) or not family:
        raise ValueError(f"model_type {family!r} of the checkpoint's config names no family")
    if family in OTHER:
        raise ValueError(f"model_type {family!r} is not supported: the network here has no {OTHER[family]}")
    neutral = {k for k in raw if k.startswith("_") or k.endswith(("_token_id", "_version"))}
    refuse_unknown(raw, READ | NEUTRAL | neutral, LACKING)
    if raw.get("auto_map") and family not in KNOWN:
        raise ValueError(f"model_type {family!r} brings its own code (auto_map), which may compute anything")
    if (act := raw.get("hidden_act", "silu" if family in KNOWN else None)) not in ("silu", "swish"):
        raise ValueError(f"hidden_act {act!r} is not supported: only silu")
    if other := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layer_types {', '.join(map(repr, sorted(other)))} not supported: only 'full_attention'")


def hf_config(raw: dict, names) -> dict:
    """config.json of Hugging Face -> Config's fields.  A family that is not KNOWN has its biases and head norms where
    the weights' `names` show them."""
    known = raw["model_type"] in KNOWN
    family, default = raw["model_type"], dict(norm_eps=1e-6, theta=10_000.0) if known else {}
    dim, heads = whole(raw, "hidden_size"), whole(raw, "num_attention_heads")
    context = whole(raw, "max_position_embeddings", raw.get("max_sequence_length"))
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)       # 4096: MistralConfig's default
    switch = raw.get("use_sliding_window")                  # Qwen's is off unless said otherwise, Mistral has none
    off = not switch if family.startswith("qwen") else switch is False and family != "mistral"
    if not off and window is not None and window < context:
        raise ValueError(f"sliding-window attention (sliding_window {window}, context {context}) is not supported")
    bias, mlp = bool(raw.get("attention_bias")), bool(raw.get("mlp_bias"))
    if known:
        bias = bias and family in ("llama", "qwen3")        # the two others do not read it
        biases = dict(qkv_bias=bias or family == "qwen2", o_bias=bias, mlp_bias=mlp and family == "llama")
    else:
        found = {name.removesuffix(".bias").split(".")[-1] for name in names if name.endswith(".bias")}
        biases = dict(qkv_bias=bias or bool(found & {"q_proj", "k_proj", "v_proj"}), o_bias="o_proj" in found,
                      mlp_bias=mlp or bool(found & {"gate_proj", "up_proj", "down_proj"}))
    theta, scaling = hf_rope(raw, default.get("theta"))
    tied = raw.get("tie_word_embeddings", None if known else "lm_head.weight" not in names)
    return dict(vocab_size=whole(raw, "vocab_size"), dim=dim, layers=whole(raw, "num_hidden_layers"), heads=heads,
                kv_heads=whole(raw, "num_key_value_heads", heads), head_dim=whole(raw, "head_dim", dim // heads),
                ffn_dim=whole(raw, "intermediate_size"), context=context, rope_theta=theta, rope_scaling=scaling,
                norm_eps=number(raw, "rms_norm_eps", default.get("norm_eps")), tie_embeddings=bool(tied),
                qk_norm=family == "qwen3" or not known and any(".q_norm." in name for name in names), **biases)


def hf_rope(raw: dict, default: float | None) -> tuple[float, dict | None]:
    """-> (theta, our rope_scaling).  transformers 5 writes one rope_parameters, older ones rope_theta and rope_scaling,
    and the kind is spelt `rope_type` or, older still, `type`."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"rope_parameters {new!r} and rope_scaling {old!r} contradict each other")
    if not isinstance(rope := new or old, dict):
        raise ValueError(f"RoPE scaling {rope!r} is not an object")
    theta = number(rope, "rope_theta", number(raw, "rope_theta", rope.get("rope_theta", default)))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor is not supported: every pair of a head must rotate")
    if kind == "default":
        numbers = ["factor"]            # which plain RoPE has no use for
    elif isinstance(kind, str) and kind in ROPE_SCALING:
        numbers = ROPE_SCALING[kind]
    else:
        raise ValueError(f"RoPE of the kind {kind!r} is not supported: {', '.join(ROPE_SCALING)} or default is")
    refuse_unknown(rope, {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned",
                          "original_max_position_embeddings", *numbers}, {})
    return theta, None if kind == "default" else {"kind": kind} | {key: rope.get(key) for key in numbers}


# ---- weights

def fit_hf(stored: dict[str, Stored], model: dict) -> dict[str, Stored]:
    """{our name: Stored} of exactly the weights that the config asks for; ValueError otherwise."""
    if ignored := [name for name in stored if name.endswith("rotary_emb.inv_freq")]:
        stored = {name: s for name, s in stored.items() if name not in ignored}
        print(f"ignored: {len(ignored)} rotary_emb.inv_freq tensors, which model.py computes itself")
    head = stored.get("lm_head.weight") if model["tie_embeddings"] else None
    stored = {name: s for name, s in stored.items() if s is not head}
    ours = fit(model, {name: s.shape for name, s in stored.items()}, HF, "model.layers.")
    if head and not same(head.read(), stored["model.embed_tokens.weight"].read()):
        raise ValueError("tie_word_embeddings is true, yet lm_head.weight differs from model.embed_tokens.weight")
    return {our: stored[name] for name, our in ours.items()}


def hf_weights(src: Path) -> dict[str, Stored]:
    """Everything in the folder's weight files, safetensors where there are both kinds, without reading the data."""
    files, index, listed = hf_files(src)
    where, stored, kept = {}, {}, kept_one(unpickle)
    for file in files:
        for name, tensor in (safetensors if file.suffix == ".safetensors" else pickled)(file, kept):
            if name in where:
                raise ValueError(f"{name} is in two files, {where[name]} and {file.name}: which one counts?")
            where[name], stored[name] = file.name, tensor
    if lost := sorted(f"{name} ({file})" for name, file in listed.items() if where.get(name) != file):
        raise ValueError(f"{index} names weights that its files lack: {', '.join(lost)}")
    return stored


def hf_files(src: Path) -> tuple[list[Path], Path | None, dict[str, str]]:
    """-> the files with weights; their index and its {name: file}, if they are shards.  Links are followed: Hugging
    Face's own cache is made of them."""
    for name, shards in (("model.safetensors", "model-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        index = src / f"{name}.index.json"
        if (src / name).exists():
            return [src / name], None, {}
        if index.exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed or not all(map(plain_name, listed.values())):
                raise ValueError(f"{index} has no weight_map, or one that names files outside the folder")
            if other := sorted(f.name for f in src.glob(shards) if f.name not in listed.values()):
                print(f"ignored: {', '.join(other)}, which {index.name} does not list")
            return [src / f for f in sorted(set(listed.values()))], index, listed
    raise ValueError(f"{src / 'model.safetensors'} does not exist, nor its index, nor pytorch_model.bin")


def plain_name(file) -> bool:
    right = isinstance(file, str) and file.endswith((".safetensors", ".bin"))
    return right and file == Path(file).name and "\0" not in file


def safetensors(file: Path, _=None):
    """(name, Stored) of every tensor in a safetensors file."""
    found = [(name, *what) for name, what in slices(file)]
    if other := sorted(f"{name} ({kind})" for name, _, kind in found if kind not in TYPES):
        raise ValueError(f"weights that are not plain floating point: {', '.join(other)}")
    for name, shape, kind in found:
        yield name, Stored(shape, TYPES[kind], lambda name=name: tensor(file, name))


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
        raise ValueError(f"{file} does not exist: the download is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}): download it again") from None


def pickled(file: Path, kept):
    """(name, Stored) of every tensor in a file that torch.save wrote.  It is mapped from disk anew for each tensor, so
    that memory holds one at a time; files older than torch 1.6 cannot be mapped, and `kept` keeps one of them whole."""
    load = unpickle if zipfile.is_zipfile(file) else kept
    held = load(file)
    if other := sorted(f"{name} ({kind})" for name, t in held.items() if (kind := oddity(t))):
        raise ValueError(f"weights that are not plain floating point: {', '.join(other)}")
    for name, t in held.items():
        if not isinstance(name, str) or t.nbytes > t.untyped_storage().nbytes():
            raise ValueError(f"{file} is damaged: it has fewer numbers than the shape of {name!r} asks for")
        yield name, Stored(tuple(t.shape), t.dtype, lambda name=name: load(file)[name].detach())


def oddity(t) -> str | None:
    """What keeps an entry of a file from being a weight, if anything does."""
    if not isinstance(t, torch.Tensor):
        return type(t).__name__
    if t.layout != torch.strided or t.device.type != "cpu":
        return f"{t.layout} on {t.device}"
    return None if t.dtype in TYPES.values() else str(t.dtype)


def unpickle(file: Path) -> dict:
    """What torch.save wrote, mapped from disk where the file allows it.  No code in it is run."""
    try:
        with warnings.catch_warnings(action="ignore"):          # of pickle protocols
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: the download is incomplete") from None
    except Exception as error:      # a pickle of unknown origin: whatever it raises, it is no file of weights
        if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(f"{file} wants to run code ({code[1]}), which weights have no need of: refused") from None
        raise ValueError(f"{file} is damaged ({str(error).strip()[:80]}): download it again") from None
    if not isinstance(held, dict):
        raise ValueError(f"{file} holds a {type(held).__name__}, not weights by name")
    return held


def kept_one(load):
    """load(file), remembered for the file it was last called with: the one before is let go first."""
    held = {}

    def get(file: Path):
        if file not in held:
            held.clear()
            held[file] = load(file)
        return held[file]

    return get
