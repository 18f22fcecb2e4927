"""What is foretold of a run's memory is what it takes; what cannot fit is refused before a weight is read.

"Kills:" names the bug that was planted once and made the test fail.
"""
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import generate as cli
import load
import memory
import train
from conftest import random_model
from draft_eagle import Eagle
from draft_medusa import Medusa
from draft_small import Small
from memory import Needs, fit
from test_generate import folder, readable
from test_train import random_drafter


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root, target = tmp_path_factory.mktemp("models"), readable(0)
    folder(root / "target", target)
    folder(root / "near", random_model(1, readable(0, layers=1).config))
    for name, kind, shape in (("eagle", Eagle, {"taps": [0, 1]}), ("medusa", Medusa, {"heads": 3}),
                              ("draft", Small, {"layers": 1, "ffn_dim": 48})):
        train.save(random_drafter(kind, target, 50, **shape), root / name, {"kind": name, "shape": shape}, {})
    return root


def allocated(*modules) -> tuple[int, int]:
    """-> bytes of parameters and buffers, by where they really lie; of those with one row for each of 3 prompts."""
    tensors = {t.data_ptr(): t for module in modules for t in (*module.parameters(), *module.buffers()) if t.numel()}
    sizes = [(t.nbytes, t.dim() and t.shape[0] == 3) for t in tensors.values()]
    return sum(n for n, _ in sizes), sum(n for n, rows in sizes if rows)


def modules_of(drafter) -> list:
    """Of a drafter that is one, or that has some."""
    if isinstance(drafter, torch.nn.Module):
        return [drafter]
    return [m for x in vars(drafter).values() for m in ([x] if isinstance(x, torch.nn.Module) else
                                        modules_of(x) if hasattr(x, "propose") else [])]


@pytest.fixture
def plans(monkeypatch) -> list[Needs]:
    """What was foretold in this test."""
    plans, real = [], memory.needs
    monkeypatch.setattr(memory, "needs", lambda *a: plans.append(real(*a)) or plans[-1])
    return plans


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["none", "ngram", "jacobi", "lookahead:4,3,2", "exit:1", "{m}/near", "{m}/target",
                                   "{m}/draft", "{m}/eagle", "{m}/eagle --tree 6", "{m}/medusa -k 2", "ngram+{m}/eagle"])
def test_foretold_is_taken(draft, dtype, models, plans, monkeypatch):
    """Kills: a draft's cache or weights left out; a draft that is the target counted twice; trained drafters in the
    target's dtype on the CPU; caches for fewer rows."""
    engines, real = [], cli.Engine
    monkeypatch.setattr(cli, "Engine", lambda *a: engines.append(real(*a)) or engines[-1])
    argv = ["--target", str(models / "target"), "--no-compile", "--raw", "--max-new-tokens", "3", "--dtype", dtype]
    argv += ["--prompt", "a", "--prompt", "bb", "--prompt", "c", "--draft", *draft.replace("{m}", str(models)).split()]
    assert cli.main(argv) == 0
    (needs,), (engine,) = plans, engines
    taken, by_row = allocated(engine.target, engine.state, *modules_of(engine.guesser), *modules_of(engine.nobody))
    assert needs.weights + needs.caches == taken
    # without a row for each prompt: a tree's shape, the list of end tokens
    assert 0 < by_row <= needs.caches < by_row + 3000


def test_check_is_foretold_too(models, plans):
    """Above temperature 0 it samples with more rows.  Kills: its state left out; the draft's weights counted again."""
    argv = ["--target", str(models / "target"), "--draft", str(models / "near"), "--no-compile", "--raw"]
    argv += ["--prompt", "a", "--max-new-tokens", "3"]
    for more in ([], ["--check"], ["--temperature", "1"], ["--check", "--temperature", "1"]):
        assert cli.main(argv + more) == 0
    assert plans[0] == plans[1] == plans[2] and plans[3].weights == plans[0].weights
    slots, rows, layers = 128, 160 // 5, 2 + 1          # of both models; keys and values of 2 heads of 8, and tokens
    assert 0 <= plans[3].caches - plans[0].caches - rows * slots * (layers * 2 * 2 * 8 * 4 + 8) < 3000


ARGS = SimpleNamespace(prompt=["a", "b"], interactive=False, check=False, device=torch.device("cpu"))
CHAT = SimpleNamespace(prompt=[], interactive=True, check=False, device=torch.device("cuda:1"))


def test_refused_with_numbers():
    """Kills: the estimate counted in; `<` for `<=`; a remedy that cannot help."""
    G, needs = 10**9, Needs(10 * 10**9, 5 * 10**9, 99 * 10**9)
    said = "weights 10.00 GB, caches 5.00 GB, rounds about 99.00 GB"
    assert fit(needs, 15 * G, ARGS, torch.float32) == said + ", of 15.00 GB free"
    assert fit(needs, None, ARGS, torch.float32) == said
    for free, args, dtype, where, remedies in (
            (15 * G - 1, ARGS, torch.float32, "15.00 GB that are free on cpu",
             "--dtype bfloat16, a smaller --max-new-tokens, fewer than 2 prompts at once"),
            (8 * G, ARGS, torch.float32, "8.00 GB that are free on cpu", "--dtype bfloat16"),
            (7 * G, ARGS, torch.float32, "7.00 GB that are free on cpu", "a smaller model"),
            (12 * G, CHAT, torch.bfloat16, "12.00 GB that are free on cuda:1",
             "--prompt instead of --interactive, whose caches hold a whole context")):
        with pytest.raises(ValueError) as error:
            fit(needs, free, args, dtype)
        need = "weights of 10.00 GB and caches of 5.00 GB"
        assert str(error.value) == f"{need} do not fit in the {where}: try {remedies}"


def test_refused_before_a_weight_is_read(models, monkeypatch, capsys):
    """Kills: the weights loaded first; the caches not counted."""
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(memory, "free", lambda _: 200_000)          # the weights alone would fit
    argv = ["--target", str(models / "target"), "--draft", "ngram", "--no-compile", "--raw", "--prompt", "a"]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "caches of 0.14 MB do not fit in the 0.20 MB that are free on" in err


def test_free(tmp_path):
    """Kills: MemFree, which leaves out what the system would give back; kB taken for bytes; swap left out."""
    proc, free = tmp_path / "meminfo", partial(memory.free, cgroup=tmp_path / "absent")
    proc.write_text("MemTotal:       100 kB\nMemFree:    1 kB\nMemAvailable:   40 kB\nSwapFree:   2 kB\n")
    assert free(torch.device("cpu"), proc) == 42 * 1024
    assert free(torch.device("cpu"), tmp_path / "absent") is None
    proc.write_text("MemTotal: 100 kB\n")
    assert free(torch.device("cpu"), proc) is None


def test_free_in_a_container(tmp_path):
    """Kills: the machine's memory taken for the container's; pages of files, which give way, taken for used; a limit
    that is already passed told as less than nothing."""
    proc = tmp_path / "meminfo"
    proc.write_text("MemAvailable:   40 kB\n")

    def free_within(limit: str) -> int:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("9000\n")
        (tmp_path / "memory.stat").write_text("anon 6500\ninactive_file 2000\nactive_file 500\nfile_dirty 7\n")
        return memory.free(torch.device("cpu"), proc, tmp_path)
    assert [free_within(limit) for limit in ("max", "10000", "90000", "100")] == [40960, 3500, 40960, 0]
