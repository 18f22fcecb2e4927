"""The network: a Llama-style decoder over a static KV cache.  It knows nothing of drafting.

Letters, here and in every file: B rows, T tokens fed now, V vocabulary, S cache slots, H/G query/key heads,
D head size.
Weights are named and laid out as Hugging Face stores them (half-split RoPE), so converting a checkpoint is renaming.
"""
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

FEW_ROWS = 12   # rows up to which linear() sums them one by one on the CPU; also the sums it keeps going at once
SOME_ROWS = 32  # rows up to which it multiplies them the other way round there
CACHE_LINE = 64 # bytes
CHUNK = 64      # tokens fed at once in prefill: the caches need that much room past the prompt
ROPE_SCALING = {"linear": ["factor"],       # the kinds, and the numbers each needs; "factors" needs a list of them
                "factors": [],
                "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}


@dataclass(frozen=True)
class Config:
    vocab_size: int                     # rows of the embedding, padding rows included
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    context: int                        # positions the model was trained for
    tokens: int = 0                     # ids below this are real tokens, the rest is padding; 0 = all of them
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None    # {"kind": "linear", "factor"}, {"kind": "llama3", "factor", ...},
                                        # {"kind": "factors", "factors": [one for each pair of a head]} or None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False               # RMSNorm over each head of q and k (Qwen3)

    def __post_init__(self):
        object.__setattr__(self, "tokens", self.tokens or self.vocab_size)
        for f in fields(self):      # configs are edited by hand
            check(f.name, getattr(self, f.name), f.type)
        if (scaling := self.rope_scaling) is not None:
            kind = scaling.get("kind")
            if kind not in [*ROPE_SCALING]:         # a list: what JSON holds need not hash
                raise ValueError(f"rope_scaling {kind!r} is not supported: {', '.join(ROPE_SCALING)} or none")
            for name in ROPE_SCALING[kind]:
                check(f"rope_scaling {name}", scaling.get(name), float)
            if kind == "factors":
                check("rope_scaling factors", factors := scaling.get("factors"), list)
                if len(factors) != self.head_dim // 2:
                    raise ValueError(f"rope_scaling has {len(factors)} factors, a head {self.head_dim // 2} pairs")
                for factor in factors:
                    check("a factor of rope_scaling", factor, float)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads: not a multiple")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs")
        if self.tokens > self.vocab_size:
            raise ValueError(f"tokens {self.tokens} must be in 1..vocab_size ({self.vocab_size})")


def check(name: str, value, kind) -> None:
    """ValueError unless value is of this kind (a whole number will do for a float), and positive if it is a number."""
    number = kind in (int, float)
    if not isinstance(value, int | float if kind is float else kind) or number and isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not {getattr(kind, '__name__', kind)}")
    if number and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, not {value}")


class KVCache(nn.Module):
    """Keys and values of one model: 2 * layers buffers (B, G, S, D).  The caller owns it; stale slots are masked, never
    cleared.  Buffers, because torch.compile gives buffers static addresses: anything else written in place would keep
    the whole round out of its CUDA graph."""

    def __init__(self, config: Config, B: int, S: int, device="cpu", dtype=torch.float32):
        super().__init__()
        self.layers = config.layers
        for i in range(config.layers):
            for name in ("k", "v"):
                zeros = torch.zeros(B, config.kv_heads, S, config.head_dim, device=device, dtype=dtype)
                self.register_buffer(f"{name}{i}", zeros, persistent=False)

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"k{i}"), getattr(self, f"v{i}")

    def compact(self, pos: Tensor, path: Tensor):
        """Make a tree a chain: slot pos + path[:, j] moves to slot pos + j.  pos (B,), path (B, K+1)."""
        rows = torch.arange(pos.shape[0], device=pos.device)[:, None]
        source = pos[:, None] + path                                            # (B, K+1)
        target = pos[:, None] + torch.arange(path.shape[1], device=pos.device)
        for buffer in self.buffers():
            kept = buffer[rows, :, source]      # (B, K+1, G, D), read in full before anything is written
            buffer[rows, :, target] = kept


def visible(pos: Tensor, T: int, span: int, sees: Tensor | None = None) -> Tensor:
    """Which of the first `span` slots each of the T fed tokens may attend to: pos (B,) -> bool (B, T, span).
    Token i sits in slot pos + i and sees everything before pos, then, of the fed tokens, those with sees[i], (T, T) or one
    for each row (B, T, T); None is a chain: itself and all before it."""
    ahead = torch.arange(span, device=pos.device) - pos[:, None]                # (B, span): 0 is the first fed token
    if sees is None:
        return ahead[:, None] <= torch.arange(T, device=pos.device)[:, None]
    B, inside = len(pos), (ahead >= 0) & (ahead < T)
    fed = sees.expand(B, T, T).gather(2, ahead.clamp(0, T - 1)[:, None].expand(B, T, span))
    return (ahead < 0)[:, None] | (inside[:, None] & fed)


