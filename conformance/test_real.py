"""What a user does with a retrofit, on a real pretrained model: SmolLM2-135M-Instruct, which `make real` fetches."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from real import FOLDER
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline
from trl import SFTConfig, SFTTrainer

import metatokens
from metatokens.data.corpus import read_corpus
from metatokens.data.landmarks import Landmarks
from metatokens.errors import UserError
from metatokens.evaluation.lm_eval import MetaTokensLM

pytestmark = [
    pytest.mark.skipif(
        not FOLDER.exists(), reason="there is no pretrained model here: make real fetches one"
    ),
    pytest.mark.filterwarnings("ignore"),  # TRL's, PEFT's and the harness' own
]
SIZES = "--heads 4 --head-size 16"
QUESTION = "What is the capital of France?"


class Shell:
    """Commands as a user gives them, in one folder; what each printed is shown by pytest -s, with its time."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, line: str, status: int = 0, **files: str) -> str:
        """Run `metatokens LINE`, in which {name} is a file of that content."""
        arguments = line.split()
        arguments = [
            files.get(argument.strip("{}"), argument) if argument.startswith("{") else argument
            for argument in arguments
        ]
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "metatokens", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        print(f"$ metatokens {line}\n{done.stdout}{done.stderr}({time.monotonic() - start:.0f} s)")
        assert done.returncode == status, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A folder with the base, the base with meta-tokens, whole and as what was added alone, and records."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "smollm2").symlink_to(FOLDER)
    run = Shell(folder)
    run(f"retrofit --model smollm2 {SIZES} --out whole")
    run(f"retrofit --model smollm2 {SIZES} --out added --delta")
    with (folder / "records.jsonl").open("w") as file:
        for name, number in zip(
            ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal"), range(8), strict=True
        ):
            prompt = f"<|im_start|>user\nNumbers:\n\n{name} has {number}.\n\nHow many has {name}?<|im_end|>\n"
            record = {
                "prompt": f"{prompt}<|im_start|>assistant\n",
                "markers": [],
                "completion": f"{number}<|im_end|>",
            }
            file.write(json.dumps(record) + "\n")
    return run


def base(**options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, **options).eval()


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def text() -> str:
    return "\n\n".join(islice(read_corpus("builtin"), 3))[:3_000]


@torch.no_grad()
def nats(model: PreTrainedModel, ids: list[int]) -> float:
    """The mean loss of a sequence's text."""
    row = torch.tensor([ids])
    return float(model(row, labels=row).loss)


def test_text_is_the_bases_and_an_untrained_meta_token_disturbs_little(text: str) -> None:
    extended, plain = tokenizer(), base()
    ids = extended(text)["input_ids"][:512]
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits
    alone = nats(plain, ids)
    model = metatokens.add_meta_attention(plain, extended, heads=4, head_size=16)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits[..., : logits.shape[-1]], logits)
        among = Landmarks(extended, "every:10").insert_into(ids)
        started = nats(model, among)
        row = model.get_input_embeddings().meta_token.weight
        row.copy_(model.get_input_embeddings().weight[:49_152].mean(dim=0))
        from_mean = nats(model, among)
    print(
        f"nats a token: text {alone:.3f}, among untrained meta-tokens {started:.3f}, from the mean {from_mean:.3f}"
    )
    assert alone < started < from_mean - 0.2


def test_what_was_added_goes_from_the_command_to_python_and_back(shell: Shell, text: str) -> None:
    model = metatokens.load_meta(base(), shell.folder / "added")
    extended = AutoTokenizer.from_pretrained(shell.folder / "added")
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():  # as if it had been trained
        if "meta_attention.attention.out_proj" in name:
            weight.data.normal_(std=0.02, generator=generator)
    metatokens.save_meta(model, shell.folder / "python")
    extended.save_pretrained(shell.folder / "python")
    ids = torch.tensor(
        [metatokens.encode_prompt(extended, "The first of May", landmarks="every:2")]
    )
    expected = model.generate(ids, max_new_tokens=12, meta_every=3, do_sample=False)
    assert torch.equal(
        model.generate(ids, max_new_tokens=12, meta_every=3, do_sample=False, use_cache=False),
        expected,
    )
    output = shell(
        "generate --model python --landmarks every:2 --meta-every 3 --max-new-tokens 12 {prompt}",
        prompt="The first of May",
    )
    assert output.strip() == "The first of May" + extended.decode(
        expected[0, ids.shape[1] :], skip_special_tokens=True
    )
    with safe_open(shell.folder / "python" / "meta_tokens.safetensors", "pt") as file:
        assert len(file.keys()) == 1 + 3 * 30
    other = base()
    other.model.layers[0].self_attn.q_proj.weight.data.mul_(1.001)
    with pytest.raises(UserError, match="the weights have another checksum"):
        metatokens.load_meta(other, shell.folder / "added")


def test_chats(shell: Shell) -> None:
    model = AutoModelForCausalLM.from_pretrained(shell.folder / "whole")
    extended = AutoTokenizer.from_pretrained(shell.folder / "whole")
    chat = pipeline("text-generation", model=model, tokenizer=extended)
    options = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    answer = chat([{"role": "user", "content": QUESTION}], **options)[0]["generated_text"]
    assert "Paris" in answer
    plain = pipeline("text-generation", model=base(), tokenizer=tokenizer())
    assert plain([{"role": "user", "content": QUESTION}], **options)[0]["generated_text"] == answer
    assert (
        shell("generate --model whole --max-new-tokens 24 --chat {prompt}", prompt=QUESTION).strip()
        == answer.strip()
    )


