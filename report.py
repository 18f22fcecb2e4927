"""--report: did guessing pay on this text, and what would pay more?  Measured costs, put into plan.py.

Only measure() touches the engine; what it measured is plain data, and everything else is computed from that.
"""
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import torch

from drafts import NgramDraft
from output import Row, Wrote, note
from plan import best_k, break_even, cost_of_a_guess, expected_tokens, extended, fit_line, speed_up, target_seconds
from report_page import page
from speculate import speculate

MOST = 16               # the largest -k
CALIBRATION = 32        # tokens of plain decoding that it is compared with
CLEARLY = 1.02          # advice against what was run needs more than noise
FEW = 8                 # tries that say nothing: of two kept in two, K = 16 would follow


@dataclass
class Run:
    """What was measured of one command."""
    draft: str                      # as --draft named it
    where: str                      # device, dtype, threads, rows
    plain: list[float]              # seconds of each round of plain decoding
    guess: float                    # seconds of drafting one guess
    chain: bool                     # False: more is scored than can be kept (a tree), and no other K can be foretold
    rows: list[list[Wrote]]         # the rounds of each row
    lookup: list[Wrote]             # those that --draft ngram would have written the same text in; their seconds are 0


@dataclass
class Weighed:
    """What follows from a Run.  K is in each dict the guesses of a round."""
    counts: list[tuple[int, int]]   # of each position (kept, tried), tried being those whose predecessors were kept
    rates: list[float]
    tokens: float                   # a round, as counted
    plain: float                    # median seconds of a plain round
    seconds: dict[int, float]       # median, of each K that ran
    c: float                        # drafting one guess, in plain rounds
    line: tuple[float, float]       # alpha, beta of the target's pass
    cost: float                     # one more guess, drafted and scored, in plain rounds
    measured: float                 # speed-up: tokens a second over those of plain decoding
    predicted: float                # the same, from rates and median seconds
    points: dict[int, float]        # the measured speed-up of the rounds of each K
    curve: dict[int, float]         # that predicted for every K
    best: tuple[int, float]         # K and its predicted speed-up; 0: nothing beats plain decoding
    even: float | None              # acceptance at every position at which the K that ran most would break even
    alike: float                    # acceptance at every position that would bring as many tokens a round of that K
    lookup: tuple[int, float]       # best, if n-gram lookup had guessed


# ---- what follows ---------------------------------------------------------------------------------------------------

def kept_by_position(rounds: list[Wrote]) -> list[tuple[int, int]]:
    """-> (kept, tried) at each position, of the rounds in which all guesses before it were kept."""
    most = max((r.tried for r in rounds), default=0)
    return [(sum(r.kept > i and r.tried > i for r in rounds), sum(r.kept >= i and r.tried > i for r in rounds))
            for i in range(most)]


def rates_of(counts: list[tuple[int, int]]) -> list[float]:
    """As far as they were tried often enough, the first one in any case."""
    return [kept / tried for i, (kept, tried) in enumerate(counts) if tried >= (FEW if i else 1)]


def scoring_line(run: Run, plain: float, seconds: dict[int, float], often: list[int]) -> tuple[float, float]:
    """alpha, beta of the target's pass over K + 1 tokens: what rounds take beyond drafting, of the Ks in `often`."""
    alpha, beta = fit_line([(1, plain), *((K + 1, max(seconds[K] - K * run.guess, 0.0)) for K in often)])
    return (alpha, beta) if beta >= 0 else (plain, 0.0)         # noise: no pass takes less for scoring more


def weigh(run: Run) -> Weighed:
    """Put what was measured into plan.py.  Some round must have guessed, and some plain one must have been timed."""
    rounds, by_K = [r for row in run.rows for r in row], defaultdict(list)
    for r in rounds:
        by_K[r.K].append(r)
    plain, seconds = median(run.plain), {K: median(r.seconds for r in some) for K, some in sorted(by_K.items())}
    usual = max((K for K in by_K if K), key=lambda K: len(by_K[K]))
    counts, tokens = kept_by_position(rounds), mean(r.new for r in rounds)
    rates = rates_of(counts)
    line = scoring_line(run, plain, seconds, [K for K, some in by_K.items() if K == usual or len(some) >= FEW])
    scoring = {K: target_seconds(K + 1, *line) for K in range(MOST + 1)}
    curve = {K: K * run.guess + t for K, t in scoring.items()} if run.chain else seconds
    curve = {0: plain} | {K: t for K, t in curve.items() if K}
    tokens_of = {K: expected_tokens(extended(rates, K)) for K in {*curve, *seconds}}
    if not run.chain:                   # some rounds try less than others, and the rates do not say how many
        tokens_of[usual] = mean(r.new for r in by_K[usual])
    ups = {K: speed_up(tokens_of[K], 0.0, t, plain) for K, t in curve.items()}
    lookup = rates_of(kept_by_position(run.lookup))

    def measured(some: list[Wrote]) -> float:
        return speed_up(mean(r.new for r in some), 0.0, mean(r.seconds for r in some), mean(run.plain))
    return Weighed(
        counts, rates, tokens, plain, seconds, run.guess / plain, line, cost_of_a_guess(run.guess, *line),
        measured(rounds),
        predicted=speed_up(mean(tokens_of[r.K] for r in rounds), 0.0, mean(seconds[r.K] for r in rounds), plain),
        points={K: measured(some) for K, some in by_K.items()},
        curve=ups, best=max(ups.items(), key=lambda at: at[1]),             # of equals the smallest K, as in best_k
        even=break_even(usual, 0.0, seconds[usual], plain),
        alike=break_even(usual, 0.0, tokens_of[usual], 1.0),            # as if a round cost what it brings
        lookup=best_k(lookup, scoring) if run.chain else (0, 1.0))


