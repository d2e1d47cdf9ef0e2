"""Perplexity and KL divergence, against loops over single predictions."""

import json
import math
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import BartForConditionalGeneration, BertConfig, BertForMaskedLM

import modelopt_sparse as mts
from tests.helpers import refused, tiny_llama

pytestmark = pytest.mark.core


def text(length: int = 45, seed: int = 4) -> Tensor:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))


def other_llama() -> nn.Module:
    return tiny_llama(initializer_range=0.25)


class Fixed(nn.Module):
    """The same logits for every token."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def evaluated(model: nn.Module, tokens: Tensor, reference: nn.Module | None = None, **options) -> mts.Evaluation:
    return mts.evaluate(model, tokens, reference=reference, **{"seq_len": 9, "progress": False, **options})


@torch.no_grad()
def naive(model: nn.Module, reference: nn.Module, tokens: Tensor, seq_len: int) -> tuple[float, float, float]:
    """(perplexity, the reference's, KL(reference || model)), one window and one prediction at a time, in float64."""
    rows: list[tuple[float, float, float]] = []  # two losses and a divergence
    for start in range(0, len(tokens) - seq_len + 1, seq_len):
        window = tokens[start : start + seq_len]
        p, q = (each(window[None]).logits[0].double().softmax(-1) for each in (model, reference))
        for now, then, target in zip(p, q, window[1:]):
            rows.append((-math.log(now[target]), -math.log(then[target]), float((then * (then / now).log()).sum())))
    losses, reference_losses, divergences = zip(*rows)
    return math.exp(mean(losses)), math.exp(mean(reference_losses)), mean(divergences)


@pytest.mark.parametrize(("seq_len", "windows"), [(8, 5), (9, 5), (45, 1), (2, 22), (44, 1)])
def test_agrees_with_a_naive_loop(seq_len, windows):
    model, reference, tokens = other_llama(), tiny_llama(), text()
    perplexity, reference_perplexity, kl = naive(model, reference, tokens, seq_len)
    for size in (1, 2, 8):
        found = evaluated(model, tokens, reference, seq_len=seq_len, batch_size=size)
        assert (found.windows, found.seq_len, found.kl) == (windows, seq_len, pytest.approx(kl, rel=1e-3))
        perplexities = found.perplexity, found.reference_perplexity
        assert perplexities == pytest.approx((perplexity, reference_perplexity), rel=1e-4)
        assert abs(found.perplexity / reference_perplexity - 1) > 0.01  # the two are told apart


def test_divergence_goes_from_the_reference_to_the_model():
    """KL is not symmetric: a reference that is sure and a model that is not, by hand."""
    sure, unsure = Fixed([math.log(0.9), math.log(0.1)]), Fixed([0.0, 0.0])
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    found = evaluated(unsure, torch.tensor([0, 1, 1, 0]), sure, seq_len=2)
    by_hand = (expected, 2, math.sqrt(1 / 0.9 / 0.1))  # predicts 1, then 0
    assert (found.kl, found.perplexity, found.reference_perplexity) == pytest.approx(by_hand, rel=1e-6)


def test_half_precision_logits_are_compared_in_float32():
    model = tiny_llama().bfloat16()
    found = evaluated(model, text(), tiny_llama())
    assert found.perplexity == pytest.approx(naive(model, tiny_llama(), text(), 9)[0], rel=1e-4)
    assert 0 < found.kl < 0.1


def test_modes_are_restored_and_dropout_is_off():
    models = [tiny_llama(attention_dropout=0.5).train() for _ in range(2)]
    for model in models:
        model.model.layers[1].eval()
    before = [[module.training for module in model.modules()] for model in models]
    first, second = (evaluated(models[0], text(), models[1]) for _ in range(2))
    assert (first, first.kl, first.perplexity) == (second, 0.0, first.reference_perplexity)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())
    assert [[module.training for module in model.modules()] for model in models] == before
    models[1].forward = None
    refused(evaluated, models[0], text(), models[1], match="TypeError: 'NoneType' object is not callable")
    assert [[module.training for module in model.modules()] for model in models] == before