def inverse_frequencies(config: Config) -> Tensor:
    """RoPE's angle per position for each pair of a head (D/2,), float32, scaled as the checkpoint asks."""
    D = config.head_dim
    freq = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["kind"] == "linear":
        return freq / scaling["factor"]
    if scaling["kind"] == "factors":            # a GGUF of Llama 3.1 has its scaling worked out, for each pair
        return freq / torch.tensor(scaling["factors"], dtype=torch.float32, device="cpu")
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)  # full turns within the old context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * freq + (1 - keep) * freq / scaling["factor"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x (B, *, T, D), half-split layout: pair j is (x[j], x[j + D/2]).  cos, sin (B, 1, T, D/2) float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (B, T, in) -> (B, T, out), in x's dtype; weight (out, in) may have another.  Three ways, by device and rows B * T,
    which are constants of a compiled graph: summed row by row, multiplied the other way round, or F.linear."""
    rows = x[..., 0].numel()
    compiled_for_cpu = torch.compiler.is_compiling() and x.device.type == "cpu"
    if compiled_for_cpu and rows <= FEW_ROWS:
        return summed(x, weight, bias)
    weight, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
    if compiled_for_cpu and rows <= SOME_ROWS and x.dtype == torch.float32:
        # MKL is up to a fifth faster when the few come last, and slower for 14 of them than for 16.
        y = (weight @ F.pad(x.reshape(rows, -1), (0, 0, 0, -rows % 8)).T).T[:rows]
        return (y if bias is None else y + bias).reshape(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def summed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear() of a few rows: one by one, which Inductor fuses into one pass over the weights at the speed of memory, where
    MKL takes twice as long for two rows as for one.  bfloat16 weights are read as such and multiplied in float32."""
    rows = x[..., 0].numel()
    flat = materialized(x.reshape(rows, -1).float())
    # One sum waits for its own last addition.  The weights are read in up to four streams, so that others go on.
    streams = next(n for n in (4, 2, 1) if n * rows <= FEW_ROWS and len(weight) % n == 0)
    y = torch.stack([(part * flat[i]).sum(-1) for i in range(rows) for part in weight.chunk(streams)])
    y = y.view(rows, -1)
    y = materialized(y if bias is None else y + bias).to(x.dtype)
    return y.view(*x.shape[:-1], -1)


def materialized(x: Tensor) -> Tensor:
    """x, written to memory.  Without it Inductor would recompute what x comes from for each output that reads it."""
    x = x.contiguous()                      # as_strided is about storage, and a slice has none of its own
    return x.as_strided(x.shape, x.stride())


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


