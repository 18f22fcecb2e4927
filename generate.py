"""Write text with a target model and a drafter:  python generate.py --prompt "Why is the sky blue?"

Follow one token: main -> generate -> speculate -> drafter.propose -> verify -> accept_* (speculate.py).
"""
import json
import os
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import torch

import compare
import memory
import tokenizer as tokenizers
from auto_k import AutoDraft
from choose_draft import load_drafter
from drafts import NoDraft
from load import open_checkpoint
from model import CHUNK, KVCache
from options import DEFAULT_TARGET, options
from output import Row, note, report
from report import explain
from sample import Sampling, probs
from speculate import State, accept_matched, commit, speculate


# ---- the engine's loop ----------------------------------------------------------------------------------------------

def slots(need: int, least: int = 512) -> int:
    """Caches and their views come in powers of two from 512: each is a compiled graph, found again on disk."""
    return max(least, 1 << (need - 1).bit_length())


def headroom(nodes: int) -> int:
    """Slots needed past a text: a row that has ended still scratches nodes + 1 of them, prefill pads its last chunk."""
    return max(nodes + 1, CHUNK)


def make_state(target, B: int, length: int, nodes: int, eos=(), least: int = 512) -> State:
    """A State for texts of up to `length` tokens and a drafter of so many nodes."""
    weight, room = target.embed.weight, headroom(nodes)
    S = min(slots(length + room, least), target.config.context + room)
    return State(KVCache(target.config, B, S, weight.device, weight.dtype), B, S, eos, weight.device)


def begin(target, drafter, state: State, sampling, prompts: list[list[int]], max_new: list[int]) -> list[list[int]]:
    """Feed the prompts and draw each row's first token.  What the caches already hold of a prompt is not fed again."""
    follows = state.followed_by[0] is drafter and min(state.pos.tolist()) >= 0      # -1: all of it is to be fed again
    if follows and hasattr(drafter, "catch_up"):
        drafter.catch_up(state)
    known = state.pos - 1 if follows else state.pos * 0                         # a draft's cache may lack its newest
    fed = [tokens[:max(n, 0)] for tokens, n in zip(state.tokens.tolist(), known.tolist())]
    common = [next((i for i, (a, b) in enumerate(zip(old, ids)) if a != b), min(len(old), len(ids)))
              for old, ids in zip(fed, prompts)]
    # One token that is known is fed again: a drafter may pair each token with the features before it.
    start = state.pos.new_tensor([max(0, min(c, len(ids)) - 1) for c, ids in zip(common, prompts)])
    for row, ids in enumerate(prompts):
        state.tokens[row, :len(ids)] = state.tokens.new_tensor(ids)
    last = state.pos.new_tensor([len(ids) - 1 for ids in prompts])
    state.pos.copy_(last)
    state.limit.copy_(last + last.new_tensor(max_new))
    state.live.copy_(state.limit > last)
    hidden, tapped = target.prefill(state.tokens, start, last + 1, state.cache, drafter.taps)
    p = probs(target.head(hidden), sampling)                                            # then a round without guesses
    n, out, _ = accept_matched(state.tokens[:, :0], None, p, sampling.seed, state.pos)
    _, new = commit(state, out, n)
    drafter.start(state, start, tapped)
    state.followed_by = (drafter,)
    return [ids[:k] for ids, k in zip(out.tolist(), new.tolist())]


