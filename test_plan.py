"""plan.py: the theory against the numbers that are printed in the papers, against simulation, and against itself."""
import random

import pytest
import torch

from plan import (acceptance, best_k, break_even, cost_of_a_guess, expected_tokens, expected_tokens_iid, extended,
                  fit_line, most_tokens, speed_up, speed_up_iid, target_seconds)
from speculate import accept_sampled


def simulate(rates: list[float], rounds: int, seed: int) -> list[int]:
    """Tokens of each of so many rounds: guesses are kept until one is not, and one more token follows."""
    draw = random.Random(seed).random
    return [1 + next((i for i, rate in enumerate(rates) if draw() >= rate), len(rates)) for _ in range(rounds)]


@pytest.mark.parametrize("a, K, tokens", [
    (0.8, 4, 3.36), (0.7, 5, 2.94), (0.85, 5, 4.15), (1.0, 4, 5.0), (0.0, 4, 1.0), (0.5, 0, 1.0)])
def test_tokens_a_round(a, K, tokens):
    """Kills: the sum without its last term (0.8 and 4: 2.95) or the token that is always written; 0 / 0 at a = 1."""
    assert expected_tokens_iid(a, K) == pytest.approx(tokens, abs=0.005)
    if a < 1:
        assert expected_tokens_iid(a, K) == pytest.approx((1 - a ** (K + 1)) / (1 - a))


@pytest.mark.parametrize("a, K, faster", [
    (0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)])
def test_table_1_of_leviathan(a, K, faster):
    """The speed column, which takes guesses to be free.  Kills: a^K for a^(K+1)."""
    assert speed_up_iid(a, K, c=0.0) == pytest.approx(faster, abs=0.005)


def test_the_limit_of_many_guesses():
    """Kills: a / (1 - a), the guesses without the token after them; a division at a = 1."""
    assert most_tokens(0.75) == 4.0 and most_tokens(0.0) == 1.0 and most_tokens(1.0) == float("inf")
    assert expected_tokens_iid(0.75, 200) == pytest.approx(4.0) and speed_up_iid(0.75, 200, 0.0) == pytest.approx(4.0)


def test_position_dependent_acceptance_against_simulation():
    """Kills: every position taken for the first one or for their mean; rates added instead of multiplied."""
    for seed, rates in enumerate(([0.9, 0.6, 0.3, 0.8], [0.2, 0.9, 0.9], [0.5], [])):
        tokens = simulate(rates, 100_000, seed)
        mean = sum(tokens) / len(tokens)
        error = (sum((t - mean) ** 2 for t in tokens) / len(tokens) ** 2) ** 0.5
        assert abs(expected_tokens(rates) - mean) <= 5 * error, rates


