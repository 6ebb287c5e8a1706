# SPDX-License-Identifier: Apache-2.0
"""Training from scratch: the initialisation, gradients, checkpointing."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dcp_compile.models import KimiK3ForCausalLM
from dcp_compile.models.kimi_k3.delta_attention import KimiK3DeltaAttention
from tests.tiny_models import VOCAB, tiny_kimi_k3, tiny_kimi_k3_config


def fresh(seed, layers=5, **settings):
    torch.manual_seed(seed)
    return KimiK3ForCausalLM(tiny_kimi_k3_config(layers, **settings))


def loss_of(model, tokens):
    return model(tokens, labels=tokens, use_cache=False).loss


def test_initial_values(seed):
    model = fresh(seed, layers=9, hidden_size=128)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.isfinite().all(), name
        if "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith(("res_proj.weight", "e_score_correction_bias", "A_log")):
            assert (tensor == 0).all(), name
        elif "conv1d" in name:
            assert tensor.abs().max() <= 0.5 and tensor.std() > 0.2, name
        elif not name.endswith("dt_bias"):
            assert abs(tensor.std().item() / model.config.initializer_range - 1) < 0.2, name


def test_initial_decays_span_short_and_long_memories(seed):
    model = fresh(seed)
    for module in model.modules():
        if isinstance(module, KimiK3DeltaAttention):
            with torch.no_grad():
                rates = -module.log_decay(torch.zeros(1, 1, 64))
            assert rates.min() >= 0.99e-3 and rates.max() <= 1.01
            assert rates.log().std() > 1.5


def test_initial_loss_is_that_of_guessing(seed):
    model = fresh(seed)
    tokens = torch.randint(VOCAB, (4, 32))
    assert abs(loss_of(model, tokens).item() - torch.tensor(float(VOCAB)).log().item()) < 0.1


def test_gradients_reach_every_parameter(seed):
    model = tiny_kimi_k3(layers=9, seed=seed).train()
    torch.manual_seed(seed)
    loss_of(model, torch.randint(VOCAB, (4, 24))).backward()
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.0.self_attention_res_"):
            assert parameter.grad is None, name  # not part of the model's function
        else:
            assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


def test_learns_a_repeated_sequence(seed):
    model = fresh(seed, layers=3, first_k_dense_replace=1, attn_res_block_size=2).train()
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, 12)).repeat(1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(25):
        loss = loss_of(model, tokens)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_labels_are_shifted_and_ignored_where_negative(seed):
    model = tiny_kimi_k3(layers=2, seed=seed)
    tokens = torch.randint(VOCAB, (2, 9))
    labels = tokens.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        out = model(tokens, labels=labels)
    keep = labels[:, 1:] != -100
    wanted = torch.nn.functional.cross_entropy(out.logits[:, :-1][keep].float(), tokens[:, 1:][keep])
    torch.testing.assert_close(out.loss, wanted)


def test_gradient_checkpointing_changes_no_gradient(seed):
    model = tiny_kimi_k3(layers=5, attn_res_block_size=2, seed=seed, dtype=torch.float64).train()
    tokens = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(seed))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss_of(model, tokens).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-12, msg=name)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens, use_cache=True)


def test_training_keeps_no_cache_unless_asked(seed):
    model = tiny_kimi_k3(layers=2, seed=seed)
    tokens = torch.randint(VOCAB, (1, 4))
    assert len(model(tokens).to_tuple()) == 2
    model.train()
    assert len(model(tokens).to_tuple()) == 1
    assert len(model(tokens, use_cache=True).to_tuple()) == 2


def test_from_config_keeps_islands_in_float32():
    model = AutoModelForCausalLM.from_config(tiny_kimi_k3_config(4), dtype=torch.bfloat16)
    assert isinstance(model, KimiK3ForCausalLM)
    wide = {name.split(".", 3)[-1] for name, p in model.state_dict().items() if p.dtype == torch.float32}
    assert wide == {
        "self_attn.A_log",
        "self_attn.dt_bias",
        "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight",
        "self_attn.v_conv1d.weight",
        "self_attn.o_norm.weight",
        "block_sparse_moe.gate.e_score_correction_bias",
    }
