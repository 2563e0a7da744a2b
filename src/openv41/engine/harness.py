"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) on the engine; the extra ``[eval]``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openv41.engine.scoring import Scorer
from openv41.errors import InputError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

TASK_SUFFIXES = (".yaml", ".yml")
BOOTSTRAP_STEPS = 1000  # of standard errors that have no formula


@dataclass(frozen=True, slots=True)
class Score:
    """One figure of a task."""

    task: str
    metric: str
    filter: str  # what was done with the answers before
    value: float
    error: float | None  # standard error, where it is known
    samples: int


def language_model(scorer: Scorer) -> "LM":
    """The engine as lm-eval wants a model, for those who call lm-eval themselves."""
    lm_class = _import().api.model.LM

    class EngineLM(lm_class):  # type: ignore[misc, valid-type]
        """Passes requests on."""

        def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
            """Log-probability of each continuation, and whether it is the greedy one."""
            return scorer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
            """Log-probability of each whole text."""
            return scorer.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: "list[Instance]") -> list[str]:
            """What the model adds to each context."""
            return scorer.generations([request.args for request in requests])

    model: LM = EngineLM()
    return model


def run_tasks(scorer: Scorer, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Results of lm-eval, without its samples; ``tasks`` are names, or paths of YAML files.

    Raises InputError for a task that lm-eval does not know or cannot load.
    """
    lm_eval = _import()
    is_file = [task.endswith(TASK_SUFFIXES) for task in tasks]
    manager = lm_eval.tasks.TaskManager(include_defaults=not all(is_file))
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=language_model(scorer),
        tasks=[_load(manager, *one) for one in zip(tasks, is_file, strict=True)],
        task_manager=manager,
        limit=limit,
        log_samples=False,
        bootstrap_iters=BOOTSTRAP_STEPS,
    )
    return found


def _load(manager: Any, task: str, is_file: bool) -> Any:  # noqa: ANN401 -- objects of lm-eval
    """A task, or a group of them, with its data."""
    if is_file and not Path(task).is_file():
        raise InputError(f"{task}: there is no such task file")
    if not is_file and task not in manager.all_tasks:
        raise InputError(
            f"lm-eval has no task {task!r}; 'lm-eval ls tasks' lists its own, and a path that ends "
            "with .yaml names a file"
        )
    try:
        loaded = manager.load(str(Path(task).resolve()) if is_file else task)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{task}: lm-eval cannot load the task ({reason})") from error
    return next(iter({**loaded["groups"], **loaded["tasks"]}.values()))  # the outermost


def scores(found: dict[str, Any]) -> list[Score]:
    """The figures of ``run_tasks``, task by task."""
    listed = []
    for task, figures in found["results"].items():
        samples = found["n-samples"].get(task, {}).get("effective", 0)
        for key, value in figures.items():
            metric, separator, name = key.partition(",")
            if not separator or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{name}")
            known = error if isinstance(error, float) else None
            listed.append(Score(task, metric, name, float(value), known, samples))
    return listed


def _import() -> Any:  # noqa: ANN401 -- a module of an optional extra
    try:
        import lm_eval  # noqa: PLC0415
        import lm_eval.api.model  # noqa: PLC0415
        import lm_eval.tasks  # noqa: PLC0415
        import lm_eval.utils  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            f"evaluation needs lm-eval ({error}); pip install 'openv41[eval]'"
        ) from None
    return lm_eval
