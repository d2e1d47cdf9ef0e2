"""Runs the same small jobs with two checkouts of this package, and says which of them end with other bits.

    python tests/same_bits.py OTHER_CHECKOUT [--this CHECKOUT] [--only SUBSTRING] [--words] [--out FILE]

It is for changes that must not change what is computed. Make a worktree of the version before the change, and give its
folder as OTHER_CHECKOUT. Each checkout runs all jobs in one process of its own, through the public API and the command
line alone. Compared are the bits of all tensors and masks, reports and plans, files, and the numbers and names in what
is printed. Of a job whose tensors differ, the largest difference is said. Times, memory and versions are left out.

Words are notes, reasons, warnings, error messages, and printed text without a number in it. They are compared with
--words alone. Exit code 1 says that a job differs or fails, 2 that a process did not come to its end.

Both sides have one thread. Both set torch's precision of float32 products, so that the library times none of them.
"""

import argparse
import copy
import hashlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as hf
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from safetensors.torch import load_file
from torch import Tensor, nn

# behind the checkout whose package is run: models and data are those of this file
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from tests.faults.faulty import run_command
from tests.models import expert_models
from tests.models.architectures import ARCHITECTURES, HEADS, WIDER, WIDTH, Architecture, pairs, sequences, texts
from tests.models.shrinkable import BASE
from tests.models.stacked import Skipping, Stacked, vectors
from tests.models.tiny import tiny_yolos

Result = dict[str, Any]
mts: Any = None  # the package, as the checkout has it whose jobs this process runs; `run_jobs` imports it

ROOT = Path(__file__).resolve().parent.parent
TESTBED = ROOT / "examples" / "testbed"
# as tables and first lines print seconds
TIMES = re.compile(r"(?<![\d.=])\d+\.\d\d(?:\.\.\d+\.\d\d)?(?![\d%])|\d+(?:\.\d)?(?= s\b)")
# a checksum is of a whole file, its times and versions included; the peak is that of all jobs before
NOT_COMPARED = ("seconds", "versions", "checksum", "peak_memory")
WORDS = {"words", "notes", "reason", "problem", "measure", "message", "complaints", "warnings"}  # what holds them
SHOWN, LIMIT = 2, 3600  # differences that the table spells out; seconds that a side may take

# models and their data ------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {**BASE, "num_hidden_layers": 2}
IMAGE, BEFORE, AFTER = 90, 92, 93  # tokens of an image in a text
EYES = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4}
EYES |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN3_VL = {"text_config": {**SIZES, "head_dim": 8, "rope_parameters": ROPE}, "vision_config": EYES}
QWEN3_VL |= {"image_token_id": IMAGE, "vision_start_token_id": BEFORE, "vision_end_token_id": AFTER}


def llama(**changes: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes}))


def qwen3_vl() -> nn.Module:
    return hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(**QWEN3_VL))


def cnn() -> nn.Module:
    convolutions = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=4), nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 16))


def overwriting() -> nn.Module:
    """Its blocks write to their inputs."""
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)
    return Stacked(block=lambda: nn.Sequential(nn.LeakyReLU(0.5, inplace=True), *copy.deepcopy(layers)))


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(vocab: int = 97) -> list[Tensor]:
    return list(torch.randint(3, vocab, (4, 2, 12), generator=seeded()))


def images(size: int = 12) -> list[Tensor]:
    return list(torch.randn(3, 4, 3, size, size, generator=seeded()))


