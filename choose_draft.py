"""How --draft becomes a drafter.  The one place that looks one up by name."""
from pathlib import Path

import torch

import tokenizer as tokenizers
from convert.source import read_json
from draft_exit import ExitDraft
from draft_hybrid import HybridDraft
from draft_jacobi import JacobiDraft
from draft_lookahead import LookaheadDraft
from draft_trained import KINDS, best_shipped, drafter_of, load_trained, trained_kind
from drafts import NgramDraft, NoDraft
from load import open_checkpoint
from output import note
from speculate import State

MODELS = Path(__file__).parent / "models"       # where --draft auto looks


def pick_drafter(args, target) -> None:
    """Settle --draft auto and ngram+eagle, -k and how many nodes a round has: a trained drafter says in its config.json which
    K it was measured best with."""
    if args.draft == "auto" and (best := best_shipped(target, MODELS, ("eagle", "medusa") if args.tree else tuple(KINDS))):
        # an EAGLE or a DFlash guesses copies badly, and they are what a lookup is good at; its guesses must then be a chain
        lookup = "ngram+" * (trained_kind(best) in ("eagle", "dflash") and not args.tree)
        note(f"drafting with {lookup}{best}")
        args.draft = f"{lookup}{best}"
    args.draft = "ngram" if args.draft == "auto" else args.draft
    if args.draft == "ngram+eagle":
        if not (best := best_shipped(target, MODELS, ("eagle",))):
            raise ValueError(f"--draft ngram+eagle finds no EAGLE of {args.target} in {MODELS}: train one, train.py")
        args.draft = f"ngram+{best}"
    name, alone = args.draft.removeprefix("ngram+"), not args.draft.startswith("ngram+")
    trained = trained_kind(Path(name))
    usual = read_json(Path(name) / "config.json").get("k") if trained else None
    # Where guesses are drawn, a seed is a text only if K is always the same one; and K follows the clock.
    args.k_auto = name != "none" and (args.k == "auto" or args.k is None and
                                      (args.seed is None or args.temperature == 0 or args.couple or args.chosen))
    args.k = 0 if name == "none" else usual or 4 if args.k in (None, "auto") else args.k
    if args.tree and not (trained and alone):
        raise ValueError(f"--tree {args.tree} needs a drafter that train.py made, alone, not --draft {args.draft}: "
                         "leave it out")
    if args.tree and args.tree < args.k:
        raise ValueError(f"--tree {args.tree} cannot be {args.k} levels deep (-k): give {args.k} nodes or more")
    args.k, args.nodes = sizes(name, args.k, args.tree)


def sizes(name: str, K: int, tree: int | None = None) -> tuple[int, int]:
    """-> how many guesses of a round can be kept, how many nodes are fed: K of each but for trees and lookahead."""
    if name.partition(":")[0] == "lookahead":
        W, N, G = lookahead_sizes(name)
        return N - 1, (W + G) * (N - 1) - 1
    return K, tree or K


def lookahead_sizes(name: str) -> tuple[int, int, int]:
    """lookahead or lookahead:W,N,G -> columns of the window, tokens of an n-gram, n-grams verified a round."""
    given = name.partition(":")[2].split(",") if ":" in name else ["5", "3", "3"]
    W, N, G = (int(x) if x.isdecimal() else 0 for x in given) if len(given) == 3 else (0, 0, 0)
    if not (W >= 1 and N >= 2 and G >= 1 and (W + G) * (N - 1) <= 64):
        raise ValueError(f"--draft {name} must be lookahead:W,N,G with W >= 1, N >= 2, G >= 1 and (W + G) * (N - 1) <= 64 "
                         "tokens fed a round, as lookahead:5,3,3")
    return W, N, G


def load_drafter(args, target, tokens, state: State):
    """--draft as pick_drafter left it -> a drafter for the rows of this state."""
    def load(name: str):
        folder = Path(name)
        if not folder.exists():
            raise ValueError(f"--draft {args.draft} is neither none, ngram, jacobi, lookahead, exit:L nor a folder made by "
                             "convert_weights.py or train.py")
        return target if folder.resolve() == Path(args.target).resolve() else load_draft(folder, target, tokens)

    after = args.draft.removeprefix("ngram+")
    if after != args.draft and after.partition(":")[0].partition("+")[0] in ("", "none", "ngram", "auto", "lookahead"):
        raise ValueError(f"--draft {args.draft}: what follows ngram+ must be eagle, jacobi, exit:L or a folder")
    return as_told(args, drafter_named(args.draft, target, state, args.k, load, args.tree, args.couple))


def as_told(args, drafter):
    """The drafter, its guesses drawn or, with --chosen, the likeliest."""
    if args.chosen:
        if not hasattr(guesser := getattr(drafter, "other", drafter), "chosen") or args.tree:
            raise ValueError(f"--chosen: the guesses of --draft {args.draft}{' --tree' if args.tree else ''} are never drawn: "
                             "leave it out")
        guesser.chosen = True
    return drafter


def drafter_named(name: str, target, state: State, K: int, load, tree: int | None = None, couple: bool = False):
    """none, ngram, jacobi, lookahead:W,N,G, exit:L, ngram+ another chain, or the name of a model that load() knows."""
    if name.startswith("ngram+"):
        return HybridDraft(drafter_named(name.removeprefix("ngram+"), target, state, K, load, tree, couple))
    if name == "none":
        return NoDraft()
    if name == "ngram":
        return NgramDraft(K)
    if name == "jacobi":
        return JacobiDraft(state, K)
    if name.partition(":")[0] == "lookahead":
        return LookaheadDraft(state, *lookahead_sizes(name))
    if name.startswith("exit:"):
        layers = name.removeprefix("exit:")
        return ExitDraft(target, K, int(layers) if layers.isdecimal() else layers, couple)
    return drafter_of(load(name), target, state, K, tree, couple)


def model_of(drafter):
    """The model that it runs to guess; None where it has none, or only the target."""
    return getattr(getattr(drafter, "other", drafter), "model", None)


def same_drafter(args, target, drafter, state: State):
    """The drafter again, for the rows of another state.  They share the model."""
    again = drafter_named(args.draft, target, state, args.k, lambda name: model_of(drafter), args.tree, args.couple)
    return as_told(args, again)


def needs_weights(name: str) -> bool:
    """Whether this --draft names a folder, behind ngram+ or not."""
    kind = name.removeprefix("ngram+").partition(":")[0]
    return kind not in ("none", "ngram", "jacobi", "lookahead", "exit")


def load_draft(folder: Path, target, tokens):
    """The model that guesses: what train.py made, or one of its own with the target's tokenizer; on the target's device, in
    its dtype."""
    if trained_kind(folder):
        return load_trained(folder, target)
    draft = open_checkpoint(folder)
    if difference := tokenizers.compare(tokens, draft.tokens):
        raise ValueError(f"--draft {folder} does not share the target's tokenizer: {difference}")
    return draft.load(target.embed.weight.device, target.embed.weight.dtype)


@torch.no_grad()
def draws(drafter, state: State, sampling) -> bool:
    """Whether it draws its guesses from a q, as its own Draft says.  Before any text: it scratches slots and nothing else."""
    state.pos.fill_(1)
    q = drafter.propose(state, sampling).q
    state.pos.fill_(-1)
    return q is not None
