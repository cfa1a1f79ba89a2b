"""lm-evaluation-harness: its own kind of model on a tiny checkpoint, and this package's kind of model and tasks."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from examples.lm_eval.tasks import HARNESS_TASKS, write_harness_tasks
from metatokens import add_meta_attention
from metatokens.checkpoint import load_model, save_model
from metatokens.data.prompts import encode_prompt
from metatokens.data.tokenizer import encode_text, load_tokenizer, meta_token_id, padded_vocab_size
from metatokens.errors import UserError
from metatokens.evaluation.lm_eval import MetaTokensLM
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import FinetuneRecipe
from metatokens.tasks.curriculum import task_texts
from metatokens.training.finetune import finetune

SENTENCE = "the cat sat on a mat while two dogs ran over green hills and a river in spring."
STORY = [
    " ".join(f"On day {i} {SENTENCE}" for i in range(start, start + 40))
    for start in range(0, 1200, 40)
]
QUESTIONS = [
    {"question": "the cat sat on a", "choices": ["mat", "river"], "answer": i % 2} for i in range(6)
]
TASKS = {
    "chosen": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n",
    "continued": "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\n"
    "generation_kwargs: {max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
}
WITH_IMPORT = "import metatokens; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
WITHOUT_IMPORT = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny untrained model and its tokenizer."""
    tokenizer = load_tokenizer("train:600", corpus=[SENTENCE] * 4, extra_texts=task_texts())
    torch.manual_seed(0)
    config = MetaGPT2Config(
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        meta_token_id=meta_token_id(tokenizer),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(MetaGPT2ForCausalLM(config), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def tuned(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that knows what answers of parity look like, and guesses."""
    recipe = FinetuneRecipe.model_validate(
        {
            "task": {"train_lengths": [128], "train_steps": [40], "examples": 640},
            "training": {
                "max_steps": 40,
                "per_device_train_batch_size": 16,
                "learning_rate": 3e-3,
                "warmup_steps": 5,
            },
        }
    )
    out = tmp_path_factory.mktemp("tuned")
    finetune(recipe, checkpoint, out, task="parity", documents=[])
    return out / "128"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama, whose tokenizer begins a text with a token."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = load_tokenizer("train:300", corpus=[SENTENCE] * 4)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|endoftext|>{{ message.content }}{% endfor %}"
    )
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def delta(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its meta-attention alone."""
    tokenizer, out = load_tokenizer(str(base)), tmp_path_factory.mktemp("delta")
    model = add_meta_attention(
        LlamaForCausalLM.from_pretrained(base),
        meta_token_id=meta_token_id(tokenizer),
        heads=2,
        head_size=8,
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(
                parameter, std=0.3, generator=torch.Generator().manual_seed(len(name))
            )
    model.base_is_elsewhere = True
    save_model(model, tokenizer, out)
    return out


def run(arguments: Sequence[str | Path], home: Path) -> dict[str, Any]:
    """The results of `lm_eval`, run offline by a command line of its own."""
    caches = {"HF_HOME": str(home / "home"), "HF_DATASETS_OFFLINE": "1"}
    line = [sys.executable, *arguments, "--output_path", home / "out"]
    done = subprocess.run(line, env=os.environ | caches, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (home / "out").rglob("results_*.json")
    return json.loads(written.read_text(encoding="utf-8"))["results"]


@pytest.mark.parametrize(
    ("program", "further"),
    [(WITH_IMPORT, ""), (WITHOUT_IMPORT, ",trust_remote_code=True")],
    ids=["imported", "remote"],
)
def test_its_own_kind_of_model(
    program: str, further: str, checkpoint: Path, tmp_path: Path
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text(
        "".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8"
    )
    for name, lines in TASKS.items():
        files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        text = f"task: {name}\n{files}doc_to_text: question\n{lines}"
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    tasks = ["--tasks", ",".join(TASKS), "--include_path", tmp_path]
    model = [
        "--model",
        "hf",
        "--device",
        "cpu",
        "--model_args",
        f"pretrained={checkpoint}{further}",
    ]
    assert run(["-c", program, *model, *tasks], tmp_path).keys() == TASKS.keys()


def test_the_command_gives_the_figures_of_evaluate(tuned: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tuned))
    write_harness_tasks(
        tmp_path, tokenizer, tasks=["parity"], lengths=[128], n=100, condition="paper", documents=[]
    )
    model = [
        "--model",
        "metatokens",
        "--model_args",
        f"pretrained={tuned},marker=_PAUSE_",
        "--batch_size",
        "20",
    ]
    harness = run(
        [
            "-m",
            "metatokens.evaluation.lm_eval",
            *model,
            "--tasks",
            "metatokens",
            "--include_path",
            tmp_path,
        ],
        tmp_path,
    )
    line = [
        "evaluate",
        "--model",
        tuned,
        "--task",
        "parity",
        "--lengths",
        "128",
        "-n",
        "100",
        "--json",
    ]
    printed = subprocess.run(
        [sys.executable, "-m", "metatokens", *line], capture_output=True, text=True, check=True
    )
    [expected] = [
        result["value"]
        for result in map(json.loads, printed.stdout.splitlines())
        if result["metric"] == "exact_match"
    ]
    assert 0.2 < expected < 0.8  # so that equal figures mean something
    assert harness["metatokens_parity_paper_128"]["exact_match,trimmed"] == expected


@pytest.mark.parametrize("task", HARNESS_TASKS)
def test_every_task_counts_the_answers_that_greedy_decoding_gets_right(
    task: str, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 128 tokens and of 16 times as many; the completions are what the model says, and some that are not."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tokenizer, model = load_tokenizer(str(tuned)), load_model(tuned).eval()
    lengths = [128, 2048] if task in ("needle", "variable_tracking") else [128]
    write_harness_tasks(
        tmp_path, tokenizer, tasks=[task], lengths=lengths, n=12, condition="paper", documents=STORY
    )
    for data in sorted(tmp_path.glob("metatokens_*.jsonl")):
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        for row in rows[::2]:
            ids = torch.tensor([encode_prompt(tokenizer, row["prompt"], "_PAUSE_")])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2
            )
            row["completion"] = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        name = data.stem
        evaluated = lm_eval.simple_evaluate(
            model=MetaTokensLM(str(tuned), marker="_PAUSE_", batch_size=4),
            tasks=[name],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            gen_kwargs={"max_gen_toks": 2},
            log_samples=True,
        )
        hits = [sample["exact_match"] for sample in evaluated["samples"][name]]
        assert [bool(hit) for hit in hits[::2]] == [
            bool(row["completion"].strip()) for row in rows[::2]
        ]
        assert evaluated["results"][name]["exact_match,trimmed"] == pytest.approx(
            sum(hits) / len(hits)
        )


def by_hand(
    model: Any, context: list[int], continuation: list[int], every: int | None
) -> tuple[float, bool]:
    """The log-likelihood of a continuation, token by token, meta-tokens put in one by one."""
    total, is_greedy, sequence = 0.0, True, []
    for position, token in enumerate([*context, *continuation]):
        if position >= len(context):
            with torch.inference_mode():
                logits = model(torch.tensor([sequence])).logits[0, -1].double().log_softmax(-1)
            total += logits[token].item()
            is_greedy &= logits.argmax().item() == token
        sequence.append(token)
        if every is not None and (position + 1) % every == 0:
            sequence.append(model.config.meta_token_id)
    return total, is_greedy


def requests(kind: str, *all_arguments: tuple[str, ...]) -> list[Instance]:
    return [Instance(kind, {}, arguments, i) for i, arguments in enumerate(all_arguments)]


@pytest.mark.parametrize("every", [None, 1, 4])
@pytest.mark.parametrize("which", ["checkpoint", "delta"])
def test_loglikelihoods(which: str, every: int | None, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(str(folder))
    asked = [
        ("the cat sat on", " a mat"),
        ("two dogs", " ran over <|meta|> green hills"),
        ("", "a river in spring"),
    ]
    answers = MetaTokensLM(str(folder), meta_every=every, batch_size=2).loglikelihood(
        requests("loglikelihood", *asked), disable_tqdm=True
    )
    for (context, continuation), (likelihood, is_greedy) in zip(asked, answers, strict=True):
        before = encode_prompt(tokenizer, context) if context else [tokenizer.eos_token_id]
        whole = encode_prompt(tokenizer, context + continuation)
        after = (
            whole[len(before) :]
            if context
            else encode_prompt(tokenizer, continuation)[which == "delta" :]
        )
        expected, expected_greedy = by_hand(model, before, after, every)
        assert likelihood == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_greedy


def from_harness(folder: Path, **options: Any) -> Any:
    """The model that the harness makes of `--model metatokens` and these options."""
    return get_model("metatokens").create_from_arg_obj(
        {"pretrained": str(folder)} | options, {"device": "cpu"}
    )


@pytest.mark.parametrize("begins", [None, False])
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("which", ["checkpoint", "delta"])
def test_rolling_loglikelihood_counts_text_alone(
    which: str, every: int | None, begins: bool | None, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(which)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(str(folder))
    [text] = encode_text(tokenizer, [SENTENCE])
    [likelihood] = from_harness(
        folder, meta_every=every, add_bos_token=begins, tokenizer=tokenizer
    ).loglikelihood_rolling(requests("loglikelihood_rolling", (SENTENCE,)), disable_tqdm=True)
    expected, _ = by_hand(model, [tokenizer.eos_token_id], text, every)
    assert likelihood == pytest.approx(expected, abs=1e-3)


def test_rolling_loglikelihood_is_that_of_the_harness_for_a_plain_base(base: Path) -> None:
    """Without a first token, which the harness's own kind of model counts twice unless it is told not to."""
    options = {"pretrained": str(base), "add_bos_token": False}
    plain = get_model("hf").create_from_arg_obj(options, {"batch_size": 1, "device": "cpu"})
    asked = requests("loglikelihood_rolling", (SENTENCE,))
    expected = plain.loglikelihood_rolling(asked, disable_tqdm=True)
    assert from_harness(base).loglikelihood_rolling(asked, disable_tqdm=True) == pytest.approx(
        expected, abs=1e-3
    )


@pytest.mark.parametrize(("which", "begins_by_itself"), [("checkpoint", False), ("delta", True)])
def test_a_context_begins_as_it_is_asked_to(
    which: str, begins_by_itself: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(which)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    [text] = encode_text(tokenizer, ["the cat"])
    for begins in (None, False):
        model = from_harness(folder, tokenizer=tokenizer, add_bos_token=begins)
        is_begun = begins_by_itself if begins is None else begins
        expected = [tokenizer.bos_token_id] * is_begun + text
        assert model.tok_encode("the cat") == expected
        assert model.tok_batch_encode(["the cat"])[0].tolist() == [expected]
        model.apply_chat_template([{"role": "user", "content": "the cat"}])
        assert model.tok_encode("the cat") == text
        assert model.tok_encode("<|endoftext|>the cat") == [tokenizer.bos_token_id, *text]


def test_a_batch_size_that_the_harness_finds(delta: Path) -> None:
    asked = requests(
        "generate_until", ("the cat", {"until": [], "do_sample": False, "max_gen_toks": 4})
    )
    expected = from_harness(delta).generate_until(asked, disable_tqdm=True)
    generated = from_harness(delta, batch_size="auto", max_batch_size=2).generate_until(
        asked, disable_tqdm=True
    )
    assert generated == expected


@pytest.mark.parametrize("every", [None, 3])
def test_generation_inserts_as_generate_does(every: int | None, delta: Path) -> None:
    model, tokenizer = load_model(delta).eval(), load_tokenizer(str(delta))
    contexts = ["the cat", "two dogs ran over green hills and"]
    generated = MetaTokensLM(str(delta), meta_every=every, batch_size=2).generate_until(
        requests(
            "generate_until",
            *((text, {"until": [], "do_sample": False, "max_gen_toks": 9}) for text in contexts),
        ),
        disable_tqdm=True,
    )
    for context, continuation in zip(contexts, generated, strict=True):
        ids = encode_prompt(tokenizer, context)
        for index in reversed(range(every or len(ids) + 1, len(ids) + 1, every or 1)):
            ids.insert(index, model.config.meta_token_id)
        prompt = torch.tensor([ids])
        sequence = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=9,
            meta_every=every,
        )
        assert continuation == tokenizer.decode(sequence[0, len(ids) :], skip_special_tokens=True)


def test_a_chat_template_keeps_its_special_tokens_and_text_stays_text(delta: Path) -> None:
    model, tokenizer = MetaTokensLM(str(delta)), load_tokenizer(str(delta))
    text = f"the cat <|meta|> sat{tokenizer.eos_token}"
    said = model.apply_chat_template([{"role": "user", "content": text}])
    ids = model.tok_encode(said)
    assert ids[0] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    assert meta_token_id(tokenizer) not in ids
    assert tokenizer.decode(ids[1:]) == text
    marking = MetaTokensLM(str(delta), marker="_PAUSE_")
    said = marking.apply_chat_template([{"role": "user", "content": "the cat _PAUSE_ sat"}])
    meta = meta_token_id(tokenizer)
    cat, sat = encode_text(tokenizer, ["the cat", " sat"])
    assert marking.tok_encode(said) == [tokenizer.eos_token_id, *cat, meta, *sat]


# Options, and a word of the sentence that refuses them.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"meta_every": 2, "marker": "_PAUSE_"}, "meta_every or marker"),
    "zero": ({"meta_every": 0}, "every:0"),
    "missing": ({"pretrained": "missing"}, "missing"),
    "adapter": ({"peft": "adapter"}, "does not take peft='adapter'"),
    "revision": ({"revision": "v2"}, "does not take revision='v2'"),
    "backend": ({"backend": "seq2seq"}, "does not take backend"),
    "truncation": ({"truncation": True}, "does not take truncation"),
    "slow tokenizer": ({"use_fast_tokenizer": False}, "does not take use_fast_tokenizer"),
    "of transformers": ({"attn_implementation": "eager"}, "does not take attn_implementation"),
    "unknown": ({"meta_evry": 3}, "does not take meta_evry=3"),
    "number format": ({"dtype": "float13"}, "cannot be read"),
    "a beginning": ({"add_bos_token": True}, "add_bos_token may be False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str, checkpoint: Path) -> None:
    options, sentence = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(sentence)):
        MetaTokensLM(**{"pretrained": str(checkpoint)} | options)


def test_the_command_refuses_in_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    model = [
        "--model",
        "metatokens",
        "--model_args",
        f"pretrained={checkpoint},revision=v2",
        "--tasks",
        "metatokens",
    ]
    (tmp_path / "metatokens.yaml").write_text("group: metatokens\ntask: []\n", encoding="utf-8")
    line = [
        sys.executable,
        "-m",
        "metatokens.evaluation.lm_eval",
        *model,
        "--include_path",
        tmp_path,
    ]
    done = subprocess.run(
        line, env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "metatokens: --model metatokens does not take revision='v2'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_meta_tokens_is_refused_where_they_are_asked_for(base: Path) -> None:
    with pytest.raises(UserError, match="meta_token_id"):
        MetaTokensLM(str(base), meta_every=2)
