"""Is speculation faster than plain decoding here, and why?   python bench.py"""
import argparse
import json
import sys
from pathlib import Path

import torch

import bench_gpu
import bench_peers
import tokenizer as tokenizers
from bench_measure import curve, measure
from bench_shapes import DRAFT_OF, SHAPES, Pair, random_model
from choose_draft import load_draft, needs_weights, sizes
from draft_dflash import DFlash
from draft_eagle import Eagle
from draft_medusa import Medusa
from load import open_checkpoint
from options import DEFAULT_TARGET, Parser
from train_data import is_held_out, read_prompts

TEXT = ("The lighthouse keeper woke before dawn, as he had done every day for thirty years. He climbed the narrow stairs, "
        "wiped\nthe salt from the great lens and wrote the weather in his book: wind from the north, light rain, three "
        "ships to the east. Then\nhe put out the lamp, boiled water for his tea and sat by the window until the sun "
        "stood above the sea.")
PROMPTS = {     # what the text repeats decides what prompt lookup is worth: measure both ends
    "copy": [f"Repeat the following text exactly, word for word:\n\n{TEXT}",
             f"Copy this text without any change: {TEXT}"],
    "free": ["Write a short story about a fox who learns to read music.",
             "Explain to a ten-year-old why the sky is blue."],
}


# ---- tables and pictures ---------------------------------------------------------------------------------------------

def best(rows: list[dict]) -> list[dict]:
    """Of each drafter and kind of prompt the fastest K."""
    top = {}
    for r in rows:
        key = r["batch"], r["prompts"], r["draft"]
        if key not in top or r["speedup"] > top[key]["speedup"]:
            top[key] = r
    return list(top.values())


def show(rows: list[dict], columns: dict[str, tuple]):
    """A Markdown table: {key of a row: (heading, format)}."""
    print("| " + " | ".join(heading for heading, _ in columns.values()) + " |\n" + "|---" * len(columns) + "|")
    for r in rows:
        print("| " + " | ".join("–" if r[k] is None else format(r[k], f) for k, (_, f) in columns.items()) + " |")
    print(flush=True)


TABLE = {"draft": ("draft", ""), "k": ("K", ""), "prompts": ("prompts", ""), "tokens_per_s": ("tokens/s", ".1f"),
         "tokens_per_round": ("tokens per round", ".2f"), "acceptance": ("kept", ".0%"),
         "draft_step_ms": ("draft step ms", ".1f"), "verify_ms": ("verify ms", ".1f"), "accept_ms": ("accept ms", ".2f"),
         "parts_ms": ("parts ms", ".1f"), "round_ms": ("round ms", ".1f"),
         "speedup": ("speed-up", ".2f"), "predicted": ("predicted", ".2f")}


CURVE = {"batch": ("batch", ""), "n": ("tokens", ""), "verify_ms": ("verify ms", ".1f"), "ratio": ("of one token", ".2f"),
         "a_ms": ("a ms", ".1f"), "b_ms": ("b ms", ".2f")}


