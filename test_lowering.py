"""What Inductor makes of a round on an H100, lowered on a machine without a GPU (gpu_lowering.py says how, and what is
faked).  `python test_lowering.py` prints what each step becomes.

Greedy and sampled rounds are one graph, temperature being a tensor; only `truncates` makes another.  The models are
small, the vocabulary is not: what Triton cannot sort, or reduce in one program, shows at its real size only."""
import contextlib
import functools
import re
from collections import Counter
from unittest import mock

import pytest
import torch

import generate
from auto_k import Plain
from draft_dflash import DFlash, DFlashDraft
from draft_eagle import Eagle, EagleDraft, EagleTree
from draft_exit import ExitDraft
from draft_hybrid import HybridDraft
from draft_lookahead import LookaheadDraft
from draft_medusa import Medusa, MedusaDraft
from draft_trained import borrow
from drafts import ModelDraft, NgramDraft
from gpu_lowering import PTXAS, fake, h100
from model import Config, KVCache, Transformer, build
from sample import TARGET, Sampling, draw, exponential, probs
from speculate import Draft, State, Tree, accept_block, accept_matched, accept_sampled, commit, speculate, verify

pytestmark = pytest.mark.xdist_group("lowering")        # one process: most of a first lowering is warming up torch

B, S, SPAN, K, V = 1, 1024, 512, 2, 32_000
LAYERS = 2              # of a DFlash: each attends once a round, whatever K is
CONFIG = Config(vocab_size=V, dim=256, layers=2, heads=8, kv_heads=4, head_dim=64, ffn_dim=512, context=2048)

ATTENTION = "aten._scaled_dot_product_cudnn_attention.default"
SORT = "aten.sort.stable"
TOPK = "aten.topk.default"
PRODUCT = "extern_kernels.mm"
ALLOWED = {     # all that may be no Triton kernel, and why
    ATTENTION: "scaled_dot_product_attention is cuDNN's own kernel on an H100; Inductor has none for a given mask",
    SORT: "top-k and top-p rank the whole vocabulary, and Inductor sorts rows of up to 512 in Triton",
    TOPK: "the best children of a tree's node are sought among thousands of tokens, which Inductor cannot do in Triton",
    PRODUCT: "max-autotune times cuBLAS against Triton templates on the GPU and takes the faster one"}


# ---- what is lowered ------------------------------------------------------------------------------------------------

# All of it is made on the meta device: fake() turns it into an H100's.

def model():
    with torch.device("meta"):
        weights = {name: torch.empty(p.shape) for name, p in Transformer(CONFIG).named_parameters()}
    return build(CONFIG, weights, "meta", torch.bfloat16)


def cache():
    return KVCache(CONFIG, B, S, "meta", torch.bfloat16)


def settings(truncates=False):
    return Sampling(B, top_k=50 if truncates else 0, device="meta")


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def floats(*shape):
    return torch.zeros(shape, device="meta")


class TreeDraft:
    """Chosen guesses on a tree: node 0 has the children 1 and 2, node 1 has 3."""
    nodes, taps = 3, ()

    def __init__(self):
        self.tree = Tree([0, 0, 1], "meta")

    def propose(self, state, sampling):
        return Draft(state.tokens[:, :3], tree=self.tree)

    def observe(self, state, out, n, hidden, p): pass


def trained(kind, target, **shape):
    """A drafter that guesses 8,192 of the tokens."""
    with torch.device("meta"):
        return borrow(kind(CONFIG, ints(8192), **shape).to(torch.bfloat16), target)


def round_of(kind: str, truncates=False, K=K):
    """Arguments of speculate."""
    target, state = model(), State(cache(), B, S, (2,), "meta")
    state.span = SPAN                   # as for a text much shorter than its cache
    eagle = lambda: EagleDraft(trained(Eagle, target, taps=(0, 1)), state, K)
    drafter = {"plain": lambda: Plain((0, 1), state, target), "ngram": lambda: NgramDraft(K), "exit": lambda: ExitDraft(target, K, 1), "eagle": eagle,
               "lookahead": lambda: LookaheadDraft(state, 3, 3, 2), "hybrid": lambda: HybridDraft(eagle()),
               "model": lambda: ModelDraft(model(), cache(), K, V), "tree": TreeDraft,
               "eagle tree": lambda: EagleTree(trained(Eagle, target, taps=(0, 1)), state, K, 5, 2),
               "dflash": lambda: DFlashDraft(trained(DFlash, target, taps=(0, 1), layers=LAYERS, ffn_dim=512), state, K),
               "medusa tree": lambda: MedusaDraft(trained(Medusa, target, heads=K), state, K, 5)}[kind]()
    return target, drafter, state, settings(truncates)