def images_in_texts(*shown: bool) -> list[dict[str, Tensor]]:
    """A batch for each of ``shown``: texts with an image of four tokens in each, or without."""
    batches = []
    for seed, has_images in enumerate(shown):
        generator = seeded(seed)
        ids = torch.randint(3, IMAGE, (2, 10 + seed), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if has_images:
            ids[:, 1:7] = torch.tensor([BEFORE, IMAGE, IMAGE, IMAGE, IMAGE, AFTER])
            pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
            grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
            batch |= {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
        batches.append(batch)
    return batches


def pictures() -> Result:
    """Images in the place of batches, and the processor that makes batches of them."""
    pixels = torch.randint(0, 256, (9, 20, 16, 3), generator=seeded(), dtype=torch.uint8)
    processor = hf.ViTImageProcessorPil(size={"height": 16, "width": 16})
    return {"data": list(pixels.numpy()), "processor": processor, "num_samples": 8}


def text() -> Result:
    words = (TESTBED / "calibration.txt").read_text(encoding="utf-8")[:20_000]
    tokenizer = hf.AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    return {"data": [words], "tokenizer": tokenizer, "num_samples": 8, "seq_len": 32, "batch_size": 2}


layer = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, WIDER, batch_first=True)
embedded = partial(hf.LlamaForCausalLM.from_pretrained, TESTBED / "tiny-llama", dtype="float32")
# name -> how the model is made, and its calibration data: batches, or options
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{name: (entry.build, partial(entry.batches, "right")) for name, entry in ARCHITECTURES.items()},
    **{name: (make, partial(texts, "right")) for name, make in expert_models.MODELS.items()},
    "llama": (llama, tokens),
    "padded": (llama, partial(texts, "right")),
    "left-padded": (llama, partial(texts, "left")),
    "text": (partial(llama, vocab_size=2048), text),
    "deep": (partial(llama, num_hidden_layers=3), tokens),
    "untied": (partial(llama, vocab_size=96, tie_word_embeddings=False), partial(tokens, 96)),
    "embedded": (embedded, text),
    "bloom": (ARCHITECTURES["bloom"].build, partial(texts, "left")),
    "pictures": (ARCHITECTURES["vit"].build, pictures),
    "yolos": (tiny_yolos, partial(images, 32)),
    "qwen3-vl": (qwen3_vl, partial(images_in_texts, True, True, True)),
    "qwen3-vl-mixed": (qwen3_vl, partial(images_in_texts, True, False, True, False)),
    "qwen3-vl-later": (qwen3_vl, partial(images_in_texts, False, True, True)),
    "cnn": (cnn, images),
    "no-stack": (layer, partial(sequences, "right")),
    "skipping": (Skipping, partial(vectors, 4)),
    "overwriting": (overwriting, partial(vectors, 4)),
}


def built(name: str) -> Any:
    """The model in evaluation mode, with weights of a size that lets every layer matter."""
    make, _ = MODELS[name]
    return make().eval() if name == "embedded" else Architecture(make, (), texts).build()


def with_data(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    data = {} if {"data", "data_loader", "forward_loop"} & options.keys() else MODELS[name][1]()
    return {"progress": False, **(data if isinstance(data, dict) else {"data_loader": data}), **options}


def own_method(at: int = 0) -> Any:
    """A method of a user's own, with an option. It can be interrupted once, when it is given its ``at``-th layer."""

    class NormPower(mts.Method):
        name = "norm_power"
        needs = "square_sums"
        options = {"power": 1.0}
        calls = 0

        def solve(self, weight, state, pattern, options):
            self.calls += 1
            if self.calls == at:
                raise KeyboardInterrupt
            norms = state.square_sums.sqrt().unsqueeze(-2)
            score = weight.abs().to(norms.dtype) * norms ** options["power"]
            return mts.masked_solution(weight, pattern.mask(score), state)

    return NormPower()


# what is compared -----------------------------------------------------------------------------------------------------


def without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): without_times(each) for key, each in value.items() if key not in NOT_COMPARED}
    return [without_times(each) for each in value] if isinstance(value, (list, tuple)) else value


def printed(text: str) -> Result:
    """The numbers, patterns and numbered names in printed text, and all of it as words; not how it is laid out."""
    paragraphs = [TIMES.sub("#", " ".join(lines.split())) for lines in text.split("\n\n")]
    counting = [lines for lines in paragraphs if not lines.startswith(("note:", "[", "Error", "modelopt-sparse:"))]
    numbers = [word.strip(".,;:()") for lines in counting for word in lines.split() if re.search(r"\d", word)]
    return {"numbers": numbers, "words": [re.sub("-{2,}", "", lines) for lines in paragraphs]}


