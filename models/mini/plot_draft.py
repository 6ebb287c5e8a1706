# SPDX-License-Identifier: Apache-2.0
"""Draw the training of the draft (needs matplotlib).

python -m dcp_compile.models.mini.plot_draft RESULT.json PICTURE.png
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def draw(log: dict, picture: Path) -> None:
    """`log`: what train_draft.py writes."""
    figure, (loss, length) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for source, label, colour in (
        ("corpus", "corpus", "tab:blue"),
        ("texts", "texts written by the target", "tab:orange"),
    ):
        loss.plot([row[0] for row in log[source]], [row[2] for row in log[source]], lw=1, color=colour, label=label)
    loss.set(xlabel="step", ylabel="loss", title="training")
    evaluations = log["evaluations"]
    for key, label, colour in (("temperature_0", "greedy", "tab:green"), ("temperature_1", "temperature 1", "tab:red")):
        length.plot(
            [e["step"] for e in evaluations],
            [e[key]["length"] for e in evaluations],
            marker=".",
            color=colour,
            label=label,
        )
    length.set(
        xlabel="step", ylabel="tokens per verify step", title="acceptance on held-out files, 7 drafts", ylim=(1, None)
    )
    for axes in (loss, length):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
