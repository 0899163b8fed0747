"""Where the weights of linear layers lie in memory.

On a CPU, a product of a few rows (a draft tree's width) with a weight stored row by row spends much of its time turning
the weight around. Stored by columns it is up to twice as fast (`benchmarks/bench_linear.py`). Shapes, values and the
model's code stay as they are; only strides change, for AR as for every method. On a GPU nothing is done.
"""

from torch import nn


def store_by_columns(module: nn.Module) -> None:
    """Lay out the weights of all linear layers of a module on a CPU by columns, in place.

    A head that shares its weight with an embedding keeps it as it is, since an embedding reads rows.
    """
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight.is_cpu and id(part.weight) not in tables:
            part.weight.data = part.weight.data.t().contiguous().t()
