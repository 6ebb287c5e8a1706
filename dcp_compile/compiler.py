# SPDX-License-Identifier: Apache-2.0
"""From a captured model to an engine: choose the backend, run the passes, allocate state, lower."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from . import _compat, backends
from .backends import AttentionRequirements, BackendChoice
from .cache import PagePool, SlotPool
from .capture import StepGraph, capture
from .config import DCPConfig
from .errors import BackendError, ConfigError, UnsupportedModelError
from .lower import StepProgram, allocate_states, lower
from .parallel import ParallelLayout
from .parallel.agreement import check_graphs
from .parallel.peers import ExchangePath, open_exchange
from .parallel.shard import shard_of
from .passes import PASSES, PassContext, PassResult, run_passes
from .passes.fingerprint import graph_fingerprint
from .places import Places
from .regions import RegionCompiler
from .runtime.costs import measure_blocks, measure_verify
from .runtime.draft import DraftEngine
from .runtime.engine import Engine, table_columns
from .runtime.graphs import GraphRunner, buckets
from .runtime.planning import Plans, StandingPlan, Unplanned, planned
from .runtime.replicated import replicated_block

FLOAT8_CAPABILITY = (8, 9)
"""First CUDA compute capability that Triton converts to and from float8_e4m3fn on."""

_TRACING = threading.Lock()  # functions of the models' modules are replaced meanwhile


@dataclass(frozen=True)
class CompileReport:
    """What compilation did, for :func:`dcp_compile.explain`.

    Attributes:
        graph: the step graph as rewritten. passes: one record per pass.
        choice: the attention backend. layout: the decode layout it runs. requirements: what it was asked for.
        path: how ranks exchange attention.
        regions: what compiled the bodies; None where they run node by node.
    """

    graph: StepGraph
    passes: list[PassResult]
    choice: BackendChoice
    layout: str
    requirements: AttentionRequirements
    path: ExchangePath
    regions: RegionCompiler | None


def compile_model(
    model: nn.Module, config: DCPConfig, parallel: ParallelLayout, tap_layers: tuple[int, ...] = ()
) -> tuple[Engine, CompileReport]:
    """Trace and rewrite ``model`` and bind the result to freshly allocated caches.

    Args:
        tap_layers: layers whose hidden states a draft reads; the model's forward must offer them.

    Raises:
        CaptureError, MatchError: the model cannot be compiled; nothing was changed.
        UnsupportedModelError: it has no MLA layer.
        ConfigError: settings that this device, or this group of ranks, cannot meet.
        BackendError: no attention backend can serve it; the reasons are listed.
        CapacityError: the device has no room for the caches.
        RankError: the ranks would run different graphs.
    """
    with _TRACING:
        captured = capture(model, ("taps",), tap_layers=tap_layers) if tap_layers else capture(model)
    if not any(ref.kind == "kv_cache" for ref in captured.states.values()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no MLA attention layer: there is no KV cache to compile for"
        )
    engine, report = compile_graph(captured, config, parallel)
    engine.tap_layers = tap_layers
    return engine, report


def compile_graph(captured: StepGraph, config: DCPConfig, parallel: ParallelLayout) -> tuple[Engine, CompileReport]:
    """The engine for a captured step; ``captured`` itself is not rewritten and can be compiled again."""
    device = next(iter(captured.constants.values())).device
    _check_available(config, device)
    rows = max(config.prefill_chunk, config.num_speculative_tokens + 1)
    context = _context(config, parallel)
    captured, context, choice, requirements, matched = _matched(captured, context, config, config.backend, rows)

    graphs = {}
    for verify in (False, True) if config.num_speculative_tokens else (False,):
        graphs[verify] = captured.copy()
        rewritten = run_passes(graphs[verify], dataclasses.replace(context, verify=verify), PASSES[1:])
        if not verify:
            matched += rewritten
    _compare({"verify graph" if verify else "graph": graph for verify, graph in graphs.items()}, parallel)
    states = allocate_states(list(graphs.values()))
    path = _open_exchange(captured, config, parallel, requirements)
    regions = _region_compiler(config, device)
    plans = _plans(captured, context, requirements, config)
    programs = dict(zip(graphs, lower(list(graphs.values()), states, regions)))
    if requirements.cuda_graphs:
        programs = _captured(programs, plans, config, parallel, device)
    else:
        programs = {verify: planned(program, plans(None)) for verify, program in programs.items()}
    logits = next(node for node in reversed(captured.graph.nodes) if node.op == "output").args[0][0]
    engine = Engine(
        config=config,
        parallel=parallel,
        step=programs[False],
        verify=programs.get(True),
        states=states,
        vocab_size=int(logits.meta["val"].shape[-1]),
        device=device,
        pages=PagePool(context.pages),
        slots=SlotPool(context.state_slots),
        reads_lengths=plans is not Unplanned,
    )
    if config.verify == "adaptive" and engine.verify is not None:
        engine.verify_costs = measure_verify(engine)
    return engine, CompileReport(graphs[False], matched, choice, context.layout, requirements, path, regions)


def compile_draft(
    draft: nn.Module, target: nn.Module, engine: Engine
) -> tuple[DraftEngine, CompileReport | None]:
    """The engine of a DSpark draft over caches of its own that share the engine's block tables.

    A draft that caches latents is captured and rewritten; one that caches keys and values (``replicated_cache``) runs as
    it is, with a copy of its cache on every rank, and there is nothing to report.

    Args:
        draft: the draft, in eval mode on the target's device. target: gives embedding and output head.

    Raises:
        CaptureError, MatchError, UnsupportedModelError, ConfigError, BackendError, RankError: as :func:`compile_model`, for
            the draft.
    """
    step = DraftStep(draft, target.get_input_embeddings(), target.get_output_embeddings())
    if draft.replicated_cache:
        return compile_replicated(step, engine), None
    with _TRACING:
        captured = capture(step, ("hidden_states",))
    return compile_block(captured, draft, engine)


def compile_replicated(step: DraftStep, engine: Engine) -> DraftEngine:
    """The engine of a draft whose keys and values every rank keeps, in the draft's own dtype."""
    config, draft = engine.config, step.draft
    page = config.block_size * engine.parallel.dcp_size
    pages = _context(config, engine.parallel).pages
    shape = pages, page, 2 * draft.config.num_key_value_heads * draft.config.head_dim
    caches = [torch.zeros(shape, dtype=draft.dtype, device=engine.device) for _ in draft.layers]
    block = replicated_block(step, caches, config.draft_window)
    return _draft_engine(draft, engine, block, caches, (page, 0, 1, 1), kv_scale=1.0, reads_lengths=True)