def warned(job: Callable[[], Result]) -> Result:
    """What a job gives, and the warnings that it raises, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = job()
    said = dict.fromkeys(f"{each.category.__name__}: {each.message}" for each in caught)
    return {**result, "warnings": list(said)}


def result_of(model: nn.Module) -> Result:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {name: values.detach().clone() for name, values in named},
        "masks": {name: mask.clone() for name, mask in mts.named_masks(model)},
        "report": without_times(mts.report(model).as_dict()),
        "printed report": printed(str(mts.report(model))),
        "verified": printed(str(mts.verify(model))),
    }


def files_in(folder: Path) -> Result:
    """Hashes of all files, and their tensors; sparsity.json, which holds times, as what it says."""
    files = {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}
    texts = {name: without_times(json.loads(data)) for name, data in files.items() if name.endswith("sparsity.json")}
    tensors = {f"in {name}": load_file(folder / name) for name in files if name.endswith(".safetensors")}
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} | texts | tensors


# jobs -----------------------------------------------------------------------------------------------------------------


def sparse(name: str, method: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
    model, options = built(name).to(dtype), with_data(name, options)
    plan = mts.make_plan(model, method, **options)
    mts.sparsify(model, method, **options)
    return {"printed plan": printed(str(plan)), "plan": plan.as_dict(), **result_of(model)}


def two(name: str, method: Any, **options: Any) -> Result:
    """Two processes, forked from this one: these jobs come first, before a gradient has been taken here."""
    mp.start_processes(one_of_two, (name, method, options), nprocs=2, start_method="fork")
    return {f"rank {rank}": torch.load(f"{rank}.pt", weights_only=False) for rank in range(2)}


def one_of_two(rank: int, name: str, method: Any, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
    torch.save(warned(partial(sparse, name, method, **options)), f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def stream(name: str, method: Any, **options: Any) -> Result:
    built(name).save_pretrained("dense")
    report = mts.sparsify_checkpoint("dense", "sparse", method, **with_data(name, options))
    verified = printed(str(mts.verify("sparse")))
    return {"report": without_times(report.as_dict()), "files": files_in(Path()), "verified": verified}


def hooked(hook: Callable[[nn.Module], Any], name: str, method: Any, **options: Any) -> Result:
    """A model with accelerate's hooks, on the CPU, where they run as they would for a GPU."""
    model = built(name)
    hook(model)
    mts.sparsify(model, method, **with_data(name, options))
    mts.save(model, "sparse")
    return {"files": files_in(Path()), **result_of(remove_hook_from_module(model, recurse=True))}


def written(name: str, method: Any, **options: Any) -> Result:
    """Saved, restored into a new model, loaded if it is transformers', and exported."""
    model = mts.sparsify(built(name), method, **with_data(name, options))
    mts.save(model, "sparse")
    results = {"files": files_in(Path()), "restored": result_of(mts.restore(built(name), "sparse"))}
    if Path("sparse/config.json").exists():
        results |= {"loaded": result_of(mts.load("sparse")), "verified": printed(str(mts.verify("sparse")))}
    return {**results, "exported": result_of(mts.export(model))}


def masked(**options: Any) -> Result:
    layers = {f"{name}.weight": x.weight for name, x in built("llama").named_modules() if name.endswith("_proj")}
    masks = {name: x.abs() > x.abs().median(1, keepdim=True).values for name, x in layers.items()}
    return sparse("llama", None, masks=masks, pattern=0.5, **options)


def twice() -> Result:
    model = mts.sparsify(built("llama"), "magnitude", pattern="1:4", exclude="*.down_proj", progress=False)
    options = with_data("llama", {"pattern": "1:4"})
    return result_of(mts.sparsify(model, "wanda", include=["*.1.mlp.*", "*.down_proj"], **options))


def stopped(**options: Any) -> Result:
    """A streamed run is stopped when one of three blocks is done, and the second one is begun. The folder that it goes
    on to must be that of a run that nobody has disturbed, but for one note."""
    built("deep").save_pretrained("dense")
    options, method = with_data("deep", options), own_method(at=10)
    with suppress(KeyboardInterrupt):
        mts.sparsify_checkpoint("dense", "sparse", method, **options)
    mts.sparsify_checkpoint("dense", "sparse", method, **options)
    mts.sparsify_checkpoint("dense", "fresh", own_method(), **options)
    resumed, fresh = files_in(Path("sparse")), files_in(Path("fresh"))
    notes = [files["sparsity.json"]["report"].pop("notes") for files in (resumed, fresh)]
    assert notes[0][:-1] == notes[1], notes
    assert not differences(fresh, resumed), f"not the undisturbed folder: {differences(fresh, resumed)}"
    return {"files": resumed, "notes": notes, "layers solved": method.calls}


