# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices, Adam for the rest, both on fp32 masters of a bf16 model.

The model holds what will be shipped (bf16 weights, experts already rounded to MXFP4 once that phase begins), the
gradients are taken there, and the masters are what is updated: the straight-through estimator without a special
autograd function.
"""

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

Rounding = Callable[[Tensor], Tensor]


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: [n, rows, columns] -> the same shape in bf16.

    Singular values end up between about 0.7 and 1.2. The quintic Newton-Schulz iteration and its coefficients are
    Keller Jordan's (Muon, 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised: parameters of one shape are updated in one batch.

    `params`: matrices [out, in] or stacks of them [experts, out, in], each matrix orthogonalised by itself. The step
    of a matrix is lr * sqrt(max(1, out / in)); weight decay is decoupled: w <- w * (1 - lr * weight_decay).
    """

    def __init__(self, params: list[Parameter], weight_decay: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[Parameter]] = defaultdict(list)
        for param in params:
            by_shape[param.shape[-2:]].append(param)
        self.groups = list(by_shape.values())
        self.masters = [torch.cat([_as_stack(p.detach()).float() for p in group]) for group in self.groups]
        self.velocities = [torch.zeros_like(master) for master in self.masters]
        self.weight_decay, self.momentum = weight_decay, momentum

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, master, velocity in zip(self.groups, self.masters, self.velocities):
            grad = torch.cat([_as_stack(p.grad) for p in group]).float()
            velocity.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp_(velocity, self.momentum))
            rows, columns = master.shape[1:]
            master.mul_(1 - lr * self.weight_decay).add_(update, alpha=-lr * math.sqrt(max(1.0, rows / columns)))

    @torch.no_grad()
    def write_back(self, roundings: dict[Parameter, Rounding]) -> None:
        """Masters -> model weights, through the rounding of the parameters that have one."""
        for group, master in zip(self.groups, self.masters):
            for param, piece in zip(group, master.split([_as_stack(p).shape[0] for p in group])):
                piece = piece.view(param.shape)
                param.copy_(roundings[param](piece) if param in roundings else piece)


class Adam:
    """Adam with decoupled weight decay on fp32 masters, fused over all parameters."""

    def __init__(self, params: list[Parameter], weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.params = params
        self.masters = [p.detach().float().clone() for p in params]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=0.0, betas=betas, eps=1e-10, weight_decay=weight_decay, fused=params[0].is_cuda
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        for master, param in zip(self.masters, self.params):
            master.grad = param.grad.float()
        self.optimizer.step()

    @torch.no_grad()
    def write_back(self) -> None:
        """Masters -> model weights."""
        for param, master in zip(self.params, self.masters):
            param.copy_(master)


def _as_stack(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
