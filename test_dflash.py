"""DFlash: what it guesses while drafting is what it learned in training; blocks see what they may; text stays plain's.

"Kills:" names the bug that was planted once and made the test fail.
"""
import pytest
import torch

import draft_dflash
import model
import test_law as law
from conftest import TARGET, V, decode, greedy_alone, prompts_for
from draft_dflash import DFlash, DFlashDraft
from draft_hybrid import HybridDraft
from draft_trained import drafter_of
from generate import compile_round, generate
from model import KVCache
from sample import DRAFT, Sampling, draw, exponential
from speculate import Draft, State, speculate
from test_eagle import features
from test_more_drafters import drawn_alone
from test_train import random_drafter

ROWS = 20_000


def dflash(target=TARGET, **shape):
    return random_drafter(DFlash, target, **{"taps": (0, 1), "layers": 2, "ffn_dim": 48, "block": 4} | shape)


def new_state(B=3, target=TARGET, S=192) -> State:
    return State(KVCache(target.config, B, S), B, S)


@torch.no_grad()
def unrolled(net, ids: list[int], K: int) -> torch.Tensor:
    """The logits of a block of K after this text (K, R), everything recomputed."""
    guessed = net.unroll(torch.tensor([ids]), features(ids, net.taps), K)
    return torch.stack([net.logits(g[0, len(ids) - 2]) for g in guessed])


# ---- drafting

@torch.no_grad()
@pytest.mark.parametrize("K", [1, 3, 4])
def test_drafting_computes_what_training_unrolls(K):
    """Every guess of every round and its q, while a script makes the rows keep 0 to K guesses, each another number: prompts
    of one chunk and of two.  Kills: features written one slot off, or at the new pos; masks that see to the left only; a
    guess read one mask early; a prompt's second chunk not remembered; noise by place in the reduced vocabulary."""
    net, B, seen = dflash(), 3, []
    state, hot = new_state(B), Sampling(B, 1.0, seed=3)
    drafter, prompts = DFlashDraft(net, state, K), [[5, 9, 11], list(range(40)) * 2, [1, 1]]
    truth = torch.tensor([(p + greedy_alone(p, 30) + [0] * 90)[:120] for p in prompts])
    propose = drafter.propose

    def scripted(state, sampling):
        """The next keep[row] tokens of the greedy text, then wrong ones."""
        keep = (len(seen) + torch.arange(B)) % (K + 1)
        seen.append((state.tokens.clone(), state.pos.tolist(), propose(state, hot), keep.tolist()))
        right = truth.gather(1, (state.pos[:, None] + torch.arange(1, K + 1)).clamp_max(119))
        return Draft(torch.where(torch.arange(K) < keep[:, None], right, (right + 1) % V))

    drafter.propose = scripted
    rounds = [kept for _, kept, _ in generate(TARGET, drafter, state, Sampling(B), prompts, [30] * B)][1:]
    for (tokens, pos, draft, keep), kept in zip(seen, rounds, strict=True):
        for row in range(B):
            if (left := len(prompts[row]) + 29 - pos[row]) == 0:
                continue                                                # it has ended
            assert kept[row] == min(keep[row], left)
            ids = tokens[row, :pos[row] + 1].tolist()
            q = unrolled(net, ids, K).softmax(-1)                                               # (K, R)
            torch.testing.assert_close(draft.q[row][:, net.vocab], q, rtol=1e-4, atol=1e-5)
            assert draft.q[row].sum(-1).tolist() == pytest.approx([1] * K)
            noise = exponential(torch.full((K,), 3 + row), DRAFT, len(ids) + torch.arange(K), net.vocab)
            assert draft.tokens[row].tolist() == net.vocab[draw(q, noise)].tolist()


@torch.no_grad()
def test_a_block_sees_the_text_and_itself():
    """Of the text only what comes before it, of the blocks only its own, and that both ways.  Kills: features of the newest
    token, which nobody has yet, seen in training; a block that sees another; a block that sees to the left only."""
    net, ids = dflash(), list(range(3, 15))
    tokens, seen = torch.tensor([ids]), features(ids, net.taps)
    at = torch.tensor([[6, 2, 9, 6]])
    block = net.unroll(tokens, seen, 3, at)
    whole = net.unroll(tokens, seen, 3)
    for s in range(3):
        torch.testing.assert_close(block[s], whole[s][:, at[0]], rtol=1e-4, atol=1e-5)
    for changed, t in ((7, 6), (6, 6), (2, 6)):                         # features of that position; what t's block says
        other = seen.clone()
        other[:, changed] += 1
        same = torch.allclose(net.unroll(tokens, other, 3, at)[0][:, 0], block[0][:, 0], atol=1e-6)
        assert same == (changed > t)
    last, longer = net.unroll(tokens, seen, 3)[0], net.unroll(tokens, seen, 4)[0]
    assert not torch.allclose(last, longer, atol=1e-3)                  # the first guess sees the masks behind it


