"""Is the text what the target alone would write?  generate.py --check

At temperature 0 plain decoding must write the same tokens, except where two logits tie within rounding.  Above 0 a text
is a draw, so many short ones are drawn with the drafter and without, and a chi-square asks whether both have one law.
"""
import json
from collections import Counter
from itertools import count

import torch
from torch import Tensor

from choose_draft import same_drafter
from drafts import NoDraft
from model import CHUNK, KVCache
from output import note
from sample import Sampling
from speculate import State

ROUNDINGS, SUMS = 3, 32     # how far rounding moves a gap of logits: see bound()
SAMPLES, NEW = 1024, 3      # texts drawn after each prompt in either way, and tokens of each
FED = 160                   # tokens of all rows in one pass: worth a reading of the weights, and still little memory
LEAST = 10                  # an outcome that came less often, in both samples together, is counted with others
LEVEL = 1e-4                # a sound engine falls below in one of 10,000 commands, always the same: seeds are fixed


def check(engine, prompts: list[list[int]], budgets: list[int], rows, sampling_state) -> int:
    """After engine.run wrote `rows`: compare them with plain decoding, or the law they came from with its law, and say
    what came of it.  sampling_state() makes a State of rows_at_once rows.  -> exit code: 1 for a bug."""
    args = engine.args
    if args.temperature:
        note(f"--check draws {SAMPLES} texts after each prompt with --draft {args.draft} and as many without ...")
        result = sampled(engine, prompts, sampling_state())
    else:
        note("--check decodes the same prompts with nobody guessing ...")
        result = greedy(engine, prompts, budgets, rows)
    if args.json:
        print(json.dumps({"check": result}))
    note(report(result, engine.target.embed.weight.dtype))
    return 1 if result["verdict"] == "bug" else 0


def report(result: dict, dtype: torch.dtype) -> str:
    """One line, or one for each row that parts from plain decoding."""
    if "p" in result:
        verdict = f"NOT ONE LAW, a bug: p is below {LEVEL:g}" if result["verdict"] == "bug" else \
            "one law, as far as so many texts can tell"
        return ("--check: {samples} texts of {tokens} tokens with the drafter, {k} guesses a round, as many without: "
                "chi-square {chi_square:.1f}, {degrees_of_freedom} degrees of freedom, p = {p:.2g}: "
                ).format(**result) + verdict
    if not result["parted"]:
        return f"--check: plain decoding writes the same {result['tokens']} tokens"
    return "\n".join(describe(p, str(dtype).removeprefix("torch.")) for p in result["parted"])


def describe(p: dict, dtype: str) -> str:
    show = lambda token: f"{token['text']!r} ({token['id']})"
    top = " and ".join(f"{token['logit']:.6g} of {show(token)}" for token in p["top"])
    verdict = f"a tie, for rounding in {dtype} moves" if p["verdict"] == "tie" else \
        f"A BUG, for one of the two is further from the top than rounding in {dtype} moves, which is"
    return (f"--check: row {p['row'] + 1} parts after {p['position']} equal tokens, {show(p['speculative'])} where "
            f"plain decoding has {show(p['plain'])}; the top two logits there are {top}, gap {p['gap']:.2g}: "
            f"{verdict} up to {p['rounding']:.2g}")


# ---- temperature 0: token for token ---------------------------------------------------------------------------------

def greedy(engine, prompts, budgets, rows) -> dict:
    """KeyboardInterrupt where plain decoding is interrupted: half a comparison says nothing."""
    guessed = written(engine.state, prompts)
    plain = decode_plain(engine, prompts, budgets)
    alone = written(engine.state, prompts)
    if any(row.finish == "interrupted" for row in plain):
        raise KeyboardInterrupt
    parted = [part(engine, i, prompts[i], guessed[i], alone[i]) for i, (a, b) in enumerate(zip(rows, plain))
              if (a.ids, a.finish) != (b.ids, b.finish)]
    verdict = "bug" if any(p["verdict"] == "bug" for p in parted) else "tie" if parted else "same"
    return {"verdict": verdict, "tokens": sum(len(row.ids) for row in plain), "parted": parted}


def decode_plain(engine, prompts, budgets) -> list:
    """The same run again, compiled or not as before, with nobody guessing -> its rows."""
    drafter, engine.drafter = engine.drafter, engine.nobody
    try:
        return engine.run(prompts, budgets, lambda i, text: None)
    finally:
        engine.drafter = drafter


def written(state: State, prompts) -> list[list[int]]:
    """All new ids of each row, also those that a stop text cut off: rows that part may be cut at different places."""
    return [ids[len(prompt):pos + 1] for ids, prompt, pos in zip(state.tokens.tolist(), prompts, state.pos.tolist())]


def part(engine, row: int, prompt: list[int], guessed: list[int], plain: list[int]) -> dict:
    """Where two greedy texts part, and whether rounding can have done it: whether the target, asked once more, has both
    tokens within rounding of its best one."""
    at = next(i for i, (a, b) in enumerate(zip(guessed, plain)) if a != b)
    logits = logits_after(engine.target, prompt + plain[:at])
    (one, other), limit = logits.topk(2).indices.tolist(), bound(logits, engine.target.embed.weight.dtype)
    tie = all(logits[one] - logits[id] <= limit for id in (guessed[at], plain[at]))

    def token(id: int) -> dict:
        return {"id": id, "text": engine.tokens.token_bytes(id).decode("utf-8", "replace"), "logit": logits[id].item()}
    return {"row": row, "position": at, "speculative": token(guessed[at]), "plain": token(plain[at]),
            "top": [token(one), token(other)], "gap": (logits[one] - logits[other]).item(), "rounding": limit,
            "verdict": "tie" if tie else "bug"}


