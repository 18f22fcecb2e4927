"""EAGLE: what it guesses while drafting is what it learned in training; its caches hold the right pairs; text stays plain's.

"Kills:" names the bug that was planted once and made the test fail.
"""
import pytest
import torch

import draft_eagle
import model
import test_law as law
from conftest import TARGET, V, decode, prompts_for
from draft_eagle import Eagle, EagleDraft, EagleTree
from draft_trained import borrow
from generate import compile_round, generate
from model import KVCache
from sample import Sampling
from speculate import State

ROWS = 20_000


def random_eagle(target, taps=(0, 1), R=None, seed=7) -> Eagle:
    """R: only the even ids, say, can be guessed; None: all."""
    c, g = target.config, torch.Generator().manual_seed(seed)
    vocab = torch.arange(c.tokens) if R is None else torch.randperm(c.tokens, generator=g)[:R].sort().values
    model = Eagle(c, vocab, taps)
    for name, p in model.named_parameters():
        p.data = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.1 * torch.randn(p.shape, generator=g)
    return borrow(model, target).requires_grad_(False)


class Spy(EagleDraft):
    """Remembers the text so far and the guesses of every round."""

    def propose(self, state, sampling):
        draft = super().propose(state, sampling)
        self.seen = getattr(self, "seen", []) + [(state.tokens.clone(), state.pos.clone(), draft.tokens.clone())]
        return draft


def features(ids: list[int], taps) -> torch.Tensor:
    tokens = torch.tensor([ids])
    return TARGET(tokens, torch.zeros(1, dtype=torch.int64), KVCache(TARGET.config, 1, len(ids)), len(ids), taps=taps)[1]


@torch.no_grad()
@pytest.mark.parametrize("R", [None, 30])
def test_drafting_computes_what_training_unrolls(R):
    """Every guess of every round equals unroll's on the whole text: prompts of several lengths, 3 guesses, greedy.
    Kills: pairs one position off; the row that observe takes its guess from; a stale `at`; guesses fed at the wrong slot."""
    model, B = random_eagle(TARGET, R=R), 3
    state = State(KVCache(TARGET.config, B, 192), B, 192)
    drafter, prompts = Spy(model, state, 3), [[5, 9, 11], list(range(40)) * 2, [1]]
    for _ in generate(TARGET, drafter, state, Sampling(B), prompts, [30] * B):
        pass
    rounds = 0
    for tokens, pos, guesses in drafter.seen:
        for row in range(B):
            if pos[row] >= len(prompts[row]) + 29:
                continue                                                # it has ended
            ids, want = tokens[row, :pos[row] + 1].tolist(), []
            for s in range(3):                                          # a chain is teacher-forced by its own guesses
                text = torch.tensor([ids + want])
                g = model.unroll(text, features(ids + want, model.taps), s + 1)[s][0, len(ids) - 2]
                want.append(model.vocab[model.logits(g).argmax()].item())
            assert guesses[row].tolist() == want
            rounds += 1
    assert rounds > 20


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}])
def test_greedy_text_is_plain(K, settings):
    """Kills: q left over the reduced vocabulary."""
    state = State(KVCache(TARGET.config, 3, 192), 3, 192)
    texts, _ = decode(None, K, prompts_for(3), 40, state=state, drafter=EagleDraft(random_eagle(TARGET, R=20), state, K), **settings)
    if not settings:
        assert texts == decode("none", 0, prompts_for(3), 40)[0]
    assert [len(t) for t in texts] == [40] * 3


def test_second_prompt_reuses_the_cache():
    """A prompt that begins like the text before it is not fed again, and the guesses are the same as from nothing.
    Kills: generate.begin leaving the pair before the first new token as it was."""
    def guesses(prompts):
        state = State(KVCache(TARGET.config, 1, 192), 1, 192)
        drafter = Spy(random_eagle(TARGET), state, 3)
        for prompt in prompts:
            drafter.seen = []
            for _ in generate(TARGET, drafter, state, Sampling(1), [prompt], [12]):
                pass
        return [g.tolist() for _, _, g in drafter.seen]

    first, second = list(range(20)), list(range(12)) + [40, 41, 42]
    assert guesses([first, second]) == guesses([second])


# ---- dynamic trees

def tree_drafter(state, K=3, N=8, width=3, R=None):
    return EagleTree(random_eagle(TARGET, R=R), state, K, N, width)


