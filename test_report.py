"""--report: who wrote each token, what follows from what was measured, the page.  Eager; tiny models, made-up times."""
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch

import report
import report_page
from conftest import TARGET, V, greedy_alone, prompts_for
from drafts import NgramDraft
from generate import generate, make_state
from output import Row, Wrote
from plan import break_even, cost_of_a_guess, expected_tokens, extended, fit_line, speed_up
from sample import Sampling
from speculate import Draft
from test_generate import models, one_thread, run         # noqa: F401    fixtures: whole commands on tiny models


class Tokens:
    """Id i is a letter, but for "<" and "&", a newline, half a character, and the end."""
    eos, pieces = (V - 1,), {0: b"<", 1: b"&", 2: b"\n", 3: "é".encode()[:1], 4: "é".encode()[1:], V - 1: b""}

    def visible_bytes(self, ids):
        return b"".join(self.pieces.get(id, bytes([97 + id % 26])) for id in ids)


class Scripted:
    """Guesses the next tokens of a known text: in each round the first so many rightly as the script says."""
    taps = ()

    def __init__(self, text, script, K):
        self.text, self.script, self.nodes, self.round = text, script, K, 0

    def start(self, state, begin, hidden): pass

    def propose(self, state, sampling):
        right = self.script[min(self.round, len(self.script) - 1)]
        ahead = self.text[state.pos.item() + 1:][:self.nodes]
        ahead += [0] * (self.nodes - len(ahead))
        return Draft(torch.tensor([[id if i < right else (id + 1) % V for i, id in enumerate(ahead)]]))

    def observe(self, *seen):
        self.round += 1


def scripted_row(script, K, new, stops=(), clock=None) -> tuple[Row, list[int]]:
    """-> the row that a scripted drafter and the tiny target write, and the greedy text it must be."""
    prompt = prompts_for(1)[0]
    text = greedy_alone(prompt, new + K + 2)
    state = make_state(TARGET, 1, len(prompt) + new, K)
    row = Row(Tokens(), new, K, stops, *([clock] if clock else []))
    drafter = Scripted(prompt + text, script, K)
    for (ids,), (kept,), (tried,) in generate(TARGET, drafter, state, Sampling(1), [prompt], [new]):
        row.push(ids, kept, tried)
    return row, text[:new]


# ---- who wrote it

def test_every_token_has_its_writer():
    """Kills: the bonus called a correction; the first token taken for a round's; kept - 1 drafted; rounds counted from
    0; a guess past the limit counted as refused (the last round has room for one)."""
    ticks = iter(range(100))
    row, text = scripted_row([3, 0, 1, 3, 2, 3], K=3, new=16, clock=lambda: float(next(ticks)))
    assert row.ids == text
    assert row.log == [(3, 3, 3, 4, 1.0), (3, 3, 0, 1, 1.0), (3, 3, 1, 2, 1.0), (3, 3, 3, 4, 1.0), (3, 3, 2, 3, 1.0),
                       (3, 1, 1, 1, 1.0)]
    drafted, corrected, bonus = "drafted", "corrected", "bonus"
    rounds = [["plain"], [drafted] * 3 + [bonus], [corrected], [drafted, corrected], [drafted] * 3 + [bonus],
              [drafted, drafted, corrected], [drafted]]
    who = [(w, number, i) for number, some in enumerate(rounds) for i, w in enumerate(some, start=1)]
    assert report_page.writers(row.log) == who
    assert report.kept_by_position(row.log) == [(5, 6), (3, 4), (2, 3)]


def test_rounds_without_guesses_are_plain():
    """As -k auto and --draft none run them.  Kills: 0 of 0 kept taken for a bonus; 0 / 0 kept."""
    row = Row(Tokens(), 9, 3)
    for new, kept, tried in (([5], 0, 0), ([6], 0, 0), ([7, 8], 1, 2), ([9, 10], 1, 1)):
        row.push(new, kept, tried)
    who = [w for w, _, _ in report_page.writers(row.log)]
    assert who == ["plain", "plain", "drafted", "corrected", "drafted", "bonus"]
    assert [r.K for r in row.log] == [0, 2, 1] and report.kept_by_position(row.log) == [(2, 2), (0, 1)]


