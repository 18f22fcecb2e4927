"""The joint law of three tokens, through the compiled round: chi-square against enumerating the target alone.

Rows of a batch are independent samples, so 20,000 texts are a handful of rounds.  Three tokens at K = 1 make rounds follow
each other; at K = 3 one round writes them all.  The first token comes from prefill and is summed over.
"""
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import drafts
import model
import speculate as engine
from conftest import config, logits_alone, make_drafter, random_model
from generate import compile_round
from model import KVCache
from sample import Sampling, probs
from speculate import Draft, State, Tree, accept_matched, commit, speculate

ROWS, S, V, PROMPT = 20_000, 20, 8, [3, 5]
TINY = config(V, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32)
TARGET, DRAFT = random_model(0, TINY, head=2.0), random_model(1, TINY, head=2.0)
TRUNCATIONS = {"none": {}, "top-k": {"top_k": 3}, "top-p": {"top_p": 0.8}, "both": {"top_k": 5, "top_p": 0.9}}
SETTINGS = [{"temperature": t} | cut for t in (0.7, 1.0, 1.5) for cut in TRUNCATIONS.values()]


def plain_law(logits, temperature, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The definition, token by token in Python floats: what sample.probs must equal."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [2.718281828459045 ** ((x - logits[order[0]]) / temperature) for x in logits]
    kept = order[:top_k or None]
    total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        if top_p >= 1 or mass < top_p * total:
            nucleus.append(i)
        mass += weight[i]
    nucleus = [i for i in nucleus if weight[i] >= min_p * weight[order[0]]]
    return [weight[i] / sum(weight[j] for j in nucleus) if i in nucleus else 0.0 for i in range(len(logits))]


def enumerate_law(settings) -> torch.Tensor:
    """P(second, third, fourth token | prompt) of the target alone (V**3,), each prefix recomputed from nothing."""
    joint, prefixes = torch.ones(1, dtype=torch.float64), [PROMPT]
    for _ in range(4):
        rows = [plain_law(row, **settings) for row in logits_alone(TARGET, prefixes).tolist()]
        law = torch.tensor(rows, dtype=torch.float64)
        joint = (joint[:, None] * law).flatten()
        prefixes = [ids + [token] for ids in prefixes for token in range(V)]
    return joint.view(V, -1).sum(0)


def p_value(texts, law) -> float:
    """Chi-square of the texts' tokens 2 to 4; cells expected less than 5 times are one cell.  0 if the impossible happened."""
    ids = texts[:, 1:]
    counts = torch.bincount(ids[:, 0] * V * V + ids[:, 1] * V + ids[:, 2], minlength=V ** 3).double()
    if counts[law == 0].sum() > 0:
        return 0.0
    expected, rare = law * len(texts), law * len(texts) < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum(0, keepdim=True))) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


class TopTree:
    """A tree of the draft model's two most likely next tokens, and below the best of them two more: 4 distinct-sibling nodes."""
    taps, nodes = (), 4

    def __init__(self, B, double=False):
        self.tree, self.double, self.cache = Tree([0, 0, 1, 1]), double, KVCache(DRAFT.config, B, S)

    def start(self, state, begin, hidden):
        DRAFT.prefill(state.tokens, begin, state.pos, self.cache)

    def propose(self, state, sampling):
        fed = state.tokens.gather(1, torch.stack((state.pos - 1, state.pos), 1))
        hidden, _ = DRAFT(fed, state.pos - 1, self.cache, state.span)
        first = DRAFT.head(hidden[:, -1]).topk(2).indices
        hidden, _ = DRAFT(first[:, :1], state.pos + 1, self.cache, state.span)
        second = DRAFT.head(hidden[:, -1]).topk(2).indices
        if self.double:
            first = first[:, :1].expand(-1, 2)
        return Draft(torch.cat((first, second), 1), tree=self.tree)

    def observe(self, state, out, n, hidden, p): pass


@pytest.fixture(scope="module")
def laws():
    return [enumerate_law(settings) for settings in SETTINGS]


@pytest.fixture(autouse=True)
def short_prefill(monkeypatch):
    monkeypatch.setattr(model, "CHUNK", 4)


class Sampler:
    """B rows after one prompt, ready to write four tokens again and again."""

    def __init__(self, drafter, B=ROWS):
        self.drafter, self.state = drafter, State(KVCache(TARGET.config, B, S), B, S)
        self.state.tokens[:, :2] = torch.tensor(PROMPT)
        self.begin = torch.zeros(B, dtype=torch.int64)
        self.last, self.tapped = TARGET.prefill(self.state.tokens, self.begin, self.begin + 2, self.state.cache, drafter.taps)

    @torch.no_grad()
    def texts(self, step, settings, seed) -> torch.Tensor:
        """-> (B, 4) tokens: the first as generate.begin draws it, the others by rounds."""
        state, sampling = self.state, Sampling(len(self.state.pos), seed=seed, **settings)
        state.pos.fill_(1)
        state.limit.fill_(5)
        state.live.fill_(True)
        p = probs(TARGET.head(self.last), sampling)
        n, out, _ = accept_matched(state.tokens[:, :0], None, p, sampling.seed, state.pos)
        commit(state, out, n)
        self.drafter.start(state, self.begin, self.tapped)
        while state.live.any():
            step(TARGET, self.drafter, state, sampling)
        return state.tokens[:, 2:6].clone()


