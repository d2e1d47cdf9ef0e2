"""examples/sparsify.ipynb runs from its first cell to its last, and the outputs in it are of no one machine.

`python -m tests.test_notebook` runs it and writes its outputs anew.
"""

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = ROOT / "examples" / "sparsify.ipynb"
# what the test asks of the kernel once all cells have run
ASKED = """
import json

weights = [model.get_parameter(name) for name, _ in mts.named_masks(model)]
print(json.dumps({
    "before": before.kl, "after": after.kl, "perplexity": after.perplexity, "dense": after.reference_perplexity,
    "zeros": sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights),
    "layers": len(mts.verify("tiny-llama-2of4", "2:4").layers),
}))
"""


def _executed(folder: Path, *more: str) -> Any:
    """The notebook after a run in ``folder``, where it finds `examples`, with ``more`` cells at its end."""
    (folder / "examples").symlink_to(ROOT / "examples")
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in more]
    place = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=place)
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    return notebook


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's packages
def test_it_runs_and_finds_what_its_text_says(tmp_path):
    """Half of the weights are zero and stay so; a few steps with the teacher bring the model closer to it."""
    outputs = _executed(tmp_path, ASKED).cells[-1].outputs
    found = json.loads("".join(output.text for output in outputs if output.get("name") == "stdout"))
    assert found["zeros"] == 0.5
    assert found["layers"] == 42
    assert math.isfinite(found["perplexity"])
    assert found["perplexity"] > found["dense"]
    assert 0 < found["after"] < found["before"]


def test_its_outputs_are_there_and_of_no_one_machine():
    """Every cell with code has run, in order; nothing in the file is an absolute path, an error or a bar."""
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert {output.get("name", output.output_type) for output in outputs} <= {"stdout", "execute_result"}
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"(?:^|[\s\"'(=])/[a-z]\w*/", text)
    assert not re.search(r"[A-Z]:\\\\|file://|site-packages", text)
    assert len(text) < 20_000


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        renewed = _executed(Path(made))
    for cell in renewed.cells:
        cell.metadata.clear()  # when it ran
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    renewed.metadata.language_info = {"name": "python"}
    nbformat.write(renewed, NOTEBOOK)
