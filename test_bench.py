"""bench.py: its arithmetic, its synthetic weights, its refusals.  Nothing is compiled here and no time is judged."""
import json
from types import SimpleNamespace

import pytest
import torch

import auto_k
import bench
import bench_measure
from bench_peers import write_gguf
from bench_shapes import DRAFT_OF, SHAPES, Pair
from checkpoints import hf_folder
from convert_weights import convert
from draft_dflash import DFlash
from draft_eagle import Eagle
from draft_medusa import Medusa
from drafts import NoDraft
from generate import make_state
from load import open_checkpoint
from model import Config, Transformer, load_model
from speculate import speculate
from train_data import is_held_out

# What the published checkpoints hold, embeddings tied where they tie them.
PARAMETERS = {"smollm2-135m": 134_515_008, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248,
              "llama-3.1-70b": 70_553_706_496, "llama-2-7b": 6_738_415_616, "tinyllama-1.1b": 1_100_048_384,
              "qwen3-8b": 8_190_735_360, "qwen3-0.6b": 596_049_920}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_are_the_real_geometry(name):
    tied = name in ("smollm2-135m", "llama-3.2-1b", "qwen3-0.6b")
    with torch.device("meta"):
        model = Transformer(Config(**SHAPES[name] | {"tie_embeddings": tied}))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_every_shape_has_a_draft_of_its_vocabulary():
    assert all(SHAPES[t]["vocab_size"] == SHAPES[d]["vocab_size"] for t, d in DRAFT_OF.items())
    with pytest.raises(ValueError, match="different vocabularies"):
        Pair("tiny", "qwen3-0.6b")


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_models_agree_as_asked(settings):
    """On a text other than the one that was fitted."""
    pair = Pair("tiny", "tiny-draft")
    for wanted in (0.9, 0.5, 0.8):
        measured = pair.agree(wanted, **settings)
        assert abs(measured - wanted) <= 0.05
        with torch.no_grad():
            assert measured == pytest.approx(pair.overlap(pair.hidden(pair.text(settings, 999)), settings), abs=0.1)


def test_an_agreement_that_cannot_be_is_refused():
    for wanted in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            Pair("tiny", "tiny-draft").agree(wanted)


