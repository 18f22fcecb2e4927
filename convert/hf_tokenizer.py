"""Turns a checkpoint's tokenizer into ours: tokenizer.json or tokenizer.model of Hugging Face.

Byte-level BPE becomes tiktoken ranks, BPE in sentencepiece's style a sentencepiece model, and only where that provably
says the same as the merges; a tokenizer.model is copied.  A rule not understood stops the conversion and is named.
"""
import base64
import re
import shutil
from pathlib import Path

import sentencepiece

import tokenizer
from convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, as_control, write_model
from convert.source import read_json
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
    settings = read_json(src / "special_tokens_map.json", missing={})       # older folders name BOS and EOS only here
    settings |= read_json(src / "tokenizer_config.json", missing={})
    stops = ids_of(config) | ids_of(read_json(src / "generation_config.json", missing={}))
    try:
        return hf_spec(src, new, settings, stops), hf_template(src, settings)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{src}: its tokenizer files are damaged ({type(error).__name__} {error})") from None


def hf_spec(src: Path, new: Path, settings: dict, stops: set[int]) -> dict:
    raw = read_json(src / "tokenizer.json", missing={})
    added = {t["id"]: t for t in raw.get("added_tokens", [])}
    added |= {int(i): t for i, t in settings.get("added_tokens_decoder", {}).items() if int(i) not in added}
    old_style = read_json(src / "added_tokens.json", missing={})
    added |= {i: {"content": t} for t, i in old_style.items() if i not in added}
    if odd := [t["content"] for t in added.values() if t.get("single_word")]:
        raise ValueError(f"special tokens only between words (single_word) are not supported: {', '.join(odd)}")
    special = {t["content"]: i for i, t in added.items()}
    shown = [i for i, t in added.items() if not t.get("special", True)]
    if (src / "tokenizer.model").exists():
        spec = sentencepiece_spec(src / "tokenizer.model", new, special, settings, raw)
    elif raw.get("model", {}).get("byte_fallback"):
        spec = fallback_spec(raw, new, special, settings)
    elif raw:
        spec = bpe_spec(raw, new, special, settings)
    else:
        raise ValueError(f"{src} has no tokenizer.model or tokenizer.json: --no-tokenizer converts without one")
    names = {key: text_of(settings.get(key)) for key in ("bos_token", "eos_token")}
    stops = stops | {spec["special_tokens"][t] for t in [names["eos_token"]] if t in spec["special_tokens"]}
    swallow = {side: [i for i, t in added.items() if t.get(side)] for side in ("lstrip", "rstrip")}
    return spec | names | swallow | {"shown": shown, "eos": sorted(stops)}


def text_of(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def ids_of(config: dict) -> set[int]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if odd := [i for i in ids if type(i) is not int]:
        raise ValueError(f"eos_token_id {odd[0]!r} is not a number")
    return set(ids)


def hf_template(src: Path, settings: dict) -> str | None:
    """The chat template: a file of its own, one text, or the one named default in a list."""
    if (path := src / "chat_template.jinja").exists():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}): download it again") from None
    template = read_json(src / "chat_template.json", missing=settings).get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    if not isinstance(template, str | None):
        raise TypeError(f"chat_template is a {type(template).__name__}")
    return template


def sentencepiece_spec(path: Path, new: Path, special: dict[str, int], settings: dict, raw: dict) -> dict:
    shutil.copyfile(path, new / "tokenizer.model")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise ValueError(f"{path} is not a sentencepiece model") from None
    size = model.get_piece_size()
    special = {model.id_to_piece(i): i for i in range(size) if model.is_control(i) or model.is_unknown(i)} | special
    # Code Llama's <PRE> is an ordinary piece, others' <|im_start|> one that is looked for: no text may become them.
    if plain := {i for t, i in special.items() if i < size and model.encode(t).count(i)}:
        (new / "tokenizer.model").write_bytes(as_control(path.read_bytes(), plain))
    bos = special.get(text_of(settings.get("bos_token")), model.bos_id())
    # The file says whether a text starts with a blank; tokenizer.json, or else `legacy`, whether after a special too.
    after, before = (True, True) if settings.get("legacy", True) else (False, False)
    if raw and (rule := blanks_in_front(raw)):
        after, before = rule
    return {"kind": "sentencepiece", "file": "tokenizer.model", "special_tokens": special,
            "prefix": {"after_special": after, "before_blank": before},
            "bos": bos if settings.get("add_bos_token", True) and bos >= 0 else None,
            "size": max([size - 1, *special.values()]) + 1}


