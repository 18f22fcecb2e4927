"""The page of --report FILE.html: the text coloured by who wrote each token, and plots.  One file that loads nothing.

Everything here is strings: it takes what report.py computed and output.Row wrote, and measures nothing.
"""
from html import escape

from plan import expected_tokens, extended

WRITERS = {
    "drafted": "guessed by the drafter, kept by the target",
    "corrected": "drawn by the target where it refused a guess",
    "bonus": "drawn by the target after it kept every guess",
    "plain": "drawn by the target in a round without guesses, or after the prompt",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --page: #fcfcfb; --soft: #5b6570; --line: #ddd; --blue: #2368b4;
  --red: #b4501e; --drafted: #cfe3fb; --corrected: #ffd6b3; --bonus: #c6ecc9; --plain: #ececec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e6; --page: #16181b; --soft: #9aa3ad; --line: #3a3f45;
  --blue: #6fb0f5; --red: #f09a5c; --drafted: #1d4a78; --corrected: #7a4516; --bonus: #1f5a2f; --plain: #3a3d42; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
small, figcaption, th, .prompt { color: var(--soft); } .prompt { white-space: pre-wrap; margin: 1.5rem 0 .4rem; }
.advice { font-size: 1.1rem; border-left: 4px solid var(--blue); padding-left: .8rem; }
th { text-align: left; font-weight: normal; padding-right: 1.5rem; vertical-align: top; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 15px/1.9 ui-monospace, monospace; }
.text span { border-radius: 3px; padding: .15em 0; } .text span:hover { outline: 2px solid var(--blue); }
.key { list-style: none; padding: 0; } .key span { border-radius: 3px; padding: .15em .6em; }
.key li { margin: .3rem 0; }
.drafted { background: var(--drafted); } .bonus { background: var(--bonus); border-bottom: 2px solid; }
.corrected { background: var(--corrected); border-bottom: 2px dashed; } .plain { background: var(--plain); }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; flex: 1 1 26rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); } .one { stroke: var(--soft); } .even { stroke: var(--red); stroke-dasharray: 4 4; }
.curve { fill: none; stroke: var(--blue); stroke-width: 2; } .far { stroke-dasharray: 4 4; } .bar { fill: var(--blue); }
.k { fill: none; stroke: var(--red); stroke-width: 1.5; } .point { fill: var(--red); }
"""


# ---- the text -------------------------------------------------------------------------------------------------------

def writers(log) -> list[tuple[str, int, int]]:
    """Who wrote each id of a row, in which round (0: prefill), and as which token of it: from its output.Row.log."""
    who = [("plain", 0, 1)]
    for number, r in enumerate(log, start=1):
        last = "plain" if not r.tried else "bonus" if r.kept == r.tried else "corrected"
        who += [("drafted" if i <= r.kept else last, number, i) for i in range(1, r.new + 1)]
    return who


def pieces(row) -> list[str]:
    """The text that each id of an output.Row brought: "" where it ends no character, or is the end of the text."""
    ends = [0, *row.lengths[:len(row.ids) - 1], len(row.text)]
    return [row.text[start:end] for start, end in zip(ends, ends[1:])] if row.ids else []


def spans(row, prompt: int) -> str:
    """The text of a row after a prompt of so many tokens, a <span> for each id."""
    out = []
    for at, (id, piece, (who, number, i)) in enumerate(zip(row.ids, pieces(row), writers(row.log))):
        where = f"round {number} of K = {row.log[number - 1].K}, token {i}" if number else "prefill"
        title = f"{who}: id {id}, position {prompt + at}, {where}"
        out.append(f'<span class="{who}" title="{title}">{escape(piece) or "∅"}</span>')
    return f'<div class="text">{"".join(out)}</div>'


def legend(rows) -> str:
    counts = dict.fromkeys(WRITERS, 0)
    for row in rows:
        for _, (who, _, _) in zip(row.ids, writers(row.log)):
            counts[who] += 1
    total = max(sum(counts.values()), 1)
    items = [f'<li><span class="{who}">{who}</span> {counts[who]} ({counts[who] / total:.0%}): {means}</li>'
             for who, means in WRITERS.items()]
    return f'<ul class="key">{"".join(items)}</ul>'


# ---- plots ----------------------------------------------------------------------------------------------------------

class Plot:
    """An SVG whose axes go from (0, 0) to (x, y); ticks are {value: label}, and str() is the figure."""

    def __init__(self, title: str, x: float, y: float, x_ticks: dict, y_ticks: dict, width=460, height=240):
        self.title, self.ends, self.size, self.parts = title, (x, y), (width, height), []
        for value, label in y_ticks.items():
            self.line(0, value, x, value, "grid")
            self.text(0, value, label, "end", -6, 4)
        for value, label in x_ticks.items():
            self.text(value, 0, label, "middle", 0, 16)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is in the picture."""
        (most_x, most_y), (width, height) = self.ends, self.size
        return round(44 + x / most_x * (width - 56), 1), round(height - 24 - y / most_y * (height - 36), 1)

    def line(self, x0, y0, x1, y1, kind):
        (a, b), (c, d) = self.at(x0, y0), self.at(x1, y1)
        self.parts.append(f'<line class="{kind}" x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>')

    def path(self, points, kind):
        through = " ".join("{},{}".format(*self.at(x, y)) for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{through}"/>')

    def bar(self, x0, x1, y, title):
        (a, b), (c, d) = self.at(x0, y), self.at(x1, 0)
        self.parts.append(f'<rect class="bar" x="{a}" y="{b}" width="{c - a:.1f}" height="{d - b:.1f}">'
                          f'<title>{escape(title)}</title></rect>')

    def point(self, x, y, title):
        a, b = self.at(x, y)
        self.parts.append(f'<circle class="point" cx="{a}" cy="{b}" r="5"><title>{escape(title)}</title></circle>')

    def text(self, x, y, text, anchor="start", right=0, down=0):
        a, b = self.at(x, y)
        self.parts.append(f'<text x="{a + right:.1f}" y="{b + down:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def __str__(self):
        width, height = self.size
        return (f'<figure><figcaption>{escape(self.title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
                f'aria-label="{escape(self.title)}">{"".join(self.parts)}</svg></figure>')


def plot_kept(w) -> Plot:
    """The share kept at each position, and the one at which guessing breaks even."""
    shown = [(kept, tried) for kept, tried in w.counts if tried]
    wide = len(shown) * 4 / 3                           # room for the words beside the bars
    plot = Plot("Kept at each position of a round, of guesses whose predecessors were kept", wide, 1.1,
                {i + 0.5: str(i + 1) for i in range(len(shown))}, {share / 4: f"{share * 25} %" for share in range(5)})
    for i, (kept, tried) in enumerate(shown):
        plot.bar(i + 0.15, i + 0.85, kept / tried, f"guess {i + 1}: {kept} of {tried} kept")
        plot.text(i + 0.5, kept / tried, f"{kept / tried:.0%}", "middle", 0, -4)
    if w.even is not None:
        plot.line(0, w.even, wide, w.even, "even")
        plot.text(wide, w.even, f"break-even {w.even:.0%}", "end", 0, -4)
    return plot


def plot_speed(w) -> Plot:
    """Speed-up against K: foretold for every K, measured for those that ran."""
    most, top = max(*w.curve, 4), max([*w.curve.values(), *w.points.values(), 1.0]) * 1.15
    step = next(s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 100.0) if top / s <= 7)
    plot = Plot("Speed-up over plain decoding against K: line foretold (dashed: above any K that ran), dots measured",
                most, top, {K: str(K) for K in range(0, most + 1, 2 if most > 8 else 1)},
                {i * step: f"{i * step:g}" for i in range(int(top / step) + 1)})
    plot.line(0, 1, most, 1, "one")
    ran = max(w.points)
    plot.path([(K, up) for K, up in w.curve.items() if K <= ran], "curve")
    plot.path([(K, up) for K, up in w.curve.items() if K >= ran], "curve far")
    for K, up in w.points.items():
        plot.point(K, up, f"K = {K}: measured {up:.2f}")
        plot.text(K, up, f"{up:.2f}", "start", 8, -6)
    return plot


def plot_rounds(log) -> Plot:
    """Along the text: how many tokens each round brought, and how many guesses it had made."""
    written, most = 1 + sum(r.new for r in log), max((r.K for r in log), default=0) + 1
    every = next(s for s in (4, 8, 16, 32, 64, 128, 256, 1024, 1 << 20) if written / s <= 16)
    plot = Plot("Along the text: tokens of each round (bars, as wide as high) and its K (line)", written, most,
                {x: str(x) for x in range(0, written + 1, every)},
                {y: str(y) for y in range(0, most + 1, 1 + most // 8)}, 940, 150)
    at, steps = 1, []
    for number, r in enumerate(log, start=1):
        if r.new:
            plot.bar(at, at + r.new - 0.2, r.new, f"round {number}: {r.kept} of {r.K} guesses kept, {r.new} tokens")
        steps += [(at, r.K), (at + r.new, r.K)]
        at += r.new
    plot.path(steps, "k")
    return plot


# ---- the page -------------------------------------------------------------------------------------------------------

def page(run, w, facts, texts: list[str], prompts: list[list[int]], rows) -> str:
    """The whole page.  texts: the prompts as they were given; prompts: their ids; rows: the output.Row of each."""
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    written = "".join(f'<p class="prompt">{escape(text)}</p>{spans(row, len(ids))}{plot_rounds(row.log)}'
                      for text, ids, row in zip(texts, prompts, rows))
    K = max(w.seconds)
    formula = f" = {expected_tokens(extended(w.rates, K)):.2f} at K = {K}" if run.chain else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Does it pay? {escape(run.draft)}</title><style>{STYLE}</style></head><body>
<h1>Does it pay?</h1><p><small>{escape(run.draft)}; {escape(run.where)}</small></p>
<p class="advice">{escape(dict(facts)["advice"])}</p>
<h2>Who wrote it</h2><p>A round drafts K guesses; the target scores them in one pass, keeps a prefix and draws one token
more. Point at a token for its id, position and round.</p>{legend(rows)}{written}
<h2>What it costs and brings</h2><div class="plots">{plot_kept(w)}{plot_speed(w)}</div><table>{table}</table>
<p><small>r being the shares kept by position, 1 + r1 + r1 r2 + ...{formula} tokens a round are expected; the speed-up
foretold is that, times the seconds of a plain round, over those of the round. Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318; the formulas are in plan.py.</small></p>
</body></html>
"""
