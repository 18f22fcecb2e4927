"""What torch.compile makes of a function on an H100, found out on a machine without a GPU.

    with h100() as graphs, torch.no_grad():
        args = fake([module, torch.empty(4, device="meta")])    # now of a GPU that is not there: shapes, no values
        torch.compile(f, mode="max-autotune")(*args)            # traced and lowered as always, run never
    graphs[0].triton, graphs[0].externs, graphs[0].cubins

What decides about kernels is Python, and torch's own runs here: Dynamo, AOTAutograd, Inductor down to the text of the
Triton kernels and of the host code that launches them, Triton and ptxas down to machine code for sm_90.  Faked are the
answers a GPU would give (what it is, how large, the current stream) and the three choices that need one:

* CUDA graphs are not recorded; the decision whether they may be, and why not, is torch's and is kept.
* Matrix products are not timed: the first Triton template is taken, or cuBLAS where h100(matmul="aten") asks for it.
* Which attention kernel runs is chosen in C++ that CPU builds of torch lack; `attention` below states its choice.

Nothing is executed, so nothing here says that a kernel is right or fast.  Internals of torch are patched (written for
2.13 with triton 3.7.1); a torch that moved them fails loudly, with an AttributeError or an empty list of kernels.
"""
import contextlib
import ctypes
import dataclasses
import functools
import re
import sys
import types
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.compile_fx as compile_fx
import torch._inductor.constant_folding as constant_folding
import torch._inductor.cudagraph_utils as cudagraph_utils
import torch._inductor.fx_passes.freezing_patterns as freezing_patterns
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.fx_passes.pre_grad as pre_grad
import torch._inductor.graph
import torch._inductor.ir as ir
import torch._inductor.output_code as output_code
import torch._inductor.select_algorithm as select_algorithm
import torch.nn.functional as F
import triton
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"     # writes cubins
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, gcnArchName="",
    is_integrated=0)


@dataclasses.dataclass
class Graph:
    """One compiled graph."""
    code: str                               # the module that Inductor wrote: kernels and the code that launches them
    triton: Counter                         # launches of each Triton kernel in one call, repeated subgraphs included
    externs: Counter                        # everything else that a call runs on the device
    partitions: int                         # pieces that get a CUDA graph each
    outside: list                           # what the host code does beside launching those pieces: should be nothing
    recorded: bool = False                  # whether torch would record CUDA graphs at all
    skips: list = dataclasses.field(default_factory=list)       # torch's reasons not to
    sources: dict = dataclasses.field(default_factory=dict)     # Triton kernel -> its source
    cubins: dict = dataclasses.field(default_factory=dict)      # Triton kernel -> machine code, with h100(cubin=True)


@contextlib.contextmanager
def h100(cubin=False, matmul="triton"):
    """Inside, torch.compile lowers for an H100 and runs nothing.  Yields the list of Graphs, filled as they come."""
    graphs, sources, cubins = [], {}, {}
    forget()
    with contextlib.ExitStack() as patches:
        patch = lambda owner, name, value: patches.enter_context(       # noqa: E731
            mock.patch.object(owner, name, value, create=not hasattr(owner, name)))
        pretend_device(patch, patches)
        keep_patterns_on_the_cpu(patch)
        choose_without_timing(patch, matmul)
        record_kernels(patch, sources, cubins if cubin else None)
        record_graphs(patch, graphs, sources, cubins)
        original = torch.compile

        def compile(fn, mode=None, **options):
            backend = functools.partial(lower, torch._inductor.list_mode_options(mode) if mode else {})
            return original(fn, backend=backend, **options)
        patch(torch, "compile", compile)
        try:
            yield graphs
        finally:
            torch._dynamo.reset()
    forget()


def fake(things: list) -> list:
    """Things made on the meta device (tensors, modules, objects that hold some), moved to the H100: fake tensors."""
    def convert(thing):
        if isinstance(thing, torch.Tensor):
            new = torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device="cuda")
            return torch.nn.Parameter(new, thing.requires_grad) if isinstance(thing, torch.nn.Parameter) else new
        if isinstance(thing, torch.nn.Module):
            holders = thing._parameters, thing._buffers, thing._modules
        else:
            holders = (getattr(thing, "__dict__", {}),)
        for held in holders:
            held.update({name: convert(value) for name, value in held.items()})
        return thing
    with FakeTensorMode():
        return [convert(thing) for thing in things]


