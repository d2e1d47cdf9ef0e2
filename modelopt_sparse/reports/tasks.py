"""Scores on tasks, by lm-evaluation-harness, of a sparse model beside the dense one.

Tasks, prompts and metrics are the harness's own; this file calls it and puts the two models side by side.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn

from modelopt_sparse.model.devices import input_device
from modelopt_sparse.reports.evaluate import in_eval_mode
from modelopt_sparse.reports.text import first_few, table

MISSING = 'tasks are run by lm-evaluation-harness, which is not installed: pip install "modelopt-sparse[tasks]"'
BATCH_SIZE = 8


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    task, metric: as the harness names them; the filter of the answers stands behind a metric that has one.
    higher_is_better: whether a larger score is a better one.
    score, reference: of the model and of the reference; None without one.
    stderr: the standard error of ``score``, as the harness estimates it; None if it gives none.
    shots, samples: examples in the prompt, and questions asked.
    """

    task: str
    metric: str
    higher_is_better: bool
    score: float
    reference: float | None
    stderr: float | None
    shots: int
    samples: int

    @property
    def recovery(self) -> float | None:
        """What is left of the reference's score, 1 for all of it: ``score / reference``, and the inverse where lower is
        better. None without a reference, and where one of the two is 0."""
        return _recovery(self.score, self.reference, self.higher_is_better)


@dataclass(frozen=True)
class TaskScores:
    """What `evaluate_tasks` returns. ``print`` shows it as a table; ``as_dict`` is for machines.

    scores: one for each metric of each task.
    harness: the version of lm-evaluation-harness.
    """

    scores: tuple[TaskScore, ...]
    harness: str

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """(task, metric, dense, sparse, recovery, shots and samples) as text, and the mean of each metric that several
        tasks have."""
        shown = [
            (
                score.task,
                score.metric,
                *_numbers(score.reference, score.score, score.recovery, score.stderr),
                f"{score.shots} shots, {score.samples:,} samples",
            )
            for score in self.scores
        ]
        by_metric: dict[str, list[TaskScore]] = {}
        for score in self.scores:
            by_metric.setdefault(score.metric, []).append(score)
        for metric, scores in by_metric.items():
            if len(scores) > 1:
                sparse, dense = mean(each.score for each in scores), _mean([each.reference for each in scores])
                recovery = _recovery(sparse, dense, scores[0].higher_is_better)
                shown.append((f"mean of {len(scores)} tasks", metric, *_numbers(dense, sparse, recovery, None), ""))
        return shown

    def as_dict(self) -> dict[str, Any]:
        """The scores, each with its recovery, as values of JSON."""
        scores = [{**asdict(score), "recovery": score.recovery} for score in self.scores]
        return {"scores": scores, "harness": self.harness}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TaskScores":
        """The scores that ``as_dict`` gave. Raises TypeError and KeyError for anything else."""
        scores = [TaskScore(**{k: v for k, v in score.items() if k != "recovery"}) for score in data["scores"]]
        return cls(tuple(scores), data["harness"])

    def __str__(self) -> str:
        return table(HEADS, self.rows())


HEADS = ("task", "metric", "dense", "sparse", "recovery", "asked")


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    reference: nn.Module | None = None,
    task_folder: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    chat_template: bool = False,
) -> TaskScores:
    """Score a causal language model on tasks of lm-evaluation-harness.

    tasks: names of tasks or groups, in a list or separated by commas.
    reference: the dense model, with the same tokenizer: asked the same questions.
    task_folder: a folder with YAML files of tasks of your own; their data may lie there, and nothing is downloaded.
    shots: examples before each question; None: what the task says.
    limit: ask no more than so many questions of each task.
    batch_size: prompts per forward; None: 8.
    chat_template: put questions into the tokenizer's chat template.

    The harness seeds Python's, numpy's and torch's random numbers, and shows bars of its own on standard error. Its
    data sets come from the hub unless they are in the cache of the library datasets.

    Raises ValueError without the harness (extra ``tasks``), for tasks that it does not know, for a task_folder that is
    none, and for a limit or batch_size below 1.
    """
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks) if name.strip()]
    _check(names, task_folder, shots, limit, batch_size)
    try:
        import lm_eval  # an extra, and slow to import: only when tasks are run
        from lm_eval.models.huggingface import HFLM

        make: Any = HFLM  # its class hides its parameters from type checkers
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from None
    manager = _tasks_of(names, task_folder)
    names = manager.match_tasks(names)
    options: dict[str, Any] = {"tasks": names, "task_manager": manager, "num_fewshot": shots, "limit": limit}
    options.update(apply_chat_template=chat_template, log_samples=False)
    results = []
    for network in (model, reference):
        if network is not None:
            with _quiet(), in_eval_mode(network):
                asked = make(
                    pretrained=network,
                    tokenizer=tokenizer,
                    device=str(input_device(network)),
                    batch_size=batch_size or BATCH_SIZE,
                )
                results.append(lm_eval.simple_evaluate(asked, **options))
    return TaskScores(tuple(_scores(names, *results)), lm_eval.__version__)


