"""convert/hf_tokenizer.py and tokenizer.py against tokenizers and sentencepiece; test_chat.py has the chats.

"Kills:" names the bug that was planted once and made the test fail.
"""
import base64
import json
import random
import time
import unicodedata

import pytest
import sentencepiece
from tokenizers import normalizers

import convert_weights as cw
import tokenizer
from checkpoints import ALL, NASTY, SPLITS, checkpoint, damage, edit, hf_folder, one_thread  # noqa: F401 (autouse)
from checkpoints import fallback_folder, reference_tokenizer, unfold
from model import read_config

NFC = normalizers.NFC()


@pytest.fixture
def hf(tmp_path):
    return hf_folder(tmp_path / "hf")


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_bpe_equals_tokenizers(tmp_path, name):
    """Kills: the digit step forgotten; NFC forgotten; GPT-2's pattern for all.  NFC is Python's: tokenizers' is older
    and does not know some marks."""
    checkpoint(tmp_path / "hf", vocab_size=512)
    reference = reference_tokenizer(tmp_path / "hf", SPLITS[name], normalizers.NFC() if name == "qwen2" else None,
                                    ignore_merges=name == "llama3")
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    ours, rng = tokenizer.load(tmp_path / "out"), random.Random(0)
    nasty = ["".join(rng.choices(" \n\r\t'sredlv12٣½aé漢!_-🙂e\u0301", k=30)) for _ in range(500)]
    assert list(ours.special_tokens) == ["<|endoftext|>", "<|im_end|>", "<s>", "<think>"]
    assert all(reference.token_to_id(t) == i for t, i in ours.special_tokens.items())
    probes = ("{}\u0301", "\u0301{}", "{}\u0316", "\u0345{}")       # marks change places by their classes
    differ = lambda text: NFC.normalize_str(text) != unicodedata.normalize("NFC", text)
    young = {c for c in ALL if name == "qwen2" and any(differ(p.format(c)) for p in probes)}
    for text in [*NASTY, *nasty, *rows()]:
        text = "".join(c for c in text if c not in young)
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
    "word special": {"added_tokens": [{"id": 0, "content": "<mask>", "single_word": True}]},
    "post-processor": {"post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}},
    "nested splits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        *({"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated"} for p in (r"\d|\D+", r"\s+$|.")),
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}},
    "two splits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation"}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]}},
    "lossy": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}},
}


@pytest.mark.parametrize("name", SPLIT_REFUSED)
def test_unknown_text_rules_are_refused(hf, tmp_path, name):
    """Kills: unknown pre-tokenizers skipped; a pattern that drops blanks accepted; single_word of a special ignored."""
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
    """Case 16.  Kills: pieces compared, but no text; which tokens are special not compared, or what only one has."""
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
    plain = {t: i for t, i in spec["special_tokens"].items() if t != "<|im_end|>"}
    ranks = (tmp_path / "b" / "tokenizer.tiktoken").read_text()
    (tmp_path / "b" / "tokenizer.tiktoken").write_text(ranks + base64.b64encode(b"<|im_end|>").decode() + " 1\n")
    edit(tmp_path / "b", tokenizer=spec | {"special_tokens": plain})
    assert "is special in one" in tokenizer.compare(a, tokenizer.load(tmp_path / "b"))
    (tmp_path / "b" / "tokenizer.tiktoken").write_text(ranks)
    more = {"special_tokens": spec["special_tokens"] | {"<new>": 402}, "bos": None}
    edit(tmp_path / "b", tokenizer=spec | more, model=read_config(tmp_path / "b")["model"] | {"tokens": 403})
    b = tokenizer.load(tmp_path / "b")
    assert tokenizer.compare(a, b) is tokenizer.compare(b, a) is None       # nothing a text can become, and no BOS
    (tmp_path / "b" / "tokenizer.tiktoken").write_text(ranks + base64.b64encode(b" xyz").decode() + " 402\n")
    edit(tmp_path / "b", tokenizer=spec)
    b = tokenizer.load(tmp_path / "b")
    assert "402" in tokenizer.compare(a, b) and "402" in tokenizer.compare(b, a)


