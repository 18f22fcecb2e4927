"""Is speculation faster than plain decoding here, and why?   python bench.py

Every number is taken in one process, configurations in turns, medians over the turns: machines are shared and drift.
The baseline is this engine, compiled, with nothing drafted.
"""
import argparse
import json
import statistics
import sys
import time

import torch

import tokenizer as tokenizers
from drafts import ModelDraft, NgramDraft, NoDraft
from generate import DEFAULT_TARGET, compile_round, generate, make_state, slots, warm_up
from model import KVCache, load_model, read_config
from sample import Sampling
from speculate import accept_matched, accept_sampled, commit, verify

TEXT = ("The lighthouse keeper woke before dawn, as he had done every day for thirty years. He climbed the narrow stairs, "
        "wiped\nthe salt from the great lens and wrote the weather in his book: wind from the north, light rain, three "
        "ships to the east. Then\nhe put out the lamp, boiled water for his tea and sat by the window until the sun "
        "stood above the sea.")
PROMPTS = {     # what the text repeats decides what prompt lookup is worth: measure both ends
    "copy": [f"Repeat the following text exactly, word for word:\n\n{TEXT}",
             f"Copy this text without any change: {TEXT}"],
    "free": ["Write a short story about a fox who learns to read music.",
             "Explain to a ten-year-old why the sky is blue."],
}


def drafter_for(name: str, K: int, target, state):
    """none, ngram, or self: the target as its own draft model, which is always right and never worth it."""
    if name == "none":
        return NoDraft()
    if name == "ngram":
        return NgramDraft(K)
    weight = target.embed.weight
    cache = KVCache(target.config, *state.tokens.shape, weight.device, weight.dtype)
    return ModelDraft(target, cache, K, target.config.tokens)


def timed(function, *args) -> float:
    start = time.perf_counter()
    out = function(*args)
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


@torch.no_grad()
def parts(target, drafter, state, sampling) -> dict:
    """The round's three parts, each compiled by itself, as functions to time: propose, verify, accept and commit."""
    compiled = lambda f: torch.compile(f, mode="max-autotune", fullgraph=True, dynamic=False)
    state.span = slots(64)

    def accept(draft, p):
        chosen = draft.q is None
        n, out = (accept_matched(draft.tokens, None, p, sampling.seed, state.pos)[:2] if chosen else
                  accept_sampled(draft.tokens, draft.q, p, sampling.seed, state.pos))
        return commit(state, out, n)

    propose, check, keep = compiled(drafter.propose), compiled(verify), compiled(accept)
    state.pos.fill_(40)                                         # no row is live: commit writes, and nothing moves
    draft = drafter.propose(state, sampling)
    p, _ = verify(target, state, draft, sampling)
    functions = {"draft": lambda: propose(state, sampling), "verify": lambda: check(target, state, draft, sampling),
                 "accept": lambda: keep(draft, p)}
    for function in functions.values():
        function()
    return functions


def decode(target, drafter, state, sampling, ids, max_new, step) -> tuple[float, int, int]:
    """-> seconds after the first token, tokens after it, rounds."""
    state.pos.fill_(-1)                                         # every run feeds its whole prompt
    rounds, tokens, start = 0, 0, None
    for new, _, _ in generate(target, drafter, state, sampling, [ids], [max_new], step):
        if start is None:
            start = time.perf_counter()
        else:
            rounds, tokens = rounds + 1, tokens + len(new[0])
    return time.perf_counter() - start, tokens, rounds


