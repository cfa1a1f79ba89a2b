"""Fine-tuning: phases, a user's own records, and what does not fit."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import check_meta_token, load_tokenizer, text_vocab_size
from metatokens.errors import UserError
from metatokens.recipe import Phase, TrainingSettings
from metatokens.retrofit.injection import add_meta_attention
from metatokens.tasks.example import Encoded
from metatokens.training.examples import Collator
from metatokens.training.finetune import finetune
from metatokens.training.probe import held_out_probe
from metatokens.training.run_folder import training_of
from tests.model.dense_oracle import DenseOracle
from tests.numbers import ROUNDED
from tests.training.conftest import (
    Finetuning,
    Models,
    cosine_decay,
    figures_of,
    first_loss,
    interrupt,
    result,
    token_losses,
)

LENGTHS = "task.train_lengths=[64, 128]"


# --- phases


def test_each_train_length_goes_on_from_the_last_ones_model(
    model: Path, finetuning: Finetuning, tmp_path: Path
) -> None:
    both, first, second = tmp_path / "both", tmp_path / "first", tmp_path / "second"
    finetune(finetuning(LENGTHS), model, both, task="parity")
    finetune(finetuning("training.decay_steps=8"), model, first, task="parity")
    finetune(finetuning("task.train_lengths=[128]"), first / "64", second, task="parity")
    names = {path.name for path in both.iterdir()}
    assert names == {"64", "128", "settings.json", ".lock"}
    assert result(both / "64") == result(first / "64")
    assert first_loss(both / "128") == first_loss(second / "128")
    assert training_of(both / "128") == {"seed": 0, "train_condition": "paper", "train_length": 128}


def test_one_schedule_spans_all_train_lengths_whose_steps_may_differ(
    model: Path, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    recipe = finetuning(
        LENGTHS,
        "task.train_steps=[5, 3]",
        "training.learning_rate=0.01",
        "training.min_learning_rate=0.001",
        "training.warmup_steps=2",
        "training.optimizer=muon",
    )
    run = partial(finetune, recipe, model, tmp_path / "run", task="parity")
    interrupt(run, steps, 7)  # a resumed phase goes on in the schedule too
    run()
    rates = figures_of(tmp_path / "run" / "64", "learning_rate") + figures_of(
        tmp_path / "run" / "128", "learning_rate"
    )
    decay = cosine_decay(0.01, 0.001, steps=6, horizon=6)
    assert rates == pytest.approx([0, 0.005, *decay])


def test_a_schedule_that_ends_too_early_is_refused(
    model: Path, finetuning: Finetuning, tmp_path: Path
) -> None:
    steps = ("task.train_steps=[2, 2]", "training.max_steps=9")
    run = partial(finetune, model_folder=model, out=tmp_path / "run")
    with pytest.raises(UserError, match="decay_steps is 3, less than the 4 steps"):
        run(finetuning(LENGTHS, *steps, "training.decay_steps=3"), task="parity")
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": "Bits: 0", "completion": " 0"}) + "\n")
    with pytest.raises(UserError, match="decay_steps is 8, less than the 9 steps"):
        run(finetuning("training.max_steps=9", "training.decay_steps=8"), data=records)
    run(finetuning(LENGTHS, *steps, "training.decay_steps=4"), task="parity")


@pytest.mark.quick(cuts=[(5, 10)])
@pytest.mark.parametrize("cuts", [(3,), (4,), (5, 10)])  # in the stage, at its end, in each length
def test_interrupted_phases_end_like_undisturbed_ones(
    cuts: tuple[int, ...], model: Path, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    stages = "task.stages=[{lists: [2, 3], items: [3, 4], max_steps: 4}]"
    recipe = finetuning(LENGTHS, stages)
    finetune(recipe, model, tmp_path / "undisturbed", task="list_recall")
    run = partial(finetune, recipe, model, tmp_path / "run", task="list_recall")
    interrupt(run, steps, *cuts)
    rest, nothing = steps(), steps()
    run(progress=rest)
    run(progress=nothing)
    step_after_checkpoint = (cuts[-1] - 1) // 2 * 2 + 1
    assert rest == list(range(step_after_checkpoint, 13))
    assert nothing == []
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")


def test_a_phase_whose_model_was_damaged_ends_again_from_its_last_checkpoint(
    model: Path, finetuning: Finetuning, tmp_path: Path
) -> None:
    run = partial(finetune, finetuning(LENGTHS), model, tmp_path / "run", task="parity")
    run()
    weights = tmp_path / "run/64/model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1])
    run()
    assert weights.read_bytes() == before


def test_more_lists_than_categories_are_refused(
    model: Path, finetuning: Finetuning, tmp_path: Path
) -> None:
    recipe = finetuning("task.stages=[{lists: [19, 22], items: [1, 1], max_steps: 1}]")
    with pytest.raises(UserError, match="has up to 22 lists, and there are 20 categories"):
        finetune(recipe, model, tmp_path / "run", task="list_recall")


def test_learned_positions_are_enough_for_answers_too(
    small_model: Models, finetuning: Finetuning, tmp_path: Path
) -> None:
    short = small_model(position_embedding="learned", max_position_embeddings=64)
    with pytest.raises(UserError, match="longer than the 64 learned positions"):
        finetune(finetuning(), short, tmp_path / "run", task="list_recall")
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Encoded]:
    """The examples that trainings read, in their order."""
    examples: list[Encoded] = []
    collate = Collator.__call__
    monkeypatch.setattr(
        Collator, "__call__", lambda self, rows: examples.extend(rows) or collate(self, rows)
    )
    return examples


@pytest.mark.parametrize(("batch", "pieces"), [(4, 1), (1, 4)])
def test_the_loss_is_the_mean_over_all_answer_tokens_of_a_step(
    batch: int,
    pieces: int,
    model: Path,
    finetuning: Finetuning,
    small_corpus: Path,
    tmp_path: Path,
    read: list[Encoded],
) -> None:
    recipe = finetuning(
        f"training.per_device_train_batch_size={batch}",
        f"training.gradient_accumulation_steps={pieces}",
    )
    texts = small_corpus.read_text().split("\n\n")
    finetune(recipe, model, tmp_path / "run", task="copying", documents=texts)
    exact = load_model(model).double()
    losses = []
    for row in read[:4]:
        answer = range(row.answer_start, len(row.input_ids))
        losses.append(token_losses(exact, row.input_ids, answer))
    lengths = {len(answer) for answer in losses}
    expected = np.mean(np.concatenate(losses))
    assert len(lengths) > 1  # or a mean of the pieces' means would be the same
    assert first_loss(tmp_path / "run" / "64") == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.quick(second_attention=["meta"])
@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_the_loss_of_a_question_that_sees_landmarks_is_the_dense_formulas(
    second_attention: str,
    small_model: Models,
    finetuning: Finetuning,
    tmp_path: Path,
    read: list[Encoded],
) -> None:
    model = small_model(second_attention=second_attention)
    settings = ("task.condition=facts_4", "task.train_lengths=[160]", "training.max_steps=1")
    finetune(
        finetuning("task.question_sees=landmarks", *settings),
        model,
        tmp_path / "run",
        task="list_recall",
    )
    oracle, tokenizer = DenseOracle(load_model(model)), load_tokenizer(str(model))
    (line_feed,) = tokenizer.encode("\n", add_special_tokens=False)
    losses = []
    for row in read[:4]:
        ids = torch.tensor(list(row.input_ids))
        in_prompt = ids[: row.answer_start]
        question = int((in_prompt == line_feed).nonzero()[-1])  # the last line of the prompt
        index = torch.arange(len(ids))
        in_question, is_meta = index >= question, ids == tokenizer.meta_token_id
        is_visible = ~in_question[:, None] | in_question | is_meta
        is_earlier = index <= index[:, None]
        log_probabilities = oracle.logits(ids.tolist(), is_visible & is_earlier).log_softmax(-1)
        answer = index[row.answer_start :]
        losses += (-log_probabilities[answer - 1, ids[answer]]).tolist()
    finetune(finetuning(*settings), model, tmp_path / "in_sight", task="list_recall")
    expected = np.mean(losses)
    assert first_loss(tmp_path / "run" / "160") == pytest.approx(expected, rel=ROUNDED)
    assert first_loss(tmp_path / "in_sight" / "160") != pytest.approx(expected, rel=1e-3)


# --- a user's own records


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Two prompts that read alike: in the first `_PAUSE_` is the meta-token, in the second it is text."""
    path = tmp_path / "records.jsonl"
    marked = {"prompt": "the cat _PAUSE_ sat", "markers": [7], "completion": " hills"}
    literal = {"prompt": "the cat _PAUSE_ sat", "completion": " river"}
    path.write_text(f"{json.dumps(marked)}\n{json.dumps(literal)}\n", encoding="utf-8")
    return path


