"""The one script for a GPU: is it right there, is a round one graph, how fast is it?   python bench.py --gpu-check

Stages run one after the other, what matters most first.  Each yields rows, and the JSON file is written after every
row: a run that fails, or is killed, leaves what it had found.  What does not fit the time is recorded as skipped.
Without a GPU the same stages run small on the CPU (--shape tiny), except those that are about CUDA.
"""
import contextlib
import copy
import signal
import statistics
import sys
import time
from collections import namedtuple
from functools import cached_property, partial
from importlib.metadata import distributions
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from bench_measure import Setup, bytes_read, compiled, decode, drafter_for, median_ms, parts, reader
from bench_shapes import DRAFT_OF, Pair
from bench_stages import OutOfTime, Stage, first_line, markdown, run, save
from generate import compile_round, generate, make_state, slots, warm_up
from model import KVCache
from sample import Sampling
from speculate import State, accept_sampled, speculate

SECONDS = 450       # 8 minutes less what starting and ending a process takes
PROMPT, ROUNDS = 64, 20
Plan = namedtuple("Plan", "ks agreements law_rows vocab batches calls")
GPU = Plan((4, 2, 6, 8, 3, 5, 7), (0.8, 0.6, 0.9), 40_000, 128_256, (1, 32), calls=10)
CPU = Plan((2,), (0.8,), 4_000, 1_000, (1, 4), calls=1)
MODES = {0.0: dict(do_sample=False), 1.0: dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)}


class Check:
    """What the stages share: models, compiled rounds, the clock and the report."""

    def __init__(self, options):
        self.options, self.device, self.gpu = options, options.device, options.device.type == "cuda"
        self.plan, self.start, self.inside = GPU if self.gpu else CPU, time.monotonic(), False
        self.file = Path(options.json or "benchmarks/gpu_check.json")
        self.new = min(options.max_new_tokens, 256)             # texts stay within the 512 slots of one graph
        self.step, self.setups, self.tiny, self.sigma = compile_round(), {}, {}, {}
        # The CPU's compiled round has its own tests, and compiling it for each text takes minutes.
        self.small_step = self.step if self.gpu else speculate
        self.sampling = Sampling(1, 1.0, device=self.device)    # random weights soon loop without chance
        shape = options.shape or "llama-3.1-8b"
        self.shapes = shape, options.draft_shape or DRAFT_OF[shape]
        self.about = {"device": torch.cuda.get_device_name(self.device) if self.gpu else "cpu",
                      "dtype": str(options.dtype)[6:], "weights": "synthetic, {} with draft {}".format(*self.shapes),
                      "threads": options.threads,
                      "new_tokens": self.new, "turns": options.turns, "batch": 1, "k": None, "temperature": 1.0,
                      "agreement": None}
        packages = dict.fromkeys(("torch", "triton", "transformers"))
        self.about |= packages | {d.name: d.version for d in distributions() if d.name in packages}
        self.report = {"about": self.about, "command": sys.argv, "stages": []}

    @cached_property
    def pair(self) -> Pair:
        return Pair(*self.shapes, self.device, self.options.dtype)

    @cached_property
    def prompts(self) -> list:
        g = torch.Generator().manual_seed(0)
        return torch.randint(0, self.pair.target.config.vocab_size, (2, PROMPT), generator=g).tolist()

    def left(self) -> float:
        return SECONDS - (time.monotonic() - self.start)

    def setup(self, name: str, K: int) -> Setup:
        if (name, K) not in self.setups:
            models, length = (self.pair.target, self.pair.draft), PROMPT + self.new
            self.setups[name, K] = ready(self.step, *models, name, K, self.sampling, length)
        return self.setups[name, K]

    def round(self, name: str, K: int):
        """-> one round with no live row, as a function to time: it does all its work and commits nothing."""
        setup = self.setup(name, K)
        setup.state.pos.fill_(40)
        setup.state.span = slots(PROMPT)
        return lambda: self.step(self.pair.target, setup.drafter, setup.state, self.sampling)

    def ms(self, functions: dict) -> dict:
        """Milliseconds of a call, many in flight: a GPU is not to wait for the host, as it does not in generate()."""
        def many(function):
            for _ in range(self.plan.calls):
                out = function()
            return out
        times = median_ms({name: partial(many, f) for name, f in functions.items()}, 7)
        return {name: t / self.plan.calls for name, t in times.items()}

    def texts(self, name: str, K: int) -> tuple[float, int, int]:
        """Write all prompts' texts -> seconds after the first token of each, tokens, rounds."""
        setup = self.setup(name, K)
        runs = [decode(self.pair.target, setup, self.sampling, [ids], self.new, self.step) for ids in self.prompts]
        return tuple(sum(x) for x in zip(*runs))

    def save(self):
        save(self.report, self.file)


