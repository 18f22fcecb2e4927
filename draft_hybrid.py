"""Prompt lookup where the text repeats, another drafter elsewhere: chosen row by row, in the round's own graph."""
import torch

from drafts import ModelDraft, NgramDraft
from speculate import Draft, State


class HybridDraft:
    """The n-gram's guesses where at least `least` of the newest tokens occurred before, else those of `other`, any
    chain.  Both are made every round, for no row of a graph can skip a part of it: refused guesses are saved, no time.

    A guess that was looked up is chosen, and next to drawn ones it has a q like theirs: all mass on itself.  Rejection
    sampling then keeps it with probability p, as accept_matched does."""

    def __init__(self, other, least: int = 2):
        self.ngram, self.other, self.least = NgramDraft(other.nodes), other, least
        self.nodes, self.taps, self.most = other.nodes, other.taps, getattr(other, "most", 0)
        if isinstance(other, ModelDraft):       # its cache holds its own guesses, though others may have been kept
            other.newest = other.nodes + 1

    def start(self, state, begin, hidden):
        self.other.start(state, begin, hidden)

    def propose(self, state: State, sampling) -> Draft:
        draft, (found, length) = self.other.propose(state, sampling), self.ngram.look_up(state)
        if draft.tree is not None:
            raise ValueError("ngram+ guesses a chain, and the other drafter a tree: give it a chain")
        use, q, valid = length >= self.least, draft.q, draft.valid                              # use (B, 1)
        if q is not None:
            point = found[..., None] == torch.arange(q.shape[-1], device=q.device)              # (B, K, V)
            q = torch.where(use[..., None], point.float(), q)
        if valid is not None:                   # a lookup has no context to run out of
            valid = torch.where(use[:, 0], self.nodes, valid)
        return Draft(torch.where(use, found, draft.tokens), q, valid=valid)

    def observe(self, state, out, n, hidden, p):
        self.other.observe(state, out, n, hidden, p)
