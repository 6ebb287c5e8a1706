# SPDX-License-Identifier: Apache-2.0
"""Train the DSpark draft of the mini Kimi-K3 within a given time, and measure how many tokens it wins per verify step.

    python -m dcp_compile.models.mini.train_draft --tokens DIR --out DIR --seconds 150

The target runs once over everything the draft learns from, and what the draft needs of it stays on the GPU (about
40 GB). Half of the steps learn on the corpus, which the target knows by heart as it will no other text; the other half
learn on texts that the target has written itself. A GPU with fla-core is assumed for more than a trial.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from dcp_compile.models.k3_dspark import K3DSparkConfig, K3DSparkModel, load_draft
from dcp_compile.models.k3_dspark.loss import DraftLoss
from dcp_compile.models.k3_dspark.training import sample_anchors, training_step
from dcp_compile.models.kimi_k3 import KimiK3ForCausalLM, moe
from dcp_compile.models.mini import mini_path
from dcp_compile.models.mini.acceptance import free_running, on_text, target_states
from dcp_compile.models.mini.optimizer import Adam, Muon
from dcp_compile.models.mini.train import cut, every, grouped_experts, limit_autotuning


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result besides data, time and hardware."""

    length: int = 4096  # tokens per window of the corpus
    windows: int = 16  # windows per step on the corpus
    anchors: int = 128  # per window
    texts: int = 8192  # written by the target
    prompt: int = 64  # tokens of the corpus that a text begins with
    written: int = 256  # tokens that the target adds
    temperatures: tuple[float, float] = (0.25, 1.0)  # lowest and highest of the texts
    text_batch: int = 128  # texts per step on them
    text_anchors: int = 32  # per text
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    muon_decay: float = 0.1
    adam_decay: float = 0.0
    warmup_steps: int = 100
    decay_from: float = 0.4  # share of the time after which the learning rate falls
    evaluate_every: float = 0.1  # of the time
    judged_length: int = 512  # tokens per held-out window of the acceptance measurement
    judged_rounds: int = 4  # prefixes of each of them in the final one
    prompts: int = 64  # at most, held-out beginnings of files that are continued at the end
    continued: int = 128  # tokens each
    seed: int = 0


def mini_draft_config() -> K3DSparkConfig:
    """Every part of the Kimi-K3 draft, head widths included, in 3.9 M parameters."""
    return K3DSparkConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        q_lora_rank=128,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 50000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        target_num_hidden_layers=9,
        target_layer_ids=[1, 3, 5, 7, 8],
        mask_token_id=3,
        markov_rank=64,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


# --- what the draft learns from ---


