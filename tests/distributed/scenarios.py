# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, die or hang, and ranks that agree: what optimize() and generate() do then.

``python -m tests.distributed.scenarios NAME ...`` prints what each rank reports, by scenario, as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import dcp_compile
from benchmarks.fp8_cache import logits_along
from dcp_compile import DCPConfig
from dcp_compile.capture import StepGraph, capture
from dcp_compile.compiler import compile_graph
from dcp_compile.generation.patch import attach
from dcp_compile.parallel import parallel_layout
from dcp_compile.parallel.shard import shard_of
from tests.distributed.ranks import run_ranks
from tests.models.k3_dspark.tiny_draft import draft_for, tiny_draft
from tests.tiny_models import tiny_deepseek_v3, tiny_kimi_k3

TIMEOUT = 10.0
CONFIG = DCPConfig(
    dcp_size=2, block_size=8, max_batch_size=2, max_seq_len=64, num_speculative_tokens=0, timeout=TIMEOUT
)
SCENARIOS: dict[str, tuple[int, float, Callable[[], Any]]] = {}


def scenario(world: int, patience: float = 60.0) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a job that runs on ``world`` ranks under its own name; see run_ranks for ``patience``."""

    def register(job: Callable[[], Any]) -> Callable[[], Any]:
        SCENARIOS[job.__name__] = (world, patience, job)
        return job

    return register


def tiny_model(seed: int = 0) -> Any:
    return tiny_deepseek_v3(2, seed=seed)


@functools.cache
def compiled_step() -> tuple[Any, StepGraph]:
    """A model and its captured step; ranks that are forked after the first call share them."""
    model = tiny_model()
    return model, capture(model)


def compiled_model(config: DCPConfig) -> Any:
    """What optimize() makes of ``tiny_model()``, without tracing it on every rank."""
    model, step = compiled_step()
    attach(model, compile_graph(step, config, parallel_layout(config, torch.device("cpu")))[0])
    return model


def failure(job: Callable[[], Any]) -> dict[str, Any]:
    """What ``job`` raises and after how many seconds; ``error`` is None if it does not."""
    started = time.monotonic()
    try:
        job()
    except Exception as error:
        name, text = type(error).__name__, str(error)
    else:
        name, text = None, ""
    return {"error": name, "text": text, "seconds": time.monotonic() - started}


def generate(model: Any, prompt: list[int], rows: int = 1, **options: Any) -> list[int]:
    ids = torch.tensor([prompt] * rows)
    defaults = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, **{**defaults, **options})[0, len(prompt) :].tolist()


def optimise_with(model: Any, config: DCPConfig = CONFIG) -> dict[str, Any]:
    """The failure of optimize(), with whether it left the model alone."""
    kind, parameters = type(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = failure(lambda: dcp_compile.optimize(model, config=config))
    same = type(model) is kind and all(model.state_dict()[name].equal(tensor) for name, tensor in parameters.items())
    return {**found, "unchanged": same}


@scenario(2)
def other_weights() -> list:
    """One element of one weight differs, one of a buffer, a parameter's name, and the model's class."""
    odd = dist.get_rank() == 1
    weight, buffer = tiny_model(), tiny_model()
    with torch.no_grad():
        if odd:
            weight.model.layers[1].mlp.experts.down_proj.view(-1)[12_345] += 1e-3
            buffer.model.layers[1].mlp.gate.e_score_correction_bias[3] += 1e-3
    return [
        optimise_with(weight),
        optimise_with(buffer),
        optimise_with(tiny_deepseek_v3(3) if odd else tiny_model()),
        optimise_with(tiny_kimi_k3(2) if odd else tiny_model()),
    ]


@scenario(2)
def weights_that_lie_otherwise() -> dict:
    """On one rank, the same weights are views of larger tensors, which cannot become parts of a joined weight."""

    def views(model: Any) -> Any:
        for parameter in model.parameters():
            parameter.data = torch.cat([parameter.data.flatten(), torch.ones(1)])[:-1].view(parameter.shape)
        return model

    odd = dist.get_rank() == 1
    target = tiny_kimi_k3(2)
    draft = draft_for(target, [0])
    dcp_compile.optimize(target, config=CONFIG.replace(num_speculative_tokens=2))
    before = generate(target, [3, 4, 5])
    return {
        "target": optimise_with(views(tiny_model()) if odd else tiny_model()),
        "draft": failure(lambda: generate(target, [3, 4, 5], assistant_model=views(draft) if odd else draft)),
        "unchanged": generate(target, [3, 4, 5]) == before,
    }


@scenario(2)
def other_configurations() -> dict:
    """One rank's model or draft has the same weights, and computes something else with them; or it has no draft."""
    odd = dist.get_rank() == 1
    model, target = tiny_model(), tiny_kimi_k3(2)
    model.config.routed_scaling_factor = 1.5 if odd else 2.5
    draft, other = draft_for(target, [0], block_size=3), draft_for(target, [0], block_size=2 if odd else 3)
    config = CONFIG.replace(num_speculative_tokens=2)
    found = {
        "model": optimise_with(model),
        "one draft": failure(lambda: dcp_compile.optimize(target, config=config, draft=draft if odd else None)),
        "draft, early": failure(lambda: dcp_compile.optimize(target, config=config, draft=other)),
    }
    dcp_compile.optimize(target, config=config, draft=draft)
    before = generate(target, [3, 4, 5], assistant_model=draft)
    late = draft_for(target, [1 if odd else 0])
    return found | {
        "draft, late": failure(lambda: generate(target, [3, 4, 5], assistant_model=late)),
        "another call": failure(lambda: generate(target, [3, 4, 5], assistant_model=other if odd else draft)),
        "unchanged": generate(target, [3, 4, 5], assistant_model=draft) == before,
    }


