"""sample.py: distributions against their definition, noise against statistics."""
import re

import pytest
import torch

import sample
from sample import ACCEPT, DRAFT, TARGET, Sampling, draw, exponential, mix, open_unit, probs, uniform
from test_law import plain_law

ROWS = [dict(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.3, 1.0, 2.0) for k in (0, 1, 3, 50) for p in (1.0, 0.9, 0.3, 1e-6) for m in (0.0, 0.2, 1.0)]


def test_every_setting_against_the_definition():
    """Ties included.  Killed: top-k by threshold (keeps ties); inclusive cumulative mass; min-p of the mass, not of the best;
    renormalising forgotten; top-p before top-k."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(len(ROWS), 2, 40, generator=g).mul(2).round(decimals=1)            # rounding makes ties
    sampling = Sampling(len(ROWS), **{name: [row[name] for row in ROWS] for name in ROWS[0]})
    p = probs(logits, sampling)
    want = torch.tensor([[plain_law(x, **row) for x in two] for row, two in zip(ROWS, logits.tolist())])
    torch.testing.assert_close(p, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(p > 0, want > 0)


def test_temperature_zero_is_the_lowest_argmax():
    """Killed: division by 1e-5 (a tie is shared); NaN from 0/0; top-k of 1 that differs from greedy."""
    logits = torch.tensor([[1.0, 5.0, 5.0, -3.0], [-1e30, -1e30, -1e38, -1e38], [float("-inf"), 2.0, float("-inf"), 2.0]])
    for settings in (dict(temperature=0.0), dict(temperature=0.0, top_p=0.5, top_k=2), dict(temperature=1.3, top_k=1),
                     dict(temperature=1e-30), dict(temperature=1e-45)):
        p = probs(logits[:, None], Sampling(3, **settings))[:, 0]
        if "top_k" in settings or settings["temperature"] == 0:
            assert torch.equal(p, torch.eye(4)[[1, 0, 1]])
        assert torch.isfinite(p).all() and torch.allclose(p.sum(-1), torch.ones(3))


def test_top_p_of_one_keeps_the_tail():
    """Killed: a threshold at 1.0, which rounding makes drop the least likely tokens."""
    logits = torch.linspace(0, -60, 5000)[None, None]
    assert (probs(logits, Sampling(1, temperature=1.0, top_p=1.0, top_k=4999)) > 0).sum() == 4999


@pytest.mark.parametrize("name, value", [("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")),
                                         ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01), ("top_p", float("nan")),
                                         ("min_p", -0.1), ("min_p", 1.1), ("seed", -1), ("seed", 2 ** 62), ("top_p", 1e-50),
                                         ("temperature", 1e39), ("top_k", 2.5), ("seed", 0.5)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} {value} must")):
        Sampling(2, **{name: value})


def test_wrong_number_of_settings_is_refused():
    with pytest.raises(ValueError, match="3 values of top_k for 2 rows"):
        Sampling(2, top_k=[1, 2, 3])


def test_changed_settings_keep_their_buffers():
    """A compiled graph holds their addresses.  Killed: set() that makes new tensors."""
    sampling = Sampling(2)
    before = {name: buffer.data_ptr() for name, buffer in sampling.named_buffers()}
    sampling.set(temperature=[1.0, 0.0], top_p=0.9, seed=4)
    assert before == {name: buffer.data_ptr() for name, buffer in sampling.named_buffers()}
    assert sampling.seed.tolist() == [4, 5] and sampling.truncates


def test_draw_follows_the_weights():
    """Killed: argmin; log of the weights; a weight of 0 that wins."""
    weights = torch.tensor([0.0, 1.0, 3.0, 1e-4, 0.0, 4.0])
    n = 400_000
    seed = torch.arange(n)
    tokens = draw(weights.expand(n, 6), exponential(seed, DRAFT, torch.full_like(seed, 9), 6))
    law, counts = weights / weights.sum(), torch.bincount(tokens, minlength=6)
    assert counts[0] == counts[4] == 0
    assert (((counts - n * law).abs()) <= 5 * (n * law).sqrt()).all()


def test_rare_tokens_are_drawn_as_often_as_they_should(monkeypatch):
    """A token of probability 1e-9 wins when its race is below about 1e-9: noise must be exact there, not only on average.
    Killed: 24-bit uniforms; -log(u), which is a multiple of 6e-8 near 0."""
    words = torch.cat((torch.arange(1000), torch.logspace(3, 9, 1000).long())).int()
    exact = -torch.log1p(-(words.double() + 0.5) / 2 ** 31)
    monkeypatch.setattr(sample, "bits", lambda seed, role, position, n: words)
    race = sample.exponential(None, TARGET, None, len(words)).double()
    assert ((race / exact - 1).abs() < 1e-6).all()


# ---- noise ----------------------------------------------------------------------------------------------------------

def bits(*key) -> torch.Tensor:
    """sample.bits as numbers in [0, 2**32)."""
    return sample.bits(*key).long() & 0xFFFFFFFF


def chi_square_p(counts) -> float:
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def test_noise_is_uniform_and_neighbours_are_independent():
    """Bytes of a million words, and pairs of neighbours along index, position, seed and role.  Killed: mix() without
    its shifts; the role added to the seed (seed + 1 would share the noise of the next row)."""
    i = torch.arange(1 << 20)
    streams = {"index": bits(torch.tensor([3]), DRAFT, torch.tensor([7]), 1 << 20)[0],
               "position": bits(i * 0, DRAFT, i, 1)[:, 0], "seed": bits(i, DRAFT, i * 0 + 7, 3)[:, 2]}
    for name, words in streams.items():
        assert words.unique().numel() > 0.999 * len(words)
        for shift in (0, 8, 16, 24):
            assert chi_square_p(torch.bincount(words >> shift & 255, minlength=256)) > 1e-4, (name, shift)
        for lag in (1, 2, 64):
            pairs = (words[:-lag] >> 28) * 16 + (words[lag:] >> 28)
            assert chi_square_p(torch.bincount(pairs[::2], minlength=256)) > 1e-4, (name, lag)
    roles = [bits(i, role, i * 0 + 7, 1)[:, 0] for role in (DRAFT, ACCEPT, TARGET)]
    for a in range(3):
        for lag in (1, 2):                                                      # seed + role must not be the key
            assert (roles[a - 1][lag:] == roles[a][:-lag]).sum() < 5 and (roles[a - 1][:-lag] == roles[a][lag:]).sum() < 5
        assert chi_square_p(torch.bincount((roles[a] >> 28) * 16 + (roles[a - 1] >> 28), minlength=256)) > 1e-4


def test_every_key_bit_flips_half_the_noise():
    """Killed: dropping the high half of the seed; position xored into the index."""
    n = 1 << 14
    g = torch.Generator().manual_seed(0)
    seed, pos = torch.randint(0, 1 << 61, (n,), generator=g), torch.randint(0, 1 << 17, (n,), generator=g)
    words = bits(seed, DRAFT, pos, 2)[:, 1]
    flips = [bits(seed ^ (1 << b), DRAFT, pos, 2)[:, 1] for b in range(61)] + \
            [bits(seed, DRAFT, pos ^ (1 << b), 2)[:, 1] for b in range(17)]
    for other in flips:
        share = torch.stack([(words ^ other) >> b & 1 for b in range(32)]).float().mean(1)
        assert (share - 0.5).abs().max() < 0.025


def test_uniforms_are_inside_the_open_interval():
    """u = 0 accepts the impossible, u = 1 rejects p = q.  Killed: (word + 0.5) * 2**-31 without the clamp rounds to 1."""
    u = open_unit(torch.tensor([0, 1, -1, (1 << 31) - 1, (1 << 31) - 100, -(1 << 31), 1 << 30], dtype=torch.int32))
    assert (u > 0).all() and (u < 1).all() and u[6] == 0.5
    race = -torch.log1p(-u)
    assert (race > 0).all() and torch.isfinite(race).all()


def test_mix_is_a_bijection_of_low_words():
    assert mix(torch.arange(1 << 20, dtype=torch.int32)).unique().numel() == 1 << 20


def bits_by_hand(seed: int, role: int, position: int, n: int) -> list[int]:
    """The definition in unbounded integers, as signed 32-bit words."""
    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2 ** 32
        x = (x ^ x >> 15) * 0x6C50B47D % 2 ** 32
        return x ^ x >> 16
    low, high = seed % 2 ** 32, seed >> 32 | role << 30
    k0, k1, k2 = (mix(mix(mix(low ^ start) ^ high) ^ position) for start in sample.STARTS)
    words = [mix(mix((mix(i ^ k0) + k1) % 2 ** 32) ^ k2) for i in range(n)]
    return [x - 2 ** 32 if x >= 2 ** 31 else x for x in words]


@pytest.mark.parametrize("n", [1, 1027])
def test_noise_wraps_alike_in_eager_and_compiled_code(n):
    """Whole vectors, their tails and single numbers.  Killed: a mask left out after >>; a product kept in 64 bits."""
    compiled = torch.compile(sample.bits, fullgraph=True, dynamic=False)
    for seed, position in [(0, 0), (2 ** 62 - 1, 2 ** 20), (2 ** 31, 77), (0x9E3779B97F4A7C15 >> 2, 3)]:
        given = torch.tensor([seed]), TARGET, torch.tensor([position]), n
        want = torch.tensor([bits_by_hand(seed, TARGET, position, n)])
        assert torch.equal(sample.bits(*given).long(), want)
        with torch._inductor.config.patch(realize_opcount_threshold=8):         # see compile_round
            assert torch.equal(compiled(*given).long(), want)


def test_noise_of_one_place_is_one_value():
    """The same (seed, role, position) in any shape, alone or in a batch."""
    seed, pos = torch.tensor([5, 6]), torch.tensor([[1, 2, 3]])
    whole = exponential(seed[:, None].expand(2, 3), TARGET, pos.expand(2, 3), 50)
    assert torch.equal(whole[1, 2], exponential(seed[1:], TARGET, pos[0, 2:], 50)[0])
    assert torch.equal(whole[..., :7], exponential(seed[:, None].expand(2, 3), TARGET, pos.expand(2, 3), 7))
    assert uniform(seed, ACCEPT, pos[0, :2]).shape == (2,)