def lower(options: dict, gm: torch.fx.GraphModule, example_inputs):
    """The backend given to torch.compile: Inductor's, with caches and threads off so that all of it happens now."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.target is F.scaled_dot_product_attention:
                node.target = attention
                module.recompile()
    quiet = {"compile_threads": 1, "force_disable_caches": True, "shape_padding": False,
             "benchmark_epilogue_fusion": False, "use_static_cuda_launcher": False}
    # only here: outside of it Dynamo and the fake tensors would try to start CUDA
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        compile_fx.compile_fx(gm, example_inputs, config_patches={**options, **quiet})

    def outputs(*args):                     # what the compiled function hands back: fake tensors again
        with torch._guards.detect_fake_mode(args):
            return gm(*args)
    return outputs


def attention(q, k, v, attn_mask=None):
    """What F.scaled_dot_product_attention of bfloat16 with a bias becomes on an H100: cuDNN's kernel, from cuDNN 9.15.1
    on (torch's sdp_utils.cpp, attention.cpp); before, aten._scaled_dot_product_efficient_attention."""
    assert q.dtype == attn_mask.dtype == torch.bfloat16 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, False)[0]


# ---- the answers of a GPU -------------------------------------------------------------------------------------------

class Driver(DriverBase):
    """Triton's driver: names the target to compile for."""

    def __init__(self): pass

    @classmethod
    def is_active(cls): return True

    def get_current_target(self): return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self): return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, ty): return ty

    def get_benchmarker(self): raise RuntimeError("there is no GPU to time anything on")


class NoDevice(contextlib.nullcontext):
    """torch.cuda.device: selecting a device is entering nothing."""

    def __init__(self, device): super().__init__()