def trained(algorithm: str, *arguments: Any, **options: Any) -> Result:
    """Some steps of sparse training."""
    model, ids = built("llama").train(), tokens()
    sparsity = getattr(mts.training, algorithm)(*arguments, include="blocks", **options)
    sparsity.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsity.apply(optimizer)
    for step in range(8):
        model(input_ids=ids[step % 4], labels=ids[step % 4]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"printed training": printed(str(sparsity.report())), **result_of(model.eval())}


def wider(**options: Any) -> Result:
    torch.manual_seed(0)
    ift = mts.training.sparse_ift(built("llama"), 0.5, **options)
    ift.sparsity.apply(ift.model)
    return {"plan": printed(str(ift.plan)), **result_of(ift.model)}


def own_text_file() -> Result:
    options = {key: value for key, value in text().items() if key != "batch_size"}
    mts.write_text(built("text"), "own.jsonl", windows=4, **options)
    return {"text": Path("own.jsonl").read_text(encoding="utf-8")}


def evaluated() -> Result:
    """Two models of the same weights but for the zeros, on text."""
    model = mts.sparsify(built("text"), "magnitude", progress=False)
    ids = torch.randint(3, 2048, (200,), generator=torch.Generator().manual_seed(1))
    done = mts.evaluate(model, ids, seq_len=32, reference=built("text"), progress=False)
    return {"values": without_times(vars(done)), "printed": printed(str(done))}


def public_names() -> Result:
    """Arguments of all that is public, with their defaults."""
    results: Result = {}
    for module in (mts, mts.training):
        for name in module.__all__:
            value = getattr(module, name)
            members = {name: value}
            if inspect.isclass(value):
                own = [(key, x) for key, x in inspect.getmembers(value) if not key.startswith("_")]
                members |= {f"{name}.{key}": x for key, x in own if "modelopt" in str(getattr(x, "__module__", ""))}
            for key, member in members.items():
                with suppress(TypeError, ValueError):  # what is no function, or is written in C
                    arguments = inspect.signature(member).parameters.values() if callable(member) else ()
                    defaults = {x: getattr(x.default, "__name__", repr(x.default)) for x in arguments}
                    results[f"{module.__name__}.{key}"] = [f"{x.kind} {x.name}={defaults[x]}" for x in arguments]
    return results


def commands(*lines: str) -> Result:
    """What the command line prints, in this process, and its exit codes; the model has a tokenizer."""
    built("text").save_pretrained("dense")
    text()["tokenizer"].save_pretrained("dense")
    Path("text.txt").write_text(text()["data"][0][:5_000], encoding="utf-8")
    results: Result = {}
    for line in lines:
        code, found = run_command(shlex.split(line))
        said = without_times(json.loads(found["out"])) if "--json" in line else printed(found["out"])
        complaints = [row for row in found["err"].splitlines() if row.startswith("modelopt-sparse:")]
        results[line] = {"code": code, "printed": said, "complaints": complaints}
    return {**results, "files": files_in(Path())}


# the list -------------------------------------------------------------------------------------------------------------

