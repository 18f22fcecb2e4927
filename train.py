"""Trains a drafter for a target on the target's own text:

    python train.py eagle --target models/smollm2-135m --prompts prompts.jsonl --out models/smollm2-135m-eagle --minutes 60

First the target writes texts (train_data.py), in as much of the time as they take; they are kept and used again by the next
drafter.  Then the drafter learns to say what the target would: cross-entropy against the target's distribution, at every
position and for every guess of a chain.  Stops at any time; --resume goes on where it was.
"""
import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from draft_eagle import Eagle
from generate import DEFAULT_TARGET, Parser, note
from load import open_checkpoint
from model import default_dtype
from train_data import BATCH, Text, held_out, read_prompts, read_texts, write_texts

ROWS = 4                # texts a step
WARM_UP = 50            # steps


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


def loss_of(model, target, tokens, features, written, depth: int) -> Tensor:
    """Mean over the guesses of -sum(p log q), p being the target's distribution over the tokens that can be guessed.  The
    s-th guess from position t is about the distribution after position t + 1 + s; later guesses matter less, since they
    count only where the earlier ones were kept."""
    with torch.no_grad():
        p = F.linear(target.norm(features[..., -target.config.dim:]), model.head).softmax(-1)       # (B, T, R)
    total = 0.0
    for s, guessed in enumerate(model.unroll(tokens, features, depth)):
        counts = ahead(written, 1 + s)
        q = model.logits(guessed[counts]).log_softmax(-1)
        total = total - 0.8 ** s * (ahead(p, 1 + s)[counts] * q).sum(-1).mean()
    return total / sum(0.8 ** s for s in range(depth))


@torch.no_grad()
def acceptance(model, target, texts: list[Text], depth: int) -> dict[float, list[float]]:
    """{temperature of the texts: the share of guesses kept, by depth, among those whose predecessors were}.  At 0 a guess is
    kept when it is the token that was written, at 1 with probability sum(min(p, q))."""
    kept = {}
    for text in texts:
        tokens, features, written = stack([text], model.head.device, model.head.dtype)
        p = target.head(target.norm(features[..., -target.config.dim:])).softmax(-1)
        weight = torch.ones(tokens.shape, device=tokens.device)
        for s, guessed in enumerate(model.unroll(tokens, features, depth)):
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


# ---- training ---------------------------------------------------------------------------------------------------------------

def frequent(texts: list[Text], R: int, V: int) -> Tensor:
    """The R tokens the target writes most often, by id: (R,) int64."""
    counts = Counter(i for t in texts for i in t.tokens[t.start:].tolist())
    return torch.tensor(sorted([i for i, _ in counts.most_common(R)] +
                               [i for i in range(V) if i not in counts][:max(0, R - len(counts))]))


def from_last_layer(model: Eagle, target, texts: list[Text]) -> None:
    """Start as the target's own last layer applied once more, to features of size 1: what it adds is scaled to match."""
    c, last = target.config, target.layers[-1]
    size = torch.cat([t.features[:-1, -c.dim:] for t in texts[:BATCH]]).float().square().mean(-1).sqrt().median().item()
    with torch.no_grad():
        model.block.load_state_dict(last.state_dict())
        model.norm.load_state_dict(target.norm.state_dict())
        model.block.o.weight.div_(size)
        model.block.down.weight.div_(size)
        model.join.weight.normal_(0, 0.5 * c.dim ** -0.5)
        model.fuse.weight.normal_(0, 0.1 * c.dim ** -0.5)
        for w in (model.fuse.weight, model.join.weight):
            w[:, -c.dim:] += torch.eye(c.dim)
        for norm in (model.token_norm, model.feature_norm):
            norm.weight.fill_(1.0)


def learning_rate(peak: float, step: int, part: float) -> float:
    """A short rise, then half a cosine over the whole time, of which `part` (0 to 1) has passed."""
    return peak * min(1, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, part))))


