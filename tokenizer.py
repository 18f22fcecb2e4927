"""Text <-> ids: tiktoken and sentencepiece behind encode / decode / a streaming decoder, and chat prompts.

Reads what convert_weights.py wrote: the "tokenizer" part of config.json names the file beside it and the kind.
Text never turns into a special id: only a chat template, or the caller, can write those.
"""
import base64
import codecs
import datetime
import json
import re
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import tiktoken
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model import read_config

# What tokenizers disagree on: digits beside spaces, contractions, runs of blanks, combining marks, emoji, scripts.
CORPUS = (" ½ ²  ৩ 12", "  12 \n\n 3\t4  \n", "It's we'll THEY'RE O'Neil 'tis", "a  b   c\r\n\r\n\td    ",
          "é e\u0301 naïve ﬁ Å", "👩‍👩‍👧‍👦 🏳️‍🌈 🇳🇴👍🏽", "漢字かな交じり文 한국어",
          "السَّلامُ عليكم ١٢٣", "for (i=0;i<10;i++){ x[i]+=0x1F; } // --> done!!!", "1234567 3.14159 1,000,000",
          "<|im_start|>user</s><s>[INST]", "\u00a0\u2003\u200b\ufeff", "Ж ж й हिन्दी ไทย ꙮ 𝔘𝔫𝔦", "...?!! -- __init__")
BLANKS = r"[^\S\x1c-\x1f]*"         # Unicode's White_Space: what tokenizers means by blanks; Python has four more


@dataclass(frozen=True)
class Tokenizer:
    ordinary: Callable[[str, bool], list[int]]  # the library's own encoder, blind to special tokens
    pieces: list[bytes]                     # by id; a special token's own text for special tokens
    special_tokens: dict[str, int]
    hidden: frozenset[int]                  # special ids nobody wants to read: decode and Stream skip them
    bos: int | None                         # None: the model was trained without one in front
    eos: tuple[int, ...]
    bos_token: str = ""                     # what a chat template calls by these names
    eos_token: str = ""
    normal_form: str | None = None          # e.g. NFC (Qwen), applied before anything else
    lstrip: frozenset[int] = frozenset()    # specials that swallow the blanks before them in a template's text,
    rstrip: frozenset[int] = frozenset()    # and those behind them

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, first: bool = True) -> list[int]:
        """Ordinary text to ids, no BOS; the text of a special token is plain text here.  ValueError on a surrogate.
        first: it starts a conversation, no special token before it (some put a blank only there)."""
        if bad := re.search("[\ud800-\udfff]", text):
            raise ValueError(f"lone surrogate U+{ord(bad[0]):04X} at character {bad.start()}: the text is not Unicode")
        return self.ordinary(unicodedata.normalize(self.normal_form, text) if self.normal_form else text, first)

    def prompt(self, text: str) -> list[int]:
        return ([] if self.bos is None else [self.bos]) + self.encode(text)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token, special ones included (which `decode` hides).  ValueError on an unknown id."""
        if not 0 <= id < len(self.pieces):
            raise ValueError(f"token id {id} is not in 0..{len(self.pieces) - 1}")
        return self.pieces[id]

    def visible_bytes(self, ids) -> bytes:
        return b"".join(self.token_bytes(i) for i in ids if i not in self.hidden)

    def decode(self, ids) -> str:
        """The text of ids, control tokens left out.  Nothing is trimmed: the blank that sentencepiece models put before
        a text is shown, because in the middle of a text that same blank is a real one."""
        return self.visible_bytes(ids).decode("utf-8", "replace")


class Stream:
    """Decodes ids as they come: a character split over tokens is held back until it is whole.  All output together is
    decode(all ids)."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids) -> str:
        return self.decoder.decode(self.tokenizer.visible_bytes(ids))

    def end(self) -> str:
        return self.decoder.decode(b"", final=True)


