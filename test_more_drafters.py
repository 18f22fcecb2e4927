"""Drafters that need no training, and coupled drafting: their guesses against a plain reference, the text the target's.

"Kills:" names the bug that was planted once and made the test fail.
"""
import pytest
import torch

import model
import test_law as law
from conftest import (DRAFTS, TARGET, V, config, decode, greedy_alone, logits_alone, make_drafter, prompts_for,
                      random_model)
from draft_exit import ExitDraft
from draft_hybrid import HybridDraft
from draft_jacobi import JacobiDraft
from draft_trained import drafter_of
from generate import compile_round, generate
from model import KVCache, build
from sample import DRAFT as GUESSING
from sample import TARGET as DRAWING
from sample import Sampling, draw, exponential, probs
from speculate import Draft, State, accept_matched, accept_sampled, speculate, verify
from test_compile import FORBIDDEN, traced_ops
from test_eagle import random_eagle
from test_train import medusa, small

ROWS = 20_000
DRAWN = [{"temperature": 0.8}, {"temperature": 0.8, "top_k": 8, "top_p": 0.9}]


def new_state(B=3, target=TARGET, S=192) -> State:
    return State(KVCache(target.config, B, S), B, S)


def next_alone(ids: list[int], sampling) -> int:
    """The target's own draw with the noise of its position, everything recomputed: no round is run."""
    noise = exponential(sampling.seed, DRAWING, torch.tensor([len(ids)]), V)
    return draw(probs(logits_alone(TARGET, [ids])[:, None], sampling)[:, 0], noise).item()


def drawn_alone(prompt: list[int], max_new: int, **settings) -> list[int]:
    ids, sampling = list(prompt), Sampling(1, **settings)
    for _ in range(max_new):
        ids.append(next_alone(ids, sampling))
    return ids[len(prompt):]


def drafter_for(kind: str, K: int, state: State, couple: bool = False, target=TARGET):
    """"ngram+x" is a hybrid with x."""
    if kind.startswith("ngram+"):
        return HybridDraft(drafter_for(kind.removeprefix("ngram+"), K, state, couple, target))
    if kind == "exit":
        return ExitDraft(target, K, 1, couple)
    if kind == "jacobi":
        return JacobiDraft(state, K)
    if kind in ("none", "ngram"):
        return make_drafter(kind, K, *state.tokens.shape)
    net = {"eagle": lambda: random_eagle(target, R=20), "eagle tree": lambda: random_eagle(target), "medusa": medusa,
           "small": small}.get(kind, lambda: DRAFTS[kind])()
    return drafter_of(net, target, state, K, K + 4 if kind == "eagle tree" else None, couple)


# ---- coupled drafting

@pytest.fixture(scope="module")
def drawn():
    prompts = prompts_for(3)
    return prompts, [[drawn_alone(p, 30, seed=7 + i, **s) for i, p in enumerate(prompts)] for s in DRAWN]


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("kind", ["none", "ngram", "self", "near", "rand", "eagle", "eagle tree", "medusa", "small",
                                  "exit", "jacobi", "ngram+near", "ngram+eagle", "ngram+exit", "ngram+jacobi"])
def test_a_seed_is_one_text_whoever_guesses(kind, K, drawn):
    """Token for token in float32, at a temperature, in a batch.  Kills: couple lost on the way to the drafter
    (drafter_of); q returned all the same, which is judged by rejection."""
    prompts, texts = drawn
    for settings, want in zip(DRAWN, texts):
        state = new_state()
        drafter = drafter_for(kind, K, state, couple=True)
        assert decode(None, K, prompts, 30, state=state, drafter=drafter, seed=7, **settings)[0] == want


