# SPDX-License-Identifier: Apache-2.0
"""The Python standard library as training data: files, held-out split, tokenizer, token arrays.

    python -m dcp_compile.models.mini.corpus --stdlib LIB --tokenizer DIR --tokens DIR

writes the tokenizer (a transformers fast tokenizer) and `train.npy` / `heldout.npy` (uint16, documents `bos text eos`
end to end).
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
# Ids 0..3; the mask is for block drafts.
BOS, EOS, PAD, MASK = SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>")
HELDOUT_PER_MILLE = 30

# Tables of numbers and names, not code anyone would write.
TABLES = {"pydoc_data/topics.py", "html/entities.py", "stringprep.py", "test/test_ast/snippets.py"}

# A newline is always a token of its own and so is an indentation: a prompt may end after either and still be tokenised
# as in training. Words take their leading space along, digits stand alone.
PIECES = r"\n|(?<=\n)[ ]+| ?[^\W\d]+| ?\d| ?[^\s\w]+|[ ]+|\s"


def documents(stdlib: Path) -> dict[str, str]:
    """Relative path -> text of every usable source file under `stdlib`: UTF-8, no third-party packages, no tables."""
    found = {}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if name.startswith(("site-packages/", "_sysconfigdata")) or name in TABLES:
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue  # a handful of tests of other encodings
        if text.strip() and not (name.startswith("encodings/") and "decoding_" in text):
            found[name] = text
    return found


def is_heldout(name: str) -> bool:
    """Whether a file is held out: decided by its name alone, so the split survives added or removed files."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 1000 < HELDOUT_PER_MILLE


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `VOCAB_SIZE` entries; encoding a text puts bos in front of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Documents end to end, each `bos text eos`: uint16 [tokens]."""
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    return np.concatenate([np.asarray(row, dtype=np.uint16) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="a Lib/ folder of CPython (default: this interpreter's)",
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder the tokenizer is written to")
    parser.add_argument("--tokens", type=Path, required=True, help="folder the token arrays are written to")
    args = parser.parse_args()

    files = documents(args.stdlib)
    train = [text for name, text in files.items() if not is_heldout(name)]
    heldout = [text for name, text in files.items() if is_heldout(name)]
    tokenizer = train_tokenizer(train)
    tokenizer.save_pretrained(args.tokenizer)
    args.tokens.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train", train), ("heldout", heldout)):
        tokens = encode(tokenizer, texts)
        np.save(args.tokens / f"{name}.npy", tokens)
        size = sum(len(text.encode()) for text in texts)
        print(
            f"{name}: {len(texts)} files, {size} bytes, {len(tokens)} tokens, {size / len(tokens):.3f} bytes per token"
        )


if __name__ == "__main__":
    main()
