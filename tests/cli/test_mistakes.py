"""One sentence for each mistake, exit status 2, and nothing lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from metatokens import recipe
from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.training.run_folder import open_run
from tests.cli.command_lines import PRETRAIN, SMALL, Contents, Models, Run


@pytest.fixture(scope="module")
def ground(
    small_corpus: Path,
    small_store: TokenStore,
    small_model: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder of good and bad inputs, which no command below may change."""
    ground = tmp_path_factory.mktemp("ground")
    shutil.copy(small_corpus, ground / "text.txt")
    shutil.copytree(small_store.path, ground / "tokens")
    write_token_store(ground / "other-tokens", str(ground / "text.txt"), "train:300")
    (ground / "empty.txt").write_text(" \n\n")
    (ground / "short.txt").write_text("a few words")
    records = json.dumps({"prompt": "the cat " * 60, "completion": " sat"})
    (ground / "long.jsonl").write_text(records)
    (ground / "sees.yaml").write_text(
        "task: {question_sees: landmarks}\ntraining: {max_steps: 2}\n"
    )
    (ground / "notes").mkdir()
    (ground / "notes" / "thesis.txt").write_text("years of work")

    shutil.copytree(small_model(), ground / "model")
    shutil.copytree(
        small_model(position_embedding="learned", max_position_embeddings=48), ground / "learned"
    )
    shutil.copytree(small_model(second_attention="none", meta_token_id=None), ground / "unmarked")
    shutil.copytree(ground / "model", ground / "flipped")
    weights = (ground / "model" / "model.safetensors").read_bytes()
    (ground / "flipped" / "model.safetensors").write_bytes(
        weights[:-9] + bytes([weights[-9] ^ 1]) + weights[-8:]
    )

    settings = {"verb": "pretrain", "recipe": {"training": {"seed": 5}}}
    with open_run(ground / "run", settings):
        pass
    shutil.copytree(ground / "model", ground / "run", dirs_exist_ok=True)
    (ground / "run" / "mine.yaml").write_text("training: {}\n")
    (ground / "run" / "mine.jsonl").write_text(records)
    return ground