@torch.no_grad()
def write_texts(
    target: KimiK3ForCausalLM, prompts: Tensor, new_tokens: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Sample new_tokens tokens behind prompts [B, S], row b at temperatures[b] -> [B, S + new_tokens]."""
    cache, texts, ids = DynamicCache(config=target.config), [prompts], prompts
    for _ in range(new_tokens):
        logits = target(ids, cache=cache, logits_to_keep=1).logits[:, -1].float()
        ids = torch.multinomial((logits / temperatures[:, None]).softmax(-1), 1, generator=generator)
        texts.append(ids)
    return torch.cat(texts, dim=1)


@dataclass(frozen=True)
class States:
    """What the target made of sequences: ids [N, S], final hidden states [N, S, H] and taps [N, S, taps * H].

    counts [N, S] bool, on the CPU, marks the tokens to learn: all but the first of a document, which nothing announces.
    """

    ids: Tensor
    hidden: Tensor
    taps: Tensor
    counts: Tensor


def learn_states(target: KimiK3ForCausalLM, ids: Tensor, layers: list[int], batch: int) -> States:
    """Run the target over ids [N, S], ``batch`` sequences at a time, into tensors made once."""
    width = target.config.hidden_size
    hidden = torch.empty(*ids.shape, width, dtype=target.dtype, device=ids.device)
    taps = torch.empty(*ids.shape, len(layers) * width, dtype=target.dtype, device=ids.device)
    for start in range(0, len(ids), batch):
        part = slice(start, start + batch)
        hidden[part], taps[part] = target_states(target, ids[part], layers, batch)
    return States(ids, hidden, taps, (ids != target.config.bos_token_id).cpu())


def batches(states: States, size: int, anchors: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows [size] and anchors [size, anchors] without end; the CPU draws them, so that nobody waits for the GPU."""
    device = states.ids.device
    while True:
        for rows in torch.randperm(len(states.ids), generator=generator).split(size):
            if len(rows) == size:
                yield rows.to(device), sample_anchors(states.counts[rows], anchors, generator).to(device)


# --- training ---


def is_matrix(name: str, param: Tensor) -> bool:
    """Whether Muon takes the parameter: projections, not the tables of the Markov head or anything thin."""
    return param.ndim == 2 and min(param.shape) >= 32 and "markov" not in name


class Trainer:
    """The draft, its optimizers and the target it learns from."""

    def __init__(self, target: KimiK3ForCausalLM, config: K3DSparkConfig, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        config._attn_implementation = "sdpa"
        config.check_target(target.config)
        self.recipe, self.target = recipe, target
        self.draft = K3DSparkModel._from_config(config, dtype=torch.bfloat16).to(target.device).train()
        named = list(self.draft.named_parameters())
        self.muon = Muon([p for n, p in named if is_matrix(n, p)], recipe.muon_decay)
        self.adam = Adam([p for n, p in named if not is_matrix(n, p)], recipe.adam_decay)

    def step(self, states: States, rows: Tensor, anchors: Tensor, scale: float) -> DraftLoss:
        """One update with learning rates times ``scale``; the numbers returned are still on the device."""
        for param in self.draft.parameters():
            param.grad = None
        ids, embed, head = states.ids[rows], self.target.get_input_embeddings(), self.target.lm_head
        with torch.no_grad():
            target_logits = head(states.hidden[rows])
        loss = training_step(
            self.draft, states.taps[rows], ids, target_logits, anchors, self.draft.config.block_size,
            ids != self.target.config.bos_token_id, embed, head,
        )  # fmt: skip
        loss.total.backward()
        self.muon.step(self.recipe.muon_lr * scale)
        self.muon.write_back({})
        self.adam.step(self.recipe.adam_lr * scale)
        self.adam.write_back()
        return loss


def rate(recipe: Recipe, step: int, progress: float) -> float:
    """Share of the learning rate at a step and a share of the time: linear warm-up, constant, linear to zero."""
    return min(1.0, (step + 1) / recipe.warmup_steps, (1 - progress) / (1 - recipe.decay_from))


def train(trainer: Trainer, corpus: States, texts: States, judged: Tensor, end: float, out: Path) -> dict:
    """Train until the clock (``time.monotonic()``) reads ``end``, saving the draft at every evaluation; -> log."""
    recipe, device = trainer.recipe, corpus.ids.device
    random = torch.Generator().manual_seed(recipe.seed)
    sources = {
        "corpus": (corpus, batches(corpus, recipe.windows, recipe.anchors, random)),
        "texts": (texts, batches(texts, recipe.text_batch, recipe.text_anchors, random)),
    }
    log = {"corpus": [], "texts": [], "evaluations": []}
    begin, step, progress, next_evaluation, last = time.monotonic(), 0, 0.0, recipe.evaluate_every, None
    while progress < 1:
        progress = min(1.0, (time.monotonic() - begin) / (end - begin))
        source = ("corpus", "texts")[step % 2]
        states, draws = sources[source]
        loss = trainer.step(states, *next(draws), rate(recipe, step, progress))
        step += 1
        if last is not None:
            before, numbers = last  # waiting for them keeps the host at most one step ahead of the device
            row = [step - 1, time.monotonic() - begin, *numbers.tolist()]
            if step % 20 < 2:
                log[before].append(row)
        last = (
            source,
            torch.stack([loss.total.detach(), loss.cross_entropy, loss.l1, loss.confidence, *loss.acceptance]),
        )
        if progress >= next_evaluation or progress == 1:
            next_evaluation += recipe.evaluate_every
            trainer.draft.eval()
            random_here = torch.Generator(device).manual_seed(recipe.seed)
            row = {"step": step, "seconds": time.monotonic() - begin}
            for t in (0, 1):
                row[f"temperature_{t}"] = on_text(trainer.target, trainer.draft, judged, t, 1, random_here)
            trainer.draft.save_pretrained(out)
            trainer.draft.train()
            log["evaluations"].append(row)
            print(json.dumps(row | {"loss": loss.total.item()}), flush=True)
    return log | {"steps": step, "seconds": time.monotonic() - begin}


def measure(target: KimiK3ForCausalLM, draft: K3DSparkModel, heldout: np.ndarray, recipe: Recipe) -> dict:
    """Acceptance on held-out code, greedy and at temperature 1: behind prefixes of it, and continuing files."""
    device = target.device
    judged = torch.from_numpy(cut(heldout, recipe.judged_length)[:, 1:].astype(np.int64)).to(device)
    starts = np.append(np.flatnonzero(heldout == target.config.bos_token_id), len(heldout))
    opened = [heldout[a : a + recipe.prompt] for a, b in pairwise(starts) if b - a >= 2 * recipe.prompt]
    prompts = torch.from_numpy(np.stack(opened[: recipe.prompts]).astype(np.int64)).to(device)
    found = {}
    for temperature in (0, 1):
        random = torch.Generator(device).manual_seed(recipe.seed)
        found[f"temperature_{temperature}"] = {
            "on_text": on_text(target, draft, judged, temperature, recipe.judged_rounds, random),
            "free_running": free_running(target, draft, prompts, recipe.continued, temperature, random)[0],
        }
    return found


def run(
    recipe: Recipe, target: KimiK3ForCausalLM, tokens: np.ndarray, heldout: np.ndarray, end: float, out: Path
) -> dict:
    """All that happens on the target's device: states, training until ``end`` on the clock, measurement; -> the log."""
    begin, device, config = time.monotonic(), target.device, mini_draft_config()
    random, numpy_random = torch.Generator(device).manual_seed(recipe.seed), np.random.default_rng(recipe.seed)

    starts = numpy_random.integers(0, len(tokens) - recipe.prompt, recipe.texts)
    prompts = torch.from_numpy(tokens[starts[:, None] + np.arange(recipe.prompt)].astype(np.int64)).to(device)
    temperatures = torch.linspace(*recipe.temperatures, recipe.texts, device=device)
    written = write_texts(target, prompts, recipe.written, temperatures, random)
    log = {"writing_seconds": time.monotonic() - begin}
    print(json.dumps(log), flush=True)
    windows = torch.from_numpy(cut(tokens, recipe.length)[:, :-1].astype(np.int64)).to(device)
    corpus = learn_states(target, windows, config.target_layer_ids, batch=8)
    texts = learn_states(target, written, config.target_layer_ids, batch=128)
    log |= {"states_seconds": time.monotonic() - begin}
    print(json.dumps(log), flush=True)

    judged = torch.from_numpy(cut(heldout, recipe.judged_length)[:, 1:].astype(np.int64)).to(device)
    trainer = Trainer(target, config, recipe)
    log |= train(trainer, corpus, texts, every(judged, 256), end, out)
    draft = load_draft(out, dtype=torch.bfloat16).to(device).eval()
    log["parameters"] = sum(p.numel() for p in draft.parameters())
    begin = time.monotonic()
    log["heldout"] = measure(target, draft, heldout, recipe)
    return log | {"measuring_seconds": time.monotonic() - begin}


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=Path, required=True, help="folder with train.npy and heldout.npy, from corpus.py"
    )
    parser.add_argument(
        "--target", type=Path, default=mini_path(), help="folder of the trained target (default: the one that ships)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and training.json")
    parser.add_argument(
        "--seconds", type=float, required=True, help="wall-clock time for everything; the last 25 measure"
    )
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    moe.KimiK3Experts.forward = grouped_experts
    if device.type == "cuda":
        limit_autotuning(3)
    target = KimiK3ForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16, attn_implementation="sdpa")
    target = target.to(device).eval().requires_grad_(False)
    tokens, heldout = np.load(args.tokens / "train.npy"), np.load(args.tokens / "heldout.npy")
    # Not cuDNN, which plans anew for every length.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        log = run(Recipe(), target, tokens, heldout, started + args.seconds - 25, args.out)
    log |= {
        "recipe": asdict(Recipe()),
        "memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "total_seconds": time.monotonic() - started,
    }
    (args.out / "training.json").write_text(json.dumps(log))
    heads = {f"{t} {kind}": found["length"] for t, kinds in log["heldout"].items() for kind, found in kinds.items()}
    print(json.dumps({k: v for k, v in log.items() if not isinstance(v, (list, dict))} | heads))


if __name__ == "__main__":
    main()
