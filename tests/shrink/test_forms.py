"""The forms of look-ups: the package's, and a user's."""

import re

import pytest

from metatokens.errors import UserError
from metatokens.shrink.lookups import KINDS, Form, read_forms

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PACKAGED = read_forms()
SENTENCE = 'state: " {name} likes {word}.", ask: "\\nWhat {name} likes is"'
LINE_FEED = "\\n"  # as YAML writes it
GOOD = f'{{{SENTENCE}, answer: " {{word}}"}}'
BAD = {
    "exam: {}": "forms are for train or test, not for 'exam'",
    f"train: {{statement: [{GOOD.replace('{word}', '{town}')}]}}": "has the placeholder {town}",
    f"train: {{statement: [{GOOD.replace('{word}', '{}')}]}}": "has the placeholder {}",
    f"train: {{statement: [{GOOD.replace('{word}', '{word:,}')}]}}": "has the placeholder {word:,}",
    f"train: {{statement: [{GOOD.replace('{word}', '{word!r}')}]}}": "has the placeholder {word!r}",
    f"train: {{statement: [{{{SENTENCE}}}]}}": "answer: Field required",
    f'train: {{statement: [{{{SENTENCE}, answer: " yes"}}]}}': "its answer has no placeholder",
    f'train: {{statement: [{GOOD[:-1]}, kept: " "}}]}}': "kept: Extra inputs are not permitted",
    f"train: {{statement: [{GOOD.replace('{word}', '{word')}]}}": "cannot be used: ",
    f"train: {{poem: [{GOOD}]}}": "kind: Input should be 'statement', 'question', 'keys' or",
    'train: {several: [{state: [], ask: "\\nWhat is", answer: " {word}"}]}': "state: Tuple should",
    'train: {keys: [{state: " {name}", ask: "\\nWhat is", answer: " {word}"}]}': (
        "{word} is asked for, and not stated"
    ),
    'train: {keys: [{state: " {name}", ask: "\\nIn {word} is", answer: " {name}"}]}': (
        "{word} is asked for, and not stated"
    ),
    f"train: {{statement: [{GOOD}]}}\ntest: {{question: [{GOOD}]}}": "is trained and tested",
    f"train: {{statement: [{GOOD}]}}\ntest: {{question: [{GOOD.replace('What', 'Which')}]}}": (
        "the wording ' {name} likes {word}.' is trained and tested"
    ),
    f"train: {{statement: [{GOOD}]}}\ntest: {{keys: [{GOOD.replace('name}', 'name1}')}]}}": (
        "the wording ' {name1} likes {word}.' is trained and tested"
    ),
    f"train: {{statement: [{GOOD.replace(' {name} likes', '{name} likes')}]}}": (
        "'{name} likes {word}.' has to begin with a space or a line feed"
    ),
    f"train: {{statement: [{GOOD.replace(LINE_FEED, '')}]}}": "'What {name} likes is' has to begin",
    f"train: {{statement: [{{{SENTENCE}, answer: '{{word}}'}}]}}": "'{word}' has to begin",
    "train: [1, 2]": "holds no forms of look-ups",
    "- train": "holds no forms of look-ups",
    "train: {statement: [word]}": "holds no forms of look-ups",
    "train: {statement": "holds no forms of look-ups",
    "": "holds no forms of look-ups",
}


def shapes(texts):
    """Texts with all placeholders alike."""
    return {PLACEHOLDER.sub("{}", text) for text in texts}


def test_whatever_is_asked_for_is_stated():
    for form in (*PACKAGED["train"], *PACKAGED["test"]):
        stated = set(PLACEHOLDER.findall(" ".join(form.state)))
        assert set(PLACEHOLDER.findall(form.ask + form.answer)) <= stated, form
        assert PLACEHOLDER.search(form.answer), form


def test_no_form_is_trained_and_tested():
    train, test = PACKAGED["train"], PACKAGED["test"]
    assert len(train) >= 24
    for forms in (train, test):
        assert {form.kind for form in forms} == set(KINDS)

    train_states = shapes([sentence for form in train for sentence in form.state])
    test_states = shapes([sentence for form in test for sentence in form.state])
    assert not train_states & test_states
    assert not shapes([form.ask for form in train]) & shapes([form.ask for form in test])


def test_forms_of_a_user_are_added(tmp_path):
    file = tmp_path / "forms.yaml"
    file.write_text(f"train: {{question: [{GOOD}]}}")
    further = Form(
        kind="question",
        state=(" {name} likes {word}.",),
        ask="\nWhat {name} likes is",
        answer=" {word}",
    )

    forms = read_forms(file)

    assert forms == PACKAGED | {"train": (further, *PACKAGED["train"])}


@pytest.mark.parametrize(("content", "words"), BAD.items(), ids=[*BAD])
def test_a_bad_file_is_one_sentence(content, words, tmp_path):
    file = tmp_path / "forms.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        read_forms(file)
    sentence = str(caught.value)
    assert words in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"train: {\xe9}")
    for name in ("latin.yaml", "nowhere.yaml"):
        with pytest.raises(UserError, match=f"{name} holds no forms of look-ups: "):
            read_forms(tmp_path / name)