def ready(step, target, draft, name, K, sampling, length) -> Setup:
    """A drafter with its round compiled and warm; `parts` holds what compiling told."""
    state, start = make_state(target, len(sampling.seed), length, K), time.monotonic()
    drafter, skips = drafter_for(name, K, target, {"draft": draft}, state), counters["inductor"]["cudagraph_skips"]
    warm_up(step, target, drafter, state, sampling, length)
    return Setup(drafter, state, {"compile_s": time.monotonic() - start,
                                  "cudagraph_skips": counters["inductor"]["cudagraph_skips"] - skips})


# ---- is it right? ----------------------------------------------------------------------------------------------------

def borrow(c: Check, name: str):
    """A test module: it knows tiny models and what they must write.  Importing it sets the number of threads."""
    module = __import__(name)
    torch.set_num_threads(c.options.threads)
    return module


def same_text(c: Check, name: str, K: int):
    """Compiled here against eager on the CPU, float32, a batch of three.  Greedy text must be equal; a sampled one may
    differ where two numbers are equal up to rounding."""
    tests, sampling = borrow(c, "conftest"), Sampling(3, device=c.device)
    if not c.tiny:
        c.tiny["models"] = [copy.deepcopy(model).to(c.device) for model in (tests.TARGET, tests.DRAFTS["near"])]
    target = c.tiny["models"][0]
    setup = c.tiny[name, K] = ready(c.small_step, *c.tiny["models"], name, K, sampling, 64)
    for temperature in (0.0, 1.0):
        same, like = [], ("near", K) if name == "draft" and temperature else ("none", 0)
        for seed in (5, 8, 21):
            sampling.set(temperature, seed=seed)
            prompts, texts = tests.prompts_for(3, seed), [[], [], []]
            setup.state.pos.fill_(-1)
            for new, _, _ in generate(target, setup.drafter, setup.state, sampling, prompts, [40] * 3, c.small_step):
                texts = [text + ids for text, ids in zip(texts, new)]
            wanted, _ = tests.decode(*like, prompts, 40, temperature=temperature, seed=seed)
            same += [text == want for text, want in zip(texts, wanted)]
        yield {"draft": name, "k": K, "temperature": temperature, "dtype": "float32", "batch": 3, "texts": len(same),
               "equal": sum(same)} | setup.parts
        if temperature == 0 and not all(same):
            raise AssertionError(f"{len(same) - sum(same)} of {len(same)} greedy texts are not eager code's on a CPU")


def joint_law(c: Check, name: str, K: int, truncated: bool):
    """The chi-square of test_law.py, on this device and through generate(): prefill, rounds and running ahead."""
    law, B = borrow(c, "test_law"), c.plan.law_rows
    target, draft = (copy.deepcopy(model).to(c.device) for model in (law.TARGET, law.DRAFT))
    state = State(KVCache(target.config, B, 80, c.device), B, 80, device=c.device)
    sampling = Sampling(B, device=c.device)
    drafter = drafter_for(name, K, target, {"draft": draft}, state)
    for i in (1, 7, 10) if truncated else (0, 4, 8):
        sampling.set(seed=100_000 * i, **law.SETTINGS[i])
        state.pos.fill_(-1)
        for _ in generate(target, drafter, state, sampling, [law.PROMPT] * B, [4] * B, c.small_step):
            pass
        p = law.p_value(state.tokens[:, 2:6].cpu(), law.enumerate_law(law.SETTINGS[i]))
        yield {"draft": name, "k": K, "dtype": "float32", "batch": B, "p_value": p} | law.SETTINGS[i]
        if p <= 1e-4:
            raise AssertionError(f"p {p:.2g}: the texts do not follow the target's law")


