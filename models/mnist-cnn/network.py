"""A small convolutional network, trained here: the recipe's source is the data, not a checkpoint.

Training is seeded and on one thread, so that the export and its validation, each a process of its own, get the same
weights. It takes about half a minute.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
from torch import nn  # type: ignore[import-not-found,unused-ignore]

SEED = 7
EPOCHS = 14
BATCH = 64
TRAINING = {1, 2, 3, 4, 6, 7, 8}
"""Of every ten pictures these train; the others are data.py's to calibrate, to choose and to judge with."""


def trained(path: Path) -> nn.Module:
    """Return the network, trained on the data in `path`."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    with gzip.open(path, "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    rows = rows[[index % 10 in TRAINING for index in range(len(rows))]]
    pictures = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 28, 28) / 255)
    labels = torch.from_numpy(rows[:, -1].astype(np.int64))
    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(64, 10),
    )
    steps = EPOCHS * (len(labels) // BATCH)
    optimiser = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    random = torch.Generator().manual_seed(SEED)
    network.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels), generator=random)
        for begin in range(0, len(labels) - BATCH + 1, BATCH):
            chosen = order[begin : begin + BATCH]
            # A pen does not start at the same place each time: move each picture by up to two pixels.
            moved = torch.stack(
                [
                    torch.roll(picture, shift, (1, 2))
                    for picture, shift in zip(
                        pictures[chosen], torch.randint(-2, 3, (BATCH, 2), generator=random).tolist(), strict=True
                    )
                ]
            )
            loss = nn.functional.cross_entropy(network(moved), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return network
