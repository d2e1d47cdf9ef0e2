"""Perplexity, KL divergence and scores on tasks, against loops over single predictions and answers."""

import json
import math
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
)

import modelopt_sparse as mts
from modelopt_sparse.reports.evaluate import TaskScore, TaskScores, _scores, evaluate_tasks
from modelopt_sparse.reports.report import Report
from tests.helpers import ROOT, TESTBED, run_python, tiny_llama

pytestmark = pytest.mark.core


def text(length: int = 45, seed: int = 4) -> Tensor:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))


def other_llama() -> LlamaForCausalLM:
    model = tiny_llama()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def naive(model: nn.Module, reference: nn.Module, tokens: Tensor, seq_len: int) -> tuple[float, float, float]:
    """(perplexity, the reference's, KL(reference || model)), one window and one prediction at a time, in float64."""
    losses: list[float] = []
    reference_losses: list[float] = []
    divergences: list[float] = []
    for start in range(0, len(tokens) - seq_len + 1, seq_len):
        window = tokens[start : start + seq_len]
        p = model(window[None]).logits[0].double().softmax(-1)
        q = reference(window[None]).logits[0].double().softmax(-1)
        for position in range(seq_len - 1):
            target = window[position + 1]
            losses.append(-math.log(p[position, target]))
            reference_losses.append(-math.log(q[position, target]))
            divergences.append(float((q[position] * (q[position] / p[position]).log()).sum()))
    count = len(losses)
    return math.exp(sum(losses) / count), math.exp(sum(reference_losses) / count), sum(divergences) / count


@pytest.mark.parametrize(("seq_len", "windows"), [(8, 5), (9, 5), (45, 1), (2, 22), (44, 1)])
def test_agrees_with_a_naive_loop(seq_len, windows):
    model, reference, tokens = other_llama(), tiny_llama(), text()
    perplexity, reference_perplexity, kl = naive(model, reference, tokens, seq_len)
    for size in (1, 2, 8):
        found = mts.evaluate(model, tokens, seq_len=seq_len, reference=reference, batch_size=size, progress=False)
        assert (found.windows, found.seq_len) == (windows, seq_len)
        assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
        assert found.reference_perplexity == pytest.approx(reference_perplexity, rel=1e-4)
        assert found.kl == pytest.approx(kl, rel=1e-3)
        assert abs(found.perplexity / reference_perplexity - 1) > 0.01  # the two are told apart


def test_the_tail_is_dropped_and_windows_do_not_see_each_other():
    model, tokens = tiny_llama(), text(40)
    whole = mts.evaluate(model, tokens, seq_len=16, progress=False)
    assert whole.windows == 2
    assert mts.evaluate(model, tokens[:32], seq_len=16, progress=False).perplexity == whole.perplexity
    parts = [mts.evaluate(model, part, seq_len=16, progress=False) for part in (tokens[:16], tokens[16:32])]
    assert math.log(whole.perplexity) == pytest.approx(sum(math.log(part.perplexity) for part in parts) / 2)


def test_divergence_of_a_model_from_itself_is_zero():
    found = mts.evaluate(tiny_llama(), text(), seq_len=9, reference=tiny_llama(), progress=False)
    assert found.kl == 0.0
    assert found.perplexity == found.reference_perplexity


def test_a_uniform_model_has_its_vocabulary_as_perplexity():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert mts.evaluate(model, text(), seq_len=9, progress=False).perplexity == pytest.approx(97, rel=1e-5)


def test_divergence_goes_from_the_reference_to_the_model():
    """KL is not symmetric: a reference that is sure and a model that is not, by hand."""

    class Fixed(nn.Module):
        def __init__(self, logits: list[float]) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.tensor(logits))

        def forward(self, input_ids):
            logits = self.logits.expand(*input_ids.shape, -1)
            return type("Output", (), {"logits": logits})()

    sure, unsure = Fixed([math.log(0.9), math.log(0.1)]), Fixed([0.0, 0.0])
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    tokens = torch.tensor([0, 1, 1, 0])
    found = mts.evaluate(unsure, tokens, seq_len=2, reference=sure, progress=False)
    assert found.kl == pytest.approx(expected, rel=1e-6)
    assert found.perplexity == pytest.approx(2, rel=1e-6)
    assert found.reference_perplexity == pytest.approx(math.sqrt(1 / 0.9 / 0.1), rel=1e-6)  # predicts 1, then 0


def test_half_precision_logits_are_compared_in_float32():
    model = tiny_llama().bfloat16()
    found = mts.evaluate(model, text(), seq_len=9, reference=tiny_llama(), progress=False)
    assert found.perplexity == pytest.approx(naive(model, tiny_llama(), text(), 9)[0], rel=1e-4)
    assert 0 < found.kl < 0.1


def test_modes_are_restored_and_dropout_is_off():
    models = [tiny_llama(attention_dropout=0.5).train() for _ in range(2)]
    for model in models:
        model.model.layers[1].eval()
    before = [[module.training for module in model.modules()] for model in models]
    first, second = (mts.evaluate(models[0], text(), seq_len=9, reference=models[1], progress=False) for _ in range(2))
    assert first == second
    assert first.kl == 0.0
    assert [[module.training for module in model.modules()] for model in models] == before
    models[1].forward = None
    with pytest.raises(ValueError, match="TypeError: 'NoneType' object is not callable"):
        mts.evaluate(models[0], text(), seq_len=9, reference=models[1], progress=False)
    assert [[module.training for module in model.modules()] for model in models] == before


