"""The commands on a Llama: retrofitted, fine-tuned, measured and used, saved whole or as the added weights alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from metatokens import add_meta_attention, encode_prompt, load_meta, save_meta
from metatokens.checkpoint import load_model, weights_sha256, weights_size
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import META_TOKEN, load_tokenizer
from metatokens.evaluation.perplexity import held_out_text
from metatokens.training.batches import WithLogitsToKeep
from tests.cli.command_lines import FINETUNE, Refuse, Succeed
from tests.gradients import far
from tests.numbers import ROUNDED, ROUNDED_PERPLEXITY

RETROFIT = "retrofit --model base --out model --heads 2 --head-size 8"
TUNE = f"{FINETUNE} --task parity --train-lengths 64"
EVALUATE = "evaluate --task parity --lengths 64 -n 4 --model"
GENERATE = "generate 'the cat' --max-new-tokens 2 --model"
PRETRAIN = "pretrain --recipe demo --set data.tokens=tokens --set data.block_size=32 --set training.max_steps=2"
PEFTS_OWN = ("ignore:.is_gradient_checkpointing.:FutureWarning", "ignore:Could not find a config file")
ELSEWHERE = "the base of model is not at model/../base: put it there (a link will do)."


@pytest.fixture
def base(small_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a Llama as others save it, whose tokenizer has no meta-token."""
    monkeypatch.chdir(tmp_path)
    backend = json.loads(small_store.tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["content"] != META_TOKEN]
    eos = small_store.tokenizer.eos_token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token=eos)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained("base")
    tokenizer.save_pretrained("base")
    return tmp_path / "base"


@pytest.mark.quick(delta=[""])
@pytest.mark.parametrize("delta", ["", " --delta"])
def test_from_a_base_to_answers(delta: str, base: Path, run: Succeed) -> None:
    size, warning = run(RETROFIT + delta)[1].splitlines()
    assert size == "model: model (2,096 new parameters next to 31,824)"
    assert warning.startswith("The meta-token is untrained")
    run(f"{TUNE} --model model --out tuned --set training.learning_rate=0.1")
    after = load_file(f"tuned/64/{'meta_tokens' if delta else 'model'}.safetensors")
    assert len(list(Path("tuned/64").glob("*.safetensors"))) == 1
    for name, weight in load_file("base/model.safetensors").items():
        assert delta or torch.equal(after[name][: len(weight)], weight), name
    assert any(bool(after[name].abs().max() > 0) for name in after if name.endswith("attention.out_proj.weight"))
    for model in ("model", "tuned/64"):
        run(f'look --model {model} "the cat _PAUSE_ sat" --out {Path(model).name}.html')
        output, _ = run(f"{EVALUATE} {model} --json")
        assert [json.loads(line)["metric"] for line in output.splitlines()] == ["exact_match", "token_accuracy"]
        run(f"perplexity --model {model} --corpus builtin --max-tokens 600 --block-size 32 --json")
        run(f"generate --model {model} --max-new-tokens 4 --meta-every 2 'the cat'")


def test_what_was_added_alone_goes_from_the_command_to_python_and_back(base: Path, run: Succeed) -> None:
    config = json.loads((base / "config.json").read_text())
    config |= {"unk_token_id": 0, "_model_name_or_path": "somewhere"}  # which no class of configurations declares
    (base / "config.json").write_text(json.dumps(config))
    run(RETROFIT + " --delta")
    model = load_meta(AutoModelForCausalLM.from_pretrained(base), "model")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.5 if "meta_attention" in name else 0)
    save_meta(model, "again")
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.save_pretrained("again")
    ids = torch.tensor([encode_prompt(tokenizer, "the cat", landmarks="every:1")])
    new = model.generate(ids, max_new_tokens=6, meta_every=2, do_sample=False)[0, ids.shape[1] :]
    generate = "generate --model again --landmarks every:1 --meta-every 2 --max-new-tokens 6 'the cat'"
    assert run(generate)[0] == f"the cat{tokenizer.decode(new, skip_special_tokens=True)}\n"
    python = add_meta_attention(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base))
    save_meta(python, "from_python")
    tokenizer.save_pretrained("from_python")
    run(f"{GENERATE} from_python")


