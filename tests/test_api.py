# SPDX-License-Identifier: Apache-2.0
"""optimize() and unoptimize(): errors that leave the model as it was, and the way back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_compile
from dcp_compile import BackendError, CapacityError, CaptureError, ConfigError, DCPConfig, MatchError, UnsupportedModelError
from tests.mla_variants import ScalesValues, Variant, vary
from tests.model_state import changes, state_of
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.tiny_models import VOCAB, tiny_deepseek_v3, tiny_kimi_k3, tiny_kimi_linear

CONFIG = DCPConfig(block_size=4, max_batch_size=2, max_seq_len=24, prefill_chunk=8, num_speculative_tokens=0)


def dense() -> nn.Module:
    return tiny_deepseek_v3(1, first_k_dense_replace=1)


def test_there_and_back_again() -> None:
    model = tiny_kimi_linear(2, num_local_experts=2)
    ids = torch.randint(3, VOCAB, (1, 7), generator=torch.Generator().manual_seed(0))
    plain = model.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    before = state_of(model)

    assert dcp_compile.optimize(model, config=CONFIG) is model
    assert type(model).__name__ == "KimiLinearForCausalLM" and isinstance(model, before["class"])
    assert changes(before, state_of(model)) == ["class", "attributes", "storage"]
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, logits)  # the plain forward is untouched
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
    assert "1 MLA layers absorbed" in dcp_compile.explain(model)
    with pytest.raises(UnsupportedModelError, match="KimiLinearForCausalLM is optimised already; call unoptimize"):
        dcp_compile.optimize(model, config=CONFIG)

    assert dcp_compile.unoptimize(model) is model
    assert changes(before, state_of(model)) == ["storage"]
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
    for again in (dcp_compile.unoptimize, dcp_compile.explain):
        with pytest.raises(UnsupportedModelError, match="KimiLinearForCausalLM is not optimised"):
            again(model)
    assert dcp_compile.optimize(model, config=CONFIG) is model


def test_a_model_in_training_mode() -> None:
    model = dense().train()
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV3ForCausalLM is in training mode; call model.eval\(\)"):
        dcp_compile.optimize(model, config=CONFIG)


def test_what_training_leaves_on_a_model_is_named() -> None:
    """Gradient checkpointing leaves a hook, accelerate a forward() under autocast; both errors name the way out, which works."""
    checkpointed = dense()
    checkpointed.gradient_checkpointing_enable()
    checkpointed.gradient_checkpointing_disable()
    with pytest.raises(CaptureError, match=r"model\.disable_input_require_grads\(\)"):
        dcp_compile.optimize(checkpointed.eval(), config=CONFIG)
    checkpointed.disable_input_require_grads()
    dcp_compile.optimize(checkpointed, config=CONFIG)

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(dense()).eval()
    with pytest.raises(MatchError, match=r"accelerator\.unwrap_model\(model, keep_fp32_wrapper=False\)"):
        dcp_compile.optimize(prepared, config=CONFIG)
    dcp_compile.optimize(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), config=CONFIG)


class Remembers(nn.Module):
    """Makes a constant when it first runs, and keeps what it has seen."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.half, self.seen = norm, None, []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.half is None:
            self.half = torch.full((hidden_states.shape[-1],), 0.5, device=hidden_states.device)
            self.register_buffer("twice", 2 * self.half, persistent=False)
        self.seen.append(hidden_states)
        return self.norm(hidden_states) * self.half * self.twice


def test_what_modules_keep_of_a_trace_is_forgotten() -> None:
    model, ids = dense(), torch.tensor([[5, 6, 7]])
    model.model.norm = Remembers(model.model.norm)
    dcp_compile.optimize(model, config=CONFIG)
    remembers = model.model.norm
    assert remembers.half is None and remembers.seen == [] and "twice" not in dict(remembers.named_buffers())
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert model(ids).logits.isfinite().all()
    assert torch.equal(dcp_compile.unoptimize(model).generate(ids, max_new_tokens=4, do_sample=False), tokens)


def test_a_model_without_weights() -> None:
    model = dense().to("meta")
    with pytest.raises(
        UnsupportedModelError, match="DeepseekV3ForCausalLM lies on meta; load it whole on one real device"
    ):
        dcp_compile.optimize(model, config=CONFIG)


def test_a_model_on_several_devices() -> None:
    model = dense()
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="DeepseekV3ForCausalLM lies on cpu, meta"):
        dcp_compile.optimize(model, config=CONFIG)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), dense().model, "path/to/model"], ids=["linear", "backbone", "path"])
def test_what_is_no_causal_model(thing: object) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"{type(thing).__name__} is not a transformers model with generate"
    ):
        dcp_compile.optimize(thing, config=CONFIG)


@pytest.mark.parametrize("settings", [{"block_size": 4}, "auto", DCPConfig])
def test_settings_of_another_type(settings: object) -> None:
    with pytest.raises(ConfigError, match="config=.* must be a DCPConfig"):
        dcp_compile.optimize(dense(), config=settings)