def test_no_gradients_are_kept():
    model = tiny_llama()
    mts.evaluate(model, text(), seq_len=9, reference=model, progress=False)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": text(8)}, "the text has 8 tokens, less than one window of 9: give more text"),
        ({"tokens": text(0)}, "the text has 0 tokens"),
        ({"tokens": text().view(1, -1)}, r"tokens are torch.int64 \[1, 45\]: give one row of token ids"),
        ({"seq_len": 1}, "seq_len=1, batch_size=None: at least 2 tokens predict one"),
        ({"seq_len": 65, "tokens": torch.ones(70, dtype=torch.long)}, "takes at most 64 tokens"),
        ({"batch_size": 0}, "batch_size=0: at least"),
        ({"tokens": -text()}, r"the text holds token id -9\d, the model has 97 tokens"),
        (
            {"reference": tiny_llama(vocab_size=101)},
            r"the output of the reference is \[5, 8, 101\], and the other's is \[5, 8, 97\]",
        ),
    ],
)
def test_arguments_that_cannot_be_evaluated(arguments, message):
    tokens = arguments.pop("tokens", text())
    with pytest.raises(ValueError, match=message):
        mts.evaluate(tiny_llama(), tokens, **{"seq_len": 9, "progress": False, **arguments})


@pytest.mark.parametrize("who", ["model", "reference"])
def test_logits_that_are_not_finite_are_an_error(who):
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    pair = (
        {"model": broken, "reference": tiny_llama()} if who == "model" else {"model": tiny_llama(), "reference": broken}
    )
    with pytest.raises(ValueError, match=f"the {who}'s output holds NaN or inf on these data"):
        mts.evaluate(pair["model"], text(), seq_len=9, reference=pair["reference"], progress=False)


@pytest.mark.parametrize(
    ("offset", "perplexity", "kl"),
    [
        ([0.0, 0.0, -math.inf], 2.0, 0.0125),  # a padded vocabulary
        ([0.0, -math.inf, -math.inf], math.inf, math.inf),  # the model rules out what comes next
        ([0.0, -3000.0, 0.0], math.inf, 1000.0),  # a collapsed model
    ],
)
def test_logits_of_minus_infinity_and_collapsed_models(offset, perplexity, kl):
    """Figures may be infinite, and are None in JSON."""

    def model(values: list[float]) -> nn.Module:
        class Fixed(nn.Module):
            def forward(self, input_ids):
                return type("Output", (), {"logits": torch.tensor(values).expand(*input_ids.shape, -1)})()

        return Fixed()

    dense = model([0.1583, 0.0, -math.inf])
    found = mts.evaluate(model(offset), torch.tensor([0, 1] * 4), seq_len=4, reference=dense, progress=False)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-6)
    expected = sum(p * math.log(p / 0.5) for p in (torch.tensor([0.1583, 0.0]).softmax(-1).tolist()))
    assert found.kl == pytest.approx(expected if kl == 0.0125 else kl, abs=500 if kl == 1000 else 1e-6)
    written = json.dumps(found.as_dict(), allow_nan=False)
    assert mts.Evaluation.from_dict(json.loads(written)) == found
    report = Report.begin((), (), {})
    report.evaluation = found
    assert "Infinity" not in report.to_json()


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_tokens_that_are_no_whole_numbers(kind):
    with pytest.raises(ValueError, match=f"tokens are {kind} .*: give one row of token ids, whole numbers"):
        mts.evaluate(tiny_llama(), text().to(kind), seq_len=9, progress=False)


def test_tokens_as_bytes():
    tokens = text()
    figures = [mts.evaluate(tiny_llama(), x, seq_len=9, progress=False) for x in (tokens, tokens.to(torch.uint8))]
    assert figures[0] == figures[1]


def test_what_is_printed_has_the_reference_beside_it():
    found = mts.Evaluation(12.3456, 7.0, 0.5, 3, 9)
    assert str(found) == "perplexity 12.346 (reference 7.000, KL from it 0.5000 nats per token), 3 windows of 9 tokens"
    alone = mts.Evaluation(12.3456, None, None, 1, 9)
    assert str(alone) == (
        "perplexity 12.346 (of the dense model: not known, give it as reference), 1 window of 9 tokens"
    )
    assert found.as_dict() == {
        "perplexity": 12.3456,
        "reference_perplexity": 7.0,
        "kl": 0.5,
        "windows": 3,
        "seq_len": 9,
    }


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_the_bar(capsys, progress, shown):
    """By default there is one only if standard error is a terminal."""
    mts.evaluate(tiny_llama(), text(), seq_len=9, progress=progress)
    caught = capsys.readouterr()
    assert caught.out == ""
    assert ("evaluate" in caught.err) == shown


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
    assert TaskScore("x", "acc", True, 0.0, 0.5, None, 0, 1).recovery == 0
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


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2, 3], TypeError, "a calibration batch is a int"),
        ("text", TypeError, "a calibration batch is a str"),
        (
            torch.arange(40),
            ValueError,
            "perplexity is of causal language models",
        ),
    ],
)
def test_what_is_no_language_model_or_no_tokens(tokens, error, message):
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **size))
    with pytest.raises(error, match=message):
        mts.evaluate(model, tokens, seq_len=8, progress=False)
