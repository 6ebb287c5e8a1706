# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.generation.helpers import Pair, tiny_qwen3
from tests.tiny_models import VOCAB, tiny_kimi_linear


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kimi() -> Pair:
    """A hybrid model: its recurrent layer cannot be rolled back by cropping."""
    return Pair.of(lambda seed=0: tiny_kimi_linear(2, seed=seed, num_local_experts=4))


@pytest.fixture(scope="session")
def qwen() -> Pair:
    """A model of softmax attention only."""
    return Pair.of(tiny_qwen3)


@pytest.fixture(params=["qwen", "kimi"])
def pair(request) -> Pair:
    return request.getfixturevalue(request.param)


SYLLABLES = [a + b for a in "bdgklmnr" for b in "aeiou"]
SPACE = "\u2581"


@pytest.fixture(scope="session")
def tokenizer():
    """Letters, syllables and syllables after a space; every token of the models has a text."""
    vocab = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        SPACE,
        *string.ascii_lowercase,
        *SYLLABLES,
        *(SPACE + s for s in SYLLABLES),
    ]
    vocab += [f"<{i}>" for i in range(VOCAB - len(vocab))]
    merges = [tuple(s) for s in SYLLABLES] + [(SPACE, s) for s in SYLLABLES]
    ids = {token: i for i, token in enumerate(vocab)}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
