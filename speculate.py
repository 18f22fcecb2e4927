"""Speculative decoding, complete: a round drafts, verifies, accepts, commits.  With sample.py this file stands alone.

A drafter guesses N tokens, the target scores them all in one pass, a prefix is kept and one more token drawn, and the
text is distributed exactly as the target alone would write it (Leviathan et al. 2023, arXiv 2211.17192).
p is the target's distribution, q the draft's.  B rows, N drafted nodes, K depth (N = K for a chain), V vocabulary.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sample import ACCEPT, TARGET, draw, exponential, probs, uniform


class State(nn.Module):
    """What a batch has written so far, in static buffers that the caller owns.
    Between rounds: the cache holds positions [0, pos); tokens[pos] is chosen but not fed yet."""

    def __init__(self, cache: nn.Module, B: int, S: int, eos=(), device="cpu"):
        super().__init__()
        self.cache = cache                      # the target's keys and values
        self.span = S                           # slots attention reads, a constant of the graph: pos + N < span
        self.register_buffer("tokens", torch.zeros(B, S, dtype=torch.int64, device=device))
        self.register_buffer("pos", torch.full((B,), -1, device=device))                    # -1: nothing chosen yet
        self.register_buffer("limit", torch.zeros(B, dtype=torch.int64, device=device))     # last position to fill
        self.register_buffer("live", torch.zeros(B, dtype=torch.bool, device=device))       # False: it has ended
        # Whose cache has followed this text: another drafter must be fed all of it.  In a tuple, for a drafter that is a
        # module would become part of this one, and none that is no module could follow it.
        self.followed_by = (None,)
        self.register_buffer("eos", torch.tensor(list(eos) or [-1], device=device))


class Tree(nn.Module):
    """A static draft tree.  Node 0 is the newest committed token, node i > 0 hangs under parents[i - 1] < i.
    `depth` (N+1,), `sees` (N+1, N+1): a node attends to itself and its ancestors.
    parents [0, 0, 1] -> 0 has children 1 and 2, 1 has child 3; depth [0, 1, 1, 2]; sees[3] = {0, 1, 3}."""

    def __init__(self, parents, device="cpu"):
        super().__init__()
        if not all(0 <= parent <= i for i, parent in enumerate(parents)):
            raise ValueError(f"parents {list(parents)}: a node must hang under an earlier one")
        depth, sees = [0], torch.eye(len(parents) + 1, dtype=torch.bool)
        for node, parent in enumerate(parents, start=1):
            depth.append(depth[parent] + 1)
            sees[node] |= sees[parent]
        self.K = max(depth)
        self.register_buffer("parents", torch.tensor(list(parents), dtype=torch.int64, device=device))
        self.register_buffer("depth", torch.tensor(depth, device=device))
        self.register_buffer("sees", sees.to(device))


@dataclass
class Draft:
    tokens: Tensor                  # (B, N) guesses; of two equal siblings in a tree the second is never reached
    q: Tensor | None = None         # (B, N, V) float32, the very tensor each was drawn from; None: chosen, or coupled
    tree: Tree | None = None        # None: a chain, guess i follows guess i - 1
    valid: Tensor | None = None     # (B,): only the first so many count; None: all
    watched: int = 0                # of a tree: observe() gets the rows of the last so many as well, after the path's


class Reseeded:
    """The settings of `sampling` with another seed."""

    def __init__(self, sampling, seed: Tensor):
        self.sampling, self.seed = sampling, seed

    def __getattr__(self, name):
        return getattr(self.sampling, name)


class Round(NamedTuple):
    out: Tensor                     # (B, K+1): out[:, :new] is what each row wrote
    n: Tensor                       # (B,) guesses among them
    new: Tensor                     # (B,) 0 for a row that has ended
    tried: Tensor                   # (B,) guesses that could have been kept: of a tree, its depth


def verify(target, state: State, draft: Draft, sampling, taps=()) -> tuple[Tensor, Tensor]:
    """Score all guesses in one pass of the target.  -> p (B, N+1, V), outputs of the layers in taps (B, N+1, .)."""
    fed = torch.cat((state.tokens.gather(1, state.pos[:, None]), draft.tokens), 1)              # (B, N+1)
    depth, sees = (None, None) if draft.tree is None else (draft.tree.depth, draft.tree.sees)
    # one read of all the weights, as for one token: the N extra tokens ride along
    hidden, tapped = target(fed, state.pos, state.cache, state.span, depth, sees, taps)
    return probs(target.head(hidden), sampling), tapped


def accept_sampled(tokens: Tensor, q: Tensor, p: Tensor, seed: Tensor, pos: Tensor, valid: Tensor | None = None):
    """Rejection sampling of a chain drawn from q (Leviathan et al. 2023, Algorithm 1): keeps a guess with probability
    sum(min(p, q)).  tokens (B, K), q (B, K, V), p (B, K+1, V); seed, pos (B,) key the noise; valid (B,): only the first
    so many guesses count -> n (B,) kept, out (B, K+1): out[:, :n+1] is new text."""
    B, K = tokens.shape
    valid = torch.full_like(pos, K) if valid is None else valid
    step = torch.arange(K, device=tokens.device)
    p_x, q_x = p[:, :K].gather(2, tokens[..., None]).squeeze(2), q.gather(2, tokens[..., None]).squeeze(2)
    u = uniform(seed[:, None], ACCEPT, pos[:, None] + 1 + step)
    keep = (u * q_x < p_x) & (step < valid[:, None])    # strict, no division: p = 0 never passes, 0/0 never arises
    n = keep.long().cumprod(1).sum(1)
    # The residual max(p - q, 0) after a rejection.  Where none was rejected q counts as 0: the bonus comes from p.
    at = n[:, None, None].expand(-1, 1, p.shape[-1])
    p_n, q_n = p.gather(1, at).squeeze(1), q.gather(1, at.clamp_max(K - 1)).squeeze(1)
    rest = (p_n - q_n * (n < valid)[:, None]).clamp_min(0)
    return end_with_a_draw(tokens, n, rest, p_n, seed, pos)


def accept_block(tokens: Tensor, q: Tensor, p: Tensor, seed: Tensor, pos: Tensor, valid: Tensor | None = None):
    """Block verification of a chain drawn from q (Sun et al. 2024, arXiv 2403.10444, Algorithm 2): judges the guesses
    together, keeps at least as many as accept_sampled on average, the same law.  Shapes as there.  A guess may be kept
    that fell short on its own, because a later one makes up for it.  So all noise of the round decides n, also that of
    the guesses refused: neither `seed` nor the draft's may be used again at these positions."""
    K = tokens.shape[1]
    valid = torch.full_like(pos, K) if valid is None else valid
    step = torch.arange(K + 1, device=tokens.device)
    p_x, q_x = p[:, :K].gather(2, tokens[..., None]).squeeze(2), q.gather(2, tokens[..., None]).squeeze(2)
    # w_i = min(w_(i-1) p(x_i) / q(x_i), 1): how likely guess i and all before it are kept.  Exactly 1 where p = q.
    w = [torch.ones_like(pos, dtype=torch.float32)]
    for i in range(K):
        w.append(torch.minimum(w[i] * p_x[:, i], q_x[:, i]) / q_x[:, i].clamp_min(1e-37))
    w = torch.stack(w, 1)                                                                       # (B, K+1)
    # What the target wants after i guesses beyond what guess i + 1 will bring.  Nothing comes after the last: q is 0.
    q = F.pad(q * (step[:K] < valid[:, None])[..., None], (0, 0, 0, 1))
    rest = (w[..., None] * p - q).clamp_min(0)                                                  # (B, K+1, V)
    mass, u = rest.sum(-1), uniform(seed[:, None], ACCEPT, pos[:, None] + step)
    keep = (u * (mass + (1 - w)) < mass) & (step <= valid[:, None])         # strict, no division: as in accept_sampled
    n = (keep * step).amax(1)                           # the longest; 0 needs no verdict
    at = n[:, None, None].expand(-1, 1, p.shape[-1])
    return end_with_a_draw(tokens, n, rest.gather(1, at).squeeze(1), p.gather(1, at).squeeze(1), seed, pos)


