"""The method's own tests: the text is the target's, whatever is guessed.  Each names planted bugs it was seen to catch."""
import math

import pytest
import torch

from conftest import DRAFTS, TARGET, V, config, decode, greedy_alone, make_drafter, prompts_for, random_model
from drafts import NgramDraft
from generate import generate as engine_generate
from generate import make_state
from model import KVCache
from sample import Sampling
from speculate import Draft, State, Tree, speculate

KINDS = ["ngram", *DRAFTS]


# ---- greedy: token for token ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def plain():
    prompts = prompts_for(3)
    texts, rounds = decode("none", 0, prompts, 40)
    assert texts == [greedy_alone(prompt, 40) for prompt in prompts]
    assert len({*texts[0], *texts[1], *texts[2]}) > 10, "the target's greedy text degenerated: nothing would be tested"
    assert all(row == (1, 0) for step in rounds for row in step)
    return prompts, texts


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_and_recomputing(kind, K, plain):
    """Killed: keys written to slot pos for every fed token; a draft's token taken for the target's."""
    prompts, texts = plain
    assert decode(kind, K, prompts, 40)[0] == texts


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_self_draft_keeps_everything(K):
    """Case 3, and exact round counts.  Killed: feeding only the newest token (a hole after each full acceptance)."""
    _, rounds = decode("self", K, prompts_for(3), 64)
    assert len(rounds) == math.ceil(63 / (K + 1))
    for i, step in enumerate(rounds):
        left = 63 - i * (K + 1)
        assert step == [(min(K + 1, left), min(K, left))] * 3


def test_anti_draft_keeps_nothing():
    """Case 4.  Killed: accepting when the draft's token equals its own argmax."""
    prompts = prompts_for(2)
    texts, rounds = decode("anti", 5, prompts, 40)
    assert texts == decode("none", 0, prompts, 40)[0]
    assert rounds == [[(1, 0)] * 2] * 39


@pytest.mark.parametrize("max_new", [0, 1, 2, 4, 5, 6, 11])
@pytest.mark.parametrize("kind", ["none", "self", "ngram", "near"])
def test_exact_lengths(kind, max_new, plain):
    """Case 2, and rows of different budgets.  Killed: the limit off by one; a finished row that goes on."""
    prompts, texts = plain
    assert decode(kind, 4, prompts, max_new)[0] == [text[:max_new] for text in texts]
    budgets = [max_new, 7, 0]
    assert decode(kind, 4, prompts, budgets)[0] == [text[:n] for text, n in zip(texts, budgets)]


@pytest.mark.parametrize("kind", ["self", "ngram", "near"])
def test_eos_inside_a_block(kind, plain):
    """Case 1.  Killed: EOS looked for in the last new token only; the tail counted as kept."""
    prompts, texts = plain
    for at in range(12):
        token = texts[0][at]
        cut = [text[:text[:12].index(token) + 1] if token in text[:12] else text[:12] for text in texts]
        got, rounds = decode(kind, 4, prompts, 12, eos=(token,))
        assert got == cut
        for row, text in enumerate(cut):
            assert sum(step[row][0] for step in rounds) == max(len(text) - 1, 0)
            assert all(kept <= new for step in rounds for new, kept in step)


# ---- scripted drafters: every outcome of a round --------------------------------------------------------------------

