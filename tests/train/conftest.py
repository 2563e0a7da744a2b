import pytest

from openv41.io.tokenizer import train_tokenizer

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
