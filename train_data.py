"""What a drafter learns from: texts that the target itself wrote and its features for every token of them, kept on disk.

A drafter is used on the target's own text, so it is trained on that: at temperature 0 and at 1, because it will have to
guess at both.  The features cost nothing: the rounds that write a text compute them anyway.  Plain text (--text) comes at
half the price, a prefill, and teaches less: what the target would say about words that are not its own.
A shard is one batch of texts, written whole or not at all, so an interruption costs one batch at most.
"""
import json
import lzma
import os
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import tokenizer as tokenizers
from generate import compile_round, generate, make_state, warm_up
from model import KVCache
from sample import Sampling
from speculate import Draft

HELD_OUT = 12                                   # one prompt in so many is never trained on
TEMPERATURES = 0.0, 1.0, 1.0                    # of a prompt's first, second, third text
LONGEST, NEW, BATCH = 256, 160, 96              # prompt tokens (longer ones are left out), tokens written, texts a shard
PASSAGE, FEW = 256, 8                           # tokens of a piece of plain text, pieces fed at once


def is_held_out(prompt: str | None) -> bool:
    """A property of the prompt alone: the same in every run, whatever other prompts there are.  Plain text has none."""
    return prompt is not None and zlib.crc32(prompt.encode()) % HELD_OUT == 0


def read_prompts(path) -> list[str]:
    """{"prompt": text} a line, or plain text, one prompt a line.  ValueError when there is none."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
        prompts = [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no prompts ({error}): one a line, plain or as {{\"prompt\": ...}}") from None
    if not prompts:
        raise ValueError(f"{path} is empty: give one prompt a line")
    return list(dict.fromkeys(prompts))


class Recorder(nn.Module):
    """A drafter that guesses nothing and keeps what the tapped layers say: features (B, S, len(taps)*dim)."""
    nodes = 0

    def __init__(self, taps, state, dim: int):
        super().__init__()
        self.taps = taps
        self.register_buffer("features", torch.zeros(*state.tokens.shape, len(taps) * dim, dtype=torch.bfloat16,
                                                     device=state.pos.device))
        self.register_buffer("fed", torch.zeros_like(state.pos))        # the slot this round's token is fed to

    def start(self, state, begin, hidden):
        self.features[:, :hidden.shape[1]] = hidden
        self.fed.copy_(state.pos)

    def propose(self, state, sampling):
        return Draft(state.tokens[:, :0])

    def observe(self, state, out, n, hidden, p):
        self.features[torch.arange(len(n), device=n.device), self.fed] = hidden[:, 0].to(torch.bfloat16)
        self.fed.copy_(state.pos)


@torch.no_grad()
def write_texts(target, tokens, template, prompts: list[str], taps, folder: Path, stop, note) -> None:
    """Write the shards that are missing in folder until stop() says so: shard i always holds the same texts."""
    folder.mkdir(parents=True, exist_ok=True)
    shuffled = random.Random(0).sample(prompts, len(prompts))
    ids = {p: tokenizers.first_turn(template, p, tokens) for p in shuffled}
    plan = [(p, turn) for turn in range(len(TEMPERATURES)) for p in shuffled if len(ids[p]) <= LONGEST]
    shards = {folder / f"{i:04}.safetensors": plan[at:at + BATCH] for i, at in enumerate(range(0, len(plan), BATCH))}
    todo = {path: texts for path, texts in shards.items() if not path.exists()}
    if not todo or stop():
        return
    state = make_state(target, BATCH, LONGEST + NEW, 0, tokens.eos)
    drafter, sampling, step = Recorder(taps, state, target.config.dim), Sampling(BATCH, device=state.pos.device), compile_round()
    warm_up(step, target, drafter, state, sampling, LONGEST)
    for path, texts in todo.items():
        if stop():
            return
        batch = (texts * BATCH)[:BATCH]                                 # the last one is filled up with texts thrown away
        sampling.set([TEMPERATURES[turn] for _, turn in batch], seed=[zlib.crc32(f"{turn} {p}".encode()) for p, turn in batch])
        state.pos.fill_(-1)
        for _ in generate(target, drafter, state, sampling, [ids[p] for p, _ in batch], [NEW] * BATCH, step):
            pass
        ends = (state.pos + 1).tolist()[:len(texts)]
        about = [{"prompt": p, "temperature": TEMPERATURES[turn], "start": len(ids[p]), "length": n}
                 for (p, turn), n in zip(texts, ends)]
        save_shard(path, torch.cat([state.tokens[i, :n] for i, n in enumerate(ends)]),
                   torch.cat([drafter.features[i, :n] for i, n in enumerate(ends)]), about, taps)
        note(f"{path}: {len(texts)} texts, {sum(ends):,} tokens; {len(shards) - sum(p.exists() for p in shards)} to go")


def read_passages(path: Path, tokens) -> list[Tensor]:
    """A text file, plain or .xz, in pieces of PASSAGE tokens, shuffled: always in the same order."""
    try:
        data = path.read_bytes()
        ids = tokens.encode((lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8"))
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} cannot be read ({error}): give UTF-8 text, plain or .xz") from None
    if len(ids) < PASSAGE:
        raise ValueError(f"--text {path} has {len(ids)} tokens: give {PASSAGE} or more")
    passages = [torch.tensor(ids[at:at + PASSAGE]) for at in range(0, len(ids) - PASSAGE + 1, PASSAGE)]
    return random.Random(0).sample(passages, len(passages))


@torch.no_grad()
def write_passages(target, passages: list[Tensor], taps, folder: Path, stop, note) -> None:
    """As write_texts, for plain text: what the target's layers say about it, all its tokens counting as written."""
    folder.mkdir(parents=True, exist_ok=True)
    device = target.embed.weight.device
    begin, cache = torch.zeros(FEW, dtype=torch.int64, device=device), KVCache(target.config, FEW, PASSAGE, device)
    for i, at in enumerate(range(0, len(passages), BATCH)):
        path, whole, features = folder / f"plain{i:04}.safetensors", torch.stack(passages[at:at + BATCH]), []
        if path.exists():
            continue
        for few in whole.split(FEW):
            if stop():
                return
            fed = F.pad(few, (0, 0, 0, FEW - len(few))).to(device)              # one shape, one cache
            tapped = target(fed, begin, cache, PASSAGE, taps=taps)[1][:len(few)]
            features.append(tapped.to(torch.bfloat16).cpu().flatten(0, 1))
        about = [{"prompt": None, "temperature": None, "start": 1, "length": PASSAGE}] * len(whole)
        save_shard(path, whole.flatten(), torch.cat(features), about, taps)
        note(f"{path}: {whole.numel():,} tokens of plain text")