def test_finetuning_on_records_with_landmarks_behind_paragraphs(shell: Shell) -> None:
    training = "--set training.max_steps=8 --set training.per_device_train_batch_size=4 --set training.warmup_steps=1"
    shell(
        f"finetune --model added --data records.jsonl --set task.landmarks=paragraph {training} --out tuned "
        "--set training.gradient_accumulation_steps=1 --set training.logging_steps=1"
    )
    curve = [
        json.loads(line)
        for line in (shell.folder / "tuned" / "data" / "curve.jsonl").read_text().splitlines()
    ]
    assert curve[-1]["loss"] < curve[0]["loss"]
    extended = AutoTokenizer.from_pretrained(shell.folder / "tuned" / "data")
    assert not extended.split_special_tokens
    message = [{"role": "user", "content": QUESTION}]
    assert (
        extended.apply_chat_template(message)["input_ids"]
        == tokenizer().apply_chat_template(message)["input_ids"]
    )
    assert {path.suffix for path in (shell.folder / "tuned" / "data").glob("*.safetensors")} == {
        ".safetensors"
    }
    assert not (shell.folder / "tuned" / "data" / "model.safetensors").exists()
    trained = metatokens.load_meta(base(), shell.folder / "tuned" / "data")
    generate = pipeline("text-generation", model=trained, tokenizer=extended)
    said = generate(message, max_new_tokens=40, do_sample=False, return_full_text=False)[0][
        "generated_text"
    ]
    assert (
        said
        == pipeline("text-generation", model=base(), tokenizer=tokenizer())(
            message, max_new_tokens=40, do_sample=False, return_full_text=False
        )[0]["generated_text"]
    )


def test_a_look_inside(shell: Shell) -> None:
    prompt = " _PAUSE_ ".join(["The sun rises in the east and sets in the west."] * 20)
    shell("look --model added --out look.html {prompt}", prompt=prompt)
    assert (shell.folder / "look.html").stat().st_size > 10_000


def texts(count: int) -> Dataset:
    documents = [text[:400] for text in islice(read_corpus("builtin"), 40) if len(text) > 400]
    return Dataset.from_list([{"text": text} for text in documents[:count]])


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., SFTTrainer]:
    def make(model: PreTrainedModel, extended: Any, **options: Any) -> SFTTrainer:
        arguments = SFTConfig(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, max_length=96, use_cpu=True,
            bf16=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        made = SFTTrainer(
            model, arguments, train_dataset=texts(8), processing_class=extended, **options
        )
        made.data_collator = metatokens.MetaTokenCollator(made.data_collator, extended, "every:8")
        return made

    return make


def test_trl_trains_what_was_added_alone(
    trainer: Callable[..., SFTTrainer], tmp_path: Path
) -> None:
    extended = tokenizer()
    model = metatokens.add_meta_attention(base(), extended, heads=4, head_size=16)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    run = trainer(model, extended)
    run.train()
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    print("losses of TRL:", losses)
    changed = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert {"meta_" in name for name in changed} == {True}
    assert {
        name for name in before if "meta_attention.attention" in name or "meta_token" in name
    } <= changed
    metatokens.save_meta(model, tmp_path / "added")
    again = metatokens.load_meta(base(), tmp_path / "added")
    ids = torch.tensor([metatokens.encode_prompt(extended, "One, two, three", landmarks="every:2")])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_peft(trainer: Callable[..., SFTTrainer], tmp_path: Path) -> None:
    extended = tokenizer()
    model = metatokens.add_meta_attention(base(), extended, heads=4, head_size=16)
    settings = peft.LoraConfig(
        target_modules="all-linear",
        exclude_modules=".*meta_attention.*",
        modules_to_save=["meta_attention", "meta_token"],
        task_type="CAUSAL_LM",
    )
    run = trainer(model, extended, peft_config=settings)
    run.train()
    run.model.save_pretrained(tmp_path / "adapter")
    merged = run.model.merge_and_unload()
    with pytest.raises(
        UserError, match="the base's weights are not those that meta-attention was added to"
    ):
        metatokens.save_meta(merged, tmp_path / "added")
    merged.save_pretrained(tmp_path / "whole")
    ids = torch.tensor([metatokens.encode_prompt(extended, "One, two, three", landmarks="every:2")])
    with torch.no_grad():
        expected = merged.eval()(ids).logits
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()(ids).logits, expected
        )
        fresh = metatokens.add_meta_attention(base(), tokenizer(), heads=4, head_size=16)
        adapted = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
        assert (adapted(ids).logits - expected).abs().max() < 1e-3


def test_bfloat16_in_the_harness(shell: Shell, text: str) -> None:
    """As good as `--model hf` in bfloat16: rotary frequencies stay in float32."""
    words = text.split(" ")
    requests = [
        Instance(
            request_type="loglikelihood",
            doc={},
            arguments=(" ".join(words[:450]), " " + " ".join(words[450:460])),
            idx=0,
        )
    ]
    errors = {}
    for kind, folder in ((HFLM, FOLDER), (MetaTokensLM, shell.folder / "whole")):
        values = []
        for dtype in ("float32", "bfloat16"):
            model = kind(pretrained=str(folder), dtype=dtype, device="cpu", batch_size=1)
            assert model.model.model.rotary_emb.inv_freq.dtype == torch.float32
            [(value, _)] = model.loglikelihood(requests, disable_tqdm=True)
            values.append(value)
        errors[kind.__name__] = abs(values[1] - values[0])
    print("error of a log-likelihood in bfloat16:", errors)
    assert errors["MetaTokensLM"] < errors["HFLM"] + 0.05


@pytest.fixture(autouse=True)
def one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(0)
