"""The loss: its labels, its divisor, and that computing fewer logits does not change it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gradients import far
from tests.model.tiny_models import META, pad, random_rows, tiny_model
from tests.numbers import ROUNDED


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """A ragged batch, labels -100 at padding, at the meta-tokens and in most of the last row."""
    ids, mask = pad(random_rows((12, 9, 11)), "right")
    labels = ids.masked_fill((mask == 0) | (ids == META), -100)
    labels[2, :9] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def losses_in_full(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Minus log probability of every label, from all logits, in float64."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    log_probabilities = model.eval()(**inputs).logits.double().log_softmax(dim=-1)
    scored = [(i, t) for i, t in (batch["labels"] != -100).nonzero().tolist() if t > 0]
    return torch.stack([-log_probabilities[i, t - 1, batch["labels"][i, t]] for i, t in scored])


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    taken = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = ROUNDED) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert far(gradient, expected[name]) < tolerance, name


@pytest.mark.parametrize("training", [True, False])
def test_loss_is_the_mean_cross_entropy_of_the_labels(batch: dict[str, Tensor], training: bool) -> None:
    model = tiny_model()
    expected = losses_in_full(model, batch).mean()
    expected.backward()
    expected_gradients = gradients(model)
    loss = model.train(training)(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDED)  # transformers computes it in float32
    assert_same(gradients(model), expected_gradients)


@pytest.mark.parametrize("training", [True, False])
def test_labels_that_are_shifted_already(batch: dict[str, Tensor], training: bool) -> None:
    model = tiny_model().train(training)
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    expected = model(**batch).loss.item()
    for given in (None, shifted):
        assert model(**batch, shift_labels=given).loss.item() == pytest.approx(expected, rel=ROUNDED)
    logits = model.eval()(batch["input_ids"], batch["attention_mask"]).logits
    shifted = torch.full_like(shifted, -100).index_fill(1, torch.tensor(4), 7)
    expected = -logits.log_softmax(dim=-1)[:, 4, 7].mean().item()
    assert model.train(training)(**batch, shift_labels=shifted).loss.item() == pytest.approx(expected, rel=ROUNDED)


def test_training_computes_logits_at_labels_only(batch: dict[str, Tensor]) -> None:
    model = tiny_model()
    in_full = model.eval()(**batch)
    assert in_full.logits.shape == (3, 12, 64)
    training = model.train()(**batch)
    scored = batch["labels"][:, 1:] != -100
    assert training.logits.shape == (int(scored.sum()), 64)
    torch.testing.assert_close(training.logits, in_full.logits[:, :-1][scored])
    assert model(**{key: value for key, value in batch.items() if key != "labels"}).logits.shape == (3, 12, 64)


def test_logits_to_keep() -> None:
    model = tiny_model()
    ids = torch.tensor(random_rows((9, 9)))
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]])


@pytest.mark.parametrize("training", [True, False])
def test_num_items_in_batch_divides_the_sum(batch: dict[str, Tensor], training: bool) -> None:
    model = tiny_model()
    expected = losses_in_full(model, batch).sum() / 37
    loss = model.train(training)(**batch, num_items_in_batch=torch.tensor(37)).loss
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDED)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("second_attention", ["meta", "none"])
def test_a_label_that_is_a_meta_token_counts_as_none(
    batch: dict[str, Tensor], second_attention: str, counted: bool, training: bool
) -> None:
    model = tiny_model(second_attention=second_attention).train(training)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)  # as usual: a copy of the ids
    masked = labels.masked_fill(labels == META, -100)
    assert (labels == META).sum() > 3
    # Trainer counts the labels itself, meta-tokens too.
    count, masked_count = (
        {"num_items_in_batch": (one[:, 1:] != -100).sum()} if counted else {} for one in (labels, masked)
    )
    given = labels.clone()
    loss = model(**batch | {"labels": given}, **count).loss
    expected = model(**batch | {"labels": masked}, **masked_count).loss
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDED)
    assert torch.equal(given, labels)


def test_accumulated_gradients_of_uneven_batches_are_those_of_one_batch(batch: dict[str, Tensor]) -> None:
    model = tiny_model().train()
    count = int((batch["labels"][:, 1:] != -100).sum())
    model(**batch).loss.backward()
    together = gradients(model)

    def accumulate(**arguments: Any) -> dict[str, Tensor]:
        for i in range(3):
            model(**{name: value[i : i + 1] for name, value in batch.items()}, **arguments).loss.backward()
        return gradients(model)

    assert_same(accumulate(num_items_in_batch=count), together)
    means = accumulate()  # the mean of the micro-batches' means differs
    assert max((means[name] / 3 - together[name]).abs().max() for name in together) > 1e-2
