"""IMDB's film reviews as words: from the folder that their site has, or from a file."""

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PAD, UNKNOWN, FIRST_WORD = 0, 2, 3
WORD = re.compile(r"[a-z0-9']+")


class Reviews(NamedTuple):
    """Words ``(reviews, length)``, padded in front, and whether a review is positive, 0.0 or 1.0."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def load_reviews(path: Path, vocabulary: int, length: int, limit: int | None = None) -> Reviews:
    """Return the reviews, in a random order that is always the same.

    Args:
        path: The folder ``aclImdb`` of https://ai.stanford.edu/~amaas/data/sentiment/, or an ``.npz``
            file with, for "train" and "test": ``tokens_train``, all reviews one after another (0 for
            padding, 2 for an unknown word, words from 3 on, the most frequent first), ``offsets_train``,
            where they begin and the end, and ``y_train``.
        vocabulary: How many numbers of words are kept, those of padding and unknown words included.
        length: How many of a review's last words are kept.
        limit: Use only so many reviews of each part, to try things out.
    """
    arrays = read_folder(path) if path.is_dir() else dict(np.load(path))
    noise, parts = np.random.default_rng(0), []
    for part in ("train", "test"):
        offsets, labels = arrays[f"offsets_{part}"], arrays[f"y_{part}"]
        order = noise.permutation(len(labels))[:limit]
        tokens = np.full((len(order), length), PAD, dtype=np.int64)
        for row, number in zip(tokens, order, strict=True):
            words = arrays[f"tokens_{part}"][offsets[number] : offsets[number + 1]][-length:]
            row[length - len(words) :] = np.where(words < vocabulary, words, UNKNOWN)
        parts += [torch.from_numpy(tokens), torch.from_numpy(labels[order]).float()]
    return Reviews(*parts)


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file for the texts of a folder; words are counted in the training part."""
    texts = {
        part: [
            (WORD.findall(file.read_text(encoding="utf-8").lower().replace("<br />", " ")), label)
            for label, name in enumerate(("neg", "pos"))
            for file in sorted((folder / part / name).glob("*.txt"))
        ]
        for part in ("train", "test")
    }
    counts = Counter(chain.from_iterable(words for words, _ in texts["train"]))
    number = {word: FIRST_WORD + rank for rank, (word, _) in enumerate(counts.most_common())}
    arrays = {}
    for part, reviews in texts.items():
        words = [number.get(word, UNKNOWN) for own, _ in reviews for word in own]
        arrays[f"tokens_{part}"] = np.array(words, dtype=np.int32)
        arrays[f"offsets_{part}"] = np.cumsum([0, *(len(own) for own, _ in reviews)])
        arrays[f"y_{part}"] = np.array([label for _, label in reviews])
    return arrays
