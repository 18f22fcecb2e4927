"""Trains a drafter for a target on the target's own text:

    python train.py eagle --target models/smollm2-135m --prompts prompts.jsonl --out models/smollm2-135m-eagle --minutes 60

First the target writes texts (train_data.py), in as much of the time as they take; they are kept and used again by the next
drafter.  Then the drafter learns to say what the target would: cross-entropy against the target's distribution, at every
position and for every guess of a chain.  Stops at any time; --resume goes on where it was.
"""
import argparse
import json
import math
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_dflash import DFlash
from draft_medusa import RANKS
from draft_trained import KINDS, borrow, fingerprint, own_weights
from load import open_checkpoint
from options import DEFAULT_TARGET, Parser
from output import note
from train_data import (BATCH, TEMPERATURES, Text, is_held_out, read_passages, read_prompts, read_texts, recorded_taps,
                        write_passages, write_texts)

ROWS = 4                # texts a step
WARM_UP = 50            # steps
ANCHORS = 0.25          # of the positions, from which a DFlash guesses in one step: its blocks cost several tokens each
SAMPLE = 40             # groups of texts whose distributions say which tokens are frequent


# ---- the loss ---------------------------------------------------------------------------------------------------------------

def batches(texts: list[Text], seed: int) -> list[list[Text]]:
    """Texts of about one length together, in random order."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=g).tolist()
    pools = [order[i:i + 32 * ROWS] for i in range(0, len(order), 32 * ROWS)]
    groups = [sorted(pool, key=lambda i: len(texts[i].tokens))[at:at + ROWS] for pool in pools
              for at in range(0, len(pool), ROWS)]
    return [[texts[i] for i in groups[j]] for j in torch.randperm(len(groups), generator=g).tolist()]


def stack(texts: list[Text], device, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """-> tokens (B, T), features (B, T, .), written (B, T): positions whose features say what the target wrote next."""
    T = max(len(t.tokens) for t in texts)
    tokens = torch.stack([F.pad(t.tokens, (0, T - len(t.tokens))) for t in texts])
    features = torch.stack([F.pad(t.features, (0, 0, 0, T - len(t.tokens))) for t in texts])
    at = torch.arange(T)
    written = torch.stack([(at >= t.start - 1) & (at < len(t.tokens) - 1) for t in texts])
    return tokens.to(device), features.to(device, dtype), written.to(device)


def ahead(x: Tensor, s: int) -> Tensor:
    """x (B, T, ...) -> the same, position t holding what was at t + s; zeros past the end."""
    return torch.cat((x[:, s:], torch.zeros_like(x[:, :s])), 1)


def tapped(model, features: Tensor) -> Tensor:
    """Of the features that are on disk, those of the layers that this drafter reads."""
    dim = model.config.dim
    return torch.cat([features[..., i * dim:(i + 1) * dim] for i in model.columns] + [features[..., :0]], -1)


def anchors(written: Tensor) -> Tensor:
    """Some positions of every row at random, after which the target wrote a token -> (B, A)."""
    A = max(1, int(ANCHORS * written.sum(1).float().mean().item()))
    return (ahead(written, 1) + 1e-6).multinomial(A)            # a hair: where a row has too few, others fill up, uncounted


def loss_of(model, target, tokens, features, written, depth: int) -> Tensor:
    """Mean over the guesses of -sum(p log q), p being the target's distribution over the tokens that can be guessed.  The
    s-th guess from position t is about the distribution after position t + 1 + s; later guesses matter less, since they
    count only where the earlier ones were kept: 0.8**s, as DFlash's exp(-s / 4.5)."""
    with torch.no_grad():
        p = F.linear(target.norm(features[..., -target.config.dim:]), model.output).softmax(-1)     # (B, T, R)
    total = 0.0
    seen = F.dropout(tapped(model, features), 0.1)      # or it learns the few texts there are by heart: 0.91 kept of those, 0.55 else
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    asked = (rows, anchors(written)) if isinstance(model, DFlash) else ()                       # (): at every position
    for s, guessed in enumerate(model.unroll(tokens, seen, depth, *asked[1:])):
        counts = ahead(written, 1 + s)[asked]
        q = model.logits(guessed[counts]).log_softmax(-1)
        total = total - 0.8 ** s * (ahead(p, 1 + s)[asked][counts] * q).sum(-1).mean()
    return total / sum(0.8 ** s for s in range(depth))


