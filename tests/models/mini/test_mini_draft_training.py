# SPDX-License-Identifier: Apache-2.0
"""How the mini model's draft is trained and judged, on tiny random models."""

from dataclasses import replace

import pytest
import torch

from dcp_compile.errors import ConfigError
from dcp_compile.models.k3_dspark import K3DSparkConfig, load_draft
from dcp_compile.models.mini import draft_path
from dcp_compile.models.mini.acceptance import on_text, summary, target_states, verify_step
from dcp_compile.models.mini.train_draft import (
    Recipe,
    Trainer,
    batches,
    learn_states,
    mini_draft_config,
    rate,
    write_texts,
)
from tests.tiny_models import tiny_kimi_k3


@pytest.fixture(scope="module")
def target():
    return tiny_kimi_k3(3, vocab_size=24, hidden_size=32).requires_grad_(False)


def tiny_config(**settings) -> K3DSparkConfig:
    defaults = {
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 256,
        "target_num_hidden_layers": 3,
        "target_layer_ids": [0, 2],
        "mask_token_id": 23,
        "markov_rank": 8,
        "block_size": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return K3DSparkConfig(**{**defaults, **settings})


def tiny_trainer(target, **recipe) -> Trainer:
    trainer = Trainer(target, tiny_config(), replace(Recipe(), **recipe))
    trainer.draft.float()
    return trainer


def random_ids(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, 23, shape, generator=torch.Generator().manual_seed(seed))


def test_cold_texts_are_the_greedy_texts(target, seed):
    prompts = random_ids(seed, 3, 5)
    texts = write_texts(target, prompts, 6, torch.full((3,), 1e-3), torch.Generator().manual_seed(seed))
    plain = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(texts, plain)


def test_states_do_not_depend_on_the_batch(target, seed):
    ids = random_ids(seed, 5, 12)
    states = learn_states(target, ids, [0, 2], batch=2)
    hidden, taps = target_states(target, ids, [0, 2])
    torch.testing.assert_close(states.hidden, hidden)
    torch.testing.assert_close(states.taps, taps)
    torch.testing.assert_close(target.lm_head(hidden), target(ids).logits)


def test_the_first_token_of_a_document_is_never_learned(target, seed):
    ids = random_ids(seed, 6, 12)
    ids[:, 7] = target.config.bos_token_id
    states = learn_states(target, ids, [0, 2], batch=6)
    draws = batches(states, 4, 5, torch.Generator().manual_seed(seed))
    for _ in range(8):
        rows, anchors = next(draws)
        assert rows.shape == (4,) and len(set(rows.tolist())) == 4
        assert ids[rows].gather(1, anchors + 1).ne(target.config.bos_token_id).all()


def test_the_schedule_follows_the_clock():
    recipe = replace(Recipe(), warmup_steps=10, decay_from=0.5)
    assert [rate(recipe, s, p) for s, p in ((0, 0.0), (9, 0.2), (99, 0.5), (99, 0.75), (99, 1.0))] == [
        0.1,
        1.0,
        1.0,
        0.5,
        0.0,
    ]


def test_steps_lower_the_loss_and_leave_the_target_alone(target, seed):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = tiny_trainer(target, seed=seed, warmup_steps=1)
    states = learn_states(target, random_ids(seed, 4, 16), [0, 2], batch=4)
    rows, anchors = next(batches(states, 4, 6, torch.Generator().manual_seed(seed)))
    losses = [trainer.step(states, rows, anchors, 1.0).total.item() for _ in range(25)]
    assert losses[-1] < 0.9 * losses[0]
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_draft_of_another_target_is_refused(target):
    with pytest.raises(ConfigError, match="num_hidden_layers=4"):
        Trainer(target, tiny_config(target_num_hidden_layers=4), Recipe())


def test_a_verify_step_keeps_what_the_target_would_have_written(target, seed):
    draft, ids = tiny_trainer(target, seed=seed).draft.eval(), random_ids(seed, 6, 20)
    lengths = torch.tensor([4, 5, 8, 11, 15, 16])
    _, taps = target_states(target, ids, [0, 2])
    poisoned = taps.masked_fill(torch.arange(20)[None, :, None] >= lengths[:, None, None] - 1, 1e4)
    step = verify_step(target, draft, ids, poisoned, lengths, 3, 0)
    assert (step.accepted >= 0).all() and (step.accepted <= 3).all()
    for b, (length, accepted) in enumerate(zip(lengths.tolist(), step.accepted.tolist())):
        prompt = ids[b : b + 1, :length]
        kept = step.tokens[b, : length + accepted + 1]
        plain = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=accepted + 1,
            do_sample=False,
            eos_token_id=None,
        )
        assert torch.equal(kept, plain[0])


def test_sampled_steps_follow_the_distribution_of_the_target(target, seed):
    """Chi-square of the first token of 1500 verify steps, at a temperature that spreads it."""
    draft = tiny_trainer(target, seed=seed).draft.eval()
    ids = random_ids(seed, 1, 12).repeat(1500, 1)
    _, taps = target_states(target, ids[:1], [0, 2])
    generator = torch.Generator().manual_seed(seed)
    step = verify_step(target, draft, ids, taps.expand(1500, -1, -1), torch.full((1500,), 8), 3, 2.0, generator)
    expected = 1500 * (target(ids[:1]).logits[0, 7] / 2.0).softmax(-1)
    common = expected >= 5
    found = torch.bincount(step.tokens[:, 8], minlength=24).float()
    cells = (
        torch.cat([found[common], found[~common].sum()[None]]),
        torch.cat([expected[common], expected[~common].sum()[None]]),
    )
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1].clamp_min(1e-6)).sum().item()
    freedom = int(common.sum())
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5 + 10, (statistic, freedom)
    assert 0 < step.accepted.float().mean() < 3


def test_summary_counts_the_token_after_the_drafts():
    found = summary(torch.tensor([0, 1, 3, 0]), 3)
    assert found == {"length": 2.0, "steps": 4, "reached_and_accepted": [0.5, 0.25, 0.25]}


def test_prefixes_leave_room_for_the_block(target, seed):
    draft = tiny_trainer(target, seed=seed).draft.eval()
    found = on_text(target, draft, random_ids(seed, 3, 12), 0, 4, torch.Generator().manual_seed(seed), shortest=8)
    assert found["steps"] == 12 and 1 <= found["length"] <= 4


def test_the_shipped_configuration_is_that_of_the_recipe():
    shipped = load_draft(draft_path()).config
    for key, value in mini_draft_config().to_diff_dict().items():
        if key not in ("transformers_version", "dtype"):
            assert getattr(shipped, key) == value, key
