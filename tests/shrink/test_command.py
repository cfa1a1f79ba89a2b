"""`metatokens shrink` from end to end: what it leaves, how it goes on, and what it refuses."""

import json
import re
import shutil
from collections import Counter
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from metatokens.recipe import ShrinkRecipe, load_recipe
from metatokens.shrink import shrinking, texts
from metatokens.shrink.choosing import loss_without
from metatokens.training.run_folder import training_of
from tests.shrink.small import BLOCKS, HEAD_SIZE, KEY_HEADS, LONGEST, write_documents

RECIPE = f"""
cache: {{length: 128}}
mixture: {{tokens: 256, longest: 256, replies: 4}}
tests: {{texts: {{{LONGEST}: 2}}, excerpts: 3, replies: 2, choosing: 1, cost_lengths: [200]}}
training: {{max_steps: 3, save_steps: 1, warmup_steps: 1, learning_rate: 0.01, lora_rank: 2,
  per_device_train_batch_size: 1}}
"""
STEPS = (
    "train",
    "Measuring",
    "costs",
    "loss_without",
    "draw_replies",
)  # of a run, by their names
WINDOW, WINDOW_ALONE = (
    28,
    60,
)  # of half of 128 tokens, besides 4 sinks, with 2 full heads of 6 or none
NEW_KINDS = ("statement", "question", "keys", "several", "chat")
WEIGHTS = "model/model.safetensors"
QUESTION = {"prompt": "The word is bird. What is the word?", "completion": " bird"}
FORMS = 'train: {keys: [{state: " {name}!", ask: "\\nWho?", answer: " {name}"}]}'
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe of three steps."""
    file = tmp_path_factory.mktemp("recipe") / "small.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture(scope="module")
def line(base, corpus, recipe):
    """A command line without controls, to which `--out` is added."""
    return f"shrink --model {base} --text {corpus} --recipe {recipe} --no-controls --keep 1/2"


@pytest.fixture(scope="module")
def call(base, corpus, recipe):
    """Does in Python what that line does."""
    settings = load_recipe(ShrinkRecipe, str(recipe), ["cache.keep=0.5"])

    def shrink(out, **options):
        shrinking.shrink(settings, base, [str(corpus)], out, controls=False, **options)

    return shrink


@pytest.fixture(scope="module")
def finished(call, tmp_path_factory):
    """The folder of such a run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    call(out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.fixture
def no_step(monkeypatch):
    """Has every step of a run fail."""
    for name in STEPS:
        monkeypatch.setattr(shrinking, name, None)  # a call would end in a TypeError


def succeed(metatokens, line):
    """Run a line to its end: its standard error."""
    status, output, error = metatokens(line)
    assert (status, output) == (0, ""), error
    return error


def figures_of(out, name="shrunk"):
    """The results of a model, without the time at which they were measured."""
    lines = (out / f"results/{name}.jsonl").read_text().splitlines()
    return [json.loads(line) | {"created": None} for line in lines]


def window_of(folder):
    """The window and the full heads in a model's configuration, those of full blocks among them."""
    fields = json.loads((folder / "config.json").read_text())["meta_attention"]
    of_blocks = product(fields["text_full_layers"] or (), range(KEY_HEADS))
    return fields["text_window"], sorted(
        map(list, [*of_blocks, *(fields["text_full_heads"] or ())])
    )


def test_a_run_leaves_a_model_that_forgets(finished):
    losses = json.loads((finished / "heads.json").read_text())[1:]  # the first is of none
    full_heads = [loss["head"] for loss in sorted(losses, key=lambda loss: loss["loss"])[-2:]]
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    assert model.config.use_cache
    ids = torch.arange(200)[None]

    output = model.generate(
        ids, max_new_tokens=5, eos_token_id=None, do_sample=False, return_dict_in_generate=True
    )

    assert window_of(finished / "model") == (WINDOW, sorted(full_heads))
    assert output.sequences.shape[1] == 205
    held = Counter()
    for layer in output.past_key_values.layers:
        _, heads, entries, size = layer.keys.shape
        if size == HEAD_SIZE:  # of notes it is 1
            held[entries] += heads
    assert held.pop(204) == 2
    assert sum(held.values()) == BLOCKS * KEY_HEADS - 2
    assert max(held) < 2 * WINDOW


def test_the_page_has_the_figures_of_the_results(finished):
    page = (finished / "page.html").read_text()
    counts, shares = [], []
    for name in ("full-cache-as-it-was", "shrunk"):
        lines = [line for line in figures_of(finished, name) if line["metric"] == "exact_match"]
        assert {line["task"] for line in lines} == {*NEW_KINDS, "trained form", "passage"}
        new = [line for line in lines if line["task"] in NEW_KINDS]
        hits = sum(round(line["value"] * line["n"]) for line in new)
        n = sum(line["n"] for line in new)
        low, high = binomtest(hits, n).proportion_ci(method="wilson")
        counts.append(f"<td>{100 * hits / n:.0f} ({100 * low:.0f} to {100 * high:.0f})</td>")
        share = np.mean([line.get("kv_kept", 1) for line in lines])
        shares.append(f"<td>{100 * share:.1f}</td>")
    assert f"<td>all look-ups of forms without training ({n})</td>{''.join(counts)}" in page
    assert f"<td>kept, %</td>{''.join(shares)}" in page
    for cost in json.loads((finished / "costs.json").read_text()):
        assert f"<td>{cost['cache']}</td><td>{cost['cache_bytes'] / 1e6:.1f}</td>" in page


@pytest.mark.usefixtures("no_step")
def test_a_finished_run_does_no_step_again(copy, line, metatokens, contents):
    before = contents(copy)
    told = succeed(metatokens, f"{line.replace('1/2', '0.5')} --out {copy}")
    heads_and_window, steps, chosen, summary, *paths = told.splitlines()
    head = r"\d\.\d \(\d+\.\d\d\)"
    assert heads_and_window == (
        f"2 of {BLOCKS * KEY_HEADS} key-value heads will keep all text, the others the last {WINDOW} tokens."
    )
    assert steps.startswith("Steps: choose the heads, train (in ")
    assert steps.endswith(f"), test in texts of {LONGEST} tokens, write the page.")
    assert re.fullmatch(
        rf"full heads, with the nats .* forgets: {head}, {head}; \d+\.\d\d if none does", chosen
    )
    assert summary in (copy / "page.html").read_text()
    assert summary.startswith(f"In texts of {LONGEST} tokens the cache keeps ")
    assert paths == [f"model: {copy}/model", f"page: {copy}/page.html"]
    assert contents(copy) | {"page.html": before["page.html"]} == before


@pytest.mark.usefixtures("no_step")
def test_a_run_says_what_it_does_not_read_and_what_needs_memory(call, tmp_path, monkeypatch):
    records = [QUESTION | {"prompt": f"{'A bird. ' * 99}{number}?"} for number in range(10)]
    questions = tmp_path / "long.jsonl"
    questions.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    monkeypatch.setattr(texts, "MOST_CHARACTERS", 40_000)
    monkeypatch.setattr(shrinking, "MOST_CHARACTERS", 40_000)
    told = []

    def tell(lines: str) -> None:
        told.extend(lines.splitlines())

    with pytest.raises(TypeError):
        call(tmp_path / "run", questions=questions, tell=tell)

    line_on_text, line_on_record = told[2:]
    assert line_on_text == (
        "The text is longer than 40,000 characters: what comes after them is not read."
    )
    assert re.fullmatch(
        r"A record of --questions has 4\d\d tokens, and other texts of the training at most 256: .* more memory\.",
        line_on_record,
    )


def test_controls_are_added_to_a_run(copy, line, metatokens, contents):
    before = contents(copy)
    succeed(metatokens, f"{line} --controls --out {copy}")
    after = contents(copy)
    assert {name for name in before if after[name] != before[name]} == {"page.html"}
    assert window_of(copy / "full") == (None, [])
    assert window_of(copy / "window") == (WINDOW_ALONE, [])
    assert training_of(copy / "window") == {"seed": 0}
    page = after["page.html"].decode()
    assert "a window alone, trained alike" in page
    assert "full cache, trained alike: " in page


def test_further_lengths_are_measured_for_their_cost(copy, line, metatokens):
    [full, shrunk] = json.loads((copy / "costs.json").read_text())
    succeed(metatokens, f"{line} --out {copy} --set tests.cost_lengths=[200,100]")
    costs = json.loads((copy / "costs.json").read_text())
    assert [(cost["length"], cost["cache"]) for cost in costs[:2]] == [
        (100, "full"),
        (100, "shrunk"),
    ]
    assert costs[2:] == [full, shrunk]


def test_a_run_without_lengths_for_the_cost_has_a_page(line, tmp_path, metatokens):
    succeed(metatokens, f"{line} --out {tmp_path / 'run'} --set tests.cost_lengths=[]")
    assert "What it saves" not in (tmp_path / "run/page.html").read_text()


def test_a_run_has_one_precision(line, tmp_path, metatokens, monkeypatch):
    """Another machine may have another default, and the same folder then needs the setting."""
    monkeypatch.setattr(shrinking, "has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(shrinking, "loss_without", None)  # it ends with a TypeError
    with pytest.raises(TypeError):
        metatokens(f"{line} --out {tmp_path / 'run'}")
    monkeypatch.setattr(shrinking, "has_fast_bfloat16", lambda: True)
    assert "bf16 was False and is now True" in refused(
        metatokens, f"{line} --out {tmp_path / 'run'}"
    )
    with pytest.raises(TypeError):
        metatokens(f"{line} --out {tmp_path / 'run'} --set training.bf16=false")


def test_a_run_that_was_killed_in_its_training_goes_on(copy, finished, line, metatokens):
    shutil.rmtree(copy / "model/checkpoints/checkpoint-3")
    for name in ("model/manifest.json", WEIGHTS, "results/shrunk.jsonl", "costs.json"):
        (copy / name).unlink()

    succeed(metatokens, f"{line} --out {copy}")

    assert (copy / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    assert figures_of(copy) == figures_of(finished)
    assert (copy / "costs.json").exists()


def test_a_run_that_is_interrupted_in_each_step_goes_on(finished, call, tmp_path, monkeypatch):
    out = tmp_path / "run"
    interrupted = set()
    measured = []

    def measure_once(head, *arguments):
        measured.append(head)
        return loss_without(head, *arguments)

    monkeypatch.setattr(shrinking, "loss_without", measure_once)

    @contextmanager
    def interrupt_once(step):
        def progress(done, total, figures):
            if step not in interrupted:
                interrupted.add(step)
                raise KeyboardInterrupt

        yield progress

    for _ in range(7):
        with pytest.raises(KeyboardInterrupt):
            call(out, watch=interrupt_once)
    call(out, watch=interrupt_once)

    assert {
        "choose heads",
        "ask the base: train",
        "train: shrunk",
        "memory and speed",
    } < interrupted
    assert measured == [None, *product(range(BLOCKS), range(KEY_HEADS))]
    assert (out / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    assert figures_of(out) == figures_of(finished)


def test_progress_counts_each_result_once(call, tmp_path):
    counted = []

    @contextmanager
    def watch(step):
        yield lambda done, total, figures: counted.append((step, done, total))

    call(tmp_path / "run", watch=watch)

    of_base = [numbers for step, *numbers in counted if step == "measure: full cache, as it was"]
    assert of_base == [[done, len(of_base)] for done in range(1, len(of_base) + 1)]


def test_forms_and_questions_of_a_user_reach_the_run(line, tmp_path, metatokens):
    forms, questions, out = (tmp_path / name for name in ("forms.yaml", "own.jsonl", "run"))
    forms.write_text(FORMS)
    records = [QUESTION | {"prompt": f"The word is bird. {number}?"} for number in range(23)]
    # One that comes twice is either trained on or measured on.
    questions.write_text("".join(f"{json.dumps(record)}\n" for record in records * 2))

    succeed(metatokens, f"{line} --out {out} --forms {forms} --questions {questions}")

    assert " {name}!" in (out / "settings.json").read_text()
    figures = figures_of(out)
    assert [line["n"] for line in figures if line.get("task") == "own"] == [2]  # every tenth
    assert "Your own 2 held-out questions" in (out / "page.html").read_text()


def test_an_answer_to_a_users_question_ends_where_the_record_does(
    line, base, tmp_path, metatokens, monkeypatch
):
    """As `metatokens evaluate` has it: what goes on after the answer is wrong."""
    (tmp_path / "own.jsonl").write_text(
        "".join(
            f"{json.dumps(QUESTION | {'prompt': f'A bird. {number}?'})}\n" for number in range(10)
        )
    )
    tested = []

    def draw(*arguments, user_questions, **options):
        tested.extend(user_questions)
        raise RuntimeError

    monkeypatch.setattr(shrinking, "draw_tests", draw)
    with pytest.raises(RuntimeError):
        metatokens(f"{line} --out {tmp_path / 'run'} --questions {tmp_path / 'own.jsonl'}")

    tokenizer = AutoTokenizer.from_pretrained(base)
    (asked,) = tested
    (question,) = asked.questions
    assert tokenizer.decode(question.answer) == f" bird{tokenizer.eos_token}"


def test_a_model_in_half_precision_is_trained_and_measured_in_single(
    base, line, tmp_path, metatokens
):
    """Where a machine does not compute in bfloat16 quickly."""
    half = tmp_path / "half"
    shutil.copytree(base, half)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)

    error = succeed(
        metatokens,
        f"{line.replace(str(base), str(half))} --out {tmp_path / 'run'} --set training.bf16=false",
    )

    assert "train (in float32)" in error
    weights = load_file(tmp_path / "run" / WEIGHTS)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_landmarks_and_heads_of_a_user_leave_less_for_the_window(
    line, documents, base, tmp_path, metatokens
):
    out = tmp_path / "run"

    succeed(metatokens, f"{line} --out {out} --full-heads 2.1,0.0 --landmarks sentence")

    assert not (out / "heads.json").exists()
    window, heads = window_of(out / "model")
    assert heads == [[0, 0], [2, 1]]
    landmarks = sum(document.count(".") for document in documents)
    tokens = len(AutoTokenizer.from_pretrained(base)("\n\n".join(documents)).input_ids)
    share = 1 / 3 + landmarks / tokens + 2 / 3 * (window + 4) / 128
    assert 0.5 - 1 / 128 < share < 0.5 + 0.01


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT sets it itself for GPT-2
def test_positions_that_a_model_lacks_are_not_measured(base, line, tmp_path, metatokens):
    tokens = json.loads((base / "config.json").read_text())["vocab_size"]
    shutil.copytree(base, tmp_path / "learned")
    learned = GPT2Config(vocab_size=tokens, n_positions=900, n_embd=32, n_layer=BLOCKS, n_head=4)
    GPT2LMHeadModel(learned).save_pretrained(tmp_path / "learned")
    options = f"--model {tmp_path}/learned --set tests.cost_lengths=[200,900] --out {tmp_path}/run"

    succeed(metatokens, f"{line} {options} --set training.max_steps=1")

    measured = json.loads((tmp_path / "run/costs.json").read_text())
    assert {cost["length"] for cost in measured} == {200}


@pytest.mark.usefixtures("no_step")
def test_full_heads_leave_room_for_a_window(line, tmp_path, metatokens):
    for keep in ("0.4", "1/2", "2/3", "0.9"):  # of 6 heads
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # the first step
            metatokens(f"{line} --keep {keep} --out {tmp_path}/{keep.replace('/', '-')}")


MISTAKES = {
    "--keep 1": "cache.keep: Input should be less than 1",
    "--keep x": "--keep 'x' is no share: give one such as 1/8 or 0.125",
    "--keep 1/0": "--keep '1/0' is no share",
    "--keep 1/8": "has no room for a window if 1 of 6 heads are full",
    "--full-heads 0.0,1.0,2.1": "has no room for a window if 3 of 6 heads are full",
    "--set cache.number_of_full_heads=6": "6 heads are to be full, and the model has 6",
    "--set cache.window=16 --set cache.number_of_full_heads=2": "--keep and cache.window both say",
    "--full-heads 3.0": "text_full_heads is [[3, 0]]; give different pairs of a block, 0 to 2",
    "--full-heads 1.2": "text_full_heads has head 2 of block 1, which has 2 key-value heads",
    "--full-heads 1.1,1.1": "give different pairs of a block",
    "--full-heads 18": "--full-heads '18' names no heads: give some such as 18.2,23.0",
    "--landmarks page": "'page' is no rule for landmarks",
    "--set training.per_device_train_batch_size=2": "mixture.tokens decides the size of a batch",
    "--set training.gradient_accumulation_steps=2": "mixture.tokens decides the size of a batch",
    "--full-heads 1.1 --set cache.number_of_full_heads=1": "number_of_full_heads exclude each other",
    "--set cache.window=9": "cache.window decides no number of full heads",
    "--set training.text_window=8": "cache.keep decides the window",
    "--set 'tests.texts={2000: 1, 40: 1}'": "no length of tests.texts is between 118 and 1,024 tokens",
    "--keep 0.95 --set cache.length=1024": "reaches over most of the 512 tokens that a text of the training may have",
    "--text nowhere.txt": "nowhere.txt",
    "--questions nowhere.jsonl": "nowhere.jsonl",
    "--questions empty.jsonl": "empty.jsonl holds no record",
    "--questions few.jsonl": "few.jsonl has 9 different records, and every tenth is held out: give at least 10",
    "--model without-start --questions bare.jsonl": "bare.jsonl has a prompt of a single token",
    "--questions long.jsonl": "long.jsonl has a record of 2,0",
    "--questions few.jsonl --landmarks sentence": "cache.landmarks and --questions do not go together",
    "--set 'tests.texts={200: 1}'": "a test of 200 tokens has no room for 6 facts of the kind",
    "--set training.lora_rank=0": "shrink trains adapters of the model",
    "--set training.position_jumps=64": "training.position_jumps and eval_steps are not for shrink",
    "--forms record.yaml": "a fact of the form ' {name} has word word",
    "--forms nowhere.yaml": "nowhere.yaml holds no forms of look-ups",
    "--model nowhere": "there is no folder nowhere",
    "--model sliding": "some of its blocks have a sliding window of their own",
}


@pytest.fixture(scope="module")
def ground(base, tmp_path_factory):
    """A folder with what cannot be used."""
    folder = tmp_path_factory.mktemp("ground")
    (folder / "empty.jsonl").touch()
    few = [QUESTION | {"prompt": f"The word is bird. {number}?"} for number in range(9)]
    (folder / "few.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in few))
    record = f" {{name}} has {'word ' * 100}{{word}}."
    form = {"state": record, "ask": "\n{name} has", "answer": " {word}"}
    (folder / "record.yaml").write_text(json.dumps({"train": {"keys": [form]}}))
    bare = [QUESTION | {"prompt": letter} for letter in "ABCDEFGHIJ"]
    (folder / "bare.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in bare))
    shutil.copytree(base, folder / "without-start")
    tokenizer = json.loads((base / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "without-start" / "tokenizer.json").write_text(json.dumps(tokenizer))
    long = [QUESTION | {"prompt": "A bird. " * (500 + number)} for number in range(10)]
    (folder / "long.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in long))
    shutil.copytree(base, folder / "sliding")
    settings = json.loads((base / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: settings[name] for name in names}
    MistralForCausalLM(
        MistralConfig(**sizes, num_hidden_layers=2, sliding_window=8)
    ).save_pretrained(folder / "sliding")
    return folder


def refused(metatokens, line):
    """The one sentence with which a line ends."""
    status, output, error = metatokens(line)
    assert (status, output, error.count("\n")) == (2, "", 1), error
    assert error.startswith("metatokens: ")
    assert error.endswith(".\n")
    return error


@pytest.mark.parametrize(("options", "words"), MISTAKES.items(), ids=[*MISTAKES])
def test_a_mistake_is_one_sentence_before_anything_is_written(
    options,
    words,
    ground,
    line,
    tmp_path,
    metatokens,
    monkeypatch,
):
    monkeypatch.chdir(ground)
    assert words in refused(metatokens, f"{line} --out {tmp_path}/new {options}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["heads.json", "replies.json", "costs.json"])
@pytest.mark.parametrize("content", ["[{", '{"other": 1}', '[{"head": 1}]'])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_damaged_file_of_a_run_is_named(file, content, is_trained, copy, line, metatokens):
    (copy / file).write_text(content)
    (copy / "results/shrunk.jsonl").unlink()  # so that the replies are read
    if not is_trained:
        shutil.rmtree(copy / "model")

    status, _, error = metatokens(f"{line} --out {copy}")

    if is_trained and file != "costs.json":
        assert f"{copy / file} is missing, incomplete or damaged, and the model in" in error
    else:
        assert f"{copy / file} is damaged: remove it, and give the same command again." in error
    assert status == 2


@pytest.mark.parametrize("file", ["heads.json", "replies.json"])
def test_what_a_training_has_used_is_not_made_anew(file, copy, line, metatokens):
    """Another model of the run would be trained on others."""
    (copy / file).unlink()

    status, _, error = metatokens(f"{line} --out {copy}")

    assert (
        f"{copy / file} is missing, incomplete or damaged, and the model in this run was" in error
    )
    assert status == 2


def test_a_run_that_cannot_measure_costs_has_all_else(copy, line, metatokens, monkeypatch):
    """As where the full cache of a long text needs more memory than there is."""
    (copy / "costs.json").unlink()
    (copy / "results/full-cache-as-it-was.jsonl").unlink()

    def without_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(shrinking, "costs", without_memory)
    with pytest.raises(MemoryError):
        metatokens(f"{line} --out {copy}")

    assert (copy / "results/full-cache-as-it-was.jsonl").exists()
    assert "What it saves" not in (copy / "page.html").read_text()


def test_costs_that_are_missing_are_measured(copy, line, metatokens):
    (copy / "costs.json").unlink()

    succeed(metatokens, f"{line} --out {copy}")

    assert [cost["length"] for cost in json.loads((copy / "costs.json").read_text())] == [200, 200]


def test_a_damaged_model_is_trained_again(copy, finished, line, metatokens):
    weights = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(weights[:-4] + b"\0\0\0\1")

    succeed(metatokens, f"{line} --out {copy}")

    assert (copy / WEIGHTS).read_bytes() == weights


def test_another_model_or_other_questions_are_another_run(base, copy, line, tmp_path, metatokens):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "other")
    other = line.replace(f"--model {base}", f"--model {tmp_path / 'other'}")
    assert "(model_sha256 was " in refused(metatokens, f"{other} --out {copy}")

    records = [QUESTION | {"prompt": f"The word is bird. {number}?"} for number in range(10)]
    questions = tmp_path / "own.jsonl"
    questions.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with_questions = f"{line} --questions {questions} --out {copy}"
    assert "(questions_sha256 was None" in refused(metatokens, with_questions)


@pytest.mark.parametrize(
    ("option", "file"),
    [
        ("--text '{folder}/tex*.jsonl'", "text.jsonl"),
        ("--model {folder}/base", "base"),
        ("--forms {folder}/forms.yaml", "forms.yaml"),
        ("--questions {folder}/questions.jsonl", "questions.jsonl"),
    ],
)
def test_overwriting_keeps_what_the_run_reads(
    option, file, base, copy, documents, line, metatokens, contents
):
    write_documents(copy / "text.jsonl", documents)
    shutil.copytree(base, copy / "base")
    (copy / "forms.yaml").write_text(FORMS)
    records = [QUESTION | {"prompt": f"The word is bird. {number}?"} for number in range(10)]
    (copy / "questions.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    before = contents(copy)

    error = refused(metatokens, f"{line} --out {copy} --overwrite {option.format(folder=copy)}")

    assert f"--overwrite would remove {copy / file}, which this run reads" in error
    assert contents(copy) == before


@pytest.mark.usefixtures("no_step")
def test_a_short_text_is_refused_and_more_is_taken(line, corpus, documents, tmp_path, metatokens):
    short = write_documents(tmp_path / "short.jsonl", documents[:20])
    line_of_short = f"{line.replace(str(corpus), str(short))} --out {tmp_path}/run"
    assert "give more text with --text" in refused(metatokens, line_of_short)
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # the first step
        metatokens(f"{line_of_short} --text {corpus}")


def test_another_run_is_kept(copy, line, metatokens, contents):
    before = contents(copy)
    error = refused(metatokens, f"{line} --keep 0.6 --out {copy}")
    assert "holds a run with other settings (recipe.cache.keep was 0.5 and is now 0.6)" in error
    assert contents(copy) == before


def test_a_text_that_has_changed_is_another_run(
    copy, line, corpus, documents, tmp_path, metatokens
):
    changed = write_documents(tmp_path / "changed.jsonl", [*documents, f"{documents[0]} More."])
    other_line = line.replace(str(corpus), str(changed))
    error = refused(metatokens, f"{other_line} --out {copy}")
    assert "holds a run with other settings (text_sha256 was " in error
