"""What can be asked of generate.py: its options, and what is refused before anything is loaded."""
import argparse
import sys
from pathlib import Path

import torch

from choose_draft import MODELS
from report import refuse
from sample import Sampling

DEFAULT_TARGET = MODELS / "smollm2-135m"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}: see --help")      # one line, as every other refusal


def options(argv=None) -> argparse.Namespace:
    parser = Parser(description="Speculative decoding: what the target alone would write, sooner.")
    add = parser.add_argument
    add("--target", metavar="DIR", default=DEFAULT_TARGET,
        help="folder made by convert_weights.py, or a checkpoint it could convert (default: %(default)s)")
    add("--draft", metavar="auto|none|ngram|jacobi|lookahead|exit:L|DIR|ngram+...", default="auto",
        help="who guesses: the best trained drafter in models/ for this target, an EAGLE behind ngram+, else ngram (auto, "
             "default); nobody; prompt lookup; the target, correcting its own guesses, or also keeping n-grams of them "
             "(lookahead:W,N,G); its first L layers; a smaller model, or what train.py made; ngram+eagle, ngram+DIR, "
             "ngram+exit:L: lookup where the text repeats, the other elsewhere")
    add("-k", metavar="K|auto",
        help="tokens guessed a round: 1 to 16, or as many as pay, measured while the text is written, none included (auto, "
             "default; with --seed the drafter's usual number, or a seed would not be a text)")
    add("--tree", type=int, metavar="N",
        help="a trained drafter's N likeliest guesses as a tree at most K deep (default: a chain)")
    add("--verify", choices=("token", "block"), default="token",
        help="judge a chain of drawn guesses one by one (default), or together: never fewer are kept on average")
    add("--couple", action="store_true",
        help="draw guesses with the noise that the target will draw with: a seed gives one text, whoever guesses")
    add("--chosen", action="store_true", help="guess the likeliest tokens instead of drawing them")
    add("--prompt", action="append", default=[], metavar="TEXT",
        help="repeatable: each is a row of the batch; - reads stdin")
    add("--prompt-file", metavar="FILE", help="one prompt a line")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens; 0 is off")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="keep the most likely tokens that hold P of the mass; 1 is off")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the best one's probability")
    add("--seed", type=int, metavar="S", help="row i draws with seed S + i (default 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    chat = parser.add_mutually_exclusive_group()
    chat.add_argument("--chat", action="store_true", default=None,
                      help="use the model's chat template (default if it has one)")
    chat.add_argument("--raw", action="store_false", dest="chat", help="continue the prompt as it stands")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on the CPU, bfloat16 elsewhere")
    add("--no-compile", action="store_true", help="run eagerly: slower, starts at once")
    add("--report", nargs="?", const="", metavar="FILE.html",
        help="then measure plain decoding of the same prompts and say whether guessing pays; FILE.html shows who wrote each token")
    add("--check", action="store_true",
        help="then compare with plain decoding: token for token at temperature 0 (where texts part: a numeric tie or a "
             "bug?), above 0 the laws of many short texts; exit code 1 for a bug")
    add("--json", action="store_true",
        help="one JSON object a row on stdout, with --check one more for what it found; nothing else")
    add("--interactive", action="store_true", help="a chat that keeps the conversation and its cache")
    return check(parser.parse_args(argv))


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse what cannot work, with the value and the remedy; read the prompts."""
    def need(fine, message):
        if not fine:
            raise ValueError(message)
    need(args.k in (None, "auto") or args.k.isdecimal() and 1 <= int(args.k) <= 16, f"-k {args.k} must be in 1..16, or auto")
    args.k = args.k if args.k in (None, "auto") else int(args.k)
    need(args.k is None or args.draft != "none", "-k has no meaning with --draft none: leave one of them out")
    need(args.k in (None, "auto") or args.draft.partition(":")[0] != "lookahead",
         f"-k {args.k} has no meaning with --draft lookahead: give lookahead:W,N,G, it guesses N - 1")
    need(args.tree is None or 1 <= args.tree <= 64, f"--tree {args.tree} must be in 1..64")
    need(not args.couple or args.verify == "token", "--verify block judges guesses by the law they were drawn from, "
         "and one drawn with --couple is only compared with the target's own draw: leave one of them out")
    need(not (args.chosen and args.couple), "--couple draws guesses and --chosen does not: leave one of them out")
    need(args.report is None or args.draft != "none",
         "--report weighs a drafter against plain decoding, and --draft none is plain decoding: leave one of them out")
    need(not args.check or args.draft != "none",
         "--check compares a drafter's text with plain decoding, which --draft none is: leave one of them out")
    need(args.max_new_tokens >= 0, f"--max-new-tokens {args.max_new_tokens} must be 0 or more")
    need(all(args.stop), "--stop is empty: give the text to stop at, or leave it out")
    Sampling(1, args.temperature, args.top_k, args.top_p, args.min_p, args.seed or 0)
    try:
        args.device = torch.device(args.device)
        torch.zeros(1, device=args.device).tolist()         # meta holds no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {args.device} is not available here: use cpu" +
                         (" or cuda" if torch.cuda.is_available() else "")) from None
    if args.interactive:
        given = [n for n, v in (("--prompt", args.prompt), ("--prompt-file", args.prompt_file), ("--json", args.json),
                                ("--report", args.report is not None), ("--check", args.check),
                                ("--raw", args.chat is False), ("--max-new-tokens 0", args.max_new_tokens == 0)) if v]
        need(not given, f"--interactive is a chat that reads the terminal: leave out {', '.join(given)}")
        return args
    args.prompt = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt]
    if args.prompt_file:
        try:
            args.prompt += Path(args.prompt_file).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt-file {args.prompt_file} cannot be read: {error}") from None
    need(args.prompt, 'nothing to do: give --prompt "TEXT", --prompt-file FILE or --interactive')
    for i, prompt in enumerate(args.prompt):
        need(prompt.strip(), f"prompt {i + 1} is empty: give it some text")
    if args.report:
        refuse(args.report)
    return args
