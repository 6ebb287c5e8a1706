# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face model to one functional ATen graph of a decode step.

The model is traced unmodified with symbolic batch and row counts, so that one graph serves prefill chunks, decode and
verify steps. While tracing, three things that models get from outside are ours: the cache, the attention function and
the delta-rule recurrence. Each emits a marker operator (see :mod:`dcp_compile.ops.markers`) for the passes to lower.
Nothing is executed and no state is allocated: the tensors that markers carry for cache and state are stand-ins.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from . import _compat
from .errors import CaptureError, UnsupportedModelError
from .ops import markers  # noqa: F401  (registers the marker operators)

ATTENTION_NAME = "dcp_marker"

# Example sizes: all different and above 1, so that no two of them are taken for one symbol or specialised.
_BATCH, _ROWS, _LOGIT_ROWS, _COLUMNS = 3, 5, 2, 7

STEP_INPUTS = (
    "input_ids",
    "positions",
    "logit_rows",
    "block_table",
    "prefix_lengths",
    "state_slots",
    "accepted",
)
"""Inputs of one step. input_ids, positions ``[B, S]`` int64 (position -1 = padded row); logit_rows ``[n]`` int64, the row
columns whose logits are wanted; block_table ``[B, columns]`` int32; prefix_lengths ``[B]`` int64; state_slots, accepted
``[B]`` int32."""

METADATA_INPUTS = frozenset(STEP_INPUTS) - {"input_ids", "logit_rows"}


@dataclass(frozen=True)
class StateRef:
    """A persistent tensor of one layer: ``kind`` is kv_cache, conv_state, conv_pending, state, pending_k/_u/_g."""

    layer: int
    kind: str


@dataclass
class StepGraph:
    """A captured step and what each of its placeholders stands for.

    Attributes:
        module: the body, functional until the passes insert writes.
        step_inputs: placeholder -> name in STEP_INPUTS.
        states: placeholder -> the layer state it stands for; ``meta["val"]`` describes the tensor to allocate once the
            passes have run.
        constants: placeholder -> parameter or buffer of the model.
        sizes: placeholder of a symbolic size -> (step input name, dim) it is read from.
        outputs: names of the graph outputs ("logits", then "taps" when captured).
        prologue: metadata graph, made by the hoist pass; its outputs feed the body's last placeholders.
        prologue_inputs: placeholders of ``module`` that the prologue takes, in order.
        sites: certified MLA sites, made by the match pass.
        attention: emitted attention by layer, made by the absorb pass.
        seconds: time per capture stage.
    """

    module: fx.GraphModule
    step_inputs: dict[fx.Node, str]
    states: dict[fx.Node, StateRef]
    constants: dict[fx.Node, Tensor]
    sizes: dict[fx.Node, tuple[str, int]]
    outputs: tuple[str, ...]
    prologue: fx.GraphModule | None = None
    prologue_inputs: list[fx.Node] = field(default_factory=list)
    sites: list = field(default_factory=list)
    attention: dict[int, object] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def copy(self) -> StepGraph:
        """An independent copy, to lower one captured step in several ways; fake values and constants are shared."""
        graph, renamed = fx.Graph(), {}
        output = graph.graph_copy(self.graph, renamed)
        graph.output(output)

        def renew(value):
            if isinstance(value, fx.Node):
                return renamed[value]
            if dataclasses.is_dataclass(value):
                return dataclasses.replace(
                    value, **{f.name: renew(getattr(value, f.name)) for f in dataclasses.fields(value)}
                )
            return value

        for old, new in renamed.items():
            new.meta = dict(old.meta)
        return StepGraph(
            fx.GraphModule(self.module, graph),
            *({renamed[node]: value for node, value in mapping.items()} for mapping in (self.step_inputs, self.states)),
            *({renamed[node]: value for node, value in mapping.items()} for mapping in (self.constants, self.sizes)),
            outputs=self.outputs,
            sites=[renew(site) for site in self.sites],
            seconds=self.seconds,
        )


class _StandIns:
    """The step-input examples and one set of one-element stand-ins per layer."""

    def __init__(self, device: torch.device, dtype: torch.dtype, layer_types: list[str]):
        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.inputs = {
            "input_ids": integers(_BATCH, _ROWS),
            "positions": integers(_BATCH, _ROWS),
            "logit_rows": integers(_LOGIT_ROWS),
            "block_table": integers(_BATCH, _COLUMNS, dtype=torch.int32),
            "prefix_lengths": integers(_BATCH),
            "state_slots": integers(_BATCH, dtype=torch.int32),
            "accepted": integers(_BATCH, dtype=torch.int32),
        }
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.states: dict[StateRef, Tensor] = {}
        for layer, kind_of_layer in enumerate(layer_types):
            if kind_of_layer == "full_attention":
                kinds = {"kv_cache": (1, 1, 1)}
            else:
                kinds = {"conv_state": (1, 1, 1), "conv_pending": (1, 1, 1), "state": (1, 1, 1, 1)}
                kinds |= {f"pending_{name}": (1, 1, 1, 1) for name in "kug"}
            for kind, shape in kinds.items():
                exact = kind == "state" or kind.startswith("pending_")
                self.states[StateRef(layer, kind)] = torch.zeros(
                    shape, dtype=state_dtype if exact else dtype, device=device
                )


