"""Lookahead decoding against its own algorithm in plain Python: same window, pool, candidates, and the text is plain's.

"Kills:" names the bug that was planted once and made the test fail.
"""
import pytest
import torch

import draft_lookahead
import model
import test_law as law
from conftest import TARGET, V, config, decode, greedy_alone, logits_alone, prompts_for, random_model
from draft_lookahead import LookaheadDraft
from generate import compile_round, generate, make_state
from model import KVCache
from sample import Sampling
from speculate import State, speculate
from test_compile import FORBIDDEN, traced_ops

SHAPES = [(5, 3, 3), (1, 2, 1), (4, 2, 2), (3, 5, 4), (6, 4, 5), (1, 4, 2)]                     # W, N, G


def drafter_in(state, W=5, N=3, G=3):
    return LookaheadDraft(state, W, N, G)


def new_state(B, S=192, eos=()):
    return State(KVCache(TARGET.config, B, S), B, S, eos)


class Spy(LookaheadDraft):
    """Remembers of every round, for each row: how long the text is, the candidates, the window."""
    seen = None

    def start(self, *args):
        super().start(*args)
        self.seen = []

    def propose(self, state, sampling):
        draft = super().propose(state, sampling)
        rows = zip(state.pos.tolist(), draft.tokens.tolist(), draft.valid.tolist(), self.window.tolist())
        self.seen.append([(pos + 1, [tokens[i:i + self.N - 1] for i in range(0, valid, self.N - 1)], window)
                          for pos, tokens, valid, window in rows])
        return draft


class Reference:
    """The paper's algorithm for one row: lists, one forward for each cell, nothing shared with the drafter's code."""

    def __init__(self, text, W, N, G, size):
        self.text, self.W, self.N, self.G, self.size = list(text), W, N, G, size
        repeated = (self.text * (W + N))[-(W + N - 3):] if W + N > 3 else []
        ahead = [text[-1], *repeated]                   # what stands 0, 1, 2, ... past the newest token
        self.window = [ahead[r:r + W] for r in range(N - 1)]
        self.pool = [tuple(self.text[i:i + N]) for i in range(len(self.text) - N + 1)][-size:]

    def candidates(self):
        found = []
        for gram in reversed(self.pool):
            if gram and gram[0] == self.text[-1] and gram not in found:
                found.append(gram)
        return [list(gram[1:]) for gram in found[:self.G]]

    def step(self, truth):
        """truth: the text that plain decoding writes -> how many guesses were kept."""
        says = []
        for c in range(self.W):
            trajectory = [self.window[r][c] for r in range(1, self.N - 1)]
            says.append(logits_alone(TARGET, [self.text[:-1] + self.window[0][:c + 1] + trajectory])[0].argmax().item())
        ahead = truth[len(self.text):]
        kept = max([next((i for i, (a, b) in enumerate(zip(guess, ahead)) if a != b), len(guess))
                    for guess in self.candidates()], default=0)
        kept = min(kept, len(ahead))
        self.pool += list(zip(*self.window, says))
        self.text += ahead[:kept + 1]
        ends = range(len(self.text) - self.N + 1, len(self.text) + 1)
        self.pool += [tuple(self.text[end - self.N:end]) if end >= self.N else None for end in ends]
        self.pool = self.pool[-self.size:]
        self.window = self.window[1:] + [says]
        self.window[0] = [self.text[-1], *self.window[0][1:]]
        return kept


@pytest.mark.parametrize("W, N, G, size", [(*shape, size) for shape, size in zip(SHAPES, [4096, 23] * 3)])
def test_every_round_is_the_algorithms(W, N, G, size, monkeypatch):
    """Candidates, window and number of kept guesses of every round, greedy and sampled; a prompt of one token is
    shorter than the window; a pool of 23 n-grams forgets.
    Kills: a cell that sees its left neighbour's column; a cell's slot taken for its position; another row of the window
    read; the newest token left as guessed; n-grams read along rows; the pool cut at the wrong end."""
    monkeypatch.setattr(draft_lookahead, "POOL", size)
    prompts = [[7], *prompts_for(2)]
    for settings in ({}, {"temperature": 1.0, "seed": 5}):
        plain = decode("none", 0, prompts, 30, **settings)[0]
        drafter = Spy(state := new_state(3), W, N, G)
        texts, rounds = decode(None, 0, prompts, 30, state=state, drafter=drafter, **settings)
        assert texts == plain
        for row, (prompt, text) in enumerate(zip(prompts, texts)):
            truth, reference = prompt + text, Reference(prompt + text[:1], W, N, G, size)
            for round, seen in zip(rounds, drafter.seen):
                if len(reference.text) == len(truth):
                    break
                assert seen[row] == (len(reference.text), reference.candidates(), reference.window)
                assert round[row][1] == reference.step(truth)
            assert reference.text == truth
        assert size == 23 or sum(kept for round in rounds for _, kept in round) > 5, "hardly anything was kept"


