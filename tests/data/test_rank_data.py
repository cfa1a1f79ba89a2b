"""The ranks and workers of a run together read every window of the text once an epoch, whatever their number."""

from itertools import chain

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments, default_data_collator

from metatokens.checkpoint import load_model
from metatokens.data.blocks import BlockDataset
from metatokens.recipe import TrainingSettings
from metatokens.training.trainer import MetaTokenTrainer

GLOBAL_BATCH, EPOCHS = 12, 3
BLOCK = {"block_size": 32, "fraction": 0.1, "placement": "uniform", "seed": 0}
pytestmark = [
    # Python's own, about forking with threads.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    # More workers than cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def dataset(small_store):
    """Three epochs, none of which ends where a batch does."""
    dataset = BlockDataset(small_store, "train", **BLOCK, epochs=EPOCHS)
    assert len(dataset) // EPOCHS % GLOBAL_BATCH != 0
    return dataset


def loader(dataset, rank, ranks, workers):
    """A rank's share, as accelerate cuts it for Trainer."""
    whole = DataLoader(
        dataset,
        GLOBAL_BATCH // ranks,
        collate_fn=default_data_collator,
        num_workers=workers,
        shuffle=False,
    )
    return prepare_data_loader(
        whole,
        num_processes=ranks,
        process_index=rank,
        put_on_device=False,
        even_batches=True,
    )


def batches(dataset, rank, ranks, workers, skip):
    """The blocks of a rank, by step."""
    for batch in skip_first_batches(loader(dataset, rank, ranks, workers), skip):
        yield list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))


def steps(dataset, ranks, workers, skip=0):
    """The blocks of each step: those of all ranks."""
    by_rank = [batches(dataset, rank, ranks, workers, skip) for rank in range(ranks)]
    return [list(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (1, 0),
        (1, 3),
        (2, 1),
        (4, 0),
        pytest.param(1, 1, marks=pytest.mark.thorough),
        pytest.param(2, 0, marks=pytest.mark.thorough),
        pytest.param(2, 3, marks=pytest.mark.thorough),
        pytest.param(4, 1, marks=pytest.mark.thorough),
        pytest.param(4, 3, marks=pytest.mark.thorough),
    ],
)
def test_steps_have_the_same_blocks_however_many_ranks_share_them_and_after_resuming(
    ranks, workers, dataset
):
    items = [(item["input_ids"].tolist(), item["labels"].tolist()) for item in dataset]
    alone = steps(dataset, ranks=1, workers=0)
    an_epoch = len(alone) // EPOCHS

    in_order = list(chain.from_iterable(alone))
    assert in_order[: len(items)] == items  # what fills the last batch aside
    for skip in (0, 1, an_epoch, 2 * an_epoch + 3):
        assert steps(dataset, ranks, workers, skip) == alone[skip:]


def test_trainer_cuts_its_data_like_this(dataset, small_model, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=GLOBAL_BATCH,
        train_sampling_strategy="sequential",
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
    )
    trainer = MetaTokenTrainer(
        model=load_model(small_model()),
        args=arguments,
        train_dataset=dataset,
        data_collator=default_data_collator,
        settings=TrainingSettings(max_steps=1, per_device_train_batch_size=GLOBAL_BATCH),
        schedule_start=0,
    )

    of_trainer, of_these_tests = (
        trainer.get_train_dataloader(),
        loader(dataset, rank=0, ranks=1, workers=0),
    )

    assert type(of_trainer) is type(of_these_tests)
    assert arguments.accelerator_config.split_batches is False
    assert arguments.accelerator_config.even_batches is True
    for ours, theirs in zip(of_trainer, of_these_tests, strict=True):
        np.testing.assert_array_equal(ours["input_ids"], theirs["input_ids"])
