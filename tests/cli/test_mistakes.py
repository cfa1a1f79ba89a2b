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
from metatokens.checkpoint import write_manifest
from metatokens.data.store import TokenStore
from metatokens.data.writing import Plan, write_token_store
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
    settings = write_token_store(
        ground / "other-tokens", str(ground / "text.txt"), "train:300"
    ).manifest.settings
    (ground / "unfinished" / ".partial" / "train").mkdir(parents=True)
    plan = Plan(settings=settings, parts=(), first=())
    (ground / "unfinished" / ".partial" / "plan.json").write_text(plan.model_dump_json())
    (ground / "unfinished" / ".lock").touch()  # as a process that was killed leaves it
    shutil.copytree(ground / "tokens", ground / "damaged-tokens")
    (ground / "damaged-tokens" / "held_out" / "00000.bin").write_bytes(b"\0")
    (ground / "empty.txt").write_text(" \n\n")
    (ground / "short.txt").write_text("a few words")
    (ground / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": \n')
    (ground / "records.jsonl").write_text(
        '{"prompt": "a", "completion": " b"}\n\n{"prompt": "a", "completion": }\n'
    )
    (ground / "long.jsonl").write_text(
        json.dumps({"prompt": "the cat " * 60, "completion": " sat"})
    )
    (ground / "notes").mkdir()
    (ground / "notes" / "thesis.txt").write_text("years of work")

    shutil.copytree(small_model(), ground / "model")
    shutil.copytree(
        small_model(position_embedding="learned", max_position_embeddings=48), ground / "learned"
    )
    shutil.copytree(small_model(second_attention="none", meta_token_id=None), ground / "unmarked")
    for name in ("flipped", "gone", "foreign-cut"):
        shutil.copytree(ground / "model", ground / name)
    weights = (ground / "model" / "model.safetensors").read_bytes()
    (ground / "flipped" / "model.safetensors").write_bytes(
        weights[:-9] + bytes([weights[-9] ^ 1]) + weights[-8:]
    )
    (ground / "gone" / "tokenizer.json").unlink()
    (ground / "foreign-cut" / "manifest.json").unlink()  # as other programs save models
    (ground / "foreign-cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])

    settings = {"verb": "pretrain", "recipe": {"training": {"seed": 5}}}
    with open_run(ground / "run", settings):
        pass
    (ground / "run" / "model.safetensors").write_bytes(weights)
    write_manifest(ground / "run")
    (ground / "run" / "mine.yaml").write_text("training: {}\n")
    with open_run(ground / "reproduced", {"preset": "demo", "corpus": "builtin"}):
        pass
    return ground


EVALUATE = "evaluate --model model"
FINETUNE = "finetune --out new --model model"
TOKENIZE = "tokenize --out new"
MISTAKES = {
    # recipes
    f"{PRETRAIN} --out new --set training.max_stepz=1": "training.max_stepz: Extra inputs are not permitted",
    f"{PRETRAIN} --out new --set data.fraction=0.51": "meta-tokens is 0.51, but must lie in [0, 0.5]",
    f"{PRETRAIN} --out new --set data.placement=word": "data.placement may also be uniform, periodic or none",
    "pretrain --recipe nowhere.yaml --out new": "no recipe at nowhere.yaml; give a YAML file or one of: demo",
    "pretrain --recipe demo --out new": "the recipe must name data.tokens",
    f"{FINETUNE} --task parity --set training.eval_steps=1": "which needs held-out records: give --eval-data",
    # a task or records
    EVALUATE: "give either --task or --data",
    f"{FINETUNE} --task parity --data long.jsonl": "give either --task or --data",
    f"{PRETRAIN} --out new --set training.lora_rank=2": "training.lora_rank needs a trained model: give --init",
    f"{PRETRAIN} --out new --set training.lora_rank=2 --set model.architecture=gpt_neo": "needs a trained model: give",
    f"{FINETUNE} --data long.jsonl --set task.train_steps=[1]": "--set task.train_steps=[1] is for --task",
    f"{FINETUNE} --task list_recall --set task.question_sees=landmarks --eval-data long.jsonl": "leave one of them out",
    f"{EVALUATE} --task parity --landmarks line": "--landmarks goes with --data",
    f"{EVALUATE} --data long.jsonl -n 3": "--lengths, --condition and -n go with --task",
    f"{FINETUNE} --data records.jsonl": "records.jsonl, line 3: Invalid JSON",
    f"{FINETUNE} --data long.jsonl --set task.landmarks=paragraph": "the rule paragraph inserts no meta-token into",
    f"{EVALUATE} --task parity --lengths long": "'long' must be numbers from 1 to 1,000,000, separated by",
    f"{EVALUATE} --task parity --lengths 64,99999999": "must be numbers from 1 to 1,000,000",
    f"pretrain {SMALL} --out run --overwrite --recipe run/mine.yaml": "--overwrite would remove run/mine.yaml",
    "reproduce --preset huge --out new": "no preset 'huge'; the presets are",
    # corpora
    f"{TOKENIZE} --corpus nowhere.txt --tokenizer train:300": "no file matches the corpus nowhere.txt",
    f"{TOKENIZE} --corpus empty.txt --tokenizer train:300": "the corpus empty.txt holds no text",
    f"{TOKENIZE} --corpus broken.jsonl --tokenizer train:300": "broken.jsonl, line 3 is not JSON",
    f"{TOKENIZE} --corpus text.txt --tokenizer word": "word holds no tokenizer that can be loaded",
    f"{PRETRAIN} --out new --set data.tokens=nowhere": "nowhere holds no complete token store",
    "perplexity --model model --corpus short.txt": "perplexity needs two blocks of 231",
    "perplexity --model model --corpus other-tokens": "other-tokens was made with another tokenizer than the model's",
    "perplexity --model model --corpus damaged-tokens": "held_out/00000.bin is missing, cut short or altered",
    "perplexity --model unmarked --corpus text.txt --placement uniform": "unmarked has no meta_token_id",
    # models
    "evaluate --task parity --model nowhere": "there is no model in nowhere",
    "evaluate --task parity --model flipped": "flipped/model.safetensors is damaged",
    "evaluate --task parity --model gone": "gone/tokenizer.json is missing",
    "evaluate --task parity --model foreign-cut": "the weights in foreign-cut cannot be read",
    "evaluate --task parity --model unmarked": "the model in unmarked has no meta_token_id",
    f"{EVALUATE} --task parity --intervention no_heads": "no intervention 'no_heads'; allowed are no_pos",
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
    f"{PRETRAIN} --out run": "run holds a run with other settings (batch was None",
    "reproduce --preset smoke --out reproduced": "preset was 'demo' and is now 'smoke'",
    "tokenize --corpus text.txt --tokenizer train:300 --out tokens": "tokens holds a token store made with other",
    "tokenize --corpus text.txt --tokenizer train:310 --out unfinished": "an unfinished token store made with",
    "tokenize --corpus text.txt --tokenizer train:300 --out notes": "notes is not empty and holds no token store",
    "tokenize --corpus text.txt --tokenizer train:300 --out notes --overwrite": "notes is not empty and holds no token",
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
