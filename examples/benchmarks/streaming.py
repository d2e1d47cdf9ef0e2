"""Time and memory of making a checkpoint sparse by streaming, against its depth.

Makes bfloat16 Llama checkpoints of random weights, all of one width, as many blocks deep as fill ``--sizes`` gigabytes,
makes each sparse in a process of its own, and prints the curve: seconds and the peak of anonymous memory (RssAnon of
/proc, sampled from outside) beyond what importing the libraries and the model's class takes, beside what the plan says
it will be at most. Linux only.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import modelopt_sparse as mts

WORKER = """
import json, sys
import torch, transformers
job = json.loads(sys.argv[1])
import modelopt_sparse as mts
from transformers import LlamaForCausalLM
torch.set_num_threads(job["threads"])
print("imported", flush=True)
sys.stdin.readline()
generator = torch.Generator().manual_seed(0)
shape = (job["batch"], job["length"])
data = [torch.randint(job["vocabulary"], shape, generator=generator) for _ in range(job["batches"])]
options = {} if job["method"] == "magnitude" else {"data_loader": data}
mts.sparsify_checkpoint(
    job["source"], job["target"], job["method"], pattern="2:4", spill=job["spill"], progress=False, **options
)
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
    held = dict(mts.make_plan(model, job["method"], pattern="2:4", **data).streamed["host"])
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


def measure(job: dict) -> dict[str, float]:
    """Run the job in a new process -> its seconds, and its peaks, sampled every 10 ms, beyond its imports."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        worker.stdout.readline()
        imports = memory(worker.pid)
        peak = dict(imports)
        began = time.perf_counter()
        worker.stdin.write("go\n")
        worker.stdin.flush()
        while worker.poll() is None:
            for name, value in memory(worker.pid).items():
                peak[name] = max(peak[name], value)
            time.sleep(0.01)
        seconds = time.perf_counter() - began
    if worker.returncode:
        raise SystemExit(f"the run of {job['source']} failed with exit code {worker.returncode}")
    return {"seconds": seconds, "imports": imports["RssAnon"], **{k: peak[k] - imports[k] for k in imports}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4", help="gigabytes of the checkpoints (default: 1,2,4)")
    parser.add_argument("--width", type=int, default=2048, help="hidden size of all of them (default: 2048)")
    parser.add_argument("--method", default="sparsegpt")
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
            found = measure({**job, "source": str(source), "target": str(target), "vocabulary": VOCABULARY})
            rows.append({"GB": stored, "blocks": blocks, "plan": estimate(job, config(given.width, blocks)), **found})
            mts.verify(target, "2:4")
            shutil.rmtree(source)
            shutil.rmtree(target)
    print("| GB | blocks | seconds | seconds per block | peak RssAnon, MiB | plan says at most, MiB | peak RSS, MiB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['GB']:.2f} | {row['blocks']} | {row['seconds']:.1f} | {row['seconds'] / row['blocks']:.2f} | "
            f"{row['RssAnon']:.0f} | {row['plan']:.0f} | {row['VmRSS']:.0f} |"
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