def steps_of(step: dict | None) -> list[dict]:
    """A normalizer, pre-tokenizer or post-processor of tokenizer.json as the list of its steps."""
    if step is None:
        return []
    inside = next((step[k] for k in ("normalizers", "pretokenizers", "processors") if k in step), None)
    return [step] if inside is None else [s for part in inside for s in steps_of(part)]


def check_bpe(bpe: dict, names: tuple[str, ...]) -> None:
    if bpe.get("type") != "BPE":
        raise ValueError(f"tokenizer.json holds a {bpe.get('type')} model, only BPE is supported: add the model's "
                         "tokenizer.model to the folder, or convert with --no-tokenizer")
    if odd := [k for k in ("continuing_subword_prefix", "end_of_word_suffix", "dropout", *names) if bpe.get(k)]:
        raise ValueError(f"tokenizer.json: BPE option {odd[0]} is not supported")


def merges_of(bpe: dict) -> list[tuple[str, str]]:
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in bpe["merges"]]
    if odd := [m for m in merges if len(m) != 2]:
        raise ValueError(f"BPE merge {odd[0]} is not a pair")
    return merges


def bpe_spec(raw: dict, new: Path, special: dict[str, int], settings: dict) -> dict:
    """tokenizer.json with byte-level BPE (GPT-2, Llama 3, Qwen2, SmolLM2).  Raises ValueError on any other kind."""
    bpe, forms, steps = raw["model"], steps_of(raw.get("normalizer")), steps_of(raw.get("pre_tokenizer"))
    check_bpe(bpe, ("unk_token",))
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise ValueError("tokenizer.json is neither byte-level BPE nor BPE with byte_fallback: add the model's "
                         "tokenizer.model to the folder, or convert with --no-tokenizer")
    if odd := [f.get("type") for f in forms if f.get("type") != "NFC"]:
        raise ValueError(f"tokenizer.json: normalizer {odd[0]} is not supported")
    if steps[-1].get("add_prefix_space"):
        raise ValueError("tokenizer.json: add_prefix_space is not supported")
    vocab = {i: t for t, i in bpe["vocab"].items() if i not in special.values()}
    write_ranks(new, vocab, merges_of(bpe), bpe.get("ignore_merges", False))
    return {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": split_pattern(steps),
            "special_tokens": special, "bos": first_token(raw, special, settings),
            "normal_form": "NFC" if forms else None, "size": max([*vocab, *special.values()]) + 1}


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
    # Several Splits (DeepSeek's own) cut the pieces of one another: no single regex says that, and tiktoken takes one.
    kinds = ", ".join(f"{s.get('type')} {s.get('behavior', '')}".strip() for s in steps)
    raise ValueError(f"tokenizer.json splits text in a way not supported: {kinds}")


