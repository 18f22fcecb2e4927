"""What compiling must not change, and what must never enter the compiled round."""
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from conftest import TARGET, decode, make_drafter, prompts_for
from generate import compile_round
from model import KVCache, linear
from sample import Sampling
from speculate import Draft, State, speculate
from test_speculate import ScriptedTree

B, S = 3, 512
FORBIDDEN = ("_local_scalar_dense", "aten.item", "nonzero", "masked_select", "unique")


@pytest.mark.parametrize("kind", ["ngram", "near"])
def test_compiled_equals_eager_and_never_recompiles(kind):
    """Prompts of other lengths, other temperatures, truncations and seeds, one graph; a batch, its rows one by one in it.
    Killed: temperature as a float attribute; max_new in the graph; a Python int position; noise from torch.rand."""
    step, drafter = compile_round(), make_drafter(kind, 3, B, S)
    state = State(KVCache(TARGET.config, B, S), B, S)
    runs = [dict(prompts=prompts_for(3), temperature=1.0, top_p=0.9, seed=3),
            dict(prompts=prompts_for(3, seed=8), temperature=[0.0, 0.7, 1.5], top_k=[0, 5, 0], top_p=[1.0, 1.0, 0.9],
                 seed=[9, 1, 4]),
            dict(prompts=[[1], [2] * 70, [3, 4]], temperature=1.3, min_p=0.05, seed=7),
            dict(prompts=prompts_for(3), temperature=1.0, top_p=0.9, seed=3)]
    texts = []
    for i, run in enumerate(runs):
        texts.append(decode(None, 3, max_new=30, state=state, drafter=drafter, step=step, **run)[0])
        torch.compiler.set_stance("fail_on_recompile")
        if i == 0:                                                              # row 2 of the batch, now in rows 0 to 2
            again, _ = decode(None, 3, [run["prompts"][2]] * 3, 30, state=state, drafter=drafter, step=step,
                              temperature=1.0, top_p=0.9, seed=[5, 5, 6])
            assert again[0] == again[1] == texts[0][2] != again[2]
    torch.compiler.set_stance("default")
    assert texts[0] == texts[3]
    assert texts == [decode(kind, 3, max_new=30, S=S, **run)[0] for run in runs]


@pytest.mark.parametrize("fed", [(2, 1), (4, 3), (1, 13), (4, 8), (3, 11)], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_linear_layer_is_the_same_however_many_rows_it_has(fed, weights):
    """fed (B, T).  Kills: rows and columns confused in the product that is made the other way round; a bias left out."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((*fed, 24), (40, 24), (40,)))
    weight, bias = weight.to(weights), bias.to(weights)
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    for b in (None, bias):
        y = compiled(x, weight, b)
        assert y.shape == (*fed, 40) and y.dtype == x.dtype
        torch.testing.assert_close(y, x @ weight.float().T + (0 if b is None else b.float()))


def traced_ops(drafter, K) -> list[str]:
    """Every operation of the round's graph, as the compiler's backend gets it."""
    ops = []

    def collect(gm, example_inputs):
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                ops.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return gm.forward

    step = torch.compile(speculate, backend=aot_autograd(fw_compiler=collect), fullgraph=True, dynamic=False)
    state = State(KVCache(TARGET.config, B, S), B, S)
    state.pos.fill_(4)
    with torch.no_grad():
        step(TARGET, drafter, state, Sampling(B, temperature=1.0, top_k=3, top_p=0.9, min_p=0.1))
    return ops


class Peeking:
    """A drafter that reads a value on the host: what the test below must notice."""
    taps, nodes = (), 2

    def propose(self, state, sampling):
        return Draft(state.tokens[:, :2] + state.pos.max().item())

    def observe(self, state, out, n, hidden, p): pass


@pytest.mark.parametrize("kind", ["none", "ngram", "near", "tree"])
def test_no_value_of_the_round_is_read_on_the_host(kind):
    """Killed: .item(), nonzero, boolean masks anywhere in the round (fullgraph=True alone lets them pass)."""
    tree = ScriptedTree([[1] * 9] * B, [[1]] * B, [[1]] * B, [0, 0, 1], (1, 3))
    tree.observe = lambda *a: None
    ops = traced_ops(tree if kind == "tree" else make_drafter(kind, 3, B, S), 3)
    assert len(ops) > 50 and not [op for op in ops if any(word in op for word in FORBIDDEN)]


def test_reading_on_the_host_would_be_noticed():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert any(word in op for op in traced_ops(Peeking(), 2) for word in FORBIDDEN)
