"""Token ids: words put end to end give what the tokenizer gives for the whole text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from metatokens.data.tokenizer import encode_text, load_tokenizer
from metatokens.tasks import curriculum
from metatokens.tasks.encoding import SegmentEncoder
from tests.tasks.conftest import CASES

TEXTS = st.one_of(
    st.text(alphabet=st.characters(max_codepoint=127)),
    st.text(alphabet="aZ09 '\n\t|_.:sltdremv\x1c\x85\xa0é"),
    st.lists(st.sampled_from(["it", "'s", "'ll", " ", "  ", "\n", "x", "Fruits", ":", "|", "7", "_PAUSE_"])).map(
        "".join
    ),
    st.text(),
)

AT_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure


@pytest.fixture(scope="session", params=["trained", "gpt2"])
def either(request, tokenizer):
    if request.param == "trained":
        return tokenizer
    return load_tokenizer(str(request.getfixturevalue("shared_data") / "gpt2_tokenizer"))


@AT_ANY_SPEED
@given(text=TEXTS)
def test_ids_are_those_of_the_whole_text(either, text):
    assert SegmentEncoder(either).encode_text(text, False) == encode_text(either, [text])[0]


@pytest.fixture(scope="session")
def phrase_tokenizer():
    """Byte-level, but it merges across spaces: its words are not independent."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "aĠ", "aĠb", "<|endoftext|>"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "Ġ"), ("aĠ", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", meta_token="<|meta|>")


def test_a_tokenizer_whose_words_depend_on_each_other_gets_whole_texts(phrase_tokenizer):
    (whole,) = encode_text(phrase_tokenizer, ["a b a b"])
    assert len(whole) == 3
    assert SegmentEncoder(phrase_tokenizer).encode_text("a b a b", False) == whole


@pytest.mark.parametrize(("task", "condition"), CASES)
def test_example_ids_are_its_segments_meta_tokens_answer_and_end(task, condition, tokenizer, documents):
    data = curriculum.TaskData(task, tokenizer=tokenizer, condition=condition, documents=documents)
    for index in range(30):
        example = data.sample(index, 1 + index % 5, "train")
        expected, start = [], 0
        for offset in example.markers:
            assert example.prompt[offset : offset + 8] == " _PAUSE_"
            expected += [*encode_text(tokenizer, [example.prompt[start:offset]])[0], tokenizer.meta_token_id]
            start = offset + 8
        assert start == len(example.prompt), "the prompt ends with a meta-token"
        assert example.input_ids[: example.answer_start] == tuple(expected)
        assert example.n_tokens == example.answer_start == len(expected)
        *answer, end = example.input_ids[example.answer_start :]
        assert end == tokenizer.eos_token_id
        assert tokenizer.decode(answer) == example.completion
        if task == "copying" and condition in ("paper", "decoy"):
            first = expected.index(tokenizer.meta_token_id) + 1
            assert expected[first : first + len(answer)] == answer, "the answer has the ids of the bracketed text"


def test_task_words_become_single_tokens(tokenizer):
    texts = curriculum.task_texts()
    words = {" " + word for text in texts for word in text.replace("?", "").replace(":", "").split() if word.isalpha()}
    split = [word for word, ids in zip(words, encode_text(tokenizer, sorted(words)), strict=True) if len(ids) > 1]
    assert len(split) < len(words) / 20