def pretend_device(patch, patches):
    """torch.cuda, Dynamo's interface to it and Triton's driver answer as if an H100 were there.  Each answer was found
    needed by leaving it out."""
    properties = lambda device=None: H100                                                       # noqa: E731
    for name, value in {"get_device_properties": properties, "current_device": lambda: 0, "device": NoDevice,
                        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
                        "set_rng_state": lambda state, device=None: None,
                        "is_bf16_supported": lambda including_emulation=True: True}.items():
        patch(torch.cuda, name, value)
    interface = device_interface.CudaInterface
    for name, value in {"get_device_properties": properties, "is_available": lambda: True,
                        "is_bf16_supported": lambda including_emulation=True: True}.items():
        patch(interface, name, staticmethod(value))
    patches.enter_context(mock.patch.dict(device_interface.caching_worker_device_properties, {"cuda": [H100]}))
    patches.enter_context(mock.patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}))
    patch(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
    patch(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True)
    patch(triton.runtime.driver, "_active", Driver())
    patch(triton_helpers, "set_driver_to_gpu", lambda: None)        # each kernel's module would look for libcuda.so
    lend_device_guard(patches)


def lend_device_guard(patches):
    """Indexing a fake CUDA tensor asks C++ for CUDA's device guard, which a CPU build does not have ("PyTorch is not
    linked with support for cuda devices").  Lend it the one of the meta device, which does nothing."""
    lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(lib, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14                      # c10::DeviceType
    if not guards[cuda]:
        assert guards[meta]
        guards[cuda] = guards[meta]
        patches.callback(guards.__setitem__, cuda, None)


def keep_patterns_on_the_cpu(patch):
    """Inductor traces its library of patterns once, on example tensors of the device, and folds constants by computing
    them: both happen on the CPU here."""
    def on_cpu(initialize, *args):
        def run(*_):
            with mock.patch.object(torch.cuda, "is_available", lambda: False):
                return initialize(*args)
        return run
    patch(joint_graph, "lazy_init", on_cpu(joint_graph.lazy_init, torch.device("cpu")))
    for module in (post_grad, pre_grad, freezing_patterns):
        patch(module, "lazy_init", on_cpu(module.lazy_init))

    class CudaToCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            def move(a):
                return torch.device("cpu") if isinstance(a, torch.device) and a.type == "cuda" else a
            return func(*torch.fx.node.map_aggregate(args, move), **torch.fx.node.map_aggregate(kwargs or {}, move))
    fold = constant_folding.ConstantFolder.run

    def fold_on_cpu(self, *args, **kwargs):
        with CudaToCpu():
            return fold(self, *args, **kwargs)
    patch(constant_folding.ConstantFolder, "run", fold_on_cpu)


# ---- choices, and records of what came out --------------------------------------------------------------------------

def choose_without_timing(patch, matmul):
    def do_autotuning(self, name, input_nodes, layout, input_gen_fns, inputs_key, choices, *args, **kwargs):
        liked = [isinstance(c, select_algorithm.TritonTemplateCaller) == (matmul == "triton") for c in choices]
        return {choice: 1.0 - fine + 1e-3 * i for i, (choice, fine) in enumerate(zip(choices, liked))}
    patch(select_algorithm.AlgorithmSelectorCache, "do_autotuning", do_autotuning)


def record_kernels(patch, sources, cubins):
    """Keep each Triton kernel's source; compile its first configuration if cubins is a dict."""
    build = AsyncCompile.triton

    def triton_kernel(self, name, source, device_str="cuda"):
        sources[name] = source
        if cubins is None:
            return types.SimpleNamespace(run=None)

        def precompile(tuner, *args, **kwargs):
            cubins[name] = tuner._precompile_config(tuner.configs[0]).kernel.asm["cubin"]
        with mock.patch.object(triton_heuristics.CachingAutotuner, "precompile", precompile):
            return build(self, name, source, device_str)
    patch(AsyncCompile, "triton", triton_kernel)


def record_graphs(patch, graphs, sources, cubins):
    """Keep what Inductor decided about each graph, at the point where it would load the finished module."""
    load = torch._inductor.graph.GraphLowering._compile_to_module_lines

    def compile_to_module_lines(lowering, wrapper_code):
        code = wrapper_code.value
        partitions = len(lowering.partition_maps or [])
        graphs.append(Graph(code, launches(code), externs(lowering), partitions, outside(code), sources=sources,
                            cubins=cubins))
        return load(lowering, wrapper_code)
    patch(torch._inductor.graph.GraphLowering, "_compile_to_module_lines", compile_to_module_lines)

    def cudagraphify(model, static_input_idxs=(), *, mutated_input_idxs=(), placeholders=(), **kwargs):
        graphs[-1].recorded = True
        # cudagraph_trees.check_for_mutation asks this at run time, and then silently runs without CUDA graphs
        if moving := [i for i in mutated_input_idxs if i not in set(static_input_idxs)]:
            graphs[-1].skips.append(cudagraph_utils.get_mutation_stack_trace(placeholders, moving))
        return model
    patch(compile_fx, "cudagraphify", cudagraphify)
    for module in (output_code, compile_fx, cudagraph_utils):
        patch(module, "log_cudagraph_skip_and_bump_counter", lambda why: graphs[-1].skips.append(why))


def externs(lowering) -> Counter:
    """What a graph runs that is no Triton kernel.  A nested region is a call of a subgraph: its own externs count."""
    found = Counter()
    for op in lowering.operations:
        if isinstance(op, ir.InvokeSubgraph):
            found += externs(op.subgraph.graph)
        elif isinstance(op, ir.ExternKernel) and not isinstance(op, ir.MultiOutput):    # one result of several
            name = op.op_overload if isinstance(op, ir.FallbackKernel) else getattr(op, "python_kernel_name", None)
            found[str(name or type(op).__name__)] += 1
    return found


def functions(code: str) -> dict:
    """The host code's functions, name -> body, without the kernels' sources that stand between them."""
    parts = re.split(r"^ *def (\w+)\(.*\):$", re.sub(r"'''.*?'''", "", code, flags=re.S), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def launches(code: str) -> Counter:
    """Triton kernels that one call launches: in the partitions and, as often as they are called, in subgraphs."""
    bodies = functions(code)

    def within(body: str) -> Counter:
        found = Counter(re.findall(r"^\s+(\w+)\.run\(", body, re.M))
        for name in re.findall(r" = (\w+)\(\w+_args\)$", body, re.M):
            found += within(bodies[name])
        return found
    entries = [body for name, body in bodies.items() if name.startswith("partition_")] or [bodies["call"]]
    return sum(map(within, entries), Counter())


def outside(code: str) -> list:
    """Work that partitioning has left out of the CUDA graphs: device code in the function that calls the partitions."""
    return sorted(set(re.findall(r"\w+\.run\(|extern_kernels\.\w+|\.copy_\(|\.item\(|(?:torch\.ops\.)?aten\.[\w.]+",
                                 functions(code)["call"])))


def forget():
    """Inductor caches what it has learnt about devices: not across the border between the real and the faked one."""
    torch._dynamo.reset()
    for name in ("torch.utils._triton", "torch._inductor.utils", "torch._inductor.lowering",
                 "torch._inductor.scheduler"):
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    torch._inductor.runtime.hints.DeviceProperties.create.cache_clear()
