# SPDX-License-Identifier: Apache-2.0
"""Train the mini Kimi-K3 within a given time and write it as it ships: MXFP4 experts, everything else bf16 or fp32.

    python -m dcp_compile.models.mini.train --tokens DIR --out DIR --seconds 480

The learning rate follows the clock, not a number of steps: it is constant for half of the time and falls to zero in the
other half, in which the experts are also trained as what they will be rounded to. Towards the end the weights with the
lowest held-out loss are kept.
A GPU with fla-core is assumed for more than a trial.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dcp_compile.models.kimi_k3 import KimiK3Config, KimiK3ForCausalLM, delta_attention, layers, modeling, moe, mxfp4
from dcp_compile.models.mini.optimizer import Adam, Muon


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result besides data, time and hardware."""

    length: int = 4096  # tokens per window
    windows: int = 32  # windows per step
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    muon_decay: float = 0.1
    adam_decay: float = 0.1  # of matrices; vectors are not decayed
    dropout: float = 0.15  # of sublayer outputs
    bias_rate: float = 1e-3  # of the router's selection bias
    warmup_steps: int = 100
    decay_from: float = 0.5  # share of the time after which the learning rate falls
    round_from: float = 0.5  # share of the time after which the experts are rounded
    save_from: float = 0.75  # share of the time after which the weights with the lowest held-out loss are kept
    seed: int = 0


def mini_config() -> KimiK3Config:
    """Every part of Kimi-K3, head widths included, in 17.6 M parameters: KDA KDA KDA MLA KDA KDA KDA MLA MLA."""
    return KimiK3Config(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=9,
        intermediate_size=448,
        attn_res_block_size=4,
        num_attention_heads=2,
        q_lora_rank=128,
        linear_attn_config={"num_heads": 2},
        num_experts=48,
        num_experts_per_token=6,
        moe_intermediate_size=64,
        routed_expert_hidden_size=128,
        max_position_embeddings=32768,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


EVALUATED = 32  # windows per evaluation
EVALUATE_EVERY = 0.04  # of the time


# --- data ------------------------------------------------------------------------------------------------------------


def training_windows(tokens: np.ndarray, recipe: Recipe) -> Iterator[Tensor]:
    """Batches [windows, length + 1] without end: every epoch shuffles the documents, packs them and cuts them up."""
    random = np.random.default_rng(recipe.seed)
    starts = np.append(np.flatnonzero(tokens == 0), len(tokens))
    documents = [tokens[a:b] for a, b in pairwise(starts)]
    while True:
        packed = np.concatenate([documents[i] for i in random.permutation(len(documents))])
        rows = cut(packed[random.integers(recipe.length) :], recipe.length)
        rows = rows[random.permutation(len(rows))]
        for i in range(0, len(rows) - recipe.windows + 1, recipe.windows):
            yield torch.from_numpy(rows[i : i + recipe.windows].astype(np.int64))


def cut(tokens: np.ndarray, length: int) -> np.ndarray:
    """Windows [n, length + 1] that overlap in one token: each but the first is predicted once, a rest is dropped."""
    count = (len(tokens) - 1) // length
    return np.lib.stride_tricks.as_strided(tokens, (count, length + 1), (length * tokens.strides[0], tokens.strides[0]))


# --- faster, the same function ---------------------------------------------------------------------------------------


class Permute(torch.autograd.Function):
    """Rows in another order. The gradient is a gather as well, where indexing would scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.saved_tensors[0]], None, None


def grouped_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward pass on rows sorted by expert, routing weights before the (linear) down projection."""
    tokens, top_k = top_k_index.shape
    order = top_k_index.flatten().to(torch.int16).argsort()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * top_k, device=order.device))
    ends = expert_counts(top_k_index, experts.num_experts).cumsum(0, dtype=torch.int32)
    rows = hidden_states[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, -1)
    gate_up = F.grouped_mm(Permute.apply(rows, order, inverse), experts.gate_up_proj.mT, offs=ends)
    weights = Permute.apply(top_k_weights.reshape(-1, 1), order, inverse)
    inner = (experts._apply_gate(gate_up) * weights).to(hidden_states.dtype)
    out = F.grouped_mm(inner, experts.down_proj.mT, offs=ends)
    return Permute.apply(out, inverse, order).view(tokens, top_k, -1).sum(1)


