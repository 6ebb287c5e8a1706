# SPDX-License-Identifier: Apache-2.0
"""Settings are checked on construction, and every message names the value and the remedy."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from dcp_compile import DCPConfig, errors
from dcp_compile.errors import ConfigError, DCPCompileError

INTEGERS = {
    "dcp_size": 1,
    "tp_size": 1,
    "block_size": 1,
    "kv_interleave": 1,
    "max_batch_size": 1,
    "max_seq_len": 1,
    "prefill_chunk": 1,
    "num_speculative_tokens": 0,
    "draft_window": 1,
}


def test_every_default_is_valid_and_documented() -> None:
    config = DCPConfig()
    for field in dataclasses.fields(config):
        assert field.name in inspect.getdoc(DCPConfig)
        assert config.replace(**{field.name: getattr(config, field.name)}) == config


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["4", 2.0, True, -3, float("nan")])
def test_integers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* must be an integer of at least {INTEGERS[name]}"):
        DCPConfig(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_lowest_integers(name: str) -> None:
    low = INTEGERS[name]
    assert getattr(DCPConfig(**{name: low}), name) == low
    with pytest.raises(ConfigError, match=f"{name}={low - 1} "):
        DCPConfig(**{name: low - 1})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [2**31, 2**58, 2**64])
def test_highest_integers(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is above 2147483647: .* 32 bits"):
        DCPConfig(**{name: value})


def test_pages_are_counted_in_32_bits() -> None:
    most = dict(max_batch_size=2**20, max_seq_len=2**17 - 64, block_size=64)
    assert DCPConfig(**most).max_batch_size == 2**20
    with pytest.raises(ConfigError, match="take 2147483648 pages of block_size=64, above 2147483647; make one of the first"):
        DCPConfig(**most | {"max_seq_len": 2**17 - 63})


@pytest.mark.parametrize("name", ["dcp_size", "draft_window"])
def test_optional_integers(name: str) -> None:
    assert getattr(DCPConfig(**{name: None}), name) is None


def test_other_integers_are_not_optional() -> None:
    with pytest.raises(ConfigError, match="block_size=None"):
        DCPConfig(block_size=None)


@pytest.mark.parametrize("name, value", [
    ("decode_layout", "paged"), ("decode_layout", ["split"]), ("lowering", "trtllm"), ("lowering", None),
    ("verify", "half"), ("cuda_graphs", "yes"), ("cuda_graphs", None), ("cuda_graphs", 1),
    ("query_projection", "gathered"), ("query_projection", True),
])  # fmt: skip
def test_choices(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        DCPConfig(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["backend", "draft_backend"])
@pytest.mark.parametrize("value", [None, 3, ""])
def test_backend_names(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        DCPConfig(**{name: value})


@pytest.mark.parametrize("value", ["fp7", None, "int32", "nn", 16])
def test_cache_types_are_floating_point_types_of_torch(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype="):
        DCPConfig(kv_cache_dtype=value)


@pytest.mark.parametrize("value", ["auto", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
def test_known_cache_types(value: str) -> None:
    assert DCPConfig(kv_cache_dtype=value).kv_cache_dtype == value


@pytest.mark.parametrize("value", ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_one_8_bit_type_is_supported(value: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{value}' .*\"float8_e4m3fn\"; choose that or a 16-bit type"):
        DCPConfig(kv_cache_dtype=value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-31, 1e31, "1", None, True])
def test_scales_are_positive_and_finite(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_scale=.* must be a number from 1e-30 to 1e[+]30"):
        DCPConfig(kv_cache_dtype="float8_e4m3fn", kv_cache_scale=value)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_only_float8_caches_are_scaled(dtype: str) -> None:
    assert DCPConfig(kv_cache_dtype="float8_e4m3fn", kv_cache_scale=0.25).kv_cache_scale == 0.25
    with pytest.raises(ConfigError, match=f"kv_cache_scale=0.25 with kv_cache_dtype='{dtype}': only a float8 cache is scaled"):
        DCPConfig(kv_cache_dtype=dtype, kv_cache_scale=0.25)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "60", None, True])
def test_timeouts(value: object) -> None:
    with pytest.raises(ConfigError, match="timeout="):
        DCPConfig(timeout=value)


def test_a_run_of_tokens_must_not_cross_a_page() -> None:
    assert DCPConfig(block_size=64, kv_interleave=64)
    with pytest.raises(ConfigError, match=r"kv_interleave=48 does not divide block_size=64.*divisor of 64"):
        DCPConfig(block_size=64, kv_interleave=48)
    with pytest.raises(ConfigError, match="kv_interleave=128"):
        DCPConfig(block_size=64, kv_interleave=128)


def test_dcp_groups_lie_inside_tensor_parallel_groups() -> None:
    assert DCPConfig(tp_size=8, dcp_size=4) and DCPConfig(tp_size=8) and DCPConfig(dcp_size=3)
    with pytest.raises(ConfigError, match="dcp_size=3 does not divide tp_size=8"):
        DCPConfig(tp_size=8, dcp_size=3)
    with pytest.raises(ConfigError, match="dcp_size=16 does not divide tp_size=8"):
        DCPConfig(tp_size=8, dcp_size=16)


def test_replace_validates_and_knows_its_settings() -> None:
    config = DCPConfig(block_size=32)
    assert config.replace(kv_interleave=8) == DCPConfig(block_size=32, kv_interleave=8)
    assert config.kv_interleave == 1
    with pytest.raises(ConfigError, match="kv_interleave=5"):
        config.replace(kv_interleave=5)
    with pytest.raises(ConfigError, match="unknown setting blocksize, world; known settings: dcp_size"):
        config.replace(world=2, blocksize=3)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DCPConfig().block_size = 3


def test_every_error_has_one_base_and_a_builtin_kind() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind is not DCPCompileError]
    assert len(kinds) >= 10
    for kind in kinds:
        assert issubclass(kind, DCPCompileError)
        assert issubclass(kind, (ValueError, RuntimeError, NotImplementedError)), kind
        assert kind.__doc__
