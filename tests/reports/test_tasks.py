"""Scores on tasks: against the log-likelihoods of the answers, computed by hand; and how they are shown."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts
from modelopt_sparse.reports.evaluate import TaskScore, TaskScores, _scores, evaluate_tasks
from modelopt_sparse.reports.report import Report
from tests.helpers import ROOT, TESTBED, run_python, tiny_llama

SCORES = TaskScores(
    (
        TaskScore("first", "acc", True, 0.6, 0.8, 0.05, 0, 100),
        TaskScore("second", "acc", True, 0.3, 0.3, None, 5, 1200),
        TaskScore("third", "word_perplexity", False, 10.0, 8.0, None, 0, 7),
    ),
    "0.0.0",
)


def test_recovery():
    """Dense by sparse or its inverse, by the direction of the metric; None where nothing can be said."""
    assert [score.recovery for score in SCORES.scores] == pytest.approx([0.75, 1.0, 0.8])
    assert TaskScore("x", "acc", True, 0.5, None, None, 0, 1).recovery is None
    assert TaskScore("x", "acc", True, 0.5, 0.0, None, 0, 1).recovery is None
    assert TaskScore("x", "ppl", False, 0.0, 3.0, None, 0, 1).recovery is None


def test_table():
    lines = str(SCORES).splitlines()
    assert lines[0].split() == ["task", "metric", "dense", "sparse", "recovery", "asked"]
    assert lines[2].split()[:5] == ["first", "acc", "0.8000", "0.6000", "\N{PLUS-MINUS SIGN}"]
    assert "75.0%" in lines[2]
    assert "5 shots, 1,200 samples" in lines[3]
    assert "80.0%" in lines[4]
    assert lines[5].split() == ["mean", "of", "2", "tasks", "acc", "0.5500", "0.4500", "81.8%"]


def test_scores_travel_through_json():
    assert TaskScores.from_dict(json.loads(json.dumps(SCORES.as_dict()))) == SCORES
    assert SCORES.as_dict()["scores"][0]["recovery"] == pytest.approx(0.75)


def test_a_report_holds_them(tmp_path):
    model = mts.sparsify(tiny_llama(), "magnitude", progress=False)
    report = mts.report(model)
    report.tasks = SCORES
    assert Report.from_dict(json.loads(report.to_json())).tasks == SCORES
    assert str(SCORES) in str(report)
    mts.save(model, tmp_path / "sparse")
    assert mts.report(tmp_path / "sparse").tasks == SCORES


def test_numbers_are_found_in_what_the_harness_gives():
    """Of tasks, of groups with a score of their own, and in the place of groups without one those of their tasks."""
    task = {"alias": "a", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 0.25}
    results = {"a": task, "b": {**task, "acc_stderr,none": "N/A"}, "all": {"alias": "all"}, "sum": {"acc,none": 0.5}}
    measured = {
        "results": results,
        "group_subtasks": {"all": ["a", "b"], "sum": ["a"]},
        "higher_is_better": {"a": {"acc": True, "em": False}, "b": {"acc": True}},
        "n-shot": {"a": 3},
    }
    dense = {**measured, "results": {**results, "a": {**task, "acc,none": 1.0}}}
    first, second, third, fourth, fifth = _scores(["all", "sum"], measured, dense)
    assert first == TaskScore("a", "acc", True, 0.5, 1.0, 0.1, 3, 4)
    assert second == TaskScore("a", "em (strict)", False, 0.25, 0.25, None, 3, 4)
    assert (third.task, third.stderr, third.shots) == ("b", None, 0)
    assert fourth.task == "b"
    assert (fifth.task, fifth.score, fifth.samples) == ("sum", 0.5, 0)


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r'not installed: pip install "modelopt-sparse\[tasks\]"'):
        evaluate_tasks(tiny_llama(), object(), "arc_easy")


def score_by_hand(model, tokenizer, rows) -> float:
    """The share of rows whose first answer has the largest log-likelihood behind the beginning."""
    right = 0
    for row in rows:
        sums = []
        for answer in row["choices"]:
            # as the harness does: a space at the question's end goes to the answer, and the question's tokens are what
            # they are without an answer
            texts = (row["begin"].rstrip(), row["begin"] + answer)
            begin, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            whole = begin + whole[len(begin) :]
            with torch.no_grad():
                log_p = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
            sums.append(sum(float(log_p[i - 1, whole[i]]) for i in range(len(begin), len(whole))))
        right += sums[0] >= sums[1]  # the first of equal ones
    return right / len(rows)


@pytest.mark.slow
def test_eval_on_a_task_of_ones_own(tmp_path, monkeypatch):
    """From the command line, dense beside sparse, as text, JSON, and in the HTML report. In a process of its own: the
    harness brings warnings with it."""
    if find_spec("lm_eval") is None:
        pytest.skip("the extra tasks is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    from hand_over import write_task  # the benchmark's own task

    tasks = tmp_path / "tasks"
    write_task(tasks, (TESTBED / "heldout.txt").read_text(encoding="utf-8"), 60)
    rows = [json.loads(row) for row in (tasks / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    dense = TESTBED / "tiny-llama"
    sparse, tokenizer = AutoModelForCausalLM.from_pretrained(dense), AutoTokenizer.from_pretrained(dense)
    mts.save(mts.sparsify(sparse, "magnitude", progress=False), tmp_path / "sparse", companions=[tokenizer])
    arguments = ["eval", str(tmp_path / "sparse"), "--reference", str(dense), "--tasks", "next_words"]
    arguments += ["--task-folder", str(tasks), "--json", "--dtype", "float32"]
    done = run_python("-m", "modelopt_sparse", *arguments)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    (found,) = json.loads(printed)["tasks"]["scores"]
    assert found["samples"] == len(rows) == 60
    assert found["score"] == pytest.approx(score_by_hand(sparse.float(), tokenizer, rows))
    reference = score_by_hand(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32), tokenizer, rows)
    assert found["reference"] == pytest.approx(reference)
    assert found["score"] != reference, "or one could stand for the other"
    report = mts.report(tmp_path / "sparse")
    report.tasks = TaskScores.from_dict(json.loads(printed)["tasks"])
    page = report.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "acc, next_words" in page