@pytest.mark.parametrize("stop, ids, new", [
    ("h", 2, [1, 0]), ("ij", 3, [2, 0]), ("f", 0, [0, 0]), ("k", 5, [3, 1]), ("x", 6, [3, 2])])
def test_a_stop_text_cuts_the_log_with_the_ids(stop, ids, new):
    """f | ghi | jk written.  Kills: the log left as it was; only its newest round cut; the first id taken for a
    round's."""
    row = Row(Tokens(), 6, 3, [stop])
    for some in ([5], [6, 7, 8], [9, 10]):
        row.push(some, len(some) - 1, 3)
    assert (len(row.ids), [r.new for r in row.log]) == (ids, new[:len(row.log)])
    assert len(list(zip(row.ids, report_page.writers(row.log)))) == len(row.ids) == row.after_first() + (ids > 0)
    assert [r.kept for r in row.log] == [2, 1][:len(row.log)], "what the target kept it kept"


def test_pieces_are_the_text():
    """Kills: a stop text shown after all; half a character given to the id that only begins it; text held back lost;
    an id without text that nobody can point at."""
    for stops, ids, wanted in (((), [0, 3, 4, 2, 5], ["<", "", "é", "\n", "f"]), (("f",), [7, 8, 5], ["h", "i"]),
                               ((), [6, 3], ["g", "\ufffd"]), ((), [6, V - 1], ["g", ""]), (("g",), [6], [])):
        row = Row(Tokens(), len(ids), 1, stops)
        row.push(ids[:1], 0, 0)
        row.push(ids[1:], 0, 1)
        assert report_page.pieces(row) == wanted and "".join(wanted) == row.text
        assert report_page.spans(row, 9).count(">∅</span>") == wanted.count("")


# ---- what follows

def made_up(rounds, plain=(10.0,) * 9, guess=1.0, **changes) -> report.Run:
    """rounds: (K, kept, seconds), all guesses tried, in two rows."""
    rounds = [Wrote(K, K, kept, kept + 1, seconds) for K, kept, seconds in rounds]
    about = {"draft": "eagle", "where": "here", "plain": [*plain], "guess": guess, "chain": True, "lookup": [],
             "rows": [rounds[::2], rounds[1::2]]}
    return report.Run(**about | changes)


def test_the_numbers_are_those_of_plan():
    """Rows are pooled.  Kills: rates of all guesses, not of those whose predecessors were kept; K tokens scored, not
    K + 1; drafting left in the scoring; the mean for the median of a round's seconds; one row only."""
    kept = 2, 2, 1, 0, 2, 1, 0, 2, 2, 2, 1, 2, 2, 2
    run = made_up([(2, n, 15.0) for n in kept] + [(2, 0, 40.0)])
    w, rates = report.weigh(run), [12 / 15, 9 / 12]
    assert w.counts == [(12, 15), (9, 12)] and w.rates == rates and w.tokens == pytest.approx(expected_tokens(rates))
    assert w.seconds == {2: 15.0} and w.plain == 10.0 and w.c == 0.1
    assert w.line == fit_line([(1, 10.0), (3, 13.0)]) == pytest.approx((8.5, 1.5))
    assert w.cost == pytest.approx(cost_of_a_guess(1.0, 8.5, 1.5))
    assert w.predicted == pytest.approx(speed_up(expected_tokens(rates), 2.0, 13.0, 10.0)) == pytest.approx(w.curve[2])
    assert w.measured == pytest.approx(36 / 250 * 10) == w.points[2]
    for K in (1, 5, 16):
        assert w.curve[K] == pytest.approx(speed_up(expected_tokens(extended(rates, K)), K, 8.5 + 1.5 * (K + 1), 10.0))
    assert w.best == max(w.curve.items(), key=lambda x: x[1])
    assert w.even == pytest.approx(break_even(2, 2.0, 13.0, 10.0))
    assert 1 + w.alike + w.alike ** 2 == pytest.approx(expected_tokens(rates))