@scenario(2)
def other_settings() -> dict:
    """One rank has another value of one setting."""
    values = {
        "block_size": 16, "kv_interleave": 4, "max_batch_size": 3, "max_seq_len": 65, "prefill_chunk": 32,
        "decode_layout": "flattened", "num_speculative_tokens": 2, "timeout": 11.0,
    }  # fmt: skip
    odd = dist.get_rank() == 1
    return {
        name: optimise_with(tiny_model(), CONFIG.replace(**({name: value} if odd else {})))
        for name, value in values.items()
    }


@scenario(4)
def other_sizes() -> dict:
    """Ranks that would form different groups."""
    rank = dist.get_rank()
    return {
        "dcp_size": optimise_with(tiny_model(), CONFIG.replace(dcp_size=2 if rank == 2 else 4)),
        "tp_size": optimise_with(tiny_model(), CONFIG.replace(dcp_size=2, tp_size=4 if rank == 3 else 2)),
    }


@scenario(2)
def other_prompts() -> list:
    """One rank is given another token, a longer prompt, another number of prompts; then all are given the same."""
    odd = dist.get_rank() == 1
    model = compiled_model(CONFIG)
    return [
        failure(lambda: generate(model, [5, 6, 8 if odd else 7])),
        failure(lambda: generate(model, [5, 6, 7, 8] if odd else [5, 6, 7])),
        failure(lambda: generate(model, [5, 6, 7], rows=2 if odd else 1)),
        failure(lambda: generate(model, [5, 6, 7], rows=2)),
    ]


@scenario(2)
def other_options() -> list:
    """One rank's call ends, samples, keeps scores, processes or drafts in another way; then all make the same one."""
    odd, model = dist.get_rank() == 1, compiled_model(CONFIG.replace(num_speculative_tokens=2))
    stop, read = (lambda ids, scores: ids[:, 0] < 0), (lambda ids, scores: scores)
    cases: list[tuple[dict, dict]] = [  # of all ranks, of one
        ({}, {"max_new_tokens": 4}), ({}, {"eos_token_id": 9}), ({}, {"do_sample": True}), ({}, {"stopping_criteria": [stop]}),
        ({}, {"output_scores": True, "return_dict_in_generate": True}), ({}, {"prompt_lookup_num_tokens": 2}),
        ({"prompt_lookup_num_tokens": 2}, {"logits_processor": [read]}), ({}, {}),
    ]  # fmt: skip
    return [failure(lambda: generate(model, [5, 6, 7], **all_, **(own if odd else {}))) for all_, own in cases]  # noqa: B023