class _LatentLayer(_compat.CacheLayerMixin):
    """Cache layer of an attention layer: ``update`` is a marker."""

    is_sliding = False

    def __init__(self, layer: int, stand_ins: _StandIns):
        super().__init__()
        self.layer = layer
        self.is_initialized = True
        self.kv_cache = stand_ins.states[StateRef(layer, "kv_cache")]
        self.block_table = stand_ins.inputs["block_table"]
        self.positions = stand_ins.inputs["positions"]
        self.prefix_lengths = stand_ins.inputs["prefix_lengths"]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return torch.ops.dcp.mark_latent(
            key_states, value_states, self.kv_cache, self.block_table, self.positions, self.prefix_lengths, self.layer
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class _RecurrentLayer(_compat.LinearAttentionCacheLayerMixin):
    """Cache layer of a recurrent layer: the convolution window is a marker; the recurrence finds its layer here."""

    def __init__(self, layer: int, stand_ins: _StandIns, current: list[_RecurrentLayer]):
        super().__init__()
        self.layer = layer
        self.current = current
        self.tensors = {ref.kind: tensor for ref, tensor in stand_ins.states.items() if ref.layer == layer}
        self.accepted = stand_ins.inputs["accepted"]
        self.state_slots = stand_ins.inputs["state_slots"]
        self.positions = stand_ins.inputs["positions"]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs):
        self.current[0] = self
        return torch.ops.dcp.mark_conv(
            conv_states,
            self.tensors["conv_state"],
            self.tensors["conv_pending"],
            self.accepted,
            self.state_slots,
            self.positions,
            self.layer,
            conv_kernel_size,
        )

    def recur(self, query, key, value, g, beta, scale: float, qk_l2norm: bool) -> Tensor:
        return torch.ops.dcp.mark_recurrence(
            query,
            key,
            value,
            g,
            beta,
            self.tensors["state"],
            self.tensors["pending_k"],
            self.tensors["pending_u"],
            self.tensors["pending_g"],
            self.accepted,
            self.state_slots,
            self.positions,
            self.layer,
            scale,
            qk_l2norm,
        )

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        return recurrent_states

    def lazy_initialization(self, *args, **kwargs) -> None:
        return None


def _marker_attention(module: nn.Module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    for option in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(option) is not None:
            raise UnsupportedModelError(f"attention option {option}={kwargs[option]} cannot be absorbed into MLA decoding")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return torch.ops.dcp.mark_attention(query, key, value, module.layer_idx, scale), None


_compat.AttentionInterface.register(ATTENTION_NAME, _marker_attention)


def _marker_recurrence(current: list[_RecurrentLayer]) -> Callable:
    """Stands in for a model's delta-rule function; the layer is the one whose convolution ran last."""

    def recurrence(
        query, key, value, g, beta, *args, initial_state=None, output_final_state=False, scale=None,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        layer = current[0]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out = layer.recur(query, key, value, g, beta, scale, use_qk_l2norm_in_kernel)
        return out, layer.tensors["state"]

    return recurrence


@contextmanager
def _patched(model: nn.Module, current: list) -> Iterator[None]:
    """The model's attention, expert and recurrence functions replaced for the time of the trace."""
    saved = _compat.get_implementations(model)
    replaced = [(module, name, getattr(module, name)) for module, name in _compat.recurrence_functions(model)]
    stand_in = _marker_recurrence(current)
    try:
        _compat.set_implementations(model, _compat.Implementations(ATTENTION_NAME, _compat.traceable_experts(model)))
        for module, name, _ in replaced:
            setattr(module, name, stand_in)
        yield
    finally:
        _compat.set_implementations(model, saved)
        for module, name, function in replaced:
            setattr(module, name, function)


class _Captured(Exception):
    """Carries the traced graph out of the compiled call before anything runs."""


def capture(model: nn.Module, tap_layers: tuple[int, ...] = ()) -> StepGraph:
    """Trace one step of ``model``.

    Args:
        model: a causal LM in eval mode on one device.
        tap_layers: layers whose hidden states are a second output (for a draft), if the model offers them.

    Raises:
        UnsupportedModelError: a layer type that is neither full nor linear attention.
        CaptureError: the model cannot be traced into one graph; the reason of the tracer is quoted.
    """
    parameter = next(model.parameters())
    layer_types = _layer_types(model)
    stand_ins = _StandIns(parameter.device, parameter.dtype, layer_types)
    current: list = [None]
    cache = _compat.Cache(
        layers=[
            _LatentLayer(i, stand_ins) if kind == "full_attention" else _RecurrentLayer(i, stand_ins, current)
            for i, kind in enumerate(layer_types)
        ]
    )
    options = {_compat.cache_argument(model): cache, "use_cache": True}
    if tap_layers:
        options["tap_layers"] = tap_layers

    def step(input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, ...]:
        torch._check(input_ids.shape[0] == positions.shape[0])
        torch._check(input_ids.shape[1] == positions.shape[1])
        out = model(input_ids=input_ids, position_ids=positions.clamp_min(0), logits_to_keep=logit_rows, **options)
        return (out.logits, out.taps) if tap_layers else (out.logits,)

    example = [stand_ins.inputs[name] for name in ("input_ids", "positions", "logit_rows")]
    for name, tensor in stand_ins.inputs.items():
        for dim in range(tensor.dim()):
            torch._dynamo.mark_dynamic(tensor, dim)
    with torch.no_grad(), _patched(model, current):
        graph_module, arguments, seconds = _trace(step, example, type(model).__name__)
    graph = _describe(graph_module, arguments, stand_ins, ("logits", "taps") if tap_layers else ("logits",))
    graph.seconds = seconds
    _check_markers(graph, layer_types, type(model).__name__)
    return graph


def _layer_types(model: nn.Module) -> list[str]:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    odd = sorted(set(kinds) - {"full_attention", "linear_attention"})
    if odd:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {', '.join(odd)}; only full_attention (MLA) and linear_attention "
            "(delta rule) layers can be optimised"
        )
    return list(kinds)


def _trace(step: Callable, example: list[Tensor], name: str) -> tuple[fx.GraphModule, list, dict[str, float]]:
    """Dynamo, then functionalisation without decompositions; returns the graph and the run-time argument objects."""
    found: dict[str, object] = {}
    seconds: dict[str, float] = {}

    def backend(graph_module: fx.GraphModule, inputs: list):
        dynamo_done = time.perf_counter()
        seconds["dynamo"] = dynamo_done - started
        found["module"] = _without_asserts(_compat.functionalise(graph_module))
        seconds["functionalise"] = time.perf_counter() - dynamo_done

        def stop(*arguments):
            found["arguments"] = list(arguments)
            raise _Captured

        return stop

    torch._dynamo.reset()
    started = time.perf_counter()
    try:
        torch.compile(step, backend=backend, fullgraph=True)(*example)
    except _Captured:
        return found["module"], found["arguments"], seconds
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{name} could not be traced into one graph: {type(error).__name__}: {error}. The forward pass must run without "
            "data-dependent Python control flow"
        ) from error
    finally:
        torch._dynamo.reset()
    raise CaptureError(f"{name}: tracing produced no graph")


