"""generate.py --check: what is sound passes, planted bugs are found, a tie is told from a bug.  Tiny models, eager.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import re
import types
from pathlib import Path

import pytest
import torch

import compare
import generate as cli
import speculate as engine
from compare import chi_square, p_value
from conftest import random_model
from model import CHUNK
from test_generate import PIECES, END, folder, readable
from test_generate import models as made      # a fixture: the folders that both need

TWINS = PIECES.index(b"u"), PIECES.index(b"z")        # of equal logits the lower index is the argmax


def with_twins(apart: float):
    """Two tokens, the first often the likeliest, whose logits are equal but for a share `apart` of the second."""
    model, (one, other) = readable(0), TWINS
    model.lm_head.weight[other] = model.lm_head.weight[one] * (1 - apart)
    return model


@pytest.fixture(scope="module")
def models(made) -> Path:
    folder(made / "rand", random_model(1, readable(0).config))
    folder(made / "twins", with_twins(0.0))
    folder(made / "apart", with_twins(0.002))
    return made


@pytest.fixture
def check(models, capsys):
    """check("--prompt", ...) -> (exit code, what --check found, its lines on stderr)."""
    def check(*argv, target="target"):
        code = cli.main(["--target", str(models / target), "--no-compile", "--raw", "--check", "--json",
                         *(a.replace("{m}", str(models)) for a in argv)])
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("--check: ")]
        return code, json.loads(out.splitlines()[-1])["check"], lines
    return check


ASK = ["--prompt", "hello", "--prompt", "the other thing", "--max-new-tokens", "40"]


# ---- temperature 0

@pytest.mark.parametrize("draft", ["ngram", "{m}/near", "{m}/target", "lookahead:3,3,2", "ngram+{m}/rand"])
def test_the_same_tokens(draft, check):
    """Kills: rows compared in reverse; a drafter that is a module as a part of the state, which then takes no other."""
    code, found, lines = check(*ASK, "--draft", draft)
    assert (code, found) == (0, {"verdict": "same", "tokens": 80, "parted": []})
    assert lines == ["--check: plain decoding writes the same 80 tokens"]


def test_what_a_stop_text_cut_is_not_compared(check):
    """The drafter's last round reaches past it.  Kills: all committed tokens compared, or counted; an end token not."""
    code, found, _ = check("--prompt", "!", "--prompt", "?", "--max-new-tokens", "30", "--stop", "lo!",
                           "--draft", "{m}/scripted", target="scripted")
    assert (code, found["verdict"], found["tokens"]) == (0, "same", 8 + len("BYE") + 1)


def always_keeps_the_first(tokens, q, p, seed, pos, valid=None, real=engine.accept_sampled):
    n = real(tokens, q, p, seed, pos, valid)[0].clamp_min(1)
    after = p.gather(1, n[:, None, None].expand(-1, 1, p.shape[-1])).squeeze(1)
    return engine.end_with_a_draw(tokens, n, after, after, seed, pos)


@pytest.mark.parametrize("also", [[], ["--report"]])
def test_a_kept_wrong_guess_is_found(also, check, monkeypatch):
    """Kills: the two runs one; exit code 0; `any` for `all` where both tokens must be near the top; what the report decodes
    plainly taken for what was written."""
    monkeypatch.setattr(engine, "accept_sampled", always_keeps_the_first)
    code, found, lines = check(*ASK, "--draft", "{m}/rand", *also)
    assert (code, found["verdict"], len(lines)) == (1, "bug", 2)
    for line, row in zip(lines, found["parted"]):
        assert row["verdict"] == "bug" and "A BUG" in line and f"after {row['position']} equal tokens" in line
        assert row["plain"] == row["top"][0] and row["speculative"]["id"] != row["plain"]["id"]
        assert row["speculative"]["logit"] < row["top"][0]["logit"] - row["rounding"]


def test_the_place_and_the_logits(models, check, monkeypatch):
    """Against recomputing everything.  Kills: the position one off; logits one token early; the prompt left out."""
    monkeypatch.setattr(engine, "accept_sampled", always_keeps_the_first)
    prompt = "x" * (CHUNK + 9)
    _, found, _ = check("--prompt", prompt, "--max-new-tokens", "40", "--draft", "{m}/near")
    (row,), target = found["parted"], cli.open_checkpoint(models / "target")
    ids, model = target.tokens.prompt(prompt), target.load()
    for at in range(row["position"] + 1):
        state = engine.State(cli.KVCache(model.config, 1, len(ids)), 1, len(ids))
        hidden, _ = model(torch.tensor([ids]), torch.zeros(1, dtype=torch.int64), state.cache, len(ids))
        top = model.head(hidden)[0, -1].topk(2)
        ids.append(int(top.indices[0]))
    assert ids[-1] == row["plain"]["id"] and top.indices.tolist() == [token["id"] for token in row["top"]]
    assert top.values.tolist() == pytest.approx([token["logit"] for token in row["top"]], abs=1e-4)
    assert row["gap"] == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-4)