def advice(run: Run, w: Weighed) -> str:
    """One sentence: what to do next time, and the numbers that say so."""
    (K, up), (look, look_up) = w.best, w.lookup
    if look and run.draft != "ngram" and look_up > CLEARLY * max(up, w.predicted):
        return (f"use ngram, -k {look}: looked-up guesses would have written this text {look_up:.2f} times as fast as "
                f"plain decoding, this drafter {max(up, w.predicted):.2f} at best")
    if K in (0, *w.seconds) and (w.measured - 1) * (w.predicted - 1) < 0:
        return (f"too close to say: {w.measured:.2f} times plain decoding measured, {w.predicted:.2f} predicted; let "
                "it write more, on a quiet machine")
    if not K and not run.chain:
        tree = max(w.seconds)
        cost = w.seconds[tree] / w.plain
        return f"off (--draft none): a round costs {cost:.2f} plain rounds and brings {w.curve[tree] * cost:.2f} tokens"
    if not K:
        return (f"off (--draft none): of a plain round, drafting a guess costs {w.c:.0%} and scoring it "
                f"{w.cost - w.c:.0%}, and {w.rates[0]:.0%} of the first guesses are kept")
    if K not in w.seconds and up > CLEARLY * w.predicted:
        return f"K = {K} (-k {K}): {up:.2f} times plain decoding predicted, against {w.predicted:.2f} as it ran"
    return f"leave it as it is: {w.measured:.2f} times plain decoding measured, {w.predicted:.2f} predicted"


def facts(run: Run, w: Weighed) -> list[tuple[str, str]]:
    """What was measured and what follows: (name, value in words)."""
    (alpha, beta), ms = w.line, lambda t: f"{1000 * t:.1f} ms"
    rounds = [(f"round of K = {K}", f"{ms(t)}, median of {sum(r.K == K for row in run.rows for r in row)} rounds")
              for K, t in w.seconds.items()]
    scoring = [("scoring", f"{ms(alpha)} and {ms(beta)} a token; one more guess, drafted and scored, costs "
                           f"{w.cost:.0%} of a plain round")] if run.chain else []
    even = "not even where all are kept" if w.even is None else f"where {w.even:.0%} are kept at every position"
    return [("plain round", f"{ms(w.plain)}, median of {len(run.plain)} rounds: the same prompts, nothing guessed"),
            *rounds,
            ("drafting", f"{ms(run.guess)} a guess, propose and observe timed alone: c = {w.c:.1%} of a plain round"),
            *scoring,
            ("kept", ", ".join(f"{kept} of {tried}" for kept, tried in w.counts if tried) + ": by position, of guesses "
             f"whose predecessors were kept ({' '.join(f'{rate:.0%}' for rate in w.rates)})"),
            ("tokens a round", f"{w.tokens:.2f}"),
            ("speed-up", f"{w.measured:.2f} measured, {w.predicted:.2f} predicted"),
            ("break-even", f"{even}; here the tokens a round are those of {w.alike:.0%}"),
            ("advice", advice(run, w))]


# ---- measuring ------------------------------------------------------------------------------------------------------

def looked_up(prompt: list[int], ids: list[int], K: int) -> list[Wrote]:
    """The rounds in which --draft ngram would have written this text after the prompt.  A looked-up guess is kept where
    it is the token that is drawn, at any temperature, so the text alone decides."""
    text, rounds, at = torch.tensor(prompt + ids), [], len(prompt)          # at: the newest token; prefill drew it
    drafter = NgramDraft(K)
    while at < len(text) - 1:
        here = SimpleNamespace(tokens=text[None], span=len(text), pos=torch.tensor([at]))
        ahead = text[at + 1:].tolist()
        guesses = drafter.look_up(here)[0][0].tolist()[:len(ahead)]
        kept = next((i for i, (guess, token) in enumerate(zip(guesses, ahead)) if guess != token), len(guesses))
        rounds.append(Wrote(K, len(guesses), kept, min(kept + 1, len(ahead)), 0.0))
        at += rounds[-1].new
    return rounds


