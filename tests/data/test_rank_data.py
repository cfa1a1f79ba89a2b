"""The ranks and workers of a run together read every window of the text once an epoch, whatever their number."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments, default_data_collator

from metatokens.checkpoint import load_model
from metatokens.data.blocks import BlockDataset
from metatokens.data.store import TokenStore
from metatokens.recipe import TrainingSettings
from metatokens.training.trainer import MetaTokenTrainer

GLOBAL_BATCH, EPOCHS = 12, 3
BLOCK = {"block_size": 32, "fraction": 0.1, "placement": "uniform", "seed": 0}
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # Python's own, about forking with threads
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
every_split = pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (ranks, workers) if (ranks, workers) in ((1, 0), (1, 3), (2, 1), (4, 0))
        else pytest.param(ranks, workers, marks=pytest.mark.thorough)
        for ranks in (1, 2, 4)
        for workers in (0, 1, 3)
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def dataset(small_store: TokenStore) -> BlockDataset:
    """Three epochs, none of which ends where a batch does."""
    dataset = BlockDataset(small_store, "train", **BLOCK, epochs=EPOCHS)
    assert len(dataset) // EPOCHS % GLOBAL_BATCH != 0
    return dataset


def loader(dataset: BlockDataset, rank: int, ranks: int, workers: int) -> DataLoader:
    """A rank's share, as accelerate cuts it for Trainer."""
    whole = DataLoader(
        dataset, GLOBAL_BATCH // ranks, collate_fn=default_data_collator, num_workers=workers, shuffle=False
    )
    return prepare_data_loader(whole, num_processes=ranks, process_index=rank, put_on_device=False, even_batches=True)


def steps(dataset: BlockDataset, ranks: int, workers: int, skip: int = 0) -> list[list[tuple[list[int], list[int]]]]:
    """The blocks of each step: those of all ranks."""

    def batches(rank: int) -> Iterator[list[tuple[list[int], list[int]]]]:
        for batch in skip_first_batches(loader(dataset, rank, ranks, workers), skip):
            yield list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))

    return [sum(parts, []) for parts in zip(*map(batches, range(ranks)), strict=True)]  # noqa: RUF017


def test_blocks_by_a_rule_are_the_same_for_ranks_workers_and_after_resuming(small_store: TokenStore) -> None:
    dataset = BlockDataset(small_store, "train", **BLOCK | {"placement": "sentence"}, epochs=EPOCHS)
    alone = steps(dataset, 1, 0)[:-1]  # what fills the last batch is others' with other ranks
    assert {ids.count(small_store.manifest.meta_token_id) for step in alone for ids, _ in step} >= {0, 1}
    assert steps(dataset, 2, 3)[:-1] == alone
    assert steps(dataset, 4, 1, skip=5)[:-1] == alone[5:]


@every_split
def test_steps_have_the_same_blocks_however_many_ranks_share_them_and_after_resuming(
    ranks: int, workers: int, dataset: BlockDataset
) -> None:
    alone = steps(dataset, 1, 0)
    items = [(item["input_ids"].tolist(), item["labels"].tolist()) for item in dataset]
    assert sum(alone, [])[: len(items)] == items  # noqa: RUF017  # what fills the last batch aside
    an_epoch = len(alone) // EPOCHS
    for skip in (0, 1, an_epoch, an_epoch + 1, 2 * an_epoch + 3):
        assert steps(dataset, ranks, workers, skip) == alone[skip:]


def test_trainer_cuts_its_data_like_this(
    dataset: BlockDataset, small_model: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=GLOBAL_BATCH,
        train_sampling_strategy="sequential",
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
    )
    model = load_model(small_model())
    trainer = MetaTokenTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=default_data_collator,
        settings=TrainingSettings(max_steps=1, per_device_train_batch_size=GLOBAL_BATCH),
        schedule_start=0,
    )
    own, like = trainer.get_train_dataloader(), loader(dataset, 0, 1, 0)
    assert type(own) is type(like)
    assert arguments.accelerator_config.split_batches is False
    assert arguments.accelerator_config.even_batches is True
    for ours, theirs in zip(own, like, strict=True):
        np.testing.assert_array_equal(ours["input_ids"], theirs["input_ids"])
