"""The script for a GPU, tried on the CPU: every stage leaves a record, and one that fails does not stop the others."""
import json

import pytest
import torch

import bench
import bench_gpu
import bench_measure
from speculate import speculate

pytestmark = pytest.mark.xdist_group("bench")


@pytest.fixture
def quick(monkeypatch):
    """Nothing compiled, few texts: this is about the script, not about what it measures."""
    monkeypatch.setattr(bench_gpu, "compile_round", lambda: speculate)
    for module in (bench_gpu, bench_measure):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    monkeypatch.setattr(bench_gpu, "CPU", bench_gpu.CPU._replace(ks=(2, 3), law_rows=1_000))
    monkeypatch.setattr(bench_gpu, "ROUNDS", 2)


def run(tmp_path) -> tuple[int, dict, str]:
    file = tmp_path / "out" / "check.json"
    arguments = ["--gpu-check", "--device", "cpu", "--shape", "tiny", "--threads", "1", "--turns", "1"]
    code = bench.main([*arguments, "--max-new-tokens", "12", "--json", str(file)])
    report = json.loads(file.read_text())
    return code, {s["stage"]: s for s in report["stages"]}, file.with_suffix(".md").read_text()


def test_every_stage_runs_or_says_why_not(quick, tmp_path, capsys):
    code, stages, text = run(tmp_path)
    assert code == 0 and text.strip() == capsys.readouterr().out.strip()
    assert {name: s["status"] for name, s in stages.items()} == dict.fromkeys(stages, "ok") | {
        "one graph": "skipped: no GPU", "one graph, the pair": "skipped: no GPU"}
    assert ", ".join(stages) == (
        "text draft, text ngram, one graph, law draft K=1, plain, agreement, draft K=2, one graph, the pair, "
        "transformers, ngram, accept, draft K=3, law draft K=3, text none, law ngram K=3, law draft K=3, truncated, "
        "targets")
    assert all(s["rows"] or s["status"] != "ok" for s in stages.values())
    for row in (r for s in stages.values() for r in s["rows"]):
        assert {"device", "torch", "triton", "dtype", "batch", "k", "temperature", "agreement"} <= row.keys()
    assert 0 < stages["plain"]["rows"][0]["floor_share"] and stages["draft K=2"]["rows"][0]["predicted"] > 0
    assert {r["engine"].split(",")[0] for r in stages["transformers"]["rows"]} == {"transformers", "this one"}
    assert len(stages["targets"]["rows"]) == 4


def only(monkeypatch, *names, **changes):
    every = bench_gpu.stages
    monkeypatch.setattr(bench_gpu, "stages", lambda c: [s._replace(**changes) for s in every(c) if s.name in names])


def test_a_stage_that_fails_is_recorded_and_the_rest_runs(quick, tmp_path, monkeypatch):
    def broken(check):
        yield {"before": 1}
        raise RuntimeError("out of luck\nand more")
    monkeypatch.setattr(bench_gpu, "plain", broken)
    only(monkeypatch, "plain", "ngram", "accept")
    code, stages, text = run(tmp_path)
    assert code == 1 and "failed: RuntimeError: out of luck" in text
    plain = stages["plain"]
    assert plain["status"] == "failed: RuntimeError: out of luck" and plain["rows"][0]["before"] == 1
    assert "in broken" in plain["traceback"]
    assert stages["ngram"]["status"] == stages["accept"]["status"] == "ok"


def test_what_does_not_fit_the_time_is_skipped(quick, tmp_path, monkeypatch):
    """The alarm ends a stage in its middle, even one that swallows exceptions."""
    def endless(check):
        yield {"before": 1}
        while True:
            try:
                torch.zeros(1).sum()
            except Exception:
                pass
    monkeypatch.setattr(bench_gpu, "SECONDS", 1)
    monkeypatch.setattr(bench_gpu, "plain", endless)
    only(monkeypatch, "plain", "accept", least=0.5)
    code, stages, _ = run(tmp_path)
    assert code == 0 and stages["plain"]["status"] == "cut short: out of time" and len(stages["plain"]["rows"]) == 1
    assert stages["accept"]["status"] == "skipped: out of time"


def test_what_is_not_one_graph_is_told(quick, tmp_path, monkeypatch):
    """The CUDA stage itself, with the GPU's calls left out: eager code launches no graph, and runs operators."""
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    only(monkeypatch, "text ngram", "one graph", cuda=False)
    code, stages, _ = run(tmp_path)
    assert code == 1 and "1 of 1 rounds" in stages["one graph"]["status"] and modes == ["error", "default"]
    row, = stages["one graph"]["rows"]
    assert row["graph_launches"] == 0 and row["outside"]["aten::argmax"] >= 1 and row["draft"] == "ngram"


def test_no_gpu_and_no_shape_is_one_line(capsys):
    assert bench.main(["--gpu-check", "--device", "cpu"]) == 2
    assert "--shape tiny" in capsys.readouterr().err
