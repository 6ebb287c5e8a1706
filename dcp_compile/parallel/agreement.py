# SPDX-License-Identifier: Apache-2.0
"""Making sure that all ranks of a group are about to do the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import RankError
from .failures import answering_ranks

REMEDY = "all ranks must load the same checkpoint and pass the same settings and inputs"


def check_agreement(group: dist.ProcessGroup | None, facts: Mapping[str, object], remedy: str = REMEDY) -> None:
    """Compare ``facts`` over the ranks of ``group``; None is a group of one rank.

    Raises:
        RankError: on every rank, naming the ranks and the first field that differs; a rank compares other fields, since it
            is elsewhere in the program; or it does not answer.
    """
    if group is None:
        return
    ranks = dist.get_process_group_ranks(group)
    gathered: list[Mapping[str, object]] = [{} for _ in ranks]
    with answering_ranks(f"comparing {_some(facts)}"):
        dist.all_gather_object(gathered, dict(facts), group=group)
    for name, wanted in gathered[0].items():
        odd = [rank for rank, found in zip(ranks, gathered) if found.get(name, wanted) != wanted]
        if odd:
            found = gathered[ranks.index(odd[0])][name]
            raise RankError(
                f"rank {', '.join(map(str, odd))} disagrees with rank {ranks[0]} on {name}: {found!r} instead of {wanted!r}; "
                f"{remedy}"
            )
    odd = [rank for rank, found in zip(ranks, gathered) if found.keys() != gathered[0].keys()]
    if odd:
        found = gathered[ranks.index(odd[0])]
        raise RankError(
            f"rank {', '.join(map(str, odd))} compares {_some(found)} while rank {ranks[0]} compares {_some(gathered[0])}; "
            "all ranks must make the same calls in the same order"
        )


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def check_graphs(group: dist.ProcessGroup | None, fingerprints: Mapping[str, str]) -> None:
    """As :func:`check_agreement`, for the graphs of models whose weights, configurations and settings agree."""
    remedy = (
        "weights, configurations and settings are the same, so the ranks must run different versions of Python packages "
        f"(here torch {torch.__version__}, transformers {transformers.__version__}), hold weights that lie differently in "
        "memory, such as views of a larger tensor, or have changed the model in another way, such as by hooks"
    )
    check_agreement(group, fingerprints, remedy)


def config_facts(model: PreTrainedModel) -> dict[str, object]:
    """What ranks compare of a model's class and configuration: every entry but those that say where it came from."""
    facts = _entries(model.config.to_dict(), "model config.")
    origin = ("_name_or_path", "auto_map", "transformers_version")
    return {"model class": type(model).__name__} | {
        name: value for name, value in facts.items() if not set(name.split(".")) & set(origin)
    }


def _entries(config: Mapping[str, object], prefix: str) -> dict[str, object]:
    """By path; configurations within a configuration are opened."""
    found: dict[str, object] = {}
    for name, value in config.items():
        found |= _entries(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_fingerprint(model: nn.Module, left_out: Callable[[str], bool] = lambda path: False) -> str:
    """A digest of all parameters and buffers: names, shapes, the bit patterns of all values added up, and 64 of them each.

    Every value is read once; a change of any one shows in the sum, two that change places in the samples.

    Args:
        left_out: tells by path what not to look at.
    """
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if left_out(name):
            continue
        bits = tensor.detach().flatten().view(_INTEGERS[tensor.element_size()])
        samples = bits[:: max(1, bits.numel() // 64)].cpu().numpy().tobytes()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}".encode() + samples)
    return digest.hexdigest()[:16]


def prompts_fingerprint(prompts: Sequence[Tensor]) -> dict[str, object]:
    """What ranks compare of their prompts, one int64 ``[length]`` per request: the lengths and a digest of the ids."""
    digest = hashlib.sha256(b"".join(prompt.cpu().numpy().tobytes() for prompt in prompts))
    return {"prompt lengths": [len(prompt) for prompt in prompts], "prompt ids": digest.hexdigest()[:16]}