# how, with which model: method and options; the next job of the same kind
LINES = """
two llama: sparsegpt; wanda permute=true polish=4 reconstruct=2
two llama: wanda budget="50% zeros"; alps reconstruct=1
two mixtral: sparsegpt memory_limit=100KB; sparsegpt
two t5: sparsegpt sequential=stage
two padded: DEFAULT quality=balanced sequential=stage; wanda sequential=none polish=2
two text: sparsegpt split_data=false distributed=false; wanda self_data=4 reconstruct=1
two whisper: sparsegpt sequential=none
two mixtral: wanda experts=weight_only min_tokens=30 sequential=stage
sparse llama: magnitude; wanda; ria; sparsegpt; alps; OWN power=0.5; sparsegpt damping=0.1 block_size=16
sparse llama: MODES hessian_damp=0.02 max_iter_data_loader=2; OWN power=2 polish=2 reconstruct=1
sparse llama: sparsegpt pattern=1:4; wanda pattern=4:8; magnitude pattern=0.5; alps pattern=0.5
sparse llama: ria pattern="50% per row"; sparsegpt pattern="50% per row"
sparse llama: sparsegpt sequential=stage; sparsegpt sequential=none; alps sequential=none pattern=1:4
sparse padded: sparsegpt; wanda count_padding=true max_batches=3; alps reconstruct=1 permute=true
sparse padded: sparsegpt sequential=none permute=true; sparsegpt forward_loop=RAGGED polish=2
sparse padded: alps forward_loop=RAGGED reconstruct=1 sequential=stage; wanda forward_loop=RAGGED sequential=none
sparse left-padded: sparsegpt; wanda sequential=none
sparse text: wanda; sparsegpt seed=3 num_samples=5; wanda self_data=4 reconstruct=1; DEFAULT quality=best
sparse text: DEFAULT quality=max self_data=2 num_samples=4; wanda distill=1 polish=2 sequential=none
sparse llama: wanda data=self num_samples=4 seq_len=16 batch_size=2; wanda distill=1; alps reconstruct=FISHER
sparse llama: sparsegpt forward_loop=LOOP; wanda collect_func=SHORT data_loader=TOKENS; sparsegpt device=cpu
sparse llama: sparsegpt autocast=bfloat16; alps dtype=FLOAT64
sparse llama: sparsegpt dtype=BFLOAT16 polish=2 reconstruct=1; wanda quality=balanced sequential=stage
sparse llama: DEFAULT quality=fast; DEFAULT quality=balanced; DEFAULT quality=balanced pattern=0.5
sparse llama: DEFAULT quality=best; sparsegpt permute=true; ria polish=true; alps update=false
sparse llama: sparsegpt update=false; sparsegpt reconstruct=true; wanda reconstruct=NO_VECTORS; wanda pattern=60%
sparse llama: wanda budget="60% zeros"; wanda rules=RULES; sparsegpt enforce=false
sparse untied: wanda include='["*.1.*", "lm_head"]' exclude=*.o_proj
sparse deep: sparsegpt sequential=stage permute=true reconstruct=2; alps sequential=none; wanda reconstruct=MOVE
sparse gpt2: sparsegpt; wanda reconstruct=2 sequential=stage; sparsegpt sequential=none
sparse gemma3: sparsegpt; sparsegpt sequential=stage reconstruct=1; alps sequential=none permute=true
sparse gemma3: wanda autocast=bfloat16
sparse bloom: sparsegpt; wanda sequential=stage reconstruct=1; sparsegpt sequential=none
sparse t5: sparsegpt sequential=stage; alps permute=true reconstruct=1; sparsegpt sequential=none
sparse t5: DEFAULT quality=balanced; wanda forward_loop=PAIRS sequential=none
sparse whisper: sparsegpt; sparsegpt sequential=stage reconstruct=1; wanda sequential=none; DEFAULT quality=balanced
sparse vit: sparsegpt; alps sequential=none pattern=0.5; DEFAULT quality=balanced
sparse pictures: sparsegpt
sparse yolos: sparsegpt; sparsegpt sequential=stage reconstruct=1; wanda sequential=none
sparse qwen3-vl: sparsegpt; wanda sequential=stage reconstruct=1; sparsegpt sequential=none; DEFAULT quality=balanced
sparse qwen3-vl-mixed: sparsegpt reconstruct=1; wanda sequential=stage; sparsegpt sequential=none
sparse qwen3-vl-later: sparsegpt
sparse albert: sparsegpt; wanda permute=true reconstruct=1; wanda sequential=none; sparsegpt sequential=stage
sparse cnn: sparsegpt include=* pattern=1:4; alps include=* pattern=0.5 polish=2; wanda include=* hardware_only=true
sparse transformer_encoder: sparsegpt; ria permute=true reconstruct=1; sparsegpt sequential=none; wanda sequential=stage
sparse no-stack: sparsegpt include=*
sparse skipping: sparsegpt; wanda sequential=stage permute=true; sparsegpt sequential=none
sparse overwriting: sparsegpt; wanda sequential=stage; sparsegpt sequential=none; wanda reconstruct=1
sparse mixtral: sparsegpt min_tokens=30; sparsegpt experts=all_tokens; wanda experts=weight_only min_tokens=30
sparse mixtral: sparsegpt memory_limit=100KB min_tokens=30; sparsegpt polish=2 reconstruct=1 min_tokens=8
sparse mixtral: sparsegpt sequential=none min_tokens=30; alps sequential=stage min_tokens=30 reconstruct=1
sparse mixtral: DEFAULT quality=balanced min_tokens=8; magnitude pattern=1:4; wanda pattern=0.5 min_tokens=8
sparse gpt_oss: sparsegpt min_tokens=8; wanda sequential=none experts=all_tokens; ria sequential=stage reconstruct=1
sparse llama4: sparsegpt min_tokens=8; wanda sequential=none experts=all_tokens
sparse jetmoe: sparsegpt min_tokens=8; wanda sequential=none experts=weight_only
sparse embedded: sparsegpt; wanda permute=true reconstruct=1
written llama: wanda; sparsegpt pattern=0.5
written mixtral: magnitude
written transformer_encoder: sparsegpt
written whisper: wanda
written qwen3-vl: wanda
offloaded llama: sparsegpt; wanda sequential=none permute=true; sparsegpt sequential=stage
offloaded t5: sparsegpt
offloaded mixtral: wanda min_tokens=30
dispatched padded: sparsegpt reconstruct=1; alps sequential=stage
dispatched gemma3: wanda sequential=none
stream llama: sparsegpt; alps permute=true reconstruct=1 spill=true; sparsegpt dtype=BFLOAT16; magnitude
stream llama: sparsegpt spill=true sequential=none polish=2; wanda pattern=0.5 spill=true
stream llama: DEFAULT quality=fast spill=true
stream padded: wanda spill=true; DEFAULT quality=balanced; DEFAULT quality=balanced spill=true sequential=stage
stream left-padded: sparsegpt spill=true reconstruct=2
stream text: wanda spill=true; sparsegpt quality=best
stream gpt2: sparsegpt sequential=none; wanda spill=true sequential=stage
stream gemma3: sparsegpt spill=true; wanda sequential=stage reconstruct=1 spill=true
stream bloom: sparsegpt spill=true
stream t5: sparsegpt; wanda reconstruct=1; sparsegpt spill=true; wanda spill=true sequential=stage
stream whisper: sparsegpt spill=true; wanda sequential=none
stream vit: sparsegpt spill=true reconstruct=1
stream yolos: sparsegpt spill=true
stream qwen3-vl: sparsegpt spill=true; wanda sequential=stage
stream mixtral: sparsegpt min_tokens=30; wanda spill=true sequential=stage
stream mixtral: sparsegpt spill=true memory_limit=100KB min_tokens=30
stream gpt_oss: wanda spill=true experts=all_tokens
"""
CALIBRATED = "sparsify dense --out sparse --data text.txt --seq-len 32"
MAGNITUDE = "sparsify dense --out sparse --method magnitude"
EVAL = "eval sparse --data text.txt --reference dense --seq-len 32"
READING = ("report sparse", "report sparse --json", "verify sparse", "verify sparse --pattern 1:4 --json")
OTHERS: dict[str, Callable[[], Result]] = {
    "own masks": masked,
    "own masks, polish, reconstruct": partial(masked, polish=True, reconstruct=1),
    "sparse twice": twice,
    "stopped stream": stopped,
    "stopped stream, permute, reconstruct": partial(stopped, permute=True, reconstruct=True),
    "commands: sparsify": partial(commands, f"{CALIBRATED} --method wanda --eval text.txt --json"),
    "commands: sparsify --stream": partial(commands, f"{CALIBRATED} --quality fast --stream --spill --set pattern=4:8"),
    "commands: plan": partial(commands, "plan dense --data text.txt", "plan dense --pattern 50% --json"),
    "commands: report, verify": partial(commands, MAGNITUDE, *READING),
    "commands: eval": partial(commands, MAGNITUDE, f"{EVAL} --json", EVAL),
    "commands: wrong input": partial(commands, "sparsify dense --out sparse", "plan dense --set x"),
    "commands: sparse-ift": partial(commands, "sparse-ift dense --sparsity 0.5 --out wide", "plan dense --pattern 1:2"),
    "commands: stream twice": partial(commands, f"{CALIBRATED} --stream --spill", f"{CALIBRATED} --stream"),
    "public names": public_names,
    "evaluate": evaluated,
    "write_text": own_text_file,
    "training: Static": partial(trained, "Static", 0.75),
    "training: GMP": partial(trained, "GMP", [0.0, 0.5, 0.75], update={"freq": 2, "stop": 6}),
    "training: SET": partial(trained, "SET", 0.75, update={"freq": 2, "stop": 6}),
    "training: RigL": partial(trained, "RigL", 0.75, scope="row", update={"freq": 2, "stop": 6}),
    "sparse_ift: wide": wider,
    "sparse_ift: parallel": partial(wider, member="parallel"),
    "sparse_ift: factorized": partial(wider, member="factorized"),
}


