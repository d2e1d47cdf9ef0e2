"""What `evaluate` says of a sparse model beside the dense one, and scores on tasks that lm-evaluation-harness wrote."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from modelopt_sparse.reports.text import Printed
from modelopt_sparse.reports.values import in_words


@dataclass(frozen=True)
class Evaluation(Printed):
    """What `evaluate` returns. ``print`` shows it; ``as_dict`` is for machines.

    perplexity: of the model; None of batches.
    reference_perplexity: of the reference; None without one.
    kl: the mean of KL(reference || model) over all predictions, in nats, unless ``divergence`` names another; None
      without a reference.
    windows, seq_len: how many windows were evaluated, and how many tokens each has; of batches samples, and None.
    divergence: the name of what ``kl`` is; not in JSON if it is KL.
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
        size = f"{self.windows} windows of {self.seq_len} tokens"
        if self.perplexity is None:
            return f"held-out batches: {self}"
        if self.reference_perplexity is None:
            return f"held-out perplexity: sparse {self.perplexity:.3f}; {size}"
        return (
            f"held-out perplexity: dense {self.reference_perplexity:.3f}, sparse {self.perplexity:.3f}; "
            f"KL from dense {self.kl:.4f} nats per token; {size}"
        )

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: one line, whatever ``all_rows`` says."""
        if self.perplexity is None:
            measure, unit = in_words(self.divergence)
            return f"{measure} from the reference {self.kl:.4f} {unit}, {self.windows} samples"
        head = f"perplexity {self.perplexity:.3f}"
        if self.reference_perplexity is None:
            beside = " (of the dense model: not known, give it as reference)"
        else:
            beside = f" (reference {self.reference_perplexity:.3f}, KL from it {self.kl:.4f} nats per token)"
        plural = "" if self.windows == 1 else "s"
        return f"{head}{beside}, {self.windows} window{plural} of {self.seq_len} tokens"


class TaskScore(NamedTuple):
    """One metric of one task; ``stderr``: the standard error of the score, None if there is none."""

    task: str
    metric: str
    score: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.score:.4f}" + ("" if self.stderr is None else f" \N{PLUS-MINUS SIGN} {self.stderr:.4f}")


def task_scores(results: Mapping[str, Mapping[str, Any]]) -> Iterator[TaskScore]:
    """The scores in the ``results`` of a file that lm-evaluation-harness wrote.

    A task has ``metric,filter`` and ``metric_stderr,filter`` -> a number, beside other things. "none" is no filter.
    """
    for task, values in results.items():
        for key, score in values.items():
            metric, comma, chosen = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(score, int | float):
                error = values.get(f"{metric}_stderr,{chosen}")
                name = metric if chosen == "none" else f"{metric} ({chosen})"
                yield TaskScore(task, name, score, error if isinstance(error, int | float) else None)  # or "N/A"