@pytest.mark.parametrize("W, N, G", SHAPES)
def test_who_sees_whom(W, N, G):
    """The paper's Figure 2 and its mask in so many words, and where each stands.
    Kills: a cell under the one to its left in every row; candidates that see each other."""
    tree = drafter_in(new_state(1), W, N, G).tree
    places = [("text",)] + [("guess", g, j) for g in range(G) for j in range(N - 1)]
    places += [("cell", r, c) for r in range(N - 1) for c in range(W) if (r, c) != (0, 0)]
    for i, a in enumerate(places):
        assert tree.depth[i] == (a[2] + 1 if a[0] == "guess" else sum(a[1:]))
        for j, b in enumerate(places):
            if b == ("text",):
                sees = True
            elif a[0] == b[0] == "guess":
                sees = a[1] == b[1] and b[2] <= a[2]                            # its own candidate up to itself
            elif a[0] == b[0] == "cell":
                (r, c), (s, d) = a[1:], b[1:]
                sees = d <= c if s == 0 else s <= r and d == c                  # first row up to its column; its column
            else:
                sees = False                                                    # window and candidates: not each other
            assert tree.sees[i, j] == sees, (a, b)


def at_a_round(prompt, W, N, G):
    """-> state and drafter before the first round after `prompt`, and the greedy text that follows it."""
    drafter = drafter_in(state := new_state(1), W, N, G)
    next(generate(TARGET, drafter, state, Sampling(1), [prompt], [12]))
    return state, drafter, greedy_alone(prompt, 12)


@torch.no_grad()
def go_on(state, drafter, text):
    """Rounds to the end: the text must be this one.  -> the first round"""
    rounds = []
    while state.live.any():
        rounds.append(speculate(TARGET, drafter, state, Sampling(1)))
    end = int(state.pos) + 1
    assert state.tokens[0, end - len(text):end].tolist() == text
    return rounds[0]