@torch.no_grad()
def logits_after(target, ids: list[int]) -> Tensor:
    """(V,) float32, by prefill into an empty cache, in the target's dtype."""
    weight = target.embed.weight
    tokens = torch.tensor([ids + [0] * CHUNK], device=weight.device)
    cache, begin = KVCache(target.config, *tokens.shape, weight.device, weight.dtype), tokens.new_zeros(1)
    hidden, _ = target.prefill(tokens, begin, begin + len(ids), cache)
    return target.head(hidden)[0, 0].float()


def bound(logits: Tensor, dtype: torch.dtype) -> float:
    """How far the gap of two logits moves between passes of different widths, in nats.

    Two errors add up, both in proportion to the largest products, here max |logit|: results are rounded to dtype, and
    sums, in float32 in every dtype, come in another order.  Measured with SmolLM2-135M at 160 positions of a text, one
    token in a pass against five: in bfloat16 gaps moved by 0.55 eps max |logit| (rms), 1.8 at most, and the argmax
    changed at 10 positions, where the gap was 0 or one step of bfloat16, 0.125.  In float32 they moved by 3.2 (rms),
    9.4 at most, which is 0.00003, and no argmax changed.  The factors leave room for deeper models.  More would let
    bugs pass for ties: in bfloat16 44 % of those positions have a gap below 3 eps max |logit| to begin with."""
    eps = SUMS * torch.finfo(torch.float32).eps + (ROUNDINGS * torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    return eps * logits.abs().max().item()


# ---- above 0: two laws ----------------------------------------------------------------------------------------------

def rows_at_once(nodes: int) -> int:
    return max(1, FED // (nodes + 1))


@torch.no_grad()
def sampled(engine, prompts, state: State) -> dict:
    """A chi-square of two samples, to which each prompt adds its statistic and its degrees of freedom.
    It finds what is plainly wrong: with a draft of sum(min(p, q)) = 0.4, keeping every guess gave p = 0, and drawing
    from the target's law where the residual belongs 4e-7.  What is slightly wrong is test_law.py's business."""
    drafter = same_drafter(engine.args, engine.target, engine.guesser, state)
    statistic, freedom, seeds = 0.0, 0, count(engine.args.seed or 0)
    for prompt in prompts:
        one, more = chi_square(*two_samples(engine, drafter, state, prompt, seeds))
        statistic, freedom = statistic + one, freedom + more
    p = p_value(statistic, freedom)
    return {"verdict": "bug" if p < LEVEL else "same", "p": p, "chi_square": round(statistic, 3),
            "degrees_of_freedom": freedom, "samples": SAMPLES * len(prompts), "tokens": NEW, "k": drafter.nodes}


def two_samples(engine, drafter, state: State, prompt: list[int], seeds) -> list[list[tuple]]:
    """-> the ids of SAMPLES texts with the drafter, and of as many without.

    The first token after a prompt comes from prefill, whoever drafts, so it is the likeliest one in all of them: more
    texts begin alike, and all that is compared was written by rounds.  No seed is used twice.  Noise is keyed by seed
    and position: with the same seeds a drafter that chooses its guesses would write the plain texts themselves, and the
    law would not be tested at all."""
    args, target, B, P = engine.args, engine.target, len(state.pos), len(prompt)
    sampling, begin, laws = Sampling(B, device=args.device), torch.zeros_like(state.pos), []
    state.tokens[:, :P] = state.tokens.new_tensor(prompt)
    hidden, tapped = target.prefill(state.tokens, begin, begin + P, state.cache, drafter.taps)
    state.tokens[:, P] = target.head(hidden)[:, 0].argmax(-1)
    for guesser in (drafter, NoDraft()):
        texts, fed = [], 0
        while len(texts) < SAMPLES:
            now = [next(seeds) % 2 ** 62 for _ in range(B)]
            sampling.set(args.temperature, args.top_k, args.top_p, args.min_p, now)
            state.pos.fill_(P)
            state.limit.fill_(min(P + NEW, target.config.context))
            state.live.fill_(True)
            guesser.start(state, begin + fed, tapped[:, fed:])
            while state.live.any():
                engine.step(target, guesser, state, sampling)
            texts += [tuple(ids) for ids in written(state, [prompt + [0]] * B)]
            fed = (P - 1) // CHUNK * CHUNK              # what comes before the last chunk the drafter has read by now
        laws.append(texts[:SAMPLES])
    return laws


def chi_square(a: list[tuple], b: list[tuple]) -> tuple[float, int]:
    """Are two samples of one size from one law?  Pearson 1911 (Biometrika 8): the sum of (x - y)^2 / (x + y) over the
    outcomes, which came x and y times.  -> it, degrees of freedom.

    The outcome of a text is its longest beginning that at least LEAST texts share, of both samples: whole texts seldom
    come twice.  Outcomes are formed without looking at who wrote a text, and so favour neither."""
    begins = Counter(text[:n] for text in a + b for n in range(len(text) + 1))
    longest = lambda text: next(text[:n] for n in range(len(text), -1, -1) if n == 0 or begins[text[:n]] >= LEAST)
    x, y = (Counter(map(longest, texts)) for texts in (a, b))
    counts = [(x[cell], y[cell]) for cell in x | y if x[cell] + y[cell] >= LEAST]
    rest = tuple(len(texts) - sum(column) for texts, column in zip((a, b), zip(*counts)))
    counts += [rest] if any(rest) else []
    return sum((n - m) ** 2 / (n + m) for n, m in counts), len(counts) - 1


def p_value(statistic: float, freedom: int) -> float:
    """How likely a chi-square as large or larger is: the regularised incomplete gamma Q(freedom / 2, statistic / 2)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item() if freedom else 1.0
