"""Stages under a clock: each writes down what it found at once, whatever happens to the next.  For bench_gpu.py."""
import json
import os
import sys
import time
import traceback
from collections import namedtuple
from pathlib import Path

Stage = namedtuple("Stage", "name function least cuda", defaults=(10, False))       # least: seconds it needs to begin


class OutOfTime(BaseException):
    """No Exception: compilers and their tuners swallow those."""


def run(c, stage: Stage):
    """One stage, its rows written as they come.  c: the clock and the report, see Check in bench_gpu.py."""
    record = {"stage": stage.name, "status": "running", "seconds": 0.0, "rows": []}
    c.report["stages"].append(record)
    c.save()
    start, c.inside = time.monotonic(), True
    try:
        if stage.cuda and not c.gpu:
            record["status"] = "skipped: no GPU"
        elif c.left() < stage.least:
            record["status"] = "skipped: out of time"
        else:
            for row in stage.function(c):
                record["rows"].append(c.about | row)
                c.save()
            record["status"] = "ok"
    except OutOfTime:
        record["status"] = "cut short: out of time"
    except Exception as error:          # whatever it is: the next stage may still tell something
        record["status"], record["traceback"] = f"failed: {first_line(error)}", traceback.format_exc()
    c.inside, record["seconds"] = False, time.monotonic() - start
    c.save()
    print(f"{time.monotonic() - c.start:5.0f} s  {stage.name}: {record['status']}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def save(report: dict, file: Path):
    """Write the report as JSON, and beside it as Markdown."""
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = json.dumps(report, indent=1), markdown(report)
    for file, text in zip((file, file.with_suffix(".md")), texts):
        part = file.with_name(file.name + ".part")          # whoever kills us finds the old file or the new one
        part.write_text(text + "\n")
        os.replace(part, file)


def markdown(report: dict) -> str:
    """The report as tables, one a stage."""
    def cell(x):
        return "–" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x).replace("|", "/")
    lines = [", ".join(f"{key} {value}" for key, value in report["about"].items() if value is not None)]
    for s in report["stages"]:
        lines += ["", f"**{s['stage']}**: {s['status']} ({s['seconds']:.0f} s)"]
        if s["rows"]:
            keys = [key for key in dict.fromkeys(k for r in s["rows"] for k in r) if
                    any(r.get(key) != report["about"].get(key) for r in s["rows"])]
            lines += ["", "| " + " | ".join(keys) + " |", "|---" * len(keys) + "|"]
            lines += ["| " + " | ".join(cell(r.get(key)) for key in keys) + " |" for r in s["rows"]]
    return "\n".join(lines)