def expert_counts(top_k_index: Tensor, experts: int) -> Tensor:
    """Rows per expert, int32 [experts]."""
    hits = top_k_index.flatten()[:, None] == torch.arange(experts, device=top_k_index.device)
    return hits.sum(0, dtype=torch.int32)


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, of `hidden` [batch, seq, hidden] against `targets` [batch, seq]."""
    return F.cross_entropy(F.linear(hidden, head).flatten(0, 1).float(), targets.flatten())


def limit_autotuning(configs: int) -> None:
    """Let Triton's autotuner try only that many settings, evenly spread: each of fla-core's many is a compilation."""
    from triton.runtime.autotuner import Autotuner

    initialise = Autotuner.__init__

    def limited(self, fn, arg_names, candidates, *args, **kwargs) -> None:
        initialise(self, fn, arg_names, candidates[:: math.ceil(len(candidates) / configs)], *args, **kwargs)

    Autotuner.__init__ = limited


def speed_up(device: torch.device) -> None:
    """Replace the model's experts by `grouped_experts` and, on a GPU, compile the parts that are many small kernels.

    What is left uncompiled are matrix products and kernels; compiling whole layers would compile the same parts once
    per kind of layer.
    """
    global next_token_loss
    moe.KimiK3Experts.forward = grouped_experts
    if device.type != "cuda":
        return
    limit_autotuning(3)
    compiled = partial(torch.compile, dynamic=False)
    moe.KimiK3Experts.forward = compiled(grouped_experts)
    moe.KimiK3Router.forward = compiled(moe.KimiK3Router.forward)
    layers.KimiK3RMSNorm.forward = compiled(layers.KimiK3RMSNorm.forward)
    layers.KimiK3GatedRMSNorm.forward = compiled(layers.KimiK3GatedRMSNorm.forward)
    layers.SituGate.__call__ = compiled(layers.SituGate.__call__)
    delta_attention.ShortConvolution.forward = compiled(delta_attention.ShortConvolution.forward)
    delta_attention.KimiK3DeltaAttention.log_decay = compiled(delta_attention.KimiK3DeltaAttention.log_decay)
    mixture = compiled(modeling.mix)
    # The first mixture has nothing to compile, and a function found empty once would stay uncompiled for good.
    modeling.mix = lambda residual, *query: residual.prefix if residual.snapshots is None else mixture(residual, *query)
    next_token_loss = compiled(next_token_loss)


# --- training --------------------------------------------------------------------------------------------------------


UNUSED = "model.layers.0.self_attention_res_"  # the first mixture has one source


def round_to_mxfp4(weight: Tensor) -> Tensor:
    """Nearest weights that MXFP4 can hold, in the dtype of `weight`."""
    return mxfp4.decode(*mxfp4.encode(weight), weight.dtype)


def save(model: KimiK3ForCausalLM, out: Path) -> None:
    """Write the weights as they ship, in files that stay below 16 MiB."""
    model.save_pretrained(out, expert_format="mxfp4", max_shard_size="12MB")


def add_dropout(model: nn.Module, rate: float) -> None:
    """Drop entries of every sublayer's output while training."""

    def drop(module: nn.Module, inputs, output):
        if isinstance(output, tuple):
            return F.dropout(output[0], rate, module.training), *output[1:]
        return F.dropout(output, rate, module.training)

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).register_forward_hook(drop)


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, moe.KimiK3Router)]


def count_loads(model: nn.Module) -> None:
    """Let every router keep the number of rows per expert of its last training pass as `load`, int32 [experts]."""

    def count(router: nn.Module, inputs, output) -> None:
        if router.training:
            router.load = expert_counts(output[0], len(router.e_score_correction_bias))

    for router in routers(model):
        router.register_forward_hook(count)


@torch.no_grad()
def balance(model: nn.Module, rate: float) -> None:
    """Raise the selection bias of experts with too few rows by `rate`, lower that of the others (no auxiliary loss)."""
    for router in routers(model):
        load = router.load.float()
        router.e_score_correction_bias += rate * torch.sign(load.mean() - load)


def is_matrix(name: str, param: Tensor) -> bool:
    """Whether Muon takes the parameter: projections and experts, not embeddings, the router or anything thin."""
    return "layers." in name and param.ndim >= 2 and min(param.shape[-2:]) >= 32 and not name.endswith("gate.weight")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # its other shapes are not worth a compilation
def mean_loss(model: KimiK3ForCausalLM, windows: Tensor) -> float:
    """Nats per token over `windows` [n, length + 1], without dropout."""
    model.eval()
    losses = []
    for batch in windows.split(8):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1).float()
        losses.append(F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item())
    model.train()
    return math.fsum(losses) / windows[:, 1:].numel()


