"""Tiny random models and small loops that the tests share."""
import pytest
import torch

from drafts import ModelDraft, NgramDraft, NoDraft
from generate import generate
from model import Config, KVCache, Transformer, build
from sample import Sampling
from speculate import State, speculate

torch.set_num_threads(1)
V = 48


def config(vocab=V, **changes) -> Config:
    shape = dict(vocab_size=vocab, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=64, context=512)
    return Config(**shape | changes)


def random_model(seed: int, c: Config = config(), head=4.0, noise=0.0) -> Transformer:
    """Random weights; `head` scales the logits, so that greedy text does not degenerate (negative: the argmax is never
    the target's); `noise` perturbs all weights by that share."""
    g = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(c).named_parameters()}
    weights = {n: torch.randn(s, generator=g) / s[-1] ** 0.5 if len(s) > 1 else 1 + 0.1 * torch.randn(s, generator=g)
               for n, s in shapes.items()}
    weights["lm_head.weight"] *= head
    return build(c, {n: w * (1 + noise * torch.randn(w.shape, generator=g)) for n, w in weights.items()})


TARGET = random_model(0)
DRAFTS = {"self": TARGET, "near": random_model(0, noise=0.05), "rand": random_model(1),
          "anti": random_model(0, head=-4.0)}


def make_drafter(kind: str, K: int, B: int, S: int, target=TARGET):
    """none, ngram or a name of DRAFTS (or a model) -> drafter."""
    if kind == "none":
        return NoDraft()
    if kind == "ngram":
        return NgramDraft(K)
    model = DRAFTS[kind] if isinstance(kind, str) else kind
    return ModelDraft(model, KVCache(model.config, B, S), K, target.config.tokens)


def prompts_for(B: int, seed=5, vocab=V) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (3 + 2 * (i % 3),), generator=g).tolist() for i in range(B)]


def decode(kind, K, prompts, max_new, *, target=TARGET, step=speculate, eos=(), S=192, state=None, drafter=None,
           ahead=None, **settings):
    """-> (texts: new ids of each row, rounds: [(new, kept) of each row] of each round after prefill)."""
    B = len(prompts)
    state = state or State(KVCache(target.config, B, S), B, S, eos)
    drafter = drafter or make_drafter(kind, K, B, S, target)
    budgets = [max_new] * B if isinstance(max_new, int) else max_new
    texts, rounds = [[] for _ in range(B)], []
    for new, kept, _ in generate(target, drafter, state, Sampling(B, **settings), prompts, budgets, step, ahead):
        texts = [text + ids for text, ids in zip(texts, new)]
        rounds.append([(len(ids), k) for ids, k in zip(new, kept)])
    return texts, rounds[1:]


@torch.no_grad()
def logits_alone(target, ids: list[list[int]]) -> torch.Tensor:
    """Logits after each of some equally long texts, all of it fed at once into an empty cache: (B, V)."""
    tokens = torch.tensor(ids)
    cache = KVCache(target.config, *tokens.shape)
    hidden, _ = target(tokens, torch.zeros(len(ids), dtype=torch.int64), cache, tokens.shape[1])
    return target.head(hidden[:, -1])


def greedy_alone(prompt: list[int], max_new: int, target=TARGET) -> list[int]:
    """Greedy text by recomputing everything for every token: no cache is reused, no round is run."""
    ids = list(prompt)
    for _ in range(max_new):
        ids.append(logits_alone(target, [ids])[0].argmax().item())
    return ids[len(prompt):]


@pytest.fixture(autouse=True)
def own_compiler_state():
    """Graphs and stances of one test are not the next one's."""
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()
