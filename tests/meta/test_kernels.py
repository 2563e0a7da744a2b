"""Every kernel has a test on the GPU and a benchmark row; the ops without one are listed."""

import ast

from benchmarks.h200.harness import declared, modules
from tests.meta.sources import PACKAGE, REPOSITORY, parse

OPS = PACKAGE / "ops"
TESTS = REPOSITORY / "tests" / "kernels"
# The mode "required" does not bind these. Take a name out when its kernel comes.
WITHOUT_KERNEL = {
    "accept_block",
    "accept_drafts",
    "choose_experts",
    "choose_tokens",
    "doubly_stochastic",
    "expert_weights",
    "image_attention",
    "linear",
    "linear_cross_entropy",
    "linear_reverse_kl",
    "pixel_unshuffle",
    "pool_group",
    "quantized_linear",
    "residual",
    "rotate_halves",
    "router_scores",
    "sequence_balance",
}


def decorated(path, decorator):
    """Functions of a file with that decorator, called or not."""
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef):
            names = [getattr(d, "func", d) for d in node.decorator_list]
            if any(getattr(name, "id", None) == decorator for name in names):
                yield node.name


def ops():
    """File stem of every op by its name."""
    return {name: path.stem for path in OPS.glob("*.py") for name in decorated(path, "op")}


def kernels():
    """File stem of every kernel by its name."""
    files = [*OPS.glob("*_triton.py"), *OPS.glob("*_cuda.py")]
    return {name: path.stem for path in files for name in decorated(path, "kernel")}


def gpu_tested():
    """Names that occur in a test file of the kernels with a test marked gpu."""
    names = set()
    for path in TESTS.glob("test_*.py"):
        nodes = list(ast.walk(parse(path)))
        if any(isinstance(n, ast.Attribute) and n.attr == "gpu" for n in nodes):
            names |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
            names |= {n.id for n in nodes if isinstance(n, ast.Name)}
            names |= {n.name for n in nodes if isinstance(n, ast.alias)}
    return names


def measured():
    """Ops with a benchmark row."""
    return {row.op for name in modules() for row in declared(name).rows()}


def test_every_kernel_is_that_of_an_op_in_the_file_beside_it():
    found = ops()
    alone = {n: f for n, f in kernels().items() if found.get(n) != f.rpartition("_")[0]}
    assert not alone, f"a kernel has its op's name, in the file of its op: {alone}"


def test_every_kernel_has_a_test_on_the_gpu():
    missing = kernels().keys() - gpu_tested()
    assert not missing, f"no test marked gpu in tests/kernels: {sorted(missing)}"


def test_every_kernel_has_a_benchmark_row():
    missing = kernels().keys() - measured()
    assert not missing, f"no row in benchmarks/h200: {sorted(missing)}"


def test_every_row_measures_an_op():
    unknown = measured() - ops().keys()
    assert not unknown, f"no ops of the package: {sorted(unknown)}"


def test_ops_without_a_kernel_are_listed():
    found = ops().keys() - kernels().keys()
    assert found == WITHOUT_KERNEL, (
        f"not listed: {sorted(found - WITHOUT_KERNEL)}; "
        f"listed, but with a kernel or gone: {sorted(WITHOUT_KERNEL - found)}"
    )


def test_rows_are_named_once_and_notes_are_of_rows():
    for name in modules():
        module = declared(name)
        rows = [row.name for row in module.rows()]
        assert len(rows) == len(set(rows)), f"{name}: a row is declared twice"
        known = {*rows, *(row.op for row in module.rows())}
        assert module.TRIED.keys() <= known, f"{name}: {sorted(module.TRIED.keys() - known)}"