def plot(rows: list[dict], points: list[dict], title: str, file: str):
    """A picture of what was measured: speed-up against K, or the curve."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=7, wrap=True)
    axes = figure.subplots()
    fixed = [r for r in rows if r["k"] and r["k"] != "auto"]
    for line in dict.fromkeys((r["draft"], r["prompts"], r["batch"]) for r in fixed):
        points_of = sorted((r["k"], r["speedup"]) for r in fixed if (r["draft"], r["prompts"], r["batch"]) == line)
        axes.plot(*zip(*points_of), marker="o", label="{}, {}, batch {}".format(*line))
    for B in dict.fromkeys(p["batch"] for p in points):
        axes.plot(*zip(*((p["n"], p["ratio"]) for p in points if p["batch"] == B)), marker=".", label=f"batch {B}")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(**(dict(xlabel="K, guesses a round", ylabel="speed-up over plain decoding") if rows else
                dict(xlabel="n, tokens scored in one pass", ylabel="T(n) / T(1)")))
    axes.legend()
    figure.savefig(file)


# ---- the command ----------------------------------------------------------------------------------------------------

def main(argv=None) -> int:
    try:
        return run(options(argv))
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2


def options(argv=None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--target", default=DEFAULT_TARGET, metavar="DIR")
    add("--draft", nargs="+", default=[], metavar="NAME", help="also measure these, named as for generate.py")
    add("--tree", type=int, nargs="+", default=[], metavar="N", help="also measure trees of N nodes, of trained drafters")
    add("--shape", choices=DRAFT_OF, metavar="NAME", help=f"random weights of real geometry: {', '.join(DRAFT_OF)}")
    add("--draft-shape", choices=SHAPES, metavar="NAME", help="the draft's geometry (default: one that fits)")
    add("--agreement", type=float, metavar="A", help="with --shape: sum(min(p, q)) of target and draft (default 0.8)")
    add("-k", type=guesses, nargs="+", default=[1, 2, 4, 8], metavar="K",
        help="guesses a round to measure, auto for what generate.py would choose (default 1 2 4 8)")
    add("--prompts", metavar="FILE",
        help="measure on the prompts of this file that train.py holds out, not on the built-in ones")
    add("--most-prompts", type=int, default=8, metavar="N", help="of --prompts (default 8)")
    add("--verify", choices=("token", "block", "couple"), nargs="+", default=["token"],
        help="how drawn guesses are judged (default token), or drawn as with --couple; several: in turns, same prompts")
    mode("--curve", action="store_true", help="measure what scoring n tokens costs, instead of decoding")
    add("--batch", type=int, nargs="+", metavar="B", help="batch sizes (default 1, with --curve 1 2 4 8)")
    add("--most", type=int, default=16, metavar="N", help="tokens up to which --curve goes (default 16)")
    mode("--peers", action="store_true", help="llama.cpp and transformers on the same weights, instead of drafters")
    mode("--gpu-check", action="store_true", help="the one script for a GPU: correctness, then speed, in 8 minutes")
    add("--max-new-tokens", type=int, default=96, metavar="N")
    add("--turns", type=int, default=3, metavar="N", help="times every configuration is measured (default 3)")
    add("--temperature", type=float, help="default 0; with --shape 1, because random weights soon loop without chance")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on the CPU, bfloat16 elsewhere")
    add("--rounds-only", action="store_true",
        help="leave out the parts of a round and what they predict: compiled in a third of the time")
    add("--all", action="store_true", help="print every K, not only the best")
    add("--json", metavar="FILE", help="also write every row there")
    add("--plot", metavar="FILE", help="draw speed-up against K, or the curve, to this PNG (needs matplotlib)")
    return settle(parser.parse_args(argv))


def guesses(text: str) -> int | str:
    return text if text == "auto" else int(text)


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse what does not go together, and fill in what depends on other options."""
    for name, least in (("max_new_tokens", 2), ("turns", 1), ("threads", 1), ("most", 1), ("most_prompts", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be {least} or more")
    args.batch = args.batch or ([1, 2, 4, 8] if args.curve else [1])
    if bad := [k for k in (*args.k, *args.batch) if k != "auto" and not 1 <= k <= 64]:
        raise ValueError(f"{bad[0]} is not a number of guesses or rows: 1 to 64")
    if not args.shape and (args.draft_shape or args.agreement is not None):
        raise ValueError("--agreement and --draft-shape need --shape: real weights agree as they do")
    if args.shape and args.draft:
        raise ValueError("--draft is a folder and --shape random weights: name the draft by --draft-shape")
    if args.verify != ["token"] and (args.curve or args.peers or args.gpu_check or not (args.draft or args.shape)):
        raise ValueError("--verify judges a draft model's guesses: give --draft or --shape, and no --curve, --peers or "
                         "--gpu-check")
    if args.prompts and (args.shape or args.curve or args.peers or args.gpu_check):
        raise ValueError("--prompts are for real weights that decode: no --shape, --curve, --peers or --gpu-check")
    if args.batch != [1] and (args.peers or args.gpu_check):
        raise ValueError(f"--batch {args.batch[0]} has no meaning with --peers or --gpu-check: leave it out")
    if args.plot and (args.peers or args.gpu_check):
        raise ValueError("--plot draws speed-up against K, or --curve: leave it out here")
    for file in (args.json, args.plot):
        try:                                            # now, not after ten minutes of measuring
            Path(file or ".").parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error}") from None
    try:
        args.device = torch.device(args.device)
        torch.zeros(1, device=args.device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {args.device} is not available here") from None
    if args.plot:
        try:
            import matplotlib       # noqa: F401
        except ImportError:
            raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    if args.peers and args.temperature:
        raise ValueError(f"--peers is greedy: leave out --temperature {args.temperature}")
    args.temperature = 0.0 if args.peers else args.temperature
    args.temperature = float(bool(args.shape)) if args.temperature is None else args.temperature
    if args.verify != ["token"] and not args.temperature:
        raise ValueError("--verify token, block and couple are one thing at temperature 0: give --temperature")
    args.dtype = getattr(torch, args.dtype or ("float32" if args.device.type == "cpu" else "bfloat16"))
    return args


def load(options):
    """-> target, draft or None, {kind: [ids]}, end ids, what the output says about the weights."""
    if options.shape:
        name, g = options.draft_shape or DRAFT_OF[options.shape], torch.Generator().manual_seed(0)
        ids = torch.randint(0, SHAPES[options.shape]["vocab_size"], (2, 64), generator=g).tolist()
        if options.curve or options.peers:
            target = random_model(options.shape, 11, options.device, options.dtype)
            return target, {}, {"random": ids}, (), f"synthetic weights, {options.shape}"
        pair = Pair(options.shape, name, options.device, options.dtype)
        agreement = 0.8 if options.agreement is None else options.agreement
        measured = pair.agree(agreement, temperature=options.temperature)
        return pair.target, {"draft": pair.draft}, {"random": ids}, (), (
            f"synthetic weights, {options.shape} with draft {name}, agreement {measured:.2f}")
    opened = open_checkpoint(options.target)
    target, tokens, template = opened.load(options.device, options.dtype), opened.tokens, opened.template
    folders = [name.removeprefix("ngram+") for name in options.draft if needs_weights(name)]
    drafts = {Path(folder).name: load_draft(Path(folder), target, tokens) for folder in folders}
    texts = PROMPTS
    if options.prompts:
        texts = {"held out": [p for p in read_prompts(options.prompts) if is_held_out(p)][:options.most_prompts]}
        if not texts["held out"]:
            raise ValueError(f"--prompts {options.prompts} holds none that train.py holds out: give more prompts")
    prompts = {kind: [tokenizers.first_turn(template, text, tokens) for text in some] for kind, some in texts.items()}
    return target, drafts, prompts, tokens.eos, f"{Path(options.target).name}"


def plan(options, drafts: dict) -> list[tuple[str, int]]:
    """What is measured, as drafter_for reads it: (name, K)."""
    judged = ["" if verify == "token" else f", {verify}" for verify in dict.fromkeys(options.verify)]
    names = {short(name): drafts.get(short(name).removeprefix("ngram+")) for name in options.draft} or drafts
    chains = [(name + how, K) for name, model in names.items() if not name.startswith("lookahead") for how in judged
              for K in options.k if K == "auto" or K <= most(model, K)]
    chains += [(name, sizes(name, 0)[0]) for name in names if name.startswith("lookahead")]
    trees = [(f"{name}, tree {N}", K) for name, model in names.items() if type(model) in (Eagle, Medusa) for N in options.tree
             for K in options.k if K != "auto" and 1 < K <= min(N, most(model, N)) and not name.startswith("ngram+")]
    return [("none", 0)] + [("ngram", K) for K in options.k] + (chains + trees or [("self", 4)])


def most(model, K: int) -> int:
    """The most guesses it can make, of K asked for: a Medusa has so many heads, a DFlash so long a block."""
    return model.heads if isinstance(model, Medusa) else model.block if isinstance(model, DFlash) else K


def short(name: str) -> str:
    """A --draft by what its folder is called."""
    if not needs_weights(name):
        return name
    return "ngram+" * name.startswith("ngram+") + Path(name.removeprefix("ngram+")).name


def run(options) -> int:
    torch.set_num_threads(options.threads)
    if options.gpu_check:
        return bench_gpu.check(options)
    target, drafts, prompts, eos, weights = load(options)
    device = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else str(options.device)
    about = {"weights": weights, "torch": torch.__version__, "device": device, "dtype": str(options.dtype)[6:],
             "temperature": options.temperature, "threads": options.threads}
    about |= {} if options.curve else {"batch": options.batch[0], "new_tokens": options.max_new_tokens, "turns": options.turns}
    rows, points, peers = [], [], []
    if options.curve:
        points = curve(target, options.batch, options.most, options)
    elif options.peers:
        peers = bench_peers.measure(target, prompts, options)
    else:
        rows = measure(target, drafts, prompts, eos, options, plan(options, drafts))
    print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    if rows:
        show(rows if options.all else best(rows), TABLE if len(options.batch) == 1 else {"batch": ("batch", "")} | TABLE)
        floor, plain = rows[0]["floor_ms"], rows[0]["round_ms"]
        share = f", {floor / plain:.0%} of a plain round" if plain else ""         # rows of a batch end at different times
        print(f"reading its bytes takes {floor:.1f} ms at the bandwidth measured{share}")
    show(points, CURVE) if points else None
    show(peers, bench_peers.TABLE) if peers else None
    if options.json:
        all_rows = [about | r for r in rows + points + peers]
        Path(options.json).write_text(json.dumps(all_rows, indent=1) + "\n")
    if options.plot:
        plot(rows, points, ", ".join(f"{key} {value}" for key, value in about.items()), options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
