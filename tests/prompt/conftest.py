import json

import pytest

from tests.io.conftest import released_tokenizer  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def vectors(request):
    """Every prompt vector, by name."""
    folder = request.getfixturevalue("shared_dir") / "vectors"  # tests say themselves: golden
    files = ("v41_prompts.json", "v41_prompts_more.json")
    cases = [case for file in files for case in json.loads((folder / file).read_text("utf-8"))]
    return {case["name"]: case for case in cases}
