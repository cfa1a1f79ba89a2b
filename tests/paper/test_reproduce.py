"""The whole plan: carried out, cut off and resumed."""

import json
import math
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from metatokens.analysis import rate_distortion
from metatokens.data.tokenizer import load_tokenizer, text_vocab_size
from metatokens.errors import UserError
from metatokens.paper import pools, presets, run
from metatokens.paper.frame import load
from metatokens.paper.runner import Outcome, Runner
from metatokens.paper.variants import TrainedModel
from metatokens.records import unpack_hits
from tests.paper import tiny_preset
from tests.paper.run_lines import assert_same_run, lines, records

STAGES = (
    "tokenize",
    "describe_tasks",
    "draw_tests-parity-paper",
    "draw_tests-parity-decoy",
    "pretrain-gpt2",
    "perplexity-gpt2",
    "finetune-gpt2-parity",
    "evaluate-gpt2-parity",
    "pretrain-meta",
    "perplexity-meta",
    "finetune-meta-parity",
    "evaluate-meta-parity",
)


@pytest.fixture
def started(monkeypatch):
    """The names of the stages that are started."""
    names: list[str] = []
    carry_out = Runner.carry_out

    def note(runner, stage, progress):
        names.append(stage.name)
        return carry_out(runner, stage, progress)

    monkeypatch.setattr(Runner, "carry_out", note)
    return names


# --- the files of a run


def test_the_result_lines(undisturbed):
    results = load([undisturbed]).read.results

    counts: Counter[tuple[Any, ...]] = Counter()
    for line in results:
        assert line.recipe == "tiny"
        if line.metric == "exact_match":
            assert (line.train_length, line.train_condition, line.chance) == (
                64,
                "paper",
                0.5,
            )
            counts[line.model, line.condition, line.length, line.n] += 1
    assert counts == dict.fromkeys(
        [
            *(
                ("gpt2", "paper", 64, 4),
                ("gpt2", "paper", 128, 3),
                ("gpt2", "decoy", 64, 4),
                ("gpt2", "decoy", 128, 3),
            ),
            *(
                ("meta", "paper", 64, 4),
                ("meta", "paper", 128, 3),
                ("meta", "decoy", 64, 4),
                ("meta", "decoy", 128, 3),
            ),
        ],
        1,
    )
    perplexities = [line for line in results if line.metric == "perplexity"]
    read_with = sorted((line.model, line.condition) for line in perplexities)
    assert read_with == [("gpt2", "none"), ("meta", "none"), ("meta", "uniform")]
    tokens_and_chance = {(line.n, line.chance) for line in perplexities}
    assert len(tokens_and_chance) == 1  # the same text tokens for all
    shortcuts = {line.model for line in results if line.metric == "shortcut"}
    assert "the XOR of all bits" in shortcuts


def test_the_caller_hears_of_each_task_that_is_done_while_another_is_left(
    reproduce, tiny, tmp_path
):
    tasks = ("list_recall", "parity")
    both = replace(
        tiny,
        models=tuple(TrainedModel(model=model, tasks=tasks) for model in ("gpt2", "meta")),
        finetune_recipes=dict.fromkeys(tasks, "demo_finetune"),
        inspections=(tiny_preset.text_covered(models=("meta",)),),
    )
    measured = []

    def look():
        results = load([tmp_path / "run"]).read.results
        accuracies = [line for line in results if line.metric == "exact_match"]
        measured.append({(line.model, line.task, line.intervention) for line in accuracies})

    reproduce(sizes=both, task_done=look)

    assert measured == [
        {
            ("gpt2", "list_recall", None),
            ("meta", "list_recall", None),
            ("meta", "list_recall", "landmarks_alone"),
        }
    ]


def test_the_curves_are_what_the_report_reads(undisturbed):
    curves = load([undisturbed]).curves.fillna({"train_length": 0})

    steps = curves.groupby(["model", "task", "train_length"])["step"].agg(list).to_dict()
    assert steps == {
        ("gpt2, tiny", "", 0): [1, 2, 3, 4],
        ("gpt2, tiny", "parity", 64): [1, 2, 3, 4],
        ("meta, tiny", "", 0): [1, 2, 3, 4],
        ("meta, tiny", "parity", 64): [1, 2, 3, 4],
    }