def save(model, out: Path, about: dict, training: dict) -> None:
    """The drafter in bfloat16, and what --resume needs beside it."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().to(torch.bfloat16).contiguous() for n, w in model.named_parameters()}
    save_file(weights | {"vocab": model.vocab.int()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    torch.save(training, out / "training.part")
    (out / "training.part").replace(out / "training.pt")


def train(model, target, texts: list[Text], args, about: dict) -> None:
    learn, check = ([t for t in texts if held_out(t.prompt) == held] for held in (False, True))
    if not learn or not check:
        raise ValueError(f"{len(learn)} texts to learn from and {len(check)} held out: give more prompts")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    step, epoch, position, spent = 0, 0, 0, 0.0
    if args.resume:
        saved = torch.load(args.out / "training.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, epoch, position, spent = (saved[k] for k in ("step", "epoch", "position", "seconds"))
    begun, said, saved_at = time.perf_counter() - spent, 0.0, time.perf_counter()
    todo, losses = batches(learn, epoch)[position:], []
    while (seconds := time.perf_counter() - begun) < 60 * args.minutes:
        if not todo:
            epoch, position, todo = epoch + 1, 0, batches(learn, epoch + 1)
        batch, position = todo.pop(0), position + 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, step, seconds / (60 * args.minutes))
        loss = loss_of(model, target, *stack(batch, model.head.device, model.head.dtype), args.depth)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step, losses = step + 1, losses + [loss.item()]
        if seconds - said > 60:
            note(f"{seconds / 60:6.1f} min  step {step}  epoch {epoch + position * ROWS / len(learn):.2f}  "
                 f"loss {sum(losses) / len(losses):.3f}")
            said, losses = seconds, []
        if time.perf_counter() - saved_at > 60 * args.save_every or time.perf_counter() - begun >= 60 * args.minutes:
            rates = acceptance(model, target, check[:args.check], args.depth)
            spent, saved_at = time.perf_counter() - begun, time.perf_counter()
            about |= {"minutes": round(spent / 60, 1), "steps": step, "acceptance": {str(t): a for t, a in rates.items()}}
            save(model, args.out, about, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                                          "epoch": epoch, "position": position, "seconds": spent})
            note("held out: " + "; ".join(f"temperature {t:g}: {' '.join(f'{a:.3f}' for a in r)}" for t, r in rates.items()))


# ---- the command line ---------------------------------------------------------------------------------------------------

def options(argv=None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=["texts", "eagle"], help="what to train; texts only writes the texts")
    add("--target", type=Path, default=DEFAULT_TARGET, metavar="DIR")
    add("--prompts", type=Path, required=True, metavar="FILE", help="one a line, plain or {\"prompt\": ...}")
    add("--texts", type=Path, metavar="DIR", help="where texts are kept (default: beside the target, NAME-texts)")
    add("--out", type=Path, metavar="DIR", help="the drafter's folder")
    add("--minutes", type=float, default=60, help="of training in all, earlier runs that are resumed included")
    add("--text-minutes", type=float, default=60, help="of writing texts, before training")
    add("--resume", action="store_true", help="go on with the training in --out")
    add("--taps", type=int, nargs="+", metavar="LAYER", help="layers the drafter reads; the last must be the target's last")
    add("--vocab", type=int, default=8192, metavar="R", help="guess only the R tokens written most often; 0: all")
    add("--depth", type=int, default=3, help="guesses a chain learns")
    add("--lr", type=float, default=1e-3)
    add("--check", type=int, default=48, metavar="N", help="held-out texts to measure acceptance on")
    add("--save-every", type=float, default=10, metavar="MINUTES")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.kind != "texts" and args.out is None:
        raise ValueError("--out is missing: name the folder for the drafter")
    args.texts = args.texts or args.target.with_name(args.target.name + "-texts")
    return args


def main(argv=None) -> int:
    try:
        args = options(argv)
        opened = open_checkpoint(args.target)
        target = opened.load(args.device, torch.float32)
        L = target.config.layers
        taps = tuple(args.taps or (L // 4, 3 * L // 5, L - 1))
        stop = time.perf_counter() + 60 * args.text_minutes
        write_texts(target, opened.tokens, opened.template, read_prompts(args.prompts), taps, args.texts,
                    lambda: time.perf_counter() > stop, note)
        if args.kind == "texts":
            return 0
        texts = read_texts(args.texts, taps)
        vocab = frequent(texts, args.vocab or target.config.tokens, target.config.tokens).to(args.device)
        model = Eagle(target.config, taps, vocab).to(args.device).borrow(target)
        from_last_layer(model, target, texts)
        about = {"kind": args.kind, "target": args.target.name, "taps": taps}
        train(model, target, texts, args, about)
    except ValueError as error:
        note("train.py: " + " ".join(str(error).splitlines()))
        return 2
    except KeyboardInterrupt:
        note("interrupted: --resume goes on from the last save")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