class Trainer:
    """The model, its optimizers and the clock."""

    def __init__(self, config: KimiK3Config, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        config._attn_implementation = "sdpa"
        self.model = KimiK3ForCausalLM._from_config(config, dtype=torch.bfloat16).to(device).train()
        add_dropout(self.model, recipe.dropout)
        count_loads(self.model)
        named = [(n, p) for n, p in self.model.named_parameters() if not n.startswith(UNUSED)]
        matrices = [p for n, p in named if is_matrix(n, p)]
        others = [p for n, p in named if not is_matrix(n, p)]
        self.muon = Muon(matrices, recipe.muon_decay)
        self.adams = [
            Adam([p for p in others if p.ndim > 1], recipe.adam_decay),
            Adam([p for p in others if p.ndim == 1], 0.0),
        ]
        self.experts = {p: round_to_mxfp4 for n, p in named if ".experts." in n}

    def step(self, batch: Tensor, scale: float, rounded: bool) -> Tensor:
        """One update with learning rates times `scale`; returns the loss, still on the device."""
        for param in self.model.parameters():
            param.grad = None
        hidden = self.model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        loss = next_token_loss(hidden, self.model.lm_head.weight, batch[:, 1:])
        loss.backward()
        self.muon.step(self.recipe.muon_lr * scale)
        self.muon.write_back(self.experts if rounded else {})
        for adam in self.adams:
            adam.step(self.recipe.adam_lr * scale)
            adam.write_back()
        balance(self.model, self.recipe.bias_rate * scale)
        return loss.detach()


def rate(recipe: Recipe, step: int, progress: float) -> float:
    """Share of the learning rate at a step and a share of the time: linear warm-up, constant, linear to zero."""
    return min(1.0, (step + 1) / recipe.warmup_steps, (1 - progress) / (1 - recipe.decay_from))


def every(rows: Tensor, count: int) -> Tensor:
    """About `count` of the rows, evenly spread."""
    return rows[:: math.ceil(len(rows) / count)]


def train(trainer: Trainer, tokens: np.ndarray, heldout: Tensor, end: float, out: Path) -> dict:
    """Train until the clock (`time.monotonic()`) reads `end`, saving the best weights under `out`; returns the log."""
    recipe, device = trainer.recipe, trainer.device
    batches = training_windows(tokens, recipe)
    seen = every(torch.from_numpy(cut(tokens, recipe.length).astype(np.int64)), EVALUATED).to(device)
    heldout = every(heldout, EVALUATED)
    log = {"train": [], "evaluations": []}
    begin = time.monotonic()
    trainer.step(next(batches).to(device), rate(recipe, 0, 0.0), rounded=False).item()  # compiles everything
    log["first_step_seconds"] = time.monotonic() - begin
    begin, step, progress, next_evaluation, best, last = time.monotonic(), 1, 0.0, EVALUATE_EVERY, math.inf, None
    while progress < 1:
        progress = min(1.0, (time.monotonic() - begin) / (end - begin))
        rounded = progress >= recipe.round_from
        loss = trainer.step(next(batches).to(device), rate(recipe, step, progress), rounded)
        step += 1
        if last is not None:
            value = last.item()  # of the step before: the host is never more than one step ahead of the device
            if step % 10 == 0:
                log["train"].append([step - 1, time.monotonic() - begin, value])
        last = loss
        if progress >= next_evaluation or progress == 1:
            next_evaluation += EVALUATE_EVERY
            row = {"step": step, "seconds": time.monotonic() - begin, "rounded": rounded}
            row |= {"heldout": mean_loss(trainer.model, heldout), "seen": mean_loss(trainer.model, seen)}
            row["worst_load"] = max(float(r.load.max() / r.load.float().mean()) for r in routers(trainer.model))
            log["evaluations"].append(row)
            print(json.dumps(row | {"train": loss.item()}), flush=True)
            if progress >= recipe.save_from and row["heldout"] < best:
                best = row["heldout"]
                log["saved_step"] = step
                save(trainer.model, out)
                (out / "training.json").write_text(json.dumps(log))
    log |= {"steps": step, "seconds": time.monotonic() - begin, "tokens": step * recipe.windows * recipe.length}
    log["epochs"] = log["tokens"] / len(tokens)
    return log


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=Path, required=True, help="folder with train.npy and heldout.npy, from corpus.py"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and training.json")
    parser.add_argument("--seconds", type=float, required=True, help="wall-clock time for everything")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe, config = Recipe(), mini_config()
    speed_up(device)
    tokens = np.load(args.tokens / "train.npy")
    heldout = torch.from_numpy(cut(np.load(args.tokens / "heldout.npy"), recipe.length).astype(np.int64)).to(device)
    trainer = Trainer(config, recipe, device)
    log = train(trainer, tokens, heldout, started + args.seconds - 10, args.out)

    shipped = KimiK3ForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(device)
    log["heldout"] = {"loss": mean_loss(shipped, heldout), "tokens": heldout[:, 1:].numel()}
    log |= {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "total_seconds": time.monotonic() - started,
    }
    (args.out / "training.json").write_text(json.dumps(log))
    print(json.dumps({k: v for k, v in log.items() if k not in ("train", "evaluations")}))


if __name__ == "__main__":
    main()
