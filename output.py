"""What a row has written: its text as it may be shown, why it ended, and its statistics."""
import resource
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch

from tokenizer import Stream


class Wrote(NamedTuple):
    """What one round wrote of one row."""
    K: int                  # guesses
    tried: int              # of them, those that could have been kept: none past the row's end
    kept: int               # the first so many of its new ids; the one after them is the correction or the bonus
    new: int                # ids that are in the text: a stop text can take some back
    seconds: float


class Row:
    """What one row has written: ids, the text they decode to, why it ended, and how its rounds went."""

    def __init__(self, tokenizer, budget: int, K: int, stops=(), clock=time.perf_counter):
        self.tokenizer, self.budget, self.stops = tokenizer, budget, stops
        self.stream, self.ids, self.text, self.lengths, self.shown = Stream(tokenizer), [], "", [], 0
        self.finish = None if budget else "length"
        self.rounds, self.tried, self.kept, self.log = 0, [0] * K, [0] * K, []      # log: a Wrote a round
        self.clock = clock                                  # may stand still while something compiles
        self.start = self.first = self.last = clock()

    def push(self, new: list[int], kept: int, tried: int) -> str:
        """Take a round's new ids, `kept` of its `tried` guesses among them -> the text that can be shown by now."""
        if self.finish or not new:
            return ""
        before, self.last = self.last, self.clock()
        if self.ids:
            self.count(new, kept, tried, self.last - before)
        else:
            self.first = self.last                          # the first token comes from prefill, not from a round
        for id in new:
            self.ids.append(id)
            self.text += self.stream.push([id])
            self.lengths.append(len(self.text))
            if self.stopped():
                return self.show(len(self.text))
        if self.ids[-1] in self.tokenizer.eos:
            return self.end("eos")
        if len(self.ids) == self.budget:
            return self.end("length")
        # what may be the beginning of a stop text waits for the rest of it
        held = max((n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
        return self.show(len(self.text) - held)

    def count(self, new: list[int], kept: int, tried: int, seconds: float):
        """A guess past the row's end could not have been kept: it was not tried."""
        room = len(new) if new[-1] in self.tokenizer.eos else self.budget - len(self.ids)
        self.rounds += 1
        self.log.append(Wrote(tried, min(tried, room), kept, len(new), seconds))
        for i in range(min(tried, room)):
            self.tried[i] += 1
            self.kept[i] += i < kept

    def stopped(self) -> bool:
        """Cut text and ids at the first stop text: the ids kept are the fewest whose text covers what is left."""
        at = min((i for stop in self.stops if (i := self.text.find(stop)) >= 0), default=None)
        if at is not None:
            self.text, self.finish = self.text[:at], "stop"
            self.ids = self.ids[:next((i for i, n in enumerate(self.lengths, 1) if n >= at), 0) if at else 0]
            left = self.after_first()
            for i, wrote in enumerate(self.log):            # its newest rounds wrote less than they brought, or nothing
                self.log[i] = wrote._replace(new=min(wrote.new, left))
                left -= self.log[i].new
        return at is not None

    def end(self, why: str) -> str:
        self.finish, self.text = why, self.text + self.stream.end()
        return self.show(len(self.text))

    def show(self, upto: int) -> str:
        part, self.shown = self.text[self.shown:upto], max(self.shown, upto)
        return part

    def after_first(self) -> int:
        return max(0, len(self.ids) - 1)        # a stop text can take back the first token too

    def shares(self) -> list[float]:
        """Seconds that each token after the first took of its round."""
        return [r.seconds / r.new for r in self.log for _ in range(r.new)]

    def stats(self) -> dict:
        """Latencies by the field's names, in seconds: `ttft`, time to first token; `tpot`, time per output token, whose
        mean, (last - first) / (tokens - 1), is 1 / tokens_per_s; `itl`, inter-token latency, the gaps between arrivals
        as a reader sees them.  A round brings several tokens at once: that is one gap, and each token took its share of
        it; the median and p95 of tpot are of these shares.  In plain decoding tpot and itl are the same."""
        written, seconds = self.after_first(), self.last - self.first
        return {"new_tokens": len(self.ids), "rounds": self.rounds,
                "tokens_per_round": round(written / self.rounds, 3) if self.rounds else None,
                "rounds_per_k": dict(sorted(Counter(r.K for r in self.log).items())),
                "accepted_per_position": [round(k / t, 3) if t else None for k, t in zip(self.kept, self.tried)],
                "ttft_s": round(self.first - self.start, 4),
                "tokens_per_s": round(written / seconds, 2) if seconds > 0 else None,
                **dict(zip(("tpot_median_s", "tpot_p95_s"), median_and_p95(self.shares()))),
                **dict(zip(("itl_median_s", "itl_p95_s"), median_and_p95([r.seconds for r in self.log])))}


def median_and_p95(seconds: list[float]) -> list[float | None]:
    """Interpolated linearly, as numpy.percentile does."""
    if not seconds:
        return [None, None]
    seconds, at = (torch.tensor(x, dtype=torch.float64) for x in (seconds, [0.5, 0.95]))
    return [round(x, 5) for x in seconds.quantile(at).tolist()]


def report(rows: list[Row], prompts: list[list[int]], compile_s: float, device) -> str:
    """The statistics line.  tokens/s is after the first token; rounds are summed over the rows."""
    tokens, after_first, rounds = map(sum, zip(*((len(r.ids), r.after_first(), r.rounds) for r in rows)))
    tried, kept = ([sum(x) for x in zip(*lists)] for lists in ([r.tried for r in rows], [r.kept for r in rows]))
    seconds = max(r.last for r in rows) - min(r.first for r in rows)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else \
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parts = [f"{sum(map(len, prompts))} prompt tokens, first token after {max(r.first - r.start for r in rows):.2f} s",
             f"{tokens} new tokens" + (f", {after_first / seconds:.1f} tokens/s" if seconds > 0 else "")]
    if shares := [share for r in rows for share in r.shares()]:
        parts.append("{:.1f} ms a token (median; p95 {:.1f})".format(*(1000 * s for s in median_and_p95(shares))))
    if rounds:
        parts.append(f"{rounds} rounds of {after_first / rounds:.2f} tokens")
    if any(tried):
        parts.append("kept by position " + " ".join(f"{k / t:.0%}" for k, t in zip(kept, tried) if t))
    return "; ".join(parts + [f"compiled in {compile_s:.1f} s" if compile_s else "eager", f"peak {peak / 1e9:.2f} GB"])


def note(text: str):
    print(text, file=sys.stderr, flush=True)
