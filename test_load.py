"""load.py and --check: checkpoints used as they are, and what is said of one or two of them.  CPU, no torch.compile.

"Kills:" names the bug that was planted once and made the test fail.
"""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert_weights as cw
import generate as cli
import tokenizer
from checkpoints import checkpoint, damage, edit, hf_folder, logits, one_thread  # noqa: F401 (autouse)
from load import open_checkpoint
from model import CACHE_LINE, load_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """hf: as Hugging Face stores it; ours: converted; small: another model with hf's tokenizer, not converted."""
    root = tmp_path_factory.mktemp("load")
    hf_folder(root / "hf")
    cw.convert(str(root / "hf"), root / "ours")
    shutil.copytree(root / "hf", root / "small")
    checkpoint(root / "small", vocab_size=448, num_hidden_layers=1)
    return root


def text(capsys, *argv) -> tuple[int, str, str]:
    code = cli.main(["--no-compile", "--raw", "--prompt", "the them", "--max-new-tokens", "20", "--json",
                     *map(str, argv)])
    out, err = capsys.readouterr()
    return code, json.loads(out)["tokens"] if out else out, err


def test_an_unconverted_folder_is_the_same_model(folders, capsys):
    """Kills: the source's names handed to build; the dtype asked for ignored."""
    before = sorted(p.name for p in folders.iterdir())
    ours, theirs = (open_checkpoint(folders / name) for name in ("ours", "hf"))
    tokens = torch.randint(402, (2, 40), generator=torch.Generator().manual_seed(3))
    assert torch.equal(logits(ours.load(), tokens), logits(theirs.load(), tokens))
    assert theirs.load("cpu", torch.bfloat16).embed.weight.dtype == torch.bfloat16
    assert tokenizer.compare(ours.tokens, theirs.tokens) is None and ours.config == theirs.config
    assert text(capsys, "--target", folders / "ours")[:2] == text(capsys, "--target", folders / "hf")[:2]
    assert sorted(p.name for p in folders.iterdir()) == before          # nothing was written beside it


def test_weights_begin_at_a_line_of_the_cache(folders, tmp_path):
    """What convert_weights.py writes is mapped as it lies; a file that lies across lines is copied.  Kills: a header of
    any length; weights used where they lie."""
    off = lambda weights: {w.data_ptr() % CACHE_LINE for w in weights}
    path = shutil.copytree(folders / "ours", tmp_path / "moved") / "model.safetensors"
    assert off(load_file(path).values()) == {0}
    length, rest = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()[8:]
    path.write_bytes((length + 8).to_bytes(8, "little") + rest[:length] + b" " * 8 + rest[length:])
    assert off(load_file(path).values()) == {8}
    moved, tokens = load_model(path.parent), torch.arange(40)[None]
    assert off(moved.parameters()) == {0}
    assert torch.equal(logits(moved, tokens), logits(load_model(folders / "ours"), tokens))


def test_an_unconverted_folder_can_draft(folders, capsys):
    """Kills: only the target opened through load.py."""
    code, plain, _ = text(capsys, "--target", folders / "hf", "--draft", "none")
    assert (code, len(plain)) == (0, 20)
    assert text(capsys, "--target", folders / "hf", "--draft", folders / "small")[:2] == (0, plain)


@pytest.mark.parametrize("spoil, says", [
    (lambda f: (f / "config.json").write_text("{"), "convert"),
    (lambda f: edit(f, hidden_act="gelu"), "gelu"),
    (lambda f: damage(f / "model.safetensors", 0.5), "model.safetensors is damaged"),
    (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.model or tokenizer.json"),
    (lambda f: edit(f, drop=["model_type"]), "convert")])
def test_damage_is_one_line(folders, tmp_path, capsys, spoil, says):
    """Kills: `convertible` raising; read_source's errors not caught in generate.main."""
    shutil.copytree(folders / "hf", tmp_path / "hf")
    spoil(tmp_path / "hf")
    code, out, err = text(capsys, "--target", tmp_path / "hf")
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err


# ---- --check

def check(capsys, *folders) -> tuple[int, str, str]:
    code = cw.main(["--check", *map(str, folders)])
    return code, *capsys.readouterr()


def test_check_says_what_a_folder_is(folders, capsys):
    """Kills: the special tokens' number for the vocabulary's; context and vocabulary swapped."""
    for name in ("ours", "hf"):
        code, out, err = check(capsys, folders / name)
        lines = {line[:14].strip(): line[14:] for line in out.splitlines()[1:]}
        assert (code, err) == (0, "")
        assert lines["context"] == "128 tokens"
        assert lines["vocabulary"] == "402 tokens, 110 padding rows; tiktoken"
        assert lines["parameters"].startswith(f"{sum(p.numel() for p in open_checkpoint(folders / name).load().parameters()):,}")
        assert lines["first token"] == "'<s>' (400)" and lines["end tokens"].startswith("'<|endoftext|>' (0), '<|im_end|>' (1)")
        assert lines["special"] == "4: <|endoftext|>, <|im_end|>, <s>, <think>" and lines["template"] == "none"
        assert "nats a token" in lines["forward"]


def test_check_of_two(folders, tmp_path, capsys):
    """Kills: padding rows compared (448 rows against 512); the exit code of a difference lost."""
    code, out, _ = check(capsys, folders / "ours", folders / "small")
    assert code == 0 and "can be target and draft: same tokens" in out
    shutil.copytree(folders / "small", tmp_path / "other")
    raw = json.loads((tmp_path / "other/tokenizer.json").read_text())
    raw["added_tokens"][-1]["content"] = "<thunk>"
    edit(tmp_path / "other", "tokenizer.json", **raw)
    code, out, _ = check(capsys, folders / "ours", tmp_path / "other")
    assert code == 1 and "cannot be target and draft" in out and "<thunk>" in out


def test_check_finds_weights_that_are_no_numbers(folders, tmp_path, capsys):
    """A checkpoint with NaN converts, with a warning, and fails --check.  Kills: describe's result ignored."""
    shutil.copytree(folders / "hf", tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    assert cw.main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    assert "layers.1.up.weight" in capsys.readouterr().err
    code, out, _ = check(capsys, tmp_path / "out")
    assert code == 1 and "NOT A NUMBER" in out


def test_check_of_a_folder_that_says_less(folders, tmp_path, capsys):
    """Folders of an earlier version name neither source nor family.  Kills: config["source"] taken for granted."""
    shutil.copytree(folders / "ours", tmp_path / "old")
    edit(tmp_path / "old", drop=["source", "family"])
    code, out, err = check(capsys, tmp_path / "old")
    assert (code, err) == (0, "") and "402 tokens" in out


def test_check_refuses_in_one_line(folders, capsys):
    """Kills: --dtype ignored without a word; main's `except` not around it."""
    for argv, says in ((["/nowhere"], "/nowhere"), ([folders / "ours", "--dtype", "bf16"], "--dtype"), ([], "name a checkpoint")):
        code, out, err = check(capsys, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1) and says in err
