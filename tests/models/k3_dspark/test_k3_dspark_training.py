# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from transformers import DynamicCache

from dcp_compile.errors import ConfigError
from dcp_compile.models.k3_dspark.loss import draft_loss
from dcp_compile.models.k3_dspark.training import make_blocks, parallel_blocks, sample_anchors, training_step
from tests.models.k3_dspark.tiny_draft import random_taps, target_heads, tiny_draft


def two_token_logits(*probabilities):
    """Logits [rows, 2] of the given probabilities of token 0."""
    return torch.tensor([[math.log(p), math.log(1 - p)] for p in probabilities])


def test_loss_has_the_hand_computed_value():
    draft, target = two_token_logits(0.5, 0.8, 0.9), two_token_logits(0.75, 0.6, 0.2)
    labels, valid = torch.tensor([0, 1, 0]), torch.tensor([True, True, False])
    confidence = torch.tensor([0.0, math.log(3.0), 5.0])  # probabilities 0.5 and 0.75; the last row does not count
    loss = draft_loss(draft[None], target[None], labels[None], valid[None], confidence[None], decay=2.0)
    w = [1.0, math.exp(-0.5)]
    # |p - q|_1 is 0.5 and 0.4, so the acceptance rates are 0.75 and 0.8.
    ce = (w[0] * -math.log(0.5) + w[1] * -math.log(0.2)) / sum(w)
    l1 = (w[0] * 0.5 + w[1] * 0.4) / sum(w)
    bce = (w[0] * math.log(2) - w[1] * (0.8 * math.log(0.75) + 0.2 * math.log(0.25))) / sum(w)
    assert loss.cross_entropy.item() == pytest.approx(ce, rel=1e-5)
    assert loss.l1.item() == pytest.approx(l1, rel=1e-5)
    assert loss.confidence.item() == pytest.approx(bce, rel=1e-5)
    assert loss.total.item() == pytest.approx(0.1 * ce + 0.9 * l1 + bce, rel=1e-5)
    assert loss.acceptance.tolist() == pytest.approx([0.75, 0.8, 0.0], rel=1e-5)


def test_decay_defaults_to_the_block_length_and_a_missing_head_costs_nothing(seed):
    g = torch.Generator().manual_seed(seed)
    draft, target = torch.randn(2, 3, 5, 7, generator=g), torch.randn(2, 3, 5, 7, generator=g)
    labels, valid = torch.randint(7, (2, 3, 5), generator=g), torch.ones(2, 3, 5, dtype=torch.bool)
    confidence = torch.randn(2, 3, 5, generator=g)
    default, explicit = (draft_loss(draft, target, labels, valid, confidence, d) for d in (None, 5.0))
    assert torch.equal(default.total, explicit.total)
    headless = draft_loss(draft, target, labels, valid, None)
    torch.testing.assert_close(headless.total, 0.1 * headless.cross_entropy + 0.9 * headless.l1)


def test_no_valid_row_gives_a_zero_loss_with_a_zero_gradient(seed):
    draft = torch.randn(1, 2, 4, requires_grad=True, generator=torch.Generator().manual_seed(seed))
    loss = draft_loss(
        draft, torch.randn(1, 2, 4), torch.zeros(1, 2).long(), torch.zeros(1, 2).bool(), torch.zeros(1, 2)
    )
    loss.total.backward()
    assert loss.total.item() == 0 and draft.grad.eq(0).all()


def test_gradients_stop_at_the_target_and_at_the_confidence_label(seed):
    g = torch.Generator().manual_seed(seed)
    draft = torch.randn(1, 3, 6, generator=g, requires_grad=True)
    target = torch.randn(1, 3, 6, generator=g, requires_grad=True)
    confidence = torch.randn(1, 3, generator=g, requires_grad=True)
    labels, valid = torch.tensor([[1, 2, 3]]), torch.tensor([[True, True, False]])
    loss = draft_loss(draft, target, labels, valid, confidence)
    loss.total.backward()
    assert target.grad is None
    for tensor in (draft, confidence):
        assert tensor.grad[0, :2].ne(0).all() and tensor.grad[0, 2].eq(0).all()
    again = draft.detach().clone().requires_grad_()
    headless = draft_loss(again, target, labels, valid, None)
    headless.total.backward()
    torch.testing.assert_close(draft.grad, again.grad)


