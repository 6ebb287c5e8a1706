# SPDX-License-Identifier: Apache-2.0
"""Every private torch and transformers import, with the reason and the versions it was checked on."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from types import ModuleType

import torch
import torch.fx.traceback
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import ProcessGroup

# Memory that the GPUs of one host can all write; multicast is not used (torch 2.11).
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten as flatten, tree_unflatten as unflatten
from transformers import AttentionInterface, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

# The decorator that lets config._experts_implementation pick how experts run (checked on transformers 5.17, 5.24).
from transformers.integrations import use_experts_implementation

# create_recurrent_attention_mask gives linear-attention layers their 2-D padding mask; both take the cache under
# the name below (5.17, 5.24).
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

# Collects output_hidden_states / output_attentions by hooks (5.17, 5.24).
from transformers.utils.output_capturing import capture_outputs

from .errors import CaptureError

__all__ = [
    "AttentionInterface",
    "CACHE_NAME",
    "Cache",
    "CacheLayerMixin",
    "EXPERT_PARALLEL",
    "FakeTensorMode",
    "Fakes",
    "Implementations",
    "LinearAttentionCacheLayerMixin",
    "abort_collectives",
    "attention_masks",
    "cache_argument",
    "compile_graph",
    "capture_outputs",
    "flatten",
    "functional_call",
    "get_implementations",
    "graph_module",
    "has_global_hooks",
    "is_output_capturing",
    "is_view",
    "may_copy",
    "module_paths",
    "one_tensor_at_a_time",
    "peer_memory",
    "recurrence_functions",
    "recurrent_state",
    "register_by_architecture",
    "same_storage",
    "set_collective_timeout",
    "set_implementations",
    "size_for_one_row",
    "symbols",
    "trace",
    "traceable_experts",
    "unflatten",
    "unset_fake_temporarily",
    "use_experts_implementation",
    "was_written",
]


# --- torch -----------------------------------------------------------------------------------------------------------


def functional_call(model: nn.Module, weights: dict[str, torch.Tensor], options: dict[str, object]) -> object:
    """``model(**options)`` with ``weights`` in place of the parameters and buffers of these names, tied ones included.

    torch's own search for tied weights leaves a replacement behind in a module that has two paths (torch 2.13), so
    every place is named here, once.
    """
    names = {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    places = {
        f"{path}.{attribute}".removeprefix("."): weights[names[id(tensor)]]
        for path, module in model.named_modules()
        for attribute, tensor in (module._parameters | module._buffers).items()
        if tensor is not None
    }
    return torch.func.functional_call(model, places, kwargs=options, tie_weights=False)


class Fakes:
    """Fake tensors that share one set of symbols: equal example sizes are one symbol."""

    def __init__(self) -> None:
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)

    def symbolic(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake whose every size is a symbol, ``tensor``'s sizes being the example."""
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * tensor.dim())
        return self.mode.from_tensor(tensor, symbolic_context=context)

    def static(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of fixed sizes."""
        return self.mode.from_tensor(tensor, static_shapes=True)

    def check_sizes(self, name: str) -> None:
        """CaptureError if the trace only holds for some sizes.

        Torch's own shape rules ask, too (which memory format a convolution picks): such guards do not choose what is
        computed. The place a guard comes from is ``sloc.framework_loc`` (torch 2.11 - 2.13).
        """
        fixed = [f"{symbol} = {value}" for symbol, value in self.shapes.replacements.items() if value.is_number]
        library = os.path.dirname(torch.__file__) + os.sep
        for guard in self.shapes.guards:
            place = guard.sloc.framework_loc
            if place is not None and not place.filename.startswith(library):
                fixed.append(f"{guard.expr} ({place.filename}:{place.lineno})")
        if fixed:
            raise CaptureError(
                f"{name} computes differently for different numbers of rows; the trace needs {', '.join(fixed)}"
            )


def size_for_one_row(size: int | torch.SymInt) -> int:
    """A size in a traced graph where every symbol, such as the number of rows, is 1 (torch 2.11 - 2.13)."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({symbol: 1 for symbol in expression.free_symbols}))


def symbols(tensor: torch.Tensor) -> tuple[set, set]:
    """Symbols of a fake tensor: those that are a size by themselves, and all in its sizes and strides (torch 2.11 - 2.13)."""
    alone, used = set(), set()
    for size in tensor.shape:
        if isinstance(size, torch.SymInt):
            alone |= {size.node.expr} if size.node.expr.is_symbol else set()
    for number in (*tensor.shape, *tensor.stride()):
        if isinstance(number, torch.SymInt):
            used |= number.node.expr.free_symbols
    return alone, used


def is_view(target: torch._ops.OpOverload) -> bool:
    """Whether an ATen operator returns its operand in another shape, without writing to it (torch 2.11 - 2.13)."""
    aliased = [argument.alias_info for argument in target._schema.arguments if argument.alias_info is not None]
    return target is torch.ops.aten._unsafe_view.default or any(not alias.is_write for alias in aliased)


def may_copy(target: torch._ops.OpOverload) -> bool:
    """Whether an operator returns its operand or a copy, by their layouts (torch 2.11 - 2.13)."""
    return is_view(target) and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both are views of a third (torch 2.11 - 2.13)."""
    return torch._C._is_alias_of(first, second)


def was_written(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a functionalised trace, or a view of it, was written to in place (torch 2.11 - 2.13)."""
    return torch._functionalize_has_data_mutation(tensor)


def peer_memory(size: int, device: torch.device, group: ProcessGroup) -> list[int]:
    """Addresses, by rank of ``group``, of ``size`` zeroed bytes on every rank's GPU, all writable from this one."""
    memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, group)
    handle.barrier()  # nobody writes before everybody has zeroed
    torch.cuda.synchronize(device)
    _PEER_MEMORY.append((memory, handle))
    return list(handle.buffer_ptrs)