def load(folder) -> Tokenizer:
    """The tokenizer of a folder written by convert_weights.py.  ValueError when a file is missing or damaged."""
    config = read_config(folder)
    spec = config.get("tokenizer")
    if spec is None:
        raise ValueError(f"{folder} has no tokenizer: it was converted with --no-tokenizer")
    kinds = {"tiktoken": load_tiktoken, "sentencepiece": load_sentencepiece}
    try:
        path = Path(folder) / spec["file"]
        special = spec["special_tokens"]
        hidden = frozenset(special.values()) - set(spec.get("shown", []))
        pieces, ordinary = kinds[spec["kind"]](path, spec)
        pieces, form = fill(pieces, special), spec.get("normal_form")
        if len(pieces) > (most := config["model"].get("tokens") or config["model"]["vocab_size"]):
            raise ValueError(f"{len(pieces)} tokens, but the model knows {most}")
        if stray := {*spec["eos"], spec["bos"]} - {None, *range(len(pieces))}:
            raise ValueError(f"bos or eos {sorted(stray)} is no token")
        unicodedata.normalize(form or "NFC", "é")       # an unknown form shows here, not at the first text
        return Tokenizer(ordinary, pieces, special, hidden, spec["bos"], tuple(spec["eos"]),
                         spec.get("bos_token") or "", spec.get("eos_token") or "", form,
                         frozenset(spec.get("lstrip", ())), frozenset(spec.get("rstrip", ())))
    except (KeyError, TypeError, AttributeError, ValueError, OSError, RuntimeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{folder}: tokenizer missing or damaged ({reason}): convert the checkpoint again") from None


def fill(pieces: dict[int, bytes], special: dict[str, int]) -> list[bytes]:
    """All tokens by id.  A hole means lines of the file are lost: every id below the highest must exist."""
    pieces = pieces | {i: text.encode() for text, i in special.items()}
    if holes := [i for i in range(max(pieces) + 1) if i not in pieces]:
        raise ValueError(f"{len(holes)} ids have no token, the first is {holes[0]}")
    return [pieces[i] for i in range(len(pieces))]


def load_tiktoken(path: Path, spec: dict):
    """-> ({id: bytes}, encoder).  The file: `base64(token) rank` lines; rank is id and merge order in one."""
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token, validate=True)] = int(rank)
    # tiktoken dies on a byte it has no token for, and some vocabularies lack a few: stand-ins past the last id.
    size = max([*ranks.values(), *spec["special_tokens"].values()]) + 1
    missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
    stand_ins = {token: size + i for i, token in enumerate(missing)}
    encoding = tiktoken.Encoding("", pat_str=spec["pattern"], mergeable_ranks=ranks | stand_ins, special_tokens={})

    def ordinary(text: str, first: bool) -> list[int]:
        ids = [i for part in short_blanks(text) for i in encoding.encode_ordinary(part)]
        kept = [i for i in ids if i < size]
        if lost := [missing[i - size].hex() for i in ids if i >= size]:
            which = " ".join(sorted(set(lost)))
            warnings.warn(f"{len(lost)} bytes dropped: this model's vocabulary does not have {which}", stacklevel=3)
        return kept

    return {i: token for token, i in ranks.items()}, ordinary


def short_blanks(text: str, most: int = 100_000):
    """Cut text where a run of blanks is longer than `most`: the usual `\\s+(?!\\S)` keeps a backtracking state for each
    blank, and tiktoken aborts on half a million.  Inside such a run only, ids may differ from one uncut run's."""
    start = 0
    for run in re.finditer(r"\s+", text) if len(text) > most else ():
        for cut in range(run.start() + most, run.end(), most):
            yield text[start:cut]
            start = cut
    yield text[start:]


def load_sentencepiece(path: Path, spec: dict):
    """-> ({id: bytes}, encoder).  Control pieces are never matched in text: sentencepiece sees to that itself."""
    file, rule = path.read_bytes(), spec.get("prefix", {"after_special": True, "before_blank": True})
    model, bare = sentencepiece.SentencePieceProcessor(), sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(file)
    # Of a protobuf field that occurs twice the last one counts: normalizer_spec { add_dummy_prefix: false }
    bare.LoadFromSerializedProto(file + b"\x1a\x02\x18\x00")
    pieces = {}
    for i in range(model.get_piece_size()):
        piece = model.id_to_piece(i)
        pieces[i] = bytes([int(piece[1:-1], 16)]) if model.is_byte(i) else piece.replace("▁", " ").encode()

    def ordinary(text: str, first: bool) -> list[int]:
        blank = (first or rule["after_special"]) and (rule["before_blank"] or not text.startswith((" ", "▁")))
        ids = (model if blank else bare).encode(text)
        if unknown := ids.count(model.unk_id()):
            warnings.warn(f"{unknown} characters of the text are unknown to this model's vocabulary", stacklevel=3)
        return ids

    return pieces, ordinary