@torch.no_grad()
def generate(target, drafter, state: State, sampling, prompts: list[list[int]], max_new: list[int], step=speculate,
             ahead: int | None = None):
    """Yields, after prefill and after each round, three lists with one entry a row: its new ids, how many of them are
    guesses that were kept, how many could have been.  `step` is speculate, compiled or not.  A caller ends a row early
    with state.live[row] = False.  A drafter with `choose` (auto_k.py) names another one for each round.  ValueError for
    what does not fit the model or the state."""
    B, S = state.tokens.shape
    check_fit(target.config, S - headroom(drafter.nodes), B, prompts, max_new)
    yield begin(target, drafter, state, sampling, prompts, max_new), [0] * B, [0] * B
    # On a GPU the host launches the next round before it reads this one, so the device never waits for the host; at
    # most one round is wasted at the end.  The CPU is one device: running ahead would only delay the text.
    ahead, in_flight, most = int(state.tokens.is_cuda) if ahead is None else ahead, deque(), drafter.nodes + 1
    lengths, going, ends = state.pos.tolist(), state.live.tolist(), state.limit.tolist()
    while any(going):
        if min(n for n, live in zip(lengths, going) if live) >= getattr(drafter, "context", S):
            drafter = NoDraft()                                                 # no row has positions it can guess at
        auto, left = hasattr(drafter, "choose"), [end - at if live else 0 for end, at, live in zip(ends, lengths, going)]
        asked = drafter.choose(state, left) if auto else drafter
        state.span = min(S, slots(max(lengths) + (len(in_flight) + 2) * most))
        out, *counts = step(target, asked, state, sampling)
        in_flight.append(to_host(torch.cat([out] + [x[:, None].long() for x in (*counts, state.live, state.pos)], 1)))
        if len(in_flight) > ahead:
            rows = in_flight.popleft()().tolist()                                       # the one host sync of a round
            lengths, going = [row[-1] for row in rows], [row[-2] for row in rows]
            kept, new = [row[-5] for row in rows], [row[-4] for row in rows]
            if auto:
                drafter.saw(kept, new)
            yield [row[:n] for row, n in zip(rows, new)], kept, [row[-3] for row in rows]


def check_fit(config, room: int, B: int, prompts: list[list[int]], max_new: list[int]):
    if not len(prompts) == len(max_new) == B:
        raise ValueError(f"{len(prompts)} prompts and {len(max_new)} budgets for a state of {B} rows: give one each")
    for row, ids in enumerate(prompts):
        if not ids or len(ids) + max_new[row] > min(config.context, room):
            raise ValueError(f"row {row}: {len(ids)} prompt + {max_new[row]} new tokens do not fit a context of "
                             f"{config.context} and a cache with room for {room}")
        if bad := [id for id in ids if not 0 <= id < config.vocab_size]:
            raise ValueError(f"row {row}: token id {bad[0]} is not in 0..{config.vocab_size - 1}")


def to_host(tensor):
    """Start copying a small tensor to the host -> a function that waits for the copy and returns it."""
    if not tensor.is_cuda:
        return lambda: tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(tensor.device))       # of this device, which need not be the current one
    return lambda: (done.synchronize(), copy)[1]


def compiled(function):
    """How everything here is compiled: one graph of fixed shapes, tuned, replayed as a CUDA graph on a GPU."""
    # Inductor inlines small values into each of their uses, which doubles the work at every line of the integer hash
    # in sample.py: 87 s of compiling became 6 s with this, the kernels being fused again afterwards.
    torch._inductor.config.realize_opcount_threshold = 8
    torch._inductor.config.cpp.enable_floating_point_contract_flag = "fast"     # multiply and add in one instruction
    torch._inductor.config.size_asserts = False         # checks of shapes before every kernel: 3 % of a round here
    torch._dynamo.config.recompile_limit = 64           # one graph per span and setting of `truncates`, not 8 in all
    return torch.compile(function, mode="max-autotune", fullgraph=True, dynamic=False)


def compile_round():
    """speculate, compiled: one graph a round with the drafting in it.  Prefill stays eager: its chunks are bound by
    arithmetic, and the first token need not wait for a compiler."""
    return compiled(speculate)


@torch.no_grad()
def warm_up(step, target, drafter, state: State, sampling, length: int):
    """Compile the round for texts of about `length` tokens.  No row is live: it runs, and commits nothing."""
    state.pos.fill_(1)
    state.span = min(state.tokens.shape[1], slots(length + 2 * (drafter.nodes + 1)))

    times = 3 if state.tokens.is_cuda else 1                                    # a GPU also records its CUDA graph
    run = lambda guesser: step(target, guesser, state, sampling).new.tolist()
    if hasattr(drafter, "rehearse"):
        drafter.rehearse(run, times)
    else:
        for _ in range(times):
            run(drafter)
    state.pos.fill_(-1)