@pytest.mark.parametrize("options, error, message", [
    ({"dcp_size": 2}, ConfigError, "2 ranks are needed but this program runs as one process; start it with torchrun"),
    ({"dcp_size": 0}, ConfigError, "dcp_size=0 must be an integer of at least 1"),
    ({"backend": "triton"}, BackendError, "triton: .*device type cpu not supported"),
    ({"backend": "paged"}, BackendError, "unknown attention backend 'paged'"),
    ({"config": CONFIG.replace(backend="paged")}, BackendError, "unknown attention backend 'paged'"),
])  # fmt: skip
def test_settings_that_cannot_be_met_leave_the_model_alone(options: dict, error: type[Exception], message: str) -> None:
    model = vary(Variant)
    before = state_of(model)
    with pytest.raises(error, match=message):
        dcp_compile.optimize(model, **{"config": CONFIG, **options})
    assert changes(before, state_of(model)) == []


def test_a_layer_that_cannot_be_absorbed_leaves_the_model_alone() -> None:
    model = vary(ScalesValues)
    before = state_of(model)
    with pytest.raises(MatchError, match=r"model\.layers\.0\.self_attn"):
        dcp_compile.optimize(model, config=CONFIG)
    assert changes(before, state_of(model)) == []
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False).shape == (1, 4)


def test_arguments_win_over_settings() -> None:
    """``dcp_size`` and ``backend`` may be given either way."""
    model = vary(Variant)
    dcp_compile.optimize(model, dcp_size=1, backend="torch", config=CONFIG.replace(dcp_size=7, backend="paged"))
    text = dcp_compile.explain(model)
    assert "ranks: dcp 1" in text and "backend torch" in text


def test_a_generate_of_its_own_stands_in_the_way() -> None:
    """Found only after compilation, and the model is still as it was, but for where weights of siblings lie."""
    model = vary(Variant)
    model.generate = lambda *args, **kwargs: None
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match="has its own generate on the instance"):
        dcp_compile.optimize(model, config=CONFIG)
    assert changes(before, state_of(model)) == ["storage"]


def test_a_draft_that_cannot_be_used_leaves_the_model_alone() -> None:
    """Found before the target is compiled, or when it is already."""
    model = tiny_kimi_k3(2)
    before = state_of(model)
    draft = draft_for(model, taps=(0, 1)).train()
    with pytest.raises(UnsupportedModelError, match="K3DSparkModel is in training mode"):
        dcp_compile.optimize(model, config=CONFIG.replace(num_speculative_tokens=1), draft=draft)
    assert changes(before, state_of(model)) == []
    draft.eval().layers[0].self_attn.forward = lambda x, *rest: x  # no attention to compile
    with pytest.raises(UnsupportedModelError, match="DraftStep: expected one latent call"):
        dcp_compile.optimize(model, config=CONFIG.replace(num_speculative_tokens=1), draft=draft)
    assert changes(before, state_of(model)) == ["storage"]


def test_a_model_that_transformers_has_split(tmp_path) -> None:
    model = dense()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(distribute_tensor(head.weight.data, mesh, [Shard(0)]))
        with pytest.raises(UnsupportedModelError, match=r"DeepseekV3ForCausalLM was split by transformers \(tp_plan\): load it"):
            dcp_compile.optimize(model, config=CONFIG)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("draft", [vary(Variant), "folder"])
def test_only_dspark_drafts_are_compiled(draft: object) -> None:
    model = vary(Variant)
    with pytest.raises(ConfigError, match=f"draft is a {type(draft).__name__}, not a DSpark draft.*assistant_model"):
        dcp_compile.optimize(model, config=CONFIG, draft=draft)
    assert not hasattr(model, "_dcp")


def test_caches_that_fit_nowhere() -> None:
    model = vary(Variant)
    before = state_of(model)
    with pytest.raises(CapacityError, match=r"recurrent states of .* GiB do not fit: .*; call optimize\(\) with a smaller"):
        dcp_compile.optimize(model, config=CONFIG.replace(max_seq_len=2**31 - 1, block_size=64, max_batch_size=60))
    assert changes(before, state_of(model)) == []


def test_an_unknown_backend_for_drafts_is_found_at_once() -> None:
    with pytest.raises(BackendError, match="unknown attention backend 'nope'; known backends: "):
        dcp_compile.optimize(vary(Variant), config=CONFIG.replace(draft_backend="nope"))


def test_autocast_is_refused() -> None:
    """What it would trace are casts of the weights, and its types are not those of the caches."""
    model = vary(Variant)
    before = state_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedModelError, match="autocast is on for cpu"):
        dcp_compile.optimize(model, config=CONFIG)
    assert changes(before, state_of(model)) == []


def test_inference_mode_may_end_after_optimize() -> None:
    """Caches belong to no mode: they are written inside and outside of inference mode."""
    with torch.inference_mode():
        model = dcp_compile.optimize(tiny_deepseek_v3(1), config=dcp_compile.DCPConfig(max_batch_size=1, max_seq_len=64))
        inside = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False), inside)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: the current one, and the model's")
def test_a_model_on_a_device_that_is_not_the_current_one() -> None:
    model = dense().to("cuda:1")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = torch.randint(3, VOCAB, (2, 7), device="cuda:1")
    wanted = model.generate(ids, **options)
    dcp_compile.optimize(model, config=CONFIG)
    assert torch.equal(model.generate(ids, **options), wanted) and torch.cuda.current_device() == 0