def test_the_curve_of_a_task_begins_with_its_curriculum(reproduce, tiny):
    curriculum = (
        "{lists: [3, 3], items: [6, 6], max_steps: 3}, {lists: [3, 4], items: [6, 7], max_steps: 2}"
    )
    overrides = (*tiny.finetune_overrides, f"task.stages=[{curriculum}]")

    sizes = replace(tiny, models=tiny.models[1:], finetune_overrides=overrides)

    out = reproduce(sizes=sizes)

    steps = [point.step for point in load([out]).read.points if point.task == "parity"]
    assert steps == list(range(1, 10))  # 3 and 2 of the curriculum, then 4


# --- cut off and resumed, in this process


def cut_off(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.quick(cut=[6])
@pytest.mark.parametrize("cut", range(0, len(STAGES), 3))
def test_stages_that_were_finished_are_not_repeated(
    cut,
    reproduce,
    started,
    undisturbed,
    tmp_path,
    monkeypatch,
):
    carry_out = Runner.carry_out

    def stop_at_cut(*arguments):
        return cut_off() if len(started) == cut else carry_out(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "carry_out", stop_at_cut)
        with pytest.raises(KeyboardInterrupt):
            reproduce()
    before = records(tmp_path / "run")
    assert len(before) == len(started) == cut

    out = reproduce()

    assert before.items() <= records(out).items()
    assert sorted(started) == sorted(records(out)) == sorted(STAGES)
    assert_same_run(out, undisturbed)


def test_a_finished_run_is_left_as_it_is(reproduce, copied, started, contents):
    before = contents(copied)

    reproduce()

    assert started == []
    assert contents(copied) == before


def test_a_run_cut_off_before_its_provenance_gets_it(reproduce, copied):
    (copied / "run.json").unlink()

    reproduce()

    [provenance] = load([copied]).read.runs
    names = {stage.name for stage in provenance.stages}
    assert names == set(STAGES)


def test_a_run_goes_on_from_its_records_alone(reproduce, undisturbed, copied, started):
    for folder in ("models", "tokens"):
        shutil.rmtree(copied / folder)
    for folder in ("models/meta/pretrained", "models/meta/parity", "tokens"):
        (copied / folder).mkdir(parents=True)  # as if cut off there, without a product
    *before, (last, _) = records(copied).items()
    assert last == "evaluate-meta-parity"  # so its result lines are the last ones too
    (copied / "stages.jsonl").write_text("".join(line + "\n" for _, line in before))

    reproduce()

    needed = ["tokenize", "pretrain-meta", "finetune-meta-parity", last]
    assert sorted(started) == sorted(needed)
    assert list(records(copied).items())[:-1] == before
    assert_same_run(copied, undisturbed)


def test_weights_that_come_out_otherwise_are_noticed(reproduce, copied, capsys):
    """Training again gives other weights than those that finished stages measured, as on another machine."""
    shutil.rmtree(copied / "models" / "gpt2")
    entries = {name: json.loads(line) for name, line in records(copied).items()}
    del entries["evaluate-gpt2-parity"]
    entries["pretrain-gpt2"]["facts"]["weights_sha256"] = "0"
    (copied / "stages.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in entries.values())
    )

    reproduce()

    said = [line for line in capsys.readouterr().err.splitlines() if "other weights" in line]
    assert said == ["pretrain-gpt2 gave other weights than those that finished stages measured."]


def test_lines_of_a_stage_that_was_cut_off_are_dropped(reproduce, undisturbed, copied):
    for name, rest in (
        ("results", '{"cut off": '),
        ("curves", '{"cut off": '),
        ("stages", '{"cut off": '),
        ("analysis", '{"whole": "not counted"}\n'),
    ):
        with (copied / f"{name}.jsonl").open("a") as file:
            file.write(rest)

    reproduce()

    assert lines(copied) == lines(undisturbed)
    assert records(copied) == records(undisturbed)


def test_a_finished_stage_with_other_settings_is_refused(reproduce, copied, tiny):
    before = records(copied)
    changed = replace(
        tiny,
        finetune_overrides=(*tiny.finetune_overrides, "training.learning_rate=0.5"),
    )

    with pytest.raises(
        UserError,
        match=r"finetune-gpt2-parity with other settings \(recipe.training.learning_rate w",
    ):
        reproduce(sizes=changed)

    assert records(copied) == before


def test_a_longer_plan_goes_on(reproduce, copied, tiny, started):
    pause = TrainedModel(model="pause", tasks=("parity",))

    reproduce(sizes=replace(tiny, models=(*tiny.models, pause)))

    assert set(started) == {
        "pretrain-pause",
        "perplexity-pause",
        "finetune-pause-parity",
        "evaluate-pause-parity",
    }


def test_result_lines_that_are_lost_are_noticed(reproduce, copied):
    (copied / "results.jsonl").write_text("")

    with pytest.raises(UserError, match=r"results.jsonl has fewer lines than stages.jsonl counts"):
        reproduce()


def test_one_tables_part(reproduce):
    out = reproduce(only="perplexity")

    finished = {
        "tokenize",
        "pretrain-gpt2",
        "perplexity-gpt2",
        "pretrain-meta",
        "perplexity-meta",
    }
    assert set(records(out)) == finished
    assert run.unfinished("tiny", out, only="perplexity") == []
    unfinished = {stage.name for stage in run.unfinished("tiny", out)}
    assert unfinished == set(STAGES) - finished


@pytest.mark.usefixtures("reproduce")  # for stages in this process
def test_the_command_reads_another_book(tiny, small_corpus, tmp_path, metatokens, monkeypatch):
    monkeypatch.setattr(presets, "PRESETS", {"tiny": tiny})
    options = f"--book {small_corpus} --only perplexity --workers 1 --out {tmp_path}/run"

    status, _, error = metatokens(f"reproduce --preset tiny {options}")

    assert status == 0, error
    inputs = load([tmp_path / "run"])
    assert {line.text for line in inputs.read.results} == {"held_out", "book"}
    again = f"metatokens reproduce --preset tiny --out run --book {small_corpus}"
    assert inputs.read.runs[0].command == again


@pytest.fixture
def wide(reproduce, small_corpus, monkeypatch):
    """A run with every kind of stage."""
    monkeypatch.setattr(rate_distortion, "BETAS", (0.1,))  # three bottlenecks are trained for each
    return reproduce(sizes=tiny_preset.wide(str(small_corpus)))


def accuracies_by(field, results):
    """The lines of exact matches by one of their fields."""
    groups = defaultdict(list)
    for line in results:
        if line.metric == "exact_match":
            groups[getattr(line, field)].append(line)
    return groups


def test_every_kind_of_stage(wide):
    inputs = load([wide])
    results = inputs.read.results
    by_recipe, by_change = (
        accuracies_by("recipe", results),
        accuracies_by("intervention", results),
    )

    extended = {(line.train_length, line.length, line.n) for line in by_recipe["tiny/yarn"]}
    assert extended == {(128, 64, 4), (128, 128, 3)}
    texts = {line.text for line in results if line.metric == "perplexity"}
    assert texts == {
        "held_out",
        "book",
    }

    assert [line.n for line in by_change["noise:1"]] == [4]
    assert [line.n for line in by_change["no_pos"]] == [4]

    through_landmarks = by_change["landmarks_alone"]
    recipes = sorted(line.recipe for line in through_landmarks)
    assert recipes == ["tiny", "tiny/alone"]
    interventions = [line.intervention for line in by_recipe["tiny/alone"]]
    assert interventions == ["landmarks_alone"]
    for line in through_landmarks:
        assert 0 < line.kv_kept < 0.5

    [shown] = (example for example in inputs.read.examples if example.task == "parity")
    answered = [line for line in results if line.answer is not None]
    interventions = {line.intervention for line in answered}
    assert interventions == {None, "landmarks_alone"}
    for line in answered:
        is_first_right = unpack_hits(line.hits, line.n)[0]
        assert (line.condition, line.length) == ("paper", 64)
        assert (line.answer == shown.completion) == is_first_right

    analyses = {(line.analysis, line.intervention) for line in inputs.read.measurements}
    assert analyses == {
        ("sharpness", None),
        ("residual", None),
        ("rate_distortion", None),
        ("rate_distortion", "no_pos"),
    }
    probed = [
        (point.step, point.n) for point in inputs.read.points if point.exact_match is not None
    ]
    assert probed == [(2, 4), (4, 4)] * 3

    page = wide / "looks" / "parity.html"
    assert "<title>Inside meta and meta-yarn</title>" in page.read_text(encoding="utf-8")
    assert inputs.read.looks == {"parity": page}


@pytest.fixture
def published(undisturbed, tmp_path):
    """The folder of a GPT-Neo with the tokenizer of the tiny preset."""
    tokenizer = load_tokenizer(str(undisturbed / "tokens" / "tokenizer"))
    attention_types = [[["global"], 1]]
    config = GPTNeoConfig(
        hidden_size=16,
        num_heads=2,
        num_layers=1,
        attention_types=attention_types,
        vocab_size=text_vocab_size(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / "neo")
    tokenizer.save_pretrained(tmp_path / "neo")
    return tmp_path / "neo"


def test_a_published_model_in_place_of_a_pretrained_one(reproduce, tiny, published):
    neo = TrainedModel(
        model="gpt-neo",
        position_embedding="learned",
        tasks=("parity",),
        published=str(published),
        pretrain_overrides=(
            "model.architecture=gpt_neo",
            "model.second_attention=none",
        ),
        finetune_overrides=("training.train_base=true",),
    )
    sizes = replace(tiny, models=(neo,))

    out = reproduce(sizes=sizes)

    inputs = load([out])
    [described] = inputs.read.runs[0].models.values()
    base = GPTNeoForCausalLM.from_pretrained(published)
    # The meta-token's own row is outside the table.
    rows = 64 * math.ceil((base.config.vocab_size + 1) / 64) + 1
    assert described.parameters == base.num_parameters() + (rows - base.config.vocab_size) * 16
    assert described.description == f"{published}, as published"
    measured = {(line.model, line.metric, line.task) for line in inputs.read.results}
    assert {
        ("gpt-neo", "perplexity", None),
        ("gpt-neo", "exact_match", "parity"),
    } <= measured

    shutil.rmtree(out)
    with pytest.raises(UserError, match="neo and the token store"):
        reproduce(sizes=replace(sizes, tokenizer="train:600"))


def test_another_preset_is_refused_and_overwriting_replaces(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_carry_out", cut_off)
    settings = tmp_path / "run" / "settings.json"
    with pytest.raises(KeyboardInterrupt):
        reproduce()
    before = settings.read_bytes()

    with pytest.raises(UserError, match="preset was 'tiny' and is now 'other'"):
        reproduce("other")
    assert settings.read_bytes() == before

    with pytest.raises(KeyboardInterrupt):
        reproduce("other", overwrite=True)
    assert json.loads(settings.read_text())["preset"] == "other"


def test_a_text_that_has_changed_since_is_refused(reproduce, small_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_carry_out", cut_off)
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(small_corpus, corpus)
    size = corpus.stat().st_size
    with pytest.raises(KeyboardInterrupt):
        reproduce(corpus=str(corpus))

    with corpus.open("a", encoding="utf-8") as file:
        file.write('{"text": "more"}\n')

    with pytest.raises(UserError, match=f"text_bytes was {size} and is now {size + 17}"):
        reproduce(corpus=str(corpus))


def test_overwriting_keeps_the_corpus(reproduce, small_corpus, tmp_path):
    corpus = tmp_path / "run" / "corpus.jsonl"
    corpus.parent.mkdir()
    shutil.copy(small_corpus, corpus)

    with pytest.raises(UserError, match=r"--overwrite would remove .*corpus\.jsonl"):
        reproduce(corpus=f"{tmp_path}/run/*.jsonl", overwrite=True)

    assert corpus.exists()


def test_what_is_done_stays_when_the_next_stage_fails(
    reproduce, undisturbed, tmp_path, monkeypatch
):
    tokenized = json.loads(records(undisturbed)["tokenize"])
    done = Outcome(facts=tokenized["facts"])

    def fail_after_one(pool):
        yield next(iter(pool._running.values())), done
        if len(pool._running) > 1:
            raise UserError("the disk is full.")
        pool._running.clear()

    monkeypatch.setattr(pools, "_work", lambda *_: done)
    monkeypatch.setattr(pools.ProcessPool, "finished", fail_after_one)

    with pytest.raises(UserError, match="the disk is full"):
        reproduce(workers=2)

    assert len(records(tmp_path / "run")) == 2  # tokenize, and the first of two
