"""Logits -> distribution -> token.  Every setting is a tensor with one value a row, so changing it recompiles nothing;
all noise is a pure function of (seed, role, position, vocabulary index), so eager, compiled and batched runs agree."""
import torch
from torch import Tensor, nn

DRAFT, ACCEPT, TARGET = 0, 1, 2         # roles of noise: to guess, to judge a guess, to draw the target's token

STARTS = 0x243F6A88, 0x13198A2E, 0x299F31D0           # hexadecimal digits of pi: nothing up our sleeve


class Sampling(nn.Module):
    """One row of settings per row of the batch, in buffers (B,): `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 are off.  `truncates` is a Python constant of the compiled graph: without it nobody pays for sorting."""

    def __init__(self, B, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, device="cpu"):
        super().__init__()
        for name, dtype in (("temperature", torch.float32), ("top_k", torch.int64), ("top_p", torch.float32),
                            ("min_p", torch.float32), ("seed", torch.int64)):
            self.register_buffer(name, torch.zeros(B, dtype=dtype, device=device))
        self.set(temperature, top_k, top_p, min_p, seed)

    def set(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
        """Each setting is one value for all rows or a list with one a row; row i of a single seed gets seed + i.
        Raises ValueError outside temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, 0 <= seed < 2**62, as
        the buffers' float32 and int64 hold them."""
        given = {name: self.per_row(name, value) for name, value in
                 (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p), ("seed", seed))}
        if isinstance(seed, int):
            given["seed"] = [seed + i for i in range(len(given["seed"]))]
        limits = {"temperature": ("0 or more and finite", lambda x: 0 <= x < float("inf")),
                  "top_k": ("0 (off) or more", lambda x: 0 <= x < 2 ** 62),
                  "top_p": ("in (0, 1]", lambda x: 0 < x <= 1), "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
                  "seed": ("at least 0 and below 2**62", lambda x: 0 <= x < 2 ** 62)}
        for name, (words, fits) in limits.items():
            whole = getattr(self, name).dtype == torch.int64
            for x in given[name]:
                if not isinstance(x, int if whole else (int, float)) or not fits(x if whole else torch.tensor(x).item()):
                    raise ValueError(f"{name} {x} must be {words}" + (", a whole number" if whole else ""))
        for name, values in given.items():
            getattr(self, name).copy_(torch.tensor(values))
        self.truncates = any(k > 0 or p < 1 or m > 0 for k, p, m in zip(given["top_k"], given["top_p"], given["min_p"]))

    def per_row(self, name: str, value) -> list:
        B = self.temperature.shape[0]
        values = list(value) if isinstance(value, (list, tuple, range)) else [value] * B
        if len(values) != B:
            raise ValueError(f"{len(values)} values of {name} for {B} rows: give one, or one a row")
        return values


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits (B, T, V) -> the law the settings define (B, T, V) float32: temperature, then top-k, top-p, min-p.
    Temperature 0 is all mass on the lowest index that attains the maximum: a distribution like any other."""
    logits = logits.float()
    V, T0 = logits.shape[-1], sampling.temperature[:, None, None] == 0
    temperature = torch.where(T0, 1.0, sampling.temperature[:, None, None].clamp_min(1e-20))
    # The maximum is taken off before the division: 1e-20 then gives 0 and -inf, never inf - inf.  Written out, because
    # Inductor looks for the maximum of torch.softmax once more: 11 kernels instead of 6, and twice the time on a CPU.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    weights = truncate(scaled, sampling) if sampling.truncates else scaled.exp()
    p = weights / weights.sum(-1, keepdim=True)
    index = torch.arange(V, dtype=torch.int32, device=p.device)     # 32 bits: a vector unit compares eight at once
    greedy = index == logits.argmax(-1, keepdim=True).int()
    return torch.where(T0, greedy.float(), p)


def truncate(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Keep exactly the top_k most likely tokens, of those the smallest set that holds top_p of their mass, of those the
    ones with at least min_p times the best one's probability (nucleus: Holtzman et al. 2020; min-p: Nguyen et al.
    2024).  scaled: logits less their maximum, over temperature (B, T, V) -> weights (B, T, V), not normalised.  Ranked
    by that number, ties by index: before the exponential, which rounds many of them to one weight."""
    V = scaled.shape[-1]
    top_k, top_p, min_p = (getattr(sampling, name)[:, None, None] for name in ("top_k", "top_p", "min_p"))
    k = torch.where(top_k == 0, V, top_k.clamp_max(V)).expand(-1, scaled.shape[1], 1)
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    weights = ranked.exp()
    # Nothing that has one value a row may be fused into this sum: torch 2.11 cannot generate such a scan for CUDA.
    mass = weights.cumsum(-1)
    before = mass - weights                             # mass ahead of each token: 0 for the first, so it stays
    keep = torch.arange(V, device=scaled.device) < k
    keep = keep & ((before < top_p * mass.gather(-1, k - 1)) | (top_p >= 1))    # 1 is off: rounding would drop tails
    keep = keep & (weights >= min_p)
    return torch.zeros_like(weights).scatter(-1, order, weights * keep)


def draw(weights: Tensor, race: Tensor) -> Tensor:
    """Sample from unnormalised weights (..., V) with exponential noise (..., V) -> (...) int64.  The smallest
    race / weight wins with probability weight / sum, and a weight of 0 never wins."""
    return (weights / race).argmax(-1)


# ---- keyed noise ----------------------------------------------------------------------------------------------------

def uniform(seed: Tensor, role: int, position: Tensor) -> Tensor:
    """One float32 in (0, 1) for each element of seed and position (one shape)."""
    return open_unit(bits(seed, role, position, 1)).squeeze(-1)


def exponential(seed: Tensor, role: int, position: Tensor, V: int | Tensor) -> Tensor:
    """Exponential(1) noise: seed, position (...) -> (..., V) float32, positive and finite.  V may list tokens (R,):
    -> (..., R), theirs alone."""
    # log1p keeps full precision where it decides a race, near 0: a token of probability 1e-9 can still win
    return -torch.log1p(-open_unit(bits(seed, role, position, V)))


def open_unit(words: Tensor) -> Tensor:
    """Random int32 words -> float32 in (0, 1), from 31 of their bits.  Rounding could reach 1.0, which would reject a
    draft with p = q."""
    return (((words & 0x7FFFFFFF).float() + 0.5) * 2.0 ** -31).clamp_max(1 - 2.0 ** -24)


def bits(seed: Tensor, role: int, position: Tensor, n: int | Tensor) -> Tensor:
    """seed, position (...) int64 -> (..., n) int32, 32 random bits: a pure function of (seed, role, position, index),
    for each index below n or each listed in n.
    Three chains hash (seed, role, position) into a 96-bit key; three more rounds spread the key over the indices."""
    low, high, position = (x.to(torch.int32) for x in (seed, (seed >> 32) | (role << 30), position))    # seed < 2**62
    k0, k1, k2 = (mix(mix(mix(low ^ start) ^ high) ^ position)[..., None] for start in STARTS)
    index = torch.arange(n, dtype=torch.int32, device=seed.device) if isinstance(n, int) else n.to(torch.int32)
    # The bitwise ^ comes first on purpose: arange times a constant is folded into an index expression on CUDA.
    x = mix(index ^ k0)
    return mix(mix(x + k1) ^ k2)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 words: every input bit flips every output bit about half the time (lowbias32, Wellons).
    In 32 bits, because vector units multiply those at once and 64 bits one by one.  Sums and products wrap; >> copies
    the sign, which the masks take off."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x6C50B47D
    return x ^ (x >> 16 & 0xFFFF)
