"""How many tokens to guess next?  -k auto: measured while the text is written.

Which K pays depends on the machine (what does a round of K guesses cost?) and on the text (how many of them are kept?),
and texts change.  So a few rounds of different K stand ready, K = 0 being plain decoding.  Every round that ran says what
it cost and how many guesses were kept; the next K is the one that promises most tokens a second.

The law of the text is untouched: the choice rests on rounds that are committed and on clocks, never on noise that a later
round will use.  But where guesses are drawn, a token depends on where its round began: a seed is then no longer a text,
which is why generate.py keeps K fixed when --seed is given.
"""
import copy
import math
import statistics
import time
from collections import Counter, deque

import torch
from torch import Tensor, nn

from draft_hybrid import HybridDraft
from model import CHUNK
from plan import expected_tokens, fit_line
from speculate import Draft, State

KS = 1, 2, 4, 8             # what may be chosen besides plain decoding and the drafter's usual K
FADE, USUAL = 0.93, 0.98    # what a round counts for one round later: in the estimate for now, in the text's usual rate
PRIOR = 3                   # rounds that the usual rate weighs against those seen lately
HOPE = 4                    # and rounds that the hope of a new text weighs in the usual rate: texts begin unevenly
WAIT, LONGEST = 8, CHUNK    # rounds until the other side is tried again: at first, and after it failed several times, but
PROBES = 0.04               # never so soon that trying loses more than this share of plain decoding's time, as it looks
MARGIN = 1.05               # promised by another K before it is taken


class Evidence:
    """How many guesses of one row were kept, by depth: of those whose predecessors were."""

    def __init__(self, depth: int):
        self.lately, self.usually = ([(0.0, 0.0)] * depth for _ in range(2))         # (tried, kept) of each guess

    def fade(self):
        self.lately = [(FADE * tried, FADE * kept) for tried, kept in self.lately]

    def saw(self, K: int, n: int):
        """Of a round's K guesses n were kept."""
        self.lately, self.usually = (
            [(fade * tried + (i < K and i <= n), fade * kept + (i < n)) for i, (tried, kept) in enumerate(counts)]
            for counts, fade in ((self.lately, FADE), (self.usually, USUAL)))

    def rates(self) -> list[float]:
        """What guess 1, 2, ... can hope for.  A depth never tried is taken to be like the one before it."""
        rates, rate = [], 0.7                       # before anything was seen: worth a try
        for (tried, kept), (usually_tried, usually_kept) in zip(self.lately, self.usually):
            usual = (usually_kept + HOPE * rate) / (usually_tried + HOPE)
            rate = (kept + PRIOR * usual) / (tried + PRIOR)
            rates.append(rate)
        return rates


class Choice:
    """Which K next, from what rounds have cost and kept.  Plain numbers: it knows no model."""

    def __init__(self, ks: list[int], first: int, compile_s: float = 0.0):
        """ks: what can be chosen besides 0 and `first`, which is run before anything is known.  Where a round must be
        compiled, in about compile_s seconds, only those two are ready: another must save as much in what is left to write."""
        self.ks, self.first, self.compile_s = sorted({0, first, *ks}), first, compile_s
        self.ready = {0, first} if compile_s else set(self.ks)
        self.seconds = {K: deque(maxlen=8) for K in self.ks}        # of the latest rounds
        self.begin(0)

    def begin(self, rows: int):
        """A new text: what rounds cost is still known."""
        self.rows = [Evidence(max(self.ks)) for _ in range(rows)]
        self.now, self.wait = self.first, WAIT
        self.since = 0                          # rounds since plain decoding began or ended
        self.unseen, self.look = 0, 2 * WAIT    # rounds since a plain one was timed; how many are too many

    def cost(self, K: int) -> float:
        """Seconds of a round: the median of its latest, or on the line through those that ran."""
        timed = [(K, statistics.median(s)) for K, s in self.seconds.items() if s]
        if self.seconds[K]:
            return dict(timed)[K]
        start, slope = fit_line(timed)
        return max(start + slope * K, min(seconds for _, seconds in timed))

    def next(self, left: list[int]) -> int:
        """left: how many tokens each row may still write, 0 for one that has ended."""
        if untimed := [K for K in (self.first, 0) if not self.seconds[K]]:
            return untimed[0]
        if self.unseen >= self.look:                                # what all is compared with must not be old news
            self.look = min(2 * self.look, LONGEST)
            return 0
        rates = [row.rates() for row, n in zip(self.rows, left) if n]
        tokens = {K: sum(expected_tokens(r[:K]) for r in rates) for K in self.ks}
        speed = {K: tokens[K] / self.cost(K) for K in self.ks}
        worth = [K for K in self.ks if K in self.ready or
                 sum(left) * (1 / max(speed[k] for k in self.ready) - 1 / speed[K]) > self.compile_s]
        best = max((K for K in worth if K), key=speed.get)
        could = (best + 1) * len(rates) / self.cost(best) > speed[0]        # if every guess were kept
        loss = self.cost(best) / self.cost(0) - tokens[best] / tokens[0]    # plain rounds that one of `best` likely loses
        if not self.now and self.since >= max(self.wait, loss / PROBES) and could:      # does it pay again by now?
            self.now, self.since, self.wait = best, 0, min(2 * self.wait, LONGEST)
        elif self.now and speed[0] > MARGIN * max(speed[best], speed[self.now]):
            self.now, self.since = 0, 0
        elif self.now and speed[best] > MARGIN * speed[self.now]:
            self.now = best
        if self.now and self.since == WAIT:                         # it lasted: the next stretch is tried as soon
            self.wait = WAIT
        self.since += 1
        return self.now

    def saw(self, K: int, kept: list[int | None], seconds: float | None):
        """kept: guesses kept of each row; None: it had ended, or its end cut the round short.  seconds: None where the
        round was compiled first, so that nobody knows."""
        self.ready.add(K)
        self.seconds[K] += [seconds] if seconds is not None else []
        self.unseen = self.unseen + 1 if K else 0
        for row, n in zip(self.rows, kept):
            row.fade() if n is None or not K else row.saw(K, n)


