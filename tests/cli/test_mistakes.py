"""One sentence for each mistake, exit status 2, and nothing lost."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import BertConfig

from metatokens import recipe
from metatokens.checkpoint import write_manifest
from metatokens.data.store import TokenStore
from metatokens.data.writing import Plan, write_token_store
from metatokens.training.run_folder import open_run
from tests.cli.command_lines import PRETRAIN, SMALL, Contents, Models, Run


@pytest.fixture(scope="module")
def ground(
    small_corpus: Path, small_store: TokenStore, small_model: Models, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of good and bad inputs, which no command below may change."""
    ground = tmp_path_factory.mktemp("ground")
    shutil.copy(small_corpus, ground / "text.txt")
    shutil.copytree(small_store.path, ground / "tokens")
    settings = write_token_store(ground / "other-tokens", str(ground / "text.txt"), "train:300").manifest.settings
    (ground / "unfinished" / ".partial" / "train").mkdir(parents=True)
    plan = Plan(settings=settings, parts=(), shard_characters=1, first=())
    (ground / "unfinished" / ".partial" / "plan.json").write_text(plan.model_dump_json())
    (ground / "unfinished" / ".lock").touch()  # as a process that was killed leaves it
    shutil.copytree(ground / "tokens", ground / "damaged-tokens")
    (ground / "damaged-tokens" / "held_out" / "00000-00000.arrow").write_bytes(b"ARROW1")
    (ground / "empty.txt").write_text(" \n\n")
    (ground / "empty.jsonl").write_text("")
    (ground / "short.txt").write_text("a few words")
    (ground / "latin.txt").write_bytes("the cat\nd\xe9j\xe0 vu".encode("latin-1"))
    (ground / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": \n')
    (ground / "records.jsonl").write_text('{"prompt": "a", "completion": " b"}\n\n{"prompt": "a", "completion": }\n')
    (ground / "long.jsonl").write_text(json.dumps({"prompt": "the cat " * 60, "completion": " sat"}))
    (ground / "marked.jsonl").write_text(json.dumps({"prompt": "the _PAUSE_", "markers": [3]}))
    (ground / "notes").mkdir()
    (ground / "notes" / "thesis.txt").write_text("years of work")

    shutil.copytree(small_model(), ground / "model")
    shutil.copytree(small_model(position_embedding="learned", max_position_embeddings=48), ground / "learned")
    shutil.copytree(small_model(second_attention="none", meta_token_id=None), ground / "unmarked")
    for name in ("cut", "flipped", "flipped-config", "gone", "foreign-cut", "foreign-config", "pickled", "bert"):
        shutil.copytree(ground / "model", ground / name)
    weights = (ground / "model" / "model.safetensors").read_bytes()
    (ground / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (ground / "flipped" / "model.safetensors").write_bytes(weights[:-9] + bytes([weights[-9] ^ 1]) + weights[-8:])
    config = (ground / "model" / "config.json").read_bytes()
    (ground / "flipped-config" / "config.json").write_bytes(config.replace(b'"bias": false', b'"bias": fals\x67'))
    (ground / "gone" / "tokenizer.json").unlink()
    # Without a manifest, as other programs save models.
    for name in ("foreign-cut", "foreign-config", "pickled", "bert"):
        (ground / name / "manifest.json").unlink()
    (ground / "foreign-cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (ground / "foreign-config" / "config.json").write_text('{"model_type": "meta_gpt2", "hidden_size": "wide"}')
    (ground / "pickled" / "model.safetensors").unlink()
    torch.save({}, ground / "pickled" / "pytorch_model.bin")
    BertConfig().save_pretrained(ground / "bert")

    settings = {"verb": "pretrain", "recipe": {"training": {"seed": 5}}}
    with open_run(ground / "run", settings):
        pass
    (ground / "run" / "model.safetensors").write_bytes(weights)
    write_manifest(ground / "run")
    with open_run(ground / "reproduced", {"preset": "demo", "corpus": "builtin"}):
        pass
    return ground


TUNE = "finetune --out new --model model"
EVALUATE = "evaluate --lengths 64 -n 2 --task parity"
BROKEN = "tokenize --corpus broken.jsonl --tokenizer train:300 --out new"
MISTAKES = {
    # recipes
    f"{PRETRAIN} --out new --set training.eval_steps=-1": "training.eval_steps is -1: input should be",
    f"{TUNE} --task parity --set training.eval_steps=1": "which needs held-out records: give --eval-data",
    f"{TUNE} --task parity --eval-data nowhere.jsonl": "cannot read the records in nowhere.jsonl",
    "evaluate --model model": "give either --task or --data",
    "evaluate --model model --task parity --data nowhere.jsonl": "give either --task or --data",
    "evaluate --model model --task parity --landmarks line": "--landmarks goes with --data",
    f"{TUNE} --task parity --landmarks line": "landmarks are for your own records (--data)",
    f"{TUNE} --data long.jsonl --landmarks paragraph": "the rule paragraph inserts no meta-token into any prompt",
    f"{TUNE} --data long.jsonl --landmarks no": "the rule for landmarks is 'no': give line, paragraph, sentence or",
    "generate --model unmarked the --landmarks line": "the model in unmarked has no meta_token_id",
    "generate --model model the --landmarks lines": "the rule for landmarks is 'lines'",
    "evaluate --model model --data nowhere.jsonl": "cannot read the records in nowhere.jsonl",
    "evaluate --model model --data nowhere.jsonl -n 3": "-n goes with --task; the records of",
    "evaluate --model model --data nowhere.jsonl --lengths 64": "--lengths goes with --task",
    f"{EVALUATE} --model model --predictions nowhere/answers.jsonl": "nowhere/answers.jsonl",
    f"{PRETRAIN} --out new --set training.max_stepz=1": "training.max_stepz is not a setting; allowed are max_steps",
    "pretrain --recipe nowhere.yaml --out new": "no recipe at nowhere.yaml; give a YAML file or one of: demo",
    "pretrain --recipe notes --out new": "no recipe at notes; give a YAML file or one of: demo",
    "pretrain --recipe latin.txt --out new": "recipe latin.txt cannot be read as YAML",
    "pretrain --recipe demo --out new": "the recipe must name data.tokens",
    f"{PRETRAIN} --out new --set data.fraction=0.51": "meta-tokens is 0.51, but must lie in [0, 0.5]",
    f"{PRETRAIN} --out new --set data.placement=random": "data.placement is 'random': give uniform, periodic,",
    f"{PRETRAIN} --out new --landmarks word": "data.placement is 'word': give uniform, periodic, none, line,",
    f"{PRETRAIN} --out new --landmarks every:60000": "the rule every:60000 inserts no meta-token into the train split",
    f"{PRETRAIN} --out new --landmarks every:3 --set data.block_size=90000": "one block of 90000, landmarks included",
    f"{PRETRAIN} --out new --set model.num_attention_heads=3": "hidden_size 16 is not a multiple of",
    f"{PRETRAIN} --out new --set training.report_to=paper": "names the tracker 'paper', which is not installed",
    # corpora
    "tokenize --corpus nowhere.txt --tokenizer train:300 --out new": "no file matches the corpus nowhere.txt",
    "tokenize --corpus notes --tokenizer train:300 --out new": "the corpus notes is a folder",
    "tokenize --corpus empty.txt --tokenizer train:300 --out new": "the corpus empty.txt holds no text",
    "tokenize --corpus empty.jsonl --tokenizer train:300 --out new": "the corpus empty.jsonl holds no text",
    "tokenize --corpus latin.txt --tokenizer train:300 --out new": "latin.txt, line 2 is not UTF-8",
    BROKEN: "broken.jsonl, line 3 is not JSON",
    "tokenize --corpus text.txt --tokenizer train:20 --out new": "train:N with N from 300 to",
    "tokenize --corpus text.txt --tokenizer train:60000 --out new": "too little text for the tokenizer train:60000",
    "tokenize --corpus text.txt --tokenizer word --out new": "no tokenizer 'word': give an existing folder, gpt2, or",
    "tokenize --corpus text.txt --tokenizer notes --out new": "the folder notes holds no tokenizer",
    "tokenize --corpus text.txt --tokenizer train:300 --held-out 0 --out new": "must lie between 0 and 1",
    f"{PRETRAIN} --out new --set data.block_size=90000": "too few for one block of 90000",
    f"{PRETRAIN} --out new --set data.tokens=nowhere": "nowhere holds no complete token store",
    f"{PRETRAIN} --out new --set data.tokens=text.txt": "text.txt holds no complete token store",
    "perplexity --model model --corpus empty.txt": "the corpus empty.txt holds no text",
    "perplexity --model model --corpus short.txt": "perplexity needs two blocks of 231",
    "perplexity --model model --corpus model": "model/manifest.json is not the manifest of a token store",
    "perplexity --model model --corpus other-tokens": "other-tokens was made with another tokenizer than the model's",
    "perplexity --model model --corpus damaged-tokens": "held_out/00000-00000.arrow is missing, cut short or altered",
    "perplexity --model model --corpus text.txt --placement uniform --block-size 2 --fraction 0.5": "nothing to",
    "perplexity --model model --corpus text.txt --fraction 0.6": "meta-tokens is 0.6, but must lie in [0, 0.5]",
    "perplexity --model unmarked --corpus text.txt --placement uniform": "unmarked has no meta_token_id",
    "perplexity --model unmarked --corpus text.txt --landmarks line": "unmarked has no meta_token_id",
    "perplexity --model model --corpus text.txt --landmarks word": "the rule for landmarks is 'word': give line,",
    "perplexity --model model --corpus text.txt --landmarks line --placement uniform": "give --placement or",
    "perplexity --model learned --corpus text.txt --block-size 48 --landmarks every:4": "than the 48 learned positions",
    # records
    f"{TUNE} --data nowhere.jsonl": "cannot read the records in nowhere.jsonl: No such file or directory",
    f"{TUNE} --data notes": "cannot read the records in notes: Is a directory",
    f"{TUNE} --data records.jsonl": "records.jsonl, line 3: ",
    f"{TUNE} --data latin.txt": "latin.txt, line 1: ",
    f"{TUNE} --data empty.jsonl": "empty.jsonl holds no record",
    TUNE: "give either --task or --data",
    f"{TUNE} --task parity --data long.jsonl": "give either --task or --data",
    # tasks
    f"{TUNE} --task parity --train-lengths long": "lengths 'long' must be positive numbers separated by commas",
    f"{TUNE} --task parity --train-lengths 4": "no parity prompt of phase 1 and 1 to 4 tokens was found",
    f"{TUNE} --task parity --set task.condition=bar": "should be 'paper', 'landmark', 'none', 'decoy', 'facts_1'",
    f"{TUNE} --task copying --corpus short.txt": "copying needs 3 documents of at least",
    "sample --task parity --tokenizer tokens/tokenizer --phase 6": "unknown phase 6; the phases are 1 to 5",
    f"{EVALUATE} --model model --lengths 64,,128": "lengths '64,,128' must be positive numbers",
    "reproduce --preset huge --out new": "no preset 'huge'; the presets are",
    "reproduce --preset demo --out new --only table0": "no stage of this preset answers 'table0'; --only takes",
    "reproduce --preset demo --out reproduced --dry-run --only x": "no stage of this preset answers 'x'; --only takes",
    # models
    f"{EVALUATE} --model nowhere": "there is no model in nowhere",
    f"{EVALUATE} --model text.txt": "there is no model in text.txt",
    f"{EVALUATE} --model cut": "cut/model.safetensors is damaged",
    f"{EVALUATE} --model flipped": "flipped/model.safetensors is damaged",
    f"{EVALUATE} --model flipped-config": "flipped-config/config.json is damaged",
    f"{EVALUATE} --model gone": "gone/tokenizer.json is missing",
    f"{EVALUATE} --model foreign-cut": "the weights in foreign-cut cannot be read",
    f"{EVALUATE} --model foreign-config": "foreign-config/config.json is not a model configuration",
    f"{EVALUATE} --model pickled": "the weights in pickled cannot be read",
    f"{EVALUATE} --model bert": "bert holds a bert model, which is no decoder",
    f"{EVALUATE} --model unmarked": "the model in unmarked has no meta_token_id",
    "generate --model cut the": "cut/model.safetensors is damaged",
    "generate --model unmarked the --meta-every 4": "the model in unmarked has no meta_token_id, which markers need",
    "finetune --out new --task parity --model nowhere": "there is no model in nowhere",
    "finetune --out new --task parity --model unmarked": "the model in unmarked has no meta_token_id",
    f"{PRETRAIN} --out new --init nowhere": "there is no model in nowhere",
    f"{PRETRAIN} --out new --init unmarked": "the model's meta_token_id is None and that of the text's",
    "generate --model model ''": "the prompt is empty",
    "generate --model model": "give either a prompt or --data",
    "generate --model model the --data records.jsonl": "give either a prompt or --data",
    "generate --model model --marker _PAUSE_ --data records.jsonl": "--marker goes with a prompt",
    "generate --model model --marker _PAUSE_ the": "the marker '_PAUSE_' is not in the prompt",
    "generate --model model --marker '' the": "the marker is empty",
    f"{PRETRAIN} --out tokens --overwrite": "--overwrite would remove tokens, which this run reads",
    "generate --model model caf\udce9": "the argument 'caf\\udce9' is not UTF-8",
    "perplexity --model model --corpus text.txt --name caf\udce9": "the argument 'caf\\udce9' is not UTF-8",
    "generate --model model the --temperature inf": "Invalid value for '--temperature'",
    f"generate --model model the --seed {2**63}": "Invalid value for '--seed'",
    f"perplexity --model model --corpus text.txt --text-window {10**20}": "Invalid value for '--text-window'",
    "generate --model unmarked --data marked.jsonl": "the model in unmarked has no meta_token_id",
    f"{EVALUATE} --model model --intervention no_heads": "no intervention 'no_heads'; allowed are no_pos",
    f"{EVALUATE} --model model --intervention noise:much": "no intervention 'noise:much'; allowed are no_pos",
    "look --model model _PAUSE_": "the prompt has no text",
    f"look --model learned '{'a ' * 50}'": "tokens; at most 48 can be shown",
    "look --model model --marker '' a": "the marker is empty",
    "look --model nothing a": "there is no model in nothing",
    "analyze sharpness --model unmarked": "the model in unmarked has no meta_token_id",
    f"{EVALUATE} --model model --noise-seed 1": "--noise-seed goes with --intervention noise:S",
    f"{EVALUATE} --model model --intervention no_pos --noise-seed 1": "--noise-seed goes with --intervention noise:S",
    "analyze residual --model model --intervention no_pos": "--intervention goes with rate-distortion",
    "analyze sharpness --model model --fits 1": "--fits goes with rate-distortion",
    "analyze rate-distortion --model model --task parity --length 64 -n 20": "20 examples with 4 held out are too few",
    f"extend --model learned --factor 2 --recipe demo {SMALL} --out new": "position_embedding 'learned'",
    f"extend --model model --factor 1 --recipe demo {SMALL} --out new": "factor",
    # lengths beyond learned positions
    f"{EVALUATE} --model learned": "a sequence of 64 tokens is longer than the 48 learned positions",
    "finetune --out new --model learned --task parity --train-lengths 32,64": "longer than the 48 learned positions",
    "finetune --out new --model learned --data long.jsonl": "longer than the 48 learned positions",
    "perplexity --model learned --corpus text.txt --block-size 64": "longer than the 48 learned positions",
    "generate --model learned the --max-new-tokens 60": "longer than the 48 learned positions",
    f"{PRETRAIN} --out new --init learned --set data.block_size=49": "longer than the 48 learned positions",
    f"{PRETRAIN} --out new --set model.position_embedding=learned --set model.max_position_embeddings=31": (
        "a sequence of 32 tokens is longer than the 31 learned positions"
    ),
    # output folders
    f"{PRETRAIN} --out run": "run holds a run with other settings (batch was None",
    f"{PRETRAIN} --out reproduced": "reproduced holds a run with other settings",
    f"{PRETRAIN} --out notes": "notes is not empty and holds no run",
    f"{PRETRAIN} --out notes --overwrite": "notes is not empty and holds no run",
    f"{PRETRAIN} --out text.txt/new": "text.txt/new cannot be used as a run folder",
    "finetune --model model --task parity --out run": "run holds a run with other settings",
    "tokenize --corpus text.txt --tokenizer train:300 --out tokens": "tokens holds a token store made with other",
    "tokenize --corpus text.txt --tokenizer train:310 --out unfinished": "an unfinished token store made with",
    "tokenize --corpus text.txt --tokenizer train:300 --out model": "model/manifest.json is not the manifest of a",
    "tokenize --corpus text.txt --tokenizer train:300 --out notes": "notes is not empty and holds no token store",
    "tokenize --corpus text.txt --tokenizer train:300 --out text.txt": "the token store text.txt cannot be written",
    "tokenize --corpus text.txt --tokenizer train:300 --out text.txt/new": "text.txt/new cannot be written",
    "reproduce --preset smoke --out reproduced": "preset was 'demo' and is now 'smoke'",
    "reproduce --preset smoke --out notes": "notes is not empty and holds no run",
    "sample --task parity --tokenizer tokens/tokenizer --out notes": "cannot write to notes: Is a directory",
    f"{EVALUATE} --model model --out text.txt/new.jsonl": "cannot write to text.txt/new.jsonl: Not a directory",
    "report nowhere.jsonl --out new": "nowhere.jsonl",
    # a folder in which nobody can write, root included
    f"{PRETRAIN} --out /proc/new": "/proc/new cannot be used as a run folder",
    "tokenize --corpus text.txt --tokenizer train:300 --out /proc/new": "the token store /proc/new cannot be written",
    "reproduce --preset smoke --out /proc/new": "/proc/new cannot be used as a run folder",
    f"{EVALUATE} --model model --out /proc/new": "cannot write to /proc/new",
}  # fmt: skip


def is_one_sentence(error: str) -> bool:
    return error.startswith("metatokens: ") and error.endswith(".\n") and error.count("\n") == 1


@pytest.mark.parametrize(("line", "said"), MISTAKES.items(), ids=[line.replace(SMALL, "...") for line in MISTAKES])
def test_a_mistake_is_one_sentence_and_nothing_is_lost(
    line: str, said: str, ground: Path, contents: Contents, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    before = contents(ground)
    status, output, error = metatokens(line)
    assert (status, output) == (2, "")
    assert is_one_sentence(error), error
    assert said in error
    assert contents(ground) == before


CHOICES = {
    "sample --task chess": get_args(recipe.Task),
    "finetune --model model --out new --task chess": get_args(recipe.Task),
    "evaluate --model model --task parity --condition bar": get_args(recipe.Condition),
    "sample --task parity --split all": get_args(recipe.Split),
    "perplexity --model model --corpus text.txt --placement random": get_args(recipe.Placement),
    "analyze dreams --model model": get_args(recipe.AnalysisName),
    "reproduce --preset smoke --out new --executor threads": get_args(recipe.Executor),
    "generate the --model model --device tpu": get_args(recipe.Device),
    "retrofit --model model --out new --dtype int4": get_args(recipe.Dtype),
}


@pytest.mark.parametrize(("line", "choices"), CHOICES.items(), ids=CHOICES)
def test_a_wrong_choice_is_answered_by_the_right_ones(
    line: str, choices: tuple[str, ...], ground: Path, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    status, output, error = metatokens(line)
    assert (status, output) == (2, "")
    assert is_one_sentence(error), error
    assert re.search(rf": '\w+' is not one of {re.escape(', '.join(map(repr, choices)))}; see ", error)


SLIPS = {
    "dream": "No such command 'dream'; see `metatokens --help`.",
    "generate the --modle model": "No such option: --modle",
    "finetune --out new": "Missing option '--model'; see `metatokens finetune --help`.",
    "report --out": "Option '--out' requires an argument; see `metatokens --help`.",
    "generate the --model model --max-new-tokens few": "Invalid value for '--max-new-tokens': ",
}


@pytest.mark.parametrize(("line", "said"), SLIPS.items(), ids=SLIPS)
def test_a_slip_of_the_pen_is_one_sentence_too(line: str, said: str, metatokens: Run) -> None:
    status, output, error = metatokens(line)
    assert (status, output) == (2, "")
    assert is_one_sentence(error), error
    assert said in error


def test_the_command_alone_prints_its_help(metatokens: Run) -> None:
    status, output, error = metatokens("")
    assert status == 2
    assert "Usage: metatokens" in output + error
    assert "metatokens: " not in output + error


def test_a_result_file_is_tried_before_anything_is_measured(
    ground: Path, tmp_path: Path, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    monkeypatch.setattr("metatokens.evaluation.accuracy.evaluate", None)  # would end in a TypeError
    assert metatokens(f"{EVALUATE} --model model --out notes")[0] == 2
    out = tmp_path / "new.jsonl"
    assert metatokens(f"{EVALUATE} --model cut --out {out}")[0] == 2
    assert not out.exists()  # the try leaves nothing behind


@pytest.mark.parametrize(
    "line", ["evaluate --model learned --task parity --lengths 32,64", pytest.param(BROKEN, marks=pytest.mark.thorough)]
)
def test_a_mistake_in_a_process_of_its_own(line: str, ground: Path) -> None:
    quiet = {"TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"}  # which the command has to set itself
    environment = {key: value for key, value in os.environ.items() if key not in quiet}
    command = [sys.executable, "-m", "metatokens", *shlex.split(line)]
    done = subprocess.run(command, cwd=ground, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert is_one_sentence(done.stderr), done.stderr
    assert not list(ground.glob("new/*"))