def test_special_tokens_that_sentencepiece_finds_in_text(tmp_path):
    """One kind of piece is looked for in text (<|im_start|>), the other made by merges: Code Llama's <PRE>, here "there".
    Kills: refused; the type put behind another piece; the copied file used."""
    with open(tmp_path / "sp", "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the theme of them is there 12"] * 50), model_writer=f, vocab_size=300,
            model_type="bpe", byte_fallback=True, hard_vocab_limit=False, user_defined_symbols=["<|im_start|>"],
            normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp"))
    special = [reference.piece_to_id(t) for t in ("<|im_start|>", "▁there")]
    assert reference.encode("there") == special[1:] and special[0] in reference.encode("a<|im_start|>")
    checkpoint(tmp_path / "hf", vocab_size=512)
    (tmp_path / "sp").rename(tmp_path / "hf/tokenizer.model")
    edit(tmp_path / "hf", "tokenizer_config.json", bos_token="<s>", eos_token="</s>", added_tokens_decoder={
        str(i): {"content": reference.id_to_piece(i), "special": True} for i in special})
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    for text in ("there", "a<|im_start|>", "the there of<|im_start|>"):
        assert not {*tok.encode(text)} & {*special} and tok.decode(tok.encode(text)) == f" {text}"
    for text in NASTY:
        if "<|im_start|>" not in text and "there" not in text:
            assert tok.encode(text) == reference.encode(text)


def runs(raw: dict, order) -> dict:
    """Merges of runs of up to 6 blanks, none of 5, behind all others in this order of (left, right) lengths."""
    pairs = [(a, b) for a in range(1, 7) for b in range(1, 7) if a + b <= 6 and 5 not in (a, b, a + b)]
    for a, b in sorted(pairs, key=order):
        raw["model"]["merges"].append(["▁" * a, "▁" * b])
        raw["model"]["vocab"].setdefault("▁" * (a + b), len(raw["model"]["vocab"]))
    return raw


def test_runs_of_blanks_share_a_score(tmp_path):
    """Llama 2's and Mistral's tokenizer.json have them as transformers' converter sorts them: longest left part first.
    Kills: refused, as the pairs of one token are apart; any order taken, though ids differ."""
    reference, _ = fallback_folder(tmp_path / "hf", lambda raw: runs(raw, lambda pair: (-pair[0], -pair[1])))
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    tok, rng = tokenizer.load(tmp_path / "out"), random.Random(0)
    mixed = ["".join(rng.choices([" ", "  ", " the", "\n"], k=30)) for _ in range(300)]
    for text in [" " * n for n in range(40)] + mixed:
        assert tok.encode(text) == reference.encode(text, add_special_tokens=False).ids
    fallback_folder(tmp_path / "hf", lambda raw: runs(raw, lambda pair: (pair[1], -pair[0])))
    with pytest.raises(ValueError, match="not in the order|not what its merges make"):
        cw.convert(str(tmp_path / "hf"), tmp_path / "out")


@pytest.mark.parametrize("scheme", ["prepend", "replace", "always", "first", "never", "always+split"])
def test_sentencepiece_style_bpe_equals_tokenizers(tmp_path, scheme):
    """A tokenizer.json alone, of characters with byte fallback; every Unicode character.
    Kills: a blank always put in front, also of a blank; unmade tokens NORMAL; scores not in order of merges;
    single characters CONTROL."""
    reference, raw = fallback_folder(tmp_path / "hf", lambda raw: unfold(raw, scheme))
    cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    tok, rng = tokenizer.load(tmp_path / "out"), random.Random(0)
    nasty = ["".join(rng.choices("   \n\t▁'sthemor12٣½aé漢_🙂e\u0301\x00", k=40)) for _ in range(500)]
    for text in [*NASTY, *nasty, *rows(), " a", "▁a", "<0x41>", "▁", "éé"]:
        if "<s>" not in text:                                        # the reference would find the special token
            assert tok.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tok.bos == 1 and tok.vocab_size == len(raw["model"]["vocab"]) + 1 == tok.special_tokens["<|end|>"] + 1
    whole = reference.encode("<s>the<|end|> them<|end|>\n", add_special_tokens=False).ids
    assert tokenizer.chat("<s>the<|end|> them<|end|>\n\n", [], tok) == whole