def test_several_ks_in_one_run():
    """-k auto: each K has its own seconds and measured point.  Kills: predicted from one K; the rounds without guesses
    left out of the predicted; a point for all rounds."""
    run = made_up([(0, 0, 10.0)] * 4 + [(1, 1, 12.0)] * 6 + [(1, 0, 12.0)] * 2 + [(3, 3, 16.0)] * 8)
    w = report.weigh(run)
    assert w.seconds == {0: 10.0, 1: 12.0, 3: 16.0}
    assert w.points == pytest.approx({0: 1.0, 1: 14 / 96 * 10, 3: 4 / 16 * 10})
    rates = [14 / 16, 1.0, 1.0]
    tokens, seconds = 4 * 1 + 8 * (1 + 14 / 16) + 8 * expected_tokens(rates), 4 * 10 + 8 * 12 + 8 * 16
    assert w.rates == rates and w.predicted == pytest.approx(tokens / seconds * 10)


def test_a_few_tries_are_no_rate():
    """Kills: K = 16 advised because a third guess was kept once of once."""
    w = report.weigh(made_up([(3, 0, 14.0)] * 6 + [(3, 1, 14.0)] * 8 + [(3, 3, 14.0)]))
    assert w.counts == [(9, 15), (1, 9), (1, 1)] and w.rates == [9 / 15, 1 / 9] and w.best[0] < 3
    assert report.weigh(made_up([(3, 1, 14.0)] * 2)).rates == [1.0]


def test_noise_never_makes_scoring_cheaper():
    """Kills: a line that falls, by which K = 16 would be free."""
    w = report.weigh(made_up([(2, 1, 9.0)] * 9))
    assert w.line == (10.0, 0.0) and w.curve[16] < w.curve[1]


def test_a_tree_scores_all_of_itself_whatever_it_tries():
    """As lookahead, which often knows nothing to try.  Kills: its rounds without guesses taken for plain ones; tokens a
    round of the rounds that tried something; another K foretold."""
    log = [Wrote(0, 0, 0, 1, 20.0)] * 6 + [Wrote(2, 2, 2, 3, 20.0)] * 4
    w = report.weigh(made_up([], chain=False, rows=[report.whole(log, 2, [2] * 10)]))
    assert w.seconds == {2: 20.0} and w.tokens == 1.8 and w.best == (0, 1.0)
    assert w.curve == pytest.approx({0: 1.0, 2: 0.9})
    assert w.predicted == w.measured == pytest.approx(0.9)


def test_plain_rounds_between_those_of_a_tree_are_plain():
    """-k auto.  Kills: what a plain round took and brought counted as a tree's."""
    log = [Wrote(0, 0, 0, 1, 10.0)] * 6 + [Wrote(0, 0, 0, 1, 25.0)] * 2 + [Wrote(2, 2, 1, 2, 25.0)] * 2
    run = made_up([], chain=False, rows=[report.whole(log, 2, [0] * 6 + [2] * 4)])
    w = report.weigh(run)
    assert w.seconds == {0: 10.0, 2: 25.0} and w.curve == pytest.approx({0: 1.0, 2: 1.5 / 2.5})
    assert w.tokens == 1.2 and w.predicted == w.measured == pytest.approx(12 / 160 * 10)
    assert "a round costs 2.50 plain rounds and brings 1.50 tokens" in report.advice(run, w)
    assert dict(report.facts(run, w))["round of K = 2"] == "25000.0 ms, median of 4 rounds"