def compile_block(captured: StepGraph, draft: nn.Module, engine: Engine) -> tuple[DraftEngine, CompileReport]:
    """The draft engine for a captured block step; ``captured`` itself is not rewritten and can be compiled again."""
    config, parallel = engine.config, engine.parallel
    context = dataclasses.replace(
        _context(config, parallel),
        causal=draft.config.is_causal,
        heads_sharded=shard_of(draft) is not None,
        state_slots=1,
    )
    width = _block_width(draft, config)
    captured, context, choice, requirements, results = _matched(
        captured, context, config, config.draft_backend, width
    )
    if config.draft_window is not None:
        context = _windowed(context, config.draft_window)
    results += run_passes(captured, context, PASSES[1:])
    _compare({"draft's graph": captured}, parallel)
    states = allocate_states([captured])
    path = _open_exchange(captured, config, parallel, requirements)
    regions = _region_compiler(config, engine.device)
    plans = _plans(captured, context, requirements, config)
    (block,) = lower([captured], states, regions)
    if requirements.cuda_graphs:
        columns, pool = table_columns(config, parallel.dcp_size), torch.cuda.graph_pool_handle()
        batches = buckets(config.max_batch_size)
        block = GraphRunner(block, [width], batches, columns, True, engine.device, pool, plans)
    else:
        block = planned(block, plans(None))
    caches = [states[ref] for ref in sorted(states, key=lambda ref: ref.layer)]
    layout = config.block_size, parallel.dcp_rank, parallel.dcp_size, config.kv_interleave
    report = CompileReport(captured, results, choice, context.layout, requirements, path, regions)
    reads_lengths = plans is not Unplanned
    return _draft_engine(draft, engine, block, caches, layout, context.kv_scale, reads_lengths), report