@torch.no_grad()
def acceptance(model, target, texts: list[Text], depth: int) -> dict[float, list[float]]:
    """{temperature of the texts: the share of guesses kept, by depth, among those whose predecessors were}.  At 0 a guess is
    kept when it is the token that was written, at 1 with probability sum(min(p, q))."""
    kept = {}
    for text in texts:
        tokens, features, written = stack([text], model.output.device, model.output.dtype)
        p = target.head(target.norm(features[..., -target.config.dim:])).softmax(-1)
        weight = torch.ones(tokens.shape, device=tokens.device)
        for s, guessed in enumerate(model.unroll(tokens, tapped(model, features), depth)):
            q = model.logits(guessed).softmax(-1)
            if text.temperature == 0:
                share = (model.vocab[q.argmax(-1)] == ahead(tokens, 2 + s)).float()
            else:
                share = torch.minimum(ahead(p, 1 + s)[..., model.vocab], q).sum(-1)
            counts = ahead(written, 1 + s)
            tried, won = kept.setdefault(text.temperature, [[0.0, 0.0] for _ in range(depth)])[s], weight * share
            tried[0] += (weight * counts).sum().item()
            tried[1] += (won * counts).sum().item()
            weight = won
    return {t: [round(b / max(a, 1e-9), 3) for a, b in pairs] for t, pairs in sorted(kept.items())}


@torch.no_grad()
def rank_rates(model, texts: list[Text]) -> list[list[float]]:
    """[head][rank]: how often this choice of this head was the token written."""
    hits, tried = torch.zeros(model.heads, RANKS), 0
    for text in texts:
        tokens, features, written = stack([text], model.output.device, model.output.dtype)
        guesses = model.unroll(tokens, tapped(model, features), model.heads)
        counts = ahead(written, model.heads)                                    # positions that every head can be asked at
        for s, guessed in enumerate(guesses):
            best = model.vocab[model.logits(guessed[counts]).topk(RANKS).indices]
            hits[s] += (best == ahead(tokens, 2 + s)[counts][:, None]).sum(0).cpu()
        tried += counts.sum().item()
    return [[round(x, 4) for x in row] for row in (hits / tried).tolist()]


# ---- training ---------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def frequent(target, texts: list[Text], R: int) -> Tensor:
    """The R tokens the target writes most often, by id (R,) int64: counted, and expected by its own distribution in some of
    the texts, because most of what it could write is not in the few texts there are."""
    V, dim = target.config.tokens, target.config.dim
    sample = batches(texts, 0)[:SAMPLE]
    count = sum(torch.bincount(t.tokens[t.start:], minlength=V) for t in texts).float()
    for group in sample:
        _, features, written = stack(group, target.embed.weight.device, target.embed.weight.dtype)
        expected = target.head(target.norm(features[..., -dim:][written])).softmax(-1).sum(0)
        count += expected.cpu() * len(texts) / (ROWS * len(sample))
    return count.topk(min(R, V)).indices.sort().values


def vocabulary(out: Path) -> Tensor:
    """The tokens that the drafter in `out` guesses (R,)."""
    try:
        return load_file(out / "model.safetensors")["vocab"].long()
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"--resume: {out / 'model.safetensors'} cannot be read ({str(error).splitlines()[0]}): "
                         "leave --resume out to begin anew") from None


def new_drafter(args, target, texts: list[Text], taps: tuple):
    """-> (an untrained drafter of this kind, the options it is made again with)."""
    c = target.config
    answers = [t for t in texts if t.prompt is not None and not is_held_out(t.prompt)]
    vocab = vocabulary(args.out) if args.resume else frequent(target, answers or texts, args.vocab or c.tokens)
    small = {"layers": args.layers, "ffn_dim": args.ffn_dim}
    shape = {"eagle": {"taps": taps}, "medusa": {"heads": args.heads}, "draft": small,
             "dflash": {"taps": taps, "block": args.depth} | small}
    model = borrow(KINDS[args.kind](c, vocab, **shape[args.kind]).to(args.device), target)
    {"eagle": start_eagle, "medusa": start_medusa, "draft": start_small, "dflash": start_dflash}[args.kind](model, target, texts)
    return model, shape[args.kind]


@torch.no_grad()
def start_eagle(model, target, texts: list[Text]) -> None:
    """As the target's own last layer applied once more, to features of size 1: what it adds is scaled to match."""
    c = target.config
    size = torch.cat([t.features[:-1, -c.dim:] for t in texts[:BATCH]]).float().square().mean(-1).sqrt().median().item()
    model.block.load_state_dict(target.layers[-1].state_dict())
    model.norm.load_state_dict(target.norm.state_dict())
    model.block.o.weight.div_(size)
    model.block.down.weight.div_(size)
    model.join.weight.normal_(0, 0.5 * c.dim ** -0.5)
    model.fuse.weight.normal_(0, 0.1 * c.dim ** -0.5)
    for w in (model.fuse.weight, model.join.weight):
        w[:, -c.dim:] += torch.eye(c.dim)
    for norm in (model.token_norm, model.feature_norm):
        norm.weight.fill_(1.0)


