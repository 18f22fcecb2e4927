"""The command line and its rows of text, on tiny models.  Each test names the planted bugs it was seen to catch."""
import base64
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import generate as cli
import tokenizer as tokenizers
from conftest import config, random_model
from model import Transformer, load_model

PIECES = [bytes([b]) for b in range(256)] + [b"th", b"he", b"in", b"the", b" t", b"lo", b" the"]
SPECIAL = {"<|im_start|>": len(PIECES), "<|im_end|>": len(PIECES) + 1}
V, END = len(PIECES) + 2, len(PIECES) + 1
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SMILE = [b"\xf0", b"\x9f", b"\x99", b"\x82", b" ", b"H", b"e", b"l", b"lo", b"!"]     # "scripted" writes this after "!"
STATS = ("new_tokens rounds tokens_per_round rounds_per_k accepted_per_position ttft_s tokens_per_s tpot_median_s tpot_p95_s "
         "itl_median_s itl_p95_s compile_s draft k verify couple chosen seed").split()


# ---- models and tools

@pytest.fixture(autouse=True, scope="module")
def one_thread():           # on a busy machine two threads wait for each other, for minutes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def folder(path: Path, model, pieces=PIECES, special=SPECIAL, template=CHATML):
    """What convert_weights.py would have written for this model."""
    path.mkdir()
    save_file(dict(model.named_parameters()), path / "model.safetensors")
    lines = [base64.b64encode(piece) + b" %d\n" % i for i, piece in enumerate(pieces)]
    (path / "tokenizer.tiktoken").write_bytes(b"".join(lines))
    spec = {"kind": "tiktoken", "file": "tokenizer.tiktoken", "pattern": r" ?\w+| ?[^\s\w]+|\s+", "bos": None,
            "special_tokens": special, "eos": [special["<|im_end|>"]]}
    config = {"model": vars(model.config), "tokenizer": spec, "chat_template": template}
    (path / "config.json").write_text(json.dumps(config))


def readable(seed: int, padding=8, **changes):
    """A random model that writes printable text: its other tokens have logit 0, far below the best."""
    model = random_model(seed, config(vocab=V + padding, tokens=V, **changes))
    silent = [i for i, piece in enumerate(PIECES) if not piece.decode("latin-1").isprintable() or not piece.isascii()]
    model.lm_head.weight[silent + [*SPECIAL.values()]] = 0
    return model


def scripted():
    """A model whose next token depends on the newest one only: SMILE for ever after "!", BYE and the end after "?"."""
    model, at = random_model(0, config(vocab=V, dim=V, layers=1, context=4096)), PIECES.index
    for weight in (model.layers[0].o.weight, model.layers[0].down.weight, model.lm_head.weight):
        weight.zero_()
    model.norm.weight.fill_(1)
    model.embed.weight.copy_(torch.eye(V))
    follows = [(b"!", SMILE[0]), (b"\n", SMILE[0]), (b"?", b"B"), (b"B", b"Y"), (b"Y", b"E"), *zip(SMILE, SMILE[1:])]
    for old, new in [(at(a), at(b)) for a, b in follows] + [(at(b"E"), END)]:
        model.lm_head.weight[new, old] = 1
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    folder(root / "target", readable(0))
    folder(root / "near", random_model(0, readable(0).config, noise=0.05))
    folder(root / "more", readable(1, padding=16, layers=1))                            # of padding rows
    folder(root / "fewer", readable(2, padding=0))
    folder(root / "short", readable(0, context=64))
    folder(root / "scripted", scripted())
    folder(root / "bare", readable(0), template=None)
    folder(root / "other", readable(0), pieces=PIECES[:257] + PIECES[258:] + [b"he"])   # the same tokens, other ids
    folder(root / "moved", readable(0), special={"<|im_end|>": V - 2, "<|im_start|>": V - 1})
    folder(root / "larger", random_model(0, config(vocab=V + 1)), special=SPECIAL | {"<|pad|>": V})
    damage = {"no/config.json": None, "broken/config.json": b"{", "foreign/config.json": b'{"dim": 64}',
              "bald/model.safetensors": None, "cut/model.safetensors": 1000, "mute/tokenizer.tiktoken": None}
    for name, content in damage.items():
        shutil.copytree(root / "target", (root / name).parent)
        whole = (root / name).read_bytes()
        (root / name).unlink()
        if content:
            (root / name).write_bytes(whole[:content] if isinstance(content, int) else content)
    (root / "lines.txt").write_text("first\n\nthird\n"), (root / "latin.txt").write_bytes(b"caf\xe9\n")
    return root


