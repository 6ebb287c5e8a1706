# SPDX-License-Identifier: Apache-2.0
"""The two delta-rule functions: against a plain loop, each other, transformers' own and, on a GPU, the fla kernels."""

import pytest
import torch
from torch.testing import assert_close

from dcp_compile.models.kimi_k3 import delta_attention
from dcp_compile.models.kimi_k3.delta_attention import (
    CHUNK,
    KimiK3DeltaAttention,
    ShortConvolution,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from tests.tiny_models import tiny_kimi_k3_config

BOTH = [recurrent_kimi_delta_attention, chunk_kimi_delta_attention]


def draw(seed, batch, seq, heads=2, key_dim=5, value_dim=3, dtype=torch.float64, low=-5.0, device="cpu"):
    """Arguments of a delta-rule function, the state last."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    g = low * torch.rand(batch, seq, heads, key_dim, generator=generator, dtype=torch.float64)
    tensors = dict(
        query=normal(batch, seq, heads, key_dim),
        key=normal(batch, seq, heads, key_dim),
        value=normal(batch, seq, heads, value_dim),
        g=g,
        beta=torch.rand(batch, seq, heads, generator=generator, dtype=torch.float64),
        initial_state=normal(batch, heads, key_dim, value_dim),
    )
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def plain(query, key, value, g, beta, initial_state, normalize):
    """One head of one row at a time, with matrices."""
    out, final = torch.empty_like(value), torch.empty_like(initial_state)
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            state = initial_state[b, h]
            for t in range(query.shape[1]):
                q, k = query[b, t, h], key[b, t, h]
                if normalize:
                    q, k = q / torch.sqrt(q @ q + 1e-6), k / torch.sqrt(k @ k + 1e-6)
                state = torch.diag(g[b, t, h].exp()) @ state
                state = state + torch.outer(k, beta[b, t, h] * (value[b, t, h] - state.T @ k))
                out[b, t, h] = state.T @ (q * q.numel() ** -0.5)
            final[b, h] = state
    return out, final


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seq", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_equals_the_plain_loop(function, normalize, seq, seed):
    inputs = draw(seed, 2, seq)
    out, state = function(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=normalize)
    wanted_out, wanted_state = plain(**inputs, normalize=normalize)
    assert_close(out, wanted_out, rtol=1e-10, atol=1e-11)
    assert_close(state, wanted_state, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("batch, heads", [(0, 2), (1, 1), (3, 2)])
def test_shapes_and_absent_state(function, batch, heads, seed):
    inputs = draw(seed, batch, 4, heads=heads)
    out, state = function(**inputs)
    assert out.shape == (batch, 4, heads, 3) and state is None
    del inputs["initial_state"]
    out, state = function(**inputs, output_final_state=True)
    wanted = function(**inputs, initial_state=torch.zeros(batch, heads, 5, 3), output_final_state=True)
    assert_close(out, wanted[0]), assert_close(state, wanted[1])


@pytest.mark.parametrize("function", BOTH)
def test_any_memory_layout(function, seed):
    inputs = draw(seed, 2, 20)
    strided = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in inputs.items()}
    assert not strided["query"].is_contiguous()
    assert_close(function(**strided)[0], function(**inputs)[0], rtol=0, atol=0)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(function, dtype, seed):
    inputs = draw(seed, 1, 5, dtype=dtype)
    out, state = function(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert out.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_long_sequences_with_the_strongest_and_no_decay():
    """In float32 nothing overflows or turns NaN, forward and backward, and both functions agree."""
    for low in (-5.0, 0.0, -60.0):
        inputs = draw(7, 1, 130, dtype=torch.float32, low=low)
        if low == -5.0:
            inputs["g"] = torch.full_like(inputs["g"], -5.0)
        inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
        outs = [f(**inputs, use_qk_l2norm_in_kernel=True)[0] for f in BOTH]
        assert_close(outs[0], outs[1], rtol=1e-3, atol=1e-4)
        outs[1].square().sum().backward()
        assert all(tensor.grad.isfinite().all() for tensor in inputs.values())


@pytest.mark.parametrize("function", BOTH)
def test_gradients(function, seed):
    inputs = draw(seed, 1, CHUNK + 2, heads=1, key_dim=3, value_dim=2)
    names, tensors = list(inputs), [tensor.requires_grad_() for tensor in inputs.values()]

    def run(*tensors):
        arguments = dict(zip(names, tensors, strict=True))
        return function(**arguments, output_final_state=True, use_qk_l2norm_in_kernel=True)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_split_anywhere(seed):
    inputs = draw(seed, 2, 40)
    state = inputs.pop("initial_state")
    whole, final = chunk_kimi_delta_attention(**inputs, initial_state=state, output_final_state=True)
    outs, start = [], 0
    for function, count in [(BOTH[1], 17), (BOTH[0], 1), (BOTH[1], 2), (BOTH[0], 3), (BOTH[1], 17)]:
        part = {name: tensor[:, start : start + count] for name, tensor in inputs.items()}
        out, state = function(**part, initial_state=state, output_final_state=True)
        outs.append(out)
        start += count
    assert_close(torch.cat(outs, 1), whole, rtol=0, atol=1e-10)
    assert_close(state, final, rtol=0, atol=1e-10)


def test_agrees_with_transformers(seed):
    """The same arguments give the same results as the functions of transformers' Kimi-Linear (its torch versions)."""
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    inputs = draw(seed, 2, 70, key_dim=8, value_dim=8, dtype=torch.float32)
    for name, function in [("chunk_kimi_delta_attention", BOTH[1]), ("recurrent_kimi_delta_attention", BOTH[0])]:
        found = function(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
        wanted = getattr(theirs, name)(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
        for mine, other in zip(found, wanted, strict=True):
            assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_cpu_tensors_never_reach_the_gpu_kernels(monkeypatch, seed):
    def fail():
        raise AssertionError("fla must not be imported for CPU tensors")

    monkeypatch.setattr(delta_attention, "_fla", fail)
    for function in BOTH:
        assert function(**draw(seed, 1, 2, dtype=torch.float32))[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("seq", [1, 63, 200])
def test_gpu_kernels_agree_forward_and_backward(seq, seed):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("fla")
    inputs = draw(seed, 2, seq, key_dim=64, value_dim=64, dtype=torch.float32, device="cuda")
    weights = torch.randn(2, seq, 2, 64, device="cuda")
    results = []
    for dtype in (torch.float64, torch.float32):
        arguments = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
        out, state = chunk_kimi_delta_attention(**arguments, output_final_state=True, use_qk_l2norm_in_kernel=True)
        ((out * weights).sum() + state.sum()).backward()
        results.append([out, state, *(tensor.grad for tensor in arguments.values())])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert_close(found.double(), wanted.double(), rtol=2e-2, atol=2e-2 * wanted.abs().max().item())
    with torch.no_grad():
        step = recurrent_kimi_delta_attention(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for found, wanted in zip(step, results[0], strict=False):
        assert_close(found.double(), wanted.double(), rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_decay_is_bounded_and_per_head(seed):
    config = tiny_kimi_k3_config(2)
    layer = KimiK3DeltaAttention(config, 0).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
        x = 100 * torch.randn(2, 3, config.hidden_size, dtype=torch.float64)
        g = layer.log_decay(x)
        assert g.shape == (2, 3, 4, 16) and (g <= 0).all() and (g >= -5).all() and (g > -4.9).any() and (g < -4.9).any()
        base = layer.log_decay(x / 100)
        layer.A_log[1] += 1
        moved = (layer.log_decay(x / 100) - base).abs().amax(dim=(0, 1, 3))
    assert moved[1] > 0 and (moved[[0, 2, 3]] == 0).all()


def test_short_convolution(seed):
    torch.manual_seed(seed)
    convolution = ShortConvolution(6, 4).double()
    with torch.no_grad():
        convolution.weight.normal_()
    window = torch.randn(2, 6, 3 + 5, dtype=torch.float64)
    wanted = torch.nn.functional.conv1d(window, convolution.weight, groups=6)
    assert_close(convolution(window), torch.nn.functional.silu(wanted).transpose(1, 2))
    last_tap = torch.zeros_like(convolution.weight)
    last_tap[..., -1] = 1
    convolution.weight.data.copy_(last_tap)
    assert_close(convolution(window), torch.nn.functional.silu(window[..., 3:]).transpose(1, 2))
