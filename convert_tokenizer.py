"""Turns a checkpoint's tokenizer into ours: tokenizer.json or tokenizer.model of Hugging Face.

Byte-level BPE becomes tiktoken ranks, and only where they provably say the same as the merges; sentencepiece is copied.
A rule that is not understood stops the conversion and is named.
"""
import base64
import json
import shutil
from pathlib import Path

import sentencepiece

import tokenizer
from convert_source import read_json
from model import read_config

# Regexes that split text before byte pairs merge; ByteLevel names the first, a GGUF names all of them.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Each digit is cut out first, so blanks before a digit end their piece there: hence \s+ may also stop before \p{N}.
DIGITS_THEN_GPT2 = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def hf_tokenizer(src: Path, new: Path, config: dict) -> tuple[dict, str | None]:
    """Write the tokenizer's file into `new` -> the "tokenizer" part of our config.json, plus "size", its tokens; the
    chat template.  `config` is the folder's config.json."""
    settings = read_json(src / "tokenizer_config.json", missing={})
    stops = ids_of(config) | ids_of(read_json(src / "generation_config.json", missing={}))
    try:
        return hf_spec(src, new, settings, stops), hf_template(src, settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{src}: its tokenizer files are damaged ({type(error).__name__} {error})") from None


def hf_spec(src: Path, new: Path, settings: dict, stops: set[int]) -> dict:
    raw = read_json(src / "tokenizer.json", missing={})
    added = {t["id"]: t for t in raw.get("added_tokens", [])}
    added |= {int(i): t for i, t in settings.get("added_tokens_decoder", {}).items() if int(i) not in added}
    old_style = read_json(src / "added_tokens.json", missing={})
    added |= {i: {"content": t} for t, i in old_style.items() if i not in added}
    if odd := [t["content"] for t in added.values() if t.get("lstrip") or t.get("rstrip") or t.get("single_word")]:
        raise ValueError(f"special tokens that swallow blanks are not supported: {', '.join(odd)}")
    special = {t["content"]: i for i, t in added.items()}
    shown = [i for i, t in added.items() if not t.get("special", True)]
    if (src / "tokenizer.model").exists():
        spec = sentencepiece_spec(src / "tokenizer.model", new, special, settings)
    elif raw:
        spec = bpe_spec(raw, new, special)
    else:
        raise ValueError(f"{src} has no tokenizer.model or tokenizer.json: --no-tokenizer converts without one")
    names = {key: text_of(settings.get(key)) for key in ("bos_token", "eos_token")}
    stops = stops | {spec["special_tokens"][t] for t in [names["eos_token"]] if t in spec["special_tokens"]}
    return spec | names | {"shown": shown, "eos": sorted(stops)}


def text_of(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def ids_of(config: dict) -> set[int]:
    eos = config.get("eos_token_id")
    return {i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)}


def hf_template(src: Path, settings: dict) -> str | None:
    """The chat template: a file of its own, one text, or the one named default in a list."""
    if (path := src / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    if not isinstance(template, str | None):
        raise TypeError(f"chat_template is a {type(template).__name__}")
    return template


def sentencepiece_spec(path: Path, new: Path, special: dict[str, int], settings: dict) -> dict:
    shutil.copyfile(path, new / "tokenizer.model")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise ValueError(f"{path} is not a sentencepiece model") from None
    size = model.get_piece_size()
    special = {model.id_to_piece(i): i for i in range(size) if model.is_control(i) or model.is_unknown(i)} | special
    if plain := [t for t, i in special.items() if i in model.encode(t)]:
        raise ValueError(f"{path} finds special tokens in plain text, which is not supported: {', '.join(plain)}")
    bos = special.get(text_of(settings.get("bos_token")), model.bos_id())
    return {"kind": "sentencepiece", "file": "tokenizer.model", "special_tokens": special,
            "bos": bos if settings.get("add_bos_token", True) and bos >= 0 else None,
            "size": max([size - 1, *special.values()]) + 1}


def bpe_spec(raw: dict, new: Path, special: dict[str, int]) -> dict:
    """tokenizer.json with byte-level BPE (GPT-2, Llama 3, Qwen2, SmolLM2).  Raises ValueError on any other kind."""
    bpe, form = raw["model"], raw.get("normalizer")
    steps = [p for step in [raw.get("pre_tokenizer") or {}] for p in step.get("pretokenizers", [step])]
    if bpe.get("type") != "BPE" or bpe.get("byte_fallback") or not steps or steps[-1].get("type") != "ByteLevel":
        raise ValueError("tokenizer.json is not byte-level BPE, the only kind supported: add the model's "
                         "tokenizer.model to the folder, or convert with --no-tokenizer")
    if form is not None and form.get("type") != "NFC":
        raise ValueError(f"tokenizer.json: normalizer {form.get('type')} is not supported")
    if odd := [k for k in ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "unk_token") if bpe.get(k)]:
        raise ValueError(f"tokenizer.json: BPE option {odd[0]} is not supported")
    if steps[-1].get("add_prefix_space"):
        raise ValueError("tokenizer.json: add_prefix_space is not supported")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in bpe["merges"]]
    vocab = {i: t for t, i in bpe["vocab"].items() if i not in special.values()}
    write_ranks(new, vocab, merges, bpe.get("ignore_merges", False))
    return {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": split_pattern(steps),
            "special_tokens": special, "bos": first_token(raw.get("post_processor"), special),
            "normal_form": form and "NFC", "size": max([*vocab, *special.values()]) + 1}


