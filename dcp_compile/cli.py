# SPDX-License-Identifier: Apache-2.0
"""The command line: ``generate``, ``explain`` and ``bench``.

Every command loads a model folder, optimises it over the ranks that were started (one without torchrun or accelerate
launch) and prints on the first rank only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer
from transformers.generation import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from . import DCPConfig, errors, explain, optimize, unoptimize
from .config import DECODE_LAYOUTS, LOWERINGS
from .models import KimiK3Config  # importing models registers Kimi-K3 with the Auto classes
from .models.k3_dspark import load_draft
from .models.mini import mini_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for an error that one line on stderr explains."""
    options = _parser().parse_args(arguments)
    try:
        _check_environment()
        if not (_is_first_rank() and sys.stderr.isatty()):
            disable_progress_bar()
        options.command(options)
    except errors.DCPCompileError as error:
        where = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        lines = " ".join(line.strip() for line in str(error).splitlines())
        print(f"{where}error: {lines}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcp_compile", description="Decode MLA models over several ranks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt")
    _add_model_options(generate)
    generate.add_argument("--prompt", required=True, help="text to continue; - reads it from standard input")
    generate.add_argument("--max-new-tokens", type=_at_least(1), default=64)
    generate.add_argument("--stream", action="store_true", help="print tokens as they come")
    generate.add_argument("--sample", action="store_true", help="draw tokens instead of taking the most likely one")
    generate.add_argument("--temperature", type=_number(1e-6, 1e6), default=1.0)
    generate.add_argument("--top-k", type=_at_least(0), default=0, help="0: no limit")
    generate.add_argument("--top-p", type=_number(1e-6, 1.0), default=1.0)
    generate.add_argument("--seed", type=_at_least(0, 2**64 - 1), default=0, help="of the draws")
    generate.add_argument("--prompt-lookup", type=_at_least(1), metavar="N", help="draft N tokens by n-gram lookup")
    _add_draft_option(generate)
    generate.set_defaults(command=_generate)

    report = commands.add_parser("explain", help="say what optimize() did to a model")
    _add_model_options(report)
    report.set_defaults(command=_explain)

    bench = commands.add_parser("bench", help="decode speed, optimised and with plain transformers")
    _add_model_options(bench)
    bench.add_argument("--batch", type=_at_least(1), default=1)
    bench.add_argument("--prompt-tokens", type=_at_least(1), default=128, help="random tokens per prompt")
    bench.add_argument("--new-tokens", type=_at_least(2), default=64)
    bench.add_argument("--runs", type=_at_least(1), default=3, help="timed runs after one that is not timed")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    _add_draft_option(bench)
    bench.set_defaults(command=_bench)
    return parser


def _at_least(low: int, high: float = math.inf) -> Callable[[str], int]:
    """An argument type: an integer of at least ``low``, and at most ``high``."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}" if value < low else f"{value} is more than {high}")
        return value

    return integer


def _number(low: float, high: float) -> Callable[[str], float]:
    """An argument type: a number from ``low`` to ``high``."""

    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not from {low} to {high}")
        return value

    return number


def _add_draft_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", metavar="FOLDER", help="DSpark draft whose tokens are verified")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=str(mini_path()), help="model folder (default: the mini Kimi-K3)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"))
    parser.add_argument("--dcp-size", type=_at_least(1), help="ranks that share the KV cache (default: all that hold one model)")
    parser.add_argument("--tp-size", type=_at_least(1), default=1, help="ranks that hold one model together (default: %(default)s)")
    defaults = DCPConfig()
    parser.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens per page and rank")
    parser.add_argument("--interleave", type=int, default=defaults.kv_interleave, help="consecutive tokens per rank")
    parser.add_argument("--max-seq-len", type=int, default=defaults.max_seq_len)
    parser.add_argument("--layout", default=defaults.decode_layout, choices=DECODE_LAYOUTS)
    parser.add_argument("--backend", default=defaults.backend, help="attention backend")
    parser.add_argument("--lowering", default=defaults.lowering, choices=LOWERINGS)


# --- commands --------------------------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> None:
    if options.prompt == "-" and _environment("WORLD_SIZE", 1) > 1:
        raise errors.ConfigError("several ranks share one standard input; pass the text itself as --prompt")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    tokenizer = _load(AutoTokenizer.from_pretrained, options.model)
    settings = {"do_sample": False}
    if options.sample:
        torch.manual_seed(options.seed)
        settings = {"do_sample": True, **{name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}}
    if options.prompt_lookup is not None:
        settings["prompt_lookup_num_tokens"] = options.prompt_lookup
    config, model, draft = _config(options), _load_model(options), _load_draft(options)
    if draft is not None:
        settings["assistant_model"] = draft
    with _optimised(config, model, draft):
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        streamer = TextStreamer(tokenizer, skip_special_tokens=True) if options.stream else None
        out = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=options.max_new_tokens,
            streamer=streamer,
            **settings,
        )
    if _is_first_rank() and not options.stream:
        print(tokenizer.decode(out[0], skip_special_tokens=True))


def _explain(options: argparse.Namespace) -> None:
    config, model = _config(options), _load_model(options)
    with _optimised(config, model):
        if _is_first_rank():
            print(explain(model))


def _bench(options: argparse.Namespace) -> None:
    config, model, draft = _config(options), _load_model(options), _load_draft(options)
    torch.backends.cuda.enable_cudnn_sdp(False)  # plain decoding is slower with it
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    prompts = torch.randint(vocab, (options.batch, options.prompt_tokens), generator=generator).to(model.device)
    plain = _measure(model, prompts, options)
    with _optimised(config, model, draft):
        optimised = _measure(model, prompts, options, draft)
    if not _is_first_rank():
        return
    result = {
        "model": type(model).__name__,
        "draft": None if draft is None else type(draft).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "dcp_size": config.dcp_size,
        "batch": options.batch,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "runs": options.runs,
        "plain": plain.summary(),
        "optimised": optimised.summary(),
        "speedup": plain.step / optimised.step,
        "tokens_equal": torch.equal(plain.tokens, optimised.tokens),
    }
    print(json.dumps(result) if options.json else _table(result))


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Attributes:
    tokens: what was generated, int64 ``[batch, prompt + new]`` on the CPU.
    first: median seconds until the first new token.
    step: median seconds per token of a sequence, after the first.
    """

    tokens: Tensor
    first: float
    step: float

    def summary(self) -> dict[str, float]:
        batch = len(self.tokens)
        return {"tokens_per_second": batch / self.step, "seconds_per_token": self.step, "seconds_to_first_token": self.first}