def propose(target, drafter, state, sampling):
    draft = drafter.propose(state, sampling)
    return (draft.tokens,) if draft.q is None else (draft.tokens, draft.q)


def score(target, drafter, state, sampling):
    return verify(target, state, Draft(state.tokens[:, :K]), sampling)


def draw_from(logits, sampling, pos):
    """The law and a token of it: logits (B, 1, V) -> (B, 1)."""
    return draw(probs(logits, sampling), exponential(sampling.seed, TARGET, pos, V)[:, None])


STEPS = {       # name -> (function, its arguments, made on meta), and what may come out that is no Triton kernel
    "NgramDraft.propose": (propose, lambda: round_of("ngram"), {}),
    "ModelDraft.propose, one guess": (propose, lambda: round_of("model", K=1), {ATTENTION: 2}),
    "verify": (score, lambda: round_of("ngram"), {ATTENTION: 2}),
    "probs and draw": (draw_from, lambda: (floats(B, 1, V), settings(), ints(B)), {}),
    "probs with top-k, top-p, min-p, and draw":
        (draw_from, lambda: (floats(B, 1, V), settings(True), ints(B)), {SORT: 1}),
    "accept_sampled (with residual and draw)":
        (accept_sampled, lambda: (ints(B, K), floats(B, K, V), floats(B, K + 1, V), ints(B), ints(B)), {}),
    "accept_block (with residuals and draw)":
        (accept_block, lambda: (ints(B, K), floats(B, K, V), floats(B, K + 1, V), ints(B), ints(B)), {}),
    "accept_matched (with draw)":
        (accept_matched, lambda: (ints(B, K), None, floats(B, K + 1, V), ints(B), ints(B)), {}),
    "commit": (commit, lambda: (round_of("ngram")[2], ints(B, K + 1), ints(B)), {}),
    "round, nobody guesses, features kept for -k auto": (speculate, lambda: round_of("plain"), {ATTENTION: 2}),
    "round, NgramDraft": (speculate, lambda: round_of("ngram"), {ATTENTION: 2}),
    "round, NgramDraft, truncated": (speculate, lambda: round_of("ngram", True), {ATTENTION: 2, SORT: 1}),
    f"round, ModelDraft, K = {K}": (speculate, lambda: round_of("model"), {ATTENTION: 2 + 2 * K}),
    "round, ModelDraft, K = 1, truncated": (speculate, lambda: round_of("model", True, K=1), {ATTENTION: 4, SORT: 2}),
    "round, a tree": (speculate, lambda: round_of("tree"), {ATTENTION: 2}),
    f"round, EagleDraft, K = {K}": (speculate, lambda: round_of("eagle"), {ATTENTION: 2 + K}),
    f"round, EagleTree, 5 nodes, {K} levels": (speculate, lambda: round_of("eagle tree"), {ATTENTION: 2 + K, TOPK: K}),
    f"round, DFlashDraft, {LAYERS} layers, K = 4": (speculate, lambda: round_of("dflash", K=4), {ATTENTION: 2 + LAYERS}),
    "round, MedusaDraft, 5 nodes": (speculate, lambda: round_of("medusa tree"), {ATTENTION: 2, TOPK: 1}),
    f"round, ExitDraft, one layer, K = {K}": (speculate, lambda: round_of("exit"), {ATTENTION: 2 + K}),
    "round, LookaheadDraft, W = 3, N = 3, G = 2": (speculate, lambda: round_of("lookahead"), {ATTENTION: 2}),
    f"round, n-gram + EagleDraft, K = {K}": (speculate, lambda: round_of("hybrid"), {ATTENTION: 2 + K}),
}

ASSEMBLED = [name for name in STEPS if name.startswith(("accept", "commit"))] + ["round, NgramDraft"]


def lowered(fn, arguments, **how):
    """fn, compiled as compile_round compiles speculate, on an H100."""
    with contextlib.ExitStack() as undo:
        inductor, dynamo = torch._inductor.config, torch._dynamo.config         # compile_round sets options for good
        undo.callback(inductor.load_config, inductor.save_config())
        undo.enter_context(dynamo.patch(recompile_limit=dynamo.recompile_limit))
        undo.enter_context(mock.patch.object(generate, "speculate", fn))
        undo.enter_context(torch.no_grad())
        graphs = undo.enter_context(h100(**how))
        generate.compile_round()(*fake(arguments()))
    assert len(graphs) == 1
    return graphs[0]


