"""train.py on a tiny target: texts, resuming, what is saved and loaded; Medusa and the small draft while drafting.

"Kills:" names the bug that was planted once and made the test fail.
"""
import itertools
import json
import lzma
import math

import pytest
import torch

import choose_draft
import convert_weights as cw
import generate as cli
import model
import test_law as law
import train
import train_data
from checkpoints import hf_folder, one_thread  # noqa: F401 (autouse)
from conftest import TARGET, decode, prompts_for
from draft_dflash import DFlash
from draft_eagle import Eagle
from draft_medusa import RANKS, Medusa, MedusaDraft, best_tree
from draft_small import Small
from draft_trained import borrow, drafter_of, fingerprint, load_trained, own_weights
from generate import compile_round, generate
from load import open_checkpoint
from model import CACHE_LINE, KVCache
from sample import Sampling
from speculate import State, speculate

PROMPTS = ["the theme", "of them", "is there", "there is", "them there", "a b c", "count 1 2 3", "emoji 👍🏽", "x = 1", "why", "o", "is"]

ROWS = 20_000


def random_drafter(kind, target=TARGET, R=30, **shape):
    g = torch.Generator().manual_seed(9)
    vocab = torch.randperm(target.config.tokens, generator=g)[:R].sort().values
    model = kind(target.config, vocab, **shape)
    for p in own_weights(model).values():
        p.data = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 if p.dim() > 1 else torch.ones_like(p)
    return borrow(model, target).requires_grad_(False)


def medusa(**options):
    return random_drafter(Medusa, heads=3, **options)


def small(**options):
    return random_drafter(Small, layers=1, ffn_dim=48, **options)


# ---- drafting

@torch.no_grad()
@pytest.mark.parametrize("make", [medusa, small])
def test_drafting_computes_what_training_unrolls(make):
    """The chain of every round, against `unroll` on the whole text.  Kills: features of another row than n; head i read for
    guess i + 1; the small model's output rows by position in the vocabulary; start() taking the last chunk's last row."""
    B, seen, net = 2, [], make()
    state = State(KVCache(TARGET.config, B, 192), B, 192)
    drafter, prompts = drafter_of(net, TARGET, state, 3, None), [[5, 9, 11], list(range(40)) * 2]
    for _ in generate(TARGET, drafter, state, Sampling(B), prompts, [20] * B):
        seen.append((state.tokens.clone(), state.pos.clone(), drafter.propose(state, Sampling(B)).tokens))
    for tokens, pos, guesses in seen[:-1]:
        for row in range(B):
            if pos[row] >= len(prompts[row]) + 19:
                continue
            ids, want = tokens[row, :pos[row] + 1].tolist(), []
            for s in range(3):
                text = torch.tensor([ids + want + [0] * (3 - s)])       # what comes later must not matter
                taps = TARGET(text, torch.zeros(1, dtype=torch.int64), KVCache(TARGET.config, 1, text.shape[1]),
                              text.shape[1], taps=net.taps)[1]
                g = net.unroll(text, taps, 3)[s][0, len(ids) - 2]
                want.append(net.vocab[net.logits(g).argmax()].item())
            assert guesses[row].tolist() == want


def drafters(state):
    clone = random_drafter(Small, layers=2, ffn_dim=64, R=40)
    train.start_small(clone, TARGET, [])                                # the target itself, but for 8 tokens
    return {"medusa": MedusaDraft(medusa(), state, 3), "medusa tree": MedusaDraft(medusa(), state, 3, 9),
            "small": drafter_of(clone, TARGET, state, 3, None)}


@pytest.mark.parametrize("kind", ["medusa", "medusa tree", "small"])
def test_greedy_text_is_plain(kind):
    state = State(KVCache(TARGET.config, 3, 192), 3, 192)
    texts, rounds = decode(None, 3, prompts_for(3), 60, state=state, drafter=drafters(state)[kind])
    assert texts == decode("none", 0, prompts_for(3), 60)[0]
    assert any(kept for round in rounds for _, kept in round), "nothing was ever kept: this test says nothing"