class Scripted:
    """Guesses the known text, wrong from guess script[row][round] on.  `one_hot` claims the guesses were drawn from q."""
    taps = ()

    def __init__(self, truth, prompts, script, K, one_hot):
        self.nodes, self.one_hot, self.round = K, one_hot, 0
        self.script = torch.tensor(script)                                                      # (B, rounds)
        width = max(map(len, prompts)) + max(map(len, truth)) + K + 1
        self.text = torch.tensor([(p + t + [0] * width)[:width] for p, t in zip(prompts, truth)])

    def start(self, state, begin, hidden): pass

    def guess(self, state, depth):
        """Tokens at the given depths (N,) below the newest token, right up to the scripted depth."""
        right = self.text.gather(1, state.pos[:, None] + depth)
        return torch.where(depth <= self.script[:, self.round % self.script.shape[1], None], right, (right + 1) % V)

    def propose(self, state, sampling):
        tokens = self.guess(state, torch.arange(1, self.nodes + 1))
        return Draft(tokens, torch.nn.functional.one_hot(tokens, V).float() if self.one_hot else None)

    def observe(self, state, out, n, hidden, p):
        self.round += 1


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_every_count_in_every_row(K, one_hot, plain):
    """Killed: the correction written one place late; rows sharing one n.  (n without cumprod: see test_law.py.)"""
    prompts, texts = plain
    script = [[(r + row + row * (r // (K + 1))) % (K + 1) for r in range(2 * K + 3)] for row in range(3)]
    got, rounds = decode(None, K, prompts, 40, drafter=Scripted(texts, prompts, script, K, one_hot))
    assert got == texts
    for row in range(3):
        seen = [step[row] for step in rounds]
        for r, (new, kept) in enumerate(seen):
            left = 39 - sum(n for n, _ in seen[:r])
            want = script[row][r % len(script[row])]
            assert (new, kept) == (min(want + 1, left), min(want, left))
        assert {kept for _, kept in seen[:-1]} >= set(range(K + 1))


class ScriptedTree(Scripted):
    """Puts the right tokens on one path of the tree, down to the scripted depth, and distinct wrong ones elsewhere."""

    def __init__(self, truth, prompts, script, parents, path):
        super().__init__(truth, prompts, script, len(parents), False)
        self.tree, self.on_path = Tree(parents), torch.tensor([i + 1 in path for i in range(len(parents))])
        self.other = torch.tensor([1 + [j for j in range(len(parents)) if parents[j] == parents[i]].index(i)
                                   for i in range(len(parents))])                               # siblings differ

    def propose(self, state, sampling):
        depth = self.tree.depth[1:]
        right = self.text.gather(1, state.pos[:, None] + depth)
        return Draft(torch.where(self.on_path, self.guess(state, depth), (right + 1 + self.other) % V), tree=self.tree)


TREES = {"two levels": ([0, 0, 1, 1, 2], [(1, 3), (1, 4), (2, 5)]), "a chain": ([0, 1, 2], [(1, 2, 3)]),
         "wide": ([0] * 6, [(3,), (6,)]), "deep last branch": ([0, 0, 0, 3, 4, 5, 4], [(3, 4, 5, 6), (3, 4, 7), (2,)])}


@pytest.mark.parametrize("name", TREES)
def test_every_path_of_a_tree(name, plain):
    """Killed: slots not compacted; compaction from the wrong slot; siblings seeing each other; depth taken for the slot."""
    prompts, texts = plain
    parents, paths = TREES[name]
    for path in paths:
        script = [[(r + row) % (len(path) + 1) for r in range(len(path) + 1)] for row in range(3)]
        got, rounds = decode(None, 0, prompts, 40, drafter=ScriptedTree(texts, prompts, script, parents, path))
        assert got == texts
        for row in range(3):
            assert [kept for _, kept in (step[row] for step in rounds[:-1])][:len(path) + 1] == script[row]


def test_taps_follow_the_path(plain):
    """After a tree the hidden rows are those of a chain over the kept tokens.  Killed: hidden gathered along slots 0..K."""
    prompts, texts = plain
    parents, path = TREES["two levels"][0], (2, 5)
    drafter = ScriptedTree(texts, prompts, [[2]] * 3, parents, path)
    drafter.taps, seen = (0, 1), []
    drafter.observe = lambda state, out, n, hidden, p: seen.append((state.pos - n - 1, n, hidden))
    decode(None, 0, prompts, 10, drafter=drafter)
    cache = KVCache(TARGET.config, 1, 64)
    for row in range(3):
        ids = torch.tensor([prompts[row] + texts[row][:9]])
        _, chain = TARGET(ids, torch.zeros(1, dtype=torch.int64), cache, 64, taps=(0, 1))
        pos, n, hidden = (x[row] for x in seen[0])
        assert n == 2
        torch.testing.assert_close(hidden[:3], chain[0, pos:pos + 3], atol=1e-5, rtol=1e-5)


def test_tree_refuses_a_node_under_a_later_one():
    with pytest.raises(ValueError, match="earlier"):
        Tree([0, 3, 1])


# ---- state that outlives a prompt, odd shapes -----------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["ngram", "self", "near"])
def test_prompts_one_after_another_in_one_state(kind):
    """Cases 8 and 17: longer, then shorter, then one token, then a chunk of prefill and one more.  Killed: the common prefix
    taken from stale tokens; the last token's hidden row of another chunk."""
    B, S = 2, 256
    state = State(KVCache(TARGET.config, B, S), B, S)
    drafter = make_drafter(kind, 3, B, S)
    text = torch.randint(0, V, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    for lengths in ((5, 9), (30, 12), (4, 30), (1, 1), (64, 65), (130, 3), (63, 128)):
        prompts = [text[:n] for n in lengths]
        got, _ = decode(kind, 3, prompts, 12, state=state, drafter=drafter)
        assert got == [greedy_alone(prompt, 12) for prompt in prompts]


def test_a_conversation_is_fed_once(monkeypatch):
    """What the cache holds of a longer prompt is not fed again.  Killed: prefill always from 0."""
    S, fed = 256, []
    state = State(KVCache(TARGET.config, 1, S), 1, S)
    drafter = make_drafter("near", 3, 1, S)
    prompt = prompts_for(1)[0]
    text, _ = decode(None, 3, [prompt], 20, state=state, drafter=drafter)
    prefill = type(TARGET).prefill
    monkeypatch.setattr(type(TARGET), "prefill", lambda self, tokens, begin, end, *a: (
        fed.append(int(end - begin)), prefill(self, tokens, begin, end, *a))[1])
    longer = prompt + text[0] + [1, 2, 3]
    assert decode(None, 3, [longer], 20, state=state, drafter=drafter)[0] == [greedy_alone(longer, 20)]
    assert fed == [6, 6]        # three follow; the newest two, which a draft may lack; one whose features come with the next


def test_k_beyond_the_context():
    """Case 13, in the smallest cache there is.  Killed: no head-room past the context (index out of bounds)."""
    c = config(context=24)
    target = random_model(0, c)
    prompt = prompts_for(1)[0]
    for K in (1, 5, 16):
        state = make_state(target, 1, 24, K)
        assert state.tokens.shape[1] == 24 + 64                     # what the text and prefill's padding need, no more
        got, _ = decode(target, K, [prompt], 24 - len(prompt), target=target, state=state,
                        drafter=make_drafter(target, K, 1, 88, target))
        assert got == [greedy_alone(prompt, 24 - len(prompt), target)]


def test_draft_with_a_shorter_context_goes_plain_past_it():
    """Killed: `valid` left out (its guesses past the context would count as tried); plain rounds never reached."""
    draft, prompts, tried = random_model(0, config(context=20)), prompts_for(2), []
    drafter, state = make_drafter(draft, 3, 2, 192), State(KVCache(TARGET.config, 2, 192), 2, 192)
    drafters = []
    step = lambda target, drafter, *rest: (drafters.append(drafter.nodes), speculate(target, drafter, *rest))[1]
    for new, kept, could in engine_generate(TARGET, drafter, state, Sampling(2), prompts, [40, 40], step):
        tried.append(could)
        assert all(k == min(c, len(ids)) for ids, k, c in zip(new, kept, could))    # what it does guess is right
    assert tried[1] == [3, 3] and any(0 < sum(could) < 6 for could in tried) and tried[-1] == [0, 0]
    assert drafters[0] == 3 and drafters[-1] == 0
    texts, rounds = decode(draft, 3, prompts, 40)
    assert texts == [greedy_alone(prompt, 40) for prompt in prompts]
    assert rounds[0] == [(4, 3)] * 2 and rounds[-1][1] == (1, 0)      # row 1 ends last: it went plain first


@pytest.mark.parametrize("rows", [V - 8, V, V + 8])
def test_padding_rows_of_the_draft(rows):
    """Case 16: the target has V rows of which V - 8 are tokens.  Killed: q as wide as the draft's head; no mask on p."""
    real = V - 8
    target = random_model(0, config(tokens=real))
    draft = random_model(3, config(vocab=rows, tokens=real))
    prompts = prompts_for(3, vocab=real)
    for temperature in (0.0, 1.5):
        texts, _ = decode(draft, 3, prompts, 40, target=target, temperature=temperature)
        assert max(max(text) for text in texts) < real
        if temperature == 0:
            assert texts == decode("none", 0, prompts, 40, target=target)[0]
    smaller = random_model(3, config(vocab=rows - 4, tokens=real - 4))      # and a draft that lacks some real tokens
    assert decode(smaller, 3, prompts, 40, target=target)[0] == decode("none", 0, prompts, 40, target=target)[0]


# ---- noise: a seed is a text ----------------------------------------------------------------------------------------

def test_same_seed_same_text_alone_and_in_a_batch():
    """Case 14.  Killed: noise keyed by the row's index; noise keyed by the round; torch.rand anywhere."""
    prompts = prompts_for(3)
    before = torch.get_rng_state()
    for kind in ("none", "ngram", "near"):
        together, _ = decode(kind, 3, prompts, 30, temperature=1.0, seed=[7, 8, 9])
        assert together == decode(kind, 3, prompts, 30, temperature=1.0, seed=[7, 8, 9])[0]
        for row in range(3):
            assert decode(kind, 3, [prompts[row]], 30, temperature=1.0, seed=7 + row)[0] == [together[row]]
        assert decode(kind, 3, prompts[:1] * 2, 30, temperature=1.0, seed=7)[0][0] == together[0]
        assert len({*map(tuple, decode(kind, 3, prompts[:1] * 3, 30, temperature=1.0, seed=7)[0])}) == 3
    assert torch.equal(before, torch.get_rng_state())


def test_greedy_sampled_and_mixed_rows_in_one_batch():
    """Killed: temperature read from row 0; truncation applied to every row."""
    prompts = prompts_for(3)
    settings = dict(temperature=[0.0, 1.0, 0.8], top_k=[0, 0, 3], top_p=[1.0, 1.0, 0.9], seed=[1, 2, 3])
    for kind in ("ngram", "near"):
        together, _ = decode(kind, 3, prompts, 30, **settings)
        for row in range(3):
            alone, _ = decode(kind, 3, [prompts[row]], 30, **{name: [values[row]] for name, values in settings.items()})
            assert alone == [together[row]]


# ---- prompt lookup, long texts, running ahead -----------------------------------------------------------------------

@pytest.mark.parametrize("text, guesses", [
    ([5, 6, 7, 8, 5, 6, 9, 5, 6], [9, 5, 6, 9]),                # the last two occur twice: the later one, then its period
    ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [4, 9, 2, 3]),          # three tokens match earlier, two later: three win
    ([7, 1, 8, 8, 1], [8, 8, 1, 8]),                            # only one token matches
    ([3, 3, 3], [3, 3, 3, 3]), ([4, 5], None), ([6], None)])    # nothing to find: anything will do
def test_prompt_lookup(text, guesses):
    """Killed: always junk; the first occurrence; one matching token as good as three; a copy that runs past the text."""
    state = State(KVCache(TARGET.config, 1, 64), 1, 64)
    state.tokens[0] = torch.randint(10, V, (64,))               # stale text behind the newest token
    state.tokens[0, :len(text)] = torch.tensor(text)
    state.pos.fill_(len(text) - 1)
    got = NgramDraft(4).propose(state, None).tokens
    assert got.shape == (1, 4) and (guesses is None or got[0].tolist() == guesses)


@pytest.mark.parametrize("kind, K", [("ngram", 4), ("near", 3), ("self", 16), ("none", 0)])
def test_texts_past_the_first_span(kind, K):
    """Rounds read 512 slots, then 1,024; and the same with a round always in flight, as on a GPU.  Killed: a span without
    the rounds in flight; the result of a round read after the next one has written it."""
    target = random_model(0, config(context=1024))
    prompt = torch.randint(0, V, (490,), generator=torch.Generator().manual_seed(3)).tolist()
    plain = decode("none", 0, [prompt, prompt[:4]], 40, target=target, S=1024)[0]
    assert plain[0][:3] == greedy_alone(prompt, 3, target)
    for ahead in (0, 1):
        draft = kind if kind in ("ngram", "none") else random_model(0, target.config, noise=0.05 * (kind == "near"))
        texts, rounds = decode(draft, K, [prompt, prompt[:4]], 40, target=target, S=1024, ahead=ahead)
        assert texts == plain and all(new <= K + 1 for step in rounds for new, _ in step)


def test_rows_that_begin_far_apart_near_the_end_of_the_cache():
    """Row 1 is fed from 0 while row 0 needs five tokens more.  Killed: prefill's chunks run past the last slot."""
    text = torch.randint(0, V, (430,), generator=torch.Generator().manual_seed(4)).tolist()
    state = make_state(TARGET, 2, 440, 3)
    drafter = make_drafter("self", 3, 2, state.tokens.shape[1])
    decode(None, 3, [text[:420], [1]], 2, state=state, drafter=drafter)
    texts, rounds = decode(None, 3, [text[:425], text[:400]], 9, state=state, drafter=drafter)
    assert texts == [greedy_alone(text[:425], 9), greedy_alone(text[:400], 9)] and rounds == [[(4, 3)] * 2] * 2


def test_a_draft_cache_has_no_hole():
    """After a turn without new tokens, after another drafter's turn, beside a row that never begins.  Killed: start()
    skipped when nothing is generated; what another drafter was fed taken for this one's; slot -1 of a one-token prompt."""
    prompt = prompts_for(1)[0] * 6
    state = make_state(TARGET, 1, 200, 3)
    drafter = make_drafter("self", 3, 1, state.tokens.shape[1])
    assert decode(None, 3, [prompt], 0, state=state, drafter=drafter)[0] == [[]]
    assert decode(None, 3, [prompt + [1, 2]], 9, state=state, drafter=drafter)[1] == [[(4, 3)]] * 2
    decode("none", 0, [prompt + [1, 2, 3] * 5], 9, state=state)
    assert decode(None, 3, [prompt + [1, 2, 3] * 5 + [4]], 9, state=state, drafter=drafter)[1] == [[(4, 3)]] * 2
    assert decode("near", 3, [[1], [2, 3]], [0, 5])[0] == [[], greedy_alone([2, 3], 5)]


@pytest.mark.parametrize("prompts, new, S, says", [([[1] * 100], 40, 192, "100 prompt .* 40 new .* room for 128"),
                                                   ([[1] * 500], 20, 1024, "500 prompt .* 20 new .* context of 512"),
                                                   ([[]], 4, 192, "0 prompt"), ([[V]], 4, 192, f"token id {V}"),
                                                   ([[1], [2]], 4, 192, "2 prompts")])
def test_generate_refuses_what_does_not_fit(prompts, new, S, says):
    state = State(KVCache(TARGET.config, 1, S), 1, S)
    with pytest.raises(ValueError, match=says):
        decode("none", 0, prompts, new, state=state)