@pytest.fixture
def run(models, capsys):
    """run("--prompt", ...) -> (exit code, stdout, stderr); {m} in an argument is the folder of models."""
    def run(*argv, target="target"):
        argv = [a.replace("{m}", str(models)) for a in argv]
        code = cli.main(["--target", str(models / target), "--no-compile", *argv])
        return code, *capsys.readouterr()
    return run


def fail(error):
    raise error


@pytest.fixture
def rows(run):
    return lambda *argv, **options: [json.loads(line) for line in run(*argv, "--json", **options)[1].splitlines()]


def start(models, *argv, target="scripted"):
    """generate.py in a process of its own."""
    command, pipe = [sys.executable, cli.__file__, "--target", str(models / target), *argv], subprocess.PIPE
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    # A shell's background jobs inherit that Ctrl-C is ignored, and the tests may be one.
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def answer(models, said: list[str], max_new=30, target="target") -> str:
    """The next answer in a conversation (user, assistant, user, ...) by the functions: nothing is kept from before."""
    tokens, model = tokenizers.load(models / target), load_model(models / target)
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    ids = tokenizers.chat(CHATML, turns, tokens)
    max_new = min(max_new, model.config.context - len(ids))
    state = cli.make_state(model, 1, len(ids) + max_new, 0, tokens.eos)
    rounds = cli.generate(model, cli.NoDraft(), state, cli.Sampling(1), [ids], [max_new])
    return tokens.decode([i for new, _, _ in rounds for i in new[0]])


# ---- refusals

REFUSED = {      # options: what stands on stderr, besides the last of them
    "--prompt '' ": "prompt 1 is empty: give", "--prompt a --prompt ' \n'": "prompt 2 is empty: give",
    f"--prompt {'x' * 512}": "shorten it", "--prompt-file {m}/lines.txt": "prompt 2 is empty: give",
    "--prompt-file {m}/absent.txt": "absent.txt cannot be read", "": "nothing to do: give --prompt",
    "--prompt-file {m}/latin.txt": "latin.txt cannot be read: 'utf-8'",
    "-k 0": "-k 0 must be in 1..16", "-k 17": "in 1..16", "-k -3": "in 1..16", "-k abc": "in 1..16, or auto",
    "-k 2.5": "in 1..16, or auto", "-k 2 --draft none": "-k has no meaning with --draft none: leave",
    "--max-new-tokens -1": "-1 must be 0 or more", "--target {m}/absent --temperature -1": "0 or more",
    "--temperature nan": "0 or more", "--temperature inf": "and finite", "--top-k -2": "0 (off) or more",
    "--top-p 0": "in (0, 1]", "--top-p 1.5": "in (0, 1]", "--top-p nan": "in (0, 1]", "--min-p -0.1": "in [0, 1]",
    "--min-p 1.1": "in [0, 1]", "--seed -5": "seed -5 must be", f"--seed {2 ** 62}": "2**62",
    "--stop ''": "--stop is empty: give", "--device foo": "use cpu", "--device mps": "use cpu",
    "--device meta": "use cpu", "--device cuda:99": "use cpu", "--device ''": "--device  is not available here",
    "--dtype int8": "invalid choice", "--frobnicate": "see --help", "--chat --raw": "not allowed with argument --chat",
    "--target {m}/absent": "convert_weights.py makes", "--target '{m}/two\nlines'": "two lines/config",
    "--target {m}/latin.txt": "convert_weights.py makes", "--target {m}/no": "no/config.json does not exist",
    "--target {m}/broken": "config.json is not one", "--target {m}/foreign": "convert the checkpoint again",
    "--target {m}/bald": "Convert the checkpoint again", "--target {m}/cut": "Convert the checkpoint again",
    "--target {m}/mute": "tokenizer missing or damaged",
    "--chat --target {m}/bare": "bare has no chat template: use --raw",
    "--draft ngrm": "neither none, ngram, jacobi, lookahead, exit:L nor a folder",
    "--draft exit:0": "whole number of layers in 1..1", "--draft exit:2": "fewer than the target's 2",
    "--draft exit:x": "exit:x must", "--draft exit:": "exit: must", "--draft exit:-1": "in 1..1",
    "--draft exit:1.5": "in 1..1",
    "--draft ngram+ngram": "follows ngram+", "--draft ngram+": "follows ngram+",
    "--draft ngram+none": "follows ngram+", "--draft ngram+ngram+jacobi": "follows ngram+",
    "--tree 4 --draft ngram+jacobi": "leave it out",
    "--draft ngram+ngrm": "nor a folder", "--draft {m}/no": "convert_weights.py makes",
    "--draft {m}/cut": "model.safetensors: ", "--draft {m}/other": "does not share the target's tokenizer: token 257",
    "--draft {m}/moved": "token 263 is b", "--verify block --couple": "leave one of them out",
    "--chosen --couple": "leave one of them out",
    "--draft ngram --chosen": "never drawn", "--draft {m}/near --chosen --verify block": "leave --verify out",
    "--draft lookahead:0,3,3": "as lookahead:5,3,3", "--draft lookahead:5,1,3": "W >= 1, N >= 2, G >= 1",
    "--draft lookahead:5,3": "lookahead:W,N,G", "--draft lookahead:": "lookahead:W,N,G", "--draft lookahead:a,b,c": "W,N,G",
    "--draft lookahead:31,3,2": "<= 64", "--draft lookahead:5,3,-1": "lookahead:W,N,G", "--draft ngram+lookahead": "follows ngram+",
    "--draft lookahead -k 2": "-k 2 has no meaning", "--draft lookahead --tree 8": "--tree 8 needs a drafter",
    "--draft lookahead --verify block": "of --draft lookahead are chosen: leave --verify out",
    "--interactive --target {m}/bare": "bare has no chat template: use --prompt",
    "--check --draft none": "which --draft none is: leave one of them out", "--interactive --check": "leave out --check",
    "--interactive --prompt a": "leave out --prompt", "--interactive --json": "leave out --json"}


