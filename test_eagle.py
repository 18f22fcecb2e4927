"""EAGLE: what it guesses while drafting is what it learned in training; its caches hold the right pairs; text stays plain's.

"Kills:" names the bug that was planted once and made the test fail.
"""
import pytest
import torch

from conftest import TARGET, V, config, decode, prompts_for, random_model
from draft_eagle import Eagle, EagleDraft
from generate import generate
from model import KVCache
from sample import Sampling
from speculate import State


def random_eagle(target, taps=(0, 1), R=None, seed=7) -> Eagle:
    """R: only the even ids, say, can be guessed; None: all."""
    c, g = target.config, torch.Generator().manual_seed(seed)
    vocab = torch.arange(c.tokens) if R is None else torch.randperm(c.tokens, generator=g)[:R].sort().values
    model = Eagle(c, taps, vocab)
    for name, p in model.named_parameters():
        p.data = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.1 * torch.randn(p.shape, generator=g)
    return model.borrow(target).requires_grad_(False)


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
    """Kills: q left over the reduced vocabulary (shapes), or of another temperature (test_law)."""
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
