"""Corner cases of the accept functions, each on thousands of independent rows."""
import pytest
import torch

import speculate as engine
from sample import Sampling
from speculate import accept_block, accept_matched, accept_sampled

both = pytest.mark.parametrize("accept", [accept_sampled, accept_block])


def accept_many(accept, tokens, q, p, rows=4000):
    seed = torch.arange(rows)
    big = lambda x: x.expand(rows, *x.shape)
    return accept(big(tokens), big(q), big(p), seed, torch.zeros_like(seed))


@both
def test_equal_disjoint_and_one_hot(accept):
    """Case 7.  Killed: every guess kept."""
    p = torch.tensor([[0.25, 0.75, 0.0, 0.0]] * 3)
    n, out = accept_many(accept, torch.tensor([1, 0]), p[:2], p)
    assert (n == 2).all() and (out[:, :2] == torch.tensor([1, 0])).all() and (out[:, 2] < 2).all()
    q = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * 2)
    n, out = accept_many(accept, torch.tensor([3, 2]), q, p)
    assert (n == 0).all() and (out[:, 0] < 2).all() and abs((out[:, 0] == 1).float().mean() - 0.75) < 0.03
    one = torch.eye(4)
    n, out = accept_many(accept, torch.tensor([2, 2]), one[[2, 2]], one[[2, 2, 1]])
    assert (n == 2).all() and (out == torch.tensor([2, 2, 1])).all()
    n, out = accept_many(accept, torch.tensor([2, 2]), one[[2, 2]], one[[3, 2, 1]])
    assert (n == 0).all() and (out[:, 0] == 3).all()


@both
def test_an_empty_residual_falls_back_to_p(accept, monkeypatch):
    """p = q, refused all the same, as rounding can do: max(p - q, 0) holds nothing.  Killed: no fallback (token 0)."""
    monkeypatch.setattr(engine, "uniform", lambda seed, role, pos: torch.ones_like(pos + seed).float())
    p = torch.tensor([[0.0, 0.25, 0.75]] * 2)
    n, out = accept_many(accept, torch.tensor([2]), p[:1], p)
    assert (n == 0).all() and (out[:, 0] > 0).all() and abs((out[:, 0] == 2).float().mean() - 0.75) < 0.03


@both
def test_impossible_token_is_never_emitted(accept, monkeypatch):
    """Case 6, in bfloat16, also with u forced to 0.  Killed: `<=` for `<`; residual taken from the untruncated p."""
    rows = 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0]).bfloat16()
    p = engine.probs(logits.expand(rows, 2, 6), Sampling(rows, temperature=1.0, top_k=2))
    q = torch.full((6,), 0.01)
    q[4] = 0.95
    seed = torch.arange(rows)
    for zero in (False, True):
        if zero:
            monkeypatch.setattr(engine, "uniform", lambda seed, role, pos: torch.zeros_like(pos + seed).float())
        n, out = accept(torch.full((rows, 1), 4), q.expand(rows, 1, 6), p, seed, torch.zeros_like(seed))
        assert (n == 0).all() and (out[:, 0] < 2).all()


@both
def test_valid_limits_each_row(accept):
    """Rows may draft fewer than K: what follows the last valid guess is drawn from p, whatever q says there."""
    p = torch.tensor([[0.5, 0.3, 0.2]] * 4)
    seed = torch.arange(30_000)
    valid = seed % 4
    q = torch.tensor([0.5, 0.3, 0.2])
    n, out = accept(torch.zeros(30_000, 3, dtype=torch.int64), q.expand(30_000, 3, 3), p.expand(30_000, 4, 3), seed,
                    torch.zeros_like(seed), valid)
    assert (n == valid).all()                                   # p = q: everything valid is kept, then a draw from p
    last = out.gather(1, n[:, None]).squeeze(1)
    for v in range(4):
        law = torch.bincount(last[valid == v], minlength=3) / (valid == v).sum()
        assert (law - p[0]).abs().max() < 0.03
    matched = accept_matched(out[:, :3], None, p.expand(30_000, 4, 3), seed, torch.zeros_like(seed), valid)[0]
    assert (matched <= valid).all() and (matched < valid).any() and (matched == valid).any()
