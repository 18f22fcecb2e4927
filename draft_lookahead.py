"""Lookahead decoding: the target guesses for itself; no draft model, no training (Fu et al. 2024, arXiv 2402.02057).

A window of guesses runs ahead of the text, and the forward that verifies a round's candidates improves it by one Jacobi
step.  Its cell (row r, column c) is a guess for the position r + c past the newest token, which is cell (0, 0) itself:

    position   0  1  2  3  4      N = 3, W = 3.  What the target says after the last row completes W n-grams, a d g,
    row 0      a  b  c            b e h and c f i: column c of every row.  They go to a pool, and the window moves on
    row 1         d  e  f         by one row, to d e f and g h i, where the token that was really written replaces d.
    it says          g  h  i

N-grams of the pool whose first token is the newest one are the candidates.  They and the window are fed as one tree: a
cell of row 0 hangs under the cell to its left, any other under the cell of its column one row up, and so each sees what
the paper's Figure 2 says.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_eagle import Grown
from speculate import Draft, State, Tree

POOL = 4096     # n-grams that a row remembers: those of the last few hundred rounds


def cells_and_candidates(W: int, N: int, G: int) -> list[int]:
    """Parents of all nodes, as Tree takes them: G candidates one after the other, then the window row by row, without
    its cell (0, 0), which is node 0.  W = 2, N = 3, G = 1 -> [0, 1, 0, 0, 3]"""
    cell = lambda r, c: G * (N - 1) + r * W + c if r or c else 0
    chains = [g * (N - 1) + j if j else 0 for g in range(G) for j in range(N - 1)]
    return chains + [cell(r - 1, c) if r else cell(0, c - 1) for r in range(N - 1) for c in range(W) if r or c]


class LookaheadDraft(nn.Module):
    """Window W, n-grams of N, at most G candidates a round.  Chosen, not drawn: exact at any temperature."""
    taps = ()

    def __init__(self, state: State, W: int, N: int, G: int):
        super().__init__()
        B, device = len(state.pos), state.pos.device
        self.W, self.N, self.G = W, N, G
        self.tree = Tree(cells_and_candidates(W, N, G), device)
        self.nodes = len(self.tree.parents)                                         # (W + G) * (N - 1) - 1
        self.register_buffer("window", torch.zeros(B, N - 1, W, dtype=torch.int64, device=device))
        self.register_buffer("pool", torch.full((B, POOL, N), -1, device=device))   # a queue, newest last; -1: nothing

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        """All of it anew from the text so far.  The first guess is that its last W + N - 3 tokens come again."""
        pos, device = state.pos[:, None, None], state.pos.device
        ahead = torch.arange(self.N - 1, device=device)[:, None] + torch.arange(self.W, device=device)
        at = (pos - (self.W + self.N - 3) + ahead) % (pos + 1)                      # of a shorter text, all of it again
        self.move_on(state, state.tokens.gather(1, at.flatten(1)).view_as(self.window))
        self.pool.copy_(self.text(state, POOL))

    def move_on(self, state: State, window: Tensor):
        self.window.copy_(window)
        self.window[:, 0, 0] = state.tokens.gather(1, state.pos[:, None])[:, 0]

    def text(self, state: State, count: int) -> Tensor:
        """The newest `count` n-grams of the text (B, count, N), the newest last; -1 where it has no more of them."""
        first, step = (torch.arange(n, device=state.pos.device) for n in (count, self.N))
        at = state.pos[:, None, None] - (count + self.N - 2) + first[:, None] + step
        return torch.where(at[..., :1] < 0, -1, state.tokens.gather(1, at.clamp_min(0).flatten(1)).view_as(at))

    def propose(self, state: State, sampling) -> Draft:
        guesses, found = self.candidates()
        # A second sibling of one token is never reached, so candidates that begin alike must part where they differ:
        # what follows the beginning that they share hangs under the first of them.
        alike = (guesses[:, :, None] == guesses[:, None]).long().cumprod(-1)        # (B, G, G, N-1): up to this token
        first = alike.argmax(2)                                                     # (B, G, N-1)
        step = torch.arange(self.N - 1, device=first.device)
        parents = F.pad(first * (self.N - 1) + step + 1, (1, 0))[..., :-1].flatten(1)
        # The window lies past the `valid` guesses: what the target says there is read, but none of it is ever kept.
        parents = F.pad(parents, (0, self.nodes - parents.shape[1]))
        tokens = torch.cat((guesses.clamp_min(0).flatten(1), self.window.flatten(1)[:, 1:]), 1)
        tree = Grown(self.N - 1, parents, self.tree.depth, self.tree.sees)
        last_row = min(self.W, self.W * (self.N - 1) - 1)                           # N = 2: without cell (0, 0)
        return Draft(tokens, tree=tree, valid=found * (self.N - 1), watched=last_row)

    def candidates(self) -> tuple[Tensor, Tensor]:
        """The newest n-grams of the pool that begin with the newest token, no two the same
        -> what follows that token in them (B, G, N-1), and how many there are (B,); the others are anything."""
        rows, age = (torch.arange(n, device=self.pool.device) for n in self.pool.shape[:2])
        score = torch.where(self.pool[..., 0] == self.window[:, 0, :1], age, -1)    # (B, POOL)
        guesses, found = [], []
        for _ in range(self.G):
            gram = self.pool[rows, score.argmax(1)]                                 # (B, N)
            guesses.append(gram[:, 1:])
            found.append(score.amax(1) >= 0)
            score = torch.where((self.pool == gram[:, None]).all(-1), -1, score)
        return torch.stack(guesses, 1), torch.stack(found, 1).sum(1)

    def observe(self, state: State, out: Tensor, n: Tensor, hidden: Tensor, p: Tensor):
        """One step of the window.  Its n-grams go to the pool, then, as newer, those that the text really brought."""
        says = p.argmax(-1)                                                         # (B, N + those of the last row)
        says = torch.cat((says[:, :1], says[:, self.N:]), 1)[:, -self.W:]           # N = 2: cell (0, 0) begins the path
        grams = torch.cat((self.window, says[:, None]), 1)                          # (B, N, W)
        self.move_on(state, grams[:, 1:])
        self.pool.copy_(torch.cat((self.pool[:, self.W + self.N:], grams.transpose(1, 2), self.text(state, self.N)), 1))
