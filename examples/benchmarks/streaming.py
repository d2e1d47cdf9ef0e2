"""Time and memory of making a checkpoint sparse by streaming, against its depth and the number of processes.

Makes bfloat16 Llama checkpoints of random weights, all of one width, as many blocks deep as fill ``--sizes`` gigabytes,
makes each sparse in new processes, and prints the curve: seconds and the peak of anonymous memory (RssAnon of /proc,
sampled from outside, of the largest process) beyond what importing the libraries and the model's class takes, beside
what the plan says it will be at most. ``--method shrink`` takes a quarter of the MLP channels away instead. Linux only.

CPU seconds are those along the critical path: each process notes its own at every exchange with the others, and the
largest of each stretch are added up, so that waiting in turn does not count as sharing.

    python examples/benchmarks/streaming.py --sizes 0.1 --width 768 --batches 16 --length 256 --threads 1 \\
        --processes 1,2 --method quality=balanced
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import modelopt_sparse as mts

WORKER = """
import json, sys, time
import torch, transformers
job = json.loads(sys.argv[1])
import modelopt_sparse as mts
from modelopt_sparse.distributed import Processes, launched_group
from transformers import LlamaForCausalLM
torch.set_num_threads(job["threads"])
exchanges = []

class Noted(Processes):
    def all_gather(self, what, value=None):
        exchanges.append(time.process_time())
        return super().all_gather(what, value)

import modelopt_sparse.checkpoint.stream as stream
stream.Processes = Noted
print("imported", flush=True)
sys.stdin.readline()
generator = torch.Generator().manual_seed(0)
shape = (job["batch"], job["length"])
data = [torch.randint(job["vocabulary"], shape, generator=generator) for _ in range(job["batches"])]
options = {"pattern": "2:4", "spill": job["spill"], "progress": False}
options |= {} if job["method"] == "magnitude" else {"data_loader": data}
name, _, quality = job["method"].partition("=")
with launched_group():
    exchanges.append(time.process_time())
    options |= {"quality": quality} if quality else {}
    if name == "shrink":
        del options["pattern"]
        mts.shrink_checkpoint(job["source"], job["target"], mlp=0.25, **options)
    else:
        mts.sparsify_checkpoint(job["source"], job["target"], None if quality else name, **options)
    exchanges.append(time.process_time())
print(json.dumps(exchanges), flush=True)
"""
VOCABULARY = 4096
BAR = 40


def config(width: int, blocks: int) -> LlamaConfig:
    heads = max(width // 128, 2)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def block_shapes(made: LlamaConfig) -> dict[str, tuple[int, ...]]:
    width, wide = made.hidden_size, made.intermediate_size
    head = width // made.num_attention_heads
    shared = made.num_key_value_heads * head
    return {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (shared, width),
        "self_attn.v_proj.weight": (shared, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (wide, width),
        "mlp.up_proj.weight": (wide, width),
        "mlp.down_proj.weight": (width, wide),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }


def make_checkpoint(folder: Path, size: float, width: int) -> int:
    """Write a checkpoint of about ``size`` GB, one shard for each block, never holding more -> its blocks."""
    bytes_per_block = 2 * sum(torch.Size(shape).numel() for shape in block_shapes(config(width, 1)).values())
    blocks = max(2, round((size * 1e9 - 2 * VOCABULARY * width) / bytes_per_block))
    made = config(width, blocks)
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}

    def write(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        weights = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        file = f"model-{number:05d}-of-{blocks + 1:05d}.safetensors"
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(weights, file))

    write(1, {"model.embed_tokens.weight": (VOCABULARY, width), "model.norm.weight": (width,)})
    for i in range(blocks):
        write(i + 2, {f"model.layers.{i}.{name}": shape for name, shape in block_shapes(made).items()})
    made.save_pretrained(folder)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return blocks


def estimate(job: dict, made: LlamaConfig) -> float:
    """MiB that the plan of such a run states."""
    with torch.device("meta"):
        model = LlamaForCausalLM(made).to(torch.bfloat16)
    data = {"num_samples": job["batches"] * job["batch"], "seq_len": job["length"], "batch_size": job["batch"]}
    name, _, quality = job["method"].partition("=")
    data |= {"quality": quality} if quality else {}
    if name == "shrink":
        plan = mts.plan_shrink(model, mlp=0.25, **data)
    else:
        plan = mts.make_plan(model, None if quality else name, pattern="2:4", **data)
    held = dict(plan.streamed["host"])
    if job["spill"]:
        held.pop("activations", None)
    return sum(held.values()) / 2**20


def memory(process: int) -> dict[str, float]:
    """RssAnon and VmRSS of a process in MiB; nothing if it is over."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    found = (line.split(":") for line in lines if line.startswith(("RssAnon", "VmRSS")))
    return {name: int(value.split()[0]) / 1024 for name, value in found}