@pytest.mark.parametrize("settings", DRAWN)
def test_a_coupled_guess_is_the_targets_own_draw(settings):
    """The target as its own draft is always right, and an EAGLE of 20 tokens draws with those tokens' noise.
    Kills: the draft's own noise; noise of the position before; noise by place in the reduced vocabulary."""
    state = new_state()
    drafter = drafter_for("self", 3, state, couple=True)
    assert decode(None, 3, prompts_for(3), 33, state=state, drafter=drafter, **settings)[1] == [[(4, 3)] * 3] * 8
    state = new_state()
    eagle, sampling = drafter_for("eagle", 1, state, True), Sampling(3, **settings)
    decode(None, 1, prompts_for(3), 5, state=state, drafter=eagle, **settings)
    q = probs(eagle.model.logits(eagle.guessed), sampling)[:, 0]                                # (B, 20)
    noise = exponential(sampling.seed, DRAWING, state.pos + 1, V)
    want = draw(torch.zeros(3, V).index_copy(1, eagle.model.vocab, q), noise)
    draft = eagle.propose(state, sampling)
    assert draft.q is None and draft.tokens[:, 0].tolist() == want.tolist()


def kept_share(p, q, couple: bool, rows=40_000) -> float:
    """How often one guess, drawn from q (V,) with the target's noise or with other, is kept where the law is p."""
    seed, pos = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    guess = draw(q.expand(rows, -1), exponential(seed, DRAWING if couple else GUESSING, pos + 1, len(q)))[:, None]
    laws = p.expand(rows, 2, -1)
    n = accept_matched(guess, None, laws, seed, pos)[0] if couple else \
        accept_sampled(guess, q.expand(rows, 1, -1), laws, seed, pos)[0]
    return n.float().mean().item()


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_what_coupling_costs(sharpness):
    """With D the total variation distance, rejection keeps 1 - D, all that can be kept; coupling at least (1 - D) /
    (1 + D), and exactly sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): token i wins both races.  Kills: accept_matched
    drawing with noise of another position."""
    g = torch.Generator().manual_seed(int(10 * sharpness))
    for _ in range(4):
        p, q = (sharpness * torch.randn(2, 7, generator=g)).softmax(-1)
        D = (p - q).abs().sum().item() / 2
        both = sum(1 / torch.maximum(p / p[i], q / q[i]).sum().item() for i in range(7))
        assert (1 - D) / (1 + D) <= both <= 1 - D
        assert abs(kept_share(p, q, couple=True) - both) < 0.0125                               # five sigma
        assert abs(kept_share(p, q, couple=False) - (1 - D)) < 0.0125


# ---- early exit

DEEP = random_model(2, config(layers=3))


def first_layers(target, L: int):
    """A model of its own, of the target's first L layers."""
    c = config(layers=L)
    return build(c, {name: w for name, w in target.named_parameters()
                     if not name.startswith("layers.") or int(name.split(".")[1]) < L})