def save_shard(path: Path, tokens: Tensor, features: Tensor, about: list[dict], taps) -> None:
    """All texts of a shard end to end, whole or not at all: tokens (N,), features (N, len(taps)*dim), and what each text is."""
    save_file({"tokens": tokens.int().cpu(), "features": features.cpu()}, path.with_suffix(".part"),
              metadata={"texts": json.dumps(about), "taps": json.dumps(taps)})
    os.replace(path.with_suffix(".part"), path)


@dataclass
class Text:
    """One text of the target: tokens (T,), features (T, len(taps)*dim) bfloat16; tokens[start:] is what the target wrote.
    The last token was never fed, so its features mean nothing.  Plain text has neither prompt nor temperature."""
    prompt: str | None
    temperature: float | None
    start: int
    tokens: Tensor
    features: Tensor


def recorded_taps(folder: Path, wanted: tuple) -> tuple:
    """The layers whose features the shards of folder hold, `wanted` or more; `wanted` where there is none yet."""
    if not (path := next(folder.glob("*.safetensors"), None)):
        return wanted
    with safe_open(path, "pt") as file:
        recorded = tuple(json.loads(file.metadata()["taps"]))
    if missing := [i for i in wanted if i not in recorded]:
        raise ValueError(f"{folder} holds the layers {recorded}, not {missing[0]}: remove it, or name another by --texts")
    return recorded


def read_texts(folder: Path, taps) -> list[Text]:
    """All texts of the shards.  ValueError when there are none, or when other layers were tapped."""
    texts = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            about, tapped = (json.loads(file.metadata()[key]) for key in ("texts", "taps"))
            tokens, features = file.get_tensor("tokens"), file.get_tensor("features")
        if tapped != list(taps):
            raise ValueError(f"{path} holds the layers {tapped}, not {list(taps)}: remove {folder} or name another")
        lengths = [t.pop("length") for t in about]
        texts += [Text(**t, tokens=x.long(), features=f)
                  for t, x, f in zip(about, tokens.split(lengths), features.split(lengths))]
    if not texts:
        raise ValueError(f"{folder} holds no texts: run train.py texts first")
    return texts