def test_a_peer_gets_the_same_weights(tmp_path):
    """What is written for llama.cpp and read back is the target.  Killed: q and k left as halves; a tensor left out."""
    target = Pair("tiny", "tiny-draft").target
    write_gguf(target, tmp_path / "peer.gguf")
    convert(str(tmp_path / "peer.gguf"), tmp_path / "back", with_tokenizer=False)
    back = load_model(tmp_path / "back")
    for (name, ours), (_, theirs) in zip(target.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert back.config == target.config


def test_summary():
    """Two turns of one text: the speed-up is the median of the turns' ratios, not the ratio of the medians."""
    cost = {("none", 0, "draft"): 0.0, ("none", 0, "verify"): 9.0, ("none", 0, "accept"): 1.0,
            ("ngram", 4, "draft"): 2.0, ("ngram", 4, "verify"): 12.0, ("ngram", 4, "accept"): 1.0}
    runs = {("none", 0, "copy"): [[10.0, 100, 100], [30.0, 100, 100], [10.0, 100, 100]],
            ("ngram", 4, "copy"): [[5.0, 100, 40], [5.0, 100, 40], [10.0, 100, 40]]}
    plain, ngram = bench_measure.summary(runs, cost, floor=8.0)
    assert plain["speedup"] == 1.0 and plain["acceptance"] is None and plain["tokens_per_s"] == 10.0
    assert ngram["speedup"] == 2.0 and ngram["tokens_per_round"] == 2.5 and ngram["acceptance"] == 1.5 / 4
    assert ngram["predicted"] == pytest.approx(2.5 * 10 / 15) and ngram["draft_step_ms"] == 0.5
    assert ngram["round_ms"] == 125.0 and ngram["parts_ms"] == 15.0


def test_the_best_k_of_each_drafter_and_kind():
    rows = [{"batch": 1, "draft": d, "prompts": p, "k": k, "speedup": s}
            for d, p, k, s in (("ngram", "copy", 2, 1.5), ("ngram", "copy", 8, 2.5), ("ngram", "free", 2, 0.9),
                               ("ngram", "free", 8, 0.6))]
    assert [(r["prompts"], r["k"]) for r in bench.best(rows)] == [("copy", 8), ("free", 2)]


@pytest.fixture
def eager(monkeypatch):
    """Whole runs without the compiler, which has its own tests."""
    monkeypatch.setattr(bench_measure, "compiled", lambda f: f)
    monkeypatch.setattr(bench_measure, "compile_round", lambda: speculate)
    threads = torch.get_num_threads()
    yield ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--turns", "1", "--max-new-tokens", "24", "--threads", "1"]
    torch.set_num_threads(threads)


def test_a_run_measures_every_drafter(eager, tmp_path, capsys):
    assert bench.main([*eager, "-k", "1", "3", "--all", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["draft"], r["k"]) for r in rows] == [("none", 0), ("ngram", 1), ("ngram", 3), ("draft", 1), ("draft", 3)]
    for r in rows:
        assert r["torch"] == torch.__version__ and r["dtype"] == "float32" and r["batch"] == 1 and r["threads"] == 1
        assert r["temperature"] == 1.0 and "synthetic" in r["weights"] and r["round_ms"] > 0
    assert rows[4]["tokens_per_round"] > rows[0]["tokens_per_round"] == 1.0
    out = capsys.readouterr().out
    assert "synthetic weights" in out and out.count("\n| ") == 6 and "of a plain round" in out


def test_batches_and_k_auto(eager, tmp_path, capsys):
    """Kills: a batch that is not filled up; K = "auto" taken for a number; parts of a batch that were not measured;
    a share of the plain round told of a batch, which has none."""
    assert bench_measure.batches([[1], [2], [3]], 2) == [[[1], [2]], [[3], [1]]]
    argv = [*eager, "-k", "2", "auto", "--batch", "3", "1", "--all", "--json", str(tmp_path / "rows.json")]
    assert bench.main(argv) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["batch"], r["draft"], r["k"]) for r in rows] == [(B, *key) for B in (3, 1) for key in (
        ("none", 0), ("ngram", 2), ("ngram", "auto"), ("draft", 2), ("draft", "auto"))]
    assert all((r["predicted"] is None) == (r["batch"] == 3 or r["k"] == "auto") for r in rows)
    assert all(r["tokens_per_round"] == 1.0 for r in rows if r["draft"] == "none")
    assert "| 3 | draft | auto |" in capsys.readouterr().out
    assert bench.main([*eager, "-k", "2", "--all", "--rounds-only", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(r["predicted"] is None and r["verify_ms"] is None and r["round_ms"] > 0 for r in rows)


def test_k_auto_compiles_nothing_while_it_is_measured(eager, monkeypatch):
    """Every other K seems to cost and bring so little more that it would pay at once.  Kills: the clock of generate.py, which
    stands still while something compiles, expected of a bench.py that has none."""
    used = set()
    monkeypatch.setattr(auto_k.Choice, "cost", lambda self, K: 1.0)
    monkeypatch.setattr(bench_measure, "compile_round", lambda: lambda target, drafter, *rest:
                        (used.add((type(drafter), drafter.nodes)), speculate(target, drafter, *rest))[1])
    assert bench.main([*eager, "-k", "auto", "--agreement", "0.95"]) == 0
    assert {nodes for kind, nodes in used if kind is not NoDraft} == {0, 4}


def test_k_auto_begins_with_the_usual_k_however_it_is_judged():
    """Kills: "draft, block" looked for among the models."""
    pair = Pair("tiny", "tiny-draft")
    pair.draft.usual_k = 3
    for name in ("draft", "draft, block", "ngram+draft"):
        drafter = bench_measure.drafter_for(name, "auto", pair.target, {"draft": pair.draft}, make_state(pair.target, 1, 64, 16))
        assert drafter.choice.first == 3


def test_nobody_is_asked_for_more_guesses_than_it_can_make():
    """Kills: a DFlash asked for more than its block, which ended the whole run after minutes."""
    names = ["a/medusa", "a/dflash", "ngram+a/dflash", "a/eagle"]
    wanted = SimpleNamespace(draft=names, k=[3, 5, "auto"], verify=["token"], tree=[])
    c, vocab = Config(dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=50, context=64), torch.arange(50)
    models = {"medusa": Medusa(c, vocab, 3), "dflash": DFlash(c, vocab, (0, 1), block=4), "eagle": Eagle(c, vocab, (0, 1))}
    found = [(name, K) for name, K in bench.plan(wanted, models) if name not in ("none", "ngram")]
    assert found == [("medusa", 3), ("medusa", "auto"), ("dflash", 3), ("dflash", "auto"), ("ngram+dflash", 3),
                     ("ngram+dflash", "auto"), ("eagle", 3), ("eagle", 5), ("eagle", "auto")]


def test_couple_behind_a_comma_couples():
    """Kills: ", couple" measured as token by token."""
    pair = Pair("tiny", "tiny-draft")
    state = make_state(pair.target, 1, 64, 16)
    assert [bench_measure.drafter_for(name, 2, pair.target, {"draft": pair.draft}, state).couple
            for name in ("draft", "draft, block", "draft, couple")] == [False, False, True]


def test_the_curve_has_every_point(eager, tmp_path, capsys):
    assert bench.main([*eager, "--curve", "--batch", "1", "2", "--most", "3", "--json", str(tmp_path / "c.json")]) == 0
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [(r["batch"], r["n"]) for r in rows] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    for r in rows:                              # a line by least squares goes through the middle of its points
        line = [x for x in rows if x["batch"] == r["batch"]]
        assert r["a_ms"] + 2 * r["b_ms"] == pytest.approx(sum(x["verify_ms"] for x in line) / 3)


def test_drafters_without_weights_are_measured_too(eager, tmp_path):
    """Kills: a lookahead round for every -k; its window not counted as fed; ngram+ lost from the name."""
    hf_folder(tmp_path / "hf")
    (tmp_path / "prompts.txt").write_text("\n".join(f"the {i}" for i in range(60)))
    argv = ["--target", str(tmp_path / "hf"), *eager[2:], "-k", "1", "2", "--all", "--json", str(tmp_path / "rows.json"),
            "--prompts", str(tmp_path / "prompts.txt"), "--most-prompts", "1"]
    assert bench.main([*argv, "--draft", "jacobi", "exit:1", "lookahead:3,4,2", "ngram+exit:1", f"ngram+{tmp_path}/hf"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["draft"], r["k"]) for r in rows] == [
        ("none", 0), ("ngram", 1), ("ngram", 2), ("jacobi", 1), ("jacobi", 2), ("exit:1", 1), ("exit:1", 2), ("ngram+exit:1", 1),
        ("ngram+exit:1", 2), ("ngram+hf", 1), ("ngram+hf", 2), ("lookahead:3,4,2", 3)]


def test_prompts_of_a_file_are_those_held_out(tmp_path):
    """Kills: prompts that were trained on; more than asked for."""
    hf_folder(tmp_path / "hf")
    texts = [f"the {i}" for i in range(60)]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    argv = ["--target", str(tmp_path / "hf"), "--prompts", str(tmp_path / "prompts.txt"), "--most-prompts", "3"]
    _, _, prompts, *_ = bench.load(bench.options(argv))
    tokens = open_checkpoint(tmp_path / "hf").tokens
    assert prompts == {"held out": [tokens.prompt(t) for t in texts if is_held_out(t)][:3]} and len(prompts["held out"]) == 3
    (tmp_path / "prompts.txt").write_text(next(t for t in texts if not is_held_out(t)))
    with pytest.raises(ValueError, match="none that train.py holds out"):
        bench.load(bench.options(argv))


@pytest.mark.parametrize("argv, message", [
    (["--agreement", "0.5"], "--agreement and --draft-shape need --shape"), (["--turns", "0"], "--turns 0 must be 1 or more"),
    (["-k", "0"], "0 is not a number of guesses"), (["--shape", "tiny", "--agreement", "2"], "agreement 2.0 must lie"),
    (["--shape", "tiny", "--draft-shape", "qwen3-0.6b"], "different vocabularies"),
    (["--gpu-check", "--device", "cpu"], "needs a GPU"), (["--peers", "--temperature", "1"], "--peers is greedy"),
    (["--target", "nowhere"], "nowhere"), (["--agreement", "0"], "need --shape"), (["--curve", "--peers"], "not allowed with"),
    (["--shape", "tiny", "--agreement", "0"], "agreement 0.0 must lie"), (["--device", "gpu"], "--device gpu is not available"),
    (["--json", "/dev/null/x/y"], "cannot be written"), (["--plot", "x.png", "--peers"], "leave it out"),
    (["--prompts", "x", "--curve"], "no --shape, --curve"), (["--batch", "2", "--peers"], "--batch 2 has no meaning"), (["--most-prompts", "0"], "--most-prompts 0 must"),
    (["--shape", "tiny", "--draft", "x"], "name the draft by --draft-shape")])
def test_refusals_are_one_line(argv, message, capsys):
    assert bench.main([*argv, "--threads", "1"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
