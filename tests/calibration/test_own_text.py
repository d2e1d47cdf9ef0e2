"""Text that the dense model writes: sampling against the distribution, independence of batches, and where it goes."""

import copy
import json
import math

import pytest
import torch
import transformers as hf
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse.calibration import own_text
from modelopt_sparse.calibration.data import Call, load_calls, tokens_of
from modelopt_sparse.calibration.own_text import drawn, joined, own_calls
from modelopt_sparse.distributed import Processes
from tests import helpers
from tests.accuracy.tuned import relative, seen_by
from tests.helpers import TESTBED, assert_same_state, in_steps, refused, state_of, tiny_llama, token_batches
from tests.models.expert_models import build as built
from tests.models.tiny import masked_bert, tiny_t5

pytestmark = pytest.mark.core
ROWS = list(torch.cat(token_batches(4)))
LENGTH = ROWS[0].numel()


@torch.no_grad()
def written_slowly(model, rows, number, length, seed, prompt=None, ends=()):
    """One window by itself, up to one of the ``ends``, each token from a forward over all of the text before it, drawn
    by walking along the probabilities. ``prompt``: how many tokens of a row it begins with, 0 for all of them."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + number)
    row_place, begin_place = torch.rand(2, generator=random, dtype=torch.float64).tolist()
    uniforms = torch.rand(length, generator=random, dtype=torch.float64).tolist()
    row = rows[int(row_place * len(rows))]
    size = min(32, length // 4) if prompt is None else prompt or len(row)
    begin = int(begin_place * (len(row) - size + 1))
    ids = row[begin : begin + size].tolist()
    while len(ids) < length:
        ids.append(walked(model(torch.tensor([ids])).logits[0, -1], uniforms[len(ids)]))
        if ids[-1] in ends:
            break
    return ids


def walked(logits, uniform):
    probabilities = logits.double().softmax(-1).tolist()
    total, token = 0.0, -1
    while total <= uniform * sum(probabilities):
        token += 1
        total += probabilities[token]
    return token


@torch.no_grad()
def rewritten_slowly(model, ids, mask, types, pool, number, seed):
    """One row by itself, each chosen token replaced and then drawn. ``mask``: 1 for real tokens."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + number)
    randoms = torch.rand(len(ids), 4, 3, generator=random, dtype=torch.float64).tolist()
    real = [i for i in range(len(ids)) if mask[i]]
    text = ids.tolist()
    for sweep in range(4):
        chosen = [i for i in real[1:-1] if randoms[i][sweep][0] < 0.4]
        for i in chosen:
            text[i] = pool[int(randoms[i][sweep][1] * len(pool))]
        inputs = {"input_ids": torch.tensor([text]), "attention_mask": mask[None], "token_type_ids": types[None]}
        logits = model(**inputs).logits[0]
        for i in chosen:
            text[i] = walked(logits[i], randoms[i][sweep][2])
    return text


@torch.no_grad()
def windows_of(model, count, seed):
    prompts = own_text.Prompts.cuts(ROWS, LENGTH)
    written = own_text.write_windows(model, prompts, count, LENGTH, seed, Processes())
    assert {len(row) for row in written} == {LENGTH}
    return torch.stack(written)


# it has no cache of keys and values: all of the text is run for each token
mamba = built("MambaForCausalLM", "MambaConfig", vocab_size=97, num_hidden_layers=1, state_size=4)
# it takes a cache, and puts out none
xlm = built("XLMWithLMHeadModel", "XLMConfig", vocab_size=97, emb_dim=16, n_layers=1, n_heads=2)
bert = built("BertModel", "BertConfig", vocab_size=97, num_hidden_layers=1)


@pytest.mark.parametrize("batch", [own_text.OWN_BATCH, 2])
@pytest.mark.parametrize("build", [tiny_llama, mamba, xlm], ids=["llama", "mamba", "xlm"])
def test_windows_are_what_the_model_says_token_by_token(build, batch, monkeypatch):
    """Each depends on its number and the seed alone."""
    monkeypatch.setattr(own_text, "OWN_BATCH", batch)
    model = build()
    windows = windows_of(model, 5, seed=3).tolist()
    assert windows == [written_slowly(model, ROWS, i, LENGTH, 3) for i in range(5)]
    assert len({*map(tuple, windows)}) == 5


