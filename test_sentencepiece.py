"""Vocabularies out of GGUFs, sentencepiece and byte-level, and the sentencepiece models written for them.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Regex, normalizers, pre_tokenizers

from convert import gguf_tokenizer as cgt
import convert_weights as cw
import tokenizer
from checkpoints import BYTES, NASTY, SPLITS, checkpoint, one_thread, reference_tokenizer  # noqa: F401 (autouse)
from convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_model
from convert.hf_tokenizer import byte_alphabet
from test_gguf import GGML, refused, write_gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<think>"
SPLITS = SPLITS | {"tekken": [pre_tokenizers.Split(Regex(cgt.TEKKEN), "isolated"), BYTES]}


def train(folder: Path, **settings) -> sentencepiece.SentencePieceProcessor:
    """A small sentencepiece BPE: 256 bytes, a pair of control pieces, one user-defined piece that text turns into."""
    (folder / "text").write_text("\n".join([*NASTY, "the theme of them is there"] * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "sp"), model_type="bpe", vocab_size=480,
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", minloglevel=9,
        remove_extra_whitespaces=False, control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["qz▁▁"], **settings)
    return sentencepiece.SentencePieceProcessor(str(folder / "sp.model"))


def vocabulary(sp, **changes) -> dict:
    """A sentencepiece model as llama.cpp's converter writes it, two added tokens and padding behind it."""
    n = sp.get_piece_size()
    kind = lambda i: (UNKNOWN if sp.is_unknown(i) else CONTROL if sp.is_control(i) else BYTE if sp.is_byte(i) else
                      USER_DEFINED if sp.id_to_piece(i).startswith("qz") else NORMAL)
    tokens = [sp.id_to_piece(i).replace("▁", " ") if kind(i) == USER_DEFINED else sp.id_to_piece(i) for i in range(n)]
    given = {"model": "llama", "pre": "default", "tokens": [*tokens, "<think>", "<stop>", "[PAD0]"],
             "token_type": [*map(kind, range(n)), USER_DEFINED, USER_DEFINED, 5],
             "scores": [*map(sp.get_score, range(n)), -1e3, -1e3, -1e3], "merges": None,
             "bos_token_id": sp.bos_id(), "eos_token_id": sp.eos_id(), "eot_token_id": n + 1}
    return {GGML + key: value for key, value in (given | changes).items()} | {"tokenizer.chat_template": TEMPLATE}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_from_gguf(tmp_path, prefix):
    """Kills: scores ignored; a blank always put in front; added tokens with blanks never found; <think> found in plain
    text; ends other than eos_token_id forgotten; BOS left out."""
    sp = train(tmp_path, add_dummy_prefix=prefix)
    facts = vocabulary(sp, add_space_prefix=prefix)
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=512), facts=facts)
    cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    tok, n = tokenizer.load(tmp_path / "out"), sp.get_piece_size()
    for text in (*NASTY, "a qz  b  qz", "<think>"):
        assert tok.encode(text) == sp.encode(text)
    assert sp.piece_to_id("qz▁▁") in tok.encode("a qz  b")
    im_start, im_end = (sp.piece_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert tok.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": im_start, "<|im_end|>": im_end,
                                  "<think>": n, "<stop>": n + 1}
    assert (tok.bos, tok.eos, tok.vocab_size) == (1, (2, im_end, n + 1), n + 2)
    assert tok.decode([im_start, n, n + 1]) == "<think>"
    chat = tokenizer.chat(TEMPLATE, [{"role": "user", "content": "Hi <|im_end|>"}], tok)
    assert chat == [1, im_start, *sp.encode("Hi <|im_end|>"), im_end, n]
    assert tok.prompt("Hi") == [1, *sp.encode("Hi")]


def test_model_without_a_bos(tmp_path):
    """Kills: a piece called <s> taken for BOS although the vocabulary names none."""
    write_model(tmp_path / "m", [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("a", -1, NORMAL)], True, -1, -1, 0)
    sp = sentencepiece.SentencePieceProcessor(str(tmp_path / "m"))
    assert (sp.bos_id(), sp.eos_id(), sp.pad_id(), sp.unk_id()) == (-1, -1, -1, 0)


