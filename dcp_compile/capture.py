# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face model to one functional ATen graph of a decode step.

The model is traced unmodified as it decodes: every row of a step is a sequence of one token to it, and the number of rows
T is symbolic. Everything that ties rows together (attention over the cache, convolution windows, recurrent state) comes
from outside the model and is ours while tracing: the cache, the attention function and the delta-rule function emit marker
operators (see :mod:`dcp_compile.ops.markers`), which carry the real batch structure for the passes to lower. So one graph
serves prefill chunks, decode and verify steps. Nothing is executed or allocated: cache and state are stand-ins.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from . import _compat
from .errors import CaptureError, UnsupportedModelError
from .ops import markers
from .places import kept_attributes
from .repeats import Name, Repeats

if TYPE_CHECKING:  # the passes come later
    from .passes.attention import Attention
    from .passes.match_mla import MLASite

ATTENTION_NAME = "dcp_marker"

# Example sizes. All differ and none is 1, so that no two become one symbol and none is taken for a constant.
_ROWS, _LOGIT_ROWS, _BATCH, _QUERIES, _COLUMNS = 5, 2, 3, 4, 7

_EXAMPLE_INPUTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "input_ids": ((_ROWS,), torch.int64),
    "row_positions": ((_ROWS,), torch.int64),
    "logit_rows": ((_LOGIT_ROWS,), torch.int64),
    "positions": ((_BATCH, _QUERIES), torch.int64),
    "block_table": ((_BATCH, _COLUMNS), torch.int32),
    "prefix_lengths": ((_BATCH,), torch.int64),
    "state_slots": ((_BATCH,), torch.int32),
    "accepted": ((_BATCH,), torch.int32),
}

STEP_INPUTS = tuple(_EXAMPLE_INPUTS)
"""Inputs of one step of B requests with S rows each, T = B * S rows, request-major.

input_ids ``[T]``; row_positions ``[T]`` what the model takes for position ids; logit_rows ``[n]`` rows whose logits are
wanted; positions ``[B, S]`` (-1 = padded row); block_table ``[B, columns]`` int32; prefix_lengths ``[B]``; state_slots ``[B]``
int32 (-1 = padded request); accepted ``[B]`` int32."""

METADATA_INPUTS = frozenset(STEP_INPUTS) - {"input_ids", "row_positions", "logit_rows"}


@dataclass(frozen=True)
class StateRef:
    """A persistent tensor of one layer: ``kind`` is kv_cache, conv_state, conv_pending, state, pending_k/_u/_g."""

    layer: int
    kind: str


@dataclass(frozen=True)
class Joined:
    """Parameters ``[n_i, K]`` that a step reads as one ``[sum of n_i, K]``, which lowering makes of them."""

    parts: tuple[nn.Parameter, ...]


@dataclass
class StepGraph:
    """A captured step and what each of its placeholders stands for.

    Attributes:
        module: the body, functional until the passes insert writes.
        step_inputs: placeholder -> name in STEP_INPUTS.
        states: placeholder -> the layer state it stands for; ``meta["val"]`` describes the tensor to allocate once the
            passes have run.
        constants: placeholder -> parameter or buffer, the model's own object; or, made by the absorb pass, some rows of
            one; or, made by the join pass and there until the graph is lowered, several parameters.
        outputs: names of the graph outputs: "logits", then the extra ones.
        model: class of the model, for messages.
        prologue: metadata graph, made by the hoist pass; its outputs feed the body's last placeholders.
        prologue_inputs: placeholders of ``module`` that the prologue takes, in order.
        sites: certified MLA sites, made by the match pass.
        attention: emitted attention by layer, made by the absorb pass.
        capture_seconds: time that capture took.
        copied: modules whose calls were copied from an equal one. refused: modules that could have been, but are not safe to.
    """

    module: fx.GraphModule
    step_inputs: dict[fx.Node, str]
    states: dict[fx.Node, StateRef]
    constants: dict[fx.Node, Tensor | Joined]
    outputs: tuple[str, ...]
    model: str
    prologue: fx.GraphModule | None = None
    prologue_inputs: list[fx.Node] = field(default_factory=list)
    sites: list[MLASite] = field(default_factory=list)
    attention: dict[int, Attention] = field(default_factory=dict)
    capture_seconds: float = 0.0
    copied: int = 0
    refused: tuple[str, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def copy(self) -> StepGraph:
        """An independent copy, to lower one captured step in several ways; fake values and constants are shared.

        Raises:
            ValueError: the absorb pass has run: what it left belongs to this graph.
        """
        if self.attention:
            raise ValueError("a rewritten graph cannot be copied; copy the captured one before the passes rewrite it")
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
            _compat.graph_module(self.module, graph),
            *(
                {renamed[node]: value for node, value in m.items()}
                for m in (self.step_inputs, self.states, self.constants)
            ),
            outputs=self.outputs,
            model=self.model,
            copied=self.copied,
            refused=self.refused,
            sites=[renew(site) for site in self.sites],
            capture_seconds=self.capture_seconds,
        )