def _draft_engine(
    draft: nn.Module,
    engine: Engine,
    block: StepProgram,
    caches: list[torch.Tensor],
    layout: tuple[int, int, int, int],
    kv_scale: float,
    reads_lengths: bool,
) -> DraftEngine:
    """``layout``: block size, rank, ranks and interleave of the caches. kv_scale: of their values."""
    config = engine.config
    adaptive = config.verify == "adaptive"
    compiled = DraftEngine(
        draft,
        Places(draft),
        block,
        caches,
        engine.parallel,
        *layout,
        kv_scale=kv_scale,
        width=_block_width(draft, config),
        window=config.draft_window,
        reads_lengths=reads_lengths,
        gives_confidence=adaptive and draft.confidence_head is not None,
    )
    if engine.device.type == "cuda" and config.cuda_graphs is not False:
        columns = table_columns(config, engine.parallel.dcp_size)
        compiled = compiled.with_graphs(config.max_batch_size, _verify_widths(config), columns)
    if adaptive:
        compiled = dataclasses.replace(compiled, costs=measure_blocks(compiled, engine))
    return compiled


def _block_width(draft: nn.Module, config: DCPConfig) -> int:
    return min(config.num_speculative_tokens, draft.config.block_size)


def _matched(
    captured: StepGraph, context: PassContext, config: DCPConfig, backend: str, rows: int
) -> tuple[StepGraph, PassContext, BackendChoice, AttentionRequirements, list[PassResult]]:
    """A copy of the captured step with certified sites, and the context with the backend and layout that serve them.

    ``rows``: most rows per request of any step.
    """
    captured = captured.copy()
    results = run_passes(captured, context, PASSES[:1])
    requirements = _requirements(captured, config, context, rows)
    choice = backends.select_backend(requirements, backend)
    layouts = backends.get_backend(choice.name).capabilities.layouts
    layout = layouts[0] if config.decode_layout == "auto" else config.decode_layout
    context = dataclasses.replace(context, backend=choice.name, layout=layout, kv_dtype=requirements.kv_dtype)
    return captured, context, choice, requirements, results


def _windowed(context: PassContext, window: int) -> PassContext:
    """The context of a block that sees only what follows its prefix (see :meth:`DraftEngine.run_block`).

    Raises:
        BackendError: the attention backend has no call for that.
    """
    if "split" not in backends.get_backend(context.backend).capabilities.layouts:
        raise BackendError(
            f"draft_window needs the tail call of the split layout, which the {context.backend} backend lacks; leave "
            "draft_window out or name another draft_backend"
        )
    return dataclasses.replace(context, layout="tail", window=window)


class DraftStep(nn.Module):
    """A draft between the target's embedding and output head: a causal LM that can be captured."""

    def __init__(self, draft: nn.Module, embedding: nn.Module, head: nn.Module):
        super().__init__()
        self.draft, self.embedding, self.head = draft, embedding, head
        self.config = draft.config

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids, position_ids, cache, use_cache=True, attention_mask=None
    ) -> CausalLMOutputWithPast:
        embeds = self.embedding(input_ids)
        hidden = self.draft(
            inputs_embeds=embeds, position_ids=position_ids, cache=cache, attention_mask=attention_mask
        )
        return CausalLMOutputWithPast(logits=self.head(hidden), hidden_states=hidden)


def _check_available(config: DCPConfig, device: torch.device) -> None:
    """ConfigError or BackendError for settings whose machinery does not exist, or not on this device."""
    if config.draft_backend != "auto":
        backends.get_backend(config.draft_backend)
    if config.kv_cache_dtype == "float8_e4m3fn" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FLOAT8_CAPABILITY:
            raise ConfigError(
                f'kv_cache_dtype="float8_e4m3fn" on compute capability {capability}: conversions to float8 need '
                f'{FLOAT8_CAPABILITY} or higher; use "bfloat16"'
            )
    if config.cuda_graphs is True and device.type != "cuda":
        raise ConfigError(
            f'cuda_graphs=True on a {device.type} device: there are no graphs to capture; leave it "auto"'
        )


def _compare(graphs: Mapping[str, StepGraph], parallel: ParallelLayout) -> None:
    """Before programs are compiled and run: their collectives would not meet those of other graphs."""
    if parallel.replica is not None:
        check_graphs(parallel.replica, {name: graph_fingerprint(graph) for name, graph in graphs.items()})