@functools.cache
def step(name: str, **how):
    """A row of STEPS, lowered; those in ASSEMBLED compiled to machine code as well."""
    fn, arguments, _ = STEPS[name]
    return lowered(fn, arguments, cubin=name in ASSEMBLED and PTXAS.exists(), **how)


def check(graph, externs: dict):
    """One CUDA graph that holds everything, and nothing in it but Triton kernels and these."""
    assert graph.recorded and graph.partitions == 1 and not graph.skips and not graph.outside
    assert dict(graph.externs) == externs and externs.keys() <= ALLOWED.keys()
    assert graph.triton and graph.triton.keys() == graph.sources.keys()


# ---- the claims -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", STEPS)
def test_lowers_to_triton_in_one_cuda_graph(name):
    """Killed: scatter_ into a plain tensor, torch.multinomial for draw, topk, .item(), state in plain arguments."""
    check(step(name), STEPS[name][2])


def test_products_may_go_to_cublas():
    """The autotuner's other choice, for the 7 products of each layer and the head, changes nothing else."""
    check(step("verify", matmul="aten"), {ATTENTION: 2, PRODUCT: 2 * 7 + 1})


@pytest.mark.parametrize("name", ["round, NgramDraft", f"round, ModelDraft, K = {K}"])
def test_attention_reads_the_caches_where_they_are(name):
    """Killed: scatter_ into a cache, whose copy is then attended to; keys repeated for each query head."""
    code = step(name).code
    calls = re.findall(rf"{re.escape(ATTENTION)}\((.*)\)$", code, re.M)
    cache_args = [re.findall(r"reinterpret_tensor\((\w+),", call) for call in calls]
    assert calls and all(len(names) == 2 and all(re.search(r"arg\d+_1$", n) for n in names) for names in cache_args)


def test_noise_is_hashed_in_values_not_in_an_index():
    """Inductor folds arange * constant into an index expression, whose width is its own choice: see sample.bits."""
    for name in ("round, NgramDraft", "accept_sampled (with residual and draw)"):
        sources = "".join(step(name).sources.values())
        for factor in (0x7FEB352D, 0x6C50B47D):         # those of mix()
            assert re.search(rf"tl\.full\(\[.*\], {factor}, tl\.int(32|64)\)", sources)
            assert not re.search(rf"{factor} ?\*|\* ?{factor}", sources)


@pytest.mark.skipif(not PTXAS.exists(), reason=f"triton ships no assembler here: {PTXAS} is missing")
@pytest.mark.parametrize("name", ASSEMBLED)
def test_kernels_assemble_for_sm_90(name):
    """Every kernel in its first configuration; an ELF file starts so."""
    graph = step(name)
    assert graph.cubins.keys() == graph.sources.keys()
    assert all(cubin.startswith(b"\x7fELF") for cubin in graph.cubins.values())


# ---- the checks can fail --------------------------------------------------------------------------------------------

def test_state_in_a_plain_argument_is_noticed():
    def append(tokens, new):
        tokens.add_(new)
        return tokens.sum()
    graph = lowered(append, lambda: (ints(8), ints(8)))
    assert "mutated inputs" in graph.skips[0]


def test_a_copy_to_the_host_is_noticed():
    graph = lowered(lambda x: (x + 1).cpu(), lambda: (floats(8),))
    assert graph.outside and graph.externs


def test_what_triton_cannot_sort_is_noticed():
    graph = lowered(lambda x: x.sort(dim=-1, stable=True).values, lambda: (floats(B, V),))
    assert graph.externs == Counter([SORT])
    small = lowered(lambda x: x.sort(dim=-1, stable=True).values, lambda: (floats(B, 512),))
    assert not small.externs


def test_an_index_that_wraps_is_noticed():
    graph = lowered(lambda x: torch.arange(4096, device=x.device) * 2146121005 + x, lambda: (ints(1),))
    assert re.search(r"2146121005 ?\*", "".join(graph.sources.values()))


# ---- the table ------------------------------------------------------------------------------------------------------

def table():
    yield "| step | Triton kernels launched | other kernels launched |"
    yield "|---|---|---|"
    for name in STEPS:
        graph = step(name)
        others = ", ".join(f"{times} `{kernel}`" for kernel, times in graph.externs.items())
        yield f"| {name} | {graph.triton.total()} | {others or '–'} |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