class Witness:
    """A drafter that leaves observe() out and remembers what it would have got."""

    def __init__(self, drafter):
        self.drafter, self.taps = drafter, drafter.taps

    def propose(self, state, sampling):
        return self.drafter.propose(state, sampling)

    def observe(self, *seen):
        self.seen = seen


@torch.no_grad()
def drafting_seconds(target, drafter, state, sampling, compiled, turns: int = 15) -> float:
    """Median seconds that a round spends in the drafter: propose and observe alone, compiled as the round is."""
    witness = Witness(drafter)
    speculate(target, witness, state, sampling)                 # every row has ended: nothing is committed
    _, *seen = (x.clone() if torch.is_tensor(x) else x for x in witness.seen)

    def drafting(out, n, hidden, p):
        draft = drafter.propose(state, sampling)
        drafter.observe(state, out, n, hidden, p)
        return draft.tokens

    function, times = compiled(drafting), []
    for _ in range(3 + turns):                                  # the first compile, and a GPU records its CUDA graph
        start = time.perf_counter()
        function(*seen).tolist()                                # waits for a GPU
        times.append(time.perf_counter() - start)
    return median(times[3:])


def whole(log: list[Wrote], depth: int, asked) -> list[Wrote]:
    """A tree's rounds, `asked` saying whether each guessed: whatever it found worth trying, it scored everything."""
    return [r._replace(K=depth if K else 0) for r, K in zip(log, asked)]


def measure(engine, prompts: list[list[int]], budgets: list[int], rows: list[Row], compiled) -> Run:
    """Weigh what the engine has just run against plain decoding, in this process and compiled alike.  It knows of the
    engine its models, state, settings and run(); no compiling is in the seconds."""
    args, drafter, guesser = engine.args, engine.drafter, engine.guesser
    chain, depth = guesser.nodes == args.k and not args.tree, max(r.K for row in rows for r in row.log)
    asked = getattr(drafter, "ran", [args.k] * max(len(row.log) for row in rows))
    guess = drafting_seconds(engine.target, guesser, engine.state, engine.sampling, compiled) / args.k
    engine.drafter = engine.nobody
    for most in (4, CALIBRATION):                               # the first compiles
        plain = engine.run(prompts, [min(budget, most) for budget in budgets], lambda i, text: None)
    engine.drafter = drafter
    weight = engine.target.embed.weight
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    name = "ngram+" * args.draft.startswith("ngram+") + Path(args.draft.removeprefix("ngram+")).name
    return Run(name, f"{device}, {str(weight.dtype)[6:]}, batch {len(rows)}, "
               f"{'eager' if args.no_compile else 'compiled'}", [r.seconds for row in plain for r in row.log], guess,
               chain, [row.log if chain else whole(row.log, depth, asked) for row in rows],
               [r for prompt, row in zip(prompts, rows) for r in looked_up(prompt, row.ids, MOST)])


# ---- the option -----------------------------------------------------------------------------------------------------

def refuse(file: str):
    """ValueError, before anything is generated, where the page cannot be written."""
    if not file.endswith((".html", ".htm")):
        raise ValueError(f"--report {file} must be named .html: give FILE.html, or put --report last")
    path, new = Path(file), not Path(file).exists()
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"--report {file} cannot be written: {error.strerror or error}") from None


def explain(engine, prompts: list[list[int]], budgets: list[int], rows: list[Row], file: str, compiled) -> None:
    """Print the report, and write the page where `file` names one."""
    if not any(r.K for row in rows for r in row.log):
        return note("report: no round has guessed, so there is nothing to weigh: ask for a longer text")
    if not engine.args.no_compile:
        note("report: compiling a plain round and the drafter alone, to measure them ...")
    run = measure(engine, prompts, budgets, rows, compiled)
    if not run.plain:
        return note("report: plain decoding wrote too little to time: ask for a longer text")
    weighed = weigh(run)
    known = facts(run, weighed)
    note("\n".join([f"report: {run.draft}; {run.where}", *(f"  {name + ':':<17}{value}" for name, value in known)]))
    if file:
        try:
            Path(file).write_text(page(run, weighed, known, engine.args.prompt, prompts, rows), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--report {file} could not be written: {error.strerror or error}") from None
        note(f"report: wrote {file}")
