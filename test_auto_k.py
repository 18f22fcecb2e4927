"""-k auto: it follows what pays, the drafter follows the text, and the law of the text is the target's own.

"Kills:" names the bug that was planted once and made the test fail.
"""
import random

import pytest
import torch

import auto_k
import test_law as law
from auto_k import AutoDraft, Choice, guessing
from conftest import DRAFTS, TARGET, V, decode, make_drafter, prompts_for
from draft_eagle import EagleDraft, EagleTree
from draft_exit import ExitDraft
from draft_hybrid import HybridDraft
from draft_jacobi import JacobiDraft
from draft_lookahead import LookaheadDraft
from draft_medusa import MedusaDraft
from drafts import NoDraft
from model import CHUNK, KVCache
from plan import expected_tokens
from sample import Sampling
from speculate import State, speculate
from test_eagle import random_eagle

CPU = {0: 1.0, 1: 1.25, 2: 1.36, 3: 1.45, 4: 1.62, 8: 2.3}             # a round here, in plain rounds
GPU = {0: 1.0, 1: 1.1, 2: 1.15, 3: 1.2, 4: 1.25, 8: 1.45}
DEAR = {K: 1 + K for K in CPU}                                          # the target as its own draft
BATCH = {K: 1 + 0.8 * K for K in CPU}                                   # eight rows on a CPU


# ---- the choice, on texts made of chances -------------------------------------------------------------------------------

def speed(cost: dict, rate_at, length: int, ks=(1, 2, 4, 8), first=3, rows=1, seed=0, after=64):
    """A text of `length` tokens a row whose guesses are kept with rate_at(position): -> tokens a plain round's time, from
    token `after` on, and how often each K ran."""
    chance, choice, used = random.Random(seed), Choice(list(ks), first), dict.fromkeys(cost, 0)
    at, clock, began = [0] * rows, 0.0, None
    choice.begin(rows)
    while min(at) < length:
        K, kept = choice.next([max(0, length - n) for n in at]), []
        for row in range(rows):
            n = 0
            while n < K and chance.random() < rate_at(at[row]):
                n += 1
            kept.append(n)
            at[row] += n + 1
        seconds = cost[K] * chance.lognormvariate(0, 0.05)
        choice.saw(K, kept, seconds)
        if began is None and min(at) >= after:
            began = sum(at), clock + seconds
        clock, used[K] = clock + seconds, used[K] + 1
    return (sum(at) - began[0]) / (clock - began[1]) / rows, used