@torch.no_grad()
def test_a_node_is_its_heads_choice():
    """Of the head of its depth, the choice of its rank: a tree's tokens are in the order of its parents."""
    state, net = State(KVCache(TARGET.config, 2, 192), 2, 192), medusa(rates=[[0.7, 0.2, 0.05]] * 3)
    drafter = drafter_of(net, TARGET, state, 3, 9)
    next(generate(TARGET, drafter, state, Sampling(2), prompts_for(2), [9] * 2))
    draft, heads, depth = drafter.propose(state, Sampling(2)), net.logits(net(drafter.feature)[:, 0]), [-1]
    for node, (parent, rank) in enumerate(zip(*best_tree(net.rates, 3, 9))):
        depth.append(depth[parent] + 1)
        assert draft.tokens[:, node].equal(net.vocab[heads[:, depth[-1]].sort(descending=True).indices[:, rank]])
        assert draft.tree.parents[node] == parent
    assert max(depth) == 2


@pytest.mark.parametrize("kind", ["tree", "small"])
def test_joint_law_of_three_tokens(kind, monkeypatch):
    """test_law's test through the compiled round.  Kills: q of the small model over its own vocabulary's order."""
    monkeypatch.setattr(model, "CHUNK", 4)
    state = State(KVCache(law.TARGET.config, ROWS, law.S), ROWS, law.S)
    net = small(target=law.TARGET, R=6) if kind == "small" else random_drafter(Medusa, law.TARGET, 8, heads=2)
    monkeypatch.setattr("draft_medusa.RANKS", 8)
    net.rates = [[0.5 ** r for r in range(1, 9)]] * 2 if kind != "small" else None
    sampler = law.Sampler(drafter_of(net, law.TARGET, state, 2, 4 if kind == "tree" else None), ROWS)
    settings, step = {"temperature": 1.5}, compile_round()      # all 512 texts are possible
    assert law.p_value(sampler.texts(step, settings, seed=3), law.enumerate_law(settings)) > 1e-4


def test_best_tree_is_the_best():
    """Against all trees of that many nodes.  Kills: a child's chance not its path's; a child hung under the node
    before its parent."""
    rates = [[0.5, 0.25, 0.1], [0.6, 0.2, 0.1], [0.9, 0.05, 0.01]]
    paths = {path: math.prod(rates[i][r] for i, r in enumerate(path)) for K in (1, 2, 3)
             for path in itertools.product(range(3), repeat=K)}
    for N in range(1, 9):
        parents, ranks = best_tree(rates, 3, N)
        mine = [()]
        for parent, rank in zip(parents, ranks):
            mine.append(mine[parent] + (rank,))
        assert len(set(mine)) == N + 1
        assert sum(paths[p] for p in mine[1:]) == pytest.approx(sum(sorted(paths.values())[-N:]))