_PEER_MEMORY: list[tuple[torch.Tensor, object]] = []  # mapped by other ranks: it must outlive every engine


def set_collective_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """After how long NCCL's own watchdog ends the process; no public call sets it for the GPU alone (2.11 - 2.13)."""
    for backend in _nccl([group]):
        backend._set_default_timeout(timeout)


def abort_collectives(groups: Sequence[ProcessGroup]) -> None:
    """End what NCCL is running for ``groups``, in replayed graphs too; they cannot be used afterwards (2.11 - 2.13)."""
    backends = _nccl(groups)
    if backends:
        backends[0]._group_start()  # one after the other they would wait for one another's kernels
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


def _nccl(groups: Sequence[ProcessGroup]) -> list:
    """What carries the groups' messages between GPUs, where that is NCCL."""
    if not torch.distributed.is_nccl_available():
        return []
    backends = [group._get_backend(torch.device("cuda")) for group in groups]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]
    return [backend for backend in backends if isinstance(backend, torch.distributed.ProcessGroupNCCL)]


class _BiasApart(TorchFunctionMode):
    """``linear`` with a bias as a product and a sum: functionalised, the fused form fixes the number of rows (2.11 - 2.13)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
        if function is not torch.nn.functional.linear or bias is None:
            return function(*args, **kwargs)
        return function(*args[:2], **{name: value for name, value in kwargs.items() if name != "bias"}) + bias


def trace(function: Callable, inputs: list[torch.Tensor], fakes: Fakes) -> fx.GraphModule:
    """The functional ATen graph of ``function`` on fake inputs, in one make_fx pass without decompositions.

    Library code that asks whether it is being compiled is told yes, as under torch.compile (torch 2.11 - 2.13).
    """
    torch.compiler._is_compiling_flag = True
    try:
        # Composite operators must see symbolic sizes: without the Python dispatcher, matmul fails on torch 2.11.
        with fakes.mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta(), _BiasApart():
            module = make_fx(torch.func.functionalize(function, remove="mutations"))(*inputs)
    finally:
        torch.compiler._is_compiling_flag = False
    module.graph.eliminate_dead_code()
    return module


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module for ``graph`` that writes its Python code when it is first called, if ever (torch 2.11 - 2.13)."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def compile_graph(module: fx.GraphModule, inputs: list) -> Callable:
    """Inductor on a functional graph whose writes are mutable operators; CUDA graphs are captured elsewhere."""
    fake_mode = next(value.fake_mode for value in inputs if isinstance(value, torch.Tensor))
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        return compile_fx(module, inputs, config_patches={"triton.cudagraphs": False})


@contextmanager
def module_paths(model: nn.Module) -> Iterator[None]:
    """While tracing, every node learns the path of the module that made it, as ``meta["nn_module_stack"]``."""
    path: list[str] = []
    handles = []

    def record() -> None:
        fx.traceback.current_meta["nn_module_stack"] = {name: (name, None) for name in path}

    for name, module in model.named_modules():

        def enter(*_, name=name):
            path.append(name)
            record()

        def leave(*_):
            path.pop()
            record()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        fx.traceback.current_meta.pop("nn_module_stack", None)


# --- transformers ----------------------------------------------------------------------------------------------------


def cache_argument(model: nn.Module) -> str:
    """Name of forward's cache argument: ``cache`` (transformers >= 5.24) or ``past_key_values``."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@dataclass(frozen=True)
