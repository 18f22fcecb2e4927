"""Block verification: its law worked out exactly from accept_block's own verdicts and residuals, and what it is worth.

The joint law of several rounds, where noise used twice would show, is test_law.py's.
"""
import itertools
import json
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import bench
import speculate as engine
from conftest import decode, greedy_alone, prompts_for
from speculate import accept_block, speculate
from test_bench import eager            # noqa: F401    fixtures: whole commands on tiny models, nothing compiled
from test_generate import models, rows, run             # noqa: F401

V = 3


def chains(K: int, seed: int, sharp=1.0, zeros=()):
    """Every chain of K guesses, and random laws that depend on all before: x (V**K, K), q (V**K, K, V), p (V**K, K+1, V).
    A token in zeros is impossible for the target (draft) after every second prefix."""
    g, laws = torch.Generator().manual_seed(seed), {}
    paths = list(itertools.product(range(V), repeat=K))
    for who, depths in (("q", K), ("p", K + 1)):
        for prefix in itertools.chain(*(itertools.product(range(V), repeat=i) for i in range(depths))):
            law = (sharp * torch.randn(V, generator=g)).softmax(-1)
            if who in zeros and sum(prefix) % 2 == 0:
                law[len(prefix) % V] = 0
            laws[who, prefix] = law / law.sum()
    row = lambda who, depths: torch.stack([torch.stack([laws[who, x[:i]] for i in range(depths)]) for x in paths])
    return torch.tensor(paths), row("q", K), row("p", K + 1)


def with_noise(monkeypatch, accept, x, q, p, u, valid=None):
    """accept under chosen uniforms u (B, K), the verdict on guess i at position i -> n (B,), weights of the draw (B, V)."""
    module, seen = accept.__globals__, []
    at = lambda pos: (pos - 1).clamp_min(0).expand(len(u), -1)
    monkeypatch.setitem(module, "uniform", lambda seed, role, pos: u.gather(1, at(pos)))
    monkeypatch.setitem(module, "draw", lambda weights, race: (seen.append(weights), weights.argmax(-1))[1])
    zero = torch.zeros(len(x), dtype=torch.int64)
    n, _ = accept(x, q, p, zero, zero, valid)
    monkeypatch.undo()
    return n, seen[0]


def verdicts(monkeypatch, accept, x, q, p):
    """-> h (B, K): guess i + 1 ends the kept part if its own u is below h and no later one passes; found by bisection
    with all other u at 1.  rest (B, K+1, V): the law of the token after each number of kept guesses."""
    B, K = x.shape
    h, rest = torch.zeros(B, K), torch.zeros(B, K + 1, V, dtype=torch.float64)
    for i in range(K + 1):
        u, below, above = torch.ones(B, K), torch.zeros(B), torch.ones(B)
        for _ in range(30 if i else 1):
            if i:
                u[:, i - 1] = (below + above) / 2
            n, weights = with_noise(monkeypatch, accept, x, q, p, u)
            rest[n == i, i] = (weights / weights.sum(-1, keepdim=True)).double()[n == i]
            if i:
                below, above = torch.where(n == i, u[:, i - 1], below), torch.where(n == i, above, u[:, i - 1])
        if i:
            h[:, i - 1] = torch.where(above == 1, 1.0, torch.where(below == 0, 0.0, (below + above) / 2))
    return h.double(), rest


def stops(h) -> torch.Tensor:
    """h (B, K) -> P(n = i | the chain) (B, K+1): i passes and no later one does."""
    one = torch.ones(len(h), 1, dtype=h.dtype)
    later = torch.cat(((1 - h).flip(1).cumprod(1).flip(1), one), 1)
    return torch.cat((one, h), 1) * later


def joint(x, q, p, n_law, rest) -> torch.Tensor:
    """-> the law of K + 1 tokens (V,)*(K+1): kept guesses, the draw, and then the target as if nothing had happened."""
    B, K = x.shape
    law, target = torch.zeros([V] * (K + 1), dtype=torch.float64), target_law(p, K)
    weight = q.double().gather(2, x[..., None]).squeeze(2).prod(1)
    for row, i, v in itertools.product(range(B), range(K + 1), range(V)):
        prefix = (*x[row, :i].tolist(), v)
        after = target[prefix]
        law[prefix] += weight[row] * n_law[row, i] * rest[row, i, v] * (after / after.sum() if after.sum() else after)
    return law


def target_law(p, K) -> torch.Tensor:
    """p (V**K, K+1, V) in the order of chains -> P(K + 1 tokens) (V,)*(K+1)."""
    law = torch.ones(1, dtype=torch.float64)
    for i in range(K + 1):
        law = (law[:, None] * p[::V ** (K - i), i].double()).flatten()
    return law.view([V] * (K + 1))