def split_pattern(steps: list[dict]) -> str:
    """One regex that splits text as tokenizer.json's pre-tokenizers do one after the other."""
    *before, last = steps
    gpt2 = last.get("use_regex", True)
    if not before and gpt2:
        return GPT2
    if len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits") and gpt2:
        return DIGITS_THEN_GPT2
    if len(before) == 1 and before[0].get("type") == "Split" and not gpt2:
        cut = before[0].get("behavior"), bool(before[0].get("invert"))
        if cut in (("Isolated", False), ("Removed", True)) and "Regex" in before[0]["pattern"]:
            return before[0]["pattern"]["Regex"]
    raise ValueError(f"tokenizer.json splits text in a way not supported: {json.dumps(steps)}")


def first_token(post: dict | None, special: dict[str, int]) -> int | None:
    """The BOS that tokenizer.json's post-processor puts before a text, if any."""
    for step in (post or {}).get("processors", [post or {}]):
        if step.get("type") == "TemplateProcessing":
            front = step["single"][0].get("SpecialToken")
            return front and special[front["id"]]
    return None


def write_ranks(new: Path, vocab: dict[int, str], merges: list[tuple[str, str]], whole_words: bool) -> None:
    """Write byte-level BPE as tiktoken ranks, having checked that ranks say the same as the list of merges.

    tiktoken joins the neighbours whose union has the lowest id; the list joins only its own pairs, first pair first.
    Both agree when results come in order of id, and the two last parts of every token are a pair of the list: inside a
    longer text, whatever spans exactly a token's bytes has gone through the same steps as the token alone.
    `whole_words`: a word that is a token needs no merges, which is how tiktoken treats every word."""
    code = byte_alphabet()
    try:
        ranks = {bytes(code[c] for c in text): i for i, text in vocab.items()}
        pairs = [(bytes(code[c] for c in a), bytes(code[c] for c in b)) for a, b in merges]
        order = [ranks[a + b] for a, b in pairs]
    except (KeyError, ValueError) as error:
        raise ValueError(f"BPE vocabulary or merges are not byte-level, or do not fit each other ({error})") from None
    if any(x > y for x, y in zip(order, order[1:])):
        raise ValueError("BPE merges are not in the order of their tokens' ids: tiktoken would merge in another order")
    listed = set(pairs)
    for token in ranks:
        parts = last_parts(token, ranks)
        if len(token) > 1 and (parts not in listed if len(parts) == 2 else not whole_words):
            raise ValueError(f"BPE token {ranks[token]} ({token!r}) is not what its merges make: tiktoken would differ")
    lines = (base64.b64encode(token) + b" %d\n" % i for token, i in sorted(ranks.items(), key=lambda item: item[1]))
    (new / "tokenizer.tiktoken").write_bytes(b"".join(lines))


def last_parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """What merging by rank makes of a token's bytes, stopped when two parts are left (more: it gets stuck before)."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], 1 << 60), i) for i in range(len(parts) - 1))
        if rank == 1 << 60:
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: printable Latin-1 is itself, the rest is U+0100 upwards, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def check_tokenizer(folder: Path) -> None:
    """What was written loads, and loses no text that its vocabulary has bytes for.  Raises ValueError."""
    spec = read_config(folder)["tokenizer"]
    if spec is None:
        return
    tok = tokenizer.load(folder)
    if spec["kind"] == "sentencepiece" or tok.normal_form:
        return                              # these change text on purpose
    for text in tokenizer.CORPUS:
        text = "".join(c for c in text if all(bytes([b]) in tok.pieces for b in c.encode()))
        if (back := tok.decode(tok.encode(text))) != text:
            raise ValueError(f"the tokenizer's split pattern loses text: {text!r} comes back as {back!r}")
