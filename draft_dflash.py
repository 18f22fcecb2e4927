"""DFlash: a whole block of guesses from one forward (Chen, Liang, Liu 2026, arXiv 2602.06036).

EAGLE guesses token after token, each from the guess before it.  Here the newest token is followed by one mask for every token
to come; these see each other, both ways, and the target's features of all the text before, which each layer projects into
keys and values of its own.  The guesses of a block are made together: none knows what was drawn for another, so later ones
are right less often than a chain's, and all of them cost what one costs.
"""
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafts import guess_noise
from model import CHUNK, Block, Config, KVCache, Linear, RMSNorm, linear, places
from sample import draw, probs
from speculate import Draft, State


class DFlash(nn.Module):
    """The trained part.  What it borrows from the target (embed, freq, output, index) comes with draft_trained.borrow."""

    def __init__(self, config: Config, vocab: Tensor, taps: tuple[int, ...], layers: int = 2, ffn_dim: int = 1024,
                 block: int = 4):
        """block: the most guesses it makes at once."""
        super().__init__()
        self.config, self.taps, self.block = replace(config, layers=layers, ffn_dim=ffn_dim), tuple(taps), block
        c = self.config
        self.fuse = Linear(len(taps) * c.dim, c.dim, bias=False)         # features of several layers -> one
        self.token_norm, self.feature_norm = RMSNorm(c.dim, c.norm_eps), RMSNorm(c.dim, c.norm_eps)
        self.mask = nn.Parameter(torch.empty(c.dim))
        self.layers, self.norm = nn.ModuleList(Block(c) for _ in range(layers)), RMSNorm(c.dim, c.norm_eps)
        self.register_buffer("vocab", vocab)

    def remember(self, features: Tensor, pos: Tensor, cache: KVCache) -> Tensor:
        """The target's features (B, T, taps*dim) of positions pos.., pos (B,), become keys and values of every layer.
        -> the features, fused (B, T, dim)"""
        x = self.fuse(features)
        where = places(self.config, self.freq, x, pos, 1)
        for i, block in enumerate(self.layers):
            block.attention(block.attn_norm(x), *where, *cache.layer(i))        # for what it writes: nobody reads the result
        return x

    def blank(self, tokens: Tensor, fused: Tensor, K: int) -> Tensor:
        """Newest tokens (...), the features (..., dim) one position before them -> blocks (..., K+1, dim): the token, then a
        mask for each guess.  All begin with those features, which the paper's do not: after 110 steps of training 0.16
        of the first guesses were kept with them and 0.11 without."""
        x = self.token_norm(self.embed(tokens))[..., None, :]
        x = torch.cat((x, self.mask.to(x.dtype).expand(*tokens.shape, K, -1)), -2)
        return x + self.feature_norm(fused)[..., None, :]

    def forward(self, x: Tensor, where, cache: KVCache) -> Tensor:
        """Blocks, placed as model.places says -> (B, T, dim) for `logits`."""
        for i, block in enumerate(self.layers):
            x = block(x, *where, *cache.layer(i))
        return x

    def logits(self, guessed: Tensor) -> Tensor:
        """(..., dim) -> (..., R)"""
        return linear(self.norm(guessed), self.output)

    def unroll(self, tokens: Tensor, features: Tensor, depth: int, at: Tensor | None = None) -> list[Tensor]:
        """Training: what `propose` would compute after some positions at once.  tokens (B, T), features (B, T, taps*dim),
        at (B, A), all T if None -> `depth` tensors (B, A, dim): [s][:, i] is about token t + 2 + s, t = at[:, i], and was
        told the features up to t and token t + 1.  All blocks lie behind the text in one cache, each seeing its own."""
        B, T = tokens.shape
        c, device = self.config, tokens.device
        at = torch.arange(T, device=device).expand(B, T) if at is None else at
        N = at.shape[1] * (depth + 1)
        cache, begin = KVCache(c, B, T + N, device, self.output.dtype), torch.zeros(B, dtype=torch.int64, device=device)
        fused = self.remember(features, begin, cache).gather(1, at[..., None].expand(-1, -1, c.dim))
        x = self.blank(F.pad(tokens, (0, 1)).gather(1, at + 1), fused, depth).flatten(1, 2)     # (B, N, dim)
        position = (at[..., None] + 1 + torch.arange(depth + 1, device=device)).flatten(1)      # (B, N)
        cos, sin, _, slots = places(c, self.freq, x, begin + T, 1, position - T)
        own = torch.arange(N, device=device) // (depth + 1)
        known = torch.arange(T, device=device) <= at.repeat_interleave(depth + 1, 1)[..., None]
        sees = torch.cat((known, (own[:, None] == own).expand(B, N, N)), -1)                    # (B, N, T+N)
        bias = torch.where(sees, 0.0, -torch.inf).to(x.dtype)[:, None].repeat(1, 1, c.heads // c.kv_heads, 1)
        guessed = self(x, (cos, sin, bias, slots), cache).unflatten(1, (-1, depth + 1))
        return list(guessed[:, :, 1:].unbind(2))


class DFlashDraft(nn.Module):
    """A block of K guesses, each drawn from its q, or the likeliest of it where they are `chosen`."""

    def __init__(self, model: DFlash, state: State, K: int, couple: bool = False, chosen: bool = False):
        super().__init__()
        if K > model.block:
            raise ValueError(f"this DFlash guesses blocks of {model.block} tokens, not {K}: -k {model.block} is the most")
        B, S = state.tokens.shape
        weight = model.embed.weight
        self.model, self.nodes, self.taps, self.most = model, K, model.taps, model.block
        self.couple, self.chosen = couple, chosen
        self.cache = KVCache(model.config, B, S, weight.device, weight.dtype)
        self.register_buffer("at", torch.zeros_like(state.pos))         # the position that the next features belong to
        self.register_buffer("known", torch.zeros(B, 1, model.config.dim, device=weight.device, dtype=weight.dtype))

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        for start in range(0, hidden.shape[1], CHUNK):
            pos = (begin + start).clamp_max(state.tokens.shape[1] - CHUNK)      # as Transformer.prefill places its chunks
            self.model.remember(hidden[:, start:start + CHUNK], pos, self.cache)
        self.known.copy_(self.model.fuse(row(hidden, (state.pos - 1 - begin).clamp_min(0))))
        self.at.copy_(state.pos)

    def propose(self, state: State, sampling) -> Draft:
        model, K = self.model, self.nodes
        x = model.blank(state.tokens.gather(1, state.pos[:, None]), self.known, K).squeeze(1)   # (B, K+1, dim)
        both_ways = torch.ones(K + 1, K + 1, dtype=torch.bool, device=x.device)
        where = places(model.config, model.freq, x, state.pos, state.span, sees=both_ways)
        logits = model.logits(model(x, where, self.cache)[:, 1:])                               # (B, K, R)
        q = probs(logits, sampling)
        tokens = model.vocab[draw(q, guess_noise(state, sampling, K, model.vocab, self.couple, self.chosen))]
        # R probabilities -> V: the other tokens are never guessed, so their q is 0, which is all that losslessness asks
        return Draft(tokens, None if self.couple or self.chosen else F.pad(q, (0, 1))[..., model.index])

    def observe(self, state: State, out: Tensor, n: Tensor, hidden: Tensor, p: Tensor):
        """Features of all K+1 tokens are written; those of the refused lie past the text, under the next block."""
        self.known.copy_(row(self.model.remember(hidden, self.at, self.cache), n))
        self.at.copy_(state.pos)


def row(x: Tensor, i: Tensor) -> Tensor:
    """x (B, T, .), i (B,) -> (B, 1, .)"""
    return x.gather(1, i[:, None, None].expand(-1, 1, x.shape[-1]))
