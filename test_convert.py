"""convert_weights.py against transformers: weights, refusals, damage and the command line.  CPU, no torch.compile.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert_weights as cw
import tokenizer
from checkpoints import check_same, checkpoint, damage, edit, hf_folder, logits, one_thread  # noqa: F401 (autouse)
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


def edit_weights(folder: Path, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def convert(src: Path, dst: Path, **options):
    cw.convert(str(src), dst, with_tokenizer=False, **options)
    return dst


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


NEWCOMERS = {       # a family whose name nobody here knows, made of one that is known
    "llama": ("llama", {}), "biases": ("llama", {"attention_bias": True, "mlp_bias": True}), "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}), "tied": ("llama", {"tie_word_embeddings": True})}


@pytest.mark.parametrize("name", NEWCOMERS)
def test_unknown_family_that_fits(tmp_path, name):
    """Kills: a list of allowed model_types; biases and head norms expected only where the config says so; tie_word_embeddings
    taken as false when absent."""
    family, changes = NEWCOMERS[name]
    reference = checkpoint(tmp_path / "hf", family, **changes)
    edit(tmp_path / "hf", model_type="newcomer", drop=["attention_bias", "mlp_bias", "tie_word_embeddings"])
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))
    edit(tmp_path / "hf", drop=["rms_norm_eps"])
    with pytest.raises(ValueError, match="rms_norm_eps is missing"):
        convert(tmp_path / "hf", tmp_path / "out")


JUNK = {            # what ordinary config.json of these models carry besides, and what changes nothing
    "smollm2": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pretraining_tp": 1,
                "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "torch_dtype": "bfloat16"},
    "qwen2.5": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 28,
                "use_mrope": False, "layer_types": ["full_attention"] * 2},
    "mistral": {"model_type": "mistral", "sliding_window": 128, "head_dim": None},
    "deepseek distill": {"_name_or_path": "x", "pad_token_id": 3, "rope_parameters": None,
                         "rope_theta": 10000, "rope_scaling": {"type": "default", "factor": 1.0}},
    "unsloth": {"unsloth_version": "2025.1", "unsloth_fixed": True, "eos_token_id": [1, 2], "quantization_config": None},
    "old": {"id2label": {"0": "LABEL_0"}, "pruned_heads": {}, "temperature": 0.7, "top_k": 50, "max_length": 20,
            "bad_words_ids": None, "add_cross_attention": False, "chunk_size_feed_forward": 0, "hidden_act": "swish"},
    "own code": {"auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}}}


@pytest.mark.parametrize("name", JUNK)
def test_fields_that_change_nothing(tmp_path, name):
    """Kills: a field left out of NEUTRAL; null and false not passed; use_sliding_window ignored; window == context refused."""
    family = JUNK[name].get("model_type", "llama")
    reference = checkpoint(tmp_path / "hf", family, **{"sliding_window": None} if family == "mistral" else {})
    edit(tmp_path / "hf", **JUNK[name])
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))


def shards(folder: Path, kind: str, count: int) -> dict[str, str]:
    """model.safetensors turned into `count` files of this kind, and their index -> {name: file}."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, end, extra = {"safetensors": ("model", "safetensors", {}), "bin": ("pytorch_model", "bin", {}),
                        "legacy": ("pytorch_model", "bin", {"_use_new_zipfile_serialization": False})}[kind]
    where = {n: f"{stem}-{i % count + 1:05}-of-{count:05}.{end}" for i, n in enumerate(sorted(weights))}
    where = where if count > 1 else dict.fromkeys(where, f"{stem}.{end}")
    for file in set(where.values()):
        part = {n: w for n, w in weights.items() if where[n] == file}
        save_file(part, folder / file) if end == "safetensors" else torch.save(part, folder / file, **extra)
    if count > 1:
        edit(folder, f"{stem}.{end}.index.json", metadata={}, weight_map=where)
    return where


