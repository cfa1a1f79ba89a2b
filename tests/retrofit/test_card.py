"""Pushing to the Hub, with a folder in place of the Hub."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import hub

from metatokens import add_meta_attention
from metatokens.records import Result
from tests.retrofit.architectures import META, base, logits, with_meta_tokens

MEASURED = {"model": "x", "task": "parity", "metric": "exact_match", "seed": 0}
RESULTS = [
    Result(
        **MEASURED,
        condition="landmark",
        length=128,
        value=0.91,
        n=500,
        low=0.88,
        high=0.93,
        chance=0.5,
    ),
    Result(**MEASURED, condition="paper", length=4096, value=None, n=0),
]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that receives what a repository on the Hub would."""
    folder = tmp_path / "repository"
    folder.mkdir()

    class Api:
        def create_repo(self, repo_id: str, **kwargs: Any) -> SimpleNamespace:
            return SimpleNamespace(repo_id=repo_id)

        def create_branch(self, **kwargs: Any) -> None: ...

        def create_commit(self, operations: list[Any], **kwargs: Any) -> str:
            for operation in operations:
                with operation.as_file() as file:
                    (folder / operation.path_in_repo).write_bytes(file.read())
            return "commit"

    def load(name: str | Path, **kwargs: Any) -> ModelCard:
        if Path(name).is_file():
            return ModelCard(Path(name).read_text())
        if name == "me/mine" and (folder / "README.md").exists():
            return ModelCard((folder / "README.md").read_text())
        raise LocalEntryNotFoundError("no such repository")

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(ModelCard, "load", load)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """A retrofitted model whose base has a card."""
    base("llama").save_pretrained(tmp_path / "base")
    ModelCard(f"---\n{ModelCardData(license='apache-2.0').to_yaml()}\n---\n").save(
        tmp_path / "base" / "README.md"
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    return add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16).eval()


def test_a_card_says_what_how_and_under_which_licence(
    repository: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    assert model.push_to_hub("me/mine", trained="1,000 steps on C4.", results=RESULTS) == "commit"
    card = ModelCard((repository / "README.md").read_text())
    assert card.data.license == "apache-2.0"
    (entry,) = card.data.eval_results
    assert (entry.metric_type, entry.metric_value) == ("exact_match", 0.91)
    assert "In 3 blocks they attend to one another, with 2 heads of width 16." in card.text
    assert "1,000 steps on C4." in card.text
    assert "| parity | landmark | 128 | exact match | 0.91 | 0.88 to 0.93 | 500 | 0 |" in card.text
    assert "4096" not in card.text
    assert "\nbase with meta-tokens" in card.text
    assert str(tmp_path) not in str(card)
    again = AutoModelForCausalLM.from_pretrained(repository).eval()
    assert (logits(again, with_meta_tokens()) == logits(model, with_meta_tokens())).all()


def test_a_card_that_is_there_is_kept(repository: Path, model: PreTrainedModel) -> None:
    ModelCard("---\nlicense: mit\n---\nWritten by hand.").save(repository / "README.md")
    model.push_to_hub("me/mine", trained="More.")
    assert "Written by hand." in (repository / "README.md").read_text()
    assert "More." not in (repository / "README.md").read_text()


def test_what_is_not_known_is_said(repository: Path) -> None:
    add_meta_attention(base("llama"), meta_token_id=META, layers=[]).push_to_hub(
        "me/mine", licence="mit"
    )
    card = ModelCard((repository / "README.md").read_text())

    assert card.data.license == "mit"
    assert "A LlamaForCausalLM with meta-tokens" in card.text
    assert "The model was not trained after meta-tokens were added." in card.text
    assert "No results were given." in card.text
    assert "they attend" not in card.text
    add_meta_attention(base("llama"), meta_token_id=META).push_to_hub("me/other")
    assert (
        "The base's, which was not found when this card was written"
        in (repository / "README.md").read_text()
    )