def value_of(word: str) -> Any:
    """What a word of the list stands for: capitals for what is below, else JSON, or the word itself."""
    rules = {"*.0.mlp.*": {"pattern": "1:4"}, "*.k_proj": None, "*.v_proj": {"method": own_method(), "power": 0.5}}
    values = {
        "DEFAULT": None,
        "BFLOAT16": torch.bfloat16,
        "FLOAT64": torch.float64,
        "OWN": own_method(),
        "MODES": [("sparsegpt", {"nn.Linear": {"*": {}, "*.k_proj": None}})],  # ModelOpt's
        "NO_VECTORS": {"epochs": 2, "norms_and_biases": False},
        "RULES": rules,
        "TOKENS": tokens(),
        "SHORT": lambda batch: {"input_ids": batch[:, :7]},
        "FISHER": {"epochs": 1, "metric": "fisher"},
        "MOVE": {"epochs": 2, "masks": "move"},
        "RAGGED": lambda model: [model(**batch) for batch in texts("right")],
        "PAIRS": lambda model: [model(**batch) for batch in pairs("right")],
        "LOOP": lambda model: [model(batch) for batch in tokens()],
    }
    try:
        return values[word] if word in values else json.loads(word)
    except ValueError:
        return word


KINDS: dict[str, Callable[..., Result]] = {
    "two": two,
    "sparse": sparse,
    "written": written,
    "stream": stream,
    "offloaded": partial(hooked, partial(cpu_offload, execution_device=torch.device("cpu"))),
    "dispatched": partial(hooked, partial(dispatch_model, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)),
}