@torch.no_grad()
def measure(target, tokens, template, options) -> list[dict]:
    """One row for each (drafter, K, kind of prompt): tokens/s, speed-up measured and predicted."""
    prompts = {kind: [tokenizers.chat(template, [{"role": "user", "content": text}], tokens) for text in texts]
               for kind, texts in PROMPTS.items()}
    length = max(len(ids) for kind in prompts.values() for ids in kind) + options.max_new_tokens
    step, setups, sampling = compile_round(), {}, Sampling(1, options.temperature, device=options.device)
    for name, K in [("none", 0)] + [("ngram", K) for K in options.k] + [("self", K) for K in options.k[:1]]:
        state = make_state(target, 1, length, K, tokens.eos)
        drafter = drafter_for(name, K, target, state)
        start = time.perf_counter()
        warm_up(step, target, drafter, state, sampling, 256)
        setups[name, K] = drafter, state, parts(target, drafter, state, sampling)
        seconds = time.perf_counter() - start
        print(f"compiled {name} K={K} and its parts in {seconds:.0f} s", file=sys.stderr, flush=True)
    torch.compiler.set_stance("fail_on_recompile")
    cost = median_ms({(*setup, part): f for setup, (_, _, fs) in setups.items() for part, f in fs.items()})
    runs = {(*setup, kind): [] for kind in prompts for setup in setups}
    for _ in range(options.turns):
        for (*setup, kind), turns in runs.items():
            drafter, state, _ = setups[tuple(setup)]
            results = [decode(target, drafter, state, sampling, ids, options.max_new_tokens, step) for ids in prompts[kind]]
            turns.append([sum(x) for x in zip(*results)])                       # seconds, tokens, rounds of both prompts
    return table(runs, cost)


def table(runs: dict, cost: dict) -> list[dict]:
    rows = []
    for (name, K, kind), turns in runs.items():
        speeds = [n / s for s, n, _ in turns]
        ratios = [speed / (n0 / s0) for speed, (s0, n0, _) in zip(speeds, runs["none", 0, kind])]   # within one turn
        per_round = turns[0][1] / turns[0][2]
        draft, check, accept = (cost[name, K, part] for part in ("draft", "verify", "accept"))
        plain = sum(cost["none", 0, part] for part in ("draft", "verify", "accept"))
        rows.append({"draft": name, "k": K, "prompts": kind, "tokens_per_s": statistics.median(speeds),
                     "tokens_per_round": per_round, "acceptance": (per_round - 1) / K if K else None,
                     "draft_ms": draft, "verify_ms": check, "accept_ms": accept,
                     "speedup": statistics.median(ratios), "predicted": per_round * plain / (draft + check + accept)})
    return rows


def show(rows: list[dict]):
    names = "draft", "K", "prompts", "tokens/s", "tokens per round", "kept", "draft ms", "verify ms", "accept ms"
    print("| " + " | ".join((*names, "speed-up", "predicted")) + " |\n" + "|---" * 11 + "|")
    for r in rows:
        kept = "–" if r["acceptance"] is None else f"{r['acceptance']:.0%}"
        print(f"| {r['draft']} | {r['k']} | {r['prompts']} | {r['tokens_per_s']:.1f} | {r['tokens_per_round']:.2f} | {kept} "
              f"| {r['draft_ms']:.1f} | {r['verify_ms']:.1f} | {r['accept_ms']:.2f} "
              f"| {r['speedup']:.2f} | {r['predicted']:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", default=DEFAULT_TARGET, metavar="DIR")
    add("-k", type=int, nargs="+", default=[4, 8], metavar="K", help="guesses a round to measure (default 4 8)")
    add("--max-new-tokens", type=int, default=96, metavar="N")
    add("--turns", type=int, default=3, metavar="N", help="times every configuration is measured (default 3)")
    add("--temperature", type=float, default=0.0)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_model(options.target, options.device, getattr(torch, options.dtype) if options.dtype else None)
    tokens, template = tokenizers.load(options.target), read_config(options.target)["chat_template"]
    rows = measure(target, tokens, template, options)
    about = {"torch": torch.__version__, "device": str(options.device), "dtype": str(target.embed.weight.dtype)[6:],
             "batch": 1, "temperature": options.temperature, "threads": options.threads, "new_tokens": options.max_new_tokens,
             "turns": options.turns, "target": str(options.target)}
    print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    show(rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