@torch.no_grad()
@pytest.mark.parametrize("L", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exit_guesses_as_its_layers_alone_would(L, temperature):
    """Every guess of some rounds, and its q, against a model of those layers that is fed everything anew.
    Kills: one layer more; no final norm; the position not advanced; q of the next guess."""
    state, alone, sampling = new_state(2, DEEP), first_layers(DEEP, L), Sampling(2, temperature, seed=3)
    drafter, rounds = ExitDraft(DEEP, 3, L), 0
    for _ in generate(DEEP, drafter, state, sampling, prompts_for(2), [20, 20]):
        if not state.live.all():
            break
        draft, rounds = drafter.propose(state, sampling), rounds + 1
        for row in range(2):
            ids = state.tokens[row, :state.pos[row] + 1].tolist()
            for i, token in enumerate(draft.tokens[row].tolist()):
                one = Sampling(1, temperature, seed=3 + row)
                q = probs(logits_alone(alone, [ids])[:, None], one)[0, 0]
                torch.testing.assert_close(draft.q[row, i], q, atol=1e-5, rtol=1e-4)
                assert token == draw(q, exponential(one.seed, GUESSING, torch.tensor([len(ids)]), V)[0]).item()
                ids.append(token)
    assert rounds > 4


@torch.no_grad()
def test_exit_leaves_the_targets_cache_as_it_was():
    """What it writes past pos is what verify writes there again, and before pos it writes nothing.
    Kills: fed at slot pos - 1; the newest token left out."""
    state, sampling, K = new_state(2, DEEP), Sampling(2), 3
    drafter = ExitDraft(DEEP, K, 2)
    rounds = generate(DEEP, drafter, state, sampling, prompts_for(2), [20, 20])
    for _ in range(3):
        next(rounds)
    before = [b.clone() for b in state.cache.buffers()]
    draft = drafter.propose(state, sampling)
    drafted = [b.clone() for b in state.cache.buffers()]
    verify(DEEP, state, draft, sampling)
    for row, pos in enumerate(state.pos.tolist()):
        for i, (old, mine, new) in enumerate(zip(before, drafted, state.cache.buffers())):
            assert torch.equal(old[row, :, :pos], mine[row, :, :pos])
            if i < 4:                                                   # keys and values of two layers
                torch.testing.assert_close(mine[row, :, pos:pos + K], new[row, :, pos:pos + K], atol=1e-5, rtol=1e-5)


# ---- Jacobi

def jacobi_alone(prompt: list[int], max_new: int, K: int, sampling):
    """The iteration as its paper has it, one list and one function -> text, [(new, kept) of each round]."""
    text, rounds = prompt + [next_alone(prompt, sampling)], []
    guesses = [text[-1]] * K
    while (left := max_new - (len(text) - len(prompt))) > 0:
        says = [next_alone(text + guesses[:i], sampling) for i in range(K + 1)]
        n = next((i for i in range(K) if says[i] != guesses[i]), K)
        text += says[:min(n + 1, left)]
        rounds.append((min(n + 1, left), min(n, left)))
        rest = says[n + 1:] or [says[n]]
        guesses = (rest + [rest[-1]] * K)[:K]
    return text[len(prompt):], rounds


@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, *DRAWN])
def test_jacobi_iterates(K, settings):
    """Texts and every round's counts, rows that keep different numbers.  Kills: guesses one place late or early; the
    last round's kept; the rest filled with anything else; the argmax of p where the target draws."""
    prompts, state = prompts_for(3), new_state()
    texts, rounds = decode(None, K, prompts, 25, state=state, drafter=JacobiDraft(state, K), seed=7, **settings)
    for row in range(3):
        text, counts = jacobi_alone(prompts[row], 25, K, Sampling(1, seed=7 + row, **settings))
        assert texts[row] == text and [step[row] for step in rounds][:len(counts)] == counts
    assert any(kept for step in rounds for _, kept in step), "nothing was ever kept: this test says nothing"


# ---- hybrid

class Fixed:
    """Guesses 40, 41, ...; says they were drawn, from a q that is all 1 / V."""
    taps, nodes = (), 3

    def __init__(self, drawn=True, valid=None, tree=None):
        self.drawn, self.valid, self.tree = drawn, valid, tree

    def propose(self, state, sampling):
        B = len(state.pos)
        tokens = torch.arange(40, 43).expand(B, 3)
        return Draft(tokens, torch.full((B, 3, V), 1 / V) if self.drawn else None, self.tree, self.valid)


@pytest.mark.parametrize("least, looked_up", [(1, [0, 1, 2]), (2, [0, 1]), (3, [0]), (4, [])])
def test_who_guesses_in_a_hybrid(least, looked_up):
    """Rows whose newest 3, 2, 1 and 0 tokens occurred before.  Kills: one choice for all rows; `>`; q left as it was;
    the other drafter's `valid` where it did not guess."""
    texts = [[1, 2, 3, 9, 1, 2, 3], [5, 2, 3, 9, 1, 2, 3], [5, 6, 3, 9, 1, 2, 3], [5, 6, 7, 9, 1, 2, 3]]
    state = new_state(4)
    state.tokens[:, :7], state.pos[:] = torch.tensor(texts), 6
    state.tokens[:, 7:] = 3                                             # stale
    for other in (Fixed(), Fixed(drawn=False), Fixed(valid=torch.tensor([0, 1, 2, 3]))):
        draft = HybridDraft(other, least).propose(state, None)
        for row in range(4):
            found = row in looked_up
            want = torch.tensor([9, 1, 2] if found else [40, 41, 42])
            assert torch.equal(draft.tokens[row], want)
            assert (draft.q is None) == (not other.drawn)
            if other.drawn:
                assert torch.equal(draft.q[row], torch.eye(V)[want] if found else torch.full((3, V), 1 / V))
            if other.valid is not None:
                assert draft.valid[row] == (3 if found else row)


def test_a_hybrid_refuses_a_tree():
    with pytest.raises(ValueError, match="give it a chain"):
        HybridDraft(Fixed(drawn=False, tree=[0, 0, 0])).propose(new_state(), None)