def one_graph(target, setup: Setup, sampling, step) -> dict:
    """Launches of a round, none of whose values is read, and whether anything in it makes the host wait."""
    def rounds():
        for _ in range(ROUNDS):
            step(target, setup.drafter, setup.state, sampling)
    setup.state.pos.fill_(40)                                   # no row is live: all the work, and nothing moves
    setup.state.span = slots(PROMPT)
    rounds()                                                    # other buffers than the last: recorded once more
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        rounds()
        torch.cuda.synchronize()
    calls = {e.key: e.count / ROUNDS for e in profiled.key_averages()}
    waits = ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds()
    except RuntimeError as error:
        waits = first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outside = "aten::", "cudaMemcpy", "cudaMemset", "cudaLaunchKernel", "cuLaunchKernel"
    return {"graph_launches": sum(n for key, n in calls.items() if key.startswith("cudaGraphLaunch")),
            "kernels_outside": sum(n for key, n in calls.items() if "LaunchKernel" in key), "waits": waits,
            "outside": {key: n for key, n in calls.items() if key.startswith(outside)}} | setup.parts


def graphs(c: Check, of: str):
    """A round is one graph replayed, and nothing beside it.  `of` the tiny models, or the pair at the first K."""
    names = [name for name in c.tiny if name != "models"] if of == "tiny" else [("draft", c.plan.ks[0])]
    target, rows = c.tiny["models"][0] if of == "tiny" else c.pair.target, []
    for name, K in names:
        setup = c.tiny[name, K] if of == "tiny" else c.setup(name, K)
        B = len(setup.state.pos)
        rows.append(one_graph(target, setup, Sampling(3, device=c.device) if of == "tiny" else c.sampling, c.step))
        dtype = str(target.embed.weight.dtype)[6:]
        yield {"weights": of, "draft": name, "k": K, "batch": B, "dtype": dtype, "temperature": None} | rows[-1]
    # a copy into the graph launches no kernel and makes nobody wait: it is what an input without a fixed address costs
    copies = [any(key.startswith(("cudaMemcpy", "cudaMemset")) for key in r["outside"]) for r in rows]
    fine = [r["graph_launches"] == 1 and not (r["kernels_outside"] or r["waits"] or r["cudagraph_skips"] or copied)
            for r, copied in zip(rows, copies)]
    if not rows or not all(fine):
        raise AssertionError(f"{fine.count(False)} of {len(rows)} rounds are not one graph and nothing else")


# ---- how fast is it? -------------------------------------------------------------------------------------------------

def plain(c: Check):
    """Nothing drafted, against the time that reading the weights and the cache takes at the bandwidth of a copy."""
    read, moved = reader(c.device)
    ms = c.ms({"round": c.round("none", 0), "read": read})
    setup = c.setup("none", 0)
    floor = ms["read"] * bytes_read(c.pair.target, setup.state) / moved
    turns = [c.texts("none", 0) for _ in range(c.options.turns)]
    yield {"draft": "none", "k": 0, "round_ms": ms["round"], "floor_ms": floor, "floor_share": floor / ms["round"],
           "copy_gb_per_s": moved / ms["read"] / 1e6, "tokens_per_s": statistics.median(n / s for s, n, _ in turns),
           "text_floor_share": statistics.median(floor / 1e3 * r / s for s, _, r in turns)} | setup.parts


def agreement(c: Check):
    """The scales of the output matrices at which target and draft agree as wanted: found once, set again for each K."""
    for wanted in c.plan.agreements:
        measured = c.pair.agree(wanted, temperature=1.0)
        c.sigma[wanted] = c.pair.own / c.pair.shared
        yield {"agreement": wanted, "measured": measured, "sigma": c.sigma[wanted]}


