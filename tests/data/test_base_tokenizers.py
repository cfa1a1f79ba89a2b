"""Tokenizers of other models: what they begin a text with, and how, is kept in corpora, prompts and on disk."""

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)

from metatokens.data.prompts import SegmentEncoder, encode_chat, encode_prompt
from metatokens.data.tokenizer import decode_continuation, load_tokenizer, text_of_token
from metatokens.data.writing import write_token_store
from metatokens.evaluation.perplexity import held_out_text
from metatokens.tasks.example import encode_example
from tests.data.small_corpora import write_corpus

TEXTS = [f"the cat number {number} sat on a mat while it rained" for number in range(60)]
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
SPECIAL = ["<unk>", "<s>", "</s>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tokenizer like Llama 2's: a token begins a text, and a space its first word."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    tokenizer = LlamaTokenizer(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def base(folder):
    """The tokenizer as transformers reads it."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    """The tokenizer as the package reads it."""
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts.jsonl", TEXTS)


@pytest.fixture
def documents(base):
    """The ids of the corpus' documents, each with its end of text."""
    return [[*base(text)["input_ids"], base.eos_token_id] for text in TEXTS]


def split_at_ends(ids, eos_token_id):
    documents: list[list[int]] = [[]]
    for token in ids:
        documents[-1].append(token)
        if token == eos_token_id:
            documents.append([])
    return documents[:-1]


def test_a_text_has_the_ids_that_transformers_gives(base, tokenizer):
    assert base.convert_ids_to_tokens(base("the cat")["input_ids"])[:2] == [
        "<s>",
        "▁the",
    ]
    for text in TEXTS:
        assert encode_prompt(tokenizer, text) == base(text)["input_ids"]


def test_a_continuation_keeps_the_space_before_it(tokenizer):
    [*prompt, last_word] = encode_prompt(tokenizer, "the cat number 12 sat")

    assert tokenizer.decode([last_word]) == "sat"
    assert decode_continuation(tokenizer, prompt, [last_word]) == " sat"
    assert decode_continuation(tokenizer, prompt, [last_word, tokenizer.eos_token_id]) == " sat"
    assert decode_continuation(tokenizer, [], [*prompt, last_word]) == "the cat number 12 sat"


def test_a_token_keeps_its_space(tokenizer):
    (text,) = TEXTS[:1]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert "".join(text_of_token(tokenizer, token) for token in ids) == f" {text}"


def test_the_documents_of_a_store(
    folder,
    documents,
    tokenizer,
    corpus,
    tmp_path,
):
    store = write_token_store(tmp_path / "store", corpus, str(folder), held_out=0.2)

    train = split_at_ends(store.tokens("train")[:].tolist(), tokenizer.eos_token_id)
    held_out = split_at_ends(store.tokens("held_out")[:].tolist(), tokenizer.eos_token_id)
    assert sorted(train + held_out) == sorted(documents)
    tokens = sum(counts.tokens for counts in store.manifest.splits.values())
    assert tokens == sum(map(len, documents)) - len(documents)


def test_the_documents_that_perplexity_reads(documents, tokenizer, corpus):
    ids = held_out_text(corpus, tokenizer).tolist()

    assert split_at_ends(ids, tokenizer.eos_token_id) == documents


def prepend(backend):
    """As in the published Llama 2."""
    replaced = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence(replaced)


def before_the_first(backend):
    """As transformers makes Llama 2's."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")


def always(backend):
    """As in T5."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace])


def of_bytes(backend):
    """As in RoBERTa."""
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def tokenizer_of_characters(put_space, folder):
    """A tokenizer that puts a space before a text, and whose ids of a text are otherwise those of its parts."""
    letters = [chr(number) for number in range(33, 127)]
    entries = ["<unk>", "</s>", "\u0120", "\u2581", "\u010a", "\n", *letters]
    numbered = {entry: number for number, entry in enumerate(entries)}
    backend = Tokenizer(models.BPE(numbered, [], unk_token="<unk>"))
    put_space(backend)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("put_space", [prepend, before_the_first, always, of_bytes])
@pytest.mark.parametrize(
    "text",
    [
        "owl_PAUSE_, robin",
        "owl _PAUSE_\nrobin",
        "owl_PAUSE_robin",
        "_PAUSE_owl",
        "_PAUSE__PAUSE_ owl",
        "a_PAUSE_",
    ],
)
def test_a_meta_token_changes_no_id_of_the_text(text, put_space, tmp_path):
    tokenizer = tokenizer_of_characters(put_space, tmp_path)
    backend, meta = tokenizer.backend_tokenizer, tokenizer.meta_token_id
    segments = text.replace(" _PAUSE_", "_PAUSE_").split("_PAUSE_")
    plain = backend.encode("".join(segments), add_special_tokens=False).ids
    answer = backend.encode("go", add_special_tokens=False).ids[1:]
    assert tokenizer.convert_ids_to_tokens(plain[0]) in ("\u0120", "\u2581")

    example = encode_example(SegmentEncoder(tokenizer), segments, "go")

    for ids in (
        encode_prompt(tokenizer, text, "_PAUSE_"),
        encode_chat(tokenizer, text, "_PAUSE_"),
    ):
        text_ids = [token for token in ids if token != meta]
        assert text_ids == plain
        assert ids.count(meta) == len(segments) - 1
    text_ids = [token for token in example.input_ids if token != meta]
    assert text_ids == [*plain, *answer, tokenizer.eos_token_id]
    own_text = backend.encode("owl", add_special_tokens=False).ids
    assert len(own_text) == 4  # a text of its own still begins with a space
