"""EAGLE: a drafter of one decoder layer that reads the target's mind (Li et al. 2024, arXiv 2401.15077; EAGLE-3: 2503.01840).

An independent draft must work out the text for itself.  EAGLE is told what the target made of it: slot i of its one-layer
cache holds the pair (target's features at position i, token at position i + 1), and its output there guesses token i + 2.
Beyond the newest token there are no features yet: its own output takes their place.
"""
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafts import guess_noise
from model import CHUNK, Block, Config, KVCache, Linear, RMSNorm, linear, places, rotate
from sample import draw, probs
from speculate import Draft, State


class Eagle(nn.Module):
    """The trained part.  What it borrows from the target (embed, freq, head, index) comes with draft_trained.borrow."""

    def __init__(self, config: Config, vocab: Tensor, taps: tuple[int, ...]):
        super().__init__()
        self.config, self.taps, c = config, tuple(taps), config
        self.fuse = Linear(len(taps) * c.dim, c.dim, bias=False)         # features of several layers -> one
        self.token_norm, self.feature_norm = RMSNorm(c.dim, c.norm_eps), RMSNorm(c.dim, c.norm_eps)
        self.join = Linear(2 * c.dim, c.dim, bias=False)
        self.block, self.norm = Block(c), RMSNorm(c.dim, c.norm_eps)
        self.register_buffer("vocab", vocab)

    def pair(self, tokens: Tensor, features: Tensor) -> Tensor:
        """tokens (B, T) and the features (B, T, dim) one position before them -> the layer's input (B, T, dim)."""
        embedded = self.embed(tokens)
        return self.join(torch.cat((self.token_norm(embedded), self.feature_norm(features)), -1))

    def forward(self, tokens, features, pos, cache: KVCache, span: int, depth=None, sees=None) -> Tensor:
        """Feed pairs to slots pos..pos+T-1, pos (B,) -> (B, T, dim): features guessed for the position of each token."""
        x = self.pair(tokens, features)
        return self.block(x, *places(self.config, self.freq, x, pos, span, depth, sees), *cache.layer(0))

    def logits(self, guessed: Tensor) -> Tensor:
        """(..., dim) -> (..., R)"""
        return linear(self.norm(guessed), self.output)

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Training: what `propose` would compute from every position at once.  tokens (B, T), features (B, T, taps*dim)
        -> `depth` tensors (B, T, dim): [s][:, t] is the (s+1)-th guess after t's pair, so it is about token t + 2 + s.
        From the second on a guess reads the guess before it, as it will when drafting (EAGLE-3's training-time test)."""
        B, T = tokens.shape
        c, block, guessed, keys, out = self.config, self.block, self.fuse(features), [], []
        mask = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        for s in range(depth):
            fed = F.pad(tokens, (0, s + 1))[:, s + 1:]                  # (B, T): token t + 1 + s
            x = self.pair(fed, guessed)
            at = torch.full((B,), s, device=tokens.device)
            cos, sin, *_ = places(c, self.freq, x, at, 1)
            y = block.attn_norm(x)
            q, k, v = (m(y).view(B, T, -1, c.head_dim).transpose(1, 2) for m in (block.q, block.k, block.v))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys.append((k, v))
            x = x + block.o(chain_attention(q, keys, mask).transpose(1, 2).reshape(B, T, -1))
            y = block.ffn_norm(x)
            guessed = x + block.down(F.silu(block.gate(y)) * block.up(y))
            out.append(guessed)
        return out


def chain_attention(q: Tensor, keys: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """q (B, H, T, D) of one step; keys and values (B, G, T, D) of all steps so far.  Position t sees the first step's slots up
    to t (mask (T, T)), and of the later steps only its own chain: slot t of each."""
    (k, v), *own = [(k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
                    for k, v in keys]
    q = q * q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores] + [(q * k).sum(-1, keepdim=True) for k, _ in own], -1).softmax(-1)
    T = q.shape[2]
    return scores[..., :T] @ v + sum(scores[..., T + i, None] * v for i, (_, v) in enumerate(own))


class EagleDraft(nn.Module):
    """A chain of K guesses, each drawn from q.  A module, because what it remembers between rounds must be buffers."""
    most = 16

    def __init__(self, model: Eagle, state: State, K: int, couple: bool = False):
        super().__init__()
        B, S = state.tokens.shape
        weight = model.embed.weight
        self.model, self.nodes, self.taps, self.couple, self.chosen = model, K, model.taps, couple, False
        self.cache = KVCache(replace(model.config, layers=1), B, S, weight.device, weight.dtype)
        self.register_buffer("at", torch.zeros_like(state.pos))          # slot of the pair that the next features belong to
        self.register_buffer("guessed", torch.zeros(B, 1, model.config.dim, device=weight.device, dtype=weight.dtype))

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        """Pairs of the prompt: their tokens are one ahead of their features, and the newest token is drawn already."""
        for start in range(0, hidden.shape[1], CHUNK):
            pos = (begin + start).clamp_max(state.tokens.shape[1] - CHUNK)      # as Transformer.prefill places its chunks
            slots = pos[:, None] + torch.arange(CHUNK, device=pos.device)
            tokens = state.tokens.gather(1, (slots + 1).clamp_max(state.tokens.shape[1] - 1))
            features = self.model.fuse(hidden[:, start:start + CHUNK])
            guessed = self.model(tokens, features, pos, self.cache, int(pos.max()) + CHUNK)
            last = (state.pos - 1 - pos)[:, None, None]                         # the newest pair, where this chunk holds it
            here = guessed.gather(1, last.clamp(0, CHUNK - 1).expand_as(self.guessed))
            self.guessed.copy_(torch.where((last >= 0) & (last < CHUNK), here, self.guessed))
        self.at.copy_(state.pos)

    def propose(self, state: State, sampling) -> Draft:
        race = guess_noise(state, sampling, self.nodes, self.model.vocab, self.couple, self.chosen)     # (B, K, R)
        guessed, tokens, q = self.guessed, [], []
        for i in range(self.nodes):
            if i:
                guessed = self.model(tokens[-1], guessed, self.at + i - 1, self.cache, state.span)
            q.append(probs(self.model.logits(guessed), sampling))                               # (B, 1, R)
            tokens.append(self.model.vocab[draw(q[-1], race[:, i:i + 1])])
        if self.couple or self.chosen:
            return Draft(torch.cat(tokens, 1))
        # R probabilities -> V: the other tokens are never guessed, so their q is 0, which is all that losslessness asks
        q = F.pad(torch.cat(q, 1), (0, 1))[..., self.model.index]
        return Draft(torch.cat(tokens, 1), q)

    def observe(self, state: State, out: Tensor, n: Tensor, hidden: Tensor, p: Tensor):
        """The target's features replace the guessed ones: K+1 pairs are fed, of which n+1 count."""
        guessed = self.model(out, self.model.fuse(hidden), self.at, self.cache, state.span)
        self.guessed.copy_(guessed.gather(1, n[:, None, None].expand_as(self.guessed)))
        self.at.copy_(state.pos)


class EagleTree(EagleDraft):
    """EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the N likeliest nodes of a tree that is K levels deep, chosen anew every
    round.  Each level's `width` best nodes get `width` children each; a node is as likely as its path, so the best N hold
    their own ancestors.  Nothing is drawn: the shapes never change, only which tokens and whose children."""
    most = 0                                    # of another number there would be other levels: it is one tree

    def __init__(self, model: Eagle, state: State, K: int, N: int, width: int):
        super().__init__(model, state, K)
        if not K <= N <= width + (K - 1) * width ** 2:
            raise ValueError(f"a tree of {N} nodes cannot be {K} levels deep and {width} wide: "
                             f"give {K} to {width + (K - 1) * width ** 2} nodes")
        if (K - 1) * width > N:     # the levels are fed to slots past the text, and only N + 1 of those are kept free
            raise ValueError(f"{K} levels of width {width} need {(K - 1) * width} slots, {N} nodes have {N}: give more nodes")
        self.nodes, self.K, self.width = N, K, width

    def propose(self, state: State, sampling) -> Draft:
        B, w, device = len(state.pos), self.width, state.pos.device
        # the candidates (B, M): token, log-probability of the path, the candidate it hangs under (-1: the newest token)
        token, score, parent, level = [], [], [], []
        # the nodes that were given children: what is fed, whom each sees, which candidates they are
        fed, features, sees = [], [], torch.zeros(B, 0, 0, dtype=torch.bool, device=device)
        guessed, path, beam = self.guessed, torch.zeros(B, 1, device=device), torch.full((B, 1), -1, device=device)
        for depth in range(1, self.K + 1):
            best = self.model.logits(guessed).float().log_softmax(-1).topk(w, -1)
            # a hair less than its parent even at probability 1, so that no node is ever chosen before its parent
            score.append((path[..., None] + best.values - 1e-3).flatten(1))                     # (B, w) or (B, w * w)
            token.append(self.model.vocab[best.indices].flatten(1))
            parent.append(beam.repeat_interleave(w, 1))
            level.append(torch.full_like(parent[-1], depth))
            if depth == self.K:
                break
            path, chosen = (x[:, :w] for x in score[-1].sort(dim=-1, descending=True, stable=True))
            above = chosen // w                                                 # which of the beam it hangs under
            features.append(guessed.gather(1, above[..., None].expand(-1, -1, guessed.shape[-1])))
            fed.append(token[-1].gather(1, chosen))
            seen = F.pad(sees[:, -w:].gather(1, above[..., None].expand(-1, -1, sees.shape[2])), (0, w)) if depth > 1 else \
                torch.zeros(B, w, w, dtype=torch.bool, device=device)
            seen = seen | F.pad(torch.eye(w, dtype=torch.bool, device=device), (seen.shape[2] - w, 0))
            sees = torch.cat((F.pad(sees, (0, w)), seen), 1)
            beam = sum(x.shape[1] for x in score[:-1]) + chosen
            below = torch.arange(depth, device=device).repeat_interleave(w)
            guessed = self.model(torch.cat(fed, 1), torch.cat(features, 1), self.at, self.cache, state.span, below, sees)[:, -w:]
        token, score, parent, level = (torch.cat(x, 1) for x in (token, score, parent, level))
        order = score.sort(dim=-1, descending=True, stable=True).indices[:, :self.nodes].sort(-1).values    # parents come first
        # a chosen candidate's node is how many were chosen up to it; the newest token, candidate -1, is node 0
        parents = (order[:, None] <= parent.gather(1, order)[..., None]).sum(-1)                # (B, N)
        tree = grown(parents, level.gather(1, order), self.K)
        return Draft(token.gather(1, order), tree=tree)


class Grown(NamedTuple):
    """A tree with one shape a row, as `Tree` has one for all: parents (B, N), depth (B, N+1), sees (B, N+1, N+1)."""
    K: int
    parents: Tensor
    depth: Tensor
    sees: Tensor


def grown(parents: Tensor, depth: Tensor, K: int) -> Grown:
    above = F.pad(parents, (1, 0))                                              # (B, N+1): the root is its own parent
    nodes = torch.arange(above.shape[1], device=above.device)
    ancestor, sees = nodes.expand_as(above), torch.zeros(*above.shape, above.shape[1], dtype=torch.bool, device=above.device)
    for _ in range(K + 1):
        sees = sees | (ancestor[..., None] == nodes)
        ancestor = above.gather(1, ancestor)
    return Grown(K, parents, F.pad(depth, (1, 0)), sees)