def test_a_k_that_hardly_ran_does_not_bend_the_line():
    """A draft model near its context's end guesses less in the same graph.  Kills: each K a point, however seldom."""
    run = made_up([(4, 4, 20.0)] * 20 + [(3, 3, 20.0), (2, 2, 20.0), (1, 1, 20.0)])
    assert report.weigh(run).line == pytest.approx(fit_line([(1, 10.0), (5, 16.0)]))


@pytest.mark.parametrize("rounds, changes, says", [
    ([(3, 3, 20.0)] * 20, {}, "K = 16 (-k 16): "),
    ([(4, 1, 20.0)] * 20, {}, "K = 1 (-k 1): "),
    ([(2, 1, 14.0)] * 10 + [(2, 2, 14.0)] * 10 + [(2, 0, 14.0)] * 5, {"chain": False}, "leave it as it is: 1.57 times"),
    ([(1, 0, 15.3)] * 12 + [(1, 1, 15.3)] * 13, {"guess": 4.1}, "off (--draft none): of a plain round, drafting a "
     "guess costs 41% and scoring it 12%, and 52% of the first guesses are kept"),
    ([(2, 2, 14.0)] * 8 + [(2, 2, 140.0)] * 7, {"chain": False}, "too close to say: 0.41 times plain"),
    ([(2, 0, 25.0)] * 9, {"chain": False}, "a round costs 2.50 plain rounds and brings 1.00 tokens"),
    ([(2, 0, 15.0)] * 9, {"lookup": [Wrote(16, 16, 16, 17, 0.0)] * 9}, "use ngram, -k 16: "),
    ([(2, 0, 15.0)] * 9, {"lookup": [Wrote(16, 16, 16, 17, 0.0)] * 9, "draft": "ngram"}, "off (--draft none)"),
    ([(2, 0, 15.0)] * 9, {"lookup": [Wrote(16, 16, 0, 1, 0.0)] * 9}, "off (--draft none)")])
def test_advice(rounds, changes, says):
    """Kills: each case left out; off never advised; ngram advised to one who used it, or where it keeps nothing."""
    run = made_up(rounds, **changes)
    assert says in report.advice(run, report.weigh(run))


# ---- measuring

@pytest.mark.parametrize("K", [1, 4])
def test_looked_up_is_what_ngram_writes(K):
    """On a text that loops and ends within a round.  Kills: a round that begins at the wrong token; guesses past the
    end; the bonus left out."""
    prompt = [5, 6, 7, 8, 9, 5, 6]
    text = greedy_alone(prompt, 40)
    state, drafter = make_state(TARGET, 1, 47, K), NgramDraft(K)
    row = Row(Tokens(), 40, K)
    for (ids,), (kept,), (tried,) in generate(TARGET, drafter, state, Sampling(1), [prompt], [40]):
        row.push(ids, kept, tried)
    assert row.ids == text and any(r.kept for r in row.log)
    assert report.looked_up(prompt, text, K) == [r._replace(seconds=0.0) for r in row.log]


def test_the_drafter_alone_is_timed():
    """Kills: observe left out, or propose; the compiler not asked; text committed."""
    seen, state = [], make_state(TARGET, 1, 40, 2)
    state.pos.fill_(9)
    drafter = SimpleNamespace(taps=(1,), propose=lambda s, _: seen.append("propose") or Draft(s.tokens[:, :2].clone()),
                              observe=lambda s, out, n, hidden, p: seen.append((out.shape, hidden.shape, p.shape)))

    def compiled(function):
        seen.append("compiled")
        return function
    assert report.drafting_seconds(TARGET, drafter, state, Sampling(1), compiled, turns=2) > 0
    shapes = (1, 3), (1, 3, TARGET.config.dim), (1, 3, V)
    assert seen == ["propose", "compiled"] + ["propose", shapes] * 5 and state.pos.tolist() == [9]


# ---- the command and its page

