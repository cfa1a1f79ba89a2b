"""Fine-tuning: what the loss is on, phases, a user's own records."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from metatokens.checkpoint import load_model
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import check_meta_token, load_tokenizer
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, Phase
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.example import Encoded, Example, read_examples
from metatokens.training.examples import ByLength, Collator, RecordExamples, TaskExamples
from metatokens.training.finetune import finetune
from metatokens.training.probe import Probe
from metatokens.training.run_folder import training_of
from tests.training.conftest import curve

META, END = 9, 0


def example(prompt: list[int], completion: list[int]) -> Example:
    """An example of which only the ids matter."""
    ids = (*prompt, *completion, END)
    return Example(prompt="", markers=(), completion="", input_ids=ids, answer_start=len(prompt), n_tokens=len(prompt))


# --- batches


SHORT, LONG = example([5, META, 6], [7]), example([5, META, 6, 4, META], [7, 8])


def test_loss_on_the_answer() -> None:
    batch = Collator(pad_token_id=END, meta_token_id=META, loss_on="answer")([SHORT, LONG])
    assert batch["input_ids"].tolist() == [[5, META, 6, 7, END, END, END, END], [5, META, 6, 4, META, 7, 8, END]]
    assert batch["labels"].tolist() == [
        [-100, -100, -100, 7, END, -100, -100, -100],
        [-100, -100, -100, -100, -100, 7, 8, END],
    ]


def test_loss_on_the_whole_sequence_asks_for_no_meta_token() -> None:
    batch = Collator(pad_token_id=END, meta_token_id=META, loss_on="sequence")([SHORT, LONG])
    assert batch["input_ids"].tolist() == [[5, META, 6, 7, END, END, END, END], [5, META, 6, 4, META, 7, 8, END]]
    assert batch["labels"].tolist() == [
        [-100, -100, 6, 7, END, -100, -100, -100],
        [-100, -100, 6, 4, -100, 7, 8, END],
    ]


def test_an_answer_that_begins_the_sequence_leaves_out_its_first_token() -> None:
    batch = Collator(pad_token_id=END, meta_token_id=META, loss_on="sequence")([example([], [7, 8])])
    assert batch["labels"].tolist() == [[-100, 8, END]]


def test_every_epoch_holds_every_record_once_in_an_order_of_its_own() -> None:
    records = [example([number], [1]) for number in range(20)]
    dataset = RecordExamples(records, seed=3, length=60)
    assert len(dataset) == 60
    epochs = [[dataset[epoch * 20 + place].input_ids[0] for place in range(20)] for epoch in range(3)]
    assert all(Counter(epoch) == Counter(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[2] == [RecordExamples(records, seed=3, length=60)[40 + place].input_ids[0] for place in range(20)]
    assert epochs[0] != [RecordExamples(records, seed=4, length=60)[place].input_ids[0] for place in range(20)]


def test_task_examples_begin_again_after_their_number(small_store: TokenStore) -> None:
    task = TaskData("parity", tokenizer=small_store.tokenizer)
    dataset = TaskExamples([task.train(index, 64) for index in range(3)], length=8)
    assert len(dataset) == 8
    assert [dataset[index] for index in range(8)] == [task.train(index % 3, 64) for index in range(8)]


@pytest.mark.parametrize("count", [1, 30, 64, 100])
def test_batches_hold_every_example_once_and_similar_lengths_together(count: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, size=count).tolist()
    examples = [example([5] * length, [7]) for length in lengths]
    dataset = ByLength(examples, batch=2, seed=0)
    order = [dataset[index].n_tokens for index in range(len(dataset))]
    assert Counter(order) == Counter(lengths)
    for start in range(0, count, 32):  # a window of 16 batches
        window = sorted(lengths[start : start + 32])
        pairs = [tuple(order[first : first + 2]) for first in range(start, min(start + 32, count), 2)]
        assert sorted(pairs) == [tuple(window[first : first + 2]) for first in range(0, len(window), 2)]
        assert len(pairs) < 3 or pairs != sorted(pairs)
    backwards = [dataset[index].n_tokens for index in reversed(range(count))]
    assert backwards[::-1] == order
    assert count < 30 or order != [ByLength(examples, batch=2, seed=1)[index].n_tokens for index in range(count)]


# --- phases


def test_each_train_length_goes_on_from_the_last_ones_model(
    model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path
) -> None:
    finetune(finetuning("task.train_lengths=[64, 128]"), model, tmp_path / "both", task="parity")
    finetune(finetuning(), model, tmp_path / "first", task="parity")
    finetune(finetuning("task.train_lengths=[128]"), tmp_path / "first" / "64", tmp_path / "second", task="parity")
    assert {path.name for path in (tmp_path / "both").iterdir()} == {
        "64",
        "128",
        "examples",
        "settings.json",
        ".lock",
    }
    for name in ("model.safetensors", "curve.jsonl", "config.json"):
        assert (tmp_path / "both" / "64" / name).read_bytes() == (tmp_path / "first" / "64" / name).read_bytes()
        assert (tmp_path / "both" / "128" / name).read_bytes() == (tmp_path / "second" / "128" / name).read_bytes()
    assert not list((tmp_path / "both").rglob("pytorch_model*"))


@pytest.mark.parametrize("cuts", [(3,), (4,), (7,), (2, 5, 7)])
def test_phases_that_were_cut_off_end_like_ones_that_were_not(
    cuts: tuple[int, ...],
    model: Path,
    finetuning: Callable[..., FinetuneRecipe],
    steps: type,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    recipe = finetuning("task.train_lengths=[64, 128]")
    finetune(recipe, model, tmp_path / "undisturbed", task="list_recall")
    for cut in cuts:
        with pytest.raises(KeyboardInterrupt):
            finetune(recipe, model, tmp_path / "run", task="list_recall", progress=steps(stop_at=cut))
    rest = steps()
    finetune(recipe, model, tmp_path / "run", task="list_recall", progress=rest)
    assert rest == list(range((cuts[-1] - 1) // 2 * 2 + 1, 9))
    ours, theirs = contents(tmp_path / "run"), contents(tmp_path / "undisturbed")
    kept = {path for path in theirs if "checkpoints" not in path}
    assert {path: ours[path] for path in kept} == {path: theirs[path] for path in kept}
    nothing = steps()
    finetune(recipe, model, tmp_path / "run", task="list_recall", progress=nothing)
    assert nothing == []


def test_a_model_is_probed_in_the_first_phase_and_learns_the_same(
    model: Path,
    finetuning: Callable[..., FinetuneRecipe],
    steps: type,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    recipe = finetuning("task.train_lengths=[64, 128]")

    def norm(model: torch.nn.Module) -> dict[str, float]:
        assert not model.training
        return {"norm": float(next(model.parameters()).detach().norm())}

    def probe(model: torch.nn.Module, phase: Phase) -> Probe | None:
        return Probe(2, norm) if phase.name == "64" else None

    finetune(recipe, model, tmp_path / "plain", task="parity")
    with pytest.raises(KeyboardInterrupt):
        finetune(recipe, model, tmp_path / "probed", task="parity", probe=probe, progress=steps(stop_at=3))
    finetune(recipe, model, tmp_path / "probed", task="parity", probe=probe)
    points = [point for point in curve(tmp_path / "probed" / "64") if "norm" in point]
    assert [point["step"] for point in points] == [2, 4]
    weights = load_model(tmp_path / "probed" / "64")
    assert points[1] == {"step": 4} | norm(weights.eval())
    assert points[0]["norm"] != points[1]["norm"]
    assert [point for point in curve(tmp_path / "probed" / "64") if "loss" in point] == curve(tmp_path / "plain" / "64")
    assert curve(tmp_path / "probed" / "128") == curve(tmp_path / "plain" / "128")
    ours, theirs = contents(tmp_path / "probed"), contents(tmp_path / "plain")
    assert {path: ours[path] for path in ours if path.endswith("model.safetensors") and "check" not in path} == {
        path: theirs[path] for path in theirs if path.endswith("model.safetensors") and "check" not in path
    }


@pytest.mark.parametrize(("batch", "pieces"), [(4, 1), (1, 4)])
def test_the_loss_is_the_mean_over_all_answer_tokens_of_a_step(
    batch: int,
    pieces: int,
    model: Path,
    finetuning: Callable[..., FinetuneRecipe],
    small_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Encoded] = []
    collate = Collator.__call__
    monkeypatch.setattr(Collator, "__call__", lambda self, rows: read.extend(rows) or collate(self, rows))
    sizes = (f"training.per_device_train_batch_size={batch}", f"training.gradient_accumulation_steps={pieces}")
    finetune(
        finetuning(*sizes), model, tmp_path / "run", task="copying", documents=small_corpus.read_text().split("\n\n")
    )
    exact, losses = load_model(model).double(), []
    for ids, start in ((list(row.input_ids), row.answer_start) for row in read[:4]):
        with torch.no_grad():
            log_probabilities = exact(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses.append([-log_probabilities[place - 1, ids[place]].item() for place in range(start, len(ids))])
    assert len({len(answer) for answer in losses}) > 1  # or a mean of the pieces' means would be the same
    assert curve(tmp_path / "run" / "64")[0]["loss"] == pytest.approx(np.mean(np.concatenate(losses)), rel=1e-5)


def test_loss_on_the_sequence_is_another_run(
    model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path
) -> None:
    finetune(finetuning(), model, tmp_path / "answer", task="parity")
    finetune(finetuning("task.loss_on=sequence"), model, tmp_path / "sequence", task="parity")
    answer, sequence = (curve(tmp_path / name / "64")[0]["loss"] for name in ("answer", "sequence"))
    assert answer != sequence
    with pytest.raises(UserError, match=r"recipe\.task\.loss_on was 'answer' and is now 'sequence'"):
        finetune(finetuning("task.loss_on=sequence"), model, tmp_path / "answer", task="parity")


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine of one core
def test_the_number_of_loading_workers_changes_nothing(
    model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path
) -> None:
    for workers in (0, 2):
        recipe = finetuning(f"training.dataloader_num_workers={workers}")
        finetune(recipe, model, tmp_path / str(workers), task="list_recall")
    weights = [(tmp_path / name / "64" / "model.safetensors").read_bytes() for name in ("0", "2")]
    assert weights[0] == weights[1]


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


def greedy(folder: Path, prompt: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    ids = torch.tensor([prompt])
    output = load_model(folder).eval().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)


def test_own_records_are_learned_and_a_literal_marker_stays_text(
    model: Path, finetuning: Callable[..., FinetuneRecipe], records: Path, tmp_path: Path
) -> None:
    settings = ("training.max_steps=60", "training.learning_rate=0.02", "training.save_steps=60")
    finetune(finetuning(*settings), model, tmp_path / "run", data=records)
    tokenizer = load_tokenizer(str(model))
    marked, literal = read_examples(records, tokenizer)
    assert marked.input_ids.count(tokenizer.meta_token_id) == 1
    assert literal.input_ids.count(tokenizer.meta_token_id) == 0
    folder = tmp_path / "run" / "data"
    assert curve(folder)[-1]["loss"] < 0.1 * curve(folder)[0]["loss"]
    assert greedy(folder, marked.input_ids[: marked.answer_start], tokenizer) == " hills"
    assert greedy(folder, literal.input_ids[: literal.answer_start], tokenizer) == " river"


def test_a_run_on_own_records_resumes_and_knows_its_file(
    model: Path,
    finetuning: Callable[..., FinetuneRecipe],
    records: Path,
    steps: type,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    finetune(finetuning(), model, tmp_path / "undisturbed", data=records)
    with pytest.raises(KeyboardInterrupt):
        finetune(finetuning(), model, tmp_path / "run", data=records, progress=steps(stop_at=3))
    moved = records.rename(tmp_path / "moved.jsonl")
    finetune(finetuning(), model, tmp_path / "run", data=moved)
    for name in ("model.safetensors", "curve.jsonl"):
        ours, theirs = ((tmp_path / run / "data" / name).read_bytes() for run in ("run", "undisturbed"))
        assert ours == theirs
    moved.write_text('{"prompt": "another", "completion": " file"}\n')
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="data_sha256 was"):
        finetune(finetuning(), model, tmp_path / "run", data=moved)
    assert contents(tmp_path / "run") == before


# --- what does not fit


def test_a_task_needs_a_meta_token_and_the_right_one(
    small_model: Callable[..., Path],
    finetuning: Callable[..., FinetuneRecipe],
    small_store: TokenStore,
    tmp_path: Path,
) -> None:
    without = small_model(second_attention="none", meta_token_id=None)
    with pytest.raises(UserError, match="has no meta_token_id, which markers need"):
        finetune(finetuning(), without, tmp_path / "run", task="parity")
    another = small_model(meta_token_id=770)
    with pytest.raises(UserError, match="has meta_token_id 770, and its tokenizer's meta-token is 768"):
        finetune(finetuning(), another, tmp_path / "run", task="parity")
    assert not (tmp_path / "run").exists()
    padded = small_model(unpadded_vocab_size=769)
    small_store.tokenizer.add_tokens(["another"])
    try:
        with pytest.raises(
            UserError, match=r"770 entries, and the model's unpadded_vocab_size is 769: call model\.resize"
        ):
            check_meta_token(load_model(padded).config, small_store.tokenizer, padded)
        model = load_model(padded)
        model.resize_token_embeddings(len(small_store.tokenizer))
        check_meta_token(model.config, small_store.tokenizer, padded)
    finally:
        del small_store.__dict__["tokenizer"]
    fitting = small_model()
    check_meta_token(load_model(fitting).config, small_store.tokenizer, fitting)


def test_lengths_beyond_learned_positions_are_refused_before_any_training(
    small_model: Callable[..., Path], finetuning: Callable[..., FinetuneRecipe], records: Path, tmp_path: Path
) -> None:
    short = small_model(position_embedding="learned", max_position_embeddings=80)
    with pytest.raises(UserError, match="a sequence of 128 tokens is longer than the 80 learned positions"):
        finetune(finetuning("task.train_lengths=[64, 128]"), short, tmp_path / "run", task="parity")
    tiny = small_model(position_embedding="learned", max_position_embeddings=4)
    with pytest.raises(UserError, match="longer than the 4 learned positions"):
        finetune(finetuning(), tiny, tmp_path / "run", data=records)
    assert not (tmp_path / "run").exists()


def test_either_a_task_or_records(model: Path, finetuning: Callable[..., FinetuneRecipe], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a task or a file of records"):
        finetune(finetuning(), model, tmp_path / "run")


# --- what a folder says about its training


def test_a_results_provenance_is_read_from_the_run(
    model: Path, finetuning: Callable[..., FinetuneRecipe], records: Path, tmp_path: Path
) -> None:
    recipe = finetuning("training.seed=7", "task.condition=decoy", "training.max_steps=1", "training.save_steps=1")
    finetune(recipe, model, tmp_path / "task", task="parity")
    finetune(recipe, model, tmp_path / "own", data=records)
    assert training_of(tmp_path / "task" / "64") == {"seed": 7, "train_condition": "decoy", "train_length": 64}
    assert training_of(tmp_path / "own" / "data") == {"seed": 7}
    assert training_of(model) == {}
    (model / "settings.json").write_text('{"recipe": {"training": {"seed": 4}}}')  # as pretraining leaves it
    assert training_of(model) == {"seed": 4}
    (model / "settings.json").unlink()
    shutil.move(tmp_path / "task" / "64", tmp_path / "task" / "best")
    assert training_of(tmp_path / "task" / "best")["train_length"] is None


@pytest.mark.parametrize("text", ["[]", "{", "3", '{"recipe": 3}', '{"recipe": {"training": {}}}'])
def test_other_settings_files_say_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(text)
    assert training_of(tmp_path / "model") == {}


def test_each_train_length_may_have_steps_of_its_own(
    model: Path, finetuning: Callable[..., FinetuneRecipe], steps: type, tmp_path: Path
) -> None:
    lengths = "task.train_lengths=[64, 128]"
    done = steps()
    finetune(finetuning(lengths, "task.train_steps=[4, 2]"), model, tmp_path / "own", task="parity", progress=done)
    assert done == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in curve(tmp_path / "own" / "128")] == [1, 2]
    finetune(finetuning(lengths), model, tmp_path / "same", task="parity")
    first, same = ((tmp_path / run / "64" / "model.safetensors").read_bytes() for run in ("own", "same"))
    assert first == same
    with pytest.raises(UserError, match=r"demo_finetune: 1 task\.train_steps for 2 task\.train_lengths\.$"):
        finetuning(lengths, "task.train_steps=[4]")