@pytest.mark.parametrize("target, moved, verdict", [("twins", 1e-5, "tie"), ("apart", 0.1, "bug")])
def test_a_tie_is_told_from_a_bug(target, moved, verdict, check, monkeypatch):
    """Passes of several tokens favour the second twin by so much, as rounding in another order would.
    Kills: every parting a bug; every parting of the top two a tie; a bound that leaves out the logits' size."""
    def probs(logits, sampling, real=engine.probs):
        if logits.shape[1] > 1:
            logits[..., TWINS[1]] += moved
        return real(logits, sampling)
    monkeypatch.setattr(engine, "probs", probs)
    code, found, lines = check("--prompt", "hello", "--max-new-tokens", "60", "--draft", "ngram", target=target)
    row, = found["parted"]
    assert [row["plain"]["id"], row["speculative"]["id"]] == [*TWINS] == sorted(token["id"] for token in row["top"])
    assert (code, found["verdict"], row["verdict"]) == (int(verdict == "bug"), verdict, verdict)
    assert ("a tie, for rounding in float32" if verdict == "tie" else "A BUG") in lines[0]
    assert row["gap"] < 1e-6 if verdict == "tie" else 1e-2 < row["gap"] < 0.1


def test_bfloat16_ties_more():
    """Kills: the dtype's eps left out."""
    logits = torch.tensor([20.0, -25.0])
    f32, bf16 = (compare.bound(logits, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert f32 == pytest.approx(25 * 32 * 2 ** -23) and bf16 == pytest.approx(25 * (3 * 2 ** -7 + 32 * 2 ** -23))


# ---- above 0

@pytest.mark.parametrize("draft", ["ngram", "{m}/rand --verify block", "ngram+{m}/near --top-p 0.8"])
def test_one_law(draft, check):
    """A prompt longer than a chunk of prefill too.  Kills: one seed used twice in a sample; the degrees of freedom of
    the last prompt alone."""
    ask = ["--prompt", "hello", "--prompt", "x" * (CHUNK + 9), "--temperature", "1", "--max-new-tokens", "2"]
    code, found, lines = check(*ask, "--draft", *draft.split())
    assert (code, found["verdict"], found["samples"]) == (0, "same", 2 * compare.SAMPLES) and found["p"] > 1e-3
    assert found["degrees_of_freedom"] > 10 and "one law" in lines[0] and f"p = {found['p']:.2g}" in lines[0]


@pytest.mark.parametrize("settings", [[], ["--top-k", "5"]])
@pytest.mark.parametrize("old, new", [("u * q_x < p_x", "u < 1"),
                                      ("(p_n - q_n * (n < valid)[:, None]).clamp_min(0)", "p_n")])
def test_another_law_is_found(old, new, settings, check, monkeypatch):
    """Guesses all kept; the residual forgotten.  Kills: plain decoding compared with itself; exit code 0."""
    source, broken = Path(engine.__file__).read_text(), types.ModuleType("broken")
    assert old in source, "the planted bug no longer applies"
    exec(compile(source.replace(old, new), "broken", "exec"), broken.__dict__)
    monkeypatch.setattr(cli, "speculate", broken.speculate)
    ask = ["--prompt", "hello", "--temperature", "1", "--max-new-tokens", "2", "--draft", "{m}/near"]
    code, found, lines = check(*ask, *settings)
    assert (code, found["verdict"]) == (1, "bug") and found["p"] < compare.LEVEL and "NOT ONE LAW" in lines[0]


def test_chi_square_of_counted_texts():
    """Kills: outcomes of the first sample alone; rare outcomes each a cell; the degrees of freedom one off."""
    a, b = [(1,)] * 30 + [(2,)] * 10, [(1,)] * 10 + [(2,)] * 30
    assert chi_square(a, b) == (20, 1) and p_value(20, 1) == pytest.approx(7.744e-6, rel=1e-3)
    assert chi_square([(1, 2)] * 20, [(1, 3)] * 10 + [(1, 4)] * 10) == (40, 2)
    assert chi_square(a, a) == (0, 1) and chi_square(a[:30], a[:30]) == (0, 0) and p_value(0, 0) == 1
    # 3, 4, ... come once each: one outcome, "begins with 1 and goes on rarely"; so do 7 texts that begin with 2
    rare = [(1, n) for n in range(3, 15)]
    other = [(2, n) for n in range(8)]
    assert chi_square([(1, 2)] * 20 + rare, [(1, 2)] * 12 + rare + other) == (8 ** 2 / 32 + 8, 2)


def test_p_values_of_one_law_are_uniform():
    """Texts of three tokens, 400 pairs of samples.  Kills: half the statistic."""
    g = torch.Generator().manual_seed(0)
    law = torch.rand(60, generator=g) ** 6
    draw = lambda: [*map(tuple, law.multinomial(900, replacement=True, generator=g).view(-1, 3).tolist())]
    p = torch.tensor([p_value(*chi_square(draw(), draw())) for _ in range(400)])
    assert (p < 0.1).sum() < 60 and (p < 0.01).sum() < 12 and 0.44 < p.mean() < 0.56


def test_p_value_is_the_tables():
    """Quantiles that every table of chi-square prints."""
    for freedom, at, p in ((1, 3.841, 0.05), (5, 15.086, 0.01), (10, 18.307, 0.05), (100, 124.342, 0.05)):
        assert p_value(at, freedom) == pytest.approx(p, rel=2e-3)