def test_finetuning_computes_the_logits_that_it_is_scored_on_alone(
    base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(RETROFIT)
    computed: list[tuple[int, int]] = []
    forward = LlamaForCausalLM.forward

    def counted(self: LlamaForCausalLM, input_ids: Tensor, **kwargs: Any) -> Any:
        out = forward(self, input_ids, **kwargs)
        computed.append((out.logits.shape[1], input_ids.shape[1]))
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    train = "--task list_recall --train-lengths 64 --set training.train_base=true --set training.learning_rate=0.01"
    run(f"{FINETUNE} --model model --out fewer {train}")
    fewer = computed.copy()
    assert fewer
    assert all(0 < columns < length / 2 for columns, length in fewer)
    computed.clear()
    monkeypatch.setattr(WithLogitsToKeep, "__call__", lambda self, items: self.collator(items))
    run(f"{FINETUNE} --model model --out all {train}")
    assert [(length, length) for _, length in fewer] == computed
    start, few, all_ = (load_file(f"{folder}/model.safetensors") for folder in ("model", "fewer/64", "all/64"))
    for name, weight in few.items():
        torch.testing.assert_close(weight, all_[name], atol=1e-6, rtol=1e-4)
    assert any(not torch.equal(weight, start[name]) for name, weight in few.items())


@pytest.mark.quick(kind=["base too", "lora"])
@pytest.mark.filterwarnings(*PEFTS_OWN)
@pytest.mark.parametrize("kind", ["added", "delta", "base too", "lora"])
def test_a_base_in_half_precision_is_trained_by_small_steps(kind: str, base: Path, run: Succeed) -> None:
    LlamaForCausalLM.from_pretrained("base").to(torch.bfloat16).save_pretrained("base")
    option = {"base too": " --set training.train_base=true", "lora": " --lora rank=2"}.get(kind, "")
    rates = "--set training.min_learning_rate=1e-6 --set training.learning_rate=1e-5"
    run(RETROFIT + (" --delta" if kind == "delta" else ""))
    run(f"{TUNE} {rates}{option} --model model --out tuned")
    file = "meta_tokens.safetensors" if kind == "delta" else "model.safetensors"
    before, after = load_file(f"model/{file}"), load_file(f"tuned/64/{file}")
    for name, weight in after.items():
        is_wide = "meta_" in name or kind == "base too"
        assert weight.dtype == (torch.float32 if is_wide else torch.bfloat16), name
        # Projections of queries, keys and values have no gradient until what comes out of them is used, and rows of
        # the table have none until a text has them.
        if is_wide and not any(part in name for part in ("qkv_proj", "meta_attention.norm", "embed_tokens.weight")):
            assert (weight != before[name].to(weight.dtype)).float().mean() > 0.7, name
        elif kind != "lora":
            assert is_wide or torch.equal(weight, before[name]), name
    run(f"{EVALUATE} tuned/64")


def test_perplexity_is_the_bases(base: Path, run: Succeed) -> None:
    run(RETROFIT)
    line = "perplexity --corpus builtin --max-tokens 640 --block-size 64 --fraction 0 --json --model"
    value = json.loads(run(f"{line} model")[0])["value"]
    text = torch.from_numpy(held_out_text("builtin", load_tokenizer("base"), 640).astype("int64"))
    model = LlamaForCausalLM.from_pretrained("base").eval()
    with torch.no_grad():
        losses = [model(block[None], labels=block[None]).loss for block in text.split(64) if len(block) == 64]
    expected = float(torch.stack(losses).mean().exp())
    assert len(model.get_input_embeddings().weight) == 768  # and the retrofitted model's 832, 64 of them for no text
    assert value == pytest.approx(expected, rel=ROUNDED_PERPLEXITY)


def test_what_cannot_be_is_refused(base: Path, run: Succeed, refused: Refuse) -> None:
    run(RETROFIT)
    Path("empty").mkdir()
    lines = {
        RETROFIT: "model is not an empty folder; give another one.",
        "retrofit --model base --out base/config.json": "base/config.json is not an empty folder; give another one.",
        f"retrofit --model base --out new --heads {10**23}": "Invalid value for '--heads'",
        "retrofit --model model --out new": "has meta-tokens already",
        "retrofit --model nowhere --out new": "there is no folder nowhere; a model of the Hub is hf:NAME.",
        "retrofit --model empty --out new": "the folder empty holds no tokenizer",
        "retrofit --model base --out new --layers 0,2": "layers is [0, 2]; give a list of some of 0 to 1",
        "retrofit --model base --out new --layers x": "layers 'x' must be numbers separated by commas",
        "retrofit --model base --out new --head-size 7": "head_size is 7: input should be a multiple of 2",
        f"{EVALUATE} base": "the model in base has no meta_token_id, which markers need",
        f"{TUNE} --model model --out tuned --lora 16": "--lora '16' must be rank=N",
        f"{TUNE} --model model --out tuned --lora rank=2 --set training.fsdp=true": "lora_rank does not go with",
    }
    for line, sentence in lines.items():
        refused(line, sentence)
        assert not Path("new").exists()


def test_a_base_of_the_hub_keeps_its_name(base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = base.rename(base.with_name("cached"))
    retrofit = "retrofit --model hf:someone/base --out model --heads 2 --head-size 8 --delta"
    monkeypatch.setattr(
        "metatokens.checkpoint.snapshot_download", lambda name, **_: {"someone/base": str(cached)}[name]
    )
    run(retrofit)
    assert json.loads(Path("model/meta_tokens.json").read_text())["meta_attention"]["base"] == "someone/base"
    assert "cached" not in Path("model/meta_tokens.json").read_text()
    output, _ = run("generate --model model --max-new-tokens 4 --meta-every 2 'the cat'")
    # The folder where the Hub's model is kept may be given too.
    run("retrofit --model cached --out same --heads 2 --head-size 8")
    assert run("generate --model same --max-new-tokens 4 --meta-every 2 'the cat'")[0] == output


@pytest.mark.filterwarnings(*PEFTS_OWN)
def test_an_adapter_of_a_model_of_the_hub_keeps_its_name(
    base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", lambda name, **_: {"someone/model": "cached"}[name])
    run(RETROFIT)
    tune = f"{TUNE} --lora rank=2 --keep-adapter"
    run(f"{tune} --model model --out first")
    Path("model").rename("cached")
    own = json.loads(Path("first/64/adapter_config.json").read_text()) | {"base_model_name_or_path": "someone/model"}
    Path("first/64/adapter_config.json").write_text(json.dumps(own))
    Path("first/64/manifest.json").unlink()
    run(f"{tune} --model first/64 --out second")
    named = json.loads(Path("second/64/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "someone/model"
    run(f"{GENERATE} second/64")


@pytest.mark.filterwarnings(*PEFTS_OWN)
def test_folders_of_runs_come_whole_from_the_hub(base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch) -> None:
    run(f"{RETROFIT} --delta")
    run(f"{TUNE} --model model --out tuned")
    run(f"{TUNE} --model model --out kept --lora rank=2 --keep-adapter --set training.text_window=8")
    for name in ("base", "model"):  # which the folders name
        shutil.copytree(name, Path("cache", name))

    def fetched(name: str, **patterns: list[str]) -> str:
        files = [path.relative_to(name).as_posix() for path in Path(name).rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, **patterns):
            Path("cache", name, file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(name, file), Path("cache", name, file))
        return f"cache/{name}"

    monkeypatch.setattr("metatokens.checkpoint.snapshot_download", fetched)
    for name in ("tuned/64", "kept/64"):
        assert run(f"{GENERATE} hf:{name}") == run(f"{GENERATE} {name}")
        assert Path(name, "checkpoints").is_dir()
        assert not Path("cache", name, "checkpoints").exists()


def test_the_type_of_what_retrofit_writes_is_chosen(base: Path, run: Succeed) -> None:
    run(f"{RETROFIT} --dtype bfloat16")
    assert load_file("model/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_a_checkpoint_without_the_base_is_no_checkpoint_for_fsdp(base: Path, run: Succeed, refused: Refuse) -> None:
    run(RETROFIT)
    train = f"{TUNE} --model model --out tuned"
    run(train)
    Path("tuned/64/manifest.json").unlink()  # as where the run was cut off
    refused(f"{train} --set training.fsdp=true", "checkpoint-2 lacks the base's weights, which FSDP needs")
    run(train)


def test_a_chat_template_works_before_and_after_fine_tuning(base: Path, run: Succeed, refused: Refuse) -> None:
    refused("generate --model base --chat 'the cat'", "the model's tokenizer has no chat template.")
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = (
        "{% for message in messages %}<|endoftext|>{{ message.role }}: {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|endoftext|>{% endif %}"
    )
    tokenizer.save_pretrained("base")
    run(RETROFIT)
    own = AutoTokenizer.from_pretrained("model", split_special_tokens=False)
    chat = [{"role": "user", "content": "the cat"}]
    ids = own.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert ids[0].tolist().count(own.eos_token_id) == 2
    model = AutoModelForCausalLM.from_pretrained("model")
    new = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, ids.shape[1] :]
    answer = own.decode(new, skip_special_tokens=True)
    generate = "generate --model model --max-new-tokens 6 --chat"
    assert run(f"{generate} 'the cat'") == (f"{answer}\n", "")
    output, _ = run(f"{generate} --marker _PAUSE_ --show-meta 'the cat _PAUSE_ sat'")
    assert output.startswith("<|endoftext|>user: the cat<|meta|> sat<|endoftext|>")
    Path("prompts.jsonl").write_text('{"prompt": "the cat"}')
    refused(f"{generate} --data prompts.jsonl", "--chat goes with a prompt")
    run(f"{TUNE} --model model --out tuned")
    expected = tokenizer.apply_chat_template(chat)["input_ids"]
    assert expected[0] == tokenizer.eos_token_id
    for folder in ("model", "tuned/64"):
        assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat)["input_ids"] == expected


@pytest.mark.quick(layers=[""])
@pytest.mark.filterwarnings(*PEFTS_OWN)
@pytest.mark.parametrize("layers", ["", " --layers none"])
def test_lora_changes_the_base_and_comes_back(layers: str, base: Path, run: Succeed) -> None:
    run(RETROFIT + layers)
    tune = FINETUNE.replace("max_steps=2", "max_steps=4")  # step 2 is saved
    line = f"{tune} --model model --out tuned --task parity --train-lengths 64 --lora rank=2"
    run(line)
    assert {path.name for path in Path("tuned/64/checkpoints/checkpoint-2").glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
    before, after = load_file("model/model.safetensors"), load_file("tuned/64/model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    own = {name for name in before if "meta_" in name}
    assert own <= changed
    assert {name.split(".")[-2] for name in changed - own} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    run(f"{EVALUATE} tuned/64")
    # Cut off before its last step, it goes on from its checkpoint and ends the same.
    shutil.rmtree("tuned/64/checkpoints/checkpoint-4")
    for name in ("manifest.json", "model.safetensors"):
        Path("tuned/64", name).unlink()
    run(line)
    again = load_file("tuned/64/model.safetensors")
    assert all(torch.equal(again[name], after[name]) for name in after)


@pytest.mark.quick(delta=[" --delta"])
@pytest.mark.parametrize("delta", ["", " --delta"])
def test_checkpoints_hold_what_is_trained_alone_and_go_on_exactly(
    delta: str, base: Path, run: Succeed, refused: Refuse
) -> None:
    run(RETROFIT + delta)
    if not delta:  # the base of the retrofitted model may have been trained too, in between
        line = f"{TUNE} --model model --out before --set training.train_base=true"
        run(line)
        shutil.rmtree("model")
        Path("before/64").rename("model")
        shutil.rmtree("model/checkpoints")
    tune = FINETUNE.replace("max_steps=2", "max_steps=6")
    line = f"{tune} --model model --out tuned --task parity --train-lengths 64 --set training.learning_rate=0.1"
    run(line)
    folder, file = Path("tuned/64"), f"{'meta_tokens' if delta else 'model'}.safetensors"
    expected = load_file(folder / file)
    own = {name for name in load_file("model/" + file) if "meta_" in name}
    for step in (4, 6):
        (weights,) = (folder / f"checkpoints/checkpoint-{step}").glob("*.safetensors")
        assert load_file(weights).keys() == own
        for name in ("manifest.json", file):  # cut off at the end, then two steps before it
            (folder / name).unlink()
        if step == 4:
            shutil.rmtree(folder / "checkpoints/checkpoint-6")
        run(line)
        again = load_file(folder / file)
        assert all(torch.equal(again[name], expected[name]) for name in expected)
    last = f"{EVALUATE} tuned/64/checkpoints/checkpoint-6"
    if delta:
        run(last)
    else:  # without the base it is no model
        refused(last, "")


@pytest.mark.quick(delta=[""])
@pytest.mark.filterwarnings(*PEFTS_OWN)
@pytest.mark.parametrize("delta", ["", " --delta"])
def test_adapters_that_are_kept_are_pefts_and_go_through_the_commands(
    delta: str, base: Path, run: Succeed, refused: Refuse
) -> None:
    run(f"{RETROFIT}{delta}".replace("--model base", f"--model {base}"))
    train = f"{FINETUNE} --task parity --set training.learning_rate=0.01 --set training.warmup_steps=1"
    model, lora = base.parent / "model", "--lora rank=2"
    run(f"{train} --model {model} --out kept --train-lengths 64 {lora} --keep-adapter")
    run(f"{train} --model {model} --out merged --train-lengths 64 {lora}")
    assert not list(Path("kept").rglob("model*.safetensors"))
    assert json.loads(Path("kept/64/adapter_config.json").read_text())["base_model_name_or_path"] == "../../model"
    # PEFT itself, on the retrofitted model, gives what the merged model does.
    plain = load_model(Path("model"))
    adapted, merged = PeftModel.from_pretrained(plain, "kept/64").eval(), load_model(Path("merged/64")).eval()
    ids = torch.randint(3, 600, (1, 12))
    ids[0, 5] = merged.config.meta_token_id
    with torch.no_grad():
        assert far(adapted(ids).logits, merged(ids).logits) < ROUNDED
        assert not torch.equal(merged(ids).logits, load_model(Path("model"))(ids).logits)
    run("generate --model kept/64 --max-new-tokens 4 --meta-every 2 'the cat'")
    further = f"{train} --out more --train-lengths 64 --model kept/64"
    refused(f"{further} --lora rank=4", "the model has adapters of rank 2; `--lora rank=2` trains them further.")
    run(f"{further} --lora rank=2 --overwrite")
    assert Path("more/64/model.safetensors").exists()  # the adapters are in it, also where the base was elsewhere
    run(f"{train} --model model --out two --train-lengths 32,64 {lora} --keep-adapter")
    first, second = (load_file(f"two/{length}/adapter_model.safetensors") for length in (32, 64))
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)
    refused(f"{train} --model model --out none --keep-adapter", "training.keep_adapter needs training.lora_rank")


@pytest.mark.quick(delta=[" --delta"])
@pytest.mark.filterwarnings(*PEFTS_OWN)
@pytest.mark.parametrize("delta", ["", " --delta"])
def test_no_file_names_the_place_of_the_base(delta: str, base: Path, run: Succeed, refused: Refuse) -> None:
    run(f"{RETROFIT}{delta}".replace("--model base", f"--model {base}"))
    model = base.parent / "model"
    train = f"{TUNE} --model {model}"
    run(f"{train} --out deeper/tuned")
    run(f"{train} --out kept --lora rank=2 --keep-adapter")
    texts = [path for path in base.parent.rglob("*") if path.suffix in (".json", ".md", ".jsonl", ".jinja")]
    assert [path for path in texts if str(base.parent) in path.read_text()] == []
    for folder in ("deeper/tuned/64", "kept/64"):
        run(f"{GENERATE} {folder}")
    if delta:  # the folder is moved with its base, and then away from it
        base.parent.joinpath("moved").mkdir()
        for name in ("base", "model", "deeper"):
            Path(name).rename(Path("moved") / name)
        run(f"{GENERATE} moved/deeper/tuned/64")
        Path("moved/model").rename("model")
        refused(f"{GENERATE} model", ELSEWHERE)
        Path("base").symlink_to("moved/base")
        run(f"{GENERATE} model")


def test_a_linked_base_is_found_by_the_runs_that_follow(base: Path, run: Succeed, tmp_path: Path) -> None:
    run(f"{RETROFIT} --delta")
    Path("far/away").mkdir(parents=True)
    base.rename("far/away/base")
    base.symlink_to("far/away/base")
    run(f"{TUNE} --model model --out runs/tuned")
    named = json.loads(Path("runs/tuned/64/meta_tokens.json").read_text())["meta_attention"]["base"]
    assert named == "../../../base"
    run(f"{GENERATE} runs/tuned/64")


def test_weights_of_a_pretrained_models_size_get_rates_that_fit(
    base: Path, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(RETROFIT)
    line = f"{TUNE} --model model"
    assert "recipe" not in run(f"{line} --out small")[1]
    monkeypatch.setattr("metatokens.cli.making.LARGE", weights_size(Path("model")))
    assert "recipe: pretrained_finetune, for weights of" in run(f"{line} --out large")[1]
    for out, rate in (("small", 4e-3), ("large", 5e-4)):
        assert json.loads(Path(out, "settings.json").read_text())["recipe"]["training"]["learning_rate"] == rate


def test_gguf_files_are_for_retrofit(base: Path, refused: Refuse) -> None:
    Path("quantised").mkdir()
    Path("quantised/one.gguf").write_bytes(b"GGUF")
    for given in ("quantised", "quantised/one.gguf"):
        refused(f"generate --model {given} the", f"{given} is in GGUF form, which `metatokens retrofit` alone takes")
        refused(f"retrofit --model {given} --out new", f"the folder {given} holds no tokenizer that can be loaded.")
    Path("quantised/two.gguf").write_bytes(b"GGUF")
    refused("retrofit --model quantised --out new", "quantised holds 2 GGUF files, such as one.gguf; name one of them.")


@pytest.mark.quick(delta=[" --delta"])
@pytest.mark.filterwarnings(*PEFTS_OWN)
@pytest.mark.parametrize("delta", ["", " --delta"])
def test_text_is_trained_on_and_the_model_analysed_and_adapted(
    delta: str, base: Path, run: Succeed, refused: Refuse, small_corpus: Path
) -> None:
    run(RETROFIT + delta)
    run(f"tokenize --corpus {small_corpus} --tokenizer model --out tokens --workers 1")
    run(f"{PRETRAIN} --set training.logging_steps=1 --init model --out more")
    run("plot more --out curves.png")
    file = f"{'meta_tokens' if delta else 'model'}.safetensors"
    assert [path.name for path in Path("more").glob("*.safetensors")] == [file]
    before, after = (load_file(f"{folder}/{file}") for folder in ("model", "more"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.embed_tokens.meta_token.weight" in changed
    assert all("meta_" in name for name in changed)
    for kind, metric in (("sharpness", "premise_holds"), ("residual", "attention_weight")):
        run(f"analyze {kind} --model more --task parity --length 64 -n 4 --out {kind}.jsonl")
        records = map(json.loads, Path(f"{kind}.jsonl").read_text().splitlines())
        assert {one["module"] for one in records if one["metric"] == metric} == {"attention", "second_attention"}
    run("analyze rate-distortion --model more --task parity --length 64 -n 70 --fits 1 --intervention no_embed")
    refused(f"{EVALUATE} more --intervention no_pos", "no_pos is for this package's own models")
    line = "extend --model more --factor 2 --recipe small_extend --out longer --set data.tokens=tokens"
    refused(line, "extend is for this package's own models; this is a LlamaForCausalLM")
    run(f"{PRETRAIN} --init more --lora rank=2 --out adapted")
    run(f"{TUNE} --model more --out tuned --lora rank=2")
    name = "model.layers.0.self_attn.q_proj.weight"
    for folder in ("adapted", "tuned/64"):  # whole, since adapters were merged into the base
        assert not torch.equal(
            load_file(f"{folder}/model.safetensors")[name], load_file("base/model.safetensors")[name]
        )
    run(f"{EVALUATE} tuned/64")


def test_a_decoder_without_meta_tokens(base: Path, run: Succeed, refused: Refuse, small_corpus: Path) -> None:
    """It can be trained on text, measured and continued; commands that need a meta-token refuse it."""
    run(f"tokenize --corpus {small_corpus} --tokenizer base --out tokens --workers 1")
    run(f"{PRETRAIN} --init base --set data.placement=none --out more")
    before, after = load_file("base/model.safetensors"), load_file("more/model.safetensors")
    assert all(before[name].shape == after[name].shape and not torch.equal(before[name], after[name]) for name in after)
    run("perplexity --model more --corpus builtin --max-tokens 600 --block-size 32")
    run("generate --model more --max-new-tokens 4 'the cat'")
    for line in (
        f"{FINETUNE} --model more --out tuned --task parity",
        "evaluate --model more --task parity",
        "generate --model more --meta-every 2 'the cat'",
    ):
        refused(line, "which markers need; `metatokens retrofit` gives it one")
    run("retrofit --model more --out model --delta")
    Path("base").rename("elsewhere")
    run("perplexity --model model --corpus builtin --max-tokens 600 --block-size 32")


@pytest.mark.filterwarnings(*PEFTS_OWN)
def test_adapters_that_cannot_be_read_are_refused(base: Path, run: Succeed, refused: Refuse) -> None:
    run(RETROFIT)
    Path("adapter").mkdir()
    file, weights = Path("adapter/adapter_config.json"), Path("adapter/adapter_model.safetensors")
    for text, content, sentence in (
        ("{", b"", "does not name the base of the adapter"),
        (" " * (2**20 + 1), b"", "does not name the base of the adapter"),
        ('{"base_model_name_or_path": "model"}', None, "it has no adapter_model.safetensors"),
        ('{"base_model_name_or_path": "adapter"}', b"", "belongs to another adapter"),
        ('{"base_model_name_or_path": "../nowhere"}', b"", "the base of adapter is not at adapter/../nowhere"),
        ('{"base_model_name_or_path": "model", "peft_type": "LORA"}', b"x" * 50, "cannot be read"),
    ):
        file.write_text(text)
        weights.unlink(missing_ok=True)
        if content is not None:
            weights.write_bytes(content)
        refused("evaluate --model adapter --task parity", sentence)


def test_another_base_is_another_model(base: Path, run: Succeed) -> None:
    run(f"{RETROFIT} --delta")
    before = weights_sha256(Path("model"))
    model = LlamaForCausalLM.from_pretrained("base")
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained("base")
    assert weights_sha256(Path("model")) != before