# ---- training

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    hf_folder(root / "hf")
    cw.convert(str(root / "hf"), root / "target")
    (root / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return root


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    for name, value in (("BATCH", 5), ("NEW", 12), ("LONGEST", 40), ("HELD_OUT", 4), ("compile_round", lambda: speculate)):
        monkeypatch.setattr(train_data, name, value)


def run(folder, kind, out, *argv):
    return train.main([kind, "--target", str(folder / "target"), "--prompts", str(folder / "prompts.txt"), "--vocab", "100",
                       "--depth", "2", "--heads", "2", "--layers", "1", "--ffn-dim", "40", "--taps", "0", "1",
                       "--lr", "0.01", "--out", str(out), *map(str, argv)])


def test_texts_are_the_targets_own(folder, tmp_path, monkeypatch):
    """What a shard holds is what generate writes, its features what the target computes; a missing shard is written again,
    the same.  Kills: features one position off; the last batch's filler kept; seeds that depend on the batch."""
    opened = open_checkpoint(folder / "target")
    target = opened.load()

    def write():
        train_data.write_texts(target, opened.tokens, None, PROMPTS, (0, 1), tmp_path, lambda: False, lambda text: None)
        return train_data.read_texts(tmp_path, (0, 1))

    texts = write()
    assert len(texts) == 3 * len(PROMPTS) and {t.temperature for t in texts} == {0.0, 1.0}
    for t in texts:
        ids = opened.tokens.prompt(t.prompt)
        assert t.tokens[:t.start].tolist() == ids and t.start == len(ids)
        assert len(t.tokens) == len(ids) + 12 or t.tokens[-1] in opened.tokens.eos
        with torch.no_grad():
            T = len(t.tokens)
            hidden, tapped = target(t.tokens[None], torch.zeros(1, dtype=torch.int64), KVCache(target.config, 1, T), T, taps=(0, 1))
        torch.testing.assert_close(t.features[:-1].float(), tapped[0, :-1], rtol=0.01, atol=0.02)
        if t.temperature == 0:
            assert target.head(hidden)[0, t.start - 1:-1].argmax(-1).tolist() == t.tokens[t.start:].tolist()
    (tmp_path / "0002.safetensors").unlink()
    assert [t.tokens.tolist() for t in write()] == [t.tokens.tolist() for t in texts]
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr(train_data, "BATCH", 7)
    assert [t.tokens.tolist() for t in write()] == [t.tokens.tolist() for t in texts]
    with pytest.raises(ValueError, match=r"layers \[0, 1\], not \[1\]"):
        train_data.read_texts(tmp_path, (1,))
    assert train_data.recorded_taps(tmp_path, (1,)) == (0, 1) and train_data.recorded_taps(tmp_path / "no", (1,)) == (1,)
    with pytest.raises(ValueError, match="not 2"):
        train_data.recorded_taps(tmp_path, (1, 2))


@pytest.mark.parametrize("kind", ["plain.txt", "plain.txt.xz"])
def test_plain_text_is_read_as_the_target_reads_it(folder, tmp_path, kind, monkeypatch, capsys):
    """Pieces in a fixed order, features of each token, never held out, only in the first half of training.  Kills: a piece
    that continues the one before it in the cache; the last, smaller group or shard lost, or filled up; plain text in the second half."""
    monkeypatch.setattr(train_data, "PASSAGE", 8)
    monkeypatch.setattr(train_data, "FEW", 3)
    prose = "the theme of them is there\n" * 13
    (tmp_path / kind).write_bytes(lzma.compress(prose.encode()) if kind.endswith("xz") else prose.encode())
    opened = open_checkpoint(folder / "target")
    target, texts = opened.load(), tmp_path / "texts"
    passages = train_data.read_passages(tmp_path / kind, opened.tokens)
    assert len(passages) == len(opened.tokens.encode(prose)) // 8 and len(passages) % 5 and len(passages) % 3
    learned, real = [], train.learn_from
    monkeypatch.setattr(train, "learn_from", lambda m, t, batch, *rest: learned.append(batch) or real(m, t, batch, *rest))
    assert run(folder, "eagle", tmp_path / "out", "--text", tmp_path / kind, "--texts", texts, "--steps", 40) == 0
    plain = [t for t in train_data.read_texts(texts, (0, 1)) if t.prompt is None]
    assert [t.tokens.tolist() for t in plain] == [p.tolist() for p in passages]
    for t in plain:
        with torch.no_grad():
            want = target(t.tokens[None], torch.zeros(1, dtype=torch.int64), KVCache(target.config, 1, 8), 8, taps=(0, 1))[1]
        torch.testing.assert_close(t.features.float(), want[0], rtol=0.01, atol=0.02)
    assert not any(train_data.is_held_out(t.prompt) for t in plain)
    kinds = [{t.prompt is None for t in batch} for batch in learned]
    assert any(True in k for k in kinds[:20]) and not any(True in k for k in kinds[-10:])


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft", "dflash"])
def test_training_learns_saves_and_resumes(folder, tmp_path, capsys, kind, monkeypatch):
    """Kills: parameters of the target trained too; --resume beginning anew; rates not saved; weights saved that are borrowed."""
    before = {n: p.clone() for n, p in open_checkpoint(folder / "target").load().named_parameters()}
    losses, used, real = [], [], train.loss_of
    begin = train.start_dflash                  # surer than it should be: unsure is nearly all that so small a target teaches
    monkeypatch.setattr(train, "start_dflash", lambda model, *more: begin(model, *more) or model.norm.weight.data.mul_(10))
    monkeypatch.setattr(train, "loss_of", lambda *a: used.append(a[1]) or losses.append(real(*a)) or losses[-1])
    assert run(folder, kind, tmp_path / "out", "--steps", 60) == 0
    first = len(losses)
    assert first == 60
    assert sum(x.item() for x in losses[-5:]) < 0.95 * sum(x.item() for x in losses[:5])
    about = json.loads((tmp_path / "out/config.json").read_text())
    assert about["kind"] == kind and about["steps"] == first and len(about["acceptance"]["0.0"]) == 2
    assert run(folder, kind, tmp_path / "out", "--steps", 70, "--resume") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["steps"] == len(losses) == 70
    assert sum(x.item() for x in losses[-5:]) < 0.95 * sum(x.item() for x in losses[:5])
    assert all(torch.equal(p, before[n]) for n, p in used[-1].named_parameters())
    target = open_checkpoint(folder / "target").load()
    net = load_trained(tmp_path / "out", target)
    assert net.trained_for == fingerprint(target) and len(net.vocab) == 100
    saved = torch.load(tmp_path / "out/training.pt", weights_only=True)["model"]
    assert saved.keys() == own_weights(net).keys()
    for name, p in own_weights(net).items():
        assert torch.equal(p, saved[name].bfloat16()) and p.data_ptr() % CACHE_LINE == 0
    if kind == "medusa":
        assert "rates" in about["shape"] and len(net.rates[0]) == RANKS and 0 < sum(net.rates[0]) <= 1
    # and the command line takes it
    assert cli.main(["--target", str(folder / "target"), "--draft", str(tmp_path / "out"), "-k", "2", "--no-compile", "--raw",
                     "--prompt", "the them", "--max-new-tokens", "10", "--json"]) == 0
    assert cli.main(["--target", str(folder / "target"), "--draft", "none", "--no-compile", "--raw",
                     "--prompt", "the them", "--max-new-tokens", "10", "--json"]) == 0
    ours, plain = (json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines())
    assert ours == plain


def test_a_drafter_may_read_fewer_layers_than_were_recorded(folder, tmp_path, monkeypatch, capsys):
    """Kills: the columns of other layers; texts written again for every choice of layers."""
    seen, real = [], Eagle.unroll
    monkeypatch.setattr(Eagle, "unroll", lambda m, tokens, features, depth: seen.append(features) or real(m, tokens, features, depth))
    texts = tmp_path / "texts"
    for taps in (("0", "1"), ("1",)):
        assert run(folder, "eagle", tmp_path / "out", "--texts", texts, "--steps", 1, "--taps", *taps) == 0
    dim = seen[-1].shape[-1]
    whole = [x for x in seen if x.shape[-1] == 2 * dim]
    assert any(x.shape[:2] == seen[-1].shape[:2] and torch.equal(x[..., dim:], seen[-1]) for x in whole)


REFUSED = {
    "no prompts": (lambda d: (d / "prompts.txt").write_text(""), [], "is empty"),
    "nothing to resume": (lambda d: None, ["--resume"], "begin anew"),
    "few prompts": (lambda d: (d / "prompts.txt").write_text("o\n"), [], "held out"),
    "taps": (lambda d: None, ["--taps", "0"], "last layer"),
    "layer": (lambda d: None, ["--taps", "7", "1"], "7"),
    "no text": (lambda d: None, ["--text", "nowhere.txt"], "nowhere.txt"),
    "latin-1": (lambda d: (d / "x.txt").write_bytes(b"caf\xe9" * 999), ["--text", "x.txt"], "UTF-8"),
    "short text": (lambda d: (d / "x.txt").write_text("the"), ["--text", "x.txt"], "tokens"),
    "no xz": (lambda d: (d / "x.xz").write_text("the"), ["--text", "x.xz"], "x.xz"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(folder, tmp_path, capsys, name):
    spoil, argv, says = REFUSED[name]
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    spoil(tmp_path)
    argv = [tmp_path / a if "." in a else a for a in argv]
    code = run(folder, "eagle", tmp_path / "out", "--steps", 1, "--prompts", tmp_path / "prompts.txt",
               "--texts", tmp_path / "texts", *argv)
    err = capsys.readouterr().err.splitlines()
    assert code == 2 and says in err[-1] and err[-1].startswith("train.py: ")


DAMAGE = {
    "unknown kind": (lambda d, a: a.update(kind="hydra"), "hydra"),
    "no shape": (lambda d, a: a.pop("shape"), "shape"),
    "no weights": (lambda d, a: (d / "model.safetensors").unlink(), "no drafter for a target of 2 layers"),
    "other layers": (lambda d, a: a["shape"].update(taps=[0, 1, 5]), "no drafter for a target of 2 layers"),
    "cut": (lambda d, a: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:100]), "no drafter for"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_drafters_are_one_line(folder, tmp_path, capsys, name):
    spoil, says = DAMAGE[name]
    target = open_checkpoint(folder / "target").load()
    net = random_drafter(Eagle, target, 50, taps=(0, 1))
    about = {"kind": "eagle", "shape": {"taps": [0, 1]}, "fingerprint": fingerprint(target)}
    train.save(net, tmp_path, about, {})
    load_trained(tmp_path, target)
    spoil(tmp_path, about)
    (tmp_path / "config.json").write_text(json.dumps(about))
    code = cli.main(["--target", str(folder / "target"), "--draft", str(tmp_path), "--no-compile", "--raw", "--prompt", "a",
                     "--max-new-tokens", "4"])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_auto_takes_the_best_trained_for_this_target(folder, tmp_path, capsys, monkeypatch):
    """Kills: a drafter of another target taken; the worse of two; a damaged folder that stops the start; its K ignored."""
    target = open_checkpoint(folder / "target").load()
    monkeypatch.setattr(choose_draft, "MODELS", tmp_path)

    def add(name, print_, rates, **more):
        train.save(random_drafter(Medusa, target, 50, heads=3), tmp_path / name,
                   {"kind": "medusa", "shape": {"heads": 3}, "fingerprint": print_, "acceptance": {"0.0": rates}} | more, {})

    def run_auto(*argv):
        code = cli.main(["--target", str(folder / "target"), "--no-compile", "--raw", "--prompt", "the", "--max-new-tokens", "4",
                         "--json", "--temperature", "1", "--seed", "0", *argv])              # so that K is not auto
        out, err = capsys.readouterr()
        return code, (json.loads(out)["stats"]["draft"], json.loads(out)["stats"]["k"]) if out else err

    assert run_auto() == (0, ("ngram", 4))
    add("other", fingerprint(target) + 1, [0.9, 0.9])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"kind": ')
    assert run_auto() == (0, ("ngram", 4))
    add("worse", fingerprint(target), [0.5, 0.6, 0.6])
    add("better", fingerprint(target), [0.7, 0.8, 0.1], k=2)
    assert run_auto() == (0, (str(tmp_path / "better"), 2)) and run_auto("-k", "1")[1][1] == 1
    assert run_auto("--draft", "ngram") == (0, ("ngram", 4))
    assert run_auto("-k", "3", "--tree", "2")[0] == 2
    train.save(random_drafter(Eagle, target, 50, taps=(0, 1)), tmp_path / "best",
               {"kind": "eagle", "shape": {"taps": [0, 1]}, "fingerprint": fingerprint(target), "acceptance": {"0.0": [0.9, 0.9]}}, {})
    assert run_auto() == (0, (f"ngram+{tmp_path / 'best'}", 4))                 # copies are looked up
    assert run_auto("-k", "2", "--tree", "3") == (0, (str(tmp_path / "best"), 2))
    shape = {"taps": [0, 1], "layers": 1, "ffn_dim": 40, "block": 3}
    train.save(random_drafter(DFlash, target, 50, **shape), tmp_path / "flash",
               {"kind": "dflash", "shape": shape, "fingerprint": fingerprint(target), "acceptance": {"0.0": [0.9, 0.9, 0.9]}, "k": 3}, {})
    assert run_auto() == (0, (f"ngram+{tmp_path / 'flash'}", 3))
    assert run_auto("-k", "2", "--tree", "3") == (0, (str(tmp_path / "best"), 2))               # it guesses no tree
    code, err = run_auto("-k", "4")
    assert code == 2 and err.endswith("not 4: -k 3 is the most\n")