class Plain(nn.Module):
    """Guesses nothing, as NoDraft, but keeps what the tapped layers said of each row's last CHUNK tokens, so that a drafter
    which was not asked meanwhile can catch up."""
    nodes = 0

    def __init__(self, taps, state: State, target):
        super().__init__()
        B, weight = len(state.pos), target.embed.weight
        self.taps = taps
        heard = torch.zeros(B, CHUNK, len(taps) * weight.shape[1], device=weight.device, dtype=weight.dtype)
        self.register_buffer("heard", heard)
        self.register_buffer("at", torch.zeros_like(state.pos))             # position of the token that is fed next

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        self.at.copy_(state.pos)

    def propose(self, state: State, sampling) -> Draft:
        return Draft(state.tokens[:, :0])

    def observe(self, state: State, out: Tensor, n: Tensor, hidden: Tensor, p: Tensor):
        if self.taps:
            self.heard[torch.arange(len(n), device=n.device), self.at % CHUNK] = hidden[:, 0]
            self.at.copy_(state.pos)


class AutoDraft:
    """Another drafter in every round: `drafter` with the K that promises most, or nobody.  All share one cache.
    generate() asks choose() who guesses next and tells saw() what came of it."""

    def __init__(self, drafter, first: int, state: State, target, compiled: bool, clock=time.perf_counter):
        """first: how deep `drafter` guesses as it is."""
        self.drafter, self.clock = drafter, clock
        self.drafters = {0: Plain(drafter.taps, state, target), first: drafter}
        self.drafters |= {K: guessing(drafter, K) for K in KS if K != first and K <= getattr(drafter, "most", 0)}
        self.choice = Choice([*self.drafters], first, math.inf if compiled else 0.0)
        self.nodes, self.taps = max(d.nodes for d in self.drafters.values()), drafter.taps
        self.context = getattr(drafter, "context", state.tokens.shape[1])
        for guesser in self.drafters.values():          # any of them may have left guesses in the cache it shares
            if hasattr(getattr(guesser, "other", None), "newest"):
                guesser.other.newest = self.nodes + 1
        self.lag, self.followed = 0, torch.zeros_like(state.pos)    # plain rounds since `drafter` followed; up to where
        self.launched, self.arrived, self.ran = deque(), 0.0, []    # ran: the K of every round of this text
        self.untimed = Counter()                                    # rounds of each K whose seconds say nothing

    def start(self, state: State, begin: Tensor, hidden: Tensor):
        self.drafter.start(state, begin, hidden)
        self.choice.begin(len(begin))
        self.launched.clear()
        self.ran = []
        self.lag = 0

    def rehearse(self, run, times: int):
        """Before there is a text, compile the rounds that stand ready, running each so many times, and see what they cost.
        run(drafter) is a round."""
        ready, uncounted = sorted(self.choice.ready), self.uncounted()
        for K in ready * times:
            run(self.drafters[K])
        self.choice.compile_s = (self.uncounted() - uncounted) / len(ready)
        for K in ready * 3:
            run(self.drafters[K])                       # a round is a little slower where another one ran before it
            begun = self.clock()
            run(self.drafters[K])
            self.choice.seconds[K].append(self.clock() - begun)

    def choose(self, state: State, left: list[int]):
        """-> the drafter of the next round.  left: how many tokens each row may still write."""
        K = self.choice.next(left)
        if K or self.lag == CHUNK:              # more is not remembered
            self.catch_up(state)
        if not K and not self.lag:
            self.followed.copy_(state.pos)
            self.drafters[0].start(state, None, None)
        self.lag = 0 if K else self.lag + 1
        self.launched.append((K, self.clock(), self.uncounted()))
        return self.drafters[K]

    def uncounted(self) -> float:
        """Seconds at which the clock stood still, less a constant: something compiled."""
        return time.perf_counter() - self.clock()

    def catch_up(self, state: State):
        """Let the drafter follow what was written without it."""
        if self.lag:
            # One that reads the text alone may have lacked the newest tokens already, one that reads features did not.
            begin = self.followed if self.taps else (self.followed - self.nodes - 1).clamp_min(0)
            heard = self.drafters[0].heard
            slots = (begin[:, None] + torch.arange(CHUNK, device=begin.device)) % CHUNK
            self.drafter.start(state, begin, heard.gather(1, slots[..., None].expand_as(heard)))
        self.lag = 0

    def saw(self, kept: list[int], new: list[int]):
        """The oldest round that was launched has come back: guesses kept and tokens written of each row."""
        now, (K, launched, uncounted) = self.clock(), self.launched.popleft()
        # rounds run one after the other: this one cannot have begun before the one before it was done
        seconds, self.arrived = now - max(launched, self.arrived), now
        if self.uncounted() > uncounted + 1e-3:         # a compiling round, and on a GPU the next two: they record its graph
            self.untimed[K] = 1 + 2 * self.followed.is_cuda
        if self.untimed[K]:
            self.untimed[K], seconds = self.untimed[K] - 1, None
        self.ran.append(K)
        self.choice.saw(K, [k if n == k + 1 else None for k, n in zip(kept, new)], seconds)


def guessing(drafter, K: int):
    """The same drafter, with the same weights and caches, guessing K tokens."""
    if isinstance(drafter, HybridDraft):
        return HybridDraft(guessing(drafter.other, K), drafter.least)
    other = copy.copy(drafter)
    other.nodes = K
    return other