def distance(monkeypatch, accept, laws) -> float:
    x, q, p = laws
    h, rest = verdicts(monkeypatch, accept, x, q, p)
    return (joint(x, q, p, stops(h), rest) - target_law(p, x.shape[1])).abs().max().item()


CASES = [dict(seed=0), dict(seed=1, sharp=3.0), dict(seed=2, zeros="p"), dict(seed=3, zeros="q"),
         dict(seed=4, zeros="pq", sharp=2.0)]


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_is_the_targets(K, case, monkeypatch):
    """All chains, all verdicts, float32 rounding aside."""
    assert distance(monkeypatch, accept_block, chains(K, **case)) < 2e-6


def test_the_longest_guess_that_passes_ends_the_block(monkeypatch):
    """What the enumeration supposes: each verdict looks at its own u alone."""
    x, q, p = chains(3, seed=0)
    h, _ = verdicts(monkeypatch, accept_block, x, q, p)
    x, q, p, h = (t.repeat(400, *[1] * (t.dim() - 1)) for t in (x, q, p, h))
    u = torch.rand(len(x), 3, generator=torch.Generator().manual_seed(0))
    n, _ = with_noise(monkeypatch, accept_block, x, q, p, u)
    assert torch.equal(n, ((u < h) * torch.arange(1, 4)).amax(1)) and n.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("K", [1, 2, 3])
def test_it_keeps_at_least_as_many(K, monkeypatch):
    """Expected kept guesses, exactly: P(n >= i) is E[w_i] for a block, E[product of min(1, p/q)] token by token.
    The same for K = 1; more for every random pair of longer chains."""
    for seed in range(3):
        x, q, p = chains(K, seed)
        weight, x_ = q.double().gather(2, x[..., None]).squeeze(2).prod(1), x[..., None]
        n_law = stops(verdicts(monkeypatch, accept_block, x, q, p)[0])
        block = (weight[:, None] * n_law * torch.arange(K + 1)).sum()
        ratio = (p[:, :K].gather(2, x_) / q.gather(2, x_)).squeeze(2).double()
        token = (weight[:, None] * ratio.clamp_max(1).cumprod(1)).sum()
        assert abs(block - token) < 1e-6 if K == 1 else block > token + 1e-4
        best, w = 0, torch.ones(len(x), dtype=torch.float64)
        for i in range(K):
            w = (w * ratio[:, i]).clamp_max(1)
            best += (weight * w).sum()
        assert abs(block - best) < 1e-6


def test_the_papers_example(monkeypatch):
    """Section 1 of Sun et al.: q = (2/3, 1/3), p = (1/3, 2/3), two guesses: 11/9 are kept, token by token 10/9."""
    x = torch.tensor(list(itertools.product(range(V), repeat=2)))
    q, p = torch.tensor([2., 1, 0]).expand(9, 2, V) / 3, torch.tensor([1., 2, 0]).expand(9, 3, V) / 3
    n_law = stops(verdicts(monkeypatch, accept_block, x, q, p)[0])
    kept = (q.gather(2, x[..., None]).squeeze(2).prod(1, keepdim=True) * n_law * torch.arange(3)).sum()
    assert kept.item() == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize("K", [2, 3])
def test_rows_that_guess_fewer(K, monkeypatch):
    """A row whose first m guesses count is judged as a chain of m, whatever stands behind, a q of 0 included.
    Killed: q not cut at valid; a verdict past valid."""
    x, q, p = chains(K, seed=5)
    u = torch.rand(len(x), K, generator=torch.Generator().manual_seed(1))
    for m in range(K):
        cut = q.clone()
        cut[:, m:] = 0
        got = with_noise(monkeypatch, accept_block, x, cut if m % 2 else q, p, u, torch.full((len(x),), m))
        if m:
            alone = with_noise(monkeypatch, accept_block, x[:, :m], q[:, :m], p[:, :m + 1], u)
        else:
            alone = torch.zeros(len(x), dtype=torch.int64), p[:, 0]
        assert torch.equal(got[0], alone[0]) and torch.allclose(got[1], alone[1], atol=1e-6)


@pytest.mark.parametrize("kind", ["near", "rand"])
def test_greedy_equals_plain_decoding(kind):
    """At temperature 0 every verdict is certain: the text, and the rounds, of token by token."""
    prompts = prompts_for(3)
    texts, rounds = decode(kind, 3, prompts, 15, step=partial(speculate, block=True))
    assert texts == [greedy_alone(prompt, 15) for prompt in prompts]
    assert rounds == decode(kind, 3, prompts, 15)[1]


def test_a_rows_text_is_its_own():
    """The seed of a round is the row's and the round's: batch mates, other lengths and budgets do not matter."""
    prompts, step = prompts_for(3), partial(speculate, block=True)
    together, _ = decode("near", 3, prompts, 30, step=step, temperature=1.0, seed=[4, 5, 6])
    for prompt, seed, text in zip(prompts, (4, 5, 6), together):
        assert decode("near", 3, [prompt], 20, step=step, temperature=1.0, seed=seed)[0][0] == text[:20]


