"""Random weights of real geometry: what speed can be measured without a download, and a draft that agrees as asked.

The weights are synthetic and write nonsense; what they cost is what the real ones cost.  Target and draft share a small
component, a random rank-64 bigram model: the first SHARED columns of both embeddings hold one table, those of both output
matrices another, and no block writes to those columns of the residual stream.  So logits = shared + sigma * own, and
sigma sets how often the two agree.  Embedding and output matrix are never tied here: the bytes read per token are the same.
"""
import torch
from torch import Tensor

from drafts import NoDraft
from generate import generate, make_state
from model import Config, KVCache, Transformer, build
from sample import Sampling, probs

SHARED = 64         # columns of the common component
PEAK = 4.0          # standard deviation of the logits: at 128,256 tokens an entropy of about 4 nats
LLAMA3 = {"kind": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHAPES = {
    "tiny": dict(vocab_size=512, dim=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_dim=256, context=2048),
    "tiny-draft": dict(vocab_size=512, dim=96, layers=1, heads=2, kv_heads=1, head_dim=32, ffn_dim=128, context=2048),
    "smollm2-135m": dict(vocab_size=49_152, dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn_dim=1536,
                         context=8192, rope_theta=100_000.0),
    "smollm2-135m-4layers": dict(vocab_size=49_152, dim=576, layers=4, heads=9, kv_heads=3, head_dim=64, ffn_dim=1536,
                                 context=8192, rope_theta=100_000.0),
    "llama-3.2-1b": dict(vocab_size=128_256, dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn_dim=8192,
                         context=131_072, rope_theta=500_000.0, rope_scaling=LLAMA3 | {"factor": 32.0}),
    "llama-3.2-1b-4layers": dict(vocab_size=128_256, dim=2048, layers=4, heads=32, kv_heads=8, head_dim=64, ffn_dim=8192,
                                 context=131_072, rope_theta=500_000.0, rope_scaling=LLAMA3 | {"factor": 32.0}),
    "llama-3.1-8b": dict(vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn_dim=14_336,
                         context=131_072, rope_theta=500_000.0, rope_scaling=LLAMA3 | {"factor": 8.0}),
    "llama-3.1-70b": dict(vocab_size=128_256, dim=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn_dim=28_672,
                          context=131_072, rope_theta=500_000.0, rope_scaling=LLAMA3 | {"factor": 8.0}),
    "llama-2-7b": dict(vocab_size=32_000, dim=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn_dim=11_008,
                       context=4096),
    "tinyllama-1.1b": dict(vocab_size=32_000, dim=2048, layers=22, heads=32, kv_heads=4, head_dim=64, ffn_dim=5632,
                           context=2048),
    "qwen3-8b": dict(vocab_size=151_936, dim=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn_dim=12_288,
                     context=40_960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
    "qwen3-0.6b": dict(vocab_size=151_936, dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn_dim=3072,
                       context=40_960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
}
DRAFT_OF = {"tiny": "tiny-draft", "smollm2-135m": "smollm2-135m-4layers", "llama-3.2-1b": "llama-3.2-1b-4layers",
            "llama-3.1-8b": "llama-3.2-1b", "llama-3.1-70b": "llama-3.2-1b", "llama-2-7b": "tinyllama-1.1b",
            "qwen3-8b": "qwen3-0.6b"}


def table(V: int, seed: int, device, dtype) -> Tensor:
    """One of the two tables that target and draft have in common: (V, SHARED), standard normal."""
    return torch.randn(V, SHARED, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)


@torch.no_grad()
def random_model(name: str, seed: int, device="cpu", dtype=torch.float32) -> Transformer:
    """A Transformer of this shape.  Two of one vocabulary are tied by the shared component (see above)."""
    config = Config(**SHAPES[name])
    g = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Transformer(config).named_parameters()}
    weights = {}
    for n, shape in shapes.items():
        if len(shape) == 1:
            weights[n] = torch.ones(shape, device=device, dtype=dtype)
            continue
        scale = 1.0 if n == "embed.weight" else shape[1] ** -0.5
        if n.endswith((".o.weight", ".down.weight")):
            scale *= (2 * config.layers) ** -0.5        # all blocks together add about as much as the embedding holds
        w = weights[n] = torch.randn(shape, generator=g, device=device, dtype=dtype).mul_(scale)
        if n.endswith((".o.weight", ".down.weight")):
            w[:SHARED] = 0
    weights["embed.weight"][:, :SHARED] = table(config.vocab_size, 1, device, dtype)
    weights["lm_head.weight"][:, :SHARED] = table(config.vocab_size, 2, device, dtype) * SHARED ** -0.5
    return build(config, weights, device, dtype)


class Pair:
    """A target and a draft of these shapes, random, whose agreement can be set again and again: no graph knows it."""

    def __init__(self, target: str, draft: str, device="cpu", dtype=torch.float32):
        for name in (target, draft):
            if name not in SHAPES:
                raise ValueError(f"shape {name} is unknown: choose one of {', '.join(SHAPES)}")
        if SHAPES[target]["vocab_size"] != SHAPES[draft]["vocab_size"]:
            raise ValueError(f"{target} and {draft} have different vocabularies: name another draft")
        self.target, self.draft = (random_model(n, seed, device, dtype) for n, seed in ((target, 11), (draft, 12)))
        self.shared = self.own = 1.0                    # what the two column groups of the output matrices are scaled by

    @torch.no_grad()
    def agree(self, wanted: float, **settings) -> float:
        """Scale the output matrices until sum(min(p, q)), averaged over text that the target writes under these sampling
        settings, is within 0.05 of what is wanted.  -> what a new text measures.  ValueError if it cannot be had."""
        if not 0 < wanted < 1:
            raise ValueError(f"agreement {wanted} must lie between 0 and 1")
        tried = []
        for seed in range(1, 6):
            hidden, (low, high) = self.hidden(self.text(settings, seed)), (-6.0, 6.0)       # log2 of sigma
            for _ in range(16):
                middle = (low + high) / 2
                self.scale(2 ** middle)
                low, high = (middle, high) if self.overlap(hidden, settings) > wanted else (low, middle)
            measured = self.overlap(self.hidden(self.text(settings, seed + 100)), settings)     # the text follows sigma
            tried.append(measured)
            if abs(measured - wanted) <= (0.02 if seed < 5 else 0.05):
                return measured
        raise ValueError(f"agreement {wanted} cannot be had of these shapes and settings: measured {tried}")

    def text(self, settings, seed: int, B=4, T=96) -> Tensor:
        """Tokens (B, T) that the target writes after a few random ones."""
        V, weight = self.target.config.vocab_size, self.target.embed.weight
        prompts = torch.randint(0, V, (B, 4), generator=torch.Generator().manual_seed(seed)).tolist()
        state, sampling = make_state(self.target, B, T, 0), Sampling(B, seed=1000 * seed, device=weight.device, **settings)
        for _ in generate(self.target, NoDraft(), state, sampling, prompts, [T - 4] * B):
            pass
        return state.tokens[:, :T].clone()

    def hidden(self, tokens: Tensor) -> list[Tensor]:
        """What both models' output matrices see after each token: two of (B, T, dim)."""
        B, T = tokens.shape
        caches = [KVCache(m.config, B, T, tokens.device, m.embed.weight.dtype) for m in (self.target, self.draft)]
        return [m(tokens, tokens[:, 0] * 0, cache, T)[0] for m, cache in zip((self.target, self.draft), caches)]

    def overlap(self, hidden: list[Tensor], settings) -> float:
        """The mean over all positions of sum(min(p, q)), a row at a time: V is large."""
        rows = []
        for h, g in zip(*hidden):
            sampling = Sampling(1, device=h.device, **settings)
            p, q = probs(self.target.head(h[None]), sampling), probs(self.draft.head(g[None]), sampling)
            rows.append(torch.minimum(p, q).sum(-1).mean().item())
        return sum(rows) / len(rows)

    def scale(self, sigma: float):
        """Bring both output matrices to (shared + sigma * own) * PEAK / sqrt(1 + sigma**2)."""
        shared = PEAK / (1 + sigma ** 2) ** 0.5
        for model in (self.target, self.draft):
            model.lm_head.weight[:, :SHARED] *= shared / self.shared
            model.lm_head.weight[:, SHARED:] *= sigma * shared / self.own
        self.shared, self.own = shared, sigma * shared