def anonymous_peak(command: list[str]) -> tuple[float, str]:
    """Run a worker that prints a line once it has imported, and then waits for one -> the most anonymous memory that it
    takes beyond that, in MiB, and what else it prints."""
    worker = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdout.readline()
    before = peak = memory(worker.pid)["RssAnon"]
    worker.stdin.write("go\n")
    worker.stdin.flush()
    while worker.poll() is None:
        peak = max(peak, memory(worker.pid).get("RssAnon", 0.0))
        time.sleep(0.002)
    if worker.returncode:
        raise SystemExit(f"{command} failed with exit code {worker.returncode}")
    return peak - before, worker.communicate()[0]


def measure(job: dict, count: int) -> dict[str, float]:
    """Run the job in new processes -> its seconds, and the peaks of the largest, sampled every 10 ms, beyond its
    imports."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    workers = []
    for rank in range(count):
        torchrun = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", WORKER, json.dumps(job)]
        environment = {**os.environ, **(torchrun if count > 1 else {})}
        workers.append(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment))
    for worker in workers:
        worker.stdout.readline()
    imports = [memory(worker.pid) for worker in workers]
    peaks = [dict(each) for each in imports]
    began = time.perf_counter()
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    while any(worker.poll() is None for worker in workers):
        for worker, peak in zip(workers, peaks):
            for name, value in memory(worker.pid).items():
                peak[name] = max(peak[name], value)
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"the run of {job['source']} failed with exit codes {[each.returncode for each in workers]}")
    exchanges = [json.loads(worker.communicate()[0]) for worker in workers]
    stretches = [[b - a for a, b in pairwise(each)] for each in exchanges]
    path = sum(map(max, zip(*stretches, strict=True)))
    beyond = {name: max(peak[name] - own[name] for peak, own in zip(peaks, imports)) for name in imports[0]}
    return {"seconds": seconds, "path": path, "imports": max(own["RssAnon"] for own in imports), **beyond}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4", help="gigabytes of the checkpoints (default: 1,2,4)")
    parser.add_argument("--width", type=int, default=2048, help="hidden size of all of them (default: 2048)")
    parser.add_argument("--processes", default="1", help="numbers of processes (default: 1)")
    parser.add_argument("--method", default="sparsegpt", help="or quality=balanced, shrink, shrink=balanced")
    parser.add_argument("--batches", type=int, default=4, help="calibration batches (default: 4)")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch (default: 4)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window (default: 512)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spill", action="store_true", help="hold activations in files")
    parser.add_argument("--work", type=Path, help="where the checkpoints are made and removed (default: a new folder)")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        for size in map(float, given.sizes.split(",")):
            source, target = Path(work, "dense"), Path(work, "sparse")
            blocks = make_checkpoint(source, size, given.width)
            stored = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
            job = {key: getattr(given, key) for key in ("method", "batches", "batch", "length", "threads", "spill")}
            about = {"GB": stored, "blocks": blocks, "plan": estimate(job, config(given.width, blocks))}
            for count in map(int, given.processes.split(",")):
                places = {"source": str(source), "target": str(target), "vocabulary": VOCABULARY}
                rows.append({**about, "processes": count, **measure({**job, **places}, count)})
                if not given.method.startswith("shrink"):
                    mts.verify(target, "2:4")
                shutil.rmtree(target)
            shutil.rmtree(source)
    print("| GB | blocks | processes | seconds | CPU seconds, critical path | peak RssAnon, MiB | plan, MiB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['GB']:.2f} | {row['blocks']} | {row['processes']} | {row['seconds']:.1f} | {row['path']:.1f} | "
            f"{row['RssAnon']:.0f} | {row['plan']:.0f} |"
        )
    imports = max(row["imports"] for row in rows)
    print(f"\nMemory is beyond that of importing the libraries ({imports:.0f} MiB of RssAnon).")
    for name, title in (("seconds", "seconds"), ("RssAnon", "MiB of RssAnon")):
        highest = max(row[name] for row in rows)
        print(f"\n{title} against blocks")
        for row in rows:
            print(f"{row['blocks']:6d} {'#' * round(BAR * row[name] / highest):<{BAR}} {row[name]:.1f}")


if __name__ == "__main__":
    main()
