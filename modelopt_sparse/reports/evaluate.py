"""What `evaluate` says of a sparse model beside the dense one, and `evaluate_tasks`, which measures it on tasks.

Tasks, their prompts and their metrics are those of lm-evaluation-harness.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn

from modelopt_sparse.model.devices import in_eval_mode, input_device
from modelopt_sparse.model.output import in_words
from modelopt_sparse.reports.text import first_few, only_errors, table
from modelopt_sparse.values import check_whole, grouped

MISSING = 'tasks are run by lm-evaluation-harness, which is not installed: pip install "modelopt-sparse[tasks]"'
BATCH_SIZE = 8  # prompts per forward
HEADS = ("task", "metric", "dense", "sparse", "recovery", "asked")  # of the printed table of scores


# figures --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` returns. ``print`` shows it; ``as_dict`` is for machines.

    perplexity: of the model; None of batches.
    reference_perplexity: of the reference; None without one.
    kl: the mean of KL(reference || model) over all predictions, in nats, unless ``divergence`` names another; None
      without a reference.
    windows, seq_len: how many windows were evaluated, and how many tokens each has; of batches samples, and None.
    """

    perplexity: float | None
    reference_perplexity: float | None
    kl: float | None
    windows: int
    seq_len: int | None
    divergence: str = "kl"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as values of JSON: None in the place of infinity; ``divergence`` unless it is KL."""
        values = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if (name, value) != ("divergence", "kl")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Evaluation":
        """The evaluation that ``as_dict`` gave. Raises TypeError for other keys."""
        figures = ["perplexity", "reference_perplexity", "kl"]
        if data.get("seq_len", 0) is None:  # of batches
            figures = figures[2:]
        elif data.get("reference_perplexity") is data.get("kl"):  # both None: there was no reference
            figures = figures[:1]
        return cls(**{**data, **{name: math.inf for name in figures if name in data and data[name] is None}})

    def beside_dense(self) -> str:
        """One line for the report of a sparse model, whose reference is the dense one."""
        how = f"{self.windows} windows of {self.seq_len} tokens"
        if self.perplexity is None:
            return f"held-out batches: {self}"
        if self.reference_perplexity is None:
            return f"held-out perplexity: sparse {self.perplexity:.3f}; {how}"
        return (
            f"held-out perplexity: dense {self.reference_perplexity:.3f}, sparse {self.perplexity:.3f}; "
            f"KL from dense {self.kl:.4f} nats per token; {how}"
        )

    def __str__(self) -> str:
        if self.perplexity is None:
            what, unit = in_words(self.divergence)
            return f"{what} from the reference {self.kl:.4f} {unit}, {self.windows} samples"
        head = f"perplexity {self.perplexity:.3f}"
        if self.reference_perplexity is None:
            beside = " (of the dense model: not known, give it as reference)"
        else:
            beside = f" (reference {self.reference_perplexity:.3f}, KL from it {self.kl:.4f} nats per token)"
        plural = "" if self.windows == 1 else "s"
        return f"{head}{beside}, {self.windows} window{plural} of {self.seq_len} tokens"


# tasks ----------------------------------------------------------------------------------------------------------------


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
        better. None without a reference, and where that would divide by 0."""
        if self.reference is None:
            return None
        part, whole = (self.score, self.reference) if self.higher_is_better else (self.reference, self.score)
        return part / whole if whole else None


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
        shown = [_row(score, f"{score.shots} shots, {score.samples:,} samples") for score in self.scores]
        for metric, scores in grouped(self.scores, lambda score: score.metric).items():
            if len(scores) > 1:
                known = [each.reference for each in scores if each.reference is not None]
                dense, sparse = mean(known) if len(known) == len(scores) else None, mean(each.score for each in scores)
                title, rising = f"mean of {len(scores)} tasks", scores[0].higher_is_better
                shown.append(_row(TaskScore(title, metric, rising, sparse, dense, None, 0, 0), ""))
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


def _row(score: TaskScore, asked: str) -> tuple[str, str, str, str, str, str]:
    """A score as text."""
    dense = "" if score.reference is None else f"{score.reference:.4f}"
    sparse = f"{score.score:.4f}" + ("" if score.stderr is None else f" \N{PLUS-MINUS SIGN} {score.stderr:.4f}")
    return (score.task, score.metric, dense, sparse, "" if score.recovery is None else f"{score.recovery:.1%}", asked)


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
    if not names:
        raise ValueError("no task is named: give names of lm-evaluation-harness, such as 'arc_easy,hellaswag'")
    for name, value, least in (("shots", shots, 0), ("limit", limit, 1), ("batch_size", batch_size, 1)):
        if value is not None:
            check_whole(name, value, least)
    if task_folder is not None and not Path(task_folder).is_dir():
        raise ValueError(f"task_folder {str(task_folder)!r} is not a folder: give one that holds YAML files of tasks")
    try:
        import lm_eval  # an extra, and slow to import: only when tasks are run
        from lm_eval.models.huggingface import HFLM

        make: Any = HFLM  # its class hides its parameters from type checkers
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from None
    manager = _tasks_of(names, task_folder)
    names = manager.match_tasks(names)
    options: dict[str, Any] = {"tasks": names, "task_manager": manager, "num_fewshot": shots, "limit": limit}
    options |= {"apply_chat_template": chat_template, "log_samples": False}
    results = []
    for network in (model, reference):
        if network is not None:
            with only_errors("lm_eval"), in_eval_mode(network):  # it warns of a model that is in memory already
                device, size = str(input_device(network)), batch_size or BATCH_SIZE
                asked = make(pretrained=network, tokenizer=tokenizer, device=device, batch_size=size)
                results.append(lm_eval.simple_evaluate(asked, **options))
    return TaskScores(tuple(_scores(names, *results)), lm_eval.__version__)


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
        raise ValueError(f"{first_few(unknown)}: no task of {where}; `lm-eval ls tasks` lists its own")
    return known


def _scores(names: Sequence[str], measured: Any, beside: Any = None) -> Iterator[TaskScore]:
    """The scores in the harness's results: of the names, or of a group's tasks if the group has none itself."""
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
                shots=shots if isinstance(shots := measured["n-shot"].get(name), int) else 0,
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