@pytest.mark.parametrize("cost", [CPU, GPU, DEAR], ids=["cpu", "gpu", "dear"])
@pytest.mark.parametrize("a", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_it_finds_what_pays(cost, a):
    """Never more than 5 % slower than plain after 64 tokens, and on average near the best K, known beforehand.
    Kills: the other side never tried again; tried every 8 rounds; K taken for the likeliest, not for the fastest."""
    got = [speed(cost, lambda at: a, 400, seed=seed)[0] for seed in range(10)]
    best = max(expected_tokens([a] * K) / cost[K] for K in cost)
    assert min(got) > 0.95
    assert sum(got) / len(got) > 0.93 * best


def test_a_text_that_changes_is_noticed():
    """Free prose, then a copy, then prose again.  Kills: evidence that does not fade; the other side never tried again."""
    rate = lambda at: 0.95 if 300 <= at < 600 else 0.05
    runs = [speed(CPU, rate, 900, seed=seed) for seed in range(10)]
    assert min(used[3] + used[4] + used[8] for _, used in runs) > 60 and min(used[0] for _, used in runs) > 400
    assert sum(got for got, _ in runs) / 10 > 0.9 * 836 / (236 + 300 / (expected_tokens([0.95] * 8) / CPU[8]) + 300)


def test_what_could_not_pay_if_all_were_kept_is_not_tried():
    """As in a large batch on a CPU.  Kills: probes whatever a round costs."""
    choice = Choice([], 3)
    choice.seconds[0], choice.seconds[3] = [1.0], [4.1]
    choice.begin(8)
    assert {choice.next([99] * 8) for _ in range(200)} == {0}


def test_probes_lose_no_more_than_their_share():
    """From the first plain round on, also in texts that end soon.  Kills: probes after 8, 16, 32 rounds whatever they lose."""
    choice, used = Choice([], 3), []
    choice.begin(8)
    for _ in range(300):
        used.append(choice.next([999] * 8))
        choice.saw(used[-1], [0] * 8, BATCH[used[-1]])
    plain = used[used.index(0, 2):]                             # the first two rounds look what each K costs
    for at in range(len(plain)):
        lost = sum(BATCH[K] - 1 for K in plain[:at + 1])
        assert lost <= BATCH[3] - 1 + 0.05 * (at + 1)           # one probe ahead of its time: old evidence fades
    assert any(plain)


def test_what_lasted_is_tried_again_soon():
    """Kills: an interval that only grows."""
    choice, used = Choice([4], 4), []
    choice.begin(1)
    for rounds, n in ((300, 0), (100, 4), (60, 0)):
        used.append([])
        for _ in range(rounds):
            used[-1].append(choice.next([999]))
            choice.saw(used[-1][-1], [n], CPU[used[-1][-1]])
    runs = ["".join("s" if K else "p" for K in part).replace("s", " ").split() for part in used]
    assert len(runs[0][-2]) == 64 and len(runs[2][0]) in (8, 9)         # 9: it had just looked what plain costs


def test_rows_are_pooled():
    """Kills: rows that have ended counted as if they went on.  One row that copies among seven that do not: speculation must pay for the batch."""
    assert speed(CPU, lambda at: 0.05, 200, rows=8)[1][0] > 150
    choice = Choice([4], 4)
    for K in (0, 4):
        choice.seconds[K].append(CPU[K])
    choice.begin(8)
    for _ in range(30):
        choice.saw(4, [4] + [0] * 7, CPU[4])
        choice.unseen = 0
    assert choice.next([50] * 8) == 0           # 7 + 5 tokens in 1.62 rounds of 8
    assert choice.next([50] + [0] * 7) == 0     # plain goes on for a while
    choice.begin(8)
    for _ in range(30):
        choice.saw(4, [4] + [0] * 7, CPU[4])
        choice.unseen = 0
    assert choice.next([50] + [0] * 7) == 4     # the others have ended: 5 tokens instead of 1


def test_a_round_that_must_be_compiled_earns_it_first():
    """Kills: every K taken as ready; the tokens that are left not looked at."""
    choice = Choice([1, 2, 4, 8], 2, compile_s=30.0)
    choice.begin(1)
    for K in (0, 2):
        choice.seconds[K].append(CPU[K] / 20)
    for _ in range(30):
        choice.saw(2, [2], CPU[2] / 20)
        choice.unseen = 0
    assert choice.next([200]) == 2              # 5 s are left at this pace
    assert choice.next([20_000]) == 8


def test_a_round_that_compiled_costs_what_the_line_says():
    """The engine's clock stands still while something compiles: such a round seems to cost nothing.  Kills: that taken for its cost."""
    now = {"wall": 0.0, "counted": 0.0}
    state = new_state(1)
    draft = AutoDraft(drafter_for("ngram", state), 4, state, TARGET, compiled=True, clock=lambda: now["counted"])
    draft.uncounted = lambda: now["wall"] - now["counted"]
    draft.choice.begin(1)
    for compiling in (30.0, 0.0, 0.0, 20.0, 0.0):
        draft.choose(state, [100])
        now["counted"] += 0.5 * (not compiling)
        now["wall"] += compiling or 0.5
        draft.saw([0], [1])
    assert [list(s) for s in draft.choice.seconds.values() if s] == [[0.5] * len(s) for s in draft.choice.seconds.values() if s]
    assert sum(map(len, draft.choice.seconds.values())) == 3


def test_an_old_time_of_plain_decoding_is_taken_again():
    """Plain seemed slow once.  Kills: no look at plain decoding while speculation seems to pay; a look after 64 rounds only."""
    choice = Choice([], 4)
    choice.begin(1)
    choice.saw(0, [0], 5.0)
    used = []
    for _ in range(400):
        used.append(choice.next([100]))
        choice.saw(used[-1], [0], CPU[used[-1]])
    assert 0 in used[:20] and used[:40].count(0) < 4 and used[-200:].count(0) > 150


# ---- the drafter follows ------------------------------------------------------------------------------------------------

class Schedule:
    """Takes the place of a Choice: the K that are listed, again and again."""

    def __init__(self, ks):
        self.ks, self.at, self.first = ks, -1, max(ks)

    def begin(self, rows): pass

    def next(self, left):
        self.at += 1
        return self.ks[self.at % len(self.ks)]

    def saw(self, K, kept, seconds): pass


def auto(drafter, state, ks, target=TARGET) -> AutoDraft:
    draft = AutoDraft(drafter, drafter.nodes, state, target, compiled=False)
    draft.choice = Schedule(ks)
    draft.drafters |= {K: guessing(drafter, K) for K in ks if K not in draft.drafters}
    return draft


def new_state(B=3, S=256) -> State:
    return State(KVCache(TARGET.config, B, S), B, S)


def drafter_for(kind: str, state: State, K=4):
    B, S = state.tokens.shape
    if kind == "eagle":
        return EagleDraft(random_eagle(TARGET), state, K)
    if kind == "exit":
        return ExitDraft(TARGET, K, 1)
    if kind.startswith("ngram+"):
        return HybridDraft(make_drafter(kind.removeprefix("ngram+"), K, B, S))
    return make_drafter(kind, K, B, S)


SCHEDULES = {"now and then": [4, 0, 0, 1, 2, 0, 4], "long": [4, 2] + [0] * 90 + [1, 4, 4]}


@pytest.fixture(scope="module")
def plain():
    return decode("none", 0, prompts_for(2), 110)[0]


@pytest.mark.parametrize("ks", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("kind", ["ngram", "near", "eagle", "exit", "ngram+near"])
def test_greedy_text_is_plain(kind, ks, plain):
    """Kills: a draft whose cache does not fit the K it is asked for."""
    state = new_state(2)
    texts, _ = decode(None, 0, prompts_for(2), 110, state=state, drafter=auto(drafter_for(kind, state), state, ks))
    assert texts == plain


@pytest.mark.parametrize("ks", [[4, 0, 0, 1, 2, 0, 4], [4, 2] + [0] * 90 + [1, 4, 4], [0] * 64 + [4]])
@pytest.mark.parametrize("kind", ["self", "ngram+self"])
def test_a_draft_that_was_not_asked_has_no_hole(kind, ks, monkeypatch):
    """The target as its own draft stays always right, whatever happened in between.
    Kills: no catch_up; catch_up from `followed` itself."""
    if kind == "ngram+self":
        monkeypatch.setattr("draft_hybrid.NgramDraft.look_up",          # never found, but the cache is treated as a hybrid's
                            lambda self, state: (state.tokens[:, :self.nodes], state.pos[:, None] * 0))
    state = new_state(2)
    drafter = auto(drafter_for(kind, state), state, ks)
    prompts = [list(range(16)), [1, 2] * 7]             # a hybrid's draft is fed the 9 newest tokens again
    _, rounds = decode(None, 0, prompts, 110, state=state, drafter=drafter)
    used = [ks[i % len(ks)] for i in range(len(rounds))]
    assert all(round == [(K + 1, K)] * 2 for K, round in list(zip(used, rounds))[:-1])      # the last is cut by the limit
    assert sum(used) >= 4


class Spy(EagleDraft):
    """Remembers what it proposed from, of each length of text."""

    def propose(self, state, sampling):
        self.seen = getattr(self, "seen", {}) | {int(state.pos[0]): self.guessed.clone()}
        return super().propose(state, sampling)


@torch.no_grad()
def seen_by_eagle(ks) -> dict:
    """{length of the text: the feature it guesses from} of 150 tokens whose rounds follow ks."""
    state = new_state(1)
    spy = Spy(random_eagle(TARGET), state, 1)
    drafter = auto(spy, state, ks)
    drafter.drafters[1] = spy
    decode(None, 0, [[5, 9, 11]], 150, state=state, drafter=drafter)
    return spy.seen


@pytest.fixture(scope="module")
def uninterrupted() -> dict:
    return seen_by_eagle([1])


@pytest.mark.parametrize("plain", [1, 63, 64, 65, 130])
def test_eagle_catches_up_with_the_features_it_missed(plain, uninterrupted):
    """After so many plain rounds its feature is that of an EAGLE that was never interrupted.
    Kills: features kept in the wrong order; those of a row that had ended; forgetting to catch up when memory is full."""
    seen = seen_by_eagle([1] + [0] * plain + [1])
    common = seen.keys() & uninterrupted.keys()
    assert any(at > plain for at in common)
    for at in common:
        torch.testing.assert_close(seen[at], uninterrupted[at], rtol=1e-4, atol=1e-4)


def test_the_next_turn_knows_what_was_written_without_the_drafter(monkeypatch):
    """A conversation whose first text ended with plain rounds: nothing is fed twice, and the draft is still always right.
    Kills: begin() without catch_up."""
    fed, state = [], new_state(1)
    drafter = auto(drafter_for("self", state), state, [4] + [0] * 30)
    text, _ = decode(None, 0, [[5, 9, 11]], 30, state=state, drafter=drafter)
    drafter.choice = Schedule([4])
    prefill = TARGET.prefill
    monkeypatch.setattr(TARGET, "prefill", lambda tokens, begin, end, *a: (fed.append((end - begin).tolist()),
                                                                          prefill(tokens, begin, end, *a))[1])
    _, rounds = decode(None, 0, [[5, 9, 11] + text[0] + [7, 8]], 20, state=state, drafter=drafter)
    assert max(max(f) for f in fed) < 45
    assert [new for new, kept in sum(rounds[:-1], [])] == [5] * (len(rounds) - 1)


@pytest.mark.parametrize("kind", ["jacobi", "near", "eagle"])
def test_a_text_begun_anew_follows_nothing(kind):
    """The text before it ended with plain rounds, and was given up (pos = -1), as bench.py and Ctrl-C do.
    Kills: a drafter that catches up with a text that is no more."""
    state = new_state(1)
    drafter = JacobiDraft(state, 4) if kind == "jacobi" else drafter_for(kind, state)
    drafter, texts = auto(drafter, state, [4] + [0] * 30), []
    for _ in range(2):
        texts += decode(None, 0, [[5, 9, 11]], 20, state=state, drafter=drafter)[0]
        state.pos.fill_(-1)
    assert texts == 2 * decode("none", 0, [[5, 9, 11]], 20)[0]


def test_a_hybrids_draft_refills_what_any_round_left():
    """A round of 8 may have left 8 guesses in its cache that were not kept, and the next one guesses 1.
    Kills: as many tokens fed again as this round guesses."""
    state = new_state()
    draft = AutoDraft(drafter_for("ngram+near", state), 4, state, TARGET, compiled=False)
    assert {d.other.newest for K, d in draft.drafters.items() if K} == {9}


def test_what_cannot_vary_is_used_as_it_is():
    """Trees and lookahead have one shape: as they are, or not at all.  Kills: a tree taken for a chain of another K."""
    state = new_state()
    for drafter, K in ((LookaheadDraft(state, 3, 3, 2), 2), (EagleTree(random_eagle(TARGET), state, 2, 6, 3), 2)):
        draft = AutoDraft(drafter, K, state, TARGET, compiled=False)
        assert sorted(draft.drafters) == [0, K] and draft.drafters[K] is drafter and draft.nodes == drafter.nodes
        texts, _ = decode(None, 0, prompts_for(3), 40, state=state, drafter=draft)
        assert texts == decode("none", 0, prompts_for(3), 40)[0]


# ---- the law ------------------------------------------------------------------------------------------------------------

def by_schedule(sampler, ks, pick, settings, seed) -> torch.Tensor:
    """Texts (B, 4) whose rows each follow their own K: pick(state, kept) -> (B,) index of ks, from what the row has written
    and how many guesses its last round kept."""
    state, drafters = sampler.state, [guessing(sampler.drafter, K) if K else NoDraft() for K in ks]
    kept = torch.zeros_like(state.pos)

    def step(target, drafter, state, sampling):
        choice, live = pick(state, kept), state.live.clone()
        after = live.clone()
        for i, drafter in enumerate(drafters):
            mine = live & (choice == i)
            state.live.copy_(mine)                                      # the others write nothing in this round
            round = speculate(target, drafter, state, sampling)
            kept.copy_(torch.where(mine, round.n, kept))
            after = torch.where(mine, state.live, after)
        state.live.copy_(after)

    return sampler.texts(step, settings, seed)


@pytest.mark.parametrize("settings", [4, 6])
def test_the_joint_law_under_an_adversary(settings, monkeypatch):
    """Each row's K follows its own text and its kept guesses, in the way that would hurt most: plain after a success, three
    guesses after a failure, one after an odd token."""
    monkeypatch.setattr("model.CHUNK", 4)
    expected = law.enumerate_law(law.SETTINGS[settings])
    newest = lambda state: state.tokens.gather(1, state.pos[:, None])[:, 0]
    pick = lambda state, kept: torch.where(newest(state) % 2 == 1, 1, torch.where(kept > 0, 0, 2))
    texts = by_schedule(law.Sampler(law.drafter_for("model", 3, 20_000), 20_000), (0, 1, 3), pick, law.SETTINGS[settings], 11)
    assert law.p_value(texts, expected) > 1e-4


def test_a_choice_that_peeks_at_the_noise_is_noticed(monkeypatch):
    """The same test with a planted bug: K = 0 where the guess would be refused, seen by trying it."""
    monkeypatch.setattr("model.CHUNK", 4)
    sampler = law.Sampler(law.drafter_for("model", 1, 20_000), 20_000)

    def pick(state, kept):
        before = {name: x.clone() for name, x in state.named_buffers()}
        n = speculate(law.TARGET, sampler.drafter, state, Sampling(20_000, seed=11, **law.SETTINGS[4])).n
        for name, x in state.named_buffers():
            x.copy_(before[name])
        return (n > 0).long()

    texts = by_schedule(sampler, (0, 1), pick, law.SETTINGS[4], 11)
    assert law.p_value(texts, law.enumerate_law(law.SETTINGS[4])) < 1e-6