@scenario(2)
def no_group_on_one_rank() -> dict:
    """One rank works alone and does not know that the other waits for it."""
    alone = dist.get_rank() == 1
    found = optimise_with(tiny_model(), CONFIG.replace(dcp_size=1 if alone else 2))
    if alone:
        time.sleep(TIMEOUT + 2)  # its exit would free the other one at once
    return found


@scenario(4)
def groups() -> dict:
    """Where each rank stands, for every way to divide four ranks; and that three ranks of two make no sense."""

    def ranks(group: Any) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    def place(tp: int, dcp: int | None) -> list:
        found = parallel_layout(CONFIG.replace(tp_size=tp, dcp_size=dcp), torch.device("cpu"))
        sent = found.broadcast(torch.tensor([dist.get_rank()]))
        return [
            found.tp_rank, found.dcp_rank, ranks(found.tp_group), ranks(found.dcp_group), ranks(found.replica),
            found.leader, found.is_leader, int(sent), found.heads_sharded,
        ]  # fmt: skip

    return {
        "tp 1, dcp 1": place(1, 1),
        "tp 1, dcp 2": place(1, 2),
        "tp 2, dcp 1": place(2, 1),
        "tp 2, dcp 2": place(2, 2),
        "tp 1, dcp 4": place(1, 4),
        "tp 4, dcp 2": place(4, 2),
        "tp 4, dcp 4": place(4, 4),
        "tp 4, any dcp": place(4, None),
        "tp 1, dcp 3": failure(lambda: place(1, 3)),
        "tp 8, dcp 2": failure(lambda: place(8, 2)),
    }


@scenario(2)
def float8_cache() -> dict:
    """Relative error of logits against those of one rank, both with a float8 cache: by layout, and against no float8."""
    config = CONFIG.replace(num_speculative_tokens=3, prefill_chunk=6, kv_interleave=2)
    float8 = {"kv_cache_dtype": "float8_e4m3fn", "kv_cache_scale": 0.5}
    ids = torch.randint(3, 100, (35,), generator=torch.Generator().manual_seed(5))

    def logits(**settings: Any) -> torch.Tensor:
        changed = config.replace(**settings)
        parallel = parallel_layout(changed, torch.device("cpu"))
        return logits_along(compile_graph(compiled_step()[1], changed, parallel)[0], ids, 21, rows=4)

    alone = logits(dcp_size=1, **float8)
    found = {layout: logits(decode_layout=layout, **float8) for layout in ("split", "flattened")}
    return {name: float((other - alone).norm() / alone.norm()) for name, other in {**found, "exact": logits()}.items()}


@scenario(4)
def heads_over_four_ranks() -> dict:
    """optimize() and generate() with sharded heads on two DCP groups, then undone: the model is as before."""
    model = tiny_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompt = [5, 9, 11, 3, 70]
    plain = generate(model, prompt)
    dcp_compile.optimize(model, config=CONFIG.replace(tp_size=4))
    compiled = generate(model, prompt)
    dcp_compile.unoptimize(model)
    restored = all(model.state_dict()[name].equal(tensor) for name, tensor in state.items())
    return {"same": compiled == plain, "restored": restored, "after": generate(model, prompt) == plain}


@scenario(2)
def heads_that_do_not_divide() -> list:
    """Three heads over two ranks, and a model whose recurrent heads no table names."""
    from tests.tiny_models import tiny_kimi_linear

    config = CONFIG.replace(tp_size=2)
    three = tiny_deepseek_v3(2, num_attention_heads=3, num_key_value_heads=3)
    return [optimise_with(three, config), optimise_with(tiny_kimi_linear(2), config)]


