"""Model types of transformers that can be built tiny: SparseGPT at 2:4 covers the blocks of all but the exceptions.

The suite takes FAMILIES: one type of each implementation, and those like it that are listed as exceptions. With
EVERY_TYPE=1 in the environment all are taken, about 5 minutes of one core; those that the harness cannot build or run
are skipped, with the reason. One type alone:
``pytest "tests/model/test_every_type.py::test_sparsegpt_covers_the_blocks[llama]"``.
"""

import os
import re

import pytest
import transformers

import modelopt_sparse as mts
from tests.models.every_type import batch_of, model_types, sparsified, tiny_model
from tests.models.type_exceptions import NOT_REACHED, PARTLY, REFUSED, SLOW, VERSION, WHOLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the models themselves say
    pytest.mark.skipif(
        not transformers.__version__.startswith(f"{VERSION}."),
        reason=f"the lists of exceptions are those of transformers {VERSION}",
    ),
]


FAMILIES = (
    "albert|beit|bert|convbert|deberta-v2|flaubert|gemma3n_text|ibert|inkling2|inkling_text|llama|longcat_flash|"
    "longt5|mimi|mimi_encoder|mllama|mobilebert|mobilenet_v1|modernbert|opt|squeezebert|step3p7|t5|t5gemma2|"
    "video_llama_3|visual_bert|wav2vec2|wav2vec2-conformer"
)
NAMES = [name for name in model_types() if os.environ.get("EVERY_TYPE") or re.fullmatch(FAMILIES, name)]


@pytest.mark.parametrize("name", NAMES)
def test_sparsegpt_covers_the_blocks(name):
    """All that can be pruned in the blocks is 2:4, heads and routers are not, and no list of exceptions is stale."""
    if name in SLOW:
        pytest.skip("takes minutes")
    try:
        model = tiny_model(name)
        batch = batch_of(model)
    except Exception as error:  # whatever the type says to small numbers and to inputs that are not its own
        if re.fullmatch(FAMILIES, name):
            raise
        pytest.skip(f"{type(error).__name__}: {error}")
    if name in REFUSED:
        with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
            sparsified(model, batch)
        return
    outcome = sparsified(model, batch)
    mts.verify(outcome.model, pattern="2:4")
    assert bool(outcome.unreached) == (name in NOT_REACHED.split()), outcome.unreached
    assert bool(outcome.whole_runs) == (name in WHOLE), outcome.whole_runs
    assert (outcome.share < 0.98) == (name in PARTLY), outcome.share
    for layer in mts.report(outcome.model).layers:
        assert layer.zeros * 2 == layer.size, layer.name
        assert not re.search(r"(^|\.)(lm_head|classifier|router)(\.|$)|_router$", layer.name), layer.name


def test_the_exceptions_are_types_of_transformers():
    assert {*SLOW, *REFUSED, *NOT_REACHED.split(), *PARTLY, *WHOLE} <= set(model_types())
