"""Tiny random checkpoints and tokenizers, as Hugging Face stores them, that the tests convert.

Every bias and norm is random too: at their initial 0 and 1 nothing dropped would show.
"""
import json
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Reference
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from convert import hf_tokenizer as ct
import convert_weights as cw
import tokenizer
from model import KVCache, load_model

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
ALL = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cs", "Cn")]
NASTY = [*tokenizer.CORPUS, "", " ", "\n", " \n \n", "\t\t", "x" * 300, " " * 300 + "x",
         "".join(ALL[::37]), " ".join(ALL[5::61])]

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {"gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
          "digits": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
          "llama3": [pre_tokenizers.Split(Regex(ct.LLAMA3), "isolated"), BYTES],
          "qwen2": [pre_tokenizers.Split(Regex(ct.QWEN2), "isolated"), BYTES]}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For every file that imports it.  On matrices this small two threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def checkpoint(folder: Path, family="llama", **changes):
    """A random tiny Hugging Face folder -> its transformers model, float32."""
    torch.manual_seed(0)
    base = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, head_dim=8)
    config, model = FAMILIES[family]
    model = model(config(**base | changes)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name and "weight" in name), 0.25)
    model.save_pretrained(folder)
    return model


def reference_tokenizer(folder: Path, splits, normalizer=None, bos=None, **bpe):
    """Train a small byte-level BPE, save it as a Hugging Face folder's tokenizer.json -> the tokenizers.Tokenizer."""
    tok = Reference(models.BPE(**bpe))
    tok.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if normalizer:
        tok.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<|endoftext|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(NASTY * 2 + ["the theme of them is there"] * 9, trainer)
    tok.add_special_tokens([AddedToken("<s>", special=True)])
    tok.add_tokens([AddedToken("<think>", special=False)])
    if bos:
        tok.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tok.token_to_id(bos))])
    tok.save(str(folder / "tokenizer.json"))
    return tok


def hf_folder(folder: Path) -> Path:
    """Tiny Llama weights (512 rows) and a GPT-2 style tokenizer of 402 tokens."""
    checkpoint(folder, vocab_size=512)
    reference_tokenizer(folder, SPLITS["gpt2"], bos="<s>")
    edit(folder, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "<|endoftext|>"})
    return folder


def fallback_folder(folder: Path, change=lambda raw: raw):
    """Tiny weights and a sentencepiece-style tokenizer.json, BPE over characters with byte fallback, after `change` ->
    its tokenizers.Tokenizer, what was written.  No merge makes "éé"; a special token comes last."""
    checkpoint(folder, vocab_size=2048)
    tok = Reference(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tok.train_from_iterator(["the theme of them is there 12 é "] * 9 + ["more or less is moreover"] * 5,
                            trainers.BpeTrainer(vocab_size=320, show_progress=False, special_tokens=special))
    raw = json.loads(tok.to_str())
    raw["model"]["vocab"]["éé"] = len(raw["model"]["vocab"])
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    raw["added_tokens"] = [flags | {"id": i, "content": t} for i, t in enumerate(special[:3])]
    raw["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    raw |= {"pre_tokenizer": None, "decoder": None, "post_processor": {
        "type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}}
    raw = change(raw)
    raw["added_tokens"].append(flags | {"id": len(raw["model"]["vocab"]), "content": "<|end|>"})
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    edit(folder, "tokenizer_config.json", bos_token="<s>", eos_token="</s>")
    try:
        return Reference.from_file(str(folder / "tokenizer.json")), raw
    except Exception:                   # a test that spoils it does not need it
        return None, raw


def unfold(raw: dict, scheme: str) -> dict:
    """A sentencepiece-style tokenizer.json with another rule for the blank in front."""
    if scheme in ("prepend", "replace"):
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        steps = [{"type": "Prepend", "prepend": "▁"}] * (scheme == "prepend") + [replace]
        return raw | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    rule, split = scheme.split("+") if "+" in scheme else (scheme, "")
    return raw | {"normalizer": None, "pre_tokenizer": {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": rule, "split": bool(split)}}


def edit(folder: Path, file="config.json", drop=(), **changes):
    path = folder / file
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in raw.items() if k not in drop} | changes))


def damage(path: Path, keep: float):
    path.write_bytes(path.read_bytes()[:int(path.stat().st_size * keep)])


@torch.no_grad()
def logits(model, tokens):
    model, (B, T) = load_model(model) if isinstance(model, Path) else model, tokens.shape
    hidden, _ = model(tokens, torch.zeros(B, dtype=torch.long), KVCache(model.config, B, T), span=T)
    return model.head(hidden)


@torch.no_grad()
def check_same(reference, folder: Path, T=64):
    """The converted folder's logits are those of the transformers model, in float32."""
    tokens = torch.randint(reference.config.vocab_size, (3, T), generator=torch.Generator().manual_seed(1))
    want = reference(tokens).logits
    assert want.std() > 0.5, "logits too flat to tell models apart"
    torch.testing.assert_close(logits(folder, tokens), want, rtol=0, atol=1e-4)


def convert(src: Path, dst: Path, **options) -> Path:
    cw.convert(str(src), dst, with_tokenizer=False, **options)
    return dst


def edit_weights(folder: Path, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