@functools.cache
def saved_kimi_k3() -> str:
    """A folder of folders: a tiny Kimi-K3 with MXFP4 experts in several files, one of other weights, and a draft."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for seed, name in enumerate(("target", "other")):
        tiny_kimi_k3(2, seed).save_pretrained(folder / name, expert_format="mxfp4", max_shard_size="100KB")
    tiny_draft(0).save_pretrained(folder / "draft")
    return str(folder)


def load(tp_size: int, name: str = "target", **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(f"{saved_kimi_k3()}/{name}", tp_size=tp_size, **options)


@scenario(3)
def parts_that_cannot_be() -> dict:
    """Sizes that do not divide, ranks that are not there, experts that nobody has."""
    draft = f"{saved_kimi_k3()}/draft"
    return {
        "sizes": failure(lambda: load(3)),
        "experts of one rank": failure(lambda: load(1, expert_parallel=True)),
        "ranks": failure(lambda: load(6)),
        "queries of one rank": failure(lambda: load(1, query_projection="replicated")),
        "queries": failure(lambda: load(3, query_projection="repeated")),
        "no experts": failure(lambda: AutoModel.from_pretrained(draft, tp_size=3, expert_parallel=True)),
    }


@scenario(2)
def parts_that_differ() -> dict:
    """One rank has another checkpoint, another value of a norm, or the whole model."""
    odd = dist.get_rank() == 1
    files, values, part = load(2, "other" if odd else "target"), load(2), load(2)
    with torch.no_grad():
        values.model.norm.weight[3] += 1e-3 * odd
    config = CONFIG.replace(dcp_size=None)
    return {
        "files": failure(lambda: dcp_compile.optimize(files, config=config)),
        "values": failure(lambda: dcp_compile.optimize(values, config=config)),
        "kinds": failure(
            lambda: dcp_compile.optimize(tiny_kimi_k3(2) if odd else part, config=config.replace(tp_size=2))
        ),
    }


@scenario(2)
def parts_by_themselves() -> dict:
    """Logits of a part, what it refuses, what it has read, and who shows a progress bar."""
    whole = AutoModelForCausalLM.from_pretrained(f"{saved_kimi_k3()}/target")
    ids = torch.tensor([[5, 9, 11, 3, 70], [8, 7, 6, 5, 4]])
    total = sum(path.stat().st_size for path in Path(saved_kimi_k3(), "target").glob("*.safetensors"))
    report: dict[str, Any] = {}
    for name, expert_parallel in (("sliced", False), ("dealt", True)):
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            part = load(2, expert_parallel=expert_parallel)
        report["bars"] = "Loading weights" in shown.getvalue()
        with torch.no_grad():
            error = (part(ids).logits - whole(ids).logits).abs().max().item()
        report[name] = {
            "error": error,
            "saving": failure(lambda: part.save_pretrained("nowhere")),
            "contradiction": failure(lambda: dcp_compile.optimize(part, config=CONFIG.replace(tp_size=4))),
            "read": shard_of(part).bytes_read / total,
        }
    replicated = load(2, query_projection="replicated")
    with torch.no_grad():
        report["replicated"] = (replicated(ids).logits - whole(ids).logits).abs().max().item()
    report["other group"] = failure(lambda: dcp_compile.optimize(replicated, dcp_size=1))
    config = CONFIG.replace(query_projection="replicated")
    report["other queries"] = failure(lambda: dcp_compile.optimize(part, config=config))
    return report


class _Interrupt(LogitsProcessor):
    """Sends this process a signal when the sequence has ``length`` tokens."""

    def __init__(self, number: signal.Signals, length: int) -> None:
        self.number, self.length = number, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            os.kill(os.getpid(), self.number)
        return scores


def _decode_until(number: signal.Signals, lost_rank: int) -> dict:
    """Generate for long; the lost rank gets a signal after a few tokens, the others report their failure."""
    model = compiled_model(CONFIG.replace(dcp_size=dist.get_world_size()))
    processors = LogitsProcessorList([_Interrupt(number, 9)] if dist.get_rank() == lost_rank else [])
    return failure(lambda: generate(model, [5, 6, 7], max_new_tokens=50, logits_processor=processors))


@scenario(2)
def leader_is_killed() -> dict:
    return _decode_until(signal.SIGKILL, 0)


@scenario(4)
def follower_is_killed() -> dict:
    return _decode_until(signal.SIGKILL, 2)


@scenario(2, patience=1.0)
def follower_hangs() -> dict:
    return _decode_until(signal.SIGSTOP, 1)


@scenario(2)
def rank_dies_while_optimising() -> dict:
    """One rank is gone before it has agreed to anything."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return optimise_with(tiny_model())


if __name__ == "__main__":
    torch.set_num_threads(1)
    compiled_step()
    saved_kimi_k3()
    reports = {}
    for name in sys.argv[1:]:
        world, patience, job = SCENARIOS[name]
        reports[name] = run_ranks(world, job, patience=patience)
    json.dump(reports, sys.stdout)
