"""Tables of decode steps on a GPU, made from the recorded lines. Report §2.2."""

import json

from benchmarks.record import RESULTS

Table = list[tuple[str, ...]]
NOT_MEASURED = [("",), ("not measured yet",)]


def _lines(name: str) -> list[dict[str, object]]:
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _number(value: object, digits: int = 1) -> str:
    return f"{float(str(value)):,.{digits}f}"


def _met(line: dict[str, object]) -> str:
    return {None: "", True: "met", False: "not met"}[line.get("met")]  # type: ignore[index]


def speed() -> Table:
    """Tokens per second of the engine without and with graphs."""
    lines = _lines("decode_graphs_speed")
    rows = [("requests", "call by call, tokens/s", "graphs, tokens/s", "times as fast")]
    for load in sorted({int(str(line["requests"])) for line in lines}):
        calls, graphs = (
            next(x for x in lines if x["requests"] == load and x["graphs"] is is_graph)
            for is_graph in (False, True)
        )
        a, b = (float(str(x["tokens_per_second"])) for x in (calls, graphs))
        rows.append((str(load), _number(a), _number(b), _number(b / a)))
    return rows if lines else NOT_MEASURED


def layers(part: str = "layers") -> Table:
    """Kernels and microseconds of each kind of layer."""
    lines = _lines(f"decode_graphs_{part}")
    rows = [("requests", "context", "layer", "kernels", "us", "floor", "step, us", "to first", "")]
    for x in lines:
        ratio = "" if "ratio" not in x else _number(x["ratio"], 3)
        figures = _number(x["kernels"]), _number(x["us"]), _number(x["floor_us"])
        where = str(x["requests"]), f"{x['context']:,}", str(x["kind"])
        rows.append((*where, *figures, _number(x["step_us"]), ratio, _met(x)))
    return rows if lines else NOT_MEASURED


def contexts() -> Table:
    """The same as the context grows."""
    return layers("context")


def engram() -> Table:
    """A step and a prompt with the tables on the GPU and in host memory."""
    lines = _lines("decode_graphs_engram")
    rows = [("requests", "tables", "step, us", "to resident", "prompt, ms", "to resident")]
    for x in lines:
        step = _number(x["step_us"]), _number(x["step_ratio"], 3)
        prompt = _number(x["prompt_ms"]), _number(x["prompt_ratio"], 3)
        rows.append((str(x["requests"]), str(x["tables"]), *step, *prompt))
    return rows if lines else NOT_MEASURED


def prefill() -> Table:
    """Each mode of the prefill on a GPU."""
    lines = _lines("ced_prefill_cuda")
    rows = [("mode", "tokens", "seconds", "faster than full", "theory", "")]
    for x in lines:
        ratios = _number(x["ratio_to_full"], 2), _number(x["theory"], 2)
        seconds = _number(x["median_seconds"], 2)
        rows.append((str(x["mode"]), f"{x['tokens']:,}", seconds, *ratios, _met(x)))
    return rows if lines else NOT_MEASURED


TABLES = {
    "decode_speed": speed,
    "decode_layers": layers,
    "decode_contexts": contexts,
    "decode_engram": engram,
    "ced_prefill_cuda": prefill,
}