def end_with_a_draw(tokens: Tensor, n: Tensor, rest: Tensor, p_n: Tensor, seed: Tensor, pos: Tensor):
    """n guesses of tokens (B, K) stay and a draw from the residual (B, V) follows -> n (B,), out (B, K+1)."""
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_n)                               # p = q up to rounding
    extra = draw(rest, exponential(seed, TARGET, pos + 1 + n, p_n.shape[-1]))
    step = torch.arange(tokens.shape[1] + 1, device=n.device)
    return n, torch.where(step == n[:, None], extra[:, None], F.pad(tokens, (0, 1)))


def accept_matched(tokens: Tensor, tree: Tree | None, p: Tensor, seed: Tensor, pos: Tensor, valid: Tensor | None = None):
    """Draw the target's own token at every node and walk down while a child agrees: rejection sampling with q a point
    mass, exact at any temperature, for chains and trees of chosen guesses.  tokens (B, N), p (B, N+1, V), seed, pos,
    valid (B,) -> n (B,) kept, out (B, K+1): out[:, :n+1] is new text, path (B, K+1): the node that drew each."""
    N, device = tokens.shape[1], tokens.device
    step = torch.arange(N + 1, device=device)
    # Nodes of one depth share noise: only one of them is on the path, the others never influence the text.
    depth = pos[:, None] + 1 + (step if tree is None else tree.depth)
    own = draw(p, exponential(seed[:, None].expand_as(depth), TARGET, depth, p.shape[-1]))      # (B, N+1)
    usable = step[:N] < (N if valid is None else valid[:, None])
    if tree is None:
        n = ((own[:, :N] == tokens) & usable).long().cumprod(1).sum(1)
        return n, own, step.expand_as(own)
    n = node = torch.zeros_like(pos)
    path, going = [node], torch.ones_like(pos, dtype=torch.bool)
    for _ in range(tree.K):
        agrees = tokens == own.gather(1, node[:, None])
        child = (tree.parents == node[:, None]) & agrees & usable                               # (B, N)
        going = going & child.any(1)
        node = torch.where(going, child.long().argmax(1) + 1, node)
        n = n + going
        path.append(node)
    path = torch.stack(path, 1)
    return n, own.gather(1, path), path