def fallback_spec(raw: dict, new: Path, special: dict[str, int], settings: dict) -> dict:
    """tokenizer.json with BPE over characters and bytes for the rest (Llama 2, Mistral, TinyLlama, Yi), as a
    sentencepiece model: it joins the neighbours whose union has the best score, here the place of its first merge.
    A token longer than a character that no merge makes never comes out of text: CONTROL, to sentencepiece.  (UNUSED
    would not do: those are joined first and taken apart again, which can keep others from joining.)"""
    bpe, unk = raw["model"], raw["model"].get("unk_token")
    check_bpe(bpe, ("ignore_merges",))
    if lost := {unk, *(f"<0x{b:02X}>" for b in range(256))} - bpe["vocab"].keys():
        lost = min(map(str, lost))
        raise ValueError(f"tokenizer.json: byte_fallback needs unk_token and all bytes, but {lost} is missing")
    if (rule := blanks_in_front(raw)) is None:
        steps = ", ".join(s.get("type") for key in ("normalizer", "pre_tokenizer") for s in steps_of(raw.get(key)))
        raise ValueError(f"tokenizer.json with byte_fallback and {steps or 'no rule for blanks'} is not supported")
    merges, taken = merges_of(bpe), set(special.values())
    parts = {t for pair in merges for t in pair}    # some of Code Llama's merges make specials: no text may become them
    merges = [(a, b) for a, b in merges if bpe["vocab"].get(a + b) not in taken or a + b in parts]
    order = {}
    for i, (a, b) in enumerate(merges):
        order.setdefault(a + b, i)
    order |= tied_runs(merges)
    check_merges(order, merges, whole_words=True)
    if odd := [t for pair in merges for t in (*pair, "".join(pair)) if bpe["vocab"].get(t) in taken | {None}]:
        raise ValueError(f"BPE merges name {odd[0]!r}, which is no token or a special one")
    if splits_words(raw) and (odd := [t for t in order if "▁" in t[1:]]):
        raise ValueError(f"Metaspace splits text before every blank, yet token {odd[0]!r} has one inside")

    def piece(text: str) -> tuple[str, float, int]:
        if text == unk or re.fullmatch("<0x[0-9A-F]{2}>", text):
            return text, 0.0, UNKNOWN if text == unk else BYTE
        made = text in order or (len(text) == 1 and bpe["vocab"].get(text) not in taken)
        return text, -float(order.get(text, len(merges))), NORMAL if made else CONTROL

    by_id = {i: t for t, i in (special | bpe["vocab"]).items()}
    size = max(by_id) + 1
    if holes := [i for i in range(size) if i not in by_id]:
        raise ValueError(f"tokenizer.json: {len(holes)} ids have no token, the first is {holes[0]}")
    bos = first_token(raw, special, settings)
    pieces = [piece(by_id[i]) for i in range(size)]
    write_model(new / "tokenizer.model", pieces, rule != NEVER, -1, -1, bpe["vocab"][unk])
    return {"kind": "sentencepiece", "file": "tokenizer.model", "special_tokens": special, "bos": bos, "size": size,
            "prefix": {"after_special": rule[0], "before_blank": rule[1]}}


def tied_runs(merges: list[tuple[str, str]]) -> dict[str, int]:
    """{run of blanks: the order all of them share}, where that says the same as the list.  In the models of Llama 2 and
    Mistral runs have one score, the lowest, and transformers lists their pairs by length, not token by token.  Nothing
    merges out of the longest run, so that what is behind it is a shorter run on its own: twice its length shows all."""
    runs = [(len(a), len(b)) for a, b in merges if not (a + b).strip("▁")]
    first = len(merges) - len(runs)
    if not runs or any("▁▁" in a + b for a, b in merges[:first]):      # not last, or a part of something else
        return {}
    listed, tied = {pair: i for i, pair in enumerate(runs)}, dict.fromkeys(runs, 0)
    most = max(map(sum, runs))
    if any(joined_runs(n, listed) != joined_runs(n, tied) for n in range(2 * most + 1)):
        return {}
    return {"▁" * sum(pair): first for pair in runs}