def test_a_model_that_takes_more_than_tokens_writes_none():
    model = tiny_llama()
    model.register_forward_pre_hook(lambda *_: {}["pixel_values"])
    words = "this LlamaForCausalLM cannot write text: KeyError: 'pixel_values': leave self_data out"
    refused(mts.sparsify, model, "wanda", data_loader=token_batches(), self_data=2, match=words)


def test_rows_of_a_masked_model_are_drawn_anew_token_by_token():
    """Batches in turn, with all else that they have; padding and the ends of a row stay."""
    model, ids = masked_bert(), torch.stack(ROWS[:6])
    masks, types = torch.ones_like(ids), torch.arange(ids.numel()).view_as(ids) % 2
    for row, (begin, end) in enumerate([(0, LENGTH), (2, LENGTH), (0, 5), (3, 5), (1, 4), (0, LENGTH - 1)]):
        masks[row, :begin], masks[row, end:] = 0, 0
    parts = [slice(0, 4), slice(4, 6)]
    calls = [
        Call((ids[part],) * (step == 0), {"attention_mask": masks[part], "token_type_ids": types[part]}, step)
        for step, part in enumerate(parts)
    ]
    calls[1].kwargs["input_ids"] = ids[parts[1]]
    before = ids.clone()
    with torch.no_grad():
        own = own_text.rewritten(model, calls, 7, 5, Processes())
    assert [len(call.kwargs["attention_mask"]) for call in own] == [4, 2, 4]
    assert [call.step for call in own] == [-2, -1, -4], "steps of their own, below the user's"
    assert torch.equal(ids, before)
    texts = torch.cat([own_text.call_tokens(call) for call in own])
    pool = ids[masks.bool()].tolist()
    for number, text in enumerate(texts):
        row = number % 6
        assert text.tolist() == rewritten_slowly(model, ids[row], masks[row], types[row], pool, number, 5)
    assert not torch.equal(texts[0], texts[6]), "the second time a row is another one"


@torch.no_grad()
@pytest.mark.parametrize("build", [tiny_llama, masked_bert])
def test_padding_is_found_where_the_model_takes_its_mask(build):
    """By keyword or by place; ids may be of 32 bits, and outputs tuples."""
    model, texts = build().eval(), {}
    ids, mask = torch.stack(ROWS[:6]), torch.ones(6, LENGTH, dtype=torch.long)
    mask[:, :5], ids[:, :5] = 0, 96
    named = Call((), {"input_ids": ids, "attention_mask": mask})
    tuples = Call((), {**named.kwargs, "input_ids": ids.int(), "return_dict": False})
    for name, call in {"named": named, "placed": Call((ids, mask), {}), "tuples": tuples}.items():
        own = own_calls(model, [call], 0, mts.SparsifyConfig(data_loader=[], self_data=6), Processes())
        texts[name] = torch.cat([own_text.call_tokens(x) for x in own])
        assert len(own_text.token_rows(model, [call])[0]) == LENGTH - 5
    assert torch.equal(texts["named"], texts["placed"])
    assert torch.equal(texts["named"], texts["tuples"])
    assert build is tiny_llama or (texts["tuples"].dtype, texts["named"].dtype) == (torch.int32, torch.long)


def joined_slowly(rows, number, seed):
    """Row ``number``, of which each has two lists of tokens: the beginning of one row, and the end of another."""
    own = rows[number % len(rows)]
    alike = [row for row in rows if [*map(len, row)] == [*map(len, own)]]
    random = torch.Generator().manual_seed(seed * 1_000_003 + number)
    part, chance = torch.rand(2, generator=random, dtype=torch.float64).tolist()
    after = alike.index(own) + 1
    other = [*alike[after:], *alike[:after]][int(chance * (len(alike) - 1))]
    places = [math.ceil(part * len(tokens)) for tokens in own]
    return [a[:place] + b[place:] for a, b, place in zip(own, other, places)]