def test_acceptance_is_what_the_round_keeps():
    """Of 20,000 guesses drawn from q.  Kills: the whole absolute difference for half of it; sum(p * q)."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.3, 0.2, 0.4])
    assert acceptance(p, q).item() == pytest.approx(torch.minimum(p, q).sum().item()) == pytest.approx(0.6)
    B, pos = 20_000, torch.zeros(20_000, dtype=torch.int64)
    guesses = torch.multinomial(q.expand(B, 4), 1, replacement=True, generator=torch.Generator().manual_seed(0))
    n, _ = accept_sampled(guesses, q.expand(B, 1, 4), p.expand(B, 2, 4), torch.arange(B), pos)
    assert abs(n.float().mean().item() - 0.6) <= 5 * (0.24 / B) ** 0.5
    rows = torch.stack((p, q)), torch.stack((q, q))
    assert acceptance(*rows).tolist() == pytest.approx([0.6, 1.0])


def test_speed_up_against_a_simulated_clock():
    """Rounds written until a text of 50,000 tokens is done.  Kills: drafting not counted; draft + verify over plain."""
    rates, draft, verify, plain = [0.7, 0.5, 0.4], 2.0, 13.0, 10.0
    tokens = simulate(rates, 50_000, 7)
    measured = sum(tokens) * plain / (len(tokens) * (draft + verify))
    assert speed_up(expected_tokens(rates), draft, verify, plain) == pytest.approx(measured, rel=0.01)
    assert speed_up(2.5, 2.0, 13.0, 10.0) == pytest.approx(2.5 * 10 / 15)


def test_the_theorem_with_the_cost_of_a_guess_is_the_measured_line():
    """Theorem 3.8 and the line are one formula.  Kills: c counted once, not K times; the K + 1 tokens scored as K."""
    alpha, beta, draft = 30.0, 4.0, 3.0
    c = cost_of_a_guess(draft, alpha, beta)
    assert c == pytest.approx(7 / 34) and cost_of_a_guess(3.0, 30.0, 0.0) == pytest.approx(0.1)
    for a, K in ((0.3, 1), (0.6, 3), (0.9, 8), (1.0, 4)):
        verify, plain = target_seconds(K + 1, alpha, beta), target_seconds(1, alpha, beta)
        assert speed_up_iid(a, K, c) == pytest.approx(speed_up(expected_tokens_iid(a, K), K * draft, verify, plain))


def test_the_win_condition():
    """Some K wins exactly where a is above the cost of a guess, and then K = 1 by (1 + a) / (1 + c) (Corollary 3.9).
    Kills: beta left out of the cost; the cost of a guess over alpha alone."""
    for draft, alpha, beta in ((3.0, 30.0, 0.0), (3.0, 30.0, 4.0), (0.0, 20.0, 10.0), (19.0, 20.0, 4.0)):
        c, plain = cost_of_a_guess(draft, alpha, beta), target_seconds(1, alpha, beta)
        for a in (c - 0.01, c + 0.01):
            rounds = {K: K * draft + target_seconds(K + 1, alpha, beta) for K in range(1, 17)}
            ups = [speed_up(expected_tokens_iid(a, K), 0.0, t, plain) for K, t in rounds.items()]
            assert (max(ups) > 1) == (ups[0] > 1) == (a > c), (draft, alpha, beta, a)
            assert ups[0] == pytest.approx((1 + a) / (1 + c))
    assert cost_of_a_guess(25.0, 20.0, 4.0) > 1                 # no acceptance is enough


def test_break_even():
    """Kills: bisection that keeps the wrong half; K + 1 guesses; a number where none exists, None at the very edge."""
    assert break_even(1, 1.0, 12.0, 10.0) == pytest.approx(0.3)
    assert break_even(2, 0.0, 17.5, 10.0) == pytest.approx(0.5)                             # 1 + a + a^2 = 1.75
    for K, draft, verify in ((1, 2.0, 11.0), (4, 8.0, 15.0), (8, 3.0, 20.0)):
        a = break_even(K, draft, verify, 10.0)
        assert speed_up(expected_tokens_iid(a, K), draft, verify, 10.0) == pytest.approx(1.0)
    assert break_even(3, 25.0, 16.0, 10.0) is None and break_even(3, 24.0, 16.0, 10.0) == pytest.approx(1.0)
    assert break_even(3, 0.0, 9.0, 10.0) == 0.0             # measured faster than a plain round: all a win


def test_fit_line():
    """Kills: alpha taken at the mean; the slope upside down; 0 / 0 for one n."""
    assert fit_line([(n, 3.0 + 2.0 * n) for n in (1, 2, 5, 9)]) == pytest.approx((3.0, 2.0))
    assert fit_line([(1, 10.0), (2, 14.0), (3, 12.0)]) == pytest.approx((10.0, 1.0))
    assert fit_line([(4, 10.0), (4, 12.0)]) == (11.0, 0.0)


def test_best_k():
    """Kills: rates past those measured taken for 0; off never chosen; the largest of equals; a K not offered."""
    seconds = {K: 10.0 + 2.0 * K for K in (0, 1, 2, 4, 8, 16)}
    by_hand = {K: expected_tokens_iid(0.9, K) * 10.0 / seconds[K] for K in seconds}
    assert best_k([0.9], seconds) == (8, pytest.approx(by_hand[8])) and by_hand[8] == max(by_hand.values())
    assert best_k([0.9, 0.5], seconds) == (2, pytest.approx((1 + 0.9 + 0.45) * 10 / 14))
    assert best_k([0.1, 0.9, 0.9], seconds) == (0, 1.0) and best_k([], seconds) == (0, 1.0)
    assert best_k([0.5, 0.0], {2: 15.0, 1: 15.0, 0: 10.0}) == (0, 1.0)
    assert best_k([1.0, 0.5], {2: 25.0, 1: 20.0, 0: 10.0})[0] == 0 and best_k([1.0], {0: 10.0, 4: 10.0})[0] == 4


def test_extended():
    assert extended([0.9, 0.5], 4) == [0.9, 0.5, 0.5, 0.5] and extended([0.9, 0.5], 1) == [0.9]
    assert extended([], 2) == [0.0, 0.0] and extended([0.9], 0) == []