# ---- the command line -----------------------------------------------------------------------------------------------

def encode(args, tokens, template, messages) -> list[int]:
    """The prompt's ids: through the chat template when there is one, unless --raw."""
    return tokenizers.chat(template, messages, tokens) if args.chat else tokens.prompt(messages[-1]["content"])


def room(ids: list[int], wanted: int, context: int, name: str) -> int:
    """How many new tokens fit after a prompt, saying so where they are fewer than wanted."""
    if len(ids) >= context:
        raise ValueError(f"{name} has {len(ids)} tokens and fills the model's context of {context}: shorten it")
    if len(ids) + wanted > context:
        note(f"{name}: only {context - len(ids)} of {wanted} new tokens fit the context of {context}")
    return min(wanted, context - len(ids))


class Engine:
    """What a command loads once: the models, their caches, the settings and the compiled round."""

    def __init__(self, args, target, tokens, longest: int, first: int):
        """For texts of up to `longest` tokens, the first round starting at about `first`."""
        B = max(1, len(args.prompt))
        self.args, self.target, self.tokens = args, target, tokens
        self.state = make_state(target, B, longest, args.nodes, tokens.eos)
        self.drafter = self.guesser = load_drafter(args, target, tokens, self.state)
        self.sampling = Sampling(B, args.temperature, args.top_k, args.top_p, args.min_p, args.seed or 0, args.device)
        how = {"block": True} if args.verify == "block" else {}
        self.step, self.compile_s, self.depth = partial(speculate, **how), 0.0, args.k
        self.nobody = NoDraft()                             # who "guesses" in plain decoding, which --report and --check run
        if args.k_auto:
            self.drafter = AutoDraft(self.guesser, args.k, self.state, target, not args.no_compile, self.clock)
            self.depth, self.nobody = max(self.drafter.drafters), self.drafter.drafters[0]
        if not args.no_compile:
            note("compiling the round: a minute or more the first time, some seconds once it is found on disk ...")
            self.compiled, self.step = partial(compile_round(), **how), self.round
            warm_up(self.step, target, self.drafter, self.state, self.sampling, first)

    def round(self, *args):
        """The compiled round.  A longer span compiles again in the middle of a text: that is no decoding time."""
        graphs, start = torch._dynamo.utils.counters["stats"]["unique_graphs"], time.perf_counter()
        result = self.compiled(*args)
        if torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs:
            self.compile_s += time.perf_counter() - start
        return result

    def clock(self) -> float:
        return time.perf_counter() - self.compile_s

    def run(self, prompts: list[list[int]], budgets: list[int], show) -> list[Row]:
        """Generate until every row has ended or Ctrl-C; show(row number, text) gets the text as it comes."""
        rows = [Row(self.tokens, budget, self.depth, self.args.stop, self.clock) for budget in budgets]
        try:
            for round in generate(self.target, self.drafter, self.state, self.sampling, prompts, budgets, self.step):
                for i, (row, new, kept, tried) in enumerate(zip(rows, *round)):
                    show(i, row.push(new, kept, tried))
                    if row.finish == "stop":
                        self.state.live[i] = False
                if all(row.finish for row in rows):
                    break
        except KeyboardInterrupt:
            if not any(row.ids for row in rows):
                self.state.pos.fill_(-1)        # perhaps not all of the prompt was fed: the next turn feeds all of it
        for i, row in enumerate(rows):
            if not row.finish:
                show(i, row.end("interrupted"))
        return rows


def write(i: int, text: str):
    print(text, end="", flush=True)


def sampling_state(target, args, longest: int, eos) -> State:
    """What --check samples with at a temperature: many rows, and few slots."""
    return make_state(target, compare.rows_at_once(args.nodes), longest + compare.NEW, args.nodes, eos, least=128)


def load_target(args, opened, longest: int, first: int):
    """For texts of up to `longest` tokens and prompts of up to `first`.  ValueError where it cannot fit."""
    def states(target):
        yield make_state(target, max(1, len(args.prompt)), longest, args.nodes, opened.tokens.eos)
        if args.check and args.temperature:
            yield sampling_state(target, args, first, opened.tokens.eos)
    return memory.load_target(args, opened, states)


