"""convert_tokenizer.py and tokenizer.py against tokenizers, sentencepiece and transformers' chat templates.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import random
import unicodedata

import pytest
import sentencepiece
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

import convert_weights as cw
import tokenizer
from checkpoints import NASTY, SPLITS, checkpoint, damage, edit, hf_folder, one_thread  # noqa: F401 (autouse)
from checkpoints import reference_tokenizer
from model import read_config


@pytest.fixture
def hf(tmp_path):
    return hf_folder(tmp_path / "hf")


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
