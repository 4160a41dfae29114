"""Sentences of published documentation, cut into the model's word pieces.

Documents of calibration, selection and evaluation are not the same. What a device sends are token numbers; how text
becomes them is here, for ASCII text, as BERT's uncased tokenizer does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from edgeinfer_tools.samples import Array, Stream

CALIBRATION = ["diabetes.rst", "california_housing.rst", "covtype.rst", "kddcup99.rst", "breast_cancer.rst"]
SELECTION = ["digits.rst", "rcv1.rst", "species_distributions.rst", "linnerud.rst"]
EVALUATION = ["lfw.rst", "iris.rst", "wine_data.rst", "twenty_newsgroups.rst", "olivetti_faces.rst"]
LONGEST = 128
"""Tokens of a sentence, its two ends included."""
_WORDS = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


def calibration(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, CALIBRATION)


def selection(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, SELECTION)


def evaluation(files: Mapping[str, Path]) -> Iterator[Stream]:
    yield from _streams(files, EVALUATION)


def tokens(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Return the numbers of a text's word pieces, between [CLS] and [SEP]."""
    found = [vocabulary["[CLS]"]]
    for word in _WORDS.findall(text.lower()):
        found += _pieces(word, vocabulary)
    return [*found[: LONGEST - 1], vocabulary["[SEP]"]]


def vocabulary_of(files: Mapping[str, Path]) -> dict[str, int]:
    """Return the number of each word piece."""
    return {piece: number for number, piece in enumerate(files["vocab.txt"].read_text(encoding="utf-8").split("\n"))}


def sentences(path: Path) -> list[str]:
    """Return the sentences of a document: of its paragraphs of prose, what ends in a full stop and says something."""
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
    prose = [" ".join(item.split()) for item in paragraphs if item.isascii() and "::" not in item and "===" not in item]
    found = [sentence for item in prose for sentence in re.findall(r"[A-Z][^.]{30,400}\.(?=\s|$)", item)]
    return [sentence for sentence in found if sum(map(str.isalpha, sentence)) > 0.7 * len(sentence)]


def _streams(files: Mapping[str, Path], documents: list[str]) -> Iterator[Stream]:
    vocabulary = vocabulary_of(files)
    for document in documents:
        for text in dict.fromkeys(sentences(files[document])):
            yield Stream(text, [_request(tokens(text, vocabulary))])


def _request(numbers: list[int]) -> dict[str, Array]:
    row = np.array([numbers], np.int64)
    return {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}


def _pieces(word: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Return the longest pieces that make the word, from its start."""
    found, start = [], 0
    while start < len(word):
        marked = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((end for end in ends if marked + word[start:end] in vocabulary), None)
        if end is None:
            return [vocabulary["[UNK]"]]
        found.append(vocabulary[marked + word[start:end]])
        start = end
    return found