@torch.no_grad()
def start_medusa(model, target, texts: list[Text]) -> None:
    """Every head says what the target says about the next token."""
    model.turn.weight.zero_()


@torch.no_grad()
def start_small(model, target, texts: list[Text]) -> None:
    """As the target's first layers and its last, as much of them as fits."""
    cut_from(target, [*target.layers[:len(model.layers) - 1], target.layers[-1]], model)


@torch.no_grad()
def start_dflash(model, target, texts: list[Text]) -> None:
    """As the target's last layers, as much of them as fits, which read what its last layer said.  What they add, and how
    sure the first guesses are, is scaled down: the features lie outside of what those layers have ever read."""
    c = target.config
    cut_from(target, target.layers[-len(model.layers):], model)
    model.fuse.weight.normal_(0, 0.1 * c.dim ** -0.5)[:, -c.dim:] += torch.eye(c.dim)
    model.mask.zero_()
    model.token_norm.weight.fill_(0.3)
    model.feature_norm.weight.fill_(1.0)
    model.norm.weight.mul_(0.3)
    for block in model.layers:
        block.o.weight.div_(5)
        block.down.weight.div_(5)


def cut_from(target, source, model) -> None:
    """model.layers from the layers of `source`, whose feed-forward may be wider; the norm from the target's."""
    model.norm.load_state_dict(target.norm.state_dict())
    for block, theirs in zip(model.layers, source):
        given = dict(theirs.named_parameters())
        for name, p in block.named_parameters():
            p.copy_(given[name][tuple(slice(n) for n in p.shape)])


def learning_rate(peak: float, step: int, part: float) -> float:
    """A short rise, then half a cosine over the whole time, of which `part` (0 to 1) has passed."""
    return peak * min(1, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, part))))


