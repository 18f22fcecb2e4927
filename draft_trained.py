"""What trained drafters have in common: what they borrow from the target, and how train.py's folder becomes one of them.

None brings a vocabulary of its own.  Embedding and output matrix are the target's, and of the output matrix only the rows of
`vocab` (R,), the tokens that can be guessed: a fifth of a small target's bytes are that matrix, most of it tokens it hardly
ever writes.  q is 0 for the others, and the law of the text is untouched.
"""
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from convert.source import read_json
from draft_dflash import DFlash, DFlashDraft
from draft_eagle import Eagle, EagleDraft, EagleTree
from draft_medusa import Medusa, MedusaDraft
from draft_small import Small
from drafts import ModelDraft
from model import KVCache, aligned, inverse_frequencies
from plan import expected_tokens
from speculate import State

KINDS = {"eagle": Eagle, "medusa": Medusa, "draft": Small, "dflash": DFlash}


def borrow(model, target):
    """Give a trained drafter what is the target's own; none of it is in the drafter's file.  -> model"""
    head = (target.embed if target.lm_head is None else target.lm_head).weight
    model.embed, model.target_norm = target.embed, target.norm
    model.register_buffer("freq", inverse_frequencies(target.config).to(head.device), persistent=False)
    model.register_buffer("output", head[model.vocab].clone(), persistent=False)               # (R, dim)
    index = torch.full((target.config.tokens,), len(model.vocab), device=head.device)
    index[model.vocab] = torch.arange(len(model.vocab), device=head.device)
    model.register_buffer("index", index, persistent=False)         # (V,): where in vocab a token is; R: it cannot be guessed
    return model


def own_weights(model) -> dict:
    """The parameters that are the drafter's own: {name: parameter}."""
    return {n: p for n, p in model.named_parameters() if not n.startswith(("embed.", "target_norm."))}


def fingerprint(target) -> int:
    """Tells one target from another of the same shape; the same in every dtype it may have been converted to."""
    weight = target.norm.weight.detach().float().cpu()
    return int((weight * torch.arange(1, len(weight) + 1)).sum().item())


def trained_kind(folder: Path) -> str | None:
    """The kind of drafter that train.py wrote to folder, None where it is something else.  ValueError for an unknown one."""
    if not (folder / "config.json").is_file() or "kind" not in (about := read_json(folder / "config.json")):
        return None
    if (kind := about["kind"]) not in [*KINDS]:
        raise ValueError(f"{folder} holds a drafter of kind {kind!r}, which is not one of {', '.join(KINDS)}")
    return kind


def best_shipped(target, models: Path, kinds=tuple(KINDS)) -> Path | None:
    """Of the drafters of these kinds in folder `models` that were trained for this target, the one that keeps most
    guesses at temperature 0 by its own held-out measurement; None where there is none."""
    found = {}
    for folder in sorted(p for p in models.iterdir() if p.is_dir()) if models.is_dir() else ():
        try:
            about = read_json(folder / "config.json") if trained_kind(folder) in kinds else {}
        except ValueError:
            continue                                # somebody's damaged folder is no reason not to start
        if about.get("fingerprint") == fingerprint(target):
            found[folder] = expected_tokens(about.get("acceptance", {}).get("0.0", []))
    return max(found, key=found.get, default=None)


def load_trained(folder: Path, target):
    """-> the Eagle, Medusa, Small or DFlash that train.py wrote to folder, ready to run.  ValueError where it does not fit the target."""
    c, about, kind = target.config, read_json(folder / "config.json"), trained_kind(folder)
    # On a CPU what it reads for a guess stays bfloat16, as it was saved: half the time, and any q is lossless.
    dtype = torch.bfloat16 if target.embed.weight.device.type == "cpu" else target.embed.weight.dtype
    try:
        weights = load_file(folder / "model.safetensors")
        vocab = weights.pop("vocab").long()
        with torch.device("meta"):
            model = KINDS[kind](c, vocab, **about["shape"])
        if missing := own_weights(model).keys() ^ weights.keys():
            raise ValueError(f"{', '.join(sorted(missing))} missing or unknown")
        if not (all(0 <= i < c.layers for i in model.taps) and 0 <= vocab.min() and vocab.max() < c.tokens):
            raise ValueError(f"it reads layers {model.taps} and guesses ids up to {vocab.max()}")
        device = target.embed.weight.device
        own = {n: aligned(w.to(device, dtype)) for n, w in weights.items()} | {"vocab": vocab.to(device)}
        model.load_state_dict(own, strict=False, assign=True)
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(f"{folder} is no drafter for a target of {c.layers} layers of width {c.dim} and {c.tokens} tokens "
                         f"({why}): train one with train.py {kind}") from None
    model.trained_for, model.usual_k = about.get("fingerprint"), about.get("k")
    borrow(model, target)
    model.output = model.output.to(dtype)
    return model.eval().requires_grad_(False)


def drafter_of(model, target, state: State, K: int, nodes: int | None = None, couple: bool = False):
    """What the round calls, around a model that guesses: a chain of K, or a tree of so many nodes at most K deep.
    couple: guesses that are drawn are drawn with the target's noise (drafts.guess_noise)."""
    if isinstance(model, Medusa):
        return MedusaDraft(model, state, K, nodes)
    if isinstance(model, Eagle) and nodes:
        width = max(w for w in range(1, nodes + 1) if (K - 1) * w <= nodes and w <= 10)
        return EagleTree(model, state, K, nodes, width)
    if isinstance(model, Eagle):
        return EagleDraft(model, state, K, couple)
    if nodes:
        raise ValueError(f"{'a DFlash' if isinstance(model, DFlash) else 'a draft model'} guesses a chain: leave out --tree")
    if isinstance(model, DFlash):
        return DFlashDraft(model, state, K, couple)
    weight = target.embed.weight
    cache = KVCache(model.config, *state.tokens.shape, weight.device, weight.dtype)
    return ModelDraft(model, cache, K, target.config.tokens, couple)