def run_prompts(args, opened) -> int:
    tokens, template, context = opened.tokens, opened.template, opened.config["model"]["context"]
    prompts = [encode(args, tokens, template, [{"role": "user", "content": text}]) for text in args.prompt]
    budgets = [room(ids, args.max_new_tokens, context, f"prompt {i + 1}") for i, ids in enumerate(prompts)]
    longest, first = max(len(ids) + new for ids, new in zip(prompts, budgets)), max(map(len, prompts))
    target = load_target(args, opened, longest, first)
    engine = Engine(args, target, tokens, longest, first)
    alone = len(prompts) == 1 and not args.json
    rows = engine.run(prompts, budgets, write if alone else lambda i, text: None)
    for i, (prompt, row) in enumerate(zip(args.prompt, rows)):
        if args.json:
            stats = {"compile_s": round(engine.compile_s, 2), "draft": args.draft, "k": "auto" if args.k_auto else args.k,
                     "verify": args.verify, "couple": args.couple, "chosen": args.chosen,
                     "seed": (args.seed or 0) + i}
            print(json.dumps({"prompt": prompt, "text": row.text, "tokens": row.ids, "finish": row.finish,
                              "stats": row.stats() | stats}))
        else:
            print("" if alone else f"=== {i + 1}: {prompt}\n{row.text}")
    note(report(rows, prompts, engine.compile_s, args.device))
    if any(row.finish == "interrupted" for row in rows):
        return 130
    # The check comes first, because it reads in the state what was written, and the report writes plain text there.
    code = compare.check(engine, prompts, budgets, rows, lambda: sampling_state(target, args, first, tokens.eos)) \
        if args.check else 0
    if args.report is not None:
        explain(engine, prompts, budgets, rows, args.report, (lambda f: f) if args.no_compile else compiled)
    return code


def run_chat(args, opened) -> int:
    """A conversation: each turn renders all of it, and what the caches already hold of it is not fed again."""
    tokens, template, context, messages = opened.tokens, opened.template, opened.config["model"]["context"], []
    engine = Engine(args, load_target(args, opened, context, 256), tokens, context, 256)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return 0
        if not text.strip():
            continue
        said = messages + [{"role": "user", "content": text}]
        try:
            ids, alone = (encode(args, tokens, template, turns) for turns in (said, said[-1:]))
            if len(alone) < context <= len(ids):
                note(f"the conversation has {len(ids)} tokens and fills the context of {context}: it starts anew here")
                said, ids = said[-1:], alone
            rows = engine.run([ids], [room(ids, args.max_new_tokens, context, "the conversation")], write)
        except ValueError as error:             # longer than the context, or no text, or refused by the template
            note(str(error))
            continue
        print()
        messages = said + [{"role": "assistant", "content": rows[0].text}]
        note(report(rows, [ids], engine.compile_s, args.device))


def main(argv=None) -> int:
    try:
        args = options(argv)
        if not Path(args.target).exists() and args.target == DEFAULT_TARGET:
            raise ValueError(f"{DEFAULT_TARGET} is missing: make it with  python convert_weights.py smollm2")
        opened = open_checkpoint(args.target)
        if (args.chat or args.interactive) and not opened.template:
            remedy = "use --prompt" if args.interactive else "use --raw"
            raise ValueError(f"{args.target} has no chat template: {remedy}")
        args.chat = bool(opened.template) if args.chat is None else args.chat
        return (run_chat if args.interactive else run_prompts)(args, opened)
    except ValueError as error:
        note("generate.py: " + " ".join(str(error).splitlines()))
        return 2
    except BrokenPipeError:                 # whoever read the text has gone, as in | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:               # while loading or compiling: there is no text to keep
        return 130
    except RuntimeError as error:
        if "No working C++ compiler" not in str(error):
            raise
        note("generate.py: torch.compile needs a C++ compiler: install g++, or use --no-compile")
        return 2


if __name__ == "__main__":
    sys.exit(main())
