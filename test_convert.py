"""convert_weights.py against transformers: weights, refusals, damage and the command line.  CPU, no torch.compile.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert_weights as cw
import tokenizer
from checkpoints import (check_same, checkpoint, convert, damage, edit, edit_weights, hf_folder, logits,
                         one_thread)  # noqa: F401 (autouse)
from model import Config, load_model, read_config

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
CHECKPOINTS = {                                     # family, what differs from the tiny base
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 16}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "code llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-5}),
    "yi": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "num_key_value_heads": 1}),
    "eps, theta": ("llama", {"rms_norm_eps": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
}


# ---- tools

@pytest.fixture
def hf(tmp_path):
    return hf_folder(tmp_path / "hf")


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
    "no family name": ({"model_type": ["llama"]}, "names no family"),
    "no family": ({"model_type": None}, "model_type"),
    "act": ({"hidden_act": "gelu"}, "gelu"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    "old dynamic": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "llama3 lacks": ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "window": ({"model_type": "mistral", "sliding_window": 64}, "sliding_window 64"),
    "no such switch": ({"model_type": "mistral", "sliding_window": 64, "use_sliding_window": False}, "window 64"),
    "qwen window": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
    "layer types": ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked"]}, "'chunked'"),
    "heads": ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    "text": ({"hidden_size": "32"}, "hidden_size .*is '32'"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads .*must be"),
    "infinite": ({"num_hidden_layers": float("inf")}, "num_hidden_layers .*must be"),
    "many layers": ({"num_hidden_layers": 10**9}, "layers 1000000000"),
    "huge head": ({"head_dim": 2**40}, "head_dim 1099511627776"),
    "experts": ({"num_local_experts": 8}, "num_local_experts 8 .*no mixture of experts"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved True .*interleaved pairs"),
    "no rope": ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
    "granite": ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling 8.0"),
    "lookalike": ({"model_type": "helium"}, "helium.*interleaved pairs"),
    "gemma": ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "soft-capping"),
    "cohere": ({"model_type": "cohere", "logit_scale": 0.0625, "layer_norm_eps": 1e-5}, "logit_scale|layer_norm_eps"),
    "unknown field": ({"novel_multiplier": 0}, "novel_multiplier 0 .*is unknown"),
    "own code": ({"model_type": "newcomer", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
    "no act": ({"model_type": "newcomer", "hidden_act": None}, "hidden_act None"),
    "two ropes": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "contradict"),
    "rope field": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}}, "mrope"),
    "rope per kind": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    "newcomer's window": ({"model_type": "newcomer", "sliding_window": 64}, "sliding_window 64"),
    "absent": ({"intermediate_size": None}, "intermediate_size"),
    "endless theta": ({"rope_parameters": None, "rope_theta": 10**400}, "rope_theta .*too large: .* 401 digits"),
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
    ("vocab_size", None), ("dim", ""), ("dim", 32.0), ("layers", None), ("layers", -1), ("layers", True),
    ("heads", [4]), ("kv_heads", 0), ("head_dim", -8), ("ffn_dim", "48"), ("context", {}), ("tokens", -1),
    ("tokens", 65), ("norm_eps", "1e-5"), ("norm_eps", float("nan")), ("rope_theta", []), ("rope_theta", float("inf")),
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
    weights = load_file(convert(tmp_path / "hf", tmp_path / "out", dtype="bf16") / "model.safetensors")
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
        convert(tmp_path / "hf", tmp_path / "out", dtype="fp16")


def test_padding_rows_are_no_tokens(hf, tmp_path):
    """Case 16.  Kills: `tokens` left at the number of rows, so padding could be emitted."""
    cw.convert(str(hf), tmp_path / "out")
    config = Config(**read_config(tmp_path / "out")["model"])
    assert (config.vocab_size, config.tokens) == (512, tokenizer.load(tmp_path / "out").vocab_size) == (512, 402)
    assert logits(tmp_path / "out", torch.tensor([[1, 2]])).shape == (1, 2, 402)
    checkpoint(hf, vocab_size=400)
    with pytest.raises(ValueError, match="402 tokens, the embedding 400 rows"):
        cw.convert(str(hf), tmp_path / "out")


EOS = [             # eos_token_id of config.json and of generation_config.json, all that ends a text
    (5, None, {5}), ([5, 6], 7, {5, 6, 7}), (None, [5, 7], {5, 7}), (5, [5, 400, -1, 401, 402], {5, 400, 401}),
    (None, None, set())]


@pytest.mark.parametrize("config, generation, want", EOS)
def test_ends_are_the_union_of_all_that_is_stated(hf, tmp_path, config, generation, want):
    """And the tokenizer's eos_token (0) and <|im_end|> (1); what is no token (-1, 402) cannot be emitted.
    Kills: generation_config.json not read; a list taken for nothing; <|im_end|> forgotten; -1 kept."""
    edit(hf, eos_token_id=config)
    edit(hf, "generation_config.json", eos_token_id=generation)
    cw.convert(str(hf), tmp_path / "out")
    assert {*tokenizer.load(tmp_path / "out").eos} == want | {0, 1}


def test_names_of_bos_and_eos_in_a_file_of_their_own(hf, tmp_path):
    """Older folders have them in special_tokens_map.json only.  Kills: the file not read; it comes before the other."""
    edit(hf, "tokenizer_config.json", drop=["bos_token", "eos_token"])
    edit(hf, "special_tokens_map.json", bos_token={"content": "<s>"}, eos_token="<|im_end|>")
    cw.convert(str(hf), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    assert (tok.bos_token, tok.eos_token) == ("<s>", "<|im_end|>")
    edit(hf, "tokenizer_config.json", eos_token="<|endoftext|>")
    cw.convert(str(hf), tmp_path / "out")
    assert tokenizer.load(tmp_path / "out").eos_token == "<|endoftext|>"


def test_a_byte_order_mark_is_no_damage(hf, tmp_path):
    """Kills: config.json read as plain UTF-8."""
    (hf / "config.json").write_bytes(b"\xef\xbb\xbf" + (hf / "config.json").read_bytes())
    cw.convert(str(hf), tmp_path / "out")


def test_special_tokens_without_a_row_are_left_out(hf, tmp_path, capsys):
    """A <pad> added to the tokenizer and not to the model, as some Llama 2 folders have it.  <s> stays a token: see above.
    Kills: such a folder refused; the token kept, and an id that the embedding does not have."""
    checkpoint(hf, vocab_size=401)
    cw.convert(str(hf), tmp_path / "out")
    assert "no row for: <think>" in capsys.readouterr().out
    tokens = tokenizer.load(tmp_path / "out")
    assert list(tokens.special_tokens) == ["<|endoftext|>", "<|im_end|>", "<s>"] and tokens.vocab_size == 401
    assert Config(**read_config(tmp_path / "out")["model"]).tokens == 401


# ---- the command line

def edit_added(folder: Path, **changes):
    """Change the last added token of tokenizer.json."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder, "tokenizer.json", added_tokens=[*added[:-1], added[-1] | changes])