def along(path: Tensor, rows: Tensor, watched: int) -> Tensor:
    """rows (B, N+1, .) of all nodes -> those of the path (B, K+1, .), then those of the last `watched` nodes."""
    kept = rows.gather(1, path[..., None].expand(-1, -1, rows.shape[-1]))
    return torch.cat((kept, rows[:, rows.shape[1] - watched:]), 1)


def commit(state: State, out: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Append out[:, :n+1] (B, K+1) to each live row, up to its first EOS and its limit: the one place where text
    grows.  -> n (B,) kept guesses among them, new (B,) tokens appended."""
    step = torch.arange(out.shape[1], device=out.device)
    slots = state.pos[:, None] + 1 + step
    rows = torch.arange(out.shape[0], device=out.device)[:, None]
    state.tokens[rows, slots] = out                     # what lies past the new tokens is overwritten next round
    ends = (out[..., None] == state.eos).any(-1) | (slots >= state.limit[:, None])              # (B, K+1)
    ended_before = F.pad(ends.long().cumsum(1)[:, :-1], (1, 0)) > 0
    new = ((step <= n[:, None]) & ~ended_before).sum(1) * state.live
    ended = ends.gather(1, (new - 1).clamp_min(0)[:, None]).squeeze(1)
    state.live.logical_and_(~ended)
    state.pos.add_(new)
    return torch.minimum(n, new), new


def speculate(target, drafter, state: State, sampling, block: bool = False) -> Round:
    """One round, and one compiled graph: no value is read on the host, no shape depends on what was accepted.
    block: guesses drawn from q are judged by accept_block instead of accept_sampled; a constant of the graph."""
    if block:                                   # noise that decided one round's text is not used in the next one
        sampling = Reseeded(sampling, sampling.seed ^ (state.pos << 40))
    draft = drafter.propose(state, sampling)
    p, hidden = verify(target, state, draft, sampling, drafter.taps)
    if draft.q is not None:
        accept = accept_block if block else accept_sampled
        n, out = accept(draft.tokens, draft.q, p, sampling.seed, state.pos, draft.valid)
    else:
        n, out, path = accept_matched(draft.tokens, draft.tree, p, sampling.seed, state.pos, draft.valid)
        if draft.tree is not None:              # past these two lines a tree is a chain: no drafter knows trees
            state.cache.compact(state.pos, path)
            hidden, p = (along(path, rows, draft.watched) for rows in (hidden, p))
    n, new = commit(state, out, n)
    drafter.observe(state, out, n, hidden, p)
    K = out.shape[1] - 1
    return Round(out, n, new, torch.full_like(n, K) if draft.valid is None else draft.valid.clamp_max(K))
