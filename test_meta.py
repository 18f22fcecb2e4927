"""convert/from_meta.py: Meta's own folders, made here out of transformers models.  CPU, no torch.compile.

"Kills:" names the bug that was planted once and made the test fail.
"""
import base64
import re
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file

from convert import from_meta as cm
import convert_weights as cw
import tokenizer
from checkpoints import (NASTY, SPLITS, check_same, checkpoint, convert, damage, edit, one_thread,
                         reference_tokenizer)  # noqa: F401 (autouse)
from model import read_config

NAMES = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
         "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
         "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
         "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings", "lm_head": "output"}
SPLIT = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
PARAMS = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=-1, multiple_of=32, norm_eps=1e-6)
LLAMA3_2 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}


# ---- tools

def interleaved(w, heads: int):
    """Halves to pairs, row by row: rows 2j and 2j + 1 of a head are its rows j and j + D/2."""
    D = len(w) // heads
    return w[[h * D + r // 2 + r % 2 * (D // 2) for h in range(heads) for r in range(D)]]


def meta_folder(folder: Path, shards=1, embed_axis=1, params=(), legacy=False, **changes):
    """A random tiny model in Meta's layout -> its transformers model.  `params` differs from PARAMS."""
    reference = checkpoint(folder.parent / "hf", **{"intermediate_size": 96} | changes)
    c, weights = reference.config, {}
    for name, w in reference.state_dict().items():
        name = name.removeprefix("model.")
        for theirs, metas in NAMES.items():
            name = name.replace(theirs, metas)
        heads = {"wq": c.num_attention_heads, "wk": c.num_key_value_heads}.get(name.split(".")[-2])
        weights[name] = interleaved(w, heads) if heads else w
    weights["rope.freqs"] = torch.ones(4)
    folder.mkdir()
    edit(folder, "params.json", **PARAMS | dict(params))
    axis = SPLIT | {"tok_embeddings": embed_axis}
    for i in range(shards):
        part = {n: w.chunk(shards, axis[m])[i].clone() if (m := n.split(".")[-2]) in axis else w
                for n, w in weights.items()}
        torch.save(part, folder / f"consolidated.{i:02}.pth", _use_new_zipfile_serialization=not legacy)
    return reference


def edit_shard(folder: Path, change, i=0):
    weights = torch.load(folder / f"consolidated.{i:02}.pth")
    change(weights)
    torch.save(weights, folder / f"consolidated.{i:02}.pth")


# ---- weights

FOLDERS = {         # shards, axis that splits the embedding, params.json, the model
    "llama 1": (1, 1, {"n_kv_heads": None}, {"num_key_value_heads": 4}),
    "legacy file": (1, 1, {"n_kv_heads": None}, {"num_key_value_heads": 4, "legacy": True}),
    "llama 2": (2, 1, {"norm_eps": 0.1, "max_batch_size": 4}, {"rms_norm_eps": 0.1}),
    "code llama": (2, 1, {"rope_theta": 1e6, "ffn_dim_multiplier": 1.3, "vocab_size": 64},
                   {"intermediate_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama 3": (2, 0, {"rope_theta": 5e5, "use_scaled_rope": False},
                {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama 3.2": (1, 0, {"rope_theta": 5e5, "use_scaled_rope": True, "rope_scaling_factor": 32},
                  {"rope_parameters": LLAMA3_2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_match_transformers(tmp_path, capsys, name):
    """Kills: q and k not unpermuted, k with q's number of heads; w1 and w3 swapped; wo joined along rows; the embedding
    joined along columns always; a tied output written; theta and eps left at their defaults."""
    shards, axis, params, changes = FOLDERS[name]
    reference = meta_folder(tmp_path / "meta", shards, axis, params, **changes)
    out = convert(tmp_path / "meta", tmp_path / "out")
    check_same(reference, out)
    assert "ignored: rope.freqs" in capsys.readouterr().out
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) == (name != "llama 3.2")


def test_source_types_are_kept(tmp_path):
    """Kills: joined weights announced as float32."""
    meta_folder(tmp_path / "meta", 2)
    for i in range(2):
        edit_shard(tmp_path / "meta", lambda w: w.update({n: t.bfloat16() for n, t in w.items()}), i)
    kept = load_file(convert(tmp_path / "meta", tmp_path / "out") / "model.safetensors")
    assert {w.dtype for w in kept.values()} == {torch.bfloat16}


def test_a_hugging_face_folder_stays_one(tmp_path):
    """Their repositories hold Meta's files in `original`.  Kills: params.json looked for first."""
    reference = meta_folder(tmp_path / "meta", params={"dim": 33})
    (tmp_path / "meta").rename(tmp_path / "hf/original")
    edit(tmp_path / "hf", "params.json", dim=33)
    check_same(reference, convert(tmp_path / "hf", tmp_path / "out"))


ROPE = {            # params.json, rows of the embedding -> context, theta, factor of its scaling
    "llama 1 7B": ({"dim": 4096, "norm_eps": 1e-6}, 32_000, (2048, 1e4, None)),
    "llama 1 65B": ({"dim": 8192, "norm_eps": 1e-5}, 32_000, (2048, 1e4, None)),
    "llama 2 7B": ({"dim": 4096, "norm_eps": 1e-5}, 32_000, (4096, 1e4, None)),
    "llama 2 70B": ({"dim": 8192, "norm_eps": 1e-5, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3}, 32_000,
                    (4096, 1e4, None)),
    "code llama 7B": ({"dim": 4096, "norm_eps": 1e-5, "rope_theta": 1e6}, 32_016, (16_384, 1e6, None)),
    "llama 3 8B": ({"dim": 4096, "rope_theta": 5e5, "n_kv_heads": 8}, 128_256, (8192, 5e5, None)),
    "llama 3 of more tokens": ({"dim": 4096, "rope_theta": 5e5, "n_kv_heads": 8}, 128_260, (8192, 5e5, None)),
    "nobody's theta": ({"dim": 4096, "rope_theta": 7e5, "n_kv_heads": 8}, 32_000, (2048, 7e5, None)),
    "llama 3, no theta": ({"dim": 4096, "n_kv_heads": 8}, 128_256, (8192, 5e5, None)),
    "llama 3.1 8B": ({"dim": 4096, "rope_theta": 5e5, "use_scaled_rope": True}, 128_256, (131_072, 5e5, 8.0)),
    "llama 3.2 1B": ({"dim": 2048, "rope_theta": 5e5, "use_scaled_rope": True}, 128_256, (131_072, 5e5, 32.0)),
    "llama 3.2 3B": ({"dim": 3072, "rope_theta": 5e5, "use_scaled_rope": True}, 128_256, (131_072, 5e5, 32.0)),
    "stated": ({"dim": 2048, "use_scaled_rope": True, "rope_scaling_factor": 16}, 128_256, (131_072, 5e5, 16)),
}


@pytest.mark.parametrize("name", ROPE)
def test_what_params_json_leaves_open(capsys, name):
    """Kills: 65B taken for a Llama 2; one factor for all; nothing said of what was assumed."""
    params, rows, want = ROPE[name]
    context, theta, scaling = cm.meta_rope(params, params["dim"], rows)
    assert (context, theta, scaling and scaling["factor"]) == want
    assert capsys.readouterr().out.startswith(f"assumed: context {context:,}")


@pytest.mark.parametrize("dim, multiple_of, multiplier, want", [    # intermediate_size of their config.json
    (4096, 256, None, 11_008), (5120, 256, None, 13_824), (8192, 4096, 1.3, 28_672), (4096, 1024, 1.3, 14_336),
    (2048, 256, 1.5, 8192), (3072, 256, 1.0, 8192), (16_384, 4096, 1.2, 53_248),
    (32, 1, 1.5, 127)])
def test_width_of_the_feed_forward(dim, multiple_of, multiplier, want):
    """The last is 1.5 * 85.  Kills: rounded down; the multiplier applied before 2/3 is cut to a whole number."""
    assert cm.ffn_width({"dim": dim, "multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}) == want


HOSTILE = {         # what is done to a folder of two shards, what the one line must say
    "unknown field": (lambda f: edit(f, "params.json", novelty=1), "novelty 1 of"),
    "experts": (lambda f: edit(f, "params.json", moe={"num_experts": 8}), "no mixture of experts"),
    "vision": (lambda f: edit(f, "params.json", vision_chunk_size=448), "no vision encoder"),
    "adapter": (lambda f: edit(f, "params.json", lora_args={"rank": 16}), "no LoRA adapter"),
    "quantised": (lambda f: edit(f, "params.json", quantization_args={"group_size": 32}), "no quantised weights"),
    "rows": (lambda f: edit(f, "params.json", vocab_size=32), "vocab_size 32 in params.json"),
    "width": (lambda f: edit(f, "params.json", multiple_of=256), "feed-forward 256 wide, w1 has 96"),
    "heads": (lambda f: edit(f, "params.json", n_kv_heads=4), "attention.wk.weight has shape (16, 32)"),
    "layers": (lambda f: edit(f, "params.json", n_layers=3), "missing weights: layers.2.attention_norm"),
    "text": (lambda f: edit(f, "params.json", dim="32"), "dim of the checkpoint's config is '32'"),
    "no dim": (lambda f: edit(f, "params.json", drop=["dim"]), "dim is missing"),
    "scaling unasked": (lambda f: edit(f, "params.json", rope_scaling_factor=8), "use_scaled_rope is not true"),
    "no params": (lambda f: (f / "params.json").unlink(), "params.json does not exist"),
    "params cut": (lambda f: (f / "params.json").write_text('{"dim": '), "params.json is damaged"),
    "first shard": (lambda f: (f / "consolidated.00.pth").unlink(), "consolidated.00.pth does not exist"),
    "last shard": (lambda f: (f / "consolidated.01.pth").unlink(), "a shard may be missing"),
    "cut": (lambda f: damage(f / "consolidated.01.pth", 0.5), "consolidated.01.pth is damaged"),
    "empty": (lambda f: (f / "consolidated.01.pth").write_bytes(b""), "consolidated.01.pth is damaged"),
    "extra": (lambda f: edit_shard(f, lambda w: w.update({"x.weight": torch.ones(2)}), 1), "x.weight"),
    "unknown": (lambda f: [edit_shard(f, lambda w: w.update({"x.weight": torch.ones(2)}), i) for i in (0, 1)],
                "no place for: x.weight"),
    "norms differ": (lambda f: edit_shard(f, lambda w: w["norm.weight"].add_(1)), "norm.weight must be the same"),
    "types differ": (lambda f: edit_shard(f, lambda w: w.update({"norm.weight": w["norm.weight"].half()})),
                     "norm.weight differs"),
    "no embedding": (lambda f: [edit_shard(f, lambda w: w.pop("tok_embeddings.weight"), i) for i in (0, 1)],
                     "missing weights: tok_embeddings.weight"),
    "no matrix": (lambda f: [edit_shard(f, lambda w: w.update({"tok_embeddings.weight": torch.tensor(1.0)}), i)
                             for i in (0, 1)], "not that of a matrix"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders(tmp_path, capfd, name):
    """Exit code 2, one line, nothing written.
    Kills: unknown fields of params.json passed; only the first shard's names read; replicated norms not compared."""
    spoil, message = HOSTILE[name]
    meta_folder(tmp_path / "meta", 2)
    spoil(tmp_path / "meta")
    capfd.readouterr()
    assert cw.main([str(tmp_path / "meta"), str(tmp_path / "out"), "--no-tokenizer"]) == 2
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "meta"]


# ---- tokenizer.model

@pytest.fixture(scope="module")
def llama3_file(tmp_path_factory):
    """-> (a tokenizer.model like Llama 3's, the tokenizers.Tokenizer with ids higher by 2: its specials come first)."""
    folder = tmp_path_factory.mktemp("llama3")
    checkpoint(folder, vocab_size=512)
    reference = reference_tokenizer(folder, SPLITS["llama3"])
    reference.encode_special_tokens = True          # as plain text
    cw.convert(str(folder), folder / "out")
    ranks = [line.split() for line in (folder / "out/tokenizer.tiktoken").read_bytes().splitlines()]
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(token + b" %d\n" % (int(rank) - 2) for token, rank in ranks))
    return path, reference


@pytest.mark.parametrize("scaled", [False, True])
def test_llama3_tokenizer(tmp_path, llama3_file, scaled):
    """Names and places of special tokens as in tokenizer.json of Meta-Llama-3-8B and Llama-3.1-8B.
    Kills: special tokens counted from 0; one list for both; no BOS; end of turn no stop; another split pattern."""
    path, reference = llama3_file
    meta_folder(tmp_path / "meta", params={"use_scaled_rope": scaled}, vocab_size=660)
    (tmp_path / "meta/tokenizer.model").write_bytes(path.read_bytes())
    cw.convert(str(tmp_path / "meta"), tmp_path / "out")
    tok, n = tokenizer.load(tmp_path / "out"), len(path.read_bytes().splitlines())
    for text in NASTY:
        assert tok.encode(text) == [i - 2 for i in reference.encode(text).ids], text
    want = {0: "begin_of_text", 1: "end_of_text", 2: "reserved_special_token_0", 6: "start_header_id", 9: "eot_id"}
    want |= ({4: "finetune_right_pad_id", 5: "reserved_special_token_2", 8: "eom_id", 10: "python_tag",
              255: "reserved_special_token_247"} if scaled else
             {4: "reserved_special_token_2", 8: "reserved_special_token_4", 10: "reserved_special_token_5",
              255: "reserved_special_token_250"})
    assert {i: tok.pieces[n + i].decode() for i in want} == {i: f"<|{text}|>" for i, text in want.items()}
    assert (tok.bos, tok.eos) == (n, (n + 1, n + 8, n + 9) if scaled else (n + 1, n + 9))
    assert tok.vocab_size == n + 256 == read_config(tmp_path / "out")["model"]["tokens"]


def test_sentencepiece_tokenizer_of_the_folder_above(tmp_path):
    """Kills: tokenizer.model looked for beside the weights only; no BOS; no end."""
    meta_folder(tmp_path / "meta", vocab_size=320)
    with open(tmp_path / "tokenizer.model", "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the theme of them is there 12"] * 50), model_writer=f, vocab_size=300,
            model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2)
    cw.convert(str(tmp_path / "meta"), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert (tok.bos, tok.eos, tok.bos_token, tok.eos_token) == (1, (2,), "<s>", "</s>")
    assert tok.prompt("the theme 12 ½") == [1, *reference.encode("the theme 12 ½")]


TOKENIZERS = {      # what tokenizer.model holds, what the one line must say
    "absent": (None, "no tokenizer.model"),
    "rubbish": (b"?", "not a sentencepiece model"),
    "base64": (b"YQ== 0\nY! 1\n", "tokenizer.model is damaged"),
    "columns": (b"YQ== 0\nYg==\n", "tokenizer.model is damaged"),
    "hole": (b"YQ== 0\nYg== 2\n", "ranks are not 0..1"),
    "twice": (b"YQ== 0\nYQ== 1\n", "ranks are not 0..1"),
    "too many": (b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)),
                 "512 tokens, the embedding 64 rows"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_damaged_tokenizers(tmp_path, name):
    """Kills: a rank that is missing or doubled."""
    content, message = TOKENIZERS[name]
    meta_folder(tmp_path / "meta")
    if content is not None:
        (tmp_path / "meta/tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        cw.convert(str(tmp_path / "meta"), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