def chat(template: str | None, messages: list[dict], tokenizer: Tokenizer, add_generation_prompt=True) -> list[int]:
    """Ids of a conversation [{"role", "content"}, ...] as the model's own Jinja template writes it; BOS exactly once.
    Special tokens that the template writes become ids, the same text inside a message stays text.
    ValueError when there is no template, a message is not role + content, or the template refuses the conversation."""
    if not template:
        raise ValueError("this model has no chat template: give it a plain prompt")
    for message in messages:
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise ValueError(f"a chat message is {{'role': text, 'content': text}}, not {message!r}")
        if forged := [s for s in tokenizer.special_tokens if s in message["role"]]:
            raise ValueError(f"role {message['role']!r} holds the special token {forged[0]}")
    specials = "|".join(re.escape(s) for s in sorted(tokenizer.special_tokens, key=len, reverse=True)) or "(?!)"
    used = template + "".join(message["content"] for message in messages)
    guard, fence = [c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used][:2]      # private-use characters

    def protect(content: str) -> str:
        # A guard marks every special inside; fences stop one from forming across the border with the template's text.
        # They stand inside the outer blanks, so that a template's `trim` finds what it would have found, and only where
        # text could be part of a special: a template may ask how a message starts.
        core = content.strip()
        marked = re.sub(f"(?={specials})", guard, core)
        part = any(core in s or any(core.startswith(s[i:]) or core.endswith(s[:i]) for i in range(1, len(s)))
                   for s in tokenizer.special_tokens)
        return content.replace(core, fence + marked + fence if part else marked) if core else content

    safe = [message | {"content": protect(message["content"])} for message in messages]
    text = render(template, safe, tokenizer, add_generation_prompt)
    parts, ids = re.split(f"(?<!{guard})({specials})", text), []     # text, special, text, special, ..., text
    for i, part in enumerate(parts):
        if i % 2:
            ids.append(tokenizer.special_tokens[part])
            continue
        part = part.replace(guard, "").replace(fence, "")
        if i and tokenizer.special_tokens[parts[i - 1]] in tokenizer.rstrip:
            part = re.sub(rf"^{BLANKS}", "", part)
        if parts[i + 1:] and tokenizer.special_tokens[parts[i + 1]] in tokenizer.lstrip:
            part = re.sub(rf"{BLANKS}$", "", part)
        ids += tokenizer.encode(part, first=i == 0)
    if tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    return ids


def first_turn(template: str | None, text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt as a user's first message; of the bare text for a model without a template."""
    return chat(template, [{"role": "user", "content": text}], tokenizer) if template else tokenizer.prompt(text)


def render(template: str, messages: list[dict], tokenizer: Tokenizer, add_generation_prompt: bool) -> str:
    """The template's text, in the environment Hugging Face gives templates.  It came with a download: sandboxed."""
    def raise_exception(message):
        raise ValueError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return env.from_string(template).render(messages=messages, add_generation_prompt=add_generation_prompt,
                                                bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    except Exception as error:      # a template is a program of unknown origin: whatever it raises is its refusal
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template refuses this conversation: {why}") from None


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the text to train on.  Here it is text like any other."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def compare(a: Tokenizer, b: Tokenizer) -> str | None:
    """None when two tokenizers give the same ids for the same text, and every id that both have means the same; else
    one line naming the first difference.  What cannot matter to a draft is left out: the BOS (a draft is fed the
    target's prompt, BOS included), how a chat is written, and special tokens past the end of the smaller vocabulary
    (no text becomes one, and an id that only one of the two models has is never proposed)."""
    n = min(a.vocab_size, b.vocab_size)
    special = [{i for i in t.special_tokens.values() if i < n} for t in (a, b)]
    for i, (x, y) in enumerate(zip(a.pieces, b.pieces)):
        if x != y:
            return f"token {i} is {x!r} in one tokenizer and {y!r} in the other"
    if odd := special[0] ^ special[1]:
        return f"token {min(odd)}, {a.pieces[min(odd)]!r}, is special in one tokenizer and plain text in the other"
    for t, other in ((a, b), (b, a)):
        if rest := sorted(set(range(n, t.vocab_size)) - set(t.special_tokens.values())):
            return f"token {rest[0]}, {t.pieces[rest[0]]!r}, is missing in the tokenizer of {other.vocab_size} tokens"
    ordinary = [piece for i, piece in enumerate(a.pieces[:n]) if i not in special[0]]
    with warnings.catch_warnings(action="ignore"):
        for text in (*CORPUS, *(sep.join(ordinary).decode("utf-8", "ignore") for sep in (b"\n", b""))):
            x, y = a.encode(text), b.encode(text)
            if x != y:
                i = next((i for i, (s, t) in enumerate(zip(x, y)) if s != t), min(len(x), len(y)))
                return f"{a.decode(x[i:i + 8])!r} is {x[i:i + 8]} for one tokenizer and {y[i:i + 8]} for the other"
    return None