REFUSED = [
    ({"tokens": text(8)}, "the text has 8 tokens, less than one window of 9: give more text"),
    ({"tokens": text(0)}, "the text has 0 tokens"),
    ({"tokens": text().view(1, -1)}, r"tokens are torch.int64 \[1, 45\]: give one row of token ids"),
    ({"seq_len": 1}, "seq_len=1, batch_size=None: at least 2 tokens predict one"),
    ({"seq_len": 65, "tokens": torch.ones(70, dtype=torch.long)}, "takes at most 64 tokens"),
    ({"batch_size": 0}, "batch_size=0: at least"),
    ({"tokens": -text()}, r"the text holds token id -9\d, the model has 97 tokens"),
    ({"tokens": text().float()}, "tokens are torch.float32 .*: give one row of token ids, whole numbers"),
    ({"tokens": text().bool()}, "tokens are torch.bool .*: give one row of token ids, whole numbers"),
    ({"reference": tiny_llama(vocab_size=101)}, r"the reference is \[5, 8, 101\], and the other's is \[5, 8, 97\]"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_arguments_that_cannot_be_evaluated(arguments, message):
    refused(evaluated, tiny_llama(), **{"tokens": text(), **arguments}, match=message)


@pytest.mark.parametrize("who", ["model", "reference"])
def test_logits_that_are_not_finite_are_an_error(who):
    models = {"model": tiny_llama(), "reference": tiny_llama()}
    models[who].model.norm.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match=f"the {who}'s output holds NaN or inf on these data"):
        evaluated(models["model"], text(), models["reference"])


INFINITE = [
    ([0.0, 0.0, -math.inf], 2.0, 0.0125),  # a padded vocabulary
    ([0.0, -math.inf, -math.inf], math.inf, math.inf),  # the model rules out what comes next
    ([0.0, -3000.0, 0.0], math.inf, 1000.0),  # a collapsed model
]


@pytest.mark.parametrize(("offset", "perplexity", "kl"), INFINITE)
def test_logits_of_minus_infinity_and_collapsed_models(offset, perplexity, kl):
    """Figures may be infinite, and are None in JSON."""
    found = evaluated(Fixed(offset), torch.tensor([0, 1] * 4), Fixed([0.1583, 0.0, -math.inf]), seq_len=4)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-6)
    expected = sum(p * math.log(p / 0.5) for p in (torch.tensor([0.1583, 0.0]).softmax(-1).tolist()))
    assert found.kl == pytest.approx(expected if kl == 0.0125 else kl, abs=500 if kl == 1000 else 1e-6)
    assert mts.Evaluation.from_dict(json.loads(json.dumps(found.as_dict(), allow_nan=False))) == found
    report = mts.Report.begin((), (), {})
    report.evaluation = found
    assert "Infinity" not in report.to_json()


def test_what_is_left_out_of_batches_is_told_and_tokens_may_be_bytes():
    """A mask that stands beside the tokens is no argument of the call."""
    batch = text().view(5, 9), torch.ones(5, 9, dtype=torch.long)
    with pytest.warns(UserWarning, match="called with the first entry of each batch alone"):
        mts.evaluate(tiny_llama(), [batch], reference=other_llama(), progress=False)
    assert evaluated(tiny_llama(), text()) == evaluated(tiny_llama(), text().to(torch.uint8))


def test_what_is_printed_has_the_reference_beside_it():
    found = mts.Evaluation(12.3456, 7.0, 0.5, 3, 9)
    assert str(found) == "perplexity 12.346 (reference 7.000, KL from it 0.5000 nats per token), 3 windows of 9 tokens"
    alone = "perplexity 12.346 (of the dense model: not known, give it as reference), 1 window of 9 tokens"
    assert str(mts.Evaluation(12.3456, None, None, 1, 9)) == alone
    figures = {"perplexity": 12.3456, "reference_perplexity": 7.0, "kl": 0.5}
    assert found.as_dict() == {**figures, "windows": 3, "seq_len": 9}


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_the_bar(capsys, progress, shown):
    """By default there is one only if standard error is a terminal."""
    mts.evaluate(tiny_llama(), text(), seq_len=9, progress=progress)
    caught = capsys.readouterr()
    assert (caught.out, "evaluate" in caught.err) == ("", shown)


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_TOKENS = [
    ([1, 2, 3], TypeError, "a calibration batch is a int"),
    ("text", TypeError, "a calibration batch is a str"),
    (torch.arange(40), ValueError, "perplexity is of causal language models"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), NO_TOKENS)
def test_what_is_no_language_model_or_no_tokens(tokens, error, message):
    model = hf.BertForSequenceClassification(BertConfig(vocab_size=50, **BERT))
    refused(mts.evaluate, model, tokens, seq_len=8, progress=False, match=message, error=error)


@pytest.mark.parametrize("kind", [BertForMaskedLM, BartForConditionalGeneration])
def test_models_that_see_what_comes_next_have_no_perplexity(kind):
    """Text is batches to them: the divergence is that of all predictions."""
    parts = ("layers", "ffn_dim", "attention_heads")
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in parts}
    sizes = BERT if kind is BertForMaskedLM else {"d_model": 16, **sides}
    model, dense = (kind(kind.config_class(vocab_size=97, **sizes)).eval() for _ in range(2))
    refused(evaluated, model, text(), match="text of causal models aside")
    with torch.no_grad():
        p, q = (x(text().view(5, 9)).logits.double().log_softmax(-1) for x in (dense, model))
    measured = evaluated(model, text(), dense)
    assert measured.perplexity is None
    assert measured.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