class Implementations:
    """Names of the attention and the experts function a model dispatches to."""

    attention: str | None
    experts: str | None


def register_by_architecture(config_class: type, models: tuple[type, ...]) -> None:
    """Let AutoModel choose among ``models`` by the config's architectures, the first being the default.

    The public register() leaves transformers' own configs alone in some releases (5.17).
    """
    AutoModel._model_mapping._extra_content[config_class] = models


def get_implementations(model: PreTrainedModel) -> Implementations:
    config = model.config.get_text_config()
    return Implementations(config._attn_implementation, config._experts_implementation)


def set_implementations(model: PreTrainedModel, names: Implementations) -> None:
    """Set the dispatch names directly: ``set_attn_implementation`` would reject a name that has no mask function."""
    config = model.config.get_text_config()
    config._attn_implementation = names.attention
    config._experts_implementation = names.experts


def traceable_experts(model: nn.Module) -> str:
    """The experts function that can be traced and, on a GPU, captured: grouped_mm of non-bf16 weights reads offsets on
    the host there (its fallback calls ``tolist``), so batched_mm takes its place."""
    parameter = next(model.parameters())
    return "batched_mm" if parameter.is_cuda and parameter.dtype != torch.bfloat16 else "grouped_mm"


def has_global_hooks() -> bool:
    """Whether hooks are registered that run for every module (torch 2.11 - 2.13)."""
    from torch.nn.modules import module

    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def is_output_capturing(hook: Callable) -> bool:
    """Whether a forward hook is transformers' own, which does nothing unless outputs of layers are asked for (5.17, 5.24)."""
    return getattr(hook, "__module__", None) == capture_outputs.__module__


# Attribute of an experts module that makes transformers' functions leave out ids from num_experts on (5.24; 5.17 always does).
EXPERT_PARALLEL = "_is_expert_parallel"


@contextmanager
def one_tensor_at_a_time() -> Iterator[None]:
    """from_pretrained reads tensors one after another, in the order of their names, not in threads (5.17 and 5.24)."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_RECURRENCE_ARGUMENTS = {"query", "key", "value", "g", "beta", "initial_state", "output_final_state"}


def recurrence_functions(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Module globals that run a delta-rule recurrence in the files that define the model's layers.

    transformers calls them by their global name (``chunk_*`` for several tokens, ``recurrent_*`` for one); they are
    recognised by their arguments, so that no model is named here.
    """
    modules = {
        sys.modules[type(layer).__module__] for layer in model.modules() if type(layer).__module__ in sys.modules
    }
    found = []
    for module in sorted(modules, key=lambda module: module.__name__):
        for name, value in vars(module).items():
            if not inspect.isfunction(value) or inspect.isclass(value):
                continue
            if _RECURRENCE_ARGUMENTS <= set(inspect.signature(value).parameters):
                found.append((module, name))
    return found


# transformers 5.24 renamed the cache argument and output field from past_key_values to cache.
CACHE_NAME = "cache" if "cache" in {f.name for f in dataclasses.fields(BaseModelOutputWithPast)} else "past_key_values"


def attention_masks(
    config: PreTrainedConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Masks of one forward pass: (causal mask in the form the attention function wants, 2-D padding mask or None)."""
    arguments = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        CACHE_NAME: cache,
    }
    padding_mask = create_recurrent_attention_mask(**arguments)
    if padding_mask is None and attention_mask is not None and inputs_embeds.shape[1] == 1:
        padding_mask = attention_mask[:, -1:]  # transformers takes a single token for a real one
    return create_causal_mask(**arguments), padding_mask


def recurrent_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """Recurrent state of a linear-attention layer, None before its first update (5.17 has no getter for it)."""
    if hasattr(cache, "get_recurrent_state"):
        return cache.get_recurrent_state(layer_idx)
    return cache.layers[layer_idx].recurrent_states[0] if cache.has_previous_state(layer_idx) else None
