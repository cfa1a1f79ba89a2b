"""Fine-tuning: phases, a user's own records, and what does not fit."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import check_meta_token, load_tokenizer
from metatokens.errors import UserError
from metatokens.recipe import Phase
from metatokens.tasks.example import Encoded, read_examples
from metatokens.training.examples import Collator
from metatokens.training.finetune import finetune
from metatokens.training.probe import Probe
from metatokens.training.run_folder import training_of
from tests.model.dense_oracle import DenseOracle
from tests.numbers import ROUNDED
from tests.training.conftest import Finetuning, Models, curve, interrupt, result, weights

LENGTHS = "task.train_lengths=[64, 128]"


# --- phases


def test_each_train_length_goes_on_from_the_last_ones_model(
    model: Path, finetuning: Finetuning, tmp_path: Path
) -> None:
    finetune(finetuning(LENGTHS), model, tmp_path / "both", task="parity")
    finetune(finetuning("training.decay_steps=8"), model, tmp_path / "first", task="parity")
    finetune(finetuning("task.train_lengths=[128]"), tmp_path / "first" / "64", tmp_path / "second", task="parity")
    names = {path.name for path in (tmp_path / "both").iterdir()}
    assert names == {"64", "128", "examples", "settings.json", ".lock"}
    assert result(tmp_path / "both" / "64") == result(tmp_path / "first" / "64")
    assert curve(tmp_path / "both" / "128")[0]["loss"] == curve(tmp_path / "second" / "128")[0]["loss"]
    assert not list((tmp_path / "both").rglob("pytorch_model*"))
    assert training_of(tmp_path / "both" / "128") == {"seed": 0, "train_condition": "paper", "train_length": 128}


def test_one_schedule_spans_all_train_lengths(model: Path, finetuning: Finetuning, steps: type, tmp_path: Path) -> None:
    settings = ("learning_rate=0.01", "min_learning_rate=0.001", "warmup_steps=2", "optimizer=muon")
    recipe = finetuning(LENGTHS, "task.train_steps=[5, 3]", *(f"training.{setting}" for setting in settings))
    run = partial(finetune, recipe, model, tmp_path / "run", task="parity")
    interrupt(run, steps, 7)  # a resumed phase goes on in the schedule too
    run()
    points = [*curve(tmp_path / "run" / "64"), *curve(tmp_path / "run" / "128")]
    rates = [0, 0.005] + [0.001 + 0.009 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    assert [point["learning_rate"] for point in points] == pytest.approx(rates)
    with pytest.raises(UserError, match=r"decay_steps is 7, less than the 8 steps of all train lengths"):
        finetuning(LENGTHS, "task.train_steps=[5, 3]", "training.decay_steps=7")


# In the stage, at its end, in a length, in each.
@pytest.mark.quick(cuts=[(2, 7, 14)])
@pytest.mark.parametrize(
    ("cuts", "optimizer"), [((3,), "adamw"), ((4,), "adamw"), ((9,), "muon"), ((2, 7, 14), "adamw")]
)
def test_interrupted_phases_end_like_undisturbed_ones(
    cuts: tuple[int, ...], optimizer: str, model: Path, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    stages = "task.stages=[{lists: [2, 3], items: [3, 4], max_steps: 4}]"
    recipe = finetuning(LENGTHS, stages, "training.max_steps=6", f"training.optimizer={optimizer}")
    finetune(recipe, model, tmp_path / "undisturbed", task="list_recall")
    run = partial(finetune, recipe, model, tmp_path / "run", task="list_recall")
    interrupt(run, steps, *cuts)
    rest, nothing = steps(), steps()
    run(progress=rest)
    assert rest == list(range((cuts[-1] - 1) // 2 * 2 + 1, 17))
    assert result(tmp_path / "run") == result(tmp_path / "undisturbed")
    run(progress=nothing)
    assert nothing == []


def test_a_phase_that_is_probed_learns_the_same(model: Path, finetuning: Finetuning, tmp_path: Path) -> None:
    def norm(model: torch.nn.Module) -> dict[str, float]:
        assert not model.training
        return {"norm": float(next(model.parameters()).detach().norm())}

    def probe(model: torch.nn.Module, phase: Phase) -> Probe | None:
        return Probe(2, norm) if phase.name == "64" else None

    plain, probed = tmp_path / "plain", tmp_path / "probed"
    finetune(finetuning(LENGTHS), model, plain, task="parity")
    finetune(finetuning(LENGTHS), model, probed, task="parity", probe=probe)
    points = [point for point in curve(probed / "64") if "norm" in point]
    assert [point["step"] for point in points] == [2, 4]
    assert points[1] == {"step": 4} | norm(load_model(probed / "64").eval())
    assert [point for point in curve(probed / "64") if "loss" in point] == curve(plain / "64")
    assert curve(probed / "128") == curve(plain / "128")
    assert weights(probed / "128") == weights(plain / "128")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Encoded]:
    """The examples that trainings read, in their order."""
    found: list[Encoded] = []
    collate = Collator.__call__
    monkeypatch.setattr(Collator, "__call__", lambda self, rows: found.extend(rows) or collate(self, rows))
    return found


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
    sizes = (f"training.per_device_train_batch_size={batch}", f"training.gradient_accumulation_steps={pieces}")
    texts = small_corpus.read_text().split("\n\n")
    finetune(finetuning(*sizes), model, tmp_path / "run", task="copying", documents=texts)
    exact, losses = load_model(model).double(), []
    for ids, start in ((list(row.input_ids), row.answer_start) for row in read[:4]):
        with torch.no_grad():
            log_probabilities = exact(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses.append([-log_probabilities[place - 1, ids[place]].item() for place in range(start, len(ids))])
    assert len({len(answer) for answer in losses}) > 1  # or a mean of the pieces' means would be the same
    assert curve(tmp_path / "run" / "64")[0]["loss"] == pytest.approx(np.mean(np.concatenate(losses)), rel=ROUNDED)


@pytest.mark.quick(second_attention=["meta"])
@pytest.mark.parametrize("second_attention", ["meta", "causal", "none"])
def test_the_loss_of_a_question_that_sees_landmarks_is_the_dense_formulas(
    second_attention: str,
    small_model: Models,
    finetuning: Finetuning,
    tmp_path: Path,
    read: list[Encoded],
) -> None:
    model, tuned = small_model(second_attention=second_attention), tmp_path / "run"
    sees = ("task.question_sees=landmarks", "task.condition=facts_4", "task.train_lengths=[160]")
    finetune(finetuning(*sees), model, tuned, task="list_recall")
    oracle, tokenizer, losses = DenseOracle(load_model(model)), load_tokenizer(str(model)), []
    feed = tokenizer.encode("\n", add_special_tokens=False)
    for ids, start in ((list(row.input_ids), row.answer_start) for row in read[:4]):
        question = max(place for place in range(start) if [ids[place]] == feed)  # the last line of the prompt
        places, meta = range(len(ids)), tokenizer.meta_token_id
        seen = [
            [key <= query and (query < question or key >= question or ids[key] == meta) for key in places]
            for query in places
        ]
        log_probabilities = oracle.logits(ids, torch.tensor(seen)).log_softmax(-1)
        losses += [-log_probabilities[place - 1, ids[place]].item() for place in range(start, len(ids))]
    assert curve(tuned / "160")[0]["loss"] == pytest.approx(np.mean(losses), rel=ROUNDED)
    finetune(finetuning(*sees[1:]), model, tmp_path / "in_sight", task="list_recall")
    assert curve(tmp_path / "in_sight" / "160")[0]["loss"] != pytest.approx(np.mean(losses), rel=1e-3)


def test_records_have_no_question_that_sees_landmarks(
    model: Path, finetuning: Finetuning, records: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"task\.question_sees is for the tasks, whose prompts have a question; .*\.$"):
        finetune(finetuning("task.question_sees=landmarks"), model, tmp_path / "run", data=records)


def test_loss_on_the_sequence_is_another_run(model: Path, finetuning: Finetuning, tmp_path: Path) -> None:
    sequence = finetuning("task.loss_on=sequence")
    finetune(finetuning(), model, tmp_path / "answer", task="parity")
    finetune(sequence, model, tmp_path / "sequence", task="parity")
    losses = {curve(tmp_path / name / "64")[0]["loss"] for name in ("answer", "sequence")}
    assert len(losses) == 2
    with pytest.raises(UserError, match=r"recipe\.task\.loss_on was 'answer' and is now 'sequence'"):
        finetune(sequence, model, tmp_path / "answer", task="parity")


def test_each_train_length_may_have_steps_of_its_own(
    model: Path, finetuning: Finetuning, steps: type, tmp_path: Path
) -> None:
    done = steps()
    finetune(finetuning(LENGTHS, "task.train_steps=[4, 2]"), model, tmp_path / "own", task="parity", progress=done)
    assert done == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in curve(tmp_path / "own" / "128")] == [1, 2]
    with pytest.raises(UserError, match=r"demo_finetune: 1 task\.train_steps for 2 task\.train_lengths\.$"):
        finetuning(LENGTHS, "task.train_steps=[4]")


# --- a user's own records


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Two prompts that read alike: in the first `_PAUSE_` is the meta-token, in the second it is text."""
    lines = [
        {"prompt": "the cat _PAUSE_ sat", "markers": [7], "completion": " hills"},
        {"prompt": "the cat _PAUSE_ sat", "completion": " river"},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def greedy(folder: Path, record: Encoded, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = torch.tensor([record.input_ids[: record.answer_start]])
    output = load_model(folder).eval().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(output[0, record.answer_start :], skip_special_tokens=True)


def test_own_records_are_learned_and_a_literal_marker_stays_text(
    model: Path, finetuning: Finetuning, records: Path, tmp_path: Path
) -> None:
    settings = ("training.max_steps=60", "training.learning_rate=0.02", "training.save_steps=60")
    finetune(finetuning(*settings), model, tmp_path / "run", data=records)
    tokenizer, folder = load_tokenizer(str(model)), tmp_path / "run" / "data"
    marked, literal = read_examples(records, tokenizer)
    assert [one.input_ids.count(tokenizer.meta_token_id) for one in (marked, literal)] == [1, 0]
    assert curve(folder)[-1]["loss"] < 0.1 * curve(folder)[0]["loss"]
    assert [greedy(folder, one, tokenizer) for one in (marked, literal)] == [" hills", " river"]


def test_a_run_on_own_records_resumes_and_is_bound_to_its_file(
    model: Path, finetuning: Finetuning, records: Path, steps: type, tmp_path: Path
) -> None:
    finetune(finetuning(), model, tmp_path / "undisturbed", data=records)
    run = partial(finetune, finetuning(), model, tmp_path / "run")
    interrupt(partial(run, data=records), steps, 3)
    moved = records.rename(tmp_path / "moved.jsonl")
    run(data=moved)
    before = result(tmp_path / "run")
    assert before == result(tmp_path / "undisturbed")
    assert training_of(tmp_path / "run" / "data") == {"seed": 0}
    moved.write_text('{"prompt": "another", "completion": " file"}\n')
    with pytest.raises(UserError, match="data_sha256 was"):
        run(data=moved)
    assert result(tmp_path / "run") == before


# --- what does not fit


def test_a_task_needs_a_meta_token_and_the_right_one(
    small_model: Models, finetuning: Finetuning, small_store: TokenStore, tmp_path: Path
) -> None:
    without = small_model(second_attention="none", meta_token_id=None)
    with pytest.raises(UserError, match="has no meta_token_id, which markers need"):
        finetune(finetuning(), without, tmp_path / "run", task="parity")
    another = small_model(meta_token_id=770)
    with pytest.raises(UserError, match="has meta_token_id 770, and its tokenizer's meta-token is 768"):
        finetune(finetuning(), another, tmp_path / "run", task="parity")
    assert not (tmp_path / "run").exists()
    padded = small_model(unpadded_vocab_size=769)
    tokenizer, model = load_tokenizer(str(padded)), load_model(padded)
    check_meta_token(model.config, tokenizer, padded)
    tokenizer.add_tokens(["another"])
    with pytest.raises(UserError, match=r"770 entries, and the model's unpadded_vocab_size is 769: call model\.resize"):
        check_meta_token(model.config, tokenizer, padded)
    model.resize_token_embeddings(len(tokenizer))
    check_meta_token(model.config, tokenizer, padded)


def test_lengths_beyond_learned_positions_are_refused_before_any_training(
    small_model: Models, finetuning: Finetuning, records: Path, tmp_path: Path
) -> None:
    short = small_model(position_embedding="learned", max_position_embeddings=80)
    with pytest.raises(UserError, match="a sequence of 128 tokens is longer than the 80 learned positions"):
        finetune(finetuning(LENGTHS), short, tmp_path / "run", task="parity")
    tiny = small_model(position_embedding="learned", max_position_embeddings=4)
    with pytest.raises(UserError, match="longer than the 4 learned positions"):
        finetune(finetuning(), tiny, tmp_path / "run", data=records)
    assert not (tmp_path / "run").exists()


def test_either_a_task_or_records(model: Path, finetuning: Finetuning, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a task or a file of records"):
        finetune(finetuning(), model, tmp_path / "run")