def _region_compiler(config: DCPConfig, device: torch.device) -> RegionCompiler | None:
    inductor = config.lowering == "inductor" or (config.lowering == "auto" and device.type == "cuda")
    return RegionCompiler(_compat.compile_graph) if inductor else None


def _verify_widths(config: DCPConfig) -> list[int]:
    """Rows per request that verify steps are captured for."""
    widest = config.num_speculative_tokens + 1
    return buckets(widest) if config.verify == "adaptive" else [widest]


def _plans(graph: StepGraph, context: PassContext, need: AttentionRequirements, config: DCPConfig) -> Plans:
    """How the plans of a program's prefix calls are made.

    A step of the largest size is planned here, so that what cannot be planned shows before anything has run.

    Raises:
        BackendError: the layers differ in what one plan has for all, or the largest step cannot be planned.
    """
    backend = backends.get_backend(context.backend)
    if context.layout != "split" or not backends.plans_prefixes(backend):
        return Unplanned
    scales = {site.scale for site in graph.sites}
    if len(scales) > 1:
        raise BackendError(
            f"{context.backend} plans all layers at once, but their attention has {len(scales)} different scales "
            f"({', '.join(map(str, sorted(scales)))}); choose another backend"
        )
    device = graph.sites[0].query.meta["val"].device
    place = context.rank, context.dcp_size, context.interleave
    make = functools.partial(StandingPlan, backend, need, scales.pop(), device, place)
    most = config.max_batch_size
    make(None).prepare({
        "positions": torch.full((most, need.query_rows), -1),
        "prefix_lengths": torch.zeros(most, dtype=torch.int64),
        "block_table": torch.zeros(most, 1, dtype=torch.int32),
    })  # fmt: skip
    return make


def _captured(
    programs: dict[bool, StepProgram], plans: Plans, config: DCPConfig, parallel: ParallelLayout, device: torch.device
) -> dict[bool, StepProgram]:
    """The programs behind CUDA graphs: one token per request for a step, the widths in use for a verify step."""
    pool = torch.cuda.graph_pool_handle()
    batches, columns = buckets(config.max_batch_size), table_columns(config, parallel.dcp_size)
    widths = {False: [1], True: _verify_widths(config)}
    return {
        verify: GraphRunner(program, widths[verify], batches, columns, verify, device, pool, plans)
        for verify, program in programs.items()
    }


def _open_exchange(
    graph: StepGraph, config: DCPConfig, parallel: ParallelLayout, requirements: AttentionRequirements
) -> ExchangePath:
    width = (requirements.latent + requirements.rope) * requirements.query_dtype.itemsize
    rows = config.max_batch_size * (config.num_speculative_tokens + 1)
    return open_exchange(
        parallel.dcp_group,
        graph.sites[0].query.meta["val"].device,
        config.exchange,
        rows,
        graph.sites[0].own_heads,
        width,
        config.timeout,
    )


def _context(config: DCPConfig, parallel: ParallelLayout) -> PassContext:
    return PassContext(
        rank=parallel.dcp_rank,
        dcp_size=parallel.dcp_size,
        interleave=config.kv_interleave,
        block_size=config.block_size,
        pages=1 + config.max_batch_size * table_columns(config, parallel.dcp_size),
        kv_scale=config.kv_cache_scale,
        state_slots=config.max_batch_size,
        verify_rows=config.num_speculative_tokens + 1,
        group=parallel.dcp_group.group_name if parallel.dcp_group is not None else None,
        heads_sharded=parallel.heads_sharded,
    )


def _requirements(graph: StepGraph, config: DCPConfig, context: PassContext, rows: int) -> AttentionRequirements:
    """What the model's attention needs, by its shapes."""
    site = graph.sites[0]
    query = site.query.meta["val"]
    device = query.device
    return AttentionRequirements(
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        query_dtype=query.dtype,
        kv_dtype=query.dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype),
        latent=site.latent_dim,
        rope=site.rope_dim,
        heads=site.own_heads * (context.dcp_size if context.heads_sharded else 1),
        page_size=config.block_size,
        layout=config.decode_layout,
        dcp_size=context.dcp_size,
        interleave=config.kv_interleave,
        causal=context.causal,
        query_rows=rows,
        ragged=rows > 1 and config.max_batch_size > 1,
        cuda_graphs=device.type == "cuda" and config.cuda_graphs is not False,
    )
