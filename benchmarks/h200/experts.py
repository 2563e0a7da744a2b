"""The experts' products, forward and backward, and the way of tokens to their rows and back."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Inputs, Row, relative_error
from openv41.ops import combine, grouped_linear, sort_by_expert, take_pairs

TRIED: dict[str, str] = {}
SHAPES = {  # tokens, experts, chosen, inputs, outputs
    "small": (4096, 64, 6, 1024, 224),
    "released": (8192, 384, 6, 5120, 2304),
    "released, 64 tokens": (64, 384, 6, 5120, 2304),
}
BLOCKS = {
    "small": [(128, 128, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 8, 3)],
    "released": [(128, 256, 64, 8, 3), (128, 128, 64, 4, 4)],
    "released, 64 tokens": [(16, 64, 256, 4, 3), (16, 128, 64, 4, 5)],
}


def drawn_ids(shape: str, generator: torch.Generator) -> Tensor:
    """Different experts for each token, ascending."""
    tokens, experts, chosen, *_ = SHAPES[shape]
    draws = torch.rand(tokens, experts, generator=generator, device=generator.device)
    return draws.argsort(dim=1)[:, :chosen].sort(dim=1).values


def product_inputs(shape: str, generator: torch.Generator) -> Inputs:
    """Rows sorted by expert, a weight in bfloat16, a gradient."""
    device = generator.device
    _, experts, _, inner, columns = SHAPES[shape]
    _, counts = sort_by_expert(drawn_ids(shape, generator), experts)
    pairs = SHAPES[shape][0] * SHAPES[shape][2]

    def normal(*size: int) -> Tensor:
        made = torch.empty(size, device=device, dtype=torch.bfloat16)
        return made.normal_(generator=generator)

    return {
        "rows": normal(pairs, inner).requires_grad_(),
        "weight": (normal(experts, columns, inner) / inner**0.5).requires_grad_(),
        "counts": counts,
        "gradient": normal(pairs, columns),
    }


def forward(**given: Tensor) -> Tensor:
    """The product alone."""
    with torch.no_grad():
        return grouped_linear(given["rows"], given["weight"], given["counts"])


def train(**given: Tensor) -> tuple[Tensor, ...]:
    """The product and both gradients."""
    out = grouped_linear(given["rows"], given["weight"], given["counts"])
    found = torch.autograd.grad(out, (given["rows"], given["weight"]), given["gradient"])
    return out, *found


def product_error(given: Inputs, out: Tensor | tuple[Tensor, ...]) -> float:
    """Largest error against float32, expert by expert."""
    found = (out,) if isinstance(out, Tensor) else out
    rows, weight, grad = (given[n].detach() for n in ("rows", "weight", "gradient"))
    errors, first = [], 0
    for expert, count in enumerate(given["counts"].tolist()):
        part = slice(first, first + count)
        first += count
        wide, slope, w = rows[part].float(), grad[part].float(), weight[expert].float()
        exact = [wide @ w.T, slope @ w, slope.T @ wide]
        got = [found[0][part], *(t[part] for t in found[1:2]), *(t[expert] for t in found[2:])]
        errors += [relative_error(a, b) for a, b in zip(got, exact, strict=False)]
    return max(errors)


def with_blocks(sizes: tuple[int, ...]) -> Callable[..., Tensor]:
    """The product with other tiles."""

    def run(**given: Tensor) -> Tensor:
        from openv41.ops import grouped_linear_triton as file  # noqa: PLC0415

        chosen = file.Blocks(*sizes)
        with torch.no_grad():
            return file.product(given["rows"], given["weight"], given["counts"], chosen)

    return run


def of_torch(**given: Tensor) -> Tensor:
    """The same product by torch."""
    offsets = given["counts"].cumsum(0).to(torch.int32)
    with torch.no_grad():
        return torch._grouped_mm(given["rows"], given["weight"].mT, offs=offsets)


def product_row(shape: str, *, backward: bool) -> Row:
    """One product of all experts."""
    tokens, experts, chosen, inner, columns = SHAPES[shape]
    pairs = tokens * chosen
    used = round(experts * (1 - (1 - chosen / experts) ** tokens))  # as many are chosen
    moved = 2 * (pairs * (inner + columns) + used * inner * columns)
    others = {"torch._grouped_mm": of_torch}
    others |= {" ".join(map(str, sizes)): with_blocks(sizes) for sizes in BLOCKS[shape]}
    return Row(
        op="grouped_linear",
        shape={
            "pairs": pairs,
            "E": experts,
            "D": inner,
            "F": columns,
            "pass": "both" if backward else "forward",
        },
        make=partial(product_inputs, shape),
        ours=train if backward else forward,
        error=product_error,
        tolerance=1e-2,
        floor_bytes=moved * (3 if backward else 1),
        floor_flops=2 * pairs * inner * columns * (3 if backward else 1),
        reference=train if backward else forward,
        variants={} if backward else others,
    )


def pair_inputs(shape: str, generator: torch.Generator) -> Inputs:
    """Tokens, and the order of their pairs."""
    tokens, experts, chosen, inner, _ = SHAPES[shape]
    order, _ = sort_by_expert(drawn_ids(shape, generator), experts)
    x = torch.empty(tokens, inner, device=generator.device, dtype=torch.bfloat16)
    return {"x": x.normal_(generator=generator), "order": order, "top_k": chosen}


def there_and_back(x: Tensor, order: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Copy tokens to the rows of their experts, and sum these."""
    pairs = take_pairs(x, order, top_k)
    return pairs, combine(pairs, order, top_k)


def pair_error(given: Inputs, out: tuple[Tensor, Tensor]) -> float:
    """Copies are exact, a sum of equal values nearly so."""
    x = given["x"].float()
    copies = relative_error(out[0], x[given["order"] // given["top_k"]])
    return max(copies, relative_error(out[1], given["top_k"] * x))


def pair_row(shape: str) -> Row:
    """Both ways."""
    tokens, _, chosen, inner, _ = SHAPES[shape]
    return Row(
        op="take_pairs",
        shape={"T": tokens, "A": chosen, "D": inner, "with": "combine"},
        make=partial(pair_inputs, shape),
        ours=there_and_back,
        error=pair_error,
        tolerance=1e-6,
        floor_bytes=tokens * inner * (2 + 2 * chosen + 2 * chosen + 4),
        reference=there_and_back,
    )


def rows() -> list[Row]:
    """Products of a training step of ``small``, and of the released width."""
    shapes = list(SHAPES)
    return [
        product_row("small", backward=False),
        product_row("small", backward=True),
        *(product_row(shape, backward=False) for shape in shapes[1:]),
        *(pair_row(shape) for shape in shapes[:2]),
    ]


if __name__ == "__main__":
    main(__file__)
