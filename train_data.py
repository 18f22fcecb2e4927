"""What a drafter learns from: texts that the target itself wrote, cached on disk, and its features for each token of them.

A drafter is used on the target's own text, so it is trained on that, and not on books: at temperature 0 and at 1, because
it will be asked to guess at both.  Which prompts are held out is a property of the prompt, the same in every run.
"""
import json
import zlib
from pathlib import Path

import torch

import tokenizer as tokenizers
from drafts import NoDraft
from generate import compile_round, generate, make_state, warm_up
from sample import Sampling

HELD_OUT = 12           # one prompt in so many is never trained on
PASSES = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]        # temperature of the first, second, ... text of every prompt
LONGEST = 256           # prompt tokens; longer ones are left out
NEW = 160               # tokens written for each


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT == 0


def read_prompts(path) -> list[str]:
    """{"prompt": text} a line, or plain text, one prompt a line.  ValueError when there is none."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
        prompts = [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} holds no prompts ({error}): one a line, plain or as {{\"prompt\": ...}}") from None
    if not prompts:
        raise ValueError(f"{path} is empty: give one prompt a line")
    return list(dict.fromkeys(prompts))


def read_texts(path: Path) -> list[dict]:
    """The cache: {"prompt", "pass", "temperature", "start", "ids"} a line; ids[start:] is what the target wrote.  A last line
    that an interruption cut is left out."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


@torch.no_grad()
def write_texts(target, tokens, template, prompts: list[str], path: Path, passes: int, B: int, stop, note) -> None:
    """Append to the cache until every prompt has so many texts or stop() says so; prompts it already has are skipped."""
    done = {(t["prompt"], t["pass"]) for t in read_texts(path)}
    ids = {p: tokenizers.chat(template, [{"role": "user", "content": p}], tokens) if template else tokens.prompt(p)
           for p in prompts}
    todo = [(p, i) for i in range(passes) for p in prompts if len(ids[p]) <= LONGEST and (p, i) not in done]
    if not todo:
        return
    state = make_state(target, B, LONGEST + NEW, 0, tokens.eos)
    sampling, drafter, step = Sampling(B, device=state.pos.device), NoDraft(), compile_round()
    warm_up(step, target, drafter, state, sampling, LONGEST)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(keep := sum(len(json.dumps(t)) + 1 for t in read_texts(path)))
        file.seek(keep)
        for start in range(0, len(todo), B):
            batch = (todo[start:start + B] * B)[:B]                     # the last one is filled with texts thrown away
            temperatures = [PASSES[i % len(PASSES)] for _, i in batch]
            sampling.set(temperatures, seed=[zlib.crc32(f"{i} {p}".encode()) for p, i in batch])
            state.pos.fill_(-1)
            new = [[] for _ in batch]
            for round, _, _ in generate(target, drafter, state, sampling, [ids[p] for p, _ in batch], [NEW] * B, step):
                new = [a + b for a, b in zip(new, round)]
            for (p, i), t, text in list(zip(batch, temperatures, new))[:len(todo) - start]:
                line = {"prompt": p, "pass": i, "temperature": t, "start": len(ids[p]), "ids": ids[p] + text}
                file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            note(f"texts: {min(start + B, len(todo))} of {len(todo)} written")
            if stop():
                return