def host_ms(c: Check, function) -> float:
    """What the host spends to launch a round: where it is more than the round itself, the GPU waits."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(c.plan.calls):
        function()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * seconds / c.plan.calls


def against_plain(c: Check, name: str, K: int, cost: dict) -> dict:
    """Texts in turns with plain decoding -> what a round brings, the speed-up, and what the parts predict."""
    known = counters["stats"]["unique_graphs"]
    turns = [(c.texts("none", 0), c.texts(name, K)) for _ in range(c.options.turns)]
    speed = [(n0 / s0, n / s) for (s0, n0, _), (s, n, _) in turns]
    per_round = turns[0][1][1] / turns[0][1][2]
    split = [cost[part] for part in ("draft", "verify", "accept") if part in cost]
    return {"draft": name, "k": K, "tokens_per_s": statistics.median(new for _, new in speed),
            "plain_tokens_per_s": statistics.median(old for old, _ in speed), "tokens_per_round": per_round,
            "kept": (per_round - 1) / K, "speedup": statistics.median(new / old for old, new in speed),
            "predicted": per_round * cost["plain"] / sum(split) if split else None,
            "overhead": (cost["round"] - cost["draft"] - cost["verify"]) / cost["round"] if split else None,
            "recompiled": counters["stats"]["unique_graphs"] - known} | {f"{part}_ms": t for part, t in cost.items()}


def draft(c: Check, K: int):
    """The draft model at one K and every agreement.  The parts are graphs of their own: only for the first Ks."""
    setup, functions = c.setup("draft", K), {"plain": c.round("none", 0), "round": c.round("draft", K)}
    if K in c.plan.ks[:2]:
        functions |= parts(c.pair.target, setup.drafter, setup.state, c.sampling)
    cost = c.ms(functions) | ({"host": host_ms(c, functions["round"])} if c.gpu else {})
    c.sampling.set(1.0)
    for wanted, sigma in (c.sigma or {None: 1.0}).items():
        c.pair.scale(sigma)
        yield {"agreement": wanted} | against_plain(c, "draft", K, cost) | setup.parts


def ngram(c: Check):
    """Prompt lookup: random text repeats nothing, greedy text of random weights soon does."""
    K = c.plan.ks[0]
    cost = c.ms({"plain": c.round("none", 0), "round": c.round("ngram", K)})
    for temperature in (1.0, 0.0):
        c.sampling.set(temperature)
        yield {"temperature": temperature} | against_plain(c, "ngram", K, cost) | c.setup("ngram", K).parts


def accept(c: Check):
    """Rejection sampling alone: what a round costs beside the models."""
    K, V = c.plan.ks[0], c.plan.vocab
    for B in c.plan.batches:
        g = torch.Generator(c.device).manual_seed(B)
        p, q = (torch.softmax(4 * torch.randn(B, n, V, device=c.device, generator=g), -1) for n in (K + 1, K))
        tokens = torch.multinomial(q.view(B * K, V), 1, generator=g).view(B, K)
        seed, pos = torch.arange(B, device=c.device), torch.full((B,), 40, device=c.device)
        for tensor in (p, q, tokens, seed, pos):
            torch._dynamo.mark_static_address(tensor)       # as in a round: the graph reads them where they are
        step = compiled(accept_sampled)
        for _ in range(3):
            step(tokens, q, p, seed, pos)
        yield {"batch": B, "k": K, "vocab": V, "dtype": "float32", "temperature": None,
               "accept_ms": c.ms({"accept": lambda: step(tokens, q, p, seed, pos)})["accept"]}


def peers(c: Check):
    """generate() of transformers, eager as it comes, on the same weights; its assistant drafts K tokens a round, or as
    many as it likes.  Ours beside it."""
    from bench_peers import transformers_model
    models = [transformers_model(model) for model in (c.pair.target, c.pair.draft)]
    for model in models:
        model.generation_config.eos_token_id = None
    wanted, K = next(iter(c.sigma), None), c.plan.ks[0]
    if wanted:
        c.pair.scale(c.sigma[wanted])
    free = models[1].generation_config
    fixed = copy.deepcopy(free)
    fixed.update(num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    runs = {"transformers": None, f"transformers, assistant, K={K}": fixed, "transformers, assistant": free}
    for temperature, settings in MODES.items():
        agreed = wanted if temperature == 1 else None           # fitted there; greedy texts agree otherwise
        for name, config in runs.items():
            models[1].generation_config = config or free
            more = settings | ({"assistant_model": models[1]} if config else {})
            yield {"engine": name, "agreement": agreed, "temperature": temperature,
                   "tokens_per_s": statistics.median(theirs(c, models[0], more) for _ in range(c.options.turns))}
        c.sampling.set(temperature)
        for name, k in (("none", 0), ("draft", K)):
            speeds = [n / s for s, n, _ in (c.texts(name, k) for _ in range(c.options.turns))]
            yield {"engine": f"this one, {name}", "k": k, "agreement": agreed, "temperature": temperature,
                   "tokens_per_s": statistics.median(speeds)}


def theirs(c: Check, model, settings: dict) -> float:
    """Tokens/s over all prompts, after the first ones came."""
    from transformers.generation import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self): self.came = []

        def put(self, value): self.came.append((time.perf_counter(), value.numel()))    # the prompt, then what is new

        def end(self): pass
    torch.manual_seed(0)
    tokens = seconds = 0
    for prompt in c.prompts:
        clock, ids = Clock(), torch.tensor([prompt], device=c.device)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=c.new, pad_token_id=0, streamer=clock,
                       **settings)
        times, counts = zip(*clock.came)
        tokens, seconds = tokens + sum(counts[2:]), seconds + times[-1] - times[1]
    return tokens / seconds


def targets(c: Check):
    """What the issue asks of a GPU, read off the rows above."""
    rows = {s["stage"]: s["rows"] for s in c.report["stages"]}
    drafted = [r for name, found in rows.items() if name.startswith("draft ") for r in found]
    split = [r for r in drafted if r["predicted"]]
    at_08 = [r["speedup"] for r in drafted if r["agreement"] == 0.8]
    if rows.get("plain"):
        share = rows["plain"][0]["floor_share"]
        yield {"target": "plain reaches 85 % of the memory floor", "value": share, "met": share >= 0.85}
    if split:
        most = max(r["overhead"] for r in split)
        yield {"target": "a round is its forwards and less than 5 %", "value": most, "met": most < 0.05}
        off = max(abs(r["speedup"] / r["predicted"] - 1) for r in split)
        yield {"target": "speed-up within 10 % of predicted", "value": off, "met": off <= 0.1}
    if at_08:
        yield {"target": "1.8 times plain at agreement 0.8", "value": max(at_08), "met": max(at_08) >= 1.8}


# ---- running them ----------------------------------------------------------------------------------------------------

def stages(c: Check) -> list[Stage]:
    """Every kind of question once, then the rest: compiling takes most of the time, and nobody knows how much."""
    def text(name, K): return Stage(f"text {name}", partial(same_text, name=name, K=K))

    def law(name, K, cut=False):
        return Stage(f"law {name} K={K}{', truncated' * cut}", partial(joint_law, name=name, K=K, truncated=cut))

    def drafts(ks): return [Stage(f"draft K={K}", partial(draft, K=K), 30) for K in ks]
    ks = c.plan.ks
    return [text("draft", 3), text("ngram", 3), Stage("one graph", partial(graphs, of="tiny"), 5, True),
            law("draft", 1), Stage("plain", plain, 30), Stage("agreement", agreement), *drafts(ks[:1]),
            Stage("one graph, the pair", partial(graphs, of="pair"), 5, True), Stage("transformers", peers, 20),
            Stage("ngram", ngram, 20), Stage("accept", accept, 20), *drafts(ks[1:2]), law("draft", 3), text("none", 0),
            *drafts(ks[2:]), law("ngram", 3), law("draft", 3, True), Stage("targets", targets, float("-inf"))]


def check(options) -> int:
    """-> 0, or 1 if a stage failed.  Missed targets and missing time are no failures: they are in the report."""
    if not (torch.cuda.is_available() if options.device.type == "cuda" else options.shape):
        raise ValueError("--gpu-check needs a GPU and there is none: --device cpu --shape tiny tries the script itself")
    torch.set_float32_matmul_precision("highest")           # no TF32: texts are compared token for token
    c = Check(options)

    def ring(*_):
        if c.inside:
            raise OutOfTime
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 5)        # again and again, should something swallow the first
    try:
        with torch.no_grad():
            for stage in stages(c):
                with contextlib.suppress(OutOfTime):        # it may ring again while the first is written down
                    run(c, stage)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(markdown(c.report))
    print(f"written: {c.file} and {c.file.with_suffix('.md')}", file=sys.stderr)
    return int(any(s["status"].startswith("failed") for s in c.report["stages"]))