@pytest.mark.parametrize("kind, count", [("safetensors", 2), ("bin", 1), ("bin", 3), ("legacy", 1), ("legacy", 2)])
def test_weight_files(tmp_path, capsys, kind, count):
    """Links are followed (Hugging Face's cache has nothing else), mixed types kept, rotary_emb.inv_freq left out.
    Kills: only the first shard read; inv_freq counted as an unknown weight; legacy files mapped; a link refused."""
    reference = checkpoint(tmp_path / "hf")
    norm = reference.model.norm.weight
    norm.data = norm.half().float()
    edit_weights(tmp_path / "hf", lambda w: w.update({
        "model.norm.weight": norm.half(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    where = shards(tmp_path / "hf", kind, count)
    for file in set(where.values()):
        (tmp_path / "hf" / file).rename(tmp_path / file)
        (tmp_path / "hf" / file).symlink_to(tmp_path / file)
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))
    kept = load_file(tmp_path / "out/model.safetensors")
    assert kept["norm.weight"].dtype == torch.float16 and kept["embed.weight"].dtype == torch.float32
    assert "ignored: 1 rotary_emb.inv_freq" in capsys.readouterr().out


def rewrite(change, kind="safetensors", count=2):
    """-> what spoils a folder: its weights in shards of this kind, then change(folder, {name: file}, index)."""
    def spoil(folder: Path):
        where = shards(folder, kind, count)
        change(folder, where, f"{'model.safetensors' if kind == 'safetensors' else 'pytorch_model.bin'}.index.json")
    return spoil


def relist(file):
    return lambda folder, where, index: edit(folder, index, weight_map=where | {min(where): file})


def header(change):
    """Edit the JSON header of model.safetensors."""
    def spoil(folder: Path):
        data = (folder / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:end])
        change(head)
        text = json.dumps(head).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return spoil


class Code:
    def __reduce__(self):
        return print, ("this ran",)


def save(content, **options):
    return lambda folder, *_: torch.save(content, folder / "pytorch_model.bin", **options)


NORM, LEGACY = "model.norm.weight", {"_use_new_zipfile_serialization": False}
HOSTILE = {         # what is done to a folder of good weights, what the one line must say
    "path up": (rewrite(relist("../hf/model-00001-of-00002.safetensors")), "outside the folder"),
    "absolute path": (rewrite(relist("/etc/passwd")), "outside the folder"),
    "dots": (rewrite(relist("..")), "outside the folder"),
    "nul": (rewrite(relist("a\0.bin")), "outside the folder"),
    "number": (rewrite(relist(3)), "outside the folder"),
    "no map": (rewrite(lambda f, w, i: (f / i).write_text("{}")), "no weight_map"),
    "no shard": (rewrite(relist("model-3.safetensors")), "model-3.safetensors does not exist"),
    "no bin shard": (rewrite(relist("model-3.bin"), "bin"), "model-3.bin does not exist"),
    "wrong shard": (rewrite(lambda f, w, i: edit(f, i, weight_map=w | {NORM: next(x for x in w.values() if x != w[NORM])})),
                    "names weights that its files lack: model.norm.weight"),
    "twice": (rewrite(lambda f, w, i: save_file(load_file(f / w[NORM]) | {n: torch.ones(1) for n in w}, f / w[NORM])),
              "is in two files"),
    "unlisted": (rewrite(lambda f, w, i: edit(f, i, weight_map={n: x for n, x in w.items() if x == w[NORM]})),
                 "missing weights"),
    "header of 2^60 bytes": (lambda f: (f / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}"),
                             "model.safetensors is damaged"),
    "overlap": (header(lambda h: h[NORM].update(data_offsets=[0, 128])), "model.safetensors is damaged"),
    "huge shape": (header(lambda h: h[NORM].update(shape=[2**62, 2**62])), "model.safetensors is damaged"),
    "negative": (header(lambda h: h[NORM].update(shape=[-32])), "model.safetensors is damaged"),
    "code": (save({NORM: Code()}), "wants to run code"),
    "code in a legacy file": (save({NORM: Code()}, **LEGACY), "wants to run code"),
    "no names": (save([torch.ones(2)]), "holds a list"),
    "numbers for names": (save({3: torch.ones(2)}), "pytorch_model.bin is damaged"),
    "nested": (save({"model": {NORM: torch.ones(2)}}), "model (dict)"),
    "integers": (save({NORM: torch.ones(32, dtype=torch.int8)}), "model.norm.weight (torch.int8)"),
    "sparse": (save({NORM: torch.eye(4).to_sparse()}), "not plain floating point"),
    "stretched": (save({NORM: torch.ones(1).expand(2**40)}), "fewer numbers than the shape"),
    "empty": (lambda f: (f / "pytorch_model.bin").write_bytes(b""), "pytorch_model.bin is damaged"),
    "random": (lambda f: (f / "pytorch_model.bin").write_bytes(bytes(range(7, 256)) * 9), "pytorch_model.bin is damaged"),
    "web page": (lambda f: (f / "pytorch_model.bin").write_text("<html>Not found</html>"), "pytorch_model.bin is damaged"),
    "cut": (rewrite(lambda f, w, i: damage(f / "pytorch_model.bin", 0.5), "bin", 1), "pytorch_model.bin is damaged"),
    "cut legacy": (rewrite(lambda f, w, i: damage(f / "pytorch_model.bin", 0.9), "legacy", 1), "bin is damaged"),
    "adapter": (lambda f: edit(f, "adapter_config.json", r=8), "adapter"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weight_files(tmp_path, capfd, name):
    """Exit code 2, one line, nothing written.
    Kills: one name found in two shards; an index believed; torch.load without weights_only, or its errors not caught."""
    spoil, message = HOSTILE[name]
    checkpoint(tmp_path / "hf")
    spoil(tmp_path / "hf")
    if (tmp_path / "hf/pytorch_model.bin").exists():
        (tmp_path / "hf/model.safetensors").unlink(missing_ok=True)
    capfd.readouterr()
    assert cw.main([str(tmp_path / "hf"), str(tmp_path / "out"), "--no-tokenizer"]) == 2
    out, err = capfd.readouterr()
    assert message in err and err.count("\n") == 1 and "this ran" not in out
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_unlisted_shards_are_named(tmp_path, capsys):
    """Kills: whatever matches the pattern of shards read."""
    checkpoint(tmp_path / "hf")
    shards(tmp_path / "hf", "safetensors", 2)
    save_file({"x": torch.ones(1)}, tmp_path / "hf/model-00003-of-00003.safetensors")
    convert(tmp_path / "hf", tmp_path / "out")
    assert "ignored: model-00003-of-00003.safetensors, which" in capsys.readouterr().out


def test_nan_weights_are_converted_with_a_warning(tmp_path, capsys):
    """Kills: tied weights with NaN in them taken for different ones."""
    checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    edit_weights(tmp_path / "hf", lambda w: w["model.embed_tokens.weight"][3].fill_(float("nan")))
    edit_weights(tmp_path / "hf", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    capsys.readouterr()
    assert cw.main([str(tmp_path / "hf"), str(tmp_path / "out"), "--no-tokenizer"]) == 0
    assert capsys.readouterr().err.startswith("warning: NaN or infinite weights") and (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin", "legacy"])
def test_memory_stays_below_the_largest_shard(tmp_path, kind):
    """VmHWM of a child that converts, minus that of one that converts next to nothing: torch imports 150 MB of modules for
    its first meta tensor, and ru_maxrss would count the parent's pages too.
    Kills: all shards loaded first; a legacy shard kept while the next is loaded."""
    sizes = dict(vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=8,
                 num_key_value_heads=8, head_dim=64)
    checkpoint(tmp_path / "hf", **sizes)
    where = shards(tmp_path / "hf", kind, 4)
    largest = max((tmp_path / "hf" / file).stat().st_size for file in where.values())
    peak = {}
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}      # freed memory goes back, as it does for tensors of real size
    checkpoint(tmp_path / "tiny")
    for src in ("hf", "tiny"):
        code = f"from convert_weights import *; convert('{tmp_path / src}', Path('{tmp_path}/out-{src}'), 'keep', False);" \
               "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env,
                              cwd=Path(cw.__file__).parent)
        peak[src] = int(done.stdout.split()[-1]) * 1024
    assert peak["hf"] - peak["tiny"] < 1.3 * largest and largest > 40e6


def test_safetensors_come_before_bin(tmp_path):
    """Kills: pytorch_model.bin looked for first."""
    checkpoint(tmp_path / "hf")
    (tmp_path / "hf/pytorch_model.bin").write_text("rubbish")
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
    "no family name": ({"model_type": ["llama"]}, "names no family"),
    "no family": ({"model_type": None}, "model_type"),
    "act": ({"hidden_act": "gelu"}, "gelu"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    "old dynamic": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "llama3 lacks": ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "window": ({"model_type": "mistral", "sliding_window": 64}, "sliding_window 64"),
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


# ---- the command line

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
