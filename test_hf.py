"""Hugging Face folders: which families and fields convert, and the files that weights are in.  CPU, no torch.compile.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert_weights as cw
from checkpoints import check_same, checkpoint, convert, damage, edit, edit_weights, one_thread  # noqa: F401 (autouse)

# ---- config.json

NEWCOMERS = {       # a family whose name nobody here knows, made of one that is known
    "llama": ("llama", {}), "biases": ("llama", {"attention_bias": True, "mlp_bias": True}), "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}), "tied": ("llama", {"tie_word_embeddings": True})}


@pytest.mark.parametrize("name", NEWCOMERS)
def test_unknown_family_that_fits(tmp_path, name):
    """Kills: a list of allowed model_types; biases and head norms only where the config says so; tie_word_embeddings
    taken as false when absent; another family's eps taken for 1e-6."""
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
    "unsloth": {"unsloth_version": "2025.1", "unsloth_fixed": True, "quantization_config": None},
    "old": {"id2label": {"0": "LABEL_0"}, "pruned_heads": {}, "temperature": 0.7, "top_k": 50, "max_length": 20,
            "bad_words_ids": None, "add_cross_attention": False, "chunk_size_feed_forward": 0, "hidden_act": "swish"},
    "own code": {"auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}}}


@pytest.mark.parametrize("name", JUNK)
def test_fields_that_change_nothing(tmp_path, name):
    """Kills: a field left out of NEUTRAL; null and false not passed; use_sliding_window ignored; a window of the
    context's size refused."""
    family = JUNK[name].get("model_type", "llama")
    reference = checkpoint(tmp_path / "hf", family, **{"sliding_window": None} if family == "mistral" else {})
    edit(tmp_path / "hf", **JUNK[name])
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))


# ---- weight files

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
    "wrong shard": (rewrite(lambda f, w, i: edit(f, i, weight_map=w | {NORM: ({*w.values()} - {w[NORM]}).pop()})),
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
    "random": (lambda f: (f / "pytorch_model.bin").write_bytes(bytes(range(7, 256)) * 9), "model.bin is damaged"),
    "web page": (lambda f: (f / "pytorch_model.bin").write_text("<html>Not found</html>"), "model.bin is damaged"),
    "cut": (rewrite(lambda f, w, i: damage(f / "pytorch_model.bin", 0.5), "bin", 1), "pytorch_model.bin is damaged"),
    "cut legacy": (rewrite(lambda f, w, i: damage(f / "pytorch_model.bin", 0.9), "legacy", 1), "bin is damaged"),
    "adapter": (lambda f: edit(f, "adapter_config.json", r=8), "adapter"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weight_files(tmp_path, capfd, name):
    """Exit code 2, one line, nothing written.
    Kills: a name in two shards taken; an index believed; torch.load without weights_only, or its errors not caught."""
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


def test_memory_stays_below_the_largest_shard(tmp_path):
    """VmHWM of a child that converts, minus that of one that converts next to nothing: torch imports 150 MB of modules
    for its first meta tensor, and ru_maxrss would count the parent's pages too.
    Kills: all shards loaded first; a legacy shard kept while the next is loaded."""
    sizes = dict(vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=8,
                 num_key_value_heads=8, head_dim=64)
    checkpoint(tmp_path / "hf", **sizes)
    checkpoint(tmp_path / "tiny")
    env, peak, largest = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}, {}, {}   # freed memory goes back, as with
    for kind in ("tiny", "safetensors", "bin", "legacy"):                           # tensors of real size
        if kind != "tiny":
            shutil.copytree(tmp_path / "hf", tmp_path / kind)
            files = set(shards(tmp_path / kind, kind, 4).values())
            largest[kind] = max((tmp_path / kind / file).stat().st_size for file in files)
        code = f"from convert_weights import *; convert('{tmp_path}/{kind}', Path('{tmp_path}/out-{kind}'), 'keep', 0);" \
               "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env,
                              cwd=Path(cw.__file__).parent)
        peak[kind] = int(done.stdout.split()[-1]) * 1024
    assert min(largest.values()) > 40e6
    assert [kind for kind in largest if peak[kind] - peak["tiny"] > 1.3 * largest[kind]] == []


def test_safetensors_come_before_bin(tmp_path):
    """Kills: pytorch_model.bin looked for first."""
    checkpoint(tmp_path / "hf")
    (tmp_path / "hf/pytorch_model.bin").write_text("rubbish")
    convert(tmp_path / "hf", tmp_path / "out")
