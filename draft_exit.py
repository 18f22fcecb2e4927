"""Early exit: the target's first layers, with its own final norm and head, draft for all of it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains targets so that this guesses well; of others only the last few
layers can be spared.  Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) skips layers in between.
"""
import torch
from torch import Tensor

from drafts import guess_noise
from model import places
from sample import draw, probs
from speculate import Draft, State


class ExitDraft:
    """A chain of K guesses, each drawn from what the first `layers` layers say.  It has no cache of its own: what those
    layers keep of the text is what the target keeps.

    So it writes to the target's cache, at slots >= pos.  Nothing there counts between rounds, and verify writes all of
    those slots before it reads them: with the very keys and values they have, feeding the same tokens to the same
    layers."""
    taps, most = (), 16

    def __init__(self, target, K: int, layers: int, couple: bool = False):
        most = target.config.layers - 1
        if not (isinstance(layers, int) and 1 <= layers <= most):
            raise ValueError(f"exit:{layers} must name a whole number of layers in 1..{most}, fewer than the target's "
                             f"{most + 1}")
        self.target, self.nodes, self.layers, self.couple, self.chosen = target, K, layers, couple, False

    def start(self, state, begin, hidden): pass

    def propose(self, state: State, sampling) -> Draft:
        race = guess_noise(state, sampling, self.nodes, self.target.config.tokens, self.couple, self.chosen)
        fed, tokens, q = state.tokens.gather(1, state.pos[:, None]), [], []
        for i in range(self.nodes):
            q.append(probs(self.logits(fed, state.pos + i, state), sampling))
            fed = draw(q[-1], race[:, i:i + 1])
            tokens.append(fed)
        return Draft(torch.cat(tokens, 1), None if self.couple or self.chosen else torch.cat(q, 1))

    def logits(self, tokens: Tensor, pos: Tensor, state: State) -> Tensor:
        """Feed tokens (B, 1) to slot pos (B,) of the first layers -> (B, 1, V)"""
        x = self.target.embed(tokens)
        where = places(self.target.config, self.target.freq, x, pos, state.span)
        for i, block in enumerate(self.target.layers[:self.layers]):
            x = block(x, *where, *state.cache.layer(i))
        return self.target.head(self.target.norm(x))

    def observe(self, state, out, n, hidden, p): pass