DAMAGE = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "not a folder"),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "config.json does not exist"),
    "config": (lambda f: damage(f / "config.json", 0.5), "config.json is damaged"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json is damaged"),
    "config of brackets": (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json is damaged"),
    "config not utf-8": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is damaged"),
    "weights cut": (lambda f: damage(f / "model.safetensors", 0.5), "model.safetensors is damaged"),
    "weights empty": (lambda f: damage(f / "model.safetensors", 0), "model.safetensors is damaged"),
    "weights absent": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors does not exist"),
    "tokenizer cut": (lambda f: damage(f / "tokenizer.json", 0.5), "tokenizer.json is damaged"),
    "tokenizer absent": (lambda f: (f / "tokenizer.json").unlink(), "--no-tokenizer"),
    "tokenizer empty": (lambda f: (f / "tokenizer.json").write_text('{"model": {}}'), "only BPE is supported"),
    "merges damaged": (lambda f: edit(f, "tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": 3}), "damaged"),
    "not sentencepiece": (lambda f: (f / "tokenizer.model").write_text("?"), "not a sentencepiece model"),
    "endless id": (lambda f: edit(f, "tokenizer.json", model=json.loads((f / "tokenizer.json").read_text())["model"] | {
        "vocab": json.loads((f / "tokenizer.json").read_text())["model"]["vocab"] | {"T": float("inf")}}), "infinity"),
    "negative id": (lambda f: edit_added(f, id=-5), "the checkpoint's tokenizer missing or damaged"),
    "empty special": (lambda f: edit_added(f, content=""), "special token 401 is empty text"),
    "template": (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja is damaged"),
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


def test_interrupted_in_the_middle(hf, tmp_path):
    """The child waits at config.json, a pipe that nobody writes to.  Kills: SIGTERM, SIGHUP left to end the process."""
    assert cw.main([str(hf), str(tmp_path / "m/out")]) == 0
    old = {p.name: p.read_bytes() for p in (tmp_path / "m/out").iterdir()}
    (hf / "config.json").unlink()
    os.mkfifo(hf / "config.json")
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        command = [sys.executable, cw.__file__, str(hf), str(tmp_path / "m/out")]
        # A shell's background jobs inherit that Ctrl-C is ignored, and the tests may be one.
        child = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL))
        while child.poll() is None and len([*(tmp_path / "m").iterdir()]) == 1:
            time.sleep(0.01)
        child.send_signal(sent)
        assert child.communicate()[1] == b"interrupted: nothing half-made is left\n" and child.returncode == 130
        assert [p.name for p in (tmp_path / "m").iterdir()] == ["out"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "m/out").iterdir()} == old


@pytest.mark.parametrize("when", [1, 2])
def test_interrupted_between_two_renames(hf, tmp_path, monkeypatch, when):
    """Kills: the old conversion moved away and removed with the scratch files; the new one taken for not written."""
    assert cw.main([str(hf), str(tmp_path / "m/out")]) == 0
    calls, replace = [], os.replace

    def interrupting(a, b):
        replace(a, b)
        calls.append(a)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "replace", interrupting)
    assert cw.main([str(hf), str(tmp_path / "m/out"), "--dtype", "bf16"]) == 0 and len(calls) == 2
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["out"]
    assert load_file(tmp_path / "m/out/model.safetensors")["norm.weight"].dtype == torch.bfloat16


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
