# SPDX-License-Identifier: Apache-2.0
"""The parts of the training script, and a whole run on a tiny model."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from dcp_compile.models.kimi_k3 import KimiK3ForCausalLM
from dcp_compile.models.mini import corpus, train
from dcp_compile.models.mini.optimizer import Adam, Muon, orthogonalise
from tests.tiny_models import VOCAB, tiny_kimi_k3, tiny_kimi_k3_config


@pytest.fixture
def generator():
    seed = torch.Generator().seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def test_documents_leave_out_what_is_not_code(tmp_path):
    files = {
        "a.py": "x = 1\r\n",
        "pkg/b.py": "y = 2\n",
        "empty.py": " \n",
        "encodings/cp1.py": "decoding_table = ()\n",
        "site-packages/c.py": "z = 3\n",
        "notes.txt": "no",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert corpus.documents(tmp_path) == {"a.py": "x = 1\n", "pkg/b.py": "y = 2\n"}


def test_split_depends_on_the_name_alone():
    assert corpus.is_heldout("test/test_netrc.py") and not corpus.is_heldout("argparse.py")
    share = np.mean([corpus.is_heldout(f"{i}.py") for i in range(20000)])
    assert share == pytest.approx(corpus.HELDOUT_PER_MILLE / 1000, abs=0.006)


@pytest.mark.parametrize(
    ("tokens", "length", "count"), [(9, 4, 2), (8, 4, 1), (5, 4, 1), (4, 4, 0), (1, 4, 0), (7, 1, 6)]
)
def test_windows_predict_each_token_once(tokens, length, count):
    rows = train.cut(np.arange(tokens, dtype=np.uint16), length)
    assert rows.shape == (count, length + 1)
    assert rows[:, 1:].ravel().tolist() == list(range(1, count * length + 1))
    assert np.array_equal(rows[:, 0], np.arange(count) * length)


def test_training_windows_are_pieces_of_whole_documents():
    documents = [np.r_[0, np.full(n, 10 + n), 1] for n in range(5, 40)]
    tokens = np.concatenate(documents).astype(np.uint16)
    recipe = replace(train.Recipe(), length=16, windows=3)
    batches = train.training_windows(tokens, recipe)
    for batch in (next(batches) for _ in range(200)):  # several epochs
        assert batch.shape == (3, 17) and batch.dtype == torch.int64
        for row in batch.tolist():
            for now, after in pairwise(row):
                assert {0: after >= 10, 1: after == 0}.get(now, after in (now, 1))


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_grouped_experts_are_the_experts(generator, tokens):
    model = tiny_kimi_k3(layers=2)
    experts = model.model.layers[1].block_sparse_moe.experts
    model.config._experts_implementation = "eager"
    x = torch.randn(tokens, 32, generator=generator)
    index = torch.rand(tokens, 8, generator=generator).topk(3).indices
    weights = torch.rand(tokens, 3, generator=generator)
    probe = torch.randn(tokens, 32, generator=generator)

    def run(forward):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_(), experts.gate_up_proj, experts.down_proj]
        out = forward(leaves[0], index, leaves[1])
        return [out, *torch.autograd.grad((out * probe).sum(), leaves)]

    for ours, theirs in zip(run(lambda *a: train.grouped_experts(experts, *a)), run(experts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_expert_counts(generator):
    index = torch.randint(0, 7, (50, 3), generator=generator)
    assert torch.equal(train.expert_counts(index, 9), torch.bincount(index.flatten(), minlength=9).int())


@pytest.mark.parametrize("shape", [(3, 16, 48), (3, 48, 16), (1, 16, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(generator, shape):
    out = orthogonalise(torch.randn(shape, generator=generator))
    assert out.shape == shape
    if shape[1] != shape[2]:  # a square random matrix may be close to singular
        values = torch.linalg.svdvals(out.float())
        assert values.min() > 0.5 and values.max() < 1.4


def test_muon_treats_each_expert_by_itself(generator):
    """A stack of experts and the same matrices as separate parameters take the same step."""
    weights, grads = torch.randn(2, 4, 32, 64, generator=generator)
    grads = grads * torch.tensor([1e-3, 1.0, 10.0, 1e3])[:, None, None]
    stack = torch.nn.Parameter(weights.clone())
    single = [torch.nn.Parameter(w.clone()) for w in weights]
    stack.grad = grads.clone()
    for param, grad in zip(single, grads):
        param.grad = grad.clone()
    for params in ([stack], single):
        muon = Muon(params, weight_decay=0.1)
        muon.step(0.02)
        muon.write_back({})
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]))
    assert not torch.equal(stack.detach(), weights)


def test_masters_keep_what_bf16_drops():
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    adam = Adam([param], weight_decay=0.0)
    for _ in range(20):
        param.grad = torch.ones_like(param)
        adam.step(1e-3)  # alone below half a unit in the last place of 1.0
        adam.write_back()
    assert param.float().mean().item() == pytest.approx(0.98, abs=0.003)


def test_rate_warms_up_holds_and_falls():
    recipe = replace(train.Recipe(), warmup_steps=10, decay_from=0.5)
    assert train.rate(recipe, 0, 0.0) == pytest.approx(0.1)
    assert train.rate(recipe, 500, 0.4) == 1.0
    assert train.rate(recipe, 500, 0.75) == pytest.approx(0.5)
    assert train.rate(recipe, 500, 1.0) == 0.0


def test_balance_moves_the_bias_against_the_load():
    model = tiny_kimi_k3(layers=2)
    router = model.model.layers[1].block_sparse_moe.gate
    before = router.e_score_correction_bias.clone()
    router.load = torch.tensor([10, 0, 5, 5, 5, 5, 5, 5])
    train.balance(model, 0.25)
    assert (router.e_score_correction_bias - before).tolist() == pytest.approx([-0.25, 0.25, 0, 0, 0, 0, 0, 0])


@pytest.mark.slow
def test_a_short_run_learns_and_ships_what_it_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "EVALUATED", 2)
    monkeypatch.setattr(train, "EVALUATE_EVERY", 0.3)
    recipe = replace(train.Recipe(), length=16, windows=4, warmup_steps=2, save_from=0.0, round_from=0.0)
    trainer = train.Trainer(
        tiny_kimi_k3_config(2, bos_token_id=0, eos_token_id=1, pad_token_id=2), recipe, torch.device("cpu")
    )
    tokens = np.tile(np.r_[0, np.arange(10, 40), 1], 40).astype(np.uint16)
    heldout = torch.from_numpy(train.cut(tokens[: 16 * 8 + 1], 16).astype(np.int64))
    log = train.train(trainer, tokens, heldout, time.monotonic() + 12, tmp_path)

    losses = [row["heldout"] for row in log["evaluations"]]
    assert log["steps"] > 3 and losses[-1] < min(losses[0], np.log(VOCAB))
    assert log["evaluations"][-1]["rounded"] and log["saved_step"] in [row["step"] for row in log["evaluations"]]
    shipped = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert train.mean_loss(shipped, train.every(heldout, 2)) == pytest.approx(min(losses), abs=1e-6)