def _check(names: Sequence[str], folder: str | Path | None, shots: Any, limit: Any, batch_size: Any) -> None:
    if not names:
        raise ValueError("no task is named: give names of lm-evaluation-harness, such as 'arc_easy,hellaswag'")
    for name, value, least in (("shots", shots, 0), ("limit", limit, 1), ("batch_size", batch_size, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"task_folder {str(folder)!r} is not a folder: give one that holds YAML files of tasks")


def _tasks_of(names: Sequence[str], folder: str | Path | None) -> Any:
    """The harness's index of tasks: of the folder alone if it has them all, for reading all of its own takes seconds.

    Raises ValueError for names that are not in it.
    """
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=str(folder), include_defaults=False) if folder is not None else None
    if known is None or not set(names) <= set(known.all_tasks):
        known = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [name for name in names if not known.match_tasks([name])]
    if unknown:
        where = "lm-evaluation-harness" + ("" if folder is None else f" and {str(folder)!r}")
        raise ValueError(
            f"{first_few(unknown)}: no task of {where}; `lm-eval ls tasks` lists its own, and task_folder= adds yours"
        )
    return known


def _scores(names: Sequence[str], measured: Any, beside: Any = None) -> Iterator[TaskScore]:
    """The numbers of the harness's results: of what was asked for, and of a group's tasks if the group has none."""
    rows = {**measured["results"], **measured.get("groups", {})}
    for name in _with_numbers(names, rows, measured.get("group_subtasks", {})):
        for key, score in rows[name].items():
            metric, _, chosen = key.partition(",")
            if isinstance(score, bool) or not isinstance(score, int | float) or "," not in key or "_stderr" in metric:
                continue
            other = None if beside is None else {**beside["results"], **beside.get("groups", {})}[name][key]
            error = rows[name].get(f"{metric}_stderr,{chosen}")
            yield TaskScore(
                task=name,
                metric=metric if chosen == "none" else f"{metric} ({chosen})",
                higher_is_better=bool(measured["higher_is_better"].get(name, {}).get(metric, True)),
                score=float(score),
                reference=None if other is None else float(other),
                stderr=float(error) if isinstance(error, int | float) else None,
                shots=_count(measured["n-shot"], name),
                samples=int(rows[name].get("sample_len", 0)),  # of a group: of all its tasks
            )


def _with_numbers(names: Sequence[str], rows: Mapping[str, Any], members: Mapping[str, Any]) -> list[str]:
    """The names that have scores; in the place of a group without any those of its tasks, of a tag those of all."""
    chosen: list[str] = []
    for name in names:
        has_scores = name in rows and any("," in key for key in rows[name])
        inside = members.get(name, ()) if name in rows or name in members else rows
        chosen += [name] if has_scores else _with_numbers([each for each in inside if each != name], rows, members)
    return list(dict.fromkeys(chosen))


def _count(shots: Mapping[str, Any], name: str) -> int:
    value = shots.get(name, 0)
    return value if isinstance(value, int) else 0


def _recovery(sparse: float, dense: float | None, higher_is_better: bool) -> float | None:
    if not sparse or not dense:
        return None
    return sparse / dense if higher_is_better else dense / sparse


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _numbers(dense: float | None, sparse: float, recovery: float | None, stderr: float | None) -> tuple[str, str, str]:
    beside = "" if stderr is None else f" \N{PLUS-MINUS SIGN} {stderr:.4f}"
    return (
        "" if dense is None else f"{dense:.4f}",
        f"{sparse:.4f}{beside}",
        "" if recovery is None else f"{recovery:.1%}",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it the harness does not warn of what is as it should be, such as a model that is in memory already."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
