"""Our plain decoding beside other engines on the same weights, prompts and threads, in turns:  python bench.py --peers

llama.cpp comes as llama-cpp-python, transformers from requirements-dev.txt; what is not installed is left out, and said.
Greedy, batch 1, no drafting anywhere.  Each engine's own time to the first token is not counted.
"""
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench_measure import Setup, decode
from convert.from_gguf import GGUF
from convert.from_hf import HF
from drafts import NoDraft
from generate import compile_round, make_state, warm_up
from sample import Sampling

TABLE = {"engine": ("engine", ""), "tokens_per_s": ("tokens/s", ".1f"), "ours": ("ours is faster by", ".2f"),
         "same": ("same tokens as ours", ".0%")}


def measure(target, prompts: dict, options) -> list[dict]:
    """One row for each engine: `ours` is the median over turns of our tokens/s over its own."""
    ids, c = [ids for kind in prompts.values() for ids in kind], target.config
    if c.qk_norm or c.qkv_bias != c.o_bias:
        raise ValueError("--peers compares Llama models, without q/k norms and biases of q, k, v alone: another --target")
    same_there = options.device.type == "cpu" and options.dtype == torch.float32 and not c.rope_scaling
    engines = {"this one, plain": ours(target, max(map(len, ids)), options)}
    for name, package, make in (("llama.cpp, F32", "llama_cpp", llama_cpp),
                                ("transformers, eager", "transformers", transformers_eager),
                                ("transformers, static cache, compiled", "transformers", transformers_compiled)):
        if package == "llama_cpp" and not same_there:
            print(f"{name}: left out, it is given float32 on the CPU and no RoPE scaling", file=sys.stderr)
        elif importlib.util.find_spec(package):
            engines[name] = make(target, options)
        else:
            print(f"{name}: left out, {package} is not installed", file=sys.stderr)
    for run in engines.values():
        run(ids[0])                                             # compiles, warms up
    speeds, same = {name: [] for name in engines}, {name: [] for name in engines}
    for _ in range(options.turns):
        for prompt in ids:
            texts = {}
            for name, run in engines.items():
                seconds, texts[name] = run(prompt)
                speeds[name].append((len(texts[name]) - 1) / seconds)
            first = texts["this one, plain"]
            for name, text in texts.items():
                same[name].append(sum(a == b for a, b in zip(text, first)) / len(first))
    return [{"engine": name, "tokens_per_s": statistics.median(s), "same": statistics.mean(same[name]),
             "ours": statistics.median(a / b for a, b in zip(speeds["this one, plain"], s))} for name, s in speeds.items()]


# Each of these returns run(ids) -> (seconds after the first new token, all new tokens); no end of text is heeded.

def ours(target, longest: int, options):
    step, sampling, state = compile_round(), Sampling(1, device=options.device), None
    state = make_state(target, 1, longest + options.max_new_tokens, 0)
    setup = Setup(NoDraft(), state, {})
    warm_up(step, target, setup.drafter, state, sampling, longest + options.max_new_tokens)

    def run(ids):
        with torch.no_grad():
            seconds, tokens, _ = decode(target, setup, sampling, [ids], options.max_new_tokens, step)
        return seconds, state.tokens[0, len(ids):len(ids) + tokens + 1].tolist()
    return run


def transformers_model(target):
    """The same weights as a LlamaForCausalLM that shares their memory."""
    from transformers import LlamaConfig, LlamaForCausalLM
    c, device = target.config, target.embed.weight.device
    scaling = c.rope_scaling or {"kind": "default"}
    rope = {"rope_type": scaling["kind"], "rope_theta": c.rope_theta} | {k: scaling[k] for k in scaling if k != "kind"}
    config = LlamaConfig(vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.layers,
                         num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
                         max_position_embeddings=c.context, rms_norm_eps=c.norm_eps, rope_parameters=rope,
                         attention_bias=c.qkv_bias, mlp_bias=c.mlp_bias, tie_word_embeddings=c.tie_embeddings)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    their = {our: name for name, our in HF.items()}
    weights = {}
    for name, w in target.named_parameters():
        *where, module, kind = name.split(".")
        weights[".".join([*["model"] * bool(where), *where, their[module], kind])] = w
    if c.tie_embeddings:
        weights["lm_head.weight"] = target.embed.weight
    model.load_state_dict(weights, assign=True)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)       # its buffer is in no state dict
    return model.eval()


def transformers_run(target, options, **settings):
    from transformers.generation import BaseStreamer
    model, new = transformers_model(target), options.max_new_tokens

    class Clock(BaseStreamer):
        def __init__(self): self.times = []

        def put(self, value): self.times.append(time.perf_counter())        # the prompt, then each token

        def end(self): pass

    def run(ids):
        clock, tokens = Clock(), torch.tensor([ids], device=options.device)
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new,
                             do_sample=False, eos_token_id=None, pad_token_id=0, streamer=clock, **settings)
        return clock.times[-1] - clock.times[1], out[0, len(ids):].tolist()
    return run


def transformers_eager(target, options):
    return transformers_run(target, options)


def transformers_compiled(target, options):
    """generate() compiles its forward for a static cache on its own only on an accelerator: here it is told to."""
    from transformers import CompileConfig
    config = CompileConfig(fullgraph=True, dynamic=False, mode="max-autotune")
    config._compile_all_devices = True
    return transformers_run(target, options, cache_implementation="static", compile_config=config)


def llama_cpp(target, options):
    from llama_cpp import Llama
    folder = tempfile.TemporaryDirectory()
    write_gguf(target, Path(folder.name) / "model.gguf")
    model = Llama(str(Path(folder.name) / "model.gguf"), n_ctx=2048, n_threads=options.threads,
                  n_threads_batch=options.threads, verbose=False, use_mmap=False, logits_all=False)

    def run(ids):
        model.reset()
        tokens, start = [], None
        for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            start = time.perf_counter() if start is None else start
            tokens.append(token)
            if len(tokens) == options.max_new_tokens:
                return time.perf_counter() - start, tokens
    run.folder = folder                                         # lives as long as the model that was read from it
    return run


def write_gguf(target, path: Path):
    """The target as an F32 GGUF file with a vocabulary of numbers: llama.cpp is only ever given ids."""
    import gguf         # only llama.cpp needs it
    c = target.config
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(c.context)
    out.add_embedding_length(c.dim)
    out.add_block_count(c.layers)
    out.add_feed_forward_length(c.ffn_dim)
    out.add_head_count(c.heads)
    out.add_head_count_kv(c.kv_heads)
    out.add_key_length(c.head_dim)
    out.add_value_length(c.head_dim)
    out.add_rope_dimension_count(c.head_dim)
    out.add_layer_norm_rms_eps(c.norm_eps)
    out.add_rope_freq_base(c.rope_theta)
    out.add_vocab_size(c.vocab_size)
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_tokenizer_model("llama")
    out.add_token_list([f"<{i}>".encode() for i in range(c.vocab_size)])
    out.add_token_scores([0.0] * c.vocab_size)
    out.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    their = {our: name for name, our in GGUF.items()}
    for name, w in target.named_parameters():
        *where, module, kind = name.split(".")
        w = w.float().cpu()
        if module in ("q", "k"):        # llama.cpp's Llama rotates neighbouring pairs, ours the two halves of a head
            heads = c.heads if module == "q" else c.kv_heads
            w = w.view(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
        prefix = f"blk.{where[1]}." if where else ""
        out.add_tensor(f"{prefix}{their[module]}.{kind}", w.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
