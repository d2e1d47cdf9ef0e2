"""What each of two streaming processes holds, and that a machine has the pages of the source once."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_sparse.plan.planner import make_plan
from tests.checkpoint.streams import saved
from tests.distributed.test_killed import World
from tests.faults.faulty import ENDED, Runs, state
from tests.helpers import tiny_llama, token_batches

pytestmark = [pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc"), pytest.mark.slow]
COUNT, WINDOWS, LENGTH, BLOCKS = 4, 2, 128, 8  # batches, windows in each, and their tokens


def small() -> Any:
    return tiny_llama(max_position_embeddings=LENGTH)


def large() -> Any:
    """Blocks of 13.5 MiB in bfloat16, of which all would take more than is planned."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12}
    return tiny_llama(max_position_embeddings=LENGTH, num_hidden_layers=BLOCKS, **sizes)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("memory")
    for make in (small, large):
        saved(folder / make.__name__, make, torch.bfloat16)
    # else the C library keeps what is freed, at times twice what the run holds
    world = World(folder, Runs(folder, MALLOC_MMAP_THRESHOLD_="65536"), folder)
    yield world
    world.runs.close()


def anonymous(process: int) -> int:
    """Bytes of RssAnon: without pages of files, which the system can drop."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * int(found[1]) if found else 0


def streamed(world: World, model: str, target: Path, **more: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """The most that each of two processes had, looked at every 10 ms, and what they have to say."""
    target.parent.mkdir()
    batches = [batch.tolist() for batch in token_batches(COUNT, WINDOWS, LENGTH)]
    processes = world.start(target, 2, source=world.folder / model, batches=batches, reconstruct=None, **more)
    peaks = [0, 0]
    while any(state(process) not in ENDED for process in processes):
        peaks = [max(peak, anonymous(process)) for peak, process in zip(peaks, processes)]
        time.sleep(0.01)
    ended = [world.runs.wait(process) for process in processes]
    assert [code for code, _ in ended] == [0, 0], ended
    return peaks, [found for _, found in ended]


def test_each_process_holds_what_the_plan_says_and_the_machine_has_the_pages_of_the_source_once(world, tmp_path):
    """Beside what Python and its libraries take, which is what a run with hardly any weights has. While both have the
    weights of one block, and have run it, each has its pages, hardly any of others, and half of them counts for it."""
    method, at = "wanda", "layer 'model.layers.1.self_attn.q_proj'"
    base, _ = streamed(world, "small", tmp_path / "small" / "sparse", method=method)
    peaks, found = streamed(world, "large", tmp_path / "large" / "sparse", method=method, pages_at=at)
    model = large().bfloat16()
    data = {"num_samples": COUNT * WINDOWS, "seq_len": LENGTH, "batch_size": WINDOWS}
    planned = make_plan(model, method, **data).streamed["host"]
    most = sum(planned.values()) - planned["activations"] // 2  # of which each has its share
    for peak, without in zip(peaks, base):
        assert 0.3 * most < peak - without <= most, (peak, without, most)
    block = sum(parameter.nbytes for parameter in model.model.layers[1].parameters())
    outside = sum(parameter.nbytes for name, parameter in model.named_parameters() if "layers" not in name)
    held, shares = zip(*(of_rank["pages"] for of_rank in found))
    assert 0.95 * block < min(held) <= max(held) < 1.5 * block + outside
    assert sum(shares) <= 1.05 * max(held)