class Block(nn.Module):
    """One decoder layer: the unit that is compiled once and called for every layer."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.attn_norm = RMSNorm(c.dim, c.norm_eps)
        self.q = Linear(c.dim, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k = Linear(c.dim, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v = Linear(c.dim, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o = Linear(c.heads * c.head_dim, c.dim, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.gate = Linear(c.dim, c.ffn_dim, bias=c.mlp_bias)
        self.up = Linear(c.dim, c.ffn_dim, bias=c.mlp_bias)
        self.down = Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)

    @torch.compiler.nested_compile_region       # lowered once for all layers: 44 s of compiling instead of 125 s
    def forward(self, x, cos, sin, bias, slots, k_cache, v_cache):
        """x (B, T, dim) -> the same; writes its keys and values to slots (B, T) of k_cache, v_cache (B, G, S, D)."""
        x = x + self.attention(self.attn_norm(x), cos, sin, bias, slots, k_cache, v_cache)
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x, cos, sin, bias, slots, k_cache, v_cache):
        B, T, _ = x.shape
        H, G, D = self.c.heads, self.c.kv_heads, self.c.head_dim
        q = self.q(x).view(B, T, H, D)
        k = self.k(x).view(B, T, G, D)
        v = self.v(x).view(B, T, G, D)
        if self.c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(x.transpose(1, 2), cos, sin) for x in (q, k))            # (B, H, T, D), (B, G, T, D)
        rows = torch.arange(B, device=x.device)[:, None]
        k_cache[rows, :, slots] = k.transpose(1, 2)         # integer indices: scatter_ would clone the whole cache
        v_cache[rows, :, slots] = v
        span = bias.shape[-1]                               # slots that can hold anything yet: the rest is not read
        # The H/G query heads that share a key head become rows beside T: no copy of the cache per query head.
        q = q.reshape(B, G, H // G * T, D)
        y = F.scaled_dot_product_attention(q, k_cache[:, :, :span], v_cache[:, :, :span], attn_mask=bias)
        return self.o(y.view(B, H, T, D).transpose(1, 2).reshape(B, T, H * D))


def places(c: Config, freq: Tensor, x: Tensor, pos: Tensor, span: int, depth=None, sees=None):
    """What every layer needs to know of where x (B, T, dim) sits, made once: RoPE's cos and sin (B, 1, T, D/2) float32, what
    attention adds to its scores (B, 1, H/G * T, span), see Block.attention, and slots (B, T)."""
    T = x.shape[1]
    offset = torch.arange(T, device=x.device)
    angle = (pos[:, None] + (offset if depth is None else depth)).float()[:, None, :, None] * freq
    bias = torch.where(visible(pos, T, span, sees), 0.0, -math.inf).to(x.dtype)
    bias = bias[:, None].repeat(1, 1, c.heads // c.kv_heads, 1)
    return angle.cos(), angle.sin(), bias, pos[:, None] + offset


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("freq", inverse_frequencies(config), persistent=False)     # stays float32, see build

    def forward(self, tokens, pos, cache: KVCache, span: int, depth=None, sees=None, taps=()):
        """Feed tokens (B, T) to slots pos..pos+T-1, pos (B,), attending to the first `span` slots.  A chain by default;
        a tree gives each token its depth, (T,) or (B, T), and whom it sees, (T, T) or (B, T, T).
        -> hidden (B, T, dim) for `head`; the outputs of the layers in `taps`, side by side (B, T, len(taps)*dim)."""
        x, tapped = self.embed(tokens), []
        where = places(self.config, self.freq, x, pos, span, depth, sees)
        for i, block in enumerate(self.layers):
            x = block(x, *where, *cache.layer(i))
            if i in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, -1) if tapped else x[..., :0]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, begin: Tensor, end: Tensor, cache: KVCache, taps=()) -> tuple[Tensor, Tensor]:
        """Feed positions [begin, end) of tokens (B, S); begin, end (B,), end > begin.  Chunks of one width, the last
        one padded: what the padding writes lies past `end` and is overwritten before anything can see it.  S must
        leave CHUNK slots past every `end`.
        -> hidden of each row's last token (B, 1, dim), tapped rows from begin on (B, P, len(taps)*dim)."""
        tapped, last = [], None
        for start in range(0, max(1, int((end - begin).max())), CHUNK):
            pos = (begin + start).clamp_max(tokens.shape[1] - CHUNK)    # a row that ended long ago is fed its tail again
            slots = pos[:, None] + torch.arange(CHUNK, device=tokens.device)
            span = int(pos.max()) + CHUNK
            hidden, tap = self(tokens.gather(1, slots), pos, cache, span, taps=taps)
            row = (end - 1 - pos).clamp(0, CHUNK - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            here = hidden.gather(1, row)
            last = here if last is None else torch.where((end > pos)[:, None, None], here, last)
            tapped.append(tap)
        return last, torch.cat(tapped, 1)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden (..., dim) -> logits (..., V) of the real tokens: padding rows of the matrix are never emitted."""
        weight = self.embed.weight if self.lm_head is None else self.lm_head.weight
        return linear(hidden, weight)[..., :self.config.tokens]


def build(config: Config, weights: dict[str, Tensor], device="cpu", dtype=torch.float32) -> Transformer:
    """A Transformer of exactly these weights.  ValueError names every missing, unknown or misshapen one."""
    with torch.device("meta"):
        model = Transformer(config)
    want = {name: tuple(p.shape) for name, p in model.named_parameters()}
    have = {name: tuple(w.shape) for name, w in weights.items()}
    if want != have:
        missing, unknown = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        shapes = [f"{n} is {have[n]}, not {want[n]}" for n in sorted(want.keys() & have.keys()) if want[n] != have[n]]
        raise ValueError(f"weights do not fit the config: missing {missing}, unknown {unknown}, shapes {shapes}")
    model.load_state_dict({n: aligned(w.to(device, dtype)) for n, w in weights.items()}, assign=True)
    model.freq = inverse_frequencies(config).to(device)
    return model.eval().requires_grad_(False)


def aligned(w: Tensor) -> Tensor:
    """w, at the start of a line of the CPU's cache.  A safetensors file is mapped, not read, and its header has any length:
    a vector that lies across two lines costs two reads, which made passes over 1 to 8 tokens 5 to 24 % slower."""
    return w if w.data_ptr() % CACHE_LINE == 0 else w.clone()


def read_config(folder) -> dict:
    """The folder's config.json: {"model": Config's fields, "tokenizer": ..., "chat_template": ...}."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Config)}
        if unknown := sorted(config["model"].keys() - known):
            raise ValueError(f"unknown model fields {unknown}")
        Config(**config["model"])
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} does not exist: convert_weights.py makes such a folder") from None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{path} is not one that convert_weights.py writes ({error})"
        raise ValueError(f"{why}: convert the checkpoint again") from None
    return config


def default_dtype(device) -> torch.dtype:
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def load_model(folder, device="cpu", dtype=None) -> Transformer:
    """The model of a folder written by convert_weights.py; dtype None is float32 on the CPU, bfloat16 elsewhere."""
    config, path = Config(**read_config(folder)["model"]), Path(folder) / "model.safetensors"
    try:
        return build(config, load_file(path), device, dtype or default_dtype(device))
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: {error}. Convert the checkpoint again") from None