def test_every_round_has_noise_of_its_own():
    """No two rounds share a seed, of one row or of two, and none has that of the command line.  Killed: seed + pos."""
    seen = []

    class Spy:
        taps, nodes = (), 2

        def propose(self, state, sampling):
            seen.append([s if live else None for s, live in zip(sampling.seed.tolist(), state.live.tolist())])
            assert sampling.truncates and sampling.temperature.tolist() == [1.0] * 5
            return engine.Draft(state.tokens[:, :2])

        def start(self, *a): pass
        observe = start

    seeds = [0, 1, 2, 2 ** 40 - 1, 2 ** 62 - 1]
    step = partial(speculate, block=True)
    decode(None, 2, prompts_for(5), 20, step=step, drafter=Spy(), temperature=1.0, top_k=5, seed=seeds)
    used = seeds + [seed for round in seen for seed in round if seed is not None]
    assert len(used) > 40 and len(set(used)) == len(used) and all(0 <= seed < 2 ** 62 for seed in used)


# ---- the commands

def test_generate_judges_as_asked(rows):                # noqa: F811
    """Killed: --verify that is parsed and never reaches the round; the statistics' "verify" as a constant."""
    ask = ["--raw", "--prompt", "abc", "--max-new-tokens", "20", "-k", "3", "--draft", "{m}/near"]
    told = {(v, t): rows(*ask, "--verify", v, "--temperature", t) for v in ("token", "block") for t in ("0", "1")}
    texts = {key: [row["tokens"] for row in told[key]] for key in told}
    assert texts["token", "0"] == texts["block", "0"] and texts["token", "1"] != texts["block", "1"]
    assert all(row["stats"]["verify"] == verify for (verify, _), batch in told.items() for row in batch)


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_generate_refuses_it_where_nothing_is_drawn(draft, run):        # noqa: F811
    code, out, err = run("--raw", "--prompt", "abc", "--draft", draft, "--verify", "block")
    assert code == 2 and not out and err.count("\n") == 1 and f"of --draft {draft} are chosen: leave --verify out" in err


def test_bench_measures_both(eager, tmp_path):                          # noqa: F811
    """Killed: the block's rows measured token by token."""
    ask = ["-k", "3", "--agreement", "0.5", "--verify", "token", "block", "--json", str(tmp_path / "rows.json")]
    assert bench.main([*eager, *ask]) == 0
    rows = {r["draft"]: r for r in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == ["none", "ngram", "draft", "draft, block"]
    assert 1 < rows["draft, block"]["tokens_per_round"] != rows["draft"]["tokens_per_round"] > 1     # too few to rank them


@pytest.mark.parametrize("argv, message", [([], "give --draft or --shape"), (["--shape", "tiny", "--curve"], "no --curve"),
                                           (["--shape", "tiny", "--temperature", "0"], "give --temperature")])
def test_bench_refuses_what_it_would_ignore(argv, message, capsys):
    assert bench.main([*argv, "--verify", "block", "--threads", "1"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


# ---- planted bugs

MUTANTS = {
    "residual without the block's weight": ("(w[..., None] * p - q)", "(p - q)"),
    "the weight is not capped": ("torch.minimum(w[i] * p_x[:, i], q_x[:, i])", "(w[i] * p_x[:, i])"),
    "each guess is judged alone": ("torch.minimum(w[i] * p_x[:, i], q_x[:, i])", "torch.minimum(p_x[:, i], q_x[:, i])"),
    "the weight is the verdict": ("(u * (mass + (1 - w)) < mass)", "(u < w)"),
    "one verdict for the whole block": ("(u * (mass + (1 - w)) < mass)", "(u[:, -1:] * (mass + (1 - w)) < mass)"),
    "the verdict forgets what falls short": ("(mass + (1 - w))", "mass"),
    "up to the first that fails": ("n = (keep * step).amax(1)", "n = keep[:, 1:].long().cumprod(1).sum(1)"),
    "as many as pass": ("n = (keep * step).amax(1)", "n = keep[:, 1:].sum(1)"),
    "the bonus keeps the last q": ("(0, 0, 0, 1))\n    rest", "(0, 0, 0, 1), 'constant', 0.3)\n    rest"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_fail(name, monkeypatch):
    old, new = MUTANTS[name]
    source = Path(engine.__file__).read_text()
    assert old in source, "the planted bug no longer applies"
    broken = types.ModuleType("broken")
    broken.__dict__["__name__"] = "speculate"               # dataclasses look their module up
    exec(compile(source.replace(old, new), "speculate", "exec"), broken.__dict__)
    assert max(distance(monkeypatch, broken.accept_block, chains(K, seed=0)) for K in (2, 3)) > 1e-3