def _without_asserts(module: fx.GraphModule) -> fx.GraphModule:
    """Drop size assertions: the step's inputs are made by this package, which keeps their sizes equal."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    return module


def _describe(module: fx.GraphModule, arguments: list, stand_ins: _StandIns, outputs: tuple[str, ...]) -> StepGraph:
    """Tell what every placeholder stands for by the identity of the object it received."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(arguments):
        raise CaptureError(f"the traced graph has {len(placeholders)} inputs but was called with {len(arguments)}")
    inputs = {id(tensor): name for name, tensor in stand_ins.inputs.items()}
    states = {id(tensor): ref for ref, tensor in stand_ins.states.items()}
    graph = StepGraph(module, {}, {}, {}, {}, outputs)
    for node, argument in zip(placeholders, arguments):
        if not isinstance(argument, Tensor):
            continue
        if id(argument) in inputs:
            graph.step_inputs[node] = inputs[id(argument)]
        elif id(argument) in states:
            graph.states[node] = states[id(argument)]
        else:
            graph.constants[node] = argument.detach()
    for node in placeholders:
        if isinstance(node.meta["val"], torch.SymInt):
            graph.sizes[node] = _size_source(node, graph.step_inputs)
    return graph


def _size_source(node: fx.Node, step_inputs: dict[fx.Node, str]) -> tuple[str, int]:
    for placeholder, name in step_inputs.items():
        for dim, size in enumerate(placeholder.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr == node.meta["val"].node.expr:
                return name, dim
    raise CaptureError(f"graph input {node.name} ({node.meta['val']}) is not the size of any step input")


def _check_markers(graph: StepGraph, layer_types: list[str], name: str) -> None:
    seen = {marker: [] for marker in markers.NAMES}
    for node in graph.graph.nodes:
        for marker in markers.NAMES:
            if node.target is getattr(torch.ops.dcp, marker).default:
                seen[marker].append(markers.layer_of(node))
    wanted = {
        "mark_latent": [i for i, kind in enumerate(layer_types) if kind == "full_attention"],
        "mark_conv": [i for i, kind in enumerate(layer_types) if kind != "full_attention"],
    }
    wanted |= {"mark_attention": wanted["mark_latent"], "mark_recurrence": wanted["mark_conv"]}
    for marker, layers in wanted.items():
        if sorted(seen[marker]) != layers:
            missing = sorted(set(layers) - set(seen[marker]))
            raise UnsupportedModelError(
                f"{name}: expected one {marker.removeprefix('mark_')} call in each of the layers {layers}, found them in "
                f"{sorted(seen[marker])} (missing: {missing}). The model must call cache.update and the attention function "
                "of transformers' AttentionInterface (or the delta-rule function) once per layer"
            )