def jobs_of(lines: str) -> Iterator[tuple[str, Callable[[], Result]]]:
    for line in lines.strip().splitlines():
        head, _, rest = line.partition(": ")
        how, model = head.split()
        for job in rest.split("; "):
            method, *options = shlex.split(job)
            named = {key: value_of(value) for key, _, value in (option.partition("=") for option in options)}
            yield f"{head}: {job}", partial(KINDS[how], model, value_of(method), **named)


# the two sides --------------------------------------------------------------------------------------------------------


def run_jobs(checkout: Path, results: Path, only: str) -> None:
    """Run the jobs with the checkout that is in the path of this process, each in an empty folder."""
    global mts
    import modelopt_sparse as mts

    if not Path(mts.__file__).resolve().is_relative_to(checkout):
        raise SystemExit(f"{mts.__file__} is not in {checkout}")
    torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    jobs = {**dict(jobs_of(LINES)), **OTHERS}
    done: Result = {}
    for name in [name for name in jobs if only in name]:
        folder = results.with_suffix("") / str(len(done))
        folder.mkdir(parents=True)
        os.chdir(folder)
        try:
            done[name] = warned(jobs[name])
        except Exception:
            done[name] = {"fails": traceback.format_exc()}
    torch.save(done, results)
    print(f"{len(done)} jobs with {mts.__file__}")