@pytest.mark.parametrize("options", REFUSED)
def test_refused_in_one_line(options, run, models):
    """Killed: argparse's usage text; each check of `check`, `room`, `main` and `load_drafter` taken out."""
    argv = shlex.split(options)
    alone = not argv or argv[0] in ("--prompt", "--prompt-file", "--interactive")
    code, out, err = run(*argv, *([] if alone else ["--prompt", "a"]))
    assert (code, out, err.count("\n"), err[:13]) == (2, "", 1, "generate.py: ")
    assert REFUSED[options] in err and (alone or " ".join(argv[-1].replace("{m}", str(models)).split()) in err)


def test_refused_in_a_process(models):
    """Bytes that are not UTF-8 come as surrogates.  Killed: main's return value not handed to sys.exit; a traceback."""
    process = start(models, "--no-compile", "--prompt", b"a\xff")
    out, err = process.communicate()
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1) and b"U+DCFF" in err


@pytest.mark.parametrize("name, value, code, says", [
    ("DEFAULT_TARGET", Path("absent"), 2, "absent is missing: make it with  python convert_weights.py smollm2"),
    ("compile_round", lambda: fail(RuntimeError("No working C++ compiler found in ...")), 2, "--no-compile"),
    ("open_checkpoint", lambda *_: fail(KeyboardInterrupt()), 130, "")])
def test_ends_before_the_text(name, value, code, says, models, monkeypatch, capsys):
    """Killed: `except InvalidCxxCompiler`, which comes wrapped; no `except KeyboardInterrupt` in main; no remedy."""
    default = value if name == "DEFAULT_TARGET" else models / "target"
    monkeypatch.setattr("options.DEFAULT_TARGET", default)
    monkeypatch.setattr(cli, "DEFAULT_TARGET", default)
    monkeypatch.setattr(cli, name, value)
    assert cli.main(["--prompt", "a"]) == code
    out, err = capsys.readouterr()
    assert not out and says in err and "Traceback" not in err


@pytest.mark.parametrize("draft", ["none", "ngram", "{m}/short"])
def test_clipped_to_the_context(draft, run):
    """Case 13.  Killed: `room` returning what was wanted, and saying nothing."""
    code, out, err = run("--raw", "--prompt", "x" * 60, "--draft", draft, "--json", target="short")
    assert (code, len(json.loads(out)["tokens"]), json.loads(out)["finish"]) == (0, 4, "length")
    assert "prompt 1: only 4 of 256 new tokens fit the context of 64" in err