class Page(HTMLParser):
    """Reads a page, and fails where a tag is not closed or something is loaded."""
    def __init__(self, text):
        super().__init__()
        self.open, self.spans, self.names = [], [], set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.names.add(tag)
        self.open += [tag] * (tag != "meta")
        if tag == "span" and "title" in attributes:
            self.spans.append([attributes["class"], attributes["title"], ""])

    def handle_startendtag(self, tag, attributes):
        self.names.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "span" and self.spans:
            self.spans[-1][2] += data


def page_of(row, prompt, text="why <b>&?", run=None) -> str:
    run = run or made_up([(r.K, r.kept, 15.0) for r in row.log])
    w = report.weigh(run)
    return report_page.page(run, w, report.facts(run, w), [text], [prompt], [row])


def test_the_page_shows_every_token():
    """Kills: text not escaped; a token without its writer's colour, or two in one; a position counted from the text's
    start; a legend that counts otherwise; a tag left open."""
    row, _ = scripted_row([3, 0, 1, 3, 2, 3], K=3, new=16)
    row.ids[2], row.ids[3] = 0, 1                               # as if these had been written
    row.text = row.text[:row.lengths[1]] + "<&" + row.text[row.lengths[3]:]
    row.lengths = [n for n in row.lengths[:2]] + [row.lengths[1] + 1, *row.lengths[3:]]
    prompt = prompts_for(1)[0]
    html = page_of(row, prompt)
    page, who = Page(html), report_page.writers(row.log)
    assert [span[0] for span in page.spans] == [w for w, _, _ in who[:16]]
    assert not {"script", "link", "img"} & page.names
    assert [text for _, _, text in page.spans] == [text or "∅" for text in report_page.pieces(row)]
    assert "".join(report_page.pieces(row)) == row.text and [text for *_, text in page.spans[2:4]] == ["<", "&"]
    assert '">&lt;</span>' in html and '">&amp;</span>' in html
    for at, (kind, title, _) in enumerate(page.spans):
        number = who[at][1]
        where = f"round {number} of K = 3, token {who[at][2]}" if number else "prefill"
        assert title == f"{kind}: id {row.ids[at]}, position {len(prompt) + at}, {where}"
    counts = {w: sum(kind == w for kind, *_ in page.spans) for w in report_page.WRITERS}
    assert {w: int(n) for w, n in re.findall(r'<li><span class="\w+">(\w+)</span> (\d+) ', html)} == counts
    assert ">why &lt;b&gt;&amp;?</p>" in html and "http" not in html and "url(" not in html


def test_the_plots_show_what_was_weighed():
    """Kills: a bar for a position that was never tried; bars as high as counts; the measured point off the predicted
    line's scale; rounds that leave gaps."""
    run = made_up([(2, 2, 15.0)] * 10 + [(2, 0, 15.0)] * 5)
    w = report.weigh(run)
    kept, speed = report_page.plot_kept(w), report_page.plot_speed(w)
    bars = [float(h) for h in re.findall(r'<rect .*?height="([\d.]+)"', str(kept))]
    full = kept.at(0, 0)[1] - kept.at(0, 1)[1]
    assert bars == pytest.approx([full * 10 / 15, full], abs=0.2)
    (x, y), = re.findall(r'<circle .*?cx="([\d.]+)" cy="([\d.]+)"', str(speed))
    assert (float(x), float(y)) == speed.at(2, w.measured)
    solid, far = (line.split() for line in re.findall(r'<polyline .*?points="(.*?)"', str(speed)))
    assert [*solid, *far[1:]] == ["{},{}".format(*speed.at(K, up)) for K, up in w.curve.items()] and solid[-1] == far[0]
    assert str(report_page.plot_kept(report.weigh(made_up([(2, 0, 15.0)] * 9)))).count("<rect") == 1
    rounds = report_page.plot_rounds(run.rows[0])
    left = [float(x) for x in re.findall(r'<rect .*?x="([\d.]+)"', str(rounds))]
    at = [1 + sum(r.new for r in run.rows[0][:i]) for i in range(len(run.rows[0]))]
    assert left == [rounds.at(x, 0)[0] for x in at]


