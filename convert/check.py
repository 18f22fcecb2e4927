"""What a checkpoint is, whether it computes, and whether two of them can be target and draft:  convert_weights.py --check."""
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import tokenizer as tokenizers
from load import Checkpoint, open_checkpoint
from model import CHUNK, Config, KVCache, Transformer

# Ordinary English of known difficulty: a model whose rows or angles are in the wrong order predicts it far worse.
PROSE = ("The sun rises in the east and sets in the west. Water boils when it is heated and turns to ice when it is cold "
         "enough. The capital of France is Paris.")


def check_checkpoints(paths: list[Path]) -> int:
    """Describe one checkpoint, or two and how they fit.  -> exit code: 0 fine, 1 not usable.  ValueError: not readable."""
    opened = [open_checkpoint(path) for path in paths]
    fine = [describe(path, checkpoint) for path, checkpoint in zip(paths, opened)]
    if len(opened) == 2:
        difference = tokenizers.compare(*(checkpoint.tokens for checkpoint in opened))
        print(f"{paths[0]} and {paths[1]} cannot be target and draft: {difference}" if difference else
              f"{paths[0]} and {paths[1]} can be target and draft: same tokens for the same text")
        fine.append(difference is None)
    return 0 if all(fine) else 1


def describe(path: Path, checkpoint: Checkpoint) -> bool:
    """Print what it is and what one forward says.  -> whether the forward gave numbers."""
    config, tokens = checkpoint.config, checkpoint.tokens
    model = checkpoint.load("cpu", torch.float32)
    c, count = model.config, sum(p.numel() for p in model.parameters())
    lines = {"source": ", ".join(str(config[key]) for key in ("source", "family") if config.get(key)) or "unknown",
             "network": network(c), "parameters": f"{count:,}, of them {model.embed.weight.numel():,} embedding",
             "bytes": ", ".join(f"{count * size:,} in {name}" for name, size in (("float32", 4), ("bfloat16", 2))) +
             f"; keys and values {2 * c.layers * c.kv_heads * c.head_dim * 4:,} a token in float32",
             "context": f"{c.context:,} tokens",
             "vocabulary": f"{c.tokens:,} tokens, {c.vocab_size - c.tokens} padding rows; {config['tokenizer']['kind']}",
             "first token": name(tokens, tokens.bos) if tokens.bos is not None else "none",
             "end tokens": ", ".join(name(tokens, i) for i in tokens.eos) or "none",
             "special": f"{len(tokens.special_tokens)}: " + shorten(", ".join(tokens.special_tokens)),
             "template": shorten(" ".join(checkpoint.template.split())) if checkpoint.template else "none"}
    loss, follows, seconds = forward(model, tokens)
    fine = math.isfinite(loss)
    lines["forward"] = f"{loss:.2f} nats a token on plain English ({math.log(c.tokens):.2f} would be guessing), {seconds:.2f} s; " \
                       f"then {follows!r}" if fine else "NOT A NUMBER: the weights are damaged"
    print(f"{path}\n" + "\n".join(f"  {key:12}{value}" for key, value in lines.items()))
    return fine


def network(c: Config) -> str:
    odd = [name for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(c, name)]
    rope = f", {c.rope_scaling['kind']} scaled" if c.rope_scaling else ""
    return (f"{c.layers} layers of width {c.dim}, {c.heads} heads of {c.head_dim} with {c.kv_heads} for keys, feed-forward {c.ffn_dim}; "
            f"RoPE {c.rope_theta:,.0f}{rope}{''.join(', ' + o for o in odd)}{', tied' if c.tie_embeddings else ''}")


def name(tokens, id: int) -> str:
    return f"{tokens.token_bytes(id).decode('utf-8', 'replace')!r} ({id})"


def shorten(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[:most] + " ..."


@torch.no_grad()
def forward(model: Transformer, tokens) -> tuple[float, str, float]:
    """-> mean negative log-likelihood of PROSE in nats, the most likely token after it, seconds."""
    ids = torch.tensor([tokens.prompt(PROSE)[:model.config.context]])
    cache, start = KVCache(model.config, 1, ids.shape[1] + CHUNK), time.perf_counter()
    hidden, _ = model(ids, torch.zeros(1, dtype=torch.int64), cache, ids.shape[1])
    logits = model.head(hidden)[0]
    loss = F.cross_entropy(logits[:-1], ids[0, 1:]).item()
    return loss, tokens.token_bytes(int(logits[-1].argmax())).decode("utf-8", "replace"), time.perf_counter() - start