@pytest.mark.parametrize("draft", ["none", "ngram", "{m}/near", "{m}/target"])
@pytest.mark.parametrize("prompt", ["a", "hello there"])
def test_zero_and_one_new_tokens(draft, prompt, rows):
    """Killed: the draft model's prefill without a token to feed; the first token counted as a round."""
    none, one, two = (rows("--raw", "--prompt", prompt, "--draft", draft, "--max-new-tokens", n)[0] for n in "012")
    for n, row in enumerate((none, one)):
        assert (row["tokens"], row["finish"], row["stats"]["rounds"]) == (two["tokens"][:n], "length", 0)
        assert row["stats"]["tokens_per_round"] is None and row["stats"]["tokens_per_s"] is None


def test_json_rows(models, run, rows, tmp_path, monkeypatch):
    """And case 14.  Killed: a key renamed; statistics on stdout; splitlines; an empty last line; rows in reverse; the
    file first; seed + 1 + i; one budget for all rows; noise from torch.rand."""
    (tmp_path / "prompts.txt").write_text("two\u2028and a half\nthe third: " + "x" * 470 + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
    generator, draft = torch.get_rng_state(), str(models / "near")
    ask = ["--temperature", "1", "--max-new-tokens", "20", "--draft", draft, "--json"]
    code, out, err = run("--prompt-file", str(tmp_path / "prompts.txt"), "--prompt", "-", "--seed", "11", *ask)
    batch = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in batch] == ["one", "two\u2028and a half", "the third: " + "x" * 470]
    assert "prompt 3: only" in err and len(batch[2]["tokens"]) < 20 == len(batch[0]["tokens"])
    for i, row in enumerate(batch):
        assert list(row) == ["prompt", "text", "tokens", "finish", "stats"] and list(row["stats"]) == STATS
        assert row["text"] == tokenizers.load(models / "target").decode(row["tokens"])
        known = {"draft": draft, "k": 4, "seed": 11 + i, "new_tokens": len(row["tokens"]), "compile_s": 0}
        assert row["stats"] | known == row["stats"]
        alone, = rows("--prompt", row["prompt"], "--seed", str(11 + i), *ask)
        assert (alone["tokens"], alone["finish"]) == (row["tokens"], row["finish"])
    assert torch.equal(torch.get_rng_state(), generator)


def test_drafts_do_not_change_the_text(rows):
    """Case 16, and a draft's shorter context.  Killed: the seed ignored; `head` keeping padding rows; --couple lost."""
    ask = ["--prompt", "hello", "--prompt", "the other thing", "--max-new-tokens", "40"]
    plain = [row["tokens"] for row in rows(*ask, "--draft", "none")]
    for draft in ("ngram", "jacobi", "exit:1", "ngram+exit:1", "ngram+{m}/near", "ngram+{m}/short", "{m}/near",
                  "{m}/larger", "{m}/more", "{m}/fewer", "{m}/short", "{m}/target"):
        assert [row["tokens"] for row in rows(*ask, "--draft", draft, "-k", "3")] == plain, draft
    assert [row["tokens"] for row in rows(*ask, "--draft", "lookahead:4,4,3")] == plain
    warm = [*ask, "--temperature", "1", "--top-k", "20", "--draft"]
    none, ngram, ahead, near, likeliest, other = (rows(*warm, *more)[1]["text"] for more in (
        ["none"], ["ngram"], ["lookahead"], ["{m}/near", "--couple"], ["ngram+{m}/near", "--chosen"],
        ["none", "--seed", "5"]))
    assert none == ngram == ahead == near == likeliest != other


def test_k_follows_what_pays_unless_a_seed_must_be_a_text(rows):
    """Kills: -k auto as the drafter's usual K; K that follows the clock where guesses are drawn and a seed is given."""
    ask = ["--prompt", "hello", "--max-new-tokens", "40", "--draft", "{m}/near"]
    for more, k in ([], "auto"), (["--seed", "3"], "auto"), (["-k", "auto", "--seed", "3", "--temperature", "1"], "auto"), (
            ["--seed", "3", "--temperature", "1"], 4), (["--seed", "3", "--temperature", "1", "--couple"], "auto"), (["-k", "2"], 2):
        stats = rows(*ask, *more)[0]["stats"]
        assert stats["k"] == k and sum(stats["rounds_per_k"].values()) == stats["rounds"]
        assert "0" in stats["rounds_per_k"] if k == "auto" else list(stats["rounds_per_k"]) == [str(k)]


@pytest.mark.parametrize("prompt, new, text, finish, tried", [
    ("!", "21", "🙂 Hello!" * 2 + "\ufffd", "length", 4), ("!", "19", "🙂 Hello!🙂 Hello", "length", 4),
    ("?", "9", "BYE", "eos", 3)])