@pytest.mark.parametrize("W, N", [(5, 3), (4, 2), (1, 3)])
def test_a_right_window_is_not_text(W, N):
    """All cells hold what the target will say, the pool nothing.  Kills: no `valid`; `tried` always the tree's depth."""
    state, drafter, text = at_a_round([1, 6, 1], W, N, 2)
    drafter.pool.fill_(-1)
    drafter.window.copy_(torch.tensor([[text[r + c] for c in range(W)] for r in range(N - 1)]))
    first = go_on(state, drafter, text)
    assert (first.n.item(), first.new.item(), first.tried.item()) == (0, 1, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_candidates_that_begin_alike(order):
    """Any order, the right one is kept, its keys too.  Kills: parents as in the static tree, where the first candidate
    hides the others; a token hung under one with another beginning (no cumprod)."""
    state, drafter, text = at_a_round([1, 6, 1], 3, 4, 4)
    t, a, b, c = text[:4]
    other = [x for x in range(V) if x not in text[:5]]
    grams = [(t, a, b, c), (t, a, b, other[0]), (t, a, other[1], c)]
    drafter.pool.fill_(-1)
    drafter.pool[0, -4:] = torch.tensor([grams[i] for i in order] + [(t, other[2], b, c)])
    first = go_on(state, drafter, text)
    assert (first.n.item(), first.new.item(), first.tried.item()) == (3, 4, 3)
    assert first.out[0].tolist() == text[1:5]


def test_the_pool_is_a_queue():
    """Newest first, no n-gram twice, only those of the newest token, no more than there are.
    Kills: score by the slot's distance from the front; equal n-grams left in; -1 fed to the embedding."""
    drafter = drafter_in(new_state(2), 2, 3, 3)
    drafter.window[:, 0, 0] = torch.tensor([5, 6])
    drafter.pool[0, -6:] = torch.tensor([[5, 1, 1], [5, 2, 2], [5, 3, 3], [6, 4, 4], [5, 2, 2], [5, 2, 2]])
    guesses, found = drafter.candidates()
    assert found.tolist() == [3, 0] and guesses[0].tolist() == [[2, 2], [3, 3], [1, 1]]
    state = new_state(2)
    draft = drafter.propose(state, None)
    assert draft.valid.tolist() == [6, 0] and draft.tokens.min() >= 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_eos_inside_a_candidate(at):
    """As its first, second or last token.  Kills: text past EOS; the tail of a candidate counted as kept."""
    state, drafter, text = at_a_round([1, 6, 1], 3, 4, 2)
    drafter.pool[0, -1] = torch.tensor(text[:4])
    state.eos.fill_(text[at])
    assert text[at] not in text[:at]
    first = go_on(state, drafter, text[:at + 1])
    assert (first.n.item(), first.new.item()) == (at, at)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("W, N, G", SHAPES)
def test_greedy_text_is_plain(W, N, G, B):
    state, prompts = new_state(B), prompts_for(B, seed=8)
    texts, rounds = decode(None, 0, prompts, 60, state=state, drafter=drafter_in(state, W, N, G))
    assert texts == decode("none", 0, prompts, 60)[0]
    assert any(kept for round in rounds for _, kept in round), "nothing was ever kept: this test says nothing"


def test_a_second_turn_starts_clean():
    """A chat's cache goes on, window and pool are those of the new text alone, as for a new drafter; a shorter one too.
    Kills: start() that keeps the pool; that leaves the window as it was."""
    state = new_state(1)
    drafter, said = Spy(state, 5, 3, 3), prompts_for(1)[0]
    for more in ([], [1, 2, 3], [9], None):
        said = said + more if more is not None else [4]
        texts, rounds = decode(None, 0, [said], 20, state=state, drafter=drafter)
        fresh = Spy(alone := new_state(1), 5, 3, 3)
        assert (texts, rounds) == decode(None, 0, [said], 20, state=alone, drafter=fresh)
        assert drafter.seen == fresh.seen
        said = said + texts[0]


# ---- room for all that is fed

def test_to_the_end_of_the_context():
    """64 tokens a round in the smallest cache there is, to the last position.  Kills: nodes counts what can be kept."""
    target, prompt = random_model(0, config(context=24)), prompts_for(1)[0]
    for W, N, G in ((30, 3, 2), (1, 2, 1)):
        state = make_state(target, 1, 24, (W + G) * (N - 1) - 1)
        assert state.tokens.shape[1] == 24 + 64
        drafter = drafter_in(state, W, N, G)
        assert drafter.nodes == (W + G) * (N - 1) - 1
        got, _ = decode(None, 0, [prompt], 24 - len(prompt), target=target, state=state, drafter=drafter)
        assert got == [greedy_alone(prompt, 24 - len(prompt), target)]


def test_past_the_first_span():
    """Rounds of 64 tokens read 512 slots, then 1,024, also with one in flight.  Kills: nodes counts what can be kept."""
    target = random_model(0, config(context=1024))
    prompt, spans = torch.randint(0, V, (370,), generator=torch.Generator().manual_seed(3)).tolist(), []
    plain = decode("none", 0, [prompt, prompt[:4]], 40, target=target, S=1024)[0]
    for ahead in (0, 1):
        state = State(KVCache(target.config, 2, 1024), 2, 1024)
        drafter = drafter_in(state, 29, 3, 3)
        step = lambda *round: (spans.append((state.pos.max().item() + drafter.nodes, state.span)), speculate(*round))[1]
        run = dict(target=target, state=state, drafter=drafter, ahead=ahead, step=step)
        assert decode(None, 0, [prompt, prompt[:4]], 40, **run)[0] == plain
    assert all(last < span for last, span in spans) and {span for _, span in spans} == {512, 1024}


# ---- the compiled round

def test_compiled_equals_eager_and_never_recompiles():
    """Kills: the pool's length, the text's or a row's count of candidates in the graph."""
    step, B, S = compile_round(), 2, 512
    state = new_state(B, S)
    drafter = drafter_in(state, 4, 3, 2)
    runs = [dict(prompts=prompts_for(B)), dict(prompts=[[1], [2] * 70], temperature=[0.0, 1.3], seed=7)]
    for run in runs:
        texts, rounds = decode(None, 0, max_new=30, state=state, drafter=drafter, step=step, **run)
        eager = new_state(B, S)
        assert (texts, rounds) == decode(None, 0, max_new=30, state=eager, drafter=drafter_in(eager, 4, 3, 2), **run)
        torch.compiler.set_stance("fail_on_recompile")


def test_no_value_of_the_round_is_read_on_the_host():
    ops = traced_ops(drafter_in(new_state(3, 512)), 2)
    assert len(ops) > 50 and not [op for op in ops if any(word in op for word in FORBIDDEN)]


def test_joint_law_of_three_tokens(monkeypatch):
    """test_law's test for this drafter, through the compiled round.  Hot and not truncated: 512 texts are possible, and
    most guesses wrong.  Kills: a window that is text (no `valid`)."""
    monkeypatch.setattr(model, "CHUNK", 4)
    monkeypatch.setattr(draft_lookahead, "POOL", 16)
    rows, settings = 20_000, {"temperature": 1.5}
    state, step, kept = State(KVCache(law.TARGET.config, rows, law.S), rows, law.S), compile_round(), []
    sampler = law.Sampler(drafter_in(state, 4, 3, 2), rows)
    texts = sampler.texts(lambda *round: kept.append(step(*round).n.sum().item()), settings, seed=3)
    assert law.p_value(texts, law.enumerate_law(settings)) > 1e-4 and sum(kept) > rows // 10
