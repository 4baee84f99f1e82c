"""Train a convolutional network on images that this example makes, on two CPU devices, next to torch.

    python examples/train_cnn.py --steps 200 --plot cnn.png

The network tells circles, squares, crosses and stripes apart. It exports the training step, compiles it, trains,
resumes from a checkpoint, compares each loss with torch's, and counts right answers on new images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from _training import Task, count_parameters, read_options, train_and_compare

SIZE, BATCH, CLASSES = 24, 16, ("circle", "square", "cross", "stripes")


def draw_images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images, [count, 1, size, size], and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    centres = torch.randint(8, SIZE - 8, (count, 2), generator=generator)
    radii = torch.randint(4, 8, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    down = (rows - centres[:, 0, None, None]).abs()
    across = (columns - centres[:, 1, None, None]).abs()
    radius = radii[:, None, None]
    inside = torch.maximum(down, across) <= radius
    shapes = torch.stack(
        [
            down**2 + across**2 <= radius**2,
            inside,
            inside & (torch.minimum(down, across) <= 1),
            inside & (rows % 3 == 0),
        ]
    )
    chosen = shapes[labels, torch.arange(count)].float()
    noise = torch.randn(count, SIZE, SIZE, generator=generator)
    return (chosen + 0.3 * noise)[:, None], labels


class Network(nn.Module):  # type: ignore[misc, unused-ignore]
    """Convolutions with batch normalisation and a residual block, then one score for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.wide, self.wide_norm = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.inner, self.inner_norm = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.scores = nn.Linear(32, len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of each class, [images, classes]."""
        value = functional.avg_pool2d(functional.relu(self.stem_norm(self.stem(images))), 2)
        value = functional.avg_pool2d(functional.relu(self.wide_norm(self.wide(value))), 2)
        value = value + functional.relu(self.inner_norm(self.inner(value)))
        return self.scores(value.mean(dim=(2, 3)))  # type: ignore[no-any-return, unused-ignore]


def compute_loss(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(module(images), labels)


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return what trains the module."""
    return torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)


def draw_batch(step: int) -> Mapping[str, torch.Tensor]:
    """Return the batch of a step."""
    images, labels = draw_images(BATCH, seed=step)
    return {"images": images, "labels": labels}


def main() -> None:
    """Train, compare, and count right answers."""
    options = read_options("Train a convolutional network on two devices, next to torch.", steps=60)
    torch.manual_seed(0)
    module = Network()
    print(f"{count_parameters(module)} parameters, images of {SIZE} x {SIZE}")
    trained = train_and_compare(
        Task("CNN on made images", module, compute_loss, draw_batch, make_optimizer), options
    ).eval()
    images, labels = draw_images(400, seed=10**6)
    with torch.no_grad():
        right = (trained(images).argmax(dim=1) == labels).float().mean().item()
    print(f"right on new images: {right:.1%}")


if __name__ == "__main__":
    main()