def joined_runs(n: int, rank: dict[tuple[int, int], int]) -> list[int]:
    """What n blanks become: always the pair of the lowest rank, the leftmost of equals."""
    parts = [1] * n
    while found := [(rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in rank]:
        i = min(found)[1]
        parts[i:i + 2] = [sum(parts[i:i + 2])]
    return parts


NEVER = (False, True)       # in the terms of blanks_in_front


def blanks_in_front(raw: dict) -> tuple[bool, bool] | None:
    """tokenizer.json's rule for the blank in front of a text -> whether the text after a special token gets one too,
    and whether a text that starts with a blank does.  None: a rule not known here.  Prepend puts it everywhere;
    Metaspace leaves a blank that is there alone, and with "first" it looks at the start of the whole text only."""
    norm, pre = steps_of(raw.get("normalizer")), steps_of(raw.get("pre_tokenizer"))
    swap = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if norm and not pre and [s for s in norm if s != {"type": "Prepend", "prepend": "▁"}] == [swap]:
        return (True, True) if len(norm) == 2 else NEVER if len(norm) == 1 else None
    if norm or len(pre) != 1 or pre[0].get("type") != "Metaspace" or pre[0].get("replacement") != "▁":
        return None
    scheme = pre[0].get("prepend_scheme", "always" if pre[0].get("add_prefix_space", True) else "never")
    return {"always": (True, False), "first": (False, False), "never": NEVER}.get(scheme)


def splits_words(raw: dict) -> bool:
    return any(s.get("type") == "Metaspace" and s.get("split", True) for s in steps_of(raw.get("pre_tokenizer")))


def first_token(raw: dict, special: dict[str, int], settings: dict) -> int | None:
    """The BOS before a text, if any: tokenizer_config.json's add_bos_token, else what tokenizer.json's post-processor
    puts there (what it puts at the end is left out: a prompt goes on)."""
    if "add_bos_token" in settings:
        return special.get(text_of(settings.get("bos_token"))) if settings["add_bos_token"] else None
    for step in steps_of(raw.get("post_processor")):
        if step.get("type") == "TemplateProcessing":
            front = step["single"][0].get("SpecialToken")
            return front and special[front["id"]]
        if step.get("type") != "ByteLevel":
            raise ValueError(f"tokenizer.json: post-processor {step.get('type')} is not supported")
    return None


def write_ranks(new: Path, vocab: dict[int, str], merges: list[tuple[str, str]], whole_words: bool) -> None:
    """Write byte-level BPE as tiktoken ranks, having checked that ranks say the same as the list of merges.
    `whole_words`: a word that is a token needs no merges, which is how tiktoken treats every word."""
    code = byte_alphabet()
    try:
        ranks = {bytes(code[c] for c in text): i for i, text in vocab.items()}
        pairs = [(bytes(code[c] for c in a), bytes(code[c] for c in b)) for a, b in merges]
        {ranks[a + b] for a, b in pairs}
    except KeyError as error:
        raise ValueError(f"BPE vocabulary or merges are not byte-level, or do not fit each other ({error})") from None
    check_merges(ranks, pairs, whole_words)
    lines = (base64.b64encode(token) + b" %d\n" % i for token, i in sorted(ranks.items(), key=lambda item: item[1]))
    (new / "tokenizer.tiktoken").write_bytes(b"".join(lines))


def check_merges(ranks: dict, pairs: list[tuple], whole_words: bool) -> None:
    """ValueError unless joining the neighbours whose union has the lowest rank, the leftmost of equals, is what the
    list of merges does (only its own pairs, the first pair first).

    Both agree when results come in order of rank, and the two last parts of every token are a pair of the list: inside
    a longer text, whatever spans exactly a token has gone through the same steps as the token alone."""
    order = [ranks[a + b] for a, b in pairs]
    if any(x > y for x, y in zip(order, order[1:])):
        raise ValueError("BPE merges are not in the order of their tokens: joining by rank would differ")
    listed = set(pairs)
    for token in ranks:
        parts = last_parts(token, ranks)
        if len(token) > 1 and (parts not in listed if len(parts) == 2 else not whole_words):
            raise ValueError(f"BPE token {token!r} is not what its merges make: joining by rank would differ")


def last_parts(token, ranks: dict) -> tuple:
    """What joining by rank makes of a token's bytes or letters, stopped at two parts (more are left: it gets stuck)."""
    parts = [token[i:i + 1] for i in range(len(token))]
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
    try:
        tok = tokenizer.load(folder)
    except ValueError as error:             # it names the folder and what to do; both are of no use while it is being made
        why = str(error).removeprefix(f"{folder}: ").removesuffix(": convert the checkpoint again")
        raise ValueError(f"the checkpoint's {why}") from None
    if spec["kind"] == "sentencepiece" or tok.normal_form:
        return                              # these change text on purpose
    for text in tokenizer.CORPUS:
        text = "".join(c for c in text if all(bytes([b]) in tok.pieces for b in c.encode()))
        if (back := tok.decode(tok.encode(text))) != text:
            raise ValueError(f"the tokenizer's split pattern loses text: {text!r} comes back as {back!r}")
