"""Token stores with changed bytes: what is read is what was written, or a sentence names the file."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.data.blocks import BlockDataset
from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.files import LOCK
from tests.hostile.drawing import JSON, cases, damaged

Clean = Callable[[], AbstractContextManager[None]]


def read_all(path: Path) -> dict[str, list[int]]:
    store = TokenStore.open(path)
    store.tokenizer  # noqa: B018  (is checked when it is loaded)
    return {split: store.tokens(split)[:].tolist() for split in ("train", "held_out")}


@pytest.fixture(scope="module")
def copy(small_store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "tokens"
    shutil.copytree(small_store.path, folder)
    return folder


@cases(60)
@given(data=st.data())
def test_damaged_files(data: st.DataObject, small_store: TokenStore, copy: Path, clean: Clean) -> None:
    files = sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file() and path.name != LOCK)
    name = data.draw(st.sampled_from(files))
    good = (small_store.path / name).read_bytes()
    start = data.draw(st.integers(0, max(0, len(good) - 200)))
    changed = good[:start] + data.draw(damaged(good[start : start + 200])) + good[start + 200 :]
    (copy / name).write_bytes(changed)
    try:
        if changed == good:
            read_all(copy)
        else:
            with clean(), pytest.raises(UserError):
                read_all(copy)
    finally:
        (copy / name).write_bytes(good)


@cases(40)
@given(content=JSON.map(json.dumps).map(str.encode) | st.binary(max_size=20) | st.just(b"[" * 100_000))
def test_manifests_of_any_content(content: bytes, tmp_path_factory: pytest.TempPathFactory, clean: Clean) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-store"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(content)
    with clean(), pytest.raises(UserError):
        TokenStore.open(folder)


def seal(path: Path, manifest: dict) -> None:
    """Write a manifest with the checksum that the package would give it."""
    text = json.dumps(manifest | {"sha256": ""}, indent=2).encode() + b"\n"
    digest = hashlib.sha256(text).hexdigest()
    path.write_text(json.dumps(manifest | {"sha256": digest}, indent=2) + "\n", encoding="utf-8")


COUNTS = st.sampled_from([-1, 0, 1, 10**6, 2**31, 2**63, 10**30])


@cases(25)
@given(
    field=st.sampled_from(["tokens", "documents", "part", "number", "characters"]),
    split=st.sampled_from(["train", "held_out"]),
    value=COUNTS,
)
def test_a_sealed_manifest_with_wrong_counts(
    field: str, split: str, value: int, small_store: TokenStore, copy: Path, clean: Clean
) -> None:
    path = copy / "manifest.json"
    good = path.read_bytes()
    manifest = json.loads(good)
    manifest["splits"][split]["shards"][0][field] = value
    seal(path, manifest)
    try:
        with clean():
            tokens = TokenStore.open(copy).tokens(split)
            dataset = BlockDataset(
                TokenStore.open(copy), split, block_size=32, fraction=0.1, placement="uniform", seed=0
            )
            for index in (0, len(dataset) - 1):
                assert len(dataset[index]["input_ids"]) == 32
            assert len(tokens[:100]) == min(100, len(tokens))
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/hostname", "../manifest.json", "tokenizer.json\0", "x" * 5_000]
)
def test_no_file_outside_the_folder_is_read(
    name: str, copy: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy / "manifest.json"
    good = path.read_bytes()
    manifest = json.loads(good)
    manifest["tokenizer"] = {name: "0" * 64}
    seal(path, manifest)
    opened: list[Path] = []
    open_file = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or open_file(self, *a, **k))
    try:
        with clean(), pytest.raises(UserError):
            _ = TokenStore.open(copy).tokenizer
    finally:
        path.write_bytes(good)
    assert [path for path in opened if not os.path.abspath(path).startswith(str(copy))] == []


def test_the_seal_of_these_tests_is_the_packages(small_store: TokenStore, copy: Path) -> None:
    good = (copy / "manifest.json").read_bytes()
    seal(copy / "manifest.json", json.loads(good))
    assert TokenStore.open(copy).manifest == small_store.manifest
    (copy / "manifest.json").write_bytes(good)
    assert np.array_equal(TokenStore.open(copy).tokens("train")[:], small_store.tokens("train")[:])


@pytest.mark.parametrize("out", ["../escaped", "new/../../escaped"])
def test_a_store_is_written_where_the_user_says_and_nowhere_else(out: str, small_corpus: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write_token_store(inner / out.split("/")[-1], str(small_corpus), "train:300", workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]
