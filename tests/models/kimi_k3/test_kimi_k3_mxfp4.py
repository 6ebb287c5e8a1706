# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dcp_compile.models.kimi_k3 import mxfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_codes(seed, *shape, low=0, high=255):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return packed, scale


def test_decode_by_hand():
    """Low nibble first; the sign is bit 3; a scale of 127 is 1, 130 is 8, one scale per 32 columns."""
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0] = 0x21  # columns 0, 1: codes 1 and 2
    packed[0, 1] = 0xF7  # columns 2, 3: codes 7 and 15
    packed[0, 16] = 0x0C  # column 32: code 12
    scale = torch.tensor([[127, 130]], dtype=torch.uint8)
    wanted = torch.zeros(1, 64)
    wanted[0, :4] = torch.tensor([0.5, 1.0, 6.0, -6.0])
    wanted[0, 32] = -2.0 * 8
    torch.testing.assert_close(mxfp4.decode(packed, scale), wanted, rtol=0, atol=0)


def test_decode_every_code_and_scale():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | (codes[1::2] << 4)).repeat(2).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    out = mxfp4.decode(packed, scale, torch.float64)
    for s in range(255):
        wanted = [sign * value * 2.0 ** (s - 127) for sign in (1, -1) for value in VALUES] * 2
        assert out[s].tolist() == wanted
    assert out[255].isnan().all()


def test_bfloat16_holds_every_value():
    packed, scale = random_codes(0, 40, 64, low=0, high=253)
    exact = mxfp4.decode(packed, scale, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert mxfp4.decode(packed, scale, dtype).dtype == dtype
        assert torch.equal(mxfp4.decode(packed, scale, dtype).double(), exact)


def test_encode_by_hand():
    """Nearest, ties to the even code, maximum in range."""
    weight = torch.zeros(1, 32)
    weight[0, :12] = torch.tensor([6.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, -0.2, 4.9])
    packed, scale = mxfp4.encode(weight)
    assert scale.tolist() == [[127]]
    found = mxfp4.decode(packed, scale)[0, :12].tolist()
    assert found == [6.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 0.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_encoding_a_decoded_tensor_loses_nothing(dtype, seed):
    packed, scale = random_codes(seed, 3, 16, 96, low=10, high=240)
    weight = mxfp4.decode(packed, scale, dtype)
    assert torch.equal(mxfp4.decode(*mxfp4.encode(weight), dtype), weight)


def test_encoding_is_the_nearest_for_its_scale(seed):
    torch.manual_seed(seed)
    weight = torch.randn(64, 64) * torch.exp(20 * torch.randn(64, 1))
    packed, scale = mxfp4.encode(weight)
    found = mxfp4.decode(packed, scale).view(64, 2, 32)
    grid = torch.tensor(VALUES + [-v for v in VALUES])
    for row in range(64):
        for group in range(2):
            block = weight.view(64, 2, 32)[row, group]
            levels = grid * 2.0 ** (scale[row, group].item() - 127)
            best = (block[:, None] - levels).abs().min(-1).values
            torch.testing.assert_close((found[row, group] - block).abs(), best, rtol=0, atol=0)
            for other in (-1, 1):
                worse = (block[:, None] - levels * 2.0**other).abs().min(-1).values.square().sum()
                if other == -1 and block.abs().max() >= 4 * 2.0 ** (scale[row, group].item() - 127):
                    continue  # two steps below the maximum are never tried
                assert best.square().sum() <= worse * (1 + 1e-5)


def test_extremes():
    assert mxfp4.encode(torch.zeros(2, 32))[0].sum() == 0
    tiny = torch.full((1, 32), 2.0**-140)
    assert mxfp4.decode(*mxfp4.encode(tiny)).abs().max() <= 2.0**-128
    huge = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert mxfp4.decode(*mxfp4.encode(huge)).tolist() == [[6 * 2.0**125] * 32]  # 4 * 2^126 is infinite in float32
    assert mxfp4.encode(torch.empty(0, 64))[0].shape == (0, 32)


def test_bad_input_is_refused():
    packed, scale = random_codes(0, 2, 64)
    with pytest.raises(ValueError, match="uint8"):
        mxfp4.decode(packed.int(), scale)
    with pytest.raises(ValueError, match="does not fit"):
        mxfp4.decode(packed, scale[:, :1])
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.encode(torch.zeros(2, 48))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            mxfp4.encode(torch.full((1, 32), bad))
