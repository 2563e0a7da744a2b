import pytest

from openv41.errors import DataError
from openv41.io.released_tokenizer import fetch_released
from openv41.io.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def released_tokenizer(pytestconfig):
    """The released tokenizer, kept in pytest's cache between runs."""
    folder = pytestconfig.cache.mkdir("released_tokenizer")
    try:
        return load_tokenizer(folder)
    except DataError:
        pass
    try:
        return fetch_released(folder)
    except DataError as error:
        pytest.skip(f"no released tokenizer: {error}")