def drafter_for(kind, K, B=ROWS):
    """"short" is a draft model whose context ends inside the text: it makes K guesses, of which 2, 1 or none are valid;
    "block" a draft model whose guesses are judged together."""
    if kind == "tree":
        return TopTree(B)
    drafter = make_drafter(DRAFT if kind in ("model", "short", "block", "short block") else kind, K, B, S, TARGET)
    if "short" in kind:
        drafter.context = 4
    return drafter


def step_for(kind, step):
    return partial(step, block=True) if "block" in kind else step


@pytest.mark.parametrize("kind, K", [("none", 0), ("ngram", 3), ("model", 3), ("tree", 2), ("block", 3)])
def test_joint_law_of_three_tokens(kind, K, laws):
    """Twelve settings, two graphs (with and without truncation; compiling takes long, so only the first of trees, blocks and
    plain decoding).  The planted bugs are below."""
    step = step_for(kind, compile_round())
    sampler = Sampler(drafter_for(kind, K))
    p = [p_value(sampler.texts(step, settings, seed=100_000 * i), law)
         for i, (settings, law) in enumerate(zip(SETTINGS, laws)) if len(settings) > 1 or kind in ("ngram", "model")]
    assert min(p) > 1e-4, dict(zip(map(str, SETTINGS), p))          # fixed seeds: this cannot flicker


MUTANTS = {
    "residual is p": ("speculate", "(p_n - q_n * (n < valid)[:, None]).clamp_min(0)", "p_n"),
    "acceptance ignores q": ("speculate", "u * q_x < p_x", "u < p_x"),
    "the bonus token keeps the last q": ("speculate", "q_n * (n < valid)[:, None]", "q_n"),
    "acceptance shares the draft's noise": ("speculate", "uniform(seed[:, None], ACCEPT,", "uniform(seed[:, None], 0,"),
    "the residual shares the draft's noise": ("speculate", "exponential(seed, TARGET, pos + 1 + n,",
                                              "exponential(seed, 0, pos + 1 + n,"),
    "the residual shares the verdict's noise": ("speculate", "exponential(seed, TARGET, pos + 1 + n,",
                                                "exponential(seed, ACCEPT, pos + 1 + n,"),
    "all nodes share one position's noise": ("speculate", "+ 1 + (step if tree is None else tree.depth)", "+ 1 + 0 * step"),
    "q is not the distribution drawn from": ("drafts", "draw(q[-1], race[:, i:i + 1])", "q[-1].argmax(-1)"),
    "after the valid guesses the bonus token keeps a q": ("speculate", "(n < valid)[:, None]", "(n < K)[:, None]"),
    "a block's noise is used again": ("speculate", "sampling.seed ^ (state.pos << 40)", "sampling.seed"),
    "a guess past a rejection is kept": ("speculate", "n = keep.long().cumprod(1).sum(1)", "n = keep.long().sum(1)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_fail(name, laws):
    """The test above would notice: some setting, K and drafter gives each bug away."""
    file, old, new = MUTANTS[name]
    source = (Path(engine.__file__).parent / f"{file}.py").read_text()
    assert old in source, "the planted bug no longer applies"
    broken = types.ModuleType(file)
    exec(compile(source.replace(old, new), file, "exec"), broken.__dict__)
    step = getattr(broken, "speculate", speculate)
    p, B = [], 20_000
    # at temperature 1: with top-k, without truncation; with top-p, where a block's second round shows most
    tries = [(1, "model", (5, 4)), (3, "model", (5, 4)), (3, "ngram", (5, 4)), (3, "short", (5, 4)), (3, "block", (6,))]
    for K, kind, settings in reversed(tries) if "block" in name else tries:
        drafter = drafter_for(kind, K, B)
        if file == "drafts":
            drafter = broken.ModelDraft(DRAFT, KVCache(DRAFT.config, B, S), K, V)
        sampler = Sampler(drafter, B)
        for i in settings:
            p.append(p_value(sampler.texts(step_for(kind, step), SETTINGS[i], seed=7), laws[i]))
            if p[-1] < 1e-6:
                return
    pytest.fail(f"not noticed: p values {p}")


@pytest.mark.parametrize("kind", ["short", "short block"])
def test_a_draft_past_its_context_keeps_the_law(kind, laws):
    sampler = Sampler(drafter_for(kind, 3))
    for i in (4, 5):
        assert p_value(sampler.texts(step_for(kind, speculate), SETTINGS[i], seed=3), laws[i]) > 1e-4


def test_equal_siblings_keep_the_law(laws):
    """The target draws once a node, so a second equal sibling is never reached: useless, but no second try."""
    assert p_value(Sampler(TopTree(10_000, double=True), 10_000).texts(speculate, SETTINGS[4], seed=7), laws[4]) > 1e-4