@pytest.mark.parametrize("changes, message", [
    ({"pre": "odd"}, "'odd'"), ({"model": "t5"}, "'t5'"), ({"scores": None}, "scores"), ({"scores": [0.5]}, "scores"),
    ({"precompiled_charsmap": [1]}, "precompiled_charsmap"), ({"remove_extra_whitespaces": True}, "remove_extra"),
    ({"add_eos_token": True}, "add_eos_token"), ({"add_bos_token": "yes"}, "'yes'"), ({"bos_token_id": None}, "BOS"),
    ({"eos_token_id": 999}, "999"), ({"eos_token_id": "2"}, "'2'"), ({"token_type": [1, 2]}, "token_type")])
def test_vocabulary_that_is_not_understood(tmp_path, capsys, changes, message):
    """Kills: unknown metadata of the tokenizer passes; end ids beyond the tokens; a BOS without an id."""
    facts = vocabulary(train(tmp_path), **changes)
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=512), facts=facts)
    refused(tmp_path, capsys, message)


@pytest.mark.parametrize("at, token, kind, score, message", [
    (470, "x", NORMAL, float("nan"), "finite"), (0, "<unk>", NORMAL, 0.0, "unknown token"),
    (470, "</s>", CONTROL, 0.0, "already defined"), (470, "", NORMAL, 0.0, "empty"), (470, "x", 9, 0.0, "token_type"),
    (470, "<0x00>", BYTE, 0.0, "already defined"), (slice(259, 482), None, None, -1e3, "merges first")])
def test_damaged_vocabulary(tmp_path, capsys, at, token, kind, score, message):
    """Kills: scores that are not numbers, or all the same because the converter had none."""
    facts = vocabulary(train(tmp_path))
    for key, value in (("tokens", token), ("token_type", kind), ("scores", score)):
        if value is not None:
            facts[GGML + key][at] = value if isinstance(at, int) else [value] * len(facts[GGML + key][at])
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=512), facts=facts)
    refused(tmp_path, capsys, message)


@pytest.mark.parametrize("pre, splits", [("gpt-2", "gpt2"), ("smollm", "digits"), ("llama-bpe", "llama3"),
                                         ("llama3", "llama3"), ("qwen2", "qwen2"), ("deepseek-r1-qwen", "qwen2"),
                                         ("tekken", "tekken")])
def test_pre_tokenizers(tmp_path, pre, splits):
    """Kills: one name's regex under another; NFC forgotten; no BOS for Llama 3."""
    whole = splits in ("llama3", "tekken")
    form = normalizers.NFC() if splits == "qwen2" else None
    reference = reference_tokenizer(tmp_path, SPLITS[splits], normalizer=form, ignore_merges=whole)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {t["id"]: CONTROL if t["special"] else USER_DEFINED for t in raw["added_tokens"]}
    tokens = [reference.id_to_token(i) for i in range(reference.get_vocab_size())]
    facts = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [added.get(i, 1) for i in range(len(tokens))],
             "merges": [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]],
             "bos_token_id": reference.token_to_id("<s>"), "eos_token_id": 0}
    facts = {GGML + key: value for key, value in facts.items()}
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=512), facts=facts)
    cw.convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    special = [t["content"] for t in raw["added_tokens"]]
    for text in NASTY:
        if not any(s in text for s in special):
            assert tok.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tok.bos == (reference.token_to_id("<s>") if whole else None) and tok.special_tokens.keys() == set(special)


@pytest.mark.parametrize("changes, message", [
    ({"pre": "deepseek-llm"}, "'deepseek-llm'"), ({"pre": None}, "'default'"), ({"add_space_prefix": True}, "space"),
    ({"token_type": [1] * 257 + [4, 3]}, "'word'"),
    ({"tokens": [*"ab"], "token_type": [1, 1], "eos_token_id": None}, "merges"), ({"tokens": 5}, "tokens"),
    ({"merges": ["a", "b c d"]}, "merges")])
def test_byte_level_that_is_not_understood(tmp_path, capsys, changes, message):
    """Kills: unknown pre-tokenizers split like GPT-2; added words never found in text although they should be."""
    facts = {"tokens": [*byte_alphabet(), "th", "word", "<|im_end|>"], "eos_token_id": 258, "bos_token_id": None,
             "token_type": [1] * 257 + [3, 3]} | changes
    facts = {GGML + key: value for key, value in facts.items()}
    write_gguf(tmp_path / "m.gguf", checkpoint(tmp_path / "hf", vocab_size=260), facts=facts)
    refused(tmp_path, capsys, message)
