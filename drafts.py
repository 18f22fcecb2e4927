"""The drafters: who guesses.  A drafter is any object with

    nodes                           how many tokens it guesses a round
    taps                            the target's layers whose outputs it wants to see
    most                            (optional) how many it can guess when a copy's nodes are set to another number: auto_k.py
    start(state, begin, hidden)     positions [begin, pos) were just fed to the target: catch up.  hidden (B, P, .)
    propose(state, sampling)        -> Draft; may scratch its own cache at slots >= pos, nothing else
    observe(state, out, n, hidden, p)   what the round brought; rows 0..n of hidden (B, K+1, .) are the tokens it fed;
                                    what its Draft asked to be watched follows

No base class: the round calls these names and knows nothing else.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from sample import DRAFT, TARGET, draw, exponential, probs
from speculate import Draft, State


def guess_noise(state: State, sampling, K: int, V: int | Tensor, couple: bool, chosen: bool = False) -> Tensor:
    """What the K guesses of a chain are drawn with: noise (B, K, V), or (B, K, R) of the tokens listed in V (R,).
    couple: the very noise that the target will draw with at each position (Daliri, Musco, Suresh 2024, arXiv
    2408.07978).  The nearer q is to p, the likelier both draw one token.  Such a guess is returned without q, so that
    accept_matched judges it: the text is the target's own draws, whoever guessed.
    chosen: no noise, so that the likeliest wins; returned without q as well."""
    if chosen:
        return torch.ones(1, K, 1, device=state.pos.device)
    at = state.pos[:, None] + 1 + torch.arange(K, device=state.pos.device)                      # (B, K)
    return exponential(sampling.seed[:, None].expand_as(at), TARGET if couple else DRAFT, at, V)


class NoDraft:
    """Plain decoding: the same loop with nothing guessed.  The baseline of every measurement."""
    nodes, taps = 0, ()

    def start(self, state, begin, hidden): pass

    def propose(self, state: State, sampling) -> Draft:
        return Draft(state.tokens[:, :0])

    def observe(self, state, out, n, hidden, p): pass


class NgramDraft:
    """Prompt lookup (Saxena 2023): what followed the last earlier occurrence of the newest 3, else 2, else 1 tokens.
    Nothing found proposes junk, which costs only the chance: a chosen token x is kept with probability p(x)."""
    taps, most = (), 16

    def __init__(self, K: int):
        self.nodes = K

    def start(self, state, begin, hidden): pass

    def propose(self, state: State, sampling) -> Draft:
        return Draft(self.look_up(state)[0])

    def look_up(self, state: State) -> tuple[Tensor, Tensor]:
        """-> guesses (B, K), and how many of the newest tokens occurred before (B, 1): 0 or less where none did."""
        tokens, pos = state.tokens[:, :state.span], state.pos[:, None]
        slot = torch.arange(tokens.shape[1], device=pos.device)
        # "a b c a b": the newest tokens are a b; slot 1 ends an earlier a b, so c a b c ... is proposed
        matched = torch.ones_like(tokens, dtype=torch.bool)
        length = torch.zeros_like(tokens)                                   # of the match that ends in each slot
        for back in range(3):
            newest = tokens.gather(1, (pos - back).clamp_min(0))                # (B, 1)
            behind = F.pad(tokens, (back, 0))[:, :tokens.shape[1]]              # the token `back` before each slot
            matched = matched & (behind == newest) & (slot >= back) & (pos >= back)
            length = length + matched
        score = torch.where((length > 0) & (slot < pos), length * tokens.shape[1] + slot, -1)
        end = score.argmax(1, keepdim=True)                                 # the longest, of those the most recent
        # Past the newest token the text is taken to repeat with the same period.
        ahead = torch.arange(self.nodes, device=pos.device) % (pos - end).clamp_min(1)
        return tokens.gather(1, end + 1 + ahead), score.gather(1, end) // tokens.shape[1]

    def observe(self, state, out, n, hidden, p): pass


class ModelDraft:
    """An independent smaller model with the target's tokenizer: K tokens, one after the other, each drawn from the
    model's own distribution q under the row's sampling settings."""
    taps, most = (), 16

    def __init__(self, model, cache, K: int, V: int, couple: bool = False):
        """`cache` is the model's own, as long as the target's; V is the number of the target's real tokens."""
        self.model, self.cache, self.nodes, self.V, self.couple, self.chosen = model, cache, K, V, couple, False
        self.newest = 2                 # how many of the newest tokens the cache may lack, see propose and HybridDraft
        self.context = model.config.context             # generate() goes on without guesses where no row is within it

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        self.model.prefill(self.known(state.tokens), begin, state.pos, self.cache)

    def propose(self, state: State, sampling) -> Draft:
        race = guess_noise(state, sampling, self.nodes, self.V, self.couple, self.chosen)
        # The newest token and, again, the one before it: after a full acceptance that one was never fed and would
        # leave a hole in the cache; otherwise the same keys and values are written once more.
        pos, tokens, q = (state.pos + 1 - self.newest).clamp_min(0), [], []     # 0: too short a text is guessed badly
        fed = state.tokens.gather(1, pos[:, None] + torch.arange(self.newest, device=pos.device))
        for i in range(self.nodes):
            hidden, _ = self.model(self.known(fed), pos, self.cache, state.span)
            q.append(self.law(hidden[:, -1:], sampling))
            pos, fed = pos + fed.shape[1], draw(q[-1], race[:, i:i + 1])
            tokens.append(fed)
        valid = (self.context - state.pos).clamp(0, self.nodes)
        return Draft(torch.cat(tokens, 1), None if self.couple or self.chosen else torch.cat(q, 1), valid=valid)

    def law(self, hidden: Tensor, sampling) -> Tensor:
        """hidden (B, 1, dim) -> q (B, 1, V): ids that only one of the two models has are never proposed."""
        q = probs(self.model.head(hidden)[..., :self.V], sampling)
        return F.pad(q, (0, self.V - q.shape[-1]))

    def known(self, tokens: Tensor) -> Tensor:
        """Ids beyond this model's embedding become its last one: it guesses badly after them, no more."""
        return tokens.clamp_max(self.model.config.vocab_size - 1)

    def observe(self, state, out, n, hidden, p): pass