def test_blocks_are_cut_from_the_sequence():
    ids = torch.arange(100, 110)[None]
    loss_mask = torch.ones(1, 10, dtype=torch.bool)
    loss_mask[0, 5] = False
    blocks = make_blocks(ids, torch.tensor([[1, 2, 8, 9]]), 3, loss_mask)
    assert blocks.positions[0].tolist() == [[1, 2, 3], [2, 3, 4], [8, 9, 10], [9, 10, 11]]
    assert blocks.prev_tokens[0, :2].tolist() == [[101, 102, 103], [102, 103, 104]]
    assert blocks.labels[0, :2].tolist() == [[102, 103, 104], [103, 104, 105]]
    assert blocks.labels[0, 2, 0] == 109
    # Position 5 is not learned and ends its block; labels past the sequence do not exist.
    assert blocks.valid[0].tolist() == [[True] * 3, [True, True, False], [True, False, False], [False] * 3]


def test_anchors_are_drawn_where_the_next_token_counts(seed):
    g = torch.Generator().manual_seed(seed)
    loss_mask = torch.zeros(2, 12, dtype=torch.bool)
    loss_mask[0, 4:9] = True
    loss_mask[1, 0:3] = True
    anchors = sample_anchors(loss_mask, 40, g)
    assert set(anchors[0].tolist()) <= set(range(3, 8)) and set(anchors[1].tolist()) <= {0, 1}
    assert (anchors.diff(dim=1) >= 0).all()
    distinct = sample_anchors(loss_mask, 2, g)
    assert (distinct.diff(dim=1) > 0).all()
    with pytest.raises(ConfigError, match="no token to learn"):
        sample_anchors(torch.eye(2, 12, dtype=torch.bool), 1, g)  # the first sequence only learns its first token


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_in_parallel_equal_one_block_at_a_time(seed, attention, causal):
    model = tiny_draft(seed, dtype=torch.float64, attention=attention, is_causal=causal)
    embed, head = target_heads(model, seed)
    taps = random_taps(model, 2, 11, seed)
    ids = torch.randint(60, (2, 11), generator=torch.Generator().manual_seed(seed))
    anchors = torch.tensor([[0, 3, 3, 10], [1, 2, 9, 10]])
    with torch.no_grad():
        hidden = parallel_blocks(model, taps, ids, anchors, 4, embed)
        assert hidden.shape == (2, 4, 4, 32)
        for b in range(2):
            for a, anchor in enumerate(anchors[b].tolist()):
                cache = DynamicCache()
                context = model.project_context(taps[b : b + 1, :anchor])
                model.ingest(context, torch.arange(anchor)[None], cache)
                block = model.draft_block(ids[b, anchor][None], anchor, cache, embed, head, 4)
                torch.testing.assert_close(head(hidden[b, a]), block.base_logits[0], rtol=1e-9, atol=1e-9)


def test_states_at_and_after_the_anchor_are_never_seen(seed):
    model = tiny_draft(seed)
    embed, _ = target_heads(model, seed)
    taps, ids = random_taps(model, 1, 9, seed), torch.arange(9)[None]
    poisoned = taps.clone()
    poisoned[:, 5:] += 100
    with torch.no_grad():
        clean = parallel_blocks(model, taps, ids, torch.tensor([[2, 5, 6]]), 3, embed)
        other = parallel_blocks(model, poisoned, ids, torch.tensor([[2, 5, 6]]), 3, embed)
    assert torch.equal(clean[:, :2], other[:, :2])
    assert (clean[:, 2] - other[:, 2]).abs().max() > 1e-3


def test_every_weight_of_the_draft_learns_and_the_target_does_not(seed):
    model = tiny_draft(seed).train()
    embed, head = target_heads(model, seed)
    taps = random_taps(model, 2, 12, seed)
    ids = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(seed))
    loss_mask = torch.ones(2, 12, dtype=torch.bool)
    anchors = sample_anchors(loss_mask, 4, torch.Generator().manual_seed(seed))
    loss = training_step(model, taps, ids, torch.randn(2, 12, 61), anchors, 4, loss_mask, embed, head)
    loss.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert embed.weight.grad is None and head.weight.grad is None


def test_training_raises_the_acceptance_of_a_learnable_target(seed):
    """The target's next token is a fixed function of the current one; the Markov chain alone can learn that."""
    model = tiny_draft(seed, vocab_size=12, mask_token_id=11, num_hidden_layers=1).train()
    embed, head = target_heads(model, seed)
    g = torch.Generator().manual_seed(seed)
    follow = torch.randperm(11, generator=g)
    ids = torch.randint(11, (4, 1), generator=g)
    for _ in range(15):
        ids = torch.cat((ids, follow[ids[:, -1:]]), 1)
    target_logits = 8.0 * torch.nn.functional.one_hot(follow[ids], 12).float()
    taps, loss_mask = random_taps(model, 4, 16, seed), torch.ones(4, 16, dtype=torch.bool)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(60):
        anchors = sample_anchors(loss_mask, 6, g)
        loss = training_step(model, taps, ids, target_logits, anchors, 3, loss_mask, embed, head)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        history.append(loss.acceptance.mean().item())
    assert history[-1] > 0.65 > 0.3 > history[0]
