"""The measuring behind bench.py: clocks, a round's parts, decoding in turns, the curve.

Every number is taken in one process, configurations in turns, medians over the turns: machines are shared and drift.
The baseline is this engine, compiled, with nothing drafted.
"""
import math
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch

from auto_k import AutoDraft
from choose_draft import drafter_named, sizes
from generate import compile_round, compiled, generate, make_state, slots, warm_up
from plan import fit_line
from sample import Sampling
from speculate import Draft, State, accept_block, accept_matched, accept_sampled, commit, verify

PARTS = "draft", "verify", "accept"


# ---- clocks ---------------------------------------------------------------------------------------------------------

def timed(function) -> float:
    start = time.perf_counter()
    out = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    del out
    return time.perf_counter() - start


def median_ms(functions: dict, turns: int = 15) -> dict:
    """Milliseconds of each function, called in turns."""
    times = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            times[name].append(timed(function))
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def reader(device):
    """-> (a function that reads memory as fast as anything does here, the bytes it moves)."""
    if torch.device(device).type == "cpu":
        numbers = torch.ones(1 << 26)
        return numbers.sum, numbers.nbytes
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def bytes_read(target, state: State) -> int:
    """What one pass for one token reads at least: every weight once, the cache up to the span.  Of an embedding that is
    not the output matrix too, only a row."""
    weights = sum(p.nbytes for p in target.parameters())
    if target.lm_head is not None:
        weights -= target.embed.weight.nbytes
    return weights + sum(b[:, :, :state.span].nbytes for b in state.cache.buffers())


# ---- plain against drafted ------------------------------------------------------------------------------------------

@dataclass
class Setup:
    """One drafter at one K: what to run, and its round's parts as functions to time."""
    drafter: object
    state: State
    parts: dict


def drafter_for(name: str, K: int | str, target, drafts: dict, state):
    """As --draft names it, `drafts` {name: model} being what is loaded, and self the target (always right, never worth it);
    behind a comma: block (its guesses are judged together), couple (drawn with the noise that the target will draw with)
    or tree N (a trained drafter's N likeliest, at most K deep).
    K "auto": the drafter's usual K or none, chosen for every round as generate.py does for texts of this length."""
    if K == "auto":
        usual = getattr(drafts.get(name.removeprefix("ngram+").partition(", ")[0]), "usual_k", None) or 4
        return AutoDraft(drafter_for(name, usual, target, drafts, state), usual, state, target, compiled=True)
    load = (drafts | {"self": target}).__getitem__
    return drafter_named(name.partition(", ")[0], target, state, K, load, nodes_of(name), name.endswith(", couple"))


def nodes_of(name: str) -> int | None:
    return int(name.partition(", tree ")[2] or 0) or None


@torch.no_grad()
def parts(target, drafter, state, sampling, block: bool = False) -> dict:
    """The round's three parts, each compiled by itself, as functions to time: propose and observe; verify; accept and
    commit, a tree's path moved too."""
    state.span = min(state.tokens.shape[1], slots(64))

    def drafting(hidden):
        draft = drafter.propose(state, sampling)
        drafter.observe(state, out, n, hidden, p)
        return draft

    def accept(draft, p):
        if draft.q is not None:
            n, out = (accept_block if block else accept_sampled)(draft.tokens, draft.q, p, sampling.seed, state.pos)
            return commit(state, out, n)
        n, out, path = accept_matched(draft.tokens, draft.tree, p, sampling.seed, state.pos)
        if draft.tree is not None:
            state.cache.compact(state.pos, path)
        return commit(state, out, n)

    propose, check, keep = compiled(drafting), compiled(verify), compiled(accept)
    state.pos.fill_(40)                                         # no row is live: commit writes, and nothing moves
    draft = drafter.propose(state, sampling)
    p, hidden = verify(target, state, draft, sampling, drafter.taps)
    K = draft.tree.K if draft.tree is not None else draft.tokens.shape[1]
    out, n, hidden = state.tokens[:, :K + 1].clone(), state.pos * 0, hidden[:, :K + 1].clone()
    functions = {"draft": lambda: propose(hidden), "verify": lambda: check(target, state, draft, sampling, drafter.taps),
                 "accept": lambda: keep(draft, p)}
    for function in functions.values():
        for _ in range(3):                                      # a GPU also records its CUDA graph
            function()
    return functions


def decode(target, setup: Setup, sampling, prompts: list[list[int]], max_new, step) -> tuple[float, int, int]:
    """-> seconds after the first tokens, tokens after them, rounds of rows that had not ended."""
    setup.state.pos.fill_(-1)                                   # every run feeds its whole prompt
    rounds, tokens, start = 0, 0, None
    for new, _, _ in generate(target, setup.drafter, setup.state, sampling, prompts, [max_new] * len(prompts), step):
        if start is None:
            start = time.perf_counter()
        else:
            rounds, tokens = rounds + sum(map(bool, new)), tokens + sum(map(len, new))
    return time.perf_counter() - start, tokens, rounds


def batches(prompts: list[list[int]], B: int) -> list[list[list[int]]]:
    """The prompts as batches of B rows, filled up from the first ones again."""
    return [(prompts * B)[at:at + B] for at in range(0, len(prompts), B)]


def measure(target, drafts: dict, prompts: dict, eos, options, plan: list[tuple]) -> list[dict]:
    """One row for each batch size, kind of prompt and (drafter, K) of the plan: prompts is {kind: [ids]}."""
    lengths = [len(ids) for kind in prompts.values() for ids in kind]
    if max(lengths) + options.max_new_tokens > target.config.context:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: prompt and text do not fit a context of "
                         f"{target.config.context}")
    rows = []
    for B in options.batch:
        torch.compiler.reset()                                  # graphs of other shapes would only be looked through
        grouped = {kind: batches(some, B) for kind, some in prompts.items()}
        rows += [{"batch": B} | row for row in measure_batch(target, drafts, grouped, eos, options, plan, B)]
    return rows


