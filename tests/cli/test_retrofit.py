"""The commands on a Llama: retrofitted, fine-tuned, measured and used, saved whole or as the added weights alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from metatokens import encode_prompt, load_meta, save_meta
from metatokens.analysis import rate_distortion
from metatokens.checkpoint import load_model, weights_sha256, weights_size
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import META_TOKEN, load_tokenizer
from metatokens.evaluation.perplexity import held_out_text
from tests.cli.command_lines import FINETUNE, Refuse, Run, Succeed, json_of, read_lines
from tests.numbers import ROUNDED_PERPLEXITY

RETROFIT = "retrofit --model base --out model --heads 2 --head-size 8"
TUNE = f"{FINETUNE} --task parity --set task.train_lengths=[64]"
EVALUATE = "evaluate --task parity --lengths 64 -n 4 --model"
GENERATE = "generate 'the cat' --max-new-tokens 2 --model"
PRETRAIN = "pretrain --recipe demo --set data.tokens=tokens --set data.block_size=32 --set training.max_steps=2"
LORA = "--set training.lora_rank=2"
WHOLE, DELTA = "model.safetensors", "meta_tokens.safetensors"
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
warnings_of_peft = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing.:FutureWarning", "ignore:Could not find a config file"
)
whole_or_delta = pytest.mark.parametrize("delta", ["", " --delta"])
Hub = Callable[[dict[str, str]], None]


@pytest.fixture
def base(small_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a Llama as others save it, whose tokenizer has no meta-token."""
    monkeypatch.chdir(tmp_path)
    backend = json.loads(small_store.tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [
        token for token in backend["added_tokens"] if token["content"] != META_TOKEN
    ]
    eos = small_store.tokenizer.eos_token
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token=eos
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained("base")
    tokenizer.save_pretrained("base")
    return tmp_path / "base"


@pytest.fixture
def tokens(base: Path, small_corpus: Path, run: Succeed) -> None:
    run(f"tokenize --corpus {small_corpus} --tokenizer base --out tokens --workers 1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Has the Hub give local folders for names."""

    def serve(folders: dict[str, str]) -> None:
        monkeypatch.setattr(
            "metatokens.checkpoint.snapshot_download", lambda name, **_: folders[name]
        )

    return serve


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The names of the weights that differ."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def added(names: Any) -> set[str]:
    return {name for name in names if "meta_" in name}


@pytest.mark.quick(delta=[""])
@whole_or_delta
def test_from_a_base_to_answers(delta: str, base: Path, run: Succeed) -> None:
    _, told = run(RETROFIT + delta)
    size, warning = told.splitlines()
    assert size == "model: model (2,096 new parameters next to 31,824)"
    assert warning.startswith("The meta-token is untrained")

    run(f"{TUNE} --model model --out tuned --set training.learning_rate=0.1")
    (file,) = Path("tuned/64").glob("*.safetensors")
    trained = changed(load_file(f"model/{file.name}"), load_file(file))
    assert trained
    assert trained <= added(trained)

    output, _ = run(f"{EVALUATE} tuned/64 --json")
    exact, tokens = read_lines(output)
    assert (exact["metric"], tokens["metric"]) == ("exact_match", "token_accuracy")
    run('look --model tuned/64 "the cat _PAUSE_ sat"')
    run("perplexity --model tuned/64 --corpus builtin --max-tokens 600 --block-size 32")
    run(f"{GENERATE} tuned/64 --meta-every 1")


def test_what_was_added_alone_goes_from_the_command_to_python(base: Path, run: Succeed) -> None:
    config = json_of("base/config.json")
    # Which no class of configurations declares.
    config |= {
        "unk_token_id": 0,
        "_model_name_or_path": "somewhere",
    }
    (base / "config.json").write_text(json.dumps(config))
    run(f"{RETROFIT} --delta")
    model = load_meta(AutoModelForCausalLM.from_pretrained(base), "model")
    for name, weight in model.named_parameters():
        weight.data.add_(0.5 if "meta_attention" in name else 0)
    save_meta(model, "again")
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.save_pretrained("again")
    ids = torch.tensor([encode_prompt(tokenizer, "the cat", landmarks="every:1")])
    continued = model.generate(ids, max_new_tokens=6, meta_every=2, do_sample=False)[
        0, ids.shape[1] :
    ]

    output, _ = run(
        "generate --model again --landmarks every:1 --meta-every 2 --max-new-tokens 6 'the cat'"
    )

    assert output == f"the cat{tokenizer.decode(continued, skip_special_tokens=True)}\n"


def test_finetuning_computes_the_logits_that_it_is_scored_on_alone(
    base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(RETROFIT)
    shares: list[float] = []
    forward = LlamaForCausalLM.forward

    def counted(self: LlamaForCausalLM, input_ids: Tensor, **kwargs: Any) -> Any:
        output = forward(self, input_ids, **kwargs)
        shares.append(output.logits.shape[1] / input_ids.shape[1])
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    run(f"{FINETUNE} --model model --out tuned --task list_recall --set task.train_lengths=[64]")
    assert len(shares) >= 2
    assert 0 < min(shares) <= max(shares) < 1 / 2


@pytest.mark.quick(kind=["base too", "lora"])
@warnings_of_peft
@pytest.mark.parametrize("kind", ["added", "delta", "base too", "lora"])
def test_a_base_in_half_precision_is_trained_by_small_steps(
    kind: str, base: Path, run: Succeed
) -> None:
    LlamaForCausalLM.from_pretrained("base").to(torch.bfloat16).save_pretrained("base")
    option = {"base too": "--set training.train_base=true", "lora": LORA}.get(kind, "")
    file = DELTA if kind == "delta" else WHOLE
    run(RETROFIT + (" --delta" if kind == "delta" else ""))

    rates = "--set training.min_learning_rate=1e-6 --set training.learning_rate=1e-5"
    run(f"{TUNE} {rates} {option} --model model --out tuned")

    before, after = load_file(f"model/{file}"), load_file(f"tuned/64/{file}")
    in_float32 = {name for name, weight in after.items() if weight.dtype == torch.float32}
    assert in_float32 == (set(after) if kind == "base too" else added(after))
    # Projections of queries, keys and values have no gradient until what comes out of them is used, and rows of the
    # table have none until a text has them.
    without_gradient = ("qkv_proj", "meta_attention.norm", "embed_tokens.weight")
    for name in in_float32:
        if not any(part in name for part in without_gradient):
            assert (after[name] != before[name].float()).float().mean() > 0.7, name
    if kind != "lora":
        trained = {
            name
            for name in after
            if not torch.equal(after[name].to(before[name].dtype), before[name])
        }
        assert trained <= in_float32


def test_perplexity_is_the_bases(base: Path, run: Succeed) -> None:
    run(RETROFIT)
    text = torch.from_numpy(held_out_text("builtin", load_tokenizer("base"), 640).astype("int64"))
    model = LlamaForCausalLM.from_pretrained("base").eval()
    with torch.no_grad():
        losses = [model(block[None], labels=block[None]).loss for block in text.split(64)]
    expected = float(torch.stack(losses).mean().exp())

    output, _ = run(
        "perplexity --model model --corpus builtin --max-tokens 640 --block-size 64 --fraction 0 --json"
    )

    assert json.loads(output)["value"] == pytest.approx(expected, rel=ROUNDED_PERPLEXITY)


def test_a_call_that_was_cut_off_can_be_repeated(
    base: Path, run: Succeed, metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("metatokens.checkpoint.write_manifest", cut_off)
        assert metatokens(RETROFIT)[0] == 130
    assert not Path("model").exists()

    run(RETROFIT)

    load_model(Path("model"))
    assert not list(Path().glob(".model*"))


def test_what_cannot_be_is_refused(base: Path, run: Succeed, refused: Refuse) -> None:
    run(RETROFIT)
    refused(RETROFIT, "model is not an empty folder; give another one.")
    refused(
        "retrofit --model base --out /proc/new", "/proc/.new.partial: No such file or directory"
    )
    refused("retrofit --model model --out new", "has meta-tokens already")
    refused(
        "retrofit --model nowhere --out new",
        "there is no folder nowhere; a model of the Hub is hf:NAME.",
    )
    refused(
        "retrofit --model base --out new --layers 0,2",
        "layers is [0, 2]; give a list of some of 0 to 1",
    )
    refused(f"{EVALUATE} base", "the model in base has no meta_token_id, which markers need")
    assert not Path("new").exists()


def test_overwriting_keeps_the_base_of_a_delta(base: Path, run: Succeed, refused: Refuse) -> None:
    run(RETROFIT + " --delta")
    refused(f"{TUNE} --model model --out base --overwrite", "--overwrite would remove")


def test_a_base_of_the_hub_keeps_its_name(base: Path, run: Succeed, hub: Hub) -> None:
    base.rename("cached")
    hub({"someone/base": "cached"})
    sizes = "--heads 2 --head-size 8"

    run(f"retrofit --model hf:someone/base --out model --delta {sizes}")
    # The folder where the Hub's model is kept may be given too.
    run(f"retrofit --model cached --out same {sizes}")

    assert json_of("model/meta_tokens.json")["meta_attention"]["base"] == "someone/base"
    assert "cached" not in Path("model/meta_tokens.json").read_text()
    assert run(f"{GENERATE} model --meta-every 1") == run(f"{GENERATE} same --meta-every 1")


@warnings_of_peft
def test_folders_of_runs_come_whole_from_the_hub(
    base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(f"{RETROFIT} --delta")
    run(f"{TUNE} --model model --out tuned")
    for name in ("base", "model"):  # which the folders name
        shutil.copytree(name, Path("cache", name))

    def fetched(name: str, **patterns: list[str]) -> str:
        files = [
            path.relative_to(name).as_posix() for path in Path(name).rglob("*") if path.is_file()
        ]
        for file in filter_repo_objects(files, **patterns):
            target = Path("cache", name, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(name, file), target)
        return f"cache/{name}"

    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", fetched)
    assert run(f"{GENERATE} hf:tuned/64") == run(f"{GENERATE} tuned/64")
    assert Path("tuned/64/checkpoints").is_dir()
    assert not Path("cache/tuned/64/checkpoints").exists()


@pytest.fixture
def chatting(base: Path) -> PreTrainedTokenizerFast:
    """The base's tokenizer, which gets a chat template."""
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = (
        "{% for message in messages %}<|endoftext|>{{ message.role }}: {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|endoftext|>{% endif %}"
    )
    tokenizer.save_pretrained("base")
    return tokenizer


def test_a_chat_gets_the_answer_of_its_template(
    chatting: PreTrainedTokenizerFast, run: Succeed
) -> None:
    run(RETROFIT)
    ids = chatting.apply_chat_template(
        [{"role": "user", "content": "the cat"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    model = AutoModelForCausalLM.from_pretrained("model")
    continued = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    generate = "generate --model model --max-new-tokens 6 --chat"

    answer = run(f"{generate} 'the cat'")
    shown, _ = run(f"{generate} --marker _PAUSE_ --show-meta 'the cat _PAUSE_ sat'")

    assert answer == (f"{chatting.decode(continued, skip_special_tokens=True)}\n", "")
    assert shown.startswith("<|endoftext|>user: the cat<|meta|> sat<|endoftext|>")


@pytest.mark.quick(layers=[""])
@warnings_of_peft
@pytest.mark.parametrize("layers", ["", " --layers none"])
def test_lora_changes_the_base_and_comes_back(layers: str, base: Path, run: Succeed) -> None:
    run(RETROFIT + layers)
    # Step 2 is saved.
    line = f"{TUNE} --model model --out tuned {LORA}".replace("max_steps=2", "max_steps=4")
    run(line)
    checkpoints = Path("tuned/64/checkpoints")
    (saved,) = (checkpoints / "checkpoint-2").glob("*.safetensors")
    before, after = load_file("model/model.safetensors"), load_file("tuned/64/model.safetensors")
    trained = changed(before, after)
    assert saved.name == "adapter_model.safetensors"
    assert added(before) <= trained
    adapted = {name.split(".")[-2] for name in trained - added(before)}
    assert adapted == LAYERS
    run(f"{EVALUATE} tuned/64")

    # Cut off before its last step, it goes on from its checkpoint and ends the same.
    shutil.rmtree(checkpoints / "checkpoint-4")
    for name in ("manifest.json", WHOLE):
        Path("tuned/64", name).unlink()
    run(line)
    assert changed(after, load_file("tuned/64/model.safetensors")) == set()


@pytest.mark.quick(delta=[" --delta"])
@whole_or_delta
def test_checkpoints_hold_what_is_trained_alone_and_go_on_exactly(
    delta: str, base: Path, run: Succeed, refused: Refuse
) -> None:
    folder, file = Path("tuned/64"), DELTA if delta else WHOLE
    tune = TUNE.replace("max_steps=2", "max_steps=6")
    line = f"{tune} --model model --out tuned --set training.learning_rate=0.1"
    run(RETROFIT + delta)
    if not delta:  # the base of the retrofitted model may have been trained too, in between
        run(f"{TUNE} --model model --out before --set training.train_base=true")
        shutil.rmtree("model")
        shutil.copytree("before/64", "model", ignore=shutil.ignore_patterns("checkpoints"))
    run(line)
    expected = load_file(folder / file)

    for step in (4, 6):
        (weights,) = (folder / f"checkpoints/checkpoint-{step}").glob("*.safetensors")
        assert load_file(weights).keys() == added(expected)
        for name in ("manifest.json", file):  # cut off at the end, then two steps before it
            (folder / name).unlink()
        if step == 4:
            shutil.rmtree(folder / "checkpoints/checkpoint-6")
        run(line)
        assert changed(expected, load_file(folder / file)) == set()

    # Without the base it is no model.
    refused(
        f"{EVALUATE} tuned/64/checkpoints/checkpoint-6",
        "the weights in tuned/64/checkpoints/checkpoint-6",
    )


@pytest.mark.quick(delta=[" --delta"])
@warnings_of_peft
@whole_or_delta
def test_no_file_names_the_place_of_the_base(
    delta: str, base: Path, run: Succeed, refused: Refuse
) -> None:
    root = base.parent
    run(f"{RETROFIT}{delta}".replace("--model base", f"--model {base}"))
    run(f"{TUNE} --model {root / 'model'} --out deeper/tuned")

    texts = [
        path for path in root.rglob("*") if path.suffix in (".json", ".md", ".jsonl", ".jinja")
    ]
    naming_it = [path for path in texts if str(root) in path.read_text()]
    assert naming_it == []
    run(f"{GENERATE} deeper/tuned/64")
    if delta:  # the folder is moved with its base, and then away from it
        Path("moved").mkdir()
        for name in ("base", "model", "deeper"):
            Path(name).rename(Path("moved") / name)
        run(f"{GENERATE} moved/deeper/tuned/64")
        Path("moved/model").rename("model")
        refused(
            f"{GENERATE} model",
            "the base of model is not at model/../base: put it there (a link will do).",
        )
        Path("base").symlink_to("moved/base")
        run(f"{GENERATE} model")


def test_weights_of_a_pretrained_models_size_get_rates_that_fit(
    base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(RETROFIT)
    _, small = run(f"{TUNE} --model model --out small")
    monkeypatch.setattr("metatokens.cli.train_commands.LARGE", weights_size(Path("model")))
    _, large = run(f"{TUNE} --model model --out large")

    assert "recipe" not in small
    assert "recipe: pretrained_finetune, for weights of" in large
    assert json_of("small/settings.json")["recipe"]["training"]["learning_rate"] == 4e-3
    assert json_of("large/settings.json")["recipe"]["training"]["learning_rate"] == 5e-4


@pytest.mark.usefixtures("tokens")
@pytest.mark.quick(delta=[" --delta"])
@whole_or_delta
def test_text_is_trained_on_and_the_model_analysed(
    delta: str, run: Succeed, refused: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_distortion, "BETAS", (0.1,))
    monkeypatch.setattr(rate_distortion, "SCHEDULE", replace(rate_distortion.SCHEDULE, epochs=1))
    file = DELTA if delta else WHOLE
    run(RETROFIT + delta)

    _, said = run(f"{PRETRAIN} --set training.logging_steps=1 --init model --out more")
    assert said.startswith("only what was added to the base is trained; training.train_base=true")
    for kind in ("sharpness", "residual"):
        run(f"analyze {kind} --model more --task parity --length 64 -n 4 --out {kind}.jsonl")
    run("analyze rate-distortion --model more --task parity --length 64 -n 70")

    trained = changed(load_file(f"model/{file}"), load_file(f"more/{file}"))
    assert "model.embed_tokens.meta_token.weight" in trained
    assert trained <= added(trained)
    for kind, metric in (("sharpness", "premise_holds"), ("residual", "attention_weight")):
        records = read_lines(Path(f"{kind}.jsonl").read_text())
        modules = {record["module"] for record in records if record["metric"] == metric}
        assert modules == {"attention", "second_attention"}
    refused(f"{EVALUATE} more --intervention no_pos", "no_pos is for this package's own models")
    extend = (
        "extend --model more --factor 2 --recipe small_extend --out longer --set data.tokens=tokens"
    )
    refused(extend, "extend is for this package's own models; this is a LlamaForCausalLM")


@pytest.mark.usefixtures("tokens")
@warnings_of_peft
def test_adapters_of_a_delta_are_merged_into_its_base(run: Succeed) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    run(f"{RETROFIT} --delta")
    _, said = run(f"{PRETRAIN} --init model --set training.lora_rank=2 --out adapted")
    assert "only what was added" not in said
    assert not torch.equal(
        load_file("adapted/model.safetensors")[name], load_file("base/model.safetensors")[name]
    )
    run(f"{EVALUATE} adapted")


@pytest.mark.usefixtures("tokens")
def test_a_decoder_without_meta_tokens_is_trained_on_text(
    base: Path, run: Succeed, refused: Refuse
) -> None:
    run(f"{PRETRAIN} --init base --set data.placement=none --out more")
    before, after = load_file("base/model.safetensors"), load_file("more/model.safetensors")
    assert changed(before, after) == set(before)
    run("perplexity --model more --corpus builtin --max-tokens 600 --block-size 32")
    run(f"{GENERATE} more")
    for line in (
        f"{TUNE} --model more --out tuned",
        f"{EVALUATE} more",
        f"{GENERATE} more --meta-every 2",
    ):
        refused(line, "which markers need; `metatokens retrofit` gives it one")
    run("retrofit --model more --out model --delta")
    run("perplexity --model model --corpus builtin --max-tokens 600 --block-size 32")


def test_another_base_is_another_model(base: Path, run: Succeed) -> None:
    run(f"{RETROFIT} --delta")
    before = weights_sha256(Path("model"))
    model = LlamaForCausalLM.from_pretrained("base")
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained("base")
    assert weights_sha256(Path("model")) != before