@torch.no_grad()
def test_the_tree_is_the_best_there_is():
    """N nodes, each with its path's probability by `unroll`, against a search of the whole tree in Python, at first and
    after each round that kept guesses.  Kills: a child whose path is not its parent's; a beam's parent off by one;
    features of another node; the target's features of the path not moved to its first rows."""
    B, K, N, width = 2, 3, 8, 3
    state = State(KVCache(TARGET.config, B, 192), B, 192)
    drafter, prompts = tree_drafter(state, K, N, width), prompts_for(B)
    model, draft, moved = drafter.model, None, 0
    for at, (new, kept, _) in enumerate(generate(TARGET, drafter, state, Sampling(B), prompts, [30] * B)):
        before, draft = draft, drafter.propose(state, Sampling(B))
        for row in range(B):
            if at >= 4 and not kept[row] or not state.live[row]:
                continue
            moved += kept[row] > 0 and new[row][0] != before.tokens[row, 0]
            ids = state.tokens[row, :state.pos[row] + 1].tolist()
            g = model.unroll(torch.tensor([ids]), features(ids, model.taps), 1)[0][0, len(ids) - 2]
            torch.testing.assert_close(drafter.guessed[row, 0], g, rtol=0, atol=1e-4)
            found, beam = {}, [((), 0.0)]
            for depth in range(1, K + 1):
                level = {}
                for path, score in beam:
                    text = ids + list(path)
                    g = model.unroll(torch.tensor([text]), features(text, model.taps), depth)[depth - 1][0, len(ids) - 2]
                    best = model.logits(g).log_softmax(-1).topk(width)
                    for x, i in zip(best.values.tolist(), best.indices.tolist()):
                        level[path + (model.vocab[i].item(),)] = score + x
                found |= level
                beam = sorted(level.items(), key=lambda item: -item[1])[:width]
            want = {path for path, _ in sorted(found.items(), key=lambda item: -item[1])[:N]}
            paths = [()]
            for token, parent in zip(draft.tokens[row].tolist(), draft.tree.parents[row].tolist()):
                paths.append(paths[parent] + (token,))
            assert set(paths[1:]) == want and len(paths) == N + 1
            assert draft.tree.depth[row].tolist() == [len(path) for path in paths]
            for i, a in enumerate(paths):
                assert draft.tree.sees[row, i].tolist() == [b == a[:len(b)] for b in paths]
    assert moved, "no path was kept that leaves out the first node: nothing had to move"


@pytest.mark.parametrize("R", [None, 20])
def test_trees_keep_greedy_text(R):
    """Kills: keys of the path not moved (compact left out for a tree with a shape a row)."""
    state = State(KVCache(TARGET.config, 3, 192), 3, 192)
    texts, rounds = decode(None, 3, prompts_for(3), 60, state=state, drafter=tree_drafter(state, R=R))
    assert texts == decode("none", 0, prompts_for(3), 60)[0]
    assert any(kept for round in rounds for _, kept in round), "nothing was ever kept: this test says nothing"


@pytest.mark.parametrize("K, N, width", [(3, 2, 3), (2, 13, 3), (4, 6, 3)])
def test_impossible_trees_are_refused(K, N, width):
    with pytest.raises(ValueError, match="nodes"):
        tree_drafter(State(KVCache(TARGET.config, 1, 192), 1, 192), K, N, width)


# ---- the law

@pytest.mark.parametrize("kind, K", [("chain", 3), ("tree", 2)])
def test_joint_law_of_three_tokens(kind, K, monkeypatch):
    """test_law's test for this drafter, through the compiled round; it guesses 6 of the 8 tokens only.
    Kills: q not the law drawn from (the draw's index taken for the token's id)."""
    monkeypatch.setattr(model, "CHUNK", 4)
    monkeypatch.setattr(draft_eagle, "CHUNK", 4)
    settings = {"temperature": 1.5}         # all 512 texts are possible; one graph: compiling it is what takes long
    state, eagle = State(KVCache(law.TARGET.config, ROWS, law.S), ROWS, law.S), random_eagle(law.TARGET, (0,), 6)
    drafter = EagleDraft(eagle, state, K) if kind == "chain" else EagleTree(eagle, state, K, 4, 2)
    sampler, step = law.Sampler(drafter, ROWS), compile_round()
    assert law.p_value(sampler.texts(step, settings, seed=3), law.enumerate_law(settings)) > 1e-4
