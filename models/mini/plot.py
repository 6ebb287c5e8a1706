# SPDX-License-Identifier: Apache-2.0
"""Draw the losses of a training run (needs matplotlib).

python -m dcp_compile.models.mini.plot RESULT.json PICTURE.png
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def draw(log: dict, picture: Path) -> None:
    """`log`: what train.py writes, with losses in nats per token."""
    tokens_per_step = log["recipe"]["windows"] * log["recipe"]["length"] / 1e6
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    evaluations = log["evaluations"]
    axes.plot(
        *zip(*((step * tokens_per_step, loss) for step, _, loss in log["train"])),
        lw=0.8,
        color="0.7",
        label="training, with dropout",
    )
    for key, label, colour in (("seen", "training files", "tab:blue"), ("heldout", "held-out files", "tab:red")):
        axes.plot(
            [e["step"] * tokens_per_step for e in evaluations],
            [e[key] for e in evaluations],
            marker=".",
            color=colour,
            label=label,
        )
    rounded = next(e["step"] for e in evaluations if e["rounded"]) * tokens_per_step
    axes.axvline(rounded, color="0.5", ls=":", label="experts rounded to MXFP4, learning rate falls")
    axes.axvline(log["saved_step"] * tokens_per_step, color="0.3", ls="--", label="shipped weights")
    axes.set(
        xlabel="tokens seen, millions",
        ylabel="nats per token",
        ylim=(0.4, 4),
        title="mini Kimi-K3 on the Python standard library",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
