"""What Python's garbage collector need not look at while an engine runs."""

import gc


def freeze_heap() -> None:
    """Exempt everything that lives by now from garbage collection, for as long as it lives.

    A full collection looks at each of some hundred thousand objects, most of them of torch and of
    the model, and stops the engine for a fifth of a second; many requests at once call for one
    every few seconds. For a process that serves and does little else.
    """
    gc.collect()
    gc.freeze()
