"""Does a run fit the memory?  Answered before any of it is taken.

All that a command will allocate is first put together on PyTorch's device meta, by the same functions.  There tensors
have shapes and no bytes, and what they would hold is what they will hold.
"""
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from auto_k import Plain
from choose_draft import draws, load_drafter, model_of, pick_drafter, same_drafter
from draft_trained import own_weights
from model import default_dtype
from output import note
from sample import Sampling

# Float32 arrays of (B, N+1, V) that are alive at once where p is made and drawn from.  Measured in eager rounds at a
# vocabulary of 49,152: 6.4 to 7.2, and 12 to 13.1 with top-k, top-p or min-p, which sort.
ARRAYS, SORTED = 7, 13


class Needs(NamedTuple):
    """Bytes."""
    weights: int        # of the target and of the model that guesses, in the dtypes they will have
    caches: int         # what is there for every row: keys and values, tokens, what drafters remember
    work: int           # an estimate of what comes and goes within a round


def load_target(args, opened, states):
    """Settle --draft, say what the run will take, refuse what cannot be and only then read the target's weights.
    states(target) yields every State that the command will use.  ValueError with numbers where they do not fit."""
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(args.device)
    outline = opened.load("meta", dtype)
    outline.norm.weight = nn.Parameter(opened.read_one("norm.weight").to(dtype))    # a drafter knows its target by it
    pick_drafter(args, outline)
    outline.to("meta")
    states = list(states(outline))
    drafters = [load_drafter(args, outline, opened.tokens, states[0])]
    drafters += [same_drafter(args, outline, drafters[0], state) for state in states[1:]]
    drafters += [Plain(drafters[0].taps, states[0], outline)] if args.k_auto else []
    if args.verify == "block" and not draws(drafters[0], states[0], Sampling(len(states[0].pos), device="meta")):
        raise ValueError(f"--verify block judges a chain of guesses drawn from a distribution, and those of --draft "
                         f"{args.draft}{' --tree' if args.tree else ''} are chosen: leave --verify out")
    note(fit(needs(outline, states, drafters, args), free(args.device), args, dtype))
    return opened.load(args.device, dtype)


def needs(target, states: list, drafters: list, args) -> Needs:
    """Of a target on meta, and for each State on meta its drafter; what else there is for rows may follow."""
    model = model_of(drafters[0])                               # the others share it
    if args.device.type == "cpu":
        keep_as_saved(model)
    weights = held(target, model)
    fed = max(len(state.pos) * (drafter.nodes + 1) for state, drafter in zip(states, drafters))
    arrays = SORTED if args.top_k or args.top_p < 1 or args.min_p else ARRAYS
    return Needs(weights, held(target, *states, *drafters) - weights, arrays * fed * target.config.tokens * 4)


def keep_as_saved(model):
    """On the CPU a trained drafter's own weights and output rows stay bfloat16 (draft_trained.load_trained)."""
    if hasattr(model, "output"):
        for weight in own_weights(model).values():
            weight.data = weight.data.bfloat16()
        model.output = model.output.bfloat16()


def held(*things) -> int:
    """Bytes of all tensors in modules, and in drafters that are none; what two of them share counts once."""
    tensors, open = {}, [*things]
    while open:
        thing = open.pop()
        if isinstance(thing, nn.Module):
            tensors |= {id(t): t for t in (*thing.parameters(), *thing.buffers())}
        elif hasattr(thing, "propose"):
            open += vars(thing).values()
    return sum(t.nbytes for t in tensors.values())


def free(device: torch.device, meminfo=Path("/proc/meminfo"), cgroup=Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can still be had on the device, swap included, within a container's limit; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not meminfo.exists():
        return None
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
    if "MemAvailable" not in kilobytes:
        return None
    machine = 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    return min(machine, left_in_container(cgroup, machine))


def left_in_container(cgroup: Path, unlimited: int) -> int:
    """Bytes below memory.max of the control group (v2), where a container has one: past it the kernel kills.
    Pages of files count as used there, but give way."""
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return unlimited
    if limit == "max":
        return unlimited
    return max(0, int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file")))


def fit(needs: Needs, free: int | None, args, dtype: torch.dtype) -> str:
    """What to say before anything is loaded.  ValueError where weights and caches alone are more than is free: what
    rounds take besides is estimated, and an estimate refuses nothing.  (Weights that lie in their file just as they are
    needed could be read from there again for every token, at the speed of the disk.)"""
    B, total = len(args.prompt), needs.weights + needs.caches
    if free is None or total <= free:
        return (f"weights {size(needs.weights)}, caches {size(needs.caches)}, rounds about {size(needs.work)}" +
                (f", of {size(free)} free" if free is not None else ""))
    remedies = {"--dtype bfloat16": dtype == torch.float32 and total / 2 <= free}
    if needs.weights <= free:
        remedies |= {"a smaller --max-new-tokens": not args.interactive, f"fewer than {B} prompts at once": B > 1,
                     "--prompt instead of --interactive, whose caches hold a whole context": args.interactive,
                     "no --check": args.check}
    helps = [name for name, can in remedies.items() if can] or ["a smaller model"]
    raise ValueError(f"weights of {size(needs.weights)} and caches of {size(needs.caches)} do not fit in the "
                     f"{size(free)} that are free on {args.device}: try {', '.join(helps)}")


def size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