def test_second_prompt_reuses_the_cache():
    """A prompt that begins like the text before it is not fed again, and the guesses are the same as from nothing.
    Kills: features written from 0 on instead of from `begin`."""
    def guesses(prompts):
        state = new_state(1)
        drafter, seen = DFlashDraft(dflash(), state, 3), []
        propose = drafter.propose
        drafter.propose = lambda *a: seen.append(propose(*a)) or seen[-1]
        for prompt in prompts:
            seen.clear()
            for _ in generate(TARGET, drafter, state, Sampling(1), [prompt], [12]):
                pass
        return [draft.tokens.tolist() for draft in seen]

    first, second = list(range(20)), list(range(12)) + [40, 41, 42]
    assert guesses([first, second]) == guesses([second])


def test_a_block_is_no_longer_than_it_was_trained():
    with pytest.raises(ValueError, match="-k 4 is the most"):
        drafter_of(dflash(), TARGET, new_state(), 5)
    with pytest.raises(ValueError, match="a DFlash guesses a chain: leave out --tree"):
        drafter_of(dflash(), TARGET, new_state(), 3, 5)


# ---- texts

@pytest.mark.parametrize("how", ["drawn", "chosen", "coupled", "hybrid", "hybrid chosen"])
@pytest.mark.parametrize("K", [1, 4])
def test_greedy_text_is_plain(how, K):
    """Rows that end early, a second prompt in the same state.  Kills: its keys written to the target's cache."""
    state = new_state()
    drafter = DFlashDraft(dflash(), state, K, "coupled" in how, "chosen" in how)
    drafter = HybridDraft(drafter) if "hybrid" in how else drafter
    for prompts in ([[1, 2, 3] * 5, *prompts_for(2)], [[1, 2, 3] * 4, [5], list(range(20))]):
        texts, _ = decode(None, K, prompts, [40, 7, 25], state=state, drafter=drafter)
        assert texts == [greedy_alone(prompt, n) for prompt, n in zip(prompts, [40, 7, 25])]


def test_a_seed_is_one_text_when_coupled_or_chosen():
    """Kills: couple lost on the way to the drafter; q returned all the same, which is judged by rejection."""
    settings, state = {"temperature": 0.8, "top_k": 8}, new_state()
    want = [drawn_alone(p, 20, seed=7 + i, **settings) for i, p in enumerate(prompts_for(3))]
    for drafter in (drafter_of(dflash(), TARGET, state, 3, couple=True), DFlashDraft(dflash(), state, 3, chosen=True)):
        assert decode(None, 3, prompts_for(3), 20, state=state, drafter=drafter, seed=7, **settings)[0] == want


# ---- the law and the compiler

def law_drafter(monkeypatch, K, chosen):
    monkeypatch.setattr(model, "CHUNK", 4)
    monkeypatch.setattr(draft_dflash, "CHUNK", 4)
    state = new_state(ROWS, law.TARGET, law.S)
    return DFlashDraft(dflash(law.TARGET, R=6, taps=(0,), layers=1, ffn_dim=16), state, K, chosen=chosen)


def test_joint_law_of_three_tokens(monkeypatch):
    """test_law's test through the compiled round, which never recompiles; it guesses 6 of the 8 tokens only.
    Kills: the likeliest guess returned with q; q in the order of the reduced vocabulary."""
    settings, step = {"temperature": 1.5}, compile_round()              # all 512 texts are possible
    sampler = law.Sampler(law_drafter(monkeypatch, 3, False), ROWS)
    assert law.p_value(sampler.texts(step, settings, seed=3), law.enumerate_law(settings)) > 1e-4
    torch.compiler.set_stance("fail_on_recompile")
    other, eager = (sampler.texts(how, {"temperature": 0.9}, seed=4) for how in (step, speculate))
    assert (other == eager).all(1).float().mean() > 0.999               # a draw may fall the other way within rounding


def test_joint_law_when_chosen(monkeypatch):
    """Kills: a q returned with guesses that were not drawn from it."""
    settings = {"temperature": 1.0}
    sampler = law.Sampler(law_drafter(monkeypatch, 2, True), ROWS)
    assert law.p_value(sampler.texts(speculate, settings, seed=3), law.enumerate_law(settings)) > 1e-4