def test_rows_are_joined_from_two_of_the_users():
    """Whole batches in turn, with all else that they have; of rows that judge nothing; of other lengths nothing."""
    ids, others, labels = torch.randperm(9 * 6).view(9, 6), torch.randperm(9 * 4).view(9, 4), torch.arange(9)
    parts = [(slice(0, 2), 6), (slice(2, 3), 6), (slice(3, 6), 6), (slice(6, 8), 5), (slice(8, 9), 6)]
    calls = [
        Call((ids[part, :length],), {"decoder_input_ids": others[part], "cached": False, "labels": labels[part]}, step)
        for step, (part, length) in enumerate(parts)
    ]
    rows = [[ids[row, : 5 if row in (6, 7) else 6].tolist(), others[row].tolist()] for row in range(8)]
    own = joined(calls, 1, 1, 5)  # nine, of eight that are left: the first batch a second time
    assert [(len(call.args[0]), call.step) for call in own] == [(2, -4), (1, -3), (3, -2), (2, -1), (2, -8)]
    texts = [[a, b] for call in own for a, b in zip(call.args[0].tolist(), call.kwargs["decoder_input_ids"].tolist())]
    assert texts == [joined_slowly(rows, number, 5) for number in range(10)]
    assert not any(call.kwargs["cached"] for call in own)
    assert torch.cat([call.kwargs["labels"] for call in own]).tolist() == [*range(8), 0, 1]


TOKENS = torch.arange(24).view(4, 6)


def test_labels_of_tokens_are_joined_with_them():
    for call in joined([Call((), {"input_ids": TOKENS, "labels": TOKENS})], 0, 3, 0):
        assert torch.equal(call.kwargs["labels"], call.kwargs["input_ids"])
        assert not torch.equal(call.kwargs["labels"], TOKENS)


UNJOINED = {
    "features": [(torch.rand(4, 6),)],
    "images": [(TOKENS, torch.rand(4, 6, 2))],
    "a number each": [(TOKENS, torch.arange(4))],
    "other rows": [(TOKENS, TOKENS[:2])],
    "none as long": [(TOKENS,), (TOKENS[:1, :5],)],
    "no tensor": [(3,)],
}


@pytest.mark.parametrize("case", UNJOINED)
def test_nothing_is_joined_of_other_data(case):
    assert joined([Call(args, {}) for args in UNJOINED[case]], 0, 3, 0) == []


def bart() -> nn.Module:
    """Transformers lists it among masked language models as well."""
    layers = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=97, **layers, **sizes))


@pytest.mark.parametrize("build", [tiny_t5, bart, bert])
def test_auto_joins_rows_where_the_model_writes_none(build):
    model = build()
    decoded = [] if build is bert else ["decoder_input_ids"]
    data = [{**batch, **dict.fromkeys(decoded, batch["input_ids"])} for batch in batches(4)]
    rows = sum(len(batch["input_ids"]) for batch in data)
    report = mts.report(mts.sparsify(model, "wanda", data_loader=data, self_data="auto", progress=False))
    why = f"a {type(model).__name__} is no causal or masked language model"
    assert f"{3 * rows} further rows are joined from two of the data's each: {why}" in report.notes
    assert max(layer.tokens for layer in report.layers) == 4 * rows * LENGTH


def test_auto_is_nothing_where_a_model_is_streamed(tmp_path):
    """Each row of it takes memory and a pass."""
    masked_bert().save_pretrained(tmp_path / "dense")
    options = {"data_loader": batches(4), "self_data": "auto", "progress": False}
    report = mts.sparsify_checkpoint(tmp_path / "dense", tmp_path / "sparse", "wanda", **options)
    assert {layer.tokens for layer in report.layers} == {len(ROWS) * LENGTH}


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, -torch.inf])
    counts = 20_000
    places = (torch.arange(counts, dtype=torch.float64) + 0.5) / counts
    shares = drawn(logits.repeat(counts, 1), places).bincount(minlength=5) / counts
    torch.testing.assert_close(shares, logits.softmax(-1), atol=1e-4, rtol=0)
    edge = drawn(logits.repeat(2, 1), torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert edge.tolist() == [0, 3], "a token without probability is never drawn"


def test_with_a_kv_cache_each_token_is_run_once():
    """Whatever transformers calls the cache."""
    model, widths = tiny_llama().eval(), []
    with model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    ):
        windows_of(model, 1, seed=0)
    first, *others = widths
    assert set(others) == {1}
    assert first + len(others) == LENGTH - 1  # the last token that is written is run by nobody


