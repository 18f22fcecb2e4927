"""Does speculation pay, and with which K?  The theory of it, in plain floats.

a   acceptance: the chance that a guess is kept when all before it were (alpha in Leviathan et al. 2023)
K   guesses a round (gamma there)
c   seconds of drafting one guess over seconds of a plain round, one in which nothing is guessed

A round of K guesses writes 1 to K + 1 tokens and costs more than a plain one: K guesses are drafted, and K + 1 tokens
scored instead of one.  It pays where it brings more tokens than it costs plain rounds.  The theorems are those of
Leviathan et al. 2023 (arXiv 2211.17192), who take scoring K + 1 tokens to cost as much as scoring one, as Chen et al.
2023 (arXiv 2302.01318) do for small K.  What it costs where it was measured can be given here.
"""
from statistics import mean


# ---- tokens a round -------------------------------------------------------------------------------------------------

def acceptance(p, q):
    """The chance that a guess drawn from q is kept: tensors p, q (..., V) that sum to 1 -> (...).  It is
    sum(min(p, q)), or 1 - their total variation distance (Theorem 3.5); its mean over the text is a (Corollary 3.6)."""
    return 1 - (p - q).abs().sum(-1) / 2


def expected_tokens(rates: list[float]) -> float:
    """Tokens a round, from the share of guesses kept at each position among those whose predecessors were:
    1 + r1 + r1 r2 + ...  Exact whatever the rates are; the one token more is the correction or the bonus."""
    total = chance = 1.0
    for rate in rates:
        chance *= rate
        total += chance
    return total


def expected_tokens_iid(a: float, K: int) -> float:
    """Tokens a round where every position keeps as well as the first: (1 - a^(K+1)) / (1 - a), Equation 1.  Summed,
    not divided, so that a = 1 gives K + 1."""
    return expected_tokens([a] * K)


def most_tokens(a: float) -> float:
    """What tokens a round tend to as K grows, and the speed-up of guesses that cost nothing (c = 0): 1 / (1 - a)."""
    return 1 / (1 - a) if a < 1 else float("inf")


def extended(rates: list[float], K: int) -> list[float]:
    """The first K of the rates; the last one that is known stands for those that are not.  Of none: nothing is kept."""
    return (rates + (rates[-1:] or [0.0]) * K)[:K]


# ---- against their cost ---------------------------------------------------------------------------------------------

def speed_up(tokens: float, draft: float, verify: float, plain: float) -> float:
    """How many times faster than plain decoding: `tokens` a round cost draft + verify seconds (all guesses; scoring and
    accepting them), and one token costs `plain`.  Speculation wins where this is above 1, that is where the tokens a
    round are more than the plain rounds it costs."""
    return tokens * plain / (draft + verify)


def speed_up_iid(a: float, K: int, c: float) -> float:
    """Theorem 3.8: (1 - a^(K+1)) / ((1 - a) (K c + 1)), scoring K + 1 tokens taken to cost as much as scoring one.
    Give cost_of_a_guess() for c, and it holds exactly where the target's time is a line."""
    return speed_up(expected_tokens_iid(a, K), K * c, 1.0, 1.0)


def target_seconds(n: float, alpha: float, beta: float) -> float:
    """Seconds of one pass of the target over n tokens: a line, alpha being what every pass takes (reading the weights),
    beta what each token adds.  The paper's case is beta = 0."""
    return alpha + n * beta


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(n, seconds) -> alpha, beta of seconds = alpha + n * beta, by least squares; beta is 0 where all n are one."""
    at, height = (mean(x) for x in zip(*points))
    spread = sum((n - at) ** 2 for n, _ in points)
    beta = sum((n - at) * (t - height) for n, t in points) / spread if spread else 0.0
    return height - beta * at, beta


def cost_of_a_guess(draft: float, alpha: float, beta: float) -> float:
    """What one more guess costs in plain rounds: its drafting (`draft` seconds) and its place in the target's pass.
    The win condition: some K pays exactly if a is above this, and if any does, K = 1 does.  For K guesses cost
    1 + K * this and bring at most 1 + K * a tokens.  With beta = 0 it is c, and this is Corollary 3.9: K = 1 gives
    (1 + a) / (1 + c)."""
    return (draft + beta) / target_seconds(1, alpha, beta)


def break_even(K: int, draft: float, verify: float, plain: float) -> float | None:
    """The smallest a (the same at every position) at which a round of K guesses, costing draft + verify seconds, is as
    fast as plain decoding.  None where even K guesses kept of K are not enough."""
    if speed_up(K + 1, draft, verify, plain) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):                         # tokens a round only grow with a: halve to the last bit or so
        middle = (low + high) / 2
        if speed_up(expected_tokens_iid(middle, K), draft, verify, plain) < 1:
            low = middle
        else:
            high = middle
    return high if low else 0.0


def best_k(rates: list[float], seconds: dict[int, float]) -> tuple[int, float]:
    """-> the fastest of the Ks in `seconds` {K: seconds of a round of K guesses}, and its speed-up, from the rates kept
    at each position.  seconds[0] is a plain round; 0 is the answer where nothing beats it, of equals the smallest K."""
    ups = {K: speed_up(expected_tokens(extended(rates, K)), 0.0, t, seconds[0]) for K, t in sorted(seconds.items())}
    best = max(ups, key=ups.get)
    return best, ups[best]
