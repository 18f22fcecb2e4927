"""A GGUF's vocabulary -> the tokenizer's file, and its part of our config.json."""
import math
import re
from pathlib import Path

from convert.hf_tokenizer import DIGITS_THEN_GPT2, GPT2, LLAMA3, QWEN2, write_ranks
from convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, write_model

# "tokenizer.ggml.pre" names the way text is split.  Tekken is Mistral's since NeMo.
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {"gpt-2": GPT2, "smollm": DIGITS_THEN_GPT2, "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3,
            "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "tekken": TEKKEN}
WHOLE_WORDS = (LLAMA3, TEKKEN)      # a word that is a token needs no merges; these begin with a BOS unless told not to
READ = {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_space_prefix"}
OFF = {"add_eos_token", "add_sep_token", "remove_extra_whitespaces"}        # neutral as long as they are false
MARKER = r"<\S+>|\[\S+\]"           # <|im_end|>, <think>, [INST]


def gguf_tokenizer(facts: dict, new: Path) -> dict:
    """Like hf_tokenizer, from a GGUF's metadata: `gpt2` is byte-level BPE, `llama` is sentencepiece.  Control tokens
    are special, and so are added ones that look like it or start or end texts: plain text never turns into them."""
    facts = {k.removeprefix("tokenizer.ggml."): v for k, v in facts.items() if k.startswith("tokenizer.ggml.")}
    kind, pre = facts.get("model"), facts.get("pre", "default")
    if not (kind == "llama" and pre == "default" or kind == "gpt2" and pre in [*PATTERNS]):
        raise ValueError(f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported: llama with default is, "
                         f"and gpt2 with {', '.join(PATTERNS)}")
    if odd := sorted(k for k in facts.keys() - READ - OFF if not k.endswith("_token_id")):
        raise ValueError(f"tokenizer metadata that is not understood: {', '.join(odd)}")
    if odd := sorted(k for k in OFF if flag(facts, k, False)):
        raise ValueError(f"GGUF tokenizer with {', '.join(odd)} is not supported")
    tokens, types = vocabulary(facts)
    bos, *ends = (token_id(facts, f"{k}_token_id", tokens) for k in ("bos", "eos", "eot", "eom"))
    marks = {i for i, t in enumerate(types)
             if t == USER_DEFINED and (i in (bos, *ends) or re.fullmatch(MARKER, tokens[i]))}
    types = [CONTROL if i in marks else t for i, t in enumerate(types)]
    add_bos = flag(facts, "add_bos_token", kind == "llama" or PATTERNS[pre] in WHOLE_WORDS)
    if add_bos and bos is None:
        raise ValueError("this GGUF puts a BOS before texts, yet lacks bos_token_id")
    write = write_sentencepiece if kind == "llama" else write_byte_level
    name = lambda i: None if i is None else tokens[i]
    return write(facts, new, tokens, types, bos, ends[0]) | {
        "bos": bos if add_bos else None, "bos_token": name(bos), "eos_token": name(ends[0]),
        "eos": [i for i in ends if i is not None], "shown": sorted(marks - {bos, *ends}), "size": len(tokens)}


def vocabulary(facts: dict) -> tuple[list[str], list[int]]:
    """-> the tokens and their types, without the padding at the end."""
    tokens, types = listed(facts, "tokens", str), listed(facts, "token_type", int)
    if len(tokens) != len(types) or not set(types) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise ValueError(f"GGUF token_type must be 1 to 6 for each of the {len(tokens)} tokens")
    size = max((i + 1 for i, t in enumerate(types) if t != UNUSED), default=0)
    return tokens[:size], types[:size]


def write_byte_level(facts: dict, new: Path, tokens: list[str], types: list[int], *_) -> dict:
    if flag(facts, "add_space_prefix", False):
        raise ValueError("GGUF tokenizer gpt2 with add_space_prefix is not supported")
    if odd := [repr(tokens[i]) for i, t in enumerate(types) if t in (USER_DEFINED, BYTE)]:
        raise ValueError(f"GGUF tokenizer gpt2 that finds added tokens in text is not supported: {', '.join(odd)}")
    pattern, merges = PATTERNS[facts["pre"]], [tuple(m.split(" ")) for m in listed(facts, "merges", str)]
    if odd := [m for m in merges if len(m) != 2]:
        raise ValueError(f"GGUF merges must be two parts and a blank between, not {' '.join(odd[0])!r}")
    write_ranks(new, {i: tokens[i] for i, t in enumerate(types) if t == NORMAL}, merges, pattern in WHOLE_WORDS)
    return {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": pattern,
            "special_tokens": {tokens[i]: i for i, t in enumerate(types) if t != NORMAL},   # unused ones too: no holes
            "normal_form": "NFC" if pattern == QWEN2 else None}     # Qwen's tokenizer.json has it; a GGUF does not say


def write_sentencepiece(facts: dict, new: Path, tokens: list[str], types: list[int], bos: int | None,
                        eos: int | None) -> dict:
    scores = listed(facts, "scores", float)[:len(tokens)]
    merged = {s for s, text, t in zip(scores, tokens, types) if t == NORMAL and len(text) > 1}
    if len(scores) < len(tokens) or not all(map(math.isfinite, scores)) or len(merged) == 1:
        raise ValueError("GGUF scores must be finite numbers, one for each token, that say what merges first")
    if UNKNOWN not in types:
        raise ValueError("this GGUF's vocabulary lacks an unknown token")
    # llama.cpp's converter writes the blanks of added tokens as blanks, sentencepiece looks for its own sign.
    pieces = [(text.replace(" ", "▁") if t == USER_DEFINED else text, score, t)
              for text, score, t in zip(tokens, scores, types)]
    control = lambda i: -1 if i is None or types[i] != CONTROL else i
    write_model(new / "tokenizer.model", pieces, flag(facts, "add_space_prefix", True), control(bos), control(eos),
                types.index(UNKNOWN))
    return {"kind": "sentencepiece", "file": "tokenizer.model",
            "special_tokens": {tokens[i]: i for i, t in enumerate(types) if t in (UNKNOWN, CONTROL)}}


def listed(facts: dict, key: str, kind: type) -> list:
    value = facts.get(key)
    if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
        raise ValueError(f"this GGUF lacks tokenizer.ggml.{key}, or it is no list of {kind.__name__}")
    return value


def flag(facts: dict, key: str, default: bool) -> bool:
    if not isinstance(value := facts.get(key, default), bool):
        raise ValueError(f"GGUF {key} is {value!r}, not true or false")
    return value


def token_id(facts: dict, key: str, tokens: list[str]) -> int | None:
    if (i := facts.get(key)) is not None and not (isinstance(i, int) and 0 <= i < len(tokens)):
        raise ValueError(f"GGUF {key} {i!r} is no token: there are {len(tokens)}")
    return i