class _Clock(BaseStreamer):
    """Notes when each column of tokens reaches the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _measure(
    model: PreTrainedModel, prompts: Tensor, options: argparse.Namespace, draft: PreTrainedModel | None = None
) -> Timing | None:
    """Time greedy decoding of exactly ``new_tokens`` tokens per prompt. None on a rank that is not told of tokens."""
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    settings = {"suppress_tokens": ends} if ends else {}
    if draft is not None:
        settings["assistant_model"] = draft
    is_told, first, steps = True, [], []
    for run in range(options.runs + 1):
        clock = _Clock()
        started = time.perf_counter()
        out = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            streamer=clock,
            **settings,
        )
        arrivals = clock.times[1:]  # the prompt is streamed first
        is_told = bool(arrivals)
        if run and is_told:
            first.append(arrivals[0] - started)
            steps.append((arrivals[-1] - arrivals[0]) / (options.new_tokens - 1))
    return Timing(out.cpu(), statistics.median(first), statistics.median(steps)) if is_told else None


def _table(result: dict) -> str:
    lines = [
        "{model}, {dtype} on {device}, batch {batch}, prompt {prompt_tokens}, {new_tokens} new tokens, median of {runs} runs".format(
            **result
        ),
    ]
    for label, key in (("plain transformers", "plain"), (f"dcp_compile, dcp {result['dcp_size']}", "optimised")):
        row = result[key]
        lines.append(
            f"{label:<20} {row['tokens_per_second']:>9.1f} tokens/s {row['seconds_to_first_token']:>9.3f} s to the first token"
        )
    equal = "equal" if result["tokens_equal"] else "NOT equal"
    return "\n".join([*lines, f"{result['speedup']:.2f} times as fast; greedy tokens {equal}"])


# --- models and ranks ------------------------------------------------------------------------------------------------


def _environment(name: str, default: int = 0) -> int:
    """A number that torchrun or accelerate launch put into the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise errors.ConfigError(f"{name}={text!r} in the environment is not a number; start ranks with torchrun")
    return int(text)


def _check_environment() -> None:
    """Raises ConfigError where ranks were not started as torchrun does it."""
    if _environment("WORLD_SIZE", 1) > 1:
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise errors.ConfigError(f"WORLD_SIZE is set, but not {', '.join(missing)}; start ranks with torchrun")


def _is_first_rank() -> bool:
    return _environment("RANK") == 0


def _load(load: Callable[..., Any], path: str, **settings: object) -> Any:
    """What ``load`` makes of a model folder."""
    if not os.path.isdir(path):
        raise errors.CheckpointError(f"{path} is not a folder; download the model and pass the folder it is in")
    try:
        return load(path, **settings)
    except errors.DCPCompileError:
        raise
    except (OSError, ValueError, SafetensorError) as error:  # files that are not there, not a model's, or cut short
        raise errors.CheckpointError(f"{path} cannot be loaded: {(str(error).splitlines() or [repr(error)])[0]}") from error


def _device(options: argparse.Namespace) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise errors.ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda", _environment("LOCAL_RANK")) if options.device == "cuda" else torch.device("cpu")


def _load_model(options: argparse.Namespace) -> PreTrainedModel:
    device = _device(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return _load(AutoModelForCausalLM.from_pretrained, options.model, dtype=options.dtype, **_parts(options)).to(device)


def _parts(options: argparse.Namespace) -> dict[str, int]:
    """Models with a plan are loaded in parts; others are loaded whole and narrowed by optimize()."""
    if options.tp_size == 1 or not isinstance(_load(AutoConfig.from_pretrained, options.model), KimiK3Config):
        return {}
    return {"tp_size": options.tp_size}


def _load_draft(options: argparse.Namespace) -> PreTrainedModel | None:
    if options.draft is None:
        return None
    draft = _load(load_draft, options.draft, dtype=options.dtype)
    return draft.to(_device(options)).eval()


def _config(options: argparse.Namespace) -> DCPConfig:
    return DCPConfig(
        max_batch_size=getattr(options, "batch", 1),
        dcp_size=options.dcp_size or (options.tp_size if options.tp_size > 1 else _environment("WORLD_SIZE", 1)),
        tp_size=options.tp_size,
        block_size=options.block_size,
        kv_interleave=options.interleave,
        max_seq_len=options.max_seq_len,
        decode_layout=options.layout,
        backend=options.backend,
        lowering=options.lowering,
    )


@contextmanager
def _optimised(config: DCPConfig, model: PreTrainedModel, draft: PreTrainedModel | None = None) -> Iterator[None]:
    """Optimise ``model`` for the time of the context; a process group that exists afterwards is closed."""
    try:
        optimize(model, config=config, draft=draft)
        yield
        unoptimize(model)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
