"""The loss: its labels, its divisor, and that computing fewer logits does not change it."""

import pytest
import torch
from torch import Tensor

from tests.gradients import gradients_by, gradients_of
from tests.model.agreement import assert_gradients_close
from tests.model.tiny_models import META, pad, random_rows, tiny_model
from tests.numbers import ROUNDED
from tests.retrofit.architectures import with_meta_tokens
from tests.retrofit.callers import model_of

TRAINING = pytest.mark.parametrize("training", [True, False])
Batch = dict[str, Tensor]


@pytest.fixture
def batch() -> Batch:
    """A ragged batch, labels -100 at padding, at the meta-tokens and in most of the last row."""
    ids, mask = pad(random_rows((12, 9, 11)), "right")
    labels = ids.masked_fill((mask == 0) | (ids == META), -100)
    labels[2, :9] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def losses_in_full(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Minus log probability of every label, from all logits, in float64."""
    logits = model.eval()(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].double()
    labels = batch["labels"][:, 1:]
    has_label = labels != -100
    return -logits.log_softmax(dim=-1)[has_label].gather(1, labels[has_label][:, None])[:, 0]


@TRAINING
def test_loss_is_the_mean_cross_entropy_of_the_labels(batch: Batch, training: bool) -> None:
    model = tiny_model()
    expected = losses_in_full(model, batch).mean()
    expected_gradients = gradients_by(model, expected)
    loss = model.train(training)(**batch).loss

    # transformers computes it in float32.
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDED)
    assert_gradients_close(gradients_by(model, loss), expected_gradients, ROUNDED)


@TRAINING
def test_num_items_in_batch_divides_the_sum(batch: Batch, training: bool) -> None:
    model = tiny_model()
    expected = losses_in_full(model, batch).sum() / 37
    loss = model.train(training)(**batch, num_items_in_batch=torch.tensor(37)).loss
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDED)


@TRAINING
def test_labels_that_are_shifted_already(batch: Batch, training: bool) -> None:
    model = tiny_model()
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    expected = -logits.log_softmax(dim=-1)[:, 4, 7].mean().item()
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, 4] = 7
    loss = model.train(training)(**batch, shift_labels=shifted).loss

    assert loss.item() == pytest.approx(expected, rel=ROUNDED)


@TRAINING
def test_logits_have_the_shape_of_the_input_whether_there_are_labels_or_not(
    batch: Batch, training: bool
) -> None:
    model = tiny_model().train(training)
    with_labels = model(**batch).logits
    del batch["labels"]

    assert with_labels.shape == (3, 12, 64)
    assert torch.equal(with_labels, model(**batch).logits)


def test_logits_to_keep() -> None:
    model, ids = tiny_model(), torch.tensor(random_rows((9, 9)))
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(
        model(ids, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]]
    )


@TRAINING
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("caller", ["rope-meta", "rope-none", "llama"])
def test_a_label_that_is_a_meta_token_counts_as_none(
    caller: str, is_counted: bool, training: bool
) -> None:
    """Trainer counts the labels itself, meta-tokens too."""
    model, ids = model_of(caller).train(training), with_meta_tokens()
    labels = ids.clone()
    text_labels = ids.masked_fill(ids == model.config.meta_token_id, -100)
    losses = []
    for variant in (labels, text_labels):
        count = {"num_items_in_batch": (variant[:, 1:] != -100).sum()} if is_counted else {}
        losses.append(model(ids, labels=variant, **count).loss.item())

    assert losses[0] == pytest.approx(losses[1], rel=ROUNDED)
    assert torch.equal(labels, ids)


def test_accumulated_gradients_of_uneven_batches_are_those_of_one_batch(batch: Batch) -> None:
    model = tiny_model().train()
    together = gradients_by(model, model(**batch).loss)
    count = int((batch["labels"][:, 1:] != -100).sum())
    model.zero_grad()
    for row in range(3):
        micro_batch = {name: value[row : row + 1] for name, value in batch.items()}
        model(**micro_batch, num_items_in_batch=count).loss.backward()

    assert_gradients_close(gradients_of(model), together, ROUNDED)