def test_self_draft_is_always_right(prompt, new, text, finish, tried, rows):
    """Killed: guesses counted as tried past the limit, and past EOS; EOS shown as text; EOS missing from the tokens."""
    row, = rows("--raw", "--prompt", prompt, "--draft", "{m}/scripted", "-k", "4", "--max-new-tokens", new,
                target="scripted")
    assert (row["text"], row["finish"]) == (text, finish)
    assert row["stats"]["accepted_per_position"] == [1.0] * tried + [None] * (4 - tried)
    assert row["stats"]["rounds"] == -(-(len(row["tokens"]) - 1) // 5) and (END in row["tokens"]) == (finish == "eos")


@pytest.mark.parametrize("stops, rounds, shown, text, count, finish", [
    (["lo!"], [[0], [1, 2, 3, 4], [5, 6, 7], [8, 9]], ["", "🙂 ", "He", "l"], "🙂 Hel", 8, "stop"),    # split
    (["l"], [[5], [6, 7, 8, 9]], ["H", "e"], "He", 2, "stop"),                                         # twice
    (["o"], [[5], [6, 7, 8, 9]], ["H", "ell"], "Hell", 4, "stop"),          # inside a token: the token stays
    (["🙂"], [[0], [1, 2, 3, 4]], ["", ""], "", 0, "stop"),
    (["!", "ll", "lo"], [[5], [6, 7, 8, 9]], ["H", "e"], "He", 2, "stop"),
    (["el", "e"], [[5], [6, 7, 8, 9]], ["H", ""], "H", 1, "stop"),
    (["lx", "ello?"], [[5], [6, 7], [8], [9]], ["H", "", "", "ello!"], "Hello!", 5, "length"),        # held for nothing
    (["lo!x"], [[5, 6, 7, 8], [9]], ["Hel", "lo!"], "Hello!", 5, "length"),                           # held at the end
])
def test_stop(stops, rounds, shown, text, count, finish, models):
    """Killed: ids not cut; max for min over the stops; nothing held, or the shortest, or lost at the end."""
    tokens, ids = tokenizers.load(models / "scripted"), [[PIECES.index(SMILE[i]) for i in new] for new in rounds]
    row = cli.Row(tokens, sum(map(len, rounds)), 4, stops)
    assert [row.push(new, 0, 0) for new in ids] == shown
    assert (row.text, row.ids, row.finish) == (text, sum(ids, [])[:count], finish) and row.push(ids[0], 0, 0) == ""


def test_latencies(models, monkeypatch):
    """Rounds of 1, 2 and 4 tokens, 3, 1 and 2 seconds apart.  Killed: the first token's wait among the gaps; a round's
    seconds given to each of its tokens; tokens counted as gaps; None where nothing came after the first token."""
    row = cli.Row(tokenizers.load(models / "target"), 8, 4, clock=iter([0, 10, 13, 14, 16]).__next__)
    none = {"tpot_median_s": None, "tpot_p95_s": None, "itl_median_s": None, "itl_p95_s": None}
    row.push([65], 0, 0)
    assert row.stats() | none | {"ttft_s": 10} == row.stats()
    for new in ([66], [67, 68], [69, 70, 71, 72]):
        row.push(new, len(new) - 1, 3)
    assert [r.seconds for r in row.log] == [3, 1, 2] and row.shares() == [3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    stats = row.stats()
    assert (stats["tpot_median_s"], stats["tpot_p95_s"]) == (0.5, 2.25)             # 0.7 of the way from 0.5 to 3
    assert (stats["itl_median_s"], stats["itl_p95_s"], stats["tokens_per_s"]) == (2, 2.9, round(7 / 6, 2))
    line = cli.report([row], [[1]], 0, torch.device("cpu"))
    assert "8 new tokens, 1.2 tokens/s; 500.0 ms a token (median; p95 2250.0); 3 rounds" in line


def test_stop_from_the_command_line(run, rows):
    """Killed: --stop not handed to Row; negative rates where it took back the first token; a batch's rows streamed into
    each other, or numbered from 0."""
    ask = ["--raw", "--prompt", "!", "--prompt", "?", "--max-new-tokens", "30", "--draft", "{m}/scripted", "-k", "4"]
    cut, bye = rows(*ask, "--stop", "Y", "--stop", "lo!🙂", target="scripted")
    assert (cut["text"], cut["finish"], cut["stats"]["rounds"]) == ("🙂 Hel", "stop", 3)
    assert (bye["text"], bye["tokens"], bye["finish"]) == ("B", [ord("B")], "stop")
    none, _ = rows(*ask, "--stop", "🙂", target="scripted")
    assert (none["text"], none["tokens"], none["stats"]["tokens_per_round"]) == ("", [], 0)
    code, out, err = run(*ask, "--stop", "🙂", "--stop", "Y", target="scripted")
    assert (code, out) == (0, "=== 1: !\n\n=== 2: ?\nB\n") and "1 new tokens" in err and "-" not in err


@pytest.mark.parametrize("k", ["1", "2", "3"])
def test_stream(k, run, rows, monkeypatch):
    """Case 15.  Killed: each token decoded alone; the text held back to the end."""
    ask, parts = ["--raw", "--prompt", "!", "--max-new-tokens", "70", "--draft", "{m}/scripted", "-k", k], []
    monkeypatch.setattr(cli, "write", lambda i, text: parts.append(text))
    code, out, _ = run(*ask, target="scripted")
    assert (code, out, "".join(parts)) == (0, "\n", "🙂 Hello!" * 7) and sum(map(bool, parts)) > 10
    assert rows(*ask, target="scripted")[0]["text"] == "".join(parts)


def test_compiled_process(models):
    """Killed: the round not compiled."""
    process = start(models, "--raw", "--prompt", "!", "--max-new-tokens", "70", "-k", "2")
    out, err = process.communicate()
    assert (process.returncode, out.decode()) == (0, "🙂 Hello!" * 7 + "\n"), err
    assert b"compiling" in err and b"compiled in" in err and b"eager" not in err


def test_interrupted_process(models):
    """Killed: no `except KeyboardInterrupt` in `run`; exit code 0; output not flushed (it comes when all is done)."""
    process = start(models, "--no-compile", "--raw", "--prompt", "!", "--max-new-tokens", "4000", "--draft", "none")
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and err.count(b"\n") == 2 and b"new tokens" in err
    assert out[-1:] == b"\n" and ("🙂 Hello!" * 400).startswith((first + out).decode().rstrip("\n\ufffd"))


def test_interrupted_json(run, monkeypatch):
    """Killed: an ended row called interrupted; exit code 0; the objects left out."""
    rounds = iter([cli.speculate] * 5 + [lambda *_: fail(KeyboardInterrupt())])
    monkeypatch.setattr(cli, "speculate", lambda *args: next(rounds)(*args))
    code, out, err = run("--raw", "--prompt", "!", "--prompt", "?", "--draft", "none", "--json", target="scripted")
    endless, ended = map(json.loads, out.splitlines())
    assert (code, endless["text"], endless["finish"]) == (130, "🙂 H", "interrupted") and "10 new tokens" in err
    assert (ended["text"], ended["finish"], ended["tokens"][-1]) == ("BYE", "eos", END)


@pytest.mark.parametrize("draft, models_fed", [("ngram", 1), ("{m}/near", 2)])
def test_chat(draft, models_fed, models, run, monkeypatch):
    """The third answer is interrupted while its prompt is fed.  Killed: positions taken for fed after that; one message
    rendered; a refused message that ends the chat, stays in it or costs what was said; no cache kept."""
    one = answer(models, ["hello"])
    two = answer(models, ["hello", one, "and then"])
    last = answer(models, ["hello", one, "and then", two, "wait", "", "go on"])
    fed, prefill = [], Transformer.prefill

    def watched(self, tokens, begin, end, *rest):
        fed.append((begin.item(), end.item()))
        return fail(KeyboardInterrupt()) if len(fed) == 2 * models_fed + 1 else prefill(self, tokens, begin, end, *rest)
    monkeypatch.setattr(Transformer, "prefill", watched)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand then\na\udcff\n" + "x" * 600 + "\nwait\ngo on"))
    code, out, err = run("--interactive", "--draft", draft, "-k", "4", "--max-new-tokens", "30")
    assert (code, out) == (0, f"{one}\n{two}\n\n{last}\n") and "U+DCFF" in err and "shorten" in err
    assert all(begin >= fed[0][1] for begin, _ in fed[models_fed:2 * models_fed]), "the first turn was fed again"


def test_chat_over_a_pipe(models):
    """Killed: a conversation over the context refused, not begun anew; EOF as an error."""
    process = start(models, "--interactive", "--no-compile", target="short")
    out, err = process.communicate(b"hello\nagain\n")
    one, two = (answer(models, [said], 64, "short") for said in ("hello", "again"))
    assert (process.returncode, out.decode()) == (0, f"{one}\n{two}\n") and b"starts anew" in err