def test_report_from_the_command_line(run, tmp_path):
    """A batch, greedy.  Kills: the option not handed on; the text or stdout changed by it; one row of the two on the
    page; the prompts not escaped."""
    ask = ["--raw", "--prompt", "!", "--prompt", "a <b>", "--max-new-tokens", "40", "--draft", "{m}/scripted", "-k3"]
    code, plain, _ = run(*ask, target="scripted")
    code, out, err = run(*ask, "--report", str(tmp_path / "page.html"), target="scripted")
    assert (code, out) == (0, plain)
    lines = dict(re.findall(r"^  ([\w -]+?)(?: of K = 3)?: +(.*)$", err, re.M))
    assert [*lines] == ["plain round", "round", "drafting", "scoring", "kept", "tokens a round", "speed-up",
                        "break-even", "advice"]
    assert "tokens a round:  " in err and "report: scripted; CPU, 1 threads, float32, batch 2, eager" in err
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.count('class="text"') == 2 and ">a &lt;b&gt;</p>" in html and len(Page(html).spans) == 80
    assert lines["advice"].replace("&", "&amp;") in html


def test_report_without_a_file_or_rounds(run, tmp_path):
    """Kills: a traceback where one token was asked for; a page nobody asked for; statistics after the report."""
    code, out, err = run("--prompt", "a", "--max-new-tokens", "12", "--draft", "ngram", "--report")
    assert code == 0 and err.index("rounds of") < err.index("report: ngram") < err.index("advice: ")
    assert "wrote" not in err
    code, out, err = run("--prompt", "a", "--max-new-tokens", "1", "--draft", "ngram", "--report")
    assert code == 0 and "nothing to weigh" in err and "Traceback" not in err


@pytest.mark.parametrize("draft", ["jacobi", "exit:1", "ngram+exit:1", "lookahead:3,4,2", "{m}/near", "{m}/short"])
def test_every_drafter_can_be_weighed(draft, run):
    """The context of one draft model, 64, ends within the text.  Kills: a State that keeps a drafter as its child, and
    lets none follow that is no module; tokens fed taken for guesses that can be kept; rounds left out in which nothing
    could be guessed any more."""
    lookahead = draft.startswith("lookahead")       # its pool holds something only of a text that comes back to itself
    ask = ["--raw", "--prompt", "!", "--max-new-tokens", "90", "--draft", draft, "--report"]
    how = ["--temperature", "0"] if lookahead else ["--temperature", "1", "-k", "4"]
    code, _, err = run(*ask, *how, target="scripted" if lookahead else "target")
    assert code == 0 and "advice: " in err and ("scoring: " in err) != lookahead
    assert ("round of K = 0: " in err) == (lookahead or "short" in draft)
    counted = [int(n) for n in re.findall(r"round of K = .*median of (\d+) rounds", err)]
    assert sum(counted) == int(re.search(r"(\d+) rounds of", err)[1])


@pytest.mark.parametrize("argv, says", [
    (["--report", "{m}/absent/page.html", "--prompt", "a"], "cannot be written"),
    (["--report", "{m}/dir.html", "--prompt", "a"], "cannot be written"),
    (["--report", "Why?", "--prompt", "a"], "--report Why? must be named .html: give FILE.html, or put --report last"),
    (["--report", "--draft", "none", "--prompt", "a"], "leave one of them out"),
    (["--report", "--interactive"], "leave out --report")])
def test_refused_before_anything_is_written(argv, says, run, models):      # noqa: F811
    """Kills: the check left out, or made when the text is done; a file left behind by it."""
    (models / "dir.html").mkdir(exist_ok=True)
    code, out, err = run(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_the_check_leaves_no_file(tmp_path):
    report.refuse(str(tmp_path / "new.html"))
    assert not (tmp_path / "new.html").exists()
    (tmp_path / "old.html").write_text("kept")
    report.refuse(str(tmp_path / "old.html"))
    assert (tmp_path / "old.html").read_text() == "kept"
