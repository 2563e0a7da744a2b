import pytest

from openv41.io.tokenizer import train_tokenizer
from openv41.train.sample_shards import prepare_sample_shards
from openv41.train.token_shards import prepare_shards
from tests.train.image_runs import VISION, samples

PLAYS = {
    "one.txt": "ACT I\nEnter the King, and Lords.\n" * 9,
    "two.txt": "caf\u00e9 \u4f60\u597d \U0001f642 42\n",
    "three.txt": "x",
    "four.txt": "The quality of mercy is not strain'd.\r\n\r\n" * 5,
}


@pytest.fixture(scope="session")
def text_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in PLAYS.items():
        (folder / name).write_bytes(text.encode())
    return [folder / name for name in PLAYS]


@pytest.fixture(scope="session")
def text_tokenizer(text_files):
    return train_tokenizer(text_files, vocab_size=290)


@pytest.fixture(scope="session")
def image_tokenizer(text_files):
    return train_tokenizer(text_files, vocab_size=300, prompt_format=True)


@pytest.fixture(scope="session")
def image_text(text_files, image_tokenizer, tmp_path_factory):
    """Text shards of the tokenizer that knows images."""
    folder = tmp_path_factory.mktemp("image text") / "shards"
    return prepare_shards(text_files, image_tokenizer, folder)


@pytest.fixture(scope="session")
def image_shards(image_tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("images") / "shards"
    return prepare_sample_shards(samples(), image_tokenizer, VISION, out, max_tokens=64)