def test_a_draft_model_learns_what_was_looked_up_instead():
    """Every other round looks up the right text, which the draft would not have guessed; its own guesses stay those of
    the draft alone on the text.  Kills: only the newest two tokens fed again."""
    prompts, state, seen = prompts_for(2), new_state(2), []
    hybrid, draft = drafter_for("ngram+rand", 3, state), DRAFTS["rand"]
    truth = torch.tensor([(ids + greedy_alone(ids, 24) + [0] * 8)[:30] for ids in prompts])
    propose = hybrid.other.propose
    hybrid.other.propose = lambda state, sampling: seen.append(
        (state.tokens.clone(), state.pos.tolist(), propose(state, sampling))) or seen[-1][-1]
    hybrid.ngram.look_up = lambda state: (truth.gather(1, (state.pos[:, None] + torch.arange(1, 4)).clamp_max(29)),
                                          torch.full((2, 1), 3 * (len(seen) % 2)))
    rounds = decode(None, 3, prompts, 18, state=state, drafter=hybrid)[1]
    assert [(4, 3)] * 2 in rounds
    for tokens, pos, guesses in seen[:len(rounds) - 1]:
        for row in range(2):
            assert guesses.tokens[row].tolist() == greedy_alone(tokens[row, :pos[row] + 1].tolist(), 3, draft)


# ---- texts and the law

@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("kind", ["exit", "jacobi", "ngram+exit", "ngram+near", "ngram+eagle", "ngram+medusa",
                                  "ngram+jacobi"])
def test_greedy_text_is_plain(kind, K):
    """Rows that repeat themselves beside some that do not, a second prompt in the same state.  Kills: exit's keys
    written a slot early; looked-up tokens and q's of different drafters."""
    state = new_state()
    drafter = drafter_for(kind, K, state)
    for prompts in ([[1, 2, 3] * 5, *prompts_for(2)], [[1, 2, 3] * 4, [5], list(range(20))]):
        texts, rounds = decode(None, K, prompts, 30, state=state, drafter=drafter)
        assert texts == [greedy_alone(prompt, 30) for prompt in prompts]
        assert any(kept for step in rounds for _, kept in step), "nothing was ever kept: this test says nothing"


@pytest.mark.parametrize("kind", ["ngram+exit", "ngram+jacobi"])
def test_no_value_of_the_round_is_read_on_the_host(kind):
    ops = traced_ops(drafter_for(kind, 3, new_state(3, S=512)), 3)
    assert len(ops) > 50 and not [op for op in ops if any(word in op for word in FORBIDDEN)]


@pytest.mark.parametrize("kind", ["coupled", "exit", "jacobi", "hybrid"])
def test_joint_law_of_three_tokens(kind, monkeypatch):
    """test_law's test for these drafters, through the compiled round, which never recompiles and writes what the eager
    one does.  Kills: looked-up guesses with the q of the drawn ones; a coupled guess judged by rejection."""
    monkeypatch.setattr(model, "CHUNK", 4)
    c = config(law.V, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32)
    monkeypatch.setattr(law, "TARGET", random_model(1, c, head=1.0))    # of logits that leave many texts likely
    settings, state = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, new_state(ROWS, law.TARGET, law.S)
    draft = law.drafter_for("model", 2, ROWS)
    draft.couple = kind == "coupled"
    drafter = {"coupled": lambda: draft, "exit": lambda: ExitDraft(law.TARGET, 2, 1),
               "jacobi": lambda: JacobiDraft(state, 3), "hybrid": lambda: HybridDraft(draft, 1)}[kind]()
    sampler, step = law.Sampler(drafter, ROWS), compile_round()
    texts = sampler.texts(step, settings, seed=3)
    assert law.p_value(texts, law.enumerate_law(settings)) > 1e-4
    torch.compiler.set_stance("fail_on_recompile")
    other = sampler.texts(step, {"temperature": 1.3, "top_k": 7}, seed=4)
    torch.compiler.set_stance("default")
    eager = sampler.texts(speculate, {"temperature": 1.3, "top_k": 7}, seed=4)
    assert (other == eager).all(1).float().mean() > 0.999               # a draw may fall the other way within rounding