def test_a_run_on_own_records_resumes_and_is_bound_to_its_texts(
    model: Path, finetuning: Finetuning, records: Path, steps: type, tmp_path: Path
) -> None:
    finetune(finetuning(), model, tmp_path / "undisturbed", data=records)
    run = partial(finetune, finetuning(), model, tmp_path / "run")
    interrupt(partial(run, data=records), steps, 3)
    moved = tmp_path / "moved.jsonl.gz"
    moved.write_bytes(gzip.compress(records.read_bytes()))
    run(data=moved)
    before = result(tmp_path / "run")
    assert before == result(tmp_path / "undisturbed")
    assert training_of(tmp_path / "run" / "data") == {"seed": 0}
    moved.write_bytes(b'{"prompt": "another", "completion": " file"}\n')
    with pytest.raises(UserError, match="data_sha256 was"):
        run(data=moved)
    assert result(tmp_path / "run") == before


# --- what does not fit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"second_attention": "none", "meta_token_id": None},
            "has no meta_token_id, which markers need",
        ),
        ({"meta_token_id": 770}, "has meta_token_id 770, and its tokenizer's meta-token is 768"),
        (
            {"position_embedding": "learned", "max_position_embeddings": 40},
            "longer than the 40 learned positions",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_any_training(
    fields: dict[str, object],
    message: str,
    small_model: Models,
    finetuning: Finetuning,
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=message):
        finetune(finetuning(), small_model(**fields), tmp_path / "run", task="parity")
    assert not (tmp_path / "run").exists()


def test_entries_that_a_tokenizer_got_later_need_a_larger_table(
    small_model: Models, small_store: TokenStore
) -> None:
    folder = small_model(unpadded_vocab_size=769)
    tokenizer, model = load_tokenizer(str(folder)), load_model(folder)
    tokenizer.add_tokens(["another"])
    with pytest.raises(
        UserError,
        match=r"770 entries, and the model's unpadded_vocab_size is 769: call model\.resize",
    ):
        check_meta_token(model.config, tokenizer, folder)
    model.resize_token_embeddings(len(tokenizer))
    check_meta_token(model.config, tokenizer, folder)


def test_either_a_task_or_records(model: Path, finetuning: Finetuning, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a task or a file of records"):
        finetune(finetuning(), model, tmp_path / "run")


def test_held_out_records_need_the_logits_of_their_answers_alone(small_store: TokenStore) -> None:
    torch.manual_seed(0)
    tokenizer = small_store.tokenizer
    config = LlamaConfig(
        vocab_size=text_vocab_size(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model: Any = add_meta_attention(LlamaForCausalLM(config), tokenizer, layers=[]).eval()
    rows = []
    model.lm_head.register_forward_hook(lambda head, args, logits: rows.append(logits.shape[1]))
    records = [
        Encoded(input_ids=[3, 1, 4, 1, 5, 9, 2, 6], answer_start=6),
        Encoded(input_ids=[5, 3, 5, 8], answer_start=3),
    ]
    settings = TrainingSettings(max_steps=1, per_device_train_batch_size=2)

    probe = held_out_probe(records, 0, model, Phase("data", settings, train_length=8))

    assert probe is not None
    measured = probe.measure(model)["eval_loss"]
    assert rows[0] == 3  # columns, before an answer's token in either row
    losses = []
    for record in records:
        answer = range(record.answer_start, len(record.input_ids))
        losses += token_losses(model, record.input_ids, answer)
    assert measured == pytest.approx(np.mean(losses), rel=ROUNDED)


def test_seeds_and_phases_read_other_examples(
    model: Path, finetuning: Finetuning, tmp_path: Path, read: list[Encoded]
) -> None:
    stage = "{lists: [2, 3], items: [3, 4], max_steps: 2}"
    of_seeds = []
    for seed in (0, 1):
        read.clear()
        recipe = finetuning(f"task.stages=[{stage}, {stage}]", f"training.seed={seed}")
        finetune(recipe, model, tmp_path / str(seed), task="list_recall")
        examples = [tuple(example.input_ids) for example in read]
        assert len({*examples}) == len(examples)
        of_seeds.append({*examples})
    assert of_seeds[0].isdisjoint(of_seeds[1])


def test_a_seed_decides_the_order_of_own_records(
    model: Path, finetuning: Finetuning, tmp_path: Path, read: list[Encoded]
) -> None:
    file = tmp_path / "own.jsonl"
    records = [{"prompt": f"Is it {letter}?", "completion": " x"} for letter in "abcdefghijklmnop"]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    orders = []
    for seed in (0, 1):
        read.clear()
        recipe = finetuning("training.max_steps=4", f"training.seed={seed}")
        finetune(recipe, model, tmp_path / str(seed), data=file)
        orders.append([tuple(example.input_ids) for example in read])
    assert {*orders[0]} == {*orders[1]}
    assert len({*orders[0]}) == len(records) == len(orders[0])
    assert orders[0] != orders[1]
