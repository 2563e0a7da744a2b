"""The process of one peer: ``python -m benchmarks.h200.peers.child NAME:CASE FD FOLDER``.

Reads requests from its standard input and answers on the descriptor, one JSON line each.
"""

import gc
import importlib
import json
import os
import shutil
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

CACHES = {  # what peers compile goes below the folder of the peers
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "DG_JIT_CACHE_DIR": "deepgemm",
    "SGLANG_JIT_CACHE_DIR": "sglang",
    "TILELANG_CACHE_DIR": "tilelang",
}


def prepare_environment(folder: Path) -> None:
    """Set what the peers read when they are imported."""
    for name, place in CACHES.items():
        os.environ.setdefault(name, str(folder / "cache" / place))
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    os.environ.setdefault("TL_CUTLASS_PATH", str(folder / "dg" / "deep_gemm" / "include"))
    if compiler := shutil.which("nvcc"):
        os.environ.setdefault("CUDA_HOME", str(Path(compiler).resolve().parents[1]))


def case_of(name: str, shape: dict[str, Any], folder: Path) -> Any:  # noqa: ANN401 -- a Case
    """Import the adapter and build its case."""
    module, _, case = name.partition(":")
    adapter = importlib.import_module(f"benchmarks.h200.peers.{module}")
    sys.path[:0] = [str(folder / part) for part in adapter.FOLDERS]
    if hasattr(adapter, "load"):
        adapter.load(folder)
    make = partial(adapter.case, case) if hasattr(adapter, "case") else adapter.CASES[case]
    return make(shape)


class Child:
    """A checked case and the clock that times it."""

    def __init__(self, name: str, shape: dict[str, Any], folder: Path) -> None:
        import torch  # noqa: PLC0415 -- after the environment

        from benchmarks.h200.clock import Clock  # noqa: PLC0415
        from benchmarks.h200.rows import poison  # noqa: PLC0415

        torch.manual_seed(0)
        self.clock = Clock()
        self.case = case_of(name, shape, folder)
        self.mode, outputs = "eager", self.case.run()
        self.run = self.case.run
        if self.case.graph:
            try:
                self.run, outputs = self.clock.captured(self.case.run)
                self.mode = "graph"
            except Exception:
                traceback.print_exc()
        if self.mode == "graph":
            poison(outputs)
            self.run()
        self.clock.wait()
        self.error = float(self.case.error(outputs))
        if not self.error <= self.case.tolerance:
            raise ValueError(f"wrong: error {self.error:.3g}, tolerance {self.case.tolerance:.3g}")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what the harness asks."""
        if "count" in request:
            return {"count": self.clock.count([self.run], request["count"])}
        return {"samples": self.clock.sample([self.run], request["sample"])}


def freed() -> None:
    """Give back the memory of a case that nobody holds any more."""
    import torch  # noqa: PLC0415 -- after the environment

    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Answer until the input ends, or something fails."""
    name, descriptor, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    prepare_environment(folder)
    child: Child | None = None
    with os.fdopen(descriptor, "w") as out:

        def tell(answer: dict[str, Any]) -> None:
            out.write(json.dumps(answer) + "\n")
            out.flush()

        try:
            for line in sys.stdin:
                request = json.loads(line)
                if "shape" in request:
                    child = Child(name, request["shape"], folder)
                    tell({"error": child.error, "mode": child.mode, "what": child.case.what})
                elif "rest" in request:
                    child = None
                    freed()
                elif child is not None:
                    tell(child.answer(request))
        except Exception as error:
            traceback.print_exc()
            tell({"not_run": f"{type(error).__name__}: {error}"[-500:]})


if __name__ == "__main__":
    main()
