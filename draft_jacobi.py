"""Jacobi decoding: the target corrects its own guesses, all positions at once (Santilli et al. 2023, arXiv 2305.10427).
"""
import torch
from torch import Tensor, nn

from speculate import Draft, State


class JacobiDraft(nn.Module):
    """K guesses, at first the newest token again and again.  In every round the target says, at each position, which
    token it would put there after the guesses before it.  Up to the first guess that differs this is text; past it, it
    is the next round's guesses: Jacobi's iteration for x_i = f(x_1 .. x_(i-1)), the base of lookahead decoding (Fu et
    al. 2024, arXiv 2402.02057).  At a temperature f is the draw with the noise of position i, which is what
    accept_matched will compare with: it has a fixed point as argmax has.  Chosen, not drawn: no q."""
    taps = ()

    def __init__(self, state: State, K: int):
        super().__init__()
        self.nodes = K
        self.register_buffer("guesses", torch.zeros(len(state.pos), K, dtype=torch.int64, device=state.pos.device))

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        self.guesses.copy_(state.tokens.gather(1, state.pos[:, None]).expand_as(self.guesses))

    def propose(self, state: State, sampling) -> Draft:
        return Draft(self.guesses)

    def observe(self, state: State, out: Tensor, n: Tensor, hidden: Tensor, p: Tensor):
        """Row n of out (B, K+1) is the newest token, the rows past it are about the positions to guess.  The last row
        (at n = K the newest token) stands for those about which nothing was said yet."""
        ahead = n[:, None] + 1 + torch.arange(self.nodes, device=n.device)
        self.guesses.copy_(out.gather(1, ahead.clamp_max(self.nodes)))