@torch.no_grad()
def measure_batch(target, drafts: dict, prompts: dict, eos, options, plan: list[tuple], B: int) -> list[dict]:
    """As measure, at one batch size: prompts is {kind: [batches of B]}.  A round's parts are measured at batch 1 only, where
    K stays what it is, and not with --rounds-only."""
    lengths = [len(ids) for kind in prompts.values() for batch in kind for ids in batch]
    step, setups, sampling = compile_round(), {}, Sampling(B, options.temperature, device=options.device)
    steps = {name: partial(step, block=True) if name.endswith(", block") else step for name, _ in plan}
    for name, K in plan:
        length, start = max(lengths) + options.max_new_tokens, time.perf_counter()
        nodes = 16 if K == "auto" else sizes(name, K, nodes_of(name))[1]
        state = make_state(target, B, length, nodes, eos)
        drafter = drafter_for(name, K, target, drafts, state)
        span = slots(min(lengths))
        while span <= slots(length + 3 * (drafter.nodes + 1)):          # every graph that the texts grow through
            warm_up(steps[name], target, drafter, state, sampling, span - 2 * (drafter.nodes + 1))
            span *= 2
        if K == "auto":
            drafter.choice.compile_s = math.inf                 # nothing may compile while it is measured
        by_parts = B == 1 and K != "auto" and not options.rounds_only
        pieces = parts(target, drafter, state, sampling, steps[name] is not step) if by_parts else {}
        setups[name, K] = Setup(drafter, state, pieces)
        seconds = time.perf_counter() - start
        print(f"compiled {name} K={K}{' and its parts' if by_parts else ''} in {seconds:.0f} s", file=sys.stderr, flush=True)
    torch.compiler.set_stance("fail_on_recompile")
    read, moved = reader(options.device)
    cost = median_ms({(*key, part): f for key, setup in setups.items() for part, f in setup.parts.items()} | {"read": read})
    runs = {(*key, kind): [] for kind in prompts for key in setups}
    for _ in range(options.turns):
        for (*key, kind), turns in runs.items():
            results = [decode(target, setups[tuple(key)], sampling, batch, options.max_new_tokens, steps[key[0]])
                       for batch in prompts[kind]]
            turns.append([sum(x) for x in zip(*results)])                       # seconds, tokens, rounds of all prompts
    torch.compiler.set_stance("default")
    floor = cost["read"] * bytes_read(target, setups["none", 0].state) / moved
    return summary(runs, cost, floor, B)


def summary(runs: dict, cost: dict, floor: float, B: int = 1) -> list[dict]:
    """The speed-up measured, and predicted: tokens per round * T_plain / (T_draft(K) + T_verify(K+1) + T_accept)."""
    rows, plain = [], sum(cost.get(("none", 0, part), 0.0) for part in PARTS)
    for (name, K, kind), turns in runs.items():
        speeds = [n / s for s, n, _ in turns]
        ratios = [speed / (n0 / s0) for speed, (s0, n0, _) in zip(speeds, runs["none", 0, kind])]   # within one turn
        per_round, fixed = turns[0][1] / turns[0][2], K if K != "auto" else 0
        row = {"draft": name, "k": K, "prompts": kind, "tokens_per_s": statistics.median(speeds),
               "tokens_per_round": per_round, "acceptance": (per_round - 1) / fixed if fixed else None,
               "draft_step_ms": None, "verify_ms": None, "accept_ms": None, "parts_ms": None,
               "round_ms": 1e3 * statistics.median(s / r for s, _, r in turns) if B == 1 else None,
               "speedup": statistics.median(ratios), "predicted": None, "floor_ms": floor}
        if (name, K, "verify") in cost:
            draft, check, accept = (cost[name, K, part] for part in PARTS)
            whole = draft + check + accept
            row |= {"draft_step_ms": draft / K if K else None, "verify_ms": check, "accept_ms": accept, "parts_ms": whole,
                    "predicted": per_round * plain / whole}
        rows.append(row)
    return rows


# ---- how nearly free is scoring n tokens? ---------------------------------------------------------------------------

@torch.no_grad()
def curve(target, batches: list[int], most: int, options) -> list[dict]:
    """T_verify(n) for n = 1..most at each batch size, and the line T = a + n * b through them (least squares)."""
    torch._dynamo.config.recompile_limit = 256
    rows = []
    for B in batches:
        torch.compiler.reset()
        check, sampling = compiled(verify), Sampling(B, options.temperature, device=options.device)
        state = make_state(target, B, 64, most)
        state.pos.fill_(40)
        draft = {n: Draft(state.tokens[:, :n - 1].clone()) for n in range(1, most + 1)}
        times = {n: [] for n in draft}
        for n in draft:
            start = time.perf_counter()
            check(target, state, draft[n], sampling)
            print(f"compiled batch {B}, {n} tokens in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        for _ in range(3):
            for n in draft:
                for i in range(8):              # three to bring this graph to the front of dynamo's list, five to time
                    seconds = timed(lambda: check(target, state, draft[n], sampling))
                    times[n] += [1e3 * seconds] if i >= 3 else []
        ms = {n: statistics.median(t) for n, t in times.items()}
        a, b = fit_line([*ms.items()])
        rows += [{"batch": B, "n": n, "verify_ms": t, "ratio": t / ms[1], "a_ms": a, "b_ms": b}
                 for n, t in ms.items()]
    return rows
