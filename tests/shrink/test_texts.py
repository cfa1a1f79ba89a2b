"""A user's text: what is trained on, what is measured on, and what look-ups are about."""

import numpy as np
import pytest

from metatokens.data.tokenizer import END_OF_TEXT
from metatokens.errors import UserError
from metatokens.shrink import texts
from metatokens.shrink.texts import Entities, Prose, UserText
from tests.shrink.small import write_documents


def test_splits_share_no_name_and_no_word(documents):
    tokens = set(" ".join(documents).replace(".", "").split(" "))
    train, test = Entities.of(documents, "train"), Entities.of(documents, "test")

    for entities in (train, test):
        assert tokens.issuperset(entities.names)
        assert tokens.issuperset(entities.words)
        assert all(map(str.istitle, entities.names))
        assert all(map(str.islower, entities.words))
        assert min(len(entities.names), len(entities.words)) >= 64
    assert set(train.names).isdisjoint(test.names)
    assert set(train.words).isdisjoint(test.words)
    assert set(train.numbers).isdisjoint(test.numbers)
    assert min(len(train.numbers), len(test.numbers)) >= 64


def test_words_stand_in_for_names_that_are_few(documents):
    entities = Entities.of([document.lower() for document in documents], "test")
    assert entities.names == [word.capitalize() for word in entities.words]


def test_words_stand_in_for_names_in_both_splits_or_in_none(documents):
    """Of names that are many enough for the training split alone."""
    names = Entities.of(documents, "train").names
    text = [document.lower() for document in documents]
    few = [f"and {name} came" for name in names[:70] for _ in range(3)]

    train, test = (Entities.of([*text, *few], split) for split in ("train", "test"))

    for entities in (train, test):
        assert entities.names == [word.capitalize() for word in entities.words]


def test_a_text_of_few_words_is_refused(documents):
    with pytest.raises(
        UserError, match="words in lower-case letters to ask for in the test split, and 64 are"
    ):
        Entities.of(documents[:2], "test")


def test_a_long_text_is_cut_after_the_first_document_that_is_too_much(
    tokenizer, corpus, documents, monkeypatch
):
    whole = UserText(tokenizer, [str(corpus)])
    most_characters = sum(map(len, documents[:-3])) - 1
    monkeypatch.setattr(texts, "MOST_CHARACTERS", most_characters)

    cut = UserText(tokenizer, [str(corpus), "never-read.txt"])

    assert (whole.is_cut, cut.is_cut) == (False, True)
    texts_read = tokenizer.decode([*cut.train.ids, *cut.held_out.ids])
    assert sorted(texts_read.split("\n\n")) == sorted([*documents[:-3], ""])


def test_every_tenth_document_is_held_out(documents, text, tokenizer):
    held_out = documents[9::10]
    train = [document for document in documents if document not in held_out]
    for prose, expected in ((text.train, train), (text.held_out, held_out)):
        assert tokenizer.decode(prose.ids.tolist()) == "".join(f"{text}\n\n" for text in expected)


def test_a_document_with_a_control_text_stays_text(tokenizer):
    documents = [f"one{END_OF_TEXT}", "two"]
    ids = Prose(tokenizer, documents).ids.tolist()
    assert tokenizer.decode(ids) == f"one{END_OF_TEXT}\n\ntwo\n\n"
    assert tokenizer.eos_token_id not in ids


def test_excerpts_are_equally_far_apart(text):
    ids = text.held_out.ids.tolist()
    gap = (len(ids) - 50) / 3
    starts = [int(number * gap) for number in range(4)]
    assert text.held_out.excerpts(4, 50) == [ids[start : start + 50] for start in starts]


def test_excerpts_do_not_overlap(text):
    tokens = len(text.held_out.ids)
    assert len(text.held_out.excerpts(100, tokens // 5)) == 5
    assert len(text.held_out.excerpts(100, tokens - 1)) == 1


def test_a_document_that_comes_twice_is_not_both_trained_on_and_measured_on(
    documents, tokenizer, tmp_path
):
    once, twice = (
        UserText(tokenizer, [str(write_documents(tmp_path / f"{times}.jsonl", documents * times))])
        for times in (1, 2)
    )
    assert np.array_equal(twice.held_out.ids, once.held_out.ids)
    assert np.array_equal(twice.train.ids, once.train.ids)


def test_facts_go_behind_lines_where_sentences_do_not_end(tokenizer):
    ends = Prose(tokenizer, ["one two\nthree four\n"] * 20).ends
    assert len(ends) == 40
    with pytest.raises(UserError, match="the text has 1 ends of sentences and lines in"):
        Prose(tokenizer, ["one two three four " * 200]).ends  # noqa: B018


def test_too_little_text_is_refused(text):
    with pytest.raises(
        UserError,
        match=r"tokens held out, and needs more than 3,000 .*its 75 documents .*: give more text",
    ):
        text.check_holds(3000)
    with pytest.raises(
        UserError,
        match=r"tokens to train on, and needs more than 20,000 .*its 75 documents .*: give more text",
    ):
        text.check_holds(20_000)