def save(model, out: Path, about: dict, training: dict) -> None:
    """The drafter in bfloat16, and what --resume needs beside it."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().to(torch.bfloat16).contiguous() for n, w in own_weights(model).items()}
    save_file(weights | {"vocab": model.vocab.int()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    torch.save(training, out / "training.part")
    (out / "training.part").replace(out / "training.pt")


def resume(model, optimizer, out: Path) -> dict:
    """Where the training in `out` stopped: {"step", "epoch", "position" in the epoch, "seconds" spent}."""
    try:
        saved = torch.load(out / "training.pt", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"--resume: {out / 'training.pt'} cannot be read ({str(error).splitlines()[0]}): "
                         "leave --resume out to begin anew") from None
    model.load_state_dict(saved.pop("model"), strict=False)                 # strict knows nothing of what is borrowed
    optimizer.load_state_dict(saved.pop("optimizer"))
    return saved


def learn_from(model, target, batch: list[Text], optimizer, depth: int) -> float:
    """One step of the optimizer -> the loss."""
    loss = loss_of(model, target, *stack(batch, model.output.device, model.output.dtype), depth)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    return loss.item()


def measure_and_save(model, target, check: list[Text], optimizer, args, about: dict, at: dict) -> None:
    rates = acceptance(model, target, check, args.depth)
    if args.kind == "medusa":
        about["shape"]["rates"] = rank_rates(model, [t for t in check if t.temperature == 0])
    about |= {"minutes": round(at["seconds"] / 60, 1), "steps": at["step"],
              "acceptance": {str(t): a for t, a in rates.items()}}
    save(model, args.out, about, at | {"model": own_weights(model), "optimizer": optimizer.state_dict()})
    note("held out: " + "; ".join(f"temperature {t:g}: {' '.join(f'{a:.3f}' for a in r)}" for t, r in rates.items()))


def train(model, target, texts: list[Text], args, about: dict) -> None:
    learn, check = ([t for t in texts if is_held_out(t.prompt) == held] for held in (False, True))
    answers = [t for t in learn if t.prompt is not None]
    check = [t for T in dict.fromkeys(TEMPERATURES) for t in [t for t in check if t.temperature == T][:args.check]]
    if not answers or not check:
        raise ValueError(f"{len(answers)} texts to learn from and {len(check)} held out: give more prompts")
    optimizer = torch.optim.AdamW(own_weights(model).values(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    at = resume(model, optimizer, args.out) if args.resume else {"step": 0, "epoch": 0, "position": 0, "seconds": 0.0}
    torch.manual_seed(at["step"])               # of what is dropped out
    begun = said = saved = time.perf_counter()
    before, todo, losses = at["seconds"], [], []

    def part() -> float:
        """How much of the training is done, 0 to 1: of its steps where they are counted, else of its time."""
        return at["step"] / args.steps if args.steps else at["seconds"] / (60 * args.minutes)

    while part() < 1:
        if not todo:                            # plain text in the first half only: the last word is the target's own
            epoch = batches(learn if part() < 0.5 else answers, at["epoch"])
            todo = epoch[at["position"] % len(epoch):]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, at["step"], part())
        losses.append(learn_from(model, target, todo.pop(0), optimizer, args.depth))
        now = time.perf_counter()
        at |= {"step": at["step"] + 1, "position": at["position"] + 1, "seconds": before + now - begun}
        if not todo:
            at |= {"epoch": at["epoch"] + 1, "position": 0}
        if now - said > 60:
            note(f"{at['seconds'] / 60:6.1f} min  step {at['step']}  epoch {at['epoch']}  loss {sum(losses) / len(losses):.3f}")
            said, losses = now, []
        if now - saved > 60 * args.save_every or part() >= 1:
            measure_and_save(model, target, check, optimizer, args, about, at)
            saved = time.perf_counter()


# ---- the command line ---------------------------------------------------------------------------------------------------

def options(argv=None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=["texts", *KINDS], help="what to train; texts only writes the texts")
    add("--target", type=Path, default=DEFAULT_TARGET, metavar="DIR")
    add("--prompts", type=Path, required=True, metavar="FILE", help="one a line, plain or {\"prompt\": ...}")
    add("--text", type=Path, metavar="FILE", help="plain text to learn from besides, UTF-8, may be .xz: half as dear, teaches less")
    add("--plain", type=int, default=1000, metavar="N", help="pieces of --text, of 256 tokens")
    add("--texts", type=Path, metavar="DIR", help="where texts are kept (default: beside the target, NAME-texts)")
    add("--out", type=Path, metavar="DIR", help="the drafter's folder")
    add("--minutes", type=float, default=60, help="of training in all, earlier runs that are resumed included")
    add("--steps", type=int, metavar="N", help="of training in all, instead of --minutes")
    add("--text-minutes", type=float, default=60, help="of writing texts, before training")
    add("--resume", action="store_true", help="go on with the training in --out")
    add("--taps", type=int, nargs="+", metavar="LAYER", help="layers the drafter reads; the last must be the target's last")
    add("--vocab", type=int, default=8192, metavar="R", help="guess only the R tokens written most often; 0: all")
    add("--depth", type=int, help="guesses of a chain that are learned (default 3), or of a DFlash's block (default 4)")
    add("--heads", type=int, default=4, help="of a Medusa")
    add("--layers", type=int, default=2, help="of a small draft model or a DFlash")
    add("--ffn-dim", type=int, default=1024, help="of a small draft model or a DFlash")
    add("--lr", type=float, default=1e-3)
    add("--check", type=int, default=48, metavar="N", help="held-out texts to measure acceptance on")
    add("--save-every", type=float, default=10, metavar="MINUTES")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.kind != "texts" and args.out is None:
        raise ValueError("--out is missing: name the folder for the drafter")
    args.depth = args.depth or (4 if args.kind == "dflash" else 3)
    args.texts = args.texts or args.target.with_name(args.target.name + "-texts")
    return args


def main(argv=None) -> int:
    try:
        args = options(argv)
        opened = open_checkpoint(args.target)
        target = opened.load(args.device, torch.float32)
        L = target.config.layers
        taps = tuple(args.taps or (L // 4, 3 * L // 5, L - 1))
        if not all(0 <= i < L for i in taps) or taps[-1] != L - 1:
            raise ValueError(f"--taps {' '.join(map(str, taps))}: layers are 0 to {L - 1}, and the last must be {L - 1}, the last "
                             "layer, whose output says what the target would write")
        recorded = recorded_taps(args.texts, taps)
        passages = read_passages(args.text, opened.tokens) if args.text else []
        end = time.perf_counter() + 60 * args.text_minutes
        stop = lambda: time.perf_counter() > end
        write_texts(target, opened.tokens, opened.template, read_prompts(args.prompts), recorded, args.texts,
                    stop, note)
        write_passages(target, passages[:args.plain], recorded, args.texts, stop, note)
        if args.kind == "texts":
            return 0
        texts = read_texts(args.texts, recorded)
        model, shape = new_drafter(args, target, texts, taps)
        model.columns = [recorded.index(i) for i in model.taps]
        train(model, target, texts, args, {"kind": args.kind, "target": args.target.name, "fingerprint": fingerprint(target),
                                           "shape": shape, "k": args.heads if args.kind == "medusa" else args.depth})
    except ValueError as error:
        note("train.py: " + " ".join(str(error).splitlines()))
        return 2
    except KeyboardInterrupt:
        note("interrupted: --resume goes on from the last save")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