EVALUATE = "evaluate --model model"
FINETUNE = "finetune --out new --model model"
TOKENIZE = "tokenize --out new"
TWO_STEPS = "--set training.max_steps=2"  # of a training that begins if the mistake is not noticed
REPLACE = f"finetune --out run --overwrite --model model {TWO_STEPS}"
AUXILIARY = "{lists: [1, 2], items: [1, 2], max_steps: 2, bracket_loss: 0.1}"
MISTAKES = {
    # recipes
    f"{PRETRAIN} --out new --set data.placement=word": "'word' is no placement: give uniform, ",
    "pretrain --recipe demo --out new": "the recipe must name data.tokens",
    f"{FINETUNE} --task parity --set training.eval_steps=1": "which needs held-out records: give --eval-data",
    # a task or records
    EVALUATE: "give either --task or --data",
    f"{FINETUNE} --task parity --data long.jsonl": "give either --task or --data",
    f"{PRETRAIN} --out new --set training.lora_rank=2": "training.lora_rank needs a trained model: give --init",
    f"{PRETRAIN} --out new --set training.lora_rank=2 --set model.architecture=gpt_neo": "needs a trained model: give",
    f"{FINETUNE} --data long.jsonl --set task.train_steps=[1]": "--set task.train_steps=[1] is for --task",
    f"{FINETUNE} --task list_recall --set task.question_sees=landmarks --eval-data long.jsonl": "leave one of them out",
    f"{FINETUNE} {TWO_STEPS} --task parity --set task.landmarks=line": "landmarks are for your own records (--data)",
    f"{FINETUNE} {TWO_STEPS} --task parity --set 'task.stages=[{AUXILIARY}]'": "works with segment_counting alone, not",
    f"{FINETUNE} {TWO_STEPS} --data long.jsonl --recipe demo_parity": "task.stages are for the tasks; with records,",
    f"{FINETUNE} --data long.jsonl --recipe sees.yaml": "task.question_sees is for the tasks, whose prompts have",
    f"{EVALUATE} --task parity --landmarks line": "--landmarks goes with --data",
    f"{EVALUATE} --data long.jsonl -n 3": "--lengths, --condition and -n go with --task",
    f"{FINETUNE} --data long.jsonl --set task.landmarks=paragraph": "the rule paragraph inserts no meta-token into",
    f"{EVALUATE} --task parity --lengths long": "'long' must be numbers from 1 to 1,000,000, separated by",
    f"{EVALUATE} --task parity --lengths 64,99999999": "must be numbers from 1 to 1,000,000",
    f"pretrain {SMALL} --out run --overwrite --recipe run/mine.yaml": "--overwrite would remove run/mine.yaml",
    "reproduce --preset huge --out new": "no preset 'huge'; the presets are",
    # corpora
    f"{TOKENIZE} --corpus empty.txt --tokenizer train:300": "the corpus empty.txt holds no text",
    "perplexity --model model --corpus short.txt": "perplexity needs two blocks of 231",
    "perplexity --model model --corpus other-tokens": "other-tokens was made with another tokenizer than the model's",
    "perplexity --model unmarked --corpus text.txt --placement uniform": "unmarked has no meta_token_id",
    "perplexity --model model --corpus text.txt --placement uniform --landmarks line": "not both: each places the",
    # models
    "evaluate --task parity --model nowhere": "there is no model in nowhere",
    "evaluate --task parity --model unmarked": "the model in unmarked has no meta_token_id",
    # prompts
    "generate --model model ''": "the prompt is empty",
    "generate --model model --marker _PAUSE_ the": "the marker '_PAUSE_' is not in the prompt",
    "generate --model learned the --max-new-tokens 60": "longer than the 48 learned positions",
    "look --model model _PAUSE_": "the prompt has no text",
    # lengths beyond learned positions
    "evaluate --task parity --model learned --lengths 64": "a sequence of 64 tokens is longer than the 48 learned",
    "pretrain --recipe demo --set data.tokens=tokens --out new --init learned --set data.block_size=49": (
        "longer than the 48 learned positions"
    ),
    # what a command would overwrite, or cannot write
    f"{PRETRAIN} --out tokens --overwrite": "--overwrite would remove tokens, which this run reads",
    f"pretrain --recipe demo --set data.tokens=tokens {TWO_STEPS} --init run --out run --overwrite": (
        "--overwrite would remove run, which this run reads"
    ),
    f"{REPLACE} --data run/mine.jsonl": "--overwrite would remove run/mine.jsonl, which this run reads",
    f"{REPLACE} --data long.jsonl --eval-data run/mine.jsonl": "--overwrite would remove run/mine.jsonl, which this",
    "tokenize --corpus text.txt --tokenizer train:300 --out notes": "notes is not empty and holds no token store",
    f"{EVALUATE} --task parity --out new.jsonl.gz": "new.jsonl.gz is compressed: no line can be appended to it",
    f"{EVALUATE} --task parity --out text.txt": "text.txt is another kind of file, and is kept",
    f"{EVALUATE} --data long.jsonl --out ./long.jsonl": "long.jsonl is read or written by this command already",
    f"{EVALUATE} --task parity --out a.jsonl --predictions a.jsonl": "a.jsonl is read or written by this command",
    "perplexity --model model --corpus text.txt --out text.txt": "text.txt is read or written by this command",
    f"{EVALUATE} --task parity --out text.txt/new.jsonl": "cannot write to text.txt/new.jsonl: Not a directory",
    f"{PRETRAIN} --out /proc/new": "/proc/new cannot be used as a run folder",  # where not even root can write
    # of the command line itself
    "sample --task chess": f"'chess' is not one of {', '.join(map(repr, get_args(recipe.Task)))}; see ",
    "dream": "No such command 'dream'; see `metatokens --help`.",
    "finetune --out new": "Missing option '--model'; see `metatokens finetune --help`.",
}  # fmt: skip


def is_one_sentence(error: str) -> bool:
    return error.startswith("metatokens: ") and error.endswith(".\n") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"), MISTAKES.items(), ids=[line.replace(SMALL, "...") for line in MISTAKES]
)
def test_a_mistake_is_one_sentence_and_nothing_is_lost(
    line: str,
    said: str,
    ground: Path,
    contents: Contents,
    metatokens: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ground)
    before = contents(ground)
    status, output, error = metatokens(line)
    assert (status, output) == (2, "")
    assert is_one_sentence(error), error
    assert said in error
    assert contents(ground) == before


def test_a_result_file_is_tried_before_anything_is_measured(
    ground: Path, tmp_path: Path, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    monkeypatch.setattr("metatokens.evaluation.accuracy.evaluate", None)  # would end in a TypeError
    assert metatokens(f"{EVALUATE} --task parity --out notes")[0] == 2
    out = tmp_path / "new.jsonl"
    assert metatokens(f"evaluate --task parity --model flipped --out {out}")[0] == 2
    assert not out.exists()  # the try leaves nothing behind
    out.symlink_to(tmp_path / "elsewhere.jsonl")
    assert metatokens(f"evaluate --task parity --model flipped --out {out}")[0] == 2
    assert (out.is_symlink(), out.exists()) == (True, False)


@pytest.mark.slow  # it imports everything anew, to see that no library prints a notice
def test_a_mistake_in_a_process_of_its_own(ground: Path) -> None:
    # Which the command has to set itself.
    quiet = {
        "TRANSFORMERS_VERBOSITY",
        "HF_HUB_DISABLE_PROGRESS_BARS",
    }
    environment = {key: value for key, value in os.environ.items() if key not in quiet}
    line = "-m metatokens evaluate --model learned --task parity --lengths 32,64"
    done = subprocess.run(
        [sys.executable, *line.split()], cwd=ground, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert is_one_sentence(done.stderr), done.stderr