def start(checkout: Path, results: Path, only: str) -> Result:
    """One side, in a process of its own."""
    arguments = [sys.executable, __file__, str(checkout), "--results", str(results), "--only", only]
    path = results.with_suffix(".path")  # which holds the checkout's package and nothing else
    path.mkdir()
    (path / "modelopt_sparse").symlink_to(checkout / "modelopt_sparse")
    fixed = {"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, env={**os.environ, **fixed}, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(2)
    print(done.stdout.strip(), flush=True)
    return torch.load(results, weights_only=False)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors, and the text of everything else, by where they stand."""
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(each, f"{path} > {key}".removeprefix(" > "))
    counted = f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else repr(value)
    yield path, value if isinstance(value, Tensor) else counted


def same(there: Any, here: Any) -> bool:
    if not isinstance(there, Tensor) or not isinstance(here, Tensor):
        return type(there) is type(here) and there == here
    as_bytes = [x.contiguous().flatten().view(torch.uint8) for x in (there, here)]
    return (there.dtype, there.shape) == (here.dtype, here.shape) and torch.equal(*as_bytes)


def differing(other: Any, this: Any, words: bool = False) -> dict[str, tuple[Any, Any]]:
    """What differs, on both sides, by where it stands. ``words``: only words; else all but words."""
    there, here = dict(flat(other)), dict(flat(this))
    paths = [path for path in {**there, **here} if WORDS.isdisjoint(path.split(" > ")) != words]
    sides = {path: (there.get(path, "nothing"), here.get(path, "nothing")) for path in paths}
    if words:
        sides = {path: (TIMES.sub("#", x), TIMES.sub("#", y)) for path, (x, y) in sides.items()}
    return {path: both for path, both in sides.items() if not same(*both)}


def shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else value


def differences(other: Any, this: Any, words: bool = False) -> list[str]:
    differ = {path: [shown(x) for x in both] for path, both in differing(other, this, words).items()}
    return [f"{path}: {there} there, {here} here" for path, (there, here) in differ.items()]


def largest_difference(sides: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """How far the tensors are from each other that differ, and in which it is the most."""
    found: dict[str, float] = {}
    for path, (a, b) in sides.items():
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
            found[path] = (a.double() - b.double()).abs().nan_to_num(torch.inf).max().item()
    if not found:
        return []
    most = max(found, key=lambda path: found[path])
    return [f"{len(found)} tensors differ, by at most {found[most]:.3g} ({most})"]


def problems_of(other: Result, this: Result) -> list[str]:
    failed = [f"fails {where}: {x['fails']}" for where, x in (("there", other), ("here", this)) if "fails" in x]
    return failed or largest_difference(differing(other, this)) + differences(other, this)


def shortened(problems: list[str]) -> str:
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    lines = [" ".join(problem.split()) for problem in problems[:SHOWN]]
    return "; ".join([*(line if len(line) < 240 else f"{line[:120]} ... {line[-120:]}" for line in lines), *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--this", type=Path, default=ROOT, help="default: the one this file lies in")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="jobs with this in their names")
    parser.add_argument("--words", action="store_true", help="compare words as well")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, with all that differs")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # this process is one of the sides
    chosen = parser.parse_args()
    if chosen.results is not None:
        return run_jobs(chosen.other, chosen.results, chosen.only)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        other = start(chosen.other.resolve(), folder / "other.pt", chosen.only)
        this = start(chosen.this.resolve(), folder / "this.pt", chosen.only)
    wrong = {name: problems_of(result, this[name]) for name, result in other.items()}
    if not wrong:
        parser.error(f"no job has {chosen.only!r} in its name")
    wording = {name: differences(x, this[name], words=True) if chosen.words else [] for name, x in other.items()}
    short, long, width = [], [], max(map(len, wrong))
    for name, problems in wrong.items():
        words = [f"words: {line}" for line in wording[name]]
        short.append(f"{name:{width}}  {'; '.join(filter(None, [shortened(problems) or 'same', shortened(words)]))}")
        long += ["\n    ".join([f"{name:{width}}  {'' if problems else 'same'}", *problems, *words])]
    ending = f"{sum(not problems for problems in wrong.values())} of {len(wrong)} jobs are the same"
    if chosen.words:
        ending += f", {sum(not words for words in wording.values())} in their words as well"
    print("\n".join([*short, ending]))
    if chosen.out is not None:
        chosen.out.write_text("\n".join([*long, ending, ""]), encoding="utf-8")
    raise SystemExit(any(wrong.values()) or any(wording.values()))


if __name__ == "__main__":
    main()