BAD_FALLBACK = {
    "order": (lambda r: only(r, "t h", "th e", "h e", "t he"), "not in the order"),
    "a split not listed": (lambda r: only(r, "t h", "h e", "t he"), "not what its merges make"),
    "stranger": (lambda r: r["model"]["merges"].append(["t", "漢漢"]), "no token"),
    "three": (lambda r: r["model"]["merges"].append(["t", "h", "e"]), "not a pair"),
    "byte": (lambda r: r["model"]["vocab"].pop("<0x41>"), "<0x41> is missing"),
    "unk": (lambda r: r["model"].update(unk_token="?!?"), r"\?!\? is missing"),
    "hole": (lambda r: r["model"]["vocab"].update({"gap": 4000}), "ids have no token"),
    "whole words": (lambda r: r["model"].update(ignore_merges=True), "ignore_merges"),
    "normalizer": (lambda r: r.update(normalizer={"type": "NFKC"}), "NFKC is not supported"),
    "two words": (lambda r: (only(r, "e ▁"), r.update(unfold(r, "always+split"))), "has one inside"),
    "unigram": (lambda r: r["model"].update(type="Unigram"), "only BPE"),
}


def only(raw: dict, *merges: str):
    """These merges and no others, "th e" making the token "the"."""
    raw["model"]["merges"] = [m.split() for m in merges]
    for m in merges:
        raw["model"]["vocab"].setdefault(m.replace(" ", ""), len(raw["model"]["vocab"]))


@pytest.mark.parametrize("name", BAD_FALLBACK)
def test_bpe_that_sentencepiece_would_merge_differently_is_refused(tmp_path, name):
    """Kills: merges not compared with scores; a word's border forgotten; missing bytes not looked for."""
    change, message = BAD_FALLBACK[name]
    fallback_folder(tmp_path / "hf", lambda raw: change(raw) and None or raw)
    with pytest.raises(ValueError, match=message) as caught:
        cw.convert(str(tmp_path / "hf"), tmp_path / "out")
    assert "\n" not in str(caught.value)


def rows():
    """Every assigned character, each block of 64 as a word and with blanks between."""
    blocks = ["".join(ALL[i:i + 64]) for i in range(0, len(ALL), 64)]
    return [*blocks[::2], *(" ".join(block) for block in blocks[1::2])]


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_long_texts_take_linear_time(tmp_path, hf, kind):
    """Kills: runs of blanks given to tiktoken uncut (it aborts); a copy of the rest of the text for every token."""
    if kind == "fallback":
        fallback_folder(tmp_path / "hf2")
    cw.convert(str(tmp_path / "hf2" if kind == "fallback" else hf), tmp_path / "out")
    tok = tokenizer.load(tmp_path / "out")
    for text in ("x" * 200_000, "the" * 66_000, "漢字" * 33_000, " " * 1_000_000, "\n" * 500_000):
        start = time.process_time()
        ids = tok.encode(text)
        assert time.process_time() - start < 3 and tok.decode(ids).lstrip(" ") == text.lstrip(" ")


def test_bytes_the_vocabulary_lacks_are_named(hf, tmp_path):
    """As SmolLM2, whose vocabulary lacks 21 bytes.  Kills: dropped silently; named by stand-in id."""
    cw.convert(str(hf), tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.tiktoken"
    path.write_bytes(path.read_bytes().replace(base64.b64encode(b"\x06") + b" ", base64.b64encode(b"a\x06") + b" "))
    tok = tokenizer.load(tmp_path / "out")
    with pytest.warns(UserWarning, match="2 bytes dropped.* 06$") as caught:
        assert tok.encode("b\x06b\x06") == tok.encode("b") * 2
    assert len(caught) == 1
