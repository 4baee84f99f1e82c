"""Dropout and random numbers: their statistics, and that they depend on seed, step, site and element only."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from torch import nn

from onnxplace_training import export_training_step
from plugins.training.tests.support import torch_models
from plugins.training.tests.support.torch_steps import PlainTrainer


class Masks(nn.Module):
    """Returns the masks of two dropouts and normal numbers; a parameter makes it trainable."""

    def __init__(self, probability=0.25):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.first, self.second = nn.Dropout(probability), nn.Dropout(probability)

    def forward(self, value):
        return self.first(value), self.second(value), torch.randn_like(value)


def masks_loss(module, value):
    first, second, normal = module(value)
    return (first.mean() + second.mean()) * module.weight, {"first": first, "second": second, "normal": normal}


@pytest.fixture(scope="module")
def model():
    module = Masks()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return export_training_step(module, masks_loss, optimizer, {"value": torch.ones(8, 512)})


def draw(model, seed=1, steps=1, rows=600):
    trainer = PlainTrainer(model, seed=seed)
    values = np.ones((rows, 512), dtype=np.float32)
    results = [trainer.step({"value": values}) for _ in range(steps)]
    return [(result["first"], result["second"], result["normal"]) for result in results]


def correlate(left, right):
    """The correlation in units of its standard deviation for independent elements."""
    left, right = (item.ravel() - item.mean() for item in (left, right))
    return float((left @ right) / np.sqrt((left @ left) * (right @ right)) * np.sqrt(left.size))


def test_masks_keep_the_share_of_elements_and_scale_the_rest(model):
    ((first, second, _),) = draw(model)
    for mask in (first, second):
        assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / 0.75)}
        deviation = np.sqrt(0.25 * 0.75 / mask.size)
        assert abs((mask == 0).mean() - 0.25) < 5 * deviation
        rows, columns = (mask == 0).mean(1), (mask == 0).mean(0)
        # As many as in independent draws: neither too even nor too uneven.
        np.testing.assert_allclose(rows.std(), np.sqrt(0.25 * 0.75 / 512), rtol=0.2)
        np.testing.assert_allclose(columns.std(), np.sqrt(0.25 * 0.75 / 600), rtol=0.2)


def test_neighbours_rows_columns_sites_steps_and_seeds_are_independent(model):
    (first, second, _), (later, _, _) = draw(model, steps=2)
    ((other, _, _),) = draw(model, seed=2)
    pairs = [(first, second), (first, later), (first, other)]
    for distance in (1, 2, 3, 7, 64):
        pairs += [(first[:, distance:], first[:, :-distance]), (first[distance:], first[:-distance])]
        pairs.append((first[distance:, distance:], first[:-distance, :-distance]))
    assert max(abs(correlate(*pair)) for pair in pairs) < 5
    # No two rows or columns are alike, as they would be if a sum of row and column decided.
    kept = (first > 0).astype(np.float32) - 0.75
    for matrix in (kept, kept.T):
        products = matrix @ matrix.T / (0.1875 * np.sqrt(matrix.shape[1]))
        np.fill_diagonal(products, 0)
        assert np.abs(products).max() < 6


def test_parities_of_rectangles_are_even(model):
    """In the corners of rectangles, elements made of a row's and a column's number would depend on each other."""
    ((first, _, _),) = draw(model)
    signs = np.where(first > 0, 1.0, -3.0)  # of mean zero
    corners = signs[:-1, :-1] * signs[1:, :-1] * signs[:-1, 1:] * signs[1:, 1:]
    assert abs(corners.mean() / corners.std() * np.sqrt(corners.size)) < 5


def test_normal_numbers_are_normal(model):
    ((_, _, normal),) = draw(model)
    assert abs(normal.mean()) < 5 / np.sqrt(normal.size)
    np.testing.assert_allclose(normal.std(), 1, rtol=0.01)
    assert abs((normal**3).mean()) < 5 * np.sqrt(15 / normal.size)
    np.testing.assert_allclose((normal**4).mean(), 3, rtol=0.03)


def test_equal_seeds_and_steps_give_equal_masks_on_any_number_of_rows(model):
    (first,), (again,) = draw(model), draw(model)
    np.testing.assert_array_equal(first, again)
    ((fewer, _, _),) = draw(model, rows=37)
    np.testing.assert_array_equal(first[0][:37], fewer)


@pytest.mark.parametrize("seed", [-5, 0, 2**40])
def test_any_seed_works(model, seed):
    ((first, _, _),) = draw(model, seed=seed)
    assert 0.2 < (first == 0).mean() < 0.3


def test_the_gradient_uses_the_mask_of_the_forward_pass():
    """With a learning rate of one, the change of the weight is its gradient: the scale where it was kept."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64))
            self.dropout = nn.Dropout(0.5)

        def forward(self, value):
            return self.dropout(self.weight + value)

    module = Scaled()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model = export_training_step(
        module,
        lambda net, value: (net(value).sum(), {"kept": net.dropout(value)}),
        optimizer,
        {"value": torch.ones(64)},
        dynamic_batch=False,
    )
    trainer = PlainTrainer(model)
    result = trainer.step({"value": np.ones(64, dtype=np.float32)})
    change = -trainer.states["weight"]
    assert set(change) == {np.float32(0), np.float32(2)}
    np.testing.assert_allclose(result["loss"], change.sum())
    assert not np.array_equal(result["kept"], change)  # another call of a dropout is another site


def test_dropout_in_attention_and_micro_batches_trains():
    case = torch_models.gpt(dropout=0.2)
    optimizer = torch.optim.AdamW(case.module.parameters(), lr=3e-3)
    model = export_training_step(case.module, case.loss, optimizer, case.example(), gradient_accumulation=2)
    trainer, batch = PlainTrainer(model), case.draw(4)
    losses = [float(trainer.step(batch)["loss"]) for _ in range(40)]
    assert trainer.record["seed"] == "seed"
    assert losses[-1] < 0.7 * losses[0]


def test_modules_in_evaluation_have_no_dropout():
    case = torch_models.gpt(dropout=0.2)
    case.module.eval()
    optimizer = torch.optim.AdamW(case.module.parameters(), lr=3e-3)
    model = export_training_step(case.module, case.loss, optimizer, case.example())
    assert PlainTrainer(model).record["seed"] == ""
