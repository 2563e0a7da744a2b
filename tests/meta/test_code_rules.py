"""Rules of the source that no linter knows."""

import ast
import re

from tests.meta.sources import PACKAGE, REPOSITORY, parse, source_files, walk_sources

ENVIRONMENT = {"OPENV41_KERNELS"}
READS_ENVIRONMENT = {
    "src/openv41/ops/_dispatch.py",
    "src/openv41/train/processes.py",  # the variables of torchrun
}
DISTRIBUTED = ("/parallel.py", "/processes.py", "/sharded_checkpoint.py")
FORMAT_FILES = {"tensor_names.py", "hf_config.py"}
# Parts of released tensor names that occur in no other sense.
RELEASED_NAMES = re.compile(
    r"\b(attn\.wq_a|attn\.wkv|hc_attn_\w+|hc_ffn_\w+|attn_sink|ffn\.experts|ffn\.gate|mtp\.\d"
    r"|shared_experts|engram\.embed|layers\.\{?\w*\}?\.(attn|ffn)\.)\b"
)


def imports():
    """Yield (place, file, module) of every import."""
    for where, node in walk_sources():
        path = where.rsplit(":", 1)[0]
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield where, path, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield where, path, node.module
            for alias in node.names:
                yield where, path, f"{node.module}.{alias.name}"


def test_asserts_have_a_message():
    bare = [w for w, n in walk_sources() if isinstance(n, ast.Assert) and n.msg is None]
    assert not bare, f"an assert needs a message with the values: {bare}"


def test_environment_is_read_in_one_file():
    readers, names = set(), set()
    for where, node in walk_sources():
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            readers.add(where.rsplit(":", 1)[0])
    for path in source_files():
        names |= set(re.findall(r"\bOPENV41_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert readers <= READS_ENVIRONMENT, f"os.environ belongs in {READS_ENVIRONMENT}: {readers}"
    assert names == ENVIRONMENT, f"the package has one environment variable, found {names}"


def test_nothing_prints():
    calls = [
        where
        for where, node in walk_sources()
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not calls, f"log, or use cli/ui.py: {calls}"


def test_annotations_are_real_objects():
    found = [where for where, _, module in imports() if module.startswith("__future__")]
    assert not found, f"shape checks need annotations as objects: {found}"


def test_source_is_ascii_except_the_section_sign():
    odd = []
    for path in source_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.replace("§", "").isascii():
                odd.append(f"{path.relative_to(REPOSITORY)}:{number}")
    assert not odd, f"write other characters as escapes: {odd}"


def test_triton_stays_in_kernel_files():
    found = [
        where
        for where, path, module in imports()
        if module.split(".")[0] == "triton" and not path.endswith("_triton.py")
    ]
    assert not found, found


def test_distributed_stays_in_parallel_files():
    found = [
        where
        for where, path, module in imports()
        if module.startswith("torch.distributed") and not path.endswith(DISTRIBUTED)
    ]
    assert not found, found


def test_released_tensor_names_stay_in_the_format_tables():
    found = []
    for path in source_files():
        if path.parent == PACKAGE / "io" and path.name in FORMAT_FILES:
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                hits = [m[0] for m in RELEASED_NAMES.finditer(node.value)]
                where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                found += [f"{where}: {hit}" for hit in hits]
    assert not found, "released names belong in io/tensor_names.py:\n" + "\n".join(found)