class _StandIns:
    """Fake step inputs and, per layer, one-element fakes in place of its cache or state."""

    def __init__(self, fakes: _compat.Fakes, dtype: torch.dtype, layer_types: list[str], device: torch.device):
        self.inputs = {
            name: fakes.symbolic(torch.zeros(shape, dtype=kind, device=device))
            for name, (shape, kind) in _EXAMPLE_INPUTS.items()
        }
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.states: dict[StateRef, Tensor] = {}
        for layer, kind_of_layer in enumerate(layer_types):
            if kind_of_layer == "full_attention":
                kinds = {"kv_cache": 3}
            else:
                kinds = {"conv_state": 3, "conv_pending": 3, "state": 4, "pending_k": 4, "pending_u": 4, "pending_g": 4}
            for kind, dims in kinds.items():
                exact = state_dtype if kind == "state" or kind.startswith("pending_") else dtype
                self.states[StateRef(layer, kind)] = fakes.static(torch.zeros([1] * dims, dtype=exact, device=device))


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
            raise UnsupportedModelError(
                f"layer {module.layer_idx} ({type(module).__name__}): attention option {option}={kwargs[option]} cannot "
                "be absorbed into MLA decoding"
            )
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
def _patched(model: nn.Module, current: list, stand_ins: _StandIns) -> Iterator[None]:
    """The model's attention, expert, recurrence and head functions replaced for the time of the trace."""
    saved = _compat.get_implementations(model)
    replaced = [(module, name, getattr(module, name)) for module, name in _compat.recurrence_functions(model)]
    stand_in = _marker_recurrence(current)

    def wanted_rows(_, arguments):
        return (arguments[0].index_select(0, stand_ins.inputs["logit_rows"]), *arguments[1:])

    head = model.get_output_embeddings().register_forward_pre_hook(wanted_rows)
    try:
        _compat.set_implementations(model, _compat.Implementations(ATTENTION_NAME, _compat.traceable_experts(model)))
        for module, name, _ in replaced:
            setattr(module, name, stand_in)
        with kept_attributes(model), _compat.module_paths(model):
            yield
    finally:
        head.remove()
        _compat.set_implementations(model, saved)
        for module, name, function in replaced:
            setattr(module, name, function)


def capture(model: nn.Module, extra_outputs: tuple[str, ...] = (), **options: object) -> StepGraph:
    """Trace one step of ``model``.

    Args:
        model: a causal LM in eval mode on one device.
        extra_outputs: fields of its output to return besides the logits, for every row.
        options: passed to its forward.

    Raises:
        UnsupportedModelError: a layer type that is neither full nor linear attention, or a layer without cache access.
        CaptureError: the model cannot be traced; the reason is quoted.
    """
    layer_types = _layer_types(model)
    outputs = ("logits", *extra_outputs)
    repeats = Repeats(model)
    started = time.perf_counter()
    while True:
        graph, names = _trace(model, layer_types, outputs, repeats, options)
        if repeats.expand(graph.graph, names):
            break
    graph.module = _compat.graph_module(graph.module, graph.graph)
    graph.copied, graph.refused = repeats.copied, tuple(sorted(repeats.refused))
    graph.capture_seconds = time.perf_counter() - started
    _check_markers(graph, layer_types, type(model).__name__)
    return graph


def _trace(
    model: nn.Module, layer_types: list[str], outputs: tuple[str, ...], repeats: Repeats, options: dict[str, object]
) -> tuple[StepGraph, dict[fx.Node, Name]]:
    """One trace, and what its placeholders are to ``repeats``, which may have left out modules."""
    parameter = next(model.parameters())
    fakes = _compat.Fakes()
    stand_ins = _StandIns(fakes, parameter.dtype, layer_types, parameter.device)
    constants = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {name: fakes.static(tensor.detach()) for name, tensor in constants.items()}
    flat = [*stand_ins.inputs.values(), *stand_ins.states.values(), *weights.values()]
    current: list = [None]

    def step(*arguments: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(arguments)
        for table in (stand_ins.inputs, stand_ins.states, weights):
            table.update({key: next(remaining) for key in table})
        inputs = stand_ins.inputs
        cache = _compat.Cache(
            layers=[
                _LatentLayer(i, stand_ins) if kind == "full_attention" else _RecurrentLayer(i, stand_ins, current)
                for i, kind in enumerate(layer_types)
            ]
        )
        ids, positions = inputs["input_ids"][:, None], inputs["row_positions"][:, None]
        call = {"input_ids": ids, "position_ids": positions, _compat.cache_argument(model): cache, **options}
        out = _compat.functional_call(model, weights, call | {"use_cache": True})
        return tuple(getattr(out, name)[:, 0] for name in outputs)

    try:
        with torch.no_grad(), _patched(model, current, stand_ins), repeats.watching():
            module = _compat.trace(step, flat, fakes)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} could not be traced: {type(error).__name__}: {error}. The decode step must run without "
            "control flow that depends on tensor values, and without hooks (model.disable_input_require_grads() removes one)"
        ) from error
    fakes.check_sizes(type(model).__name__)
    placeholders = module.graph.find_nodes(op="placeholder")
    names = [*stand_ins.inputs, *((ref.layer, ref.kind) for ref in stand_ins.states), *constants]
    remaining = iter(placeholders)
    graph = StepGraph(
        module,
        step_inputs={next(remaining): name for name in stand_ins.inputs},
        states={next(remaining): ref for ref in stand_ins.states},
        constants={next(remaining): tensor for tensor in constants.values()},
        outputs=outputs,
        model=type(model).__name__,
    )
    return graph, dict(zip(placeholders, names))


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
