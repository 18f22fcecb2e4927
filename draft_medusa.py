"""Medusa: extra heads on the target's last hidden state, each guessing one token further (Cai et al. 2024, arXiv 2401.10774).

Head i guesses the token i + 2 places after the position whose hidden state it reads, knowing nothing of the tokens between.
One chain of every head's first choice is blockwise parallel decoding (Stern et al. 2018); a static tree of their top choices
is Medusa.  Which tree is measured: train.py keeps, for every head, how often its first, second, ... choice was right.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Config, Linear, linear
from speculate import Draft, State, Tree

RANKS = 10      # choices of a head that a tree can use


class Medusa(nn.Module):
    def __init__(self, config: Config, vocab: Tensor, heads: int, rates=None):
        """rates [head][rank]: how often that choice was right on held-out text; None: not measured yet."""
        super().__init__()
        self.config, self.taps, self.heads = config, (config.layers - 1,), heads
        self.rates = rates or [[0.5 ** (1 + i + r) for r in range(RANKS)] for i in range(heads)]
        self.turn = Linear(config.dim, heads * config.dim, bias=False)      # all heads' layers as one matrix
        self.register_buffer("vocab", vocab)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, T, dim) of the last layer -> (B, T, heads, dim): the hidden state a few tokens later, as guessed."""
        hidden = self.target_norm(features)
        return hidden[:, :, None] + F.silu(self.turn(hidden)).unflatten(-1, (self.heads, -1))

    def logits(self, guessed: Tensor) -> Tensor:
        """(..., dim) -> (..., R)"""
        return linear(guessed, self.output)

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Training: [s][:, t] is what head s says about token t + 2 + s."""
        return list(self(features).unbind(2))[:depth]


def best_tree(rates: list[list[float]], K: int, N: int) -> tuple[list[int], list[int]]:
    """The N nodes most likely to be on the path, heads taken as independent: -> parents (N), ranks (N).  A node's children
    are considered only once it is in, so parents come first; of two with one chance, the shallower."""
    parents, ranks = [], []
    open = [(rates[0][r], -1, 0, r) for r in range(len(rates[0]))]              # chance, -depth, parent, rank
    while len(parents) < N and open:
        chance, depth, parent, rank = best = max(open, key=lambda node: (node[0], node[1], -node[3]))
        open.remove(best)
        parents.append(parent)
        ranks.append(rank)
        if -depth < K:
            open += [(chance * x, depth - 1, len(parents), r) for r, x in enumerate(rates[-depth])]
    return parents, ranks


class MedusaDraft(nn.Module):
    """K heads' first choices as a chain, or the best tree of `nodes` nodes.  Chosen, not drawn: exact at any temperature."""

    def __init__(self, model: Medusa, state: State, K: int, nodes: int | None = None):
        super().__init__()
        if K > model.heads:
            raise ValueError(f"this Medusa has {model.heads} heads and cannot guess {K} tokens ahead: -k {model.heads} is the most")
        parents, ranks = best_tree(model.rates, K, nodes) if nodes else (list(range(model.heads)), [0] * model.heads)
        device, c = state.pos.device, model.config
        self.model, self.nodes, self.taps = model, len(parents) if nodes else K, model.taps
        self.tree, self.most = (Tree(parents, device), 0) if nodes else (None, model.heads)
        self.register_buffer("rank", torch.tensor(ranks, device=device))
        self.register_buffer("depth", Tree(parents, device).depth[1:] - 1)
        self.register_buffer("feature", torch.zeros(len(state.pos), 1, c.dim, device=device, dtype=model.embed.weight.dtype))

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        last = (state.pos - 1 - begin).clamp_min(0)
        self.feature.copy_(hidden.gather(1, last[:, None, None].expand_as(self.feature)))

    def propose(self, state: State, sampling) -> Draft:
        guessed = self.model(self.feature)[:, 0]                                                # (B, heads, dim)
        best = self.model.vocab[self.model.logits(guessed).topk(RANKS, -1).indices]        # (B, heads, RANKS)
        return Draft(best[:, self.depth[:self.nodes], self.rank[:self.nodes]], tree=self.tree)

    def observe(self, state: State, out: Tensor, n: Tensor, hidden: Tensor, p: Tensor):
        self.feature.copy_(hidden.gather(1, n[:, None, None].expand_as(self.feature)))