# in a run -----------------------------------------------------------------------------------------------------------


def batches(count):
    return [{"input_ids": ids} for ids in token_batches(count)]


@torch.no_grad()
def own_of(model, users, windows):
    """The calls that the model writes beside those of the ``users`` batches, of which the last one judges."""
    config = mts.SparsifyConfig(data_loader=[], self_data=windows)
    return own_calls(model.eval(), [Call((), batch) for batch in users], 1, config, Processes())


def test_prompts_come_from_what_does_not_judge():
    judge = {"input_ids": torch.full((2, LENGTH), 96)}
    own = own_of(tiny_llama(), [*batches(3), judge], 40)
    assert {len(call.kwargs["input_ids"]) for call in own[:-1]} == {2}
    written = torch.cat([call.kwargs["input_ids"] for call in own])
    assert written.shape == (40, LENGTH)
    cuts = {tuple(row[i : i + LENGTH // 4].tolist()) for row in ROWS for i in range(LENGTH)}
    assert all(tuple(window[: LENGTH // 4].tolist()) in cuts for window in written)
    rewritten = torch.cat([call.kwargs["input_ids"] for call in own_of(masked_bert(), [*batches(2), judge], "auto")])
    rows = torch.cat(ROWS[:4]).view(4, -1).repeat(5, 1)[: 3 * 6]
    assert torch.equal(rewritten[:, [0, -1]], rows[:, [0, -1]])


def test_statistics_are_of_both_and_own_text_never_judges():
    options = {"data_loader": batches(4), "self_data": 40, "reconstruct": 1, "progress": False}
    model, block = mts.sparsify(tiny_llama(), "wanda", **options), "model.layers.0"
    report, judge = mts.report(model), in_steps([batch["input_ids"] for batch in batches(4)])[-1]
    goal, output = (seen_by(each, block, judge)[1] for each in (tiny_llama(), model))
    assert report.blocks[0].error_after == pytest.approx(relative(output, goal), rel=1e-4)
    tokens = (40 + 4 * len(token_batches(1)[0])) * LENGTH
    assert {layer.tokens for layer in report.layers} == {tokens}
    (note,) = [note for note in report.notes if "wrote" in note]
    assert note.startswith("the dense model wrote 40 windows of text itself, in ")
    assert report.settings["self_data"] == 40


@pytest.mark.parametrize(
    ("build", "word", "windows"), [(tiny_llama, "auto", 24), (masked_bert, "masked", 8), (tiny_llama, "masked", 0)]
)
def test_words_stand_for_numbers_of_windows(build, word, windows):
    """Three for each of the users' eight, and one by masked models alone; what goes without saying is not said."""
    options = {"include": "*", "data_loader": batches(4), "progress": False}
    by_word, by_number = (mts.sparsify(build(), "wanda", self_data=x, **options) for x in (word, windows))
    assert_same_state(by_word, state_of(by_number))
    notes = [[note.partition(", in")[0] for note in mts.report(model).notes] for model in (by_word, by_number)]
    assert notes[0] == notes[1]
    assert any(f"wrote {windows} windows" in note for note in notes[0]) == (windows > 0)
    assert mts.report(by_word).settings["self_data"] == word


@pytest.mark.parametrize(("windows", "epochs"), [(0, 3), (12, 2)])
def test_epochs_can_be_others_with_own_text(windows, epochs):
    options = {"data_loader": batches(2), "self_data": windows, "progress": False}
    models = [tiny_llama(num_hidden_layers=1) for _ in range(2)]
    pair, number = (mts.sparsify(x, reconstruct={"epochs": e}, **options) for x, e in zip(models, ([3, 2], epochs)))
    assert_same_state(pair, state_of(number))
    assert mts.report(pair).settings["reconstruct"] == mts.report(number).settings["reconstruct"]


def one_linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8))


def loop(model):
    for batch in batches(2):
        model(**batch)


EMBEDS = {"data_loader": [{"inputs_embeds": torch.ones(2, 8, 32)}]}


NONE_WRITTEN = [
    (one_linear, "auto", {"data_loader": [torch.ones(2, 8)]}, "a Sequential is no causal or masked language model"),
    (tiny_llama, "auto", {"forward_loop": loop}, "a forward_loop calls it, and no prompts are known"),
    (masked_bert, "masked", {"forward_loop": loop}, "a forward_loop calls it, and no prompts are known"),
    (tiny_llama, "auto", {"data_loader": batches(2), "split_data": False}, "each process has data of its own"),
    (tiny_llama, "auto", EMBEDS, "there are batches without input_ids [windows, tokens]"),
]


@pytest.mark.parametrize(("build", "word", "options", "why"), NONE_WRITTEN)
def test_words_say_why_none_is_written(build, word, options, why):
    include = "*proj" if build is tiny_llama else "*"
    model, without = (mts.sparsify(build(), "wanda", include=include, self_data=x, **options) for x in (word, 0))
    (note,) = [note for note in mts.report(model).notes if "text itself" in note]
    assert note.startswith("the model writes no text itself: ")
    assert why in note
    assert [layer.error for layer in mts.report(model).layers] == [layer.error for layer in mts.report(without).layers]


@pytest.mark.parametrize("build", [tiny_llama, masked_bert, bert])
def test_the_plan_counts_text_of_the_models_own_and_joined_rows(build):
    text = {"data": ["a"], "tokenizer": print, "num_samples": 8, "seq_len": 16}
    auto, number, masked, none = (
        mts.make_plan(build(), "wanda", self_data=windows, **text).memory["cached_activations"]
        for windows in ("auto", 24, "masked", 0)
    )
    assert auto == number == 4 * none
    assert masked == (2 * none if build is masked_bert else none)


def test_the_run_is_that_on_the_same_batches_given_by_hand():
    """Own text first, then the user's."""
    own = [call.kwargs for call in own_of(tiny_llama(), batches(4), 8)]
    by_hand = mts.sparsify(tiny_llama(), "sparsegpt", data_loader=[*own, *batches(4)], progress=False)
    ours = mts.sparsify(tiny_llama(), "sparsegpt", data_loader=batches(4), self_data=8, progress=False)
    assert_same_state(ours, state_of(by_hand))


def test_text_of_one_token_is_noticed():
    model = tiny_llama()
    model.lm_head.bias = nn.Parameter(torch.zeros(97).index_fill(0, torch.tensor([5]), 1e4))
    with pytest.warns(UserWarning, match="8 of 8 texts that the model wrote repeat one token"):
        mts.sparsify(model, "wanda", data_loader=batches(2), self_data=8, progress=False)
    assert any("repeat one token" in note for note in mts.report(model).notes)
    assert own_text.monotonous(torch.randint(0, 9, (4, 40))) is None


MORE = {"data_loader": batches(2), "self_data": 4}
NUMBER = "must be a number of windows of text, 0, 'auto' or 'masked'"
ALL_THE_SAME = "data='self' is text that the model writes, the same in all processes"


REFUSED = [
    (bert, MORE, "a BertModel is no causal or masked language model"),
    (tiny_t5, MORE, "a T5ForConditionalGeneration is no causal or masked language model"),
    (bart, MORE, "a BartForConditionalGeneration is no causal or masked language model"),
    (one_linear, MORE, "a Sequential is no causal or masked language model"),
    (tiny_llama, {**MORE, "data_loader": [{"inputs_embeds": torch.zeros(1, 4, 32)}]}, "a batch has none"),
    (tiny_llama, {"self_data": 4, "forward_loop": print}, "with forward_loop they have none"),
    (tiny_llama, {**MORE, "split_data": False}, "with split_data=False they have none"),
    (tiny_llama, {**MORE, "self_data": -1}, NUMBER),
    (tiny_llama, {**MORE, "self_data": 0.5}, NUMBER),
    (one_linear, {"data": "self"}, "data='self': a Sequential is no causal language model"),
    (masked_bert, {"data": "self"}, "data='self': a BertForMaskedLM is no causal language model"),
    (lambda: beginning(tiny_llama()), {"data": "self"}, "no token is known to begin with"),
    (tiny_llama, {"data": "self", "processor": print}, ALL_THE_SAME),
    (tiny_llama, {"data": "self", "split_data": False}, "leave split_data=False out"),
]


@pytest.mark.parametrize(("model", "options", "part"), REFUSED)
def test_what_is_refused(model, options, part):
    refused(mts.sparsify, model(), "wanda", **options, parts=[part])


@pytest.mark.parametrize("options", [MORE, {"data": "self", "seq_len": 64}], ids=["more", "all"])
def test_streaming_takes_a_file_instead(tmp_path, options):
    with pytest.raises(ValueError, match="give a file of write_text"):
        mts.sparsify_checkpoint(TESTBED / "tiny-llama", tmp_path / "out", "wanda", **options)
    assert not (tmp_path / "out").exists()


def test_a_model_with_nan_logits_is_refused():
    logits, places = torch.tensor([[1.0, torch.nan]]), torch.tensor([0.5], dtype=torch.float64)
    refused(drawn, logits, places, match="the dense model's logits are not finite")


# chats ---------------------------------------------------------------------------------------------------------------


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<model>' if add_generation_prompt }}"
ENDS = range(100, 400)  # tokens that end a text; the model ends none by itself


@pytest.fixture
def chatting(tokenizer):
    """(model, tokenizer with a template and chats, each of which asks something else, as options)."""
    model, tokenizer = helpers.trained_model(), copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = list(ENDS)
    lines = (TESTBED / "calibration.txt").read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if len(line) > 20][:60]
    chats = [
        [{"role": "user", "content": said[i]}, {"role": "assistant", "content": said[i + 1]}]
        + ([{"role": "user", "content": said[i + 2]}, {"role": "assistant", "content": "no"}] if i % 2 else [])
        for i in range(40)
    ]
    return model, {"data": chats, "tokenizer": tokenizer}


def test_answers_are_what_the_model_says_to_the_users_chats(chatting):
    """Up to the last thing that the user says; answers end where the model ends them, and what follows is masked."""
    model, data = chatting
    chats, tokenizer = data.values()
    config = mts.SparsifyConfig(**data, num_samples=10, seq_len=64, batch_size=2, self_data=6)
    own = own_calls(model.double(), load_calls(config, model, []), 1, config, Processes())
    texts = [
        "".join(f"<{m['role']}>{m['content']}" for m in (chat[:3] if len(chat) > 2 else chat[:1])) + "<model>"
        for chat in chats
    ]
    prompts = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    sizes = [len(tokens_of([chat], tokenizer)) for chat in chats]
    windows = torch.randperm(sum(sizes) // 64, generator=torch.Generator().manual_seed(0))[:10].sort().values
    judge = int(windows[-2]) * 64  # where the last batch of two windows begins
    free = [prompt for i, prompt in enumerate(prompts) if sum(sizes[: i + 1]) <= judge and len(prompt) <= 48]
    assert 2 < len(free) < len(prompts)
    rows = own_text.token_rows(model, own)
    assert [len(call.kwargs["input_ids"]) for call in own] == [2, 2, 2]
    ends = {*ENDS, tokenizer.eos_token_id}
    expected = [written_slowly(model, free, i, 64, 0, prompt=0, ends=ends) for i in range(6)]
    assert [row.tolist() for row in rows] == expected
    assert len({len(row) for row in rows}) > 2


def test_a_run_on_chats(chatting):
    """Only real tokens are counted, in statistics and in all tuning."""
    model, data = chatting
    data |= {"data": iter(data["data"]), "num_samples": 6, "seq_len": 64, "batch_size": 2}
    tuning = {"reconstruct": {"epochs": 1, "metric": "fisher"}, "distill": 1}
    report = mts.report(mts.sparsify(model, "wanda", self_data=6, progress=False, **data, **tuning))
    (tokens,) = {layer.tokens for layer in report.layers}
    assert 6 * 64 < tokens < 12 * 64
    assert mts.verify(model, "2:4")


def test_chats_that_leave_no_room(chatting):
    model, data = chatting
    parts = ["no chat leaves a quarter of 8"]
    refused(mts.sparsify, model, "wanda", self_data=2, num_samples=6, seq_len=8, **data, parts=parts)


def test_chats_without_a_user_are_text_like_other(chatting):
    model, data = chatting
    data["data"] = [[{"role": "assistant", "content": chat[0]["content"]}] for chat in data["data"]]
    config = mts.SparsifyConfig(**data, num_samples=4, seq_len=64, self_data=2)
    own = own_calls(model, load_calls(config, model, []), 1, config, Processes())
    assert [call.kwargs.keys() for call in own] == [{"input_ids"}]


def test_answers_into_a_file(chatting, tmp_path):
    model, data = chatting
    path = mts.write_text(model, tmp_path / "own.jsonl", windows=5, num_samples=6, seq_len=64, **data)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(texts) == 5
    assert all("<user>" in text and "<model>" in text for text in texts)


# from nothing --------------------------------------------------------------------------------------------------------

NOTHING = {"data": "self", "num_samples": 8, "seq_len": 12, "progress": False}


def beginning(model, **tokens):
    """The model, whose config names these tokens alone."""
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokens.get("bos"), tokens.get("eos")
    return model


def test_the_model_writes_all_of_the_data():
    """Each window begins with the beginning-of-text token; the run is that on these windows, given by hand."""
    start = [torch.tensor([7])]
    written = [written_slowly(beginning(tiny_llama().eval(), bos=7), start, i, 12, 5, prompt=1) for i in range(8)]
    assert {window[0] for window in written} == {7}
    ours = mts.sparsify(beginning(tiny_llama(), bos=7, eos=3), "sparsegpt", seed=5, **NOTHING)
    by_hand = mts.sparsify(tiny_llama(), "sparsegpt", data_loader=[torch.tensor(written)], seed=5, progress=False)
    assert_same_state(ours, state_of(by_hand))
    assert mts.report(ours).calibration["sha256"] == mts.report(by_hand).calibration["sha256"]
    (note,) = [note for note in mts.report(ours).notes if "wrote" in note]
    assert note.startswith("the dense model wrote 8 windows of text itself, in ")


def test_max_batches_counts_batches_of_it():
    model = mts.sparsify(beginning(tiny_llama(), bos=7), "wanda", batch_size=2, max_batches=3, **NOTHING)
    assert {layer.tokens for layer in mts.report(model).layers} == {3 * 2 * 12}


@pytest.mark.parametrize(("tokens", "first"), [({"bos": 7, "eos": 3}, 7), ({"eos": 3}, 3), ({"eos": [5, 3]}, 5)])
def test_what_texts_begin_with(tokens, first):
    assert own_text.begin_of_text(beginning(tiny_llama(), **tokens)).tolist() == [first]


def test_more_of_it_is_other_text(monkeypatch):
    """With self_data windows go on counting, so that none is drawn by the numbers of another."""
    numbers, real = [], own_text.draw
    monkeypatch.setattr(own_text, "draw", lambda *args: numbers.append(args[2]) or real(*args))
    mts.sparsify(beginning(tiny_llama(), bos=7), "wanda", self_data=4, reconstruct=1, **NOTHING)
    assert numbers == list(range(12))


# the file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [TESTBED / "calibration.txt", "self"])
def test_a_file_is_written_and_read_as_data(tmp_path, tokenizer, data):
    model = helpers.trained_model()
    before = helpers.Snapshot(model)
    text = {"data": data, "tokenizer": tokenizer, "num_samples": 4, "seq_len": 32}
    path = mts.write_text(model, tmp_path / "own.jsonl", windows=3, **text)
    assert helpers.Snapshot(model).look == before.look
    lines = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(lines) == len(set(lines)) == 3
    mts.sparsify(model, "wanda", **{**text, "data": path, "num_samples": 2}, progress=False)
    for other, file, windows, words in (
        (nn.Linear(2, 2), "no.jsonl", 3, "is no causal language model"),
        (model, "no.jsonl", 0, "windows=0: must be a positive whole number"),
        (model, "nowhere/no.jsonl", 3, "there is no folder '.*nowhere': make it first"),
    ):
        with pytest.raises(ValueError, match=words):
            mts.write_text(other, tmp_path / file, windows=windows, **text)
    assert [path.name for path in tmp_path.iterdir()] == ["own.jsonl"]
