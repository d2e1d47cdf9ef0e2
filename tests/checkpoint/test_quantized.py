"""Checkpoints in fp8 and MXFP4: dequantized as their formats say when the user asks, else refused by name."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.quantization_config import Mxfp4Config

import modelopt_sparse as mts
from modelopt_sparse.checkpoint import stream
from tests.checkpoint.folders import change_config, change_tensors, files_of
from tests.checkpoint.streams import assert_same_folders, in_memory, saved, streamed, weights
from tests.helpers import ROOT, assert_equal, refused, tiny_llama, token_batches
from tests.interruptions import interrupted
from tests.models.expert_models import GROUPS, LOCAL, VOCAB, causal

# Some versions of transformers warn of the flags that they set on a model when it is saved.
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:.*RoPE scaling:UserWarning")]

TRANSFORMERS = Version(hf.__version__)
MERGES = Version("5.1")  # 5.0 does not dequantize experts that are single on disk and fused in memory; 5.23 does
BLOCK = 128
# the 16 values of a 4-bit float with 2 bits of exponent and 1 of mantissa: OCP Microscaling Formats, table 11
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-value for value in FP4]

WITHOUT_TRITON = TRANSFORMERS < MERGES and importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(WITHOUT_TRITON, reason="transformers 5.0 imports triton to dequantize fp8")


def tiny_deepseek(rope: int = 64) -> nn.Module:
    experts = {**GROUPS, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    ranks = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": rope, "qk_nope_head_dim": 64, "v_head_dim": 64}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    return causal("DeepseekV3", **experts, **ranks, **sizes)()


def tiny_gpt_oss() -> nn.Module:
    return causal("GptOss", **LOCAL, hidden_size=64, intermediate_size=32, head_dim=16, sliding_window=8)()


def llama_of_whole_blocks() -> nn.Module:
    return tiny_llama(hidden_size=128, intermediate_size=256, num_key_value_heads=4, tie_word_embeddings=False)


# folders in fp8 and MXFP4, and what they stand for ------------------------------------------------------------------


def fp8(weight: Tensor, scales_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and a scale for each block of 128 x 128, the last ones smaller."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns, dtype=scales_dtype)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def of_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The oracle: each code times the scale of the block that it lies in."""
    rows = torch.arange(codes.shape[0]) // BLOCK
    columns = torch.arange(codes.shape[1]) // BLOCK
    return codes.float() * scales.float()[rows][:, columns]


def of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The oracle: [E, R, G, 16] bytes, each two codes, the low half first, and an exponent for each of the G groups
    -> [E, C, R], as GPT-OSS holds it."""
    values = torch.tensor([[FP4[byte % 16], FP4[byte // 16]] for byte in range(256)])[blocks.long()]
    scaled = values.flatten(-2) * 2.0 ** (scales.float() - 127)[..., None]
    return scaled.flatten(-2).mT.contiguous()


def is_fp8_weight(name: str, weight: Tensor) -> bool:
    dense = ("lm_head", "embed_tokens", "mlp.gate.")
    return weight.dim() == 2 and not any(part in name for part in dense)


def quantized(folder: Path, make: Callable[[], nn.Module], method: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """``folder``/quantized, made of a random model, and ``folder``/dense: the same weights, dequantized by the oracle
    to ``dtype``."""
    for name in ("dense", "quantized"):
        saved(folder / name, make, torch.bfloat16)
    file = folder / "quantized" / "model.safetensors"
    codes: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    torch.manual_seed(5)
    for name, weight in weights(folder / "quantized").items():
        if method == "fp8" and is_fp8_weight(name, weight):
            codes[name], codes[f"{name}_scale_inv"] = fp8(weight)
            dense[name] = of_fp8(codes[name], codes[f"{name}_scale_inv"])
        elif method == "mxfp4" and weight.dim() == 3:
            experts, columns, rows = weight.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8)
            codes[f"{name}_blocks"], codes[f"{name}_scales"] = blocks, scales
            dense[name] = of_mxfp4(blocks, scales)
        else:
            codes[name] = dense[name] = weight.clone()  # not mapped from the file that is written next
    assert len(codes) > len(dense)
    save_file(codes, file, metadata={"format": "pt"})
    made = {name: weight.to(dtype) for name, weight in dense.items()}
    save_file(made, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
    settings = {"fp8": {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}}
    change_config(folder / "quantized", quantization_config={"quant_method": method, **settings.get(method, {})})
    change_config(folder / "dense", dtype=str(dtype).removeprefix("torch."))
    return folder / "quantized"


FORMATS = {
    "llama": (llama_of_whole_blocks, "fp8"),
    "deepseek": (tiny_deepseek, "fp8"),
    "gpt-oss": (tiny_gpt_oss, "mxfp4"),
}
LOADED = [
    pytest.param("llama", marks=needs_triton),
    pytest.param("deepseek", marks=pytest.mark.skipif(TRANSFORMERS < MERGES, reason="refused by that version")),
    "gpt-oss",
]


def made(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, str]:
    """`quantized` of one of these -> the folder, and how it is quantized."""
    make, method = FORMATS[name]
    return quantized(folder, make, method, dtype), method


def dequantized(source: Path, **options: Any) -> mts.Report:
    """Stream the folder to ``sparse`` beside it."""
    return streamed(source, source.parent / "sparse", "magnitude", dequantize=True, **options)


# dequantized ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LOADED)
def test_streaming_gives_the_bits_of_the_dequantized_model_in_memory(tmp_path, name, dtype):
    source, method = made(tmp_path, name, dtype)
    before, options = files_of(source), {} if dtype == torch.bfloat16 else {"dtype": "float32"}
    data = {"data_loader": token_batches(4, length=12, vocab=VOCAB)}
    report = streamed(source, tmp_path / "streamed", "sparsegpt", dequantize=True, **data, **options)
    in_memory(tmp_path / "dense", tmp_path / "whole", "sparsegpt", **data)
    assert_same_folders(tmp_path / "streamed", tmp_path / "whole")
    assert files_of(source) == before
    (note,) = [note for note in report.notes if "dequantized" in note]
    form = str(dtype).removeprefix("torch.")
    assert re.fullmatch(rf"dequantized from {method} to {form}: \d\.\d MiB instead of \d\.\d MiB", note)
    assert note in mts.report(tmp_path / "streamed").notes
    assert not (tmp_path / "streamed.partial").exists()


@pytest.mark.parametrize("name", LOADED)
def test_the_command_line_in_memory_and_streamed(tmp_path, run, name):
    """The plan states dtype and sizes; both ways write what `sparsify` and `save` make of the dense folder."""
    source, method = made(tmp_path, name)
    flags = ("--method", "magnitude", "--dequantize")
    plan = run("plan", source, *flags, "--json")
    size = sum(tensor.nbytes for tensor in weights(tmp_path / "dense").values()) / 2**20
    stored = (source / "model.safetensors").stat().st_size / 2**20
    note = f"dequantized from {method} to bfloat16: {size:.1f} MiB instead of {stored:.1f} MiB"
    assert json.loads(plan.out)["notes"] == [note]
    assert f"Note: {note}." in run("plan", source, *flags).out
    in_memory(tmp_path / "dense", tmp_path / "whole", "magnitude")
    for way in ([], ["--stream"]):
        out = tmp_path / f"sparse{len(way)}"
        done = run("sparsify", source, "--out", out, *flags, *way)
        assert (done.code, "note: " + note in done.out) == (0, True)
        assert_same_folders(out, tmp_path / "whole")


@pytest.mark.parametrize("name", LOADED)
def test_a_model_that_the_user_dequantized_is_saved_dense(tmp_path, name):
    """transformers would write codes again, under a config that says nothing of them, or fail."""
    source, method = made(tmp_path, name)
    settings = {"fp8": hf.FineGrainedFP8Config, "mxfp4": Mxfp4Config}[method](dequantize=True)
    model: Any = hf.AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, dtype=torch.bfloat16)
    mts.sparsify(model.to(torch.bfloat16), "magnitude", progress=False)
    mts.save(model, tmp_path / "saved")
    in_memory(tmp_path / "dense", tmp_path / "whole", "magnitude")
    whole = {key: weight.to(torch.bfloat16) for key, weight in weights(tmp_path / "whole").items()}
    assert_equal(weights(tmp_path / "saved"), whole)


@needs_triton
def test_a_stopped_run_goes_on_only_as_it_was_started(tmp_path):
    source = quantized(tmp_path, llama_of_whole_blocks, "fp8")
    with interrupted(stream, "_finish"):
        dequantized(source)
    match = r"quantized source: dequantized from fp8 to bfloat16: .* there, .* float32"
    refused(dequantized, source, dtype="float32", match=match)
    dequantized(source)
    in_memory(tmp_path / "dense", tmp_path / "whole", "magnitude")
    assert_same_folders(tmp_path / "sparse", tmp_path / "whole")


# refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_without_being_asked_it_is_refused(tmp_path, run, name):
    source, method = made(tmp_path, name)
    before = files_of(source)
    expected = rf"is quantized \({method}\): give (dequantize=True|--dequantize) to have it dequantized from {method} "
    expected += r"to bfloat16: \d\.\d MiB instead of \d\.\d MiB"
    refused(streamed, source, tmp_path / "sparse", "magnitude", match=expected)
    for command in (["plan"], ["sparsify", "--out", tmp_path / "sparse"], ["sparsify", "--stream", "--out", "sparse"]):
        done = run(*command, source, "--method", "magnitude")
        done.wrong()
        assert re.search(expected, done.err)
    assert files_of(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "quantized"]


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "unheard-of"])
def test_other_methods_are_refused_by_name(tmp_path, method):
    source = saved(tmp_path / "dense", llama_of_whole_blocks)
    change_config(source, quantization_config={"quant_method": method, "bits": 4})
    refused(dequantized, source, match=rf"is quantized \({method}\); fp8 and mxfp4 are dequantized here")


def test_what_is_not_quantized_is_not_dequantized(tmp_path, run):
    source = saved(tmp_path / "dense", llama_of_whole_blocks)
    refused(dequantized, source, match=r"dense' is not quantized: leave dequantize=True out")
    assert run("plan", source, "--dequantize").code == 2


def test_blocks_that_do_not_fill_their_matrix_are_refused(tmp_path):
    """DeepSeek-V3 itself: 576 rows of kv_a_proj_with_mqa, in blocks of 128. Of 192 rows and two scales transformers
    makes two blocks of 96 and says nothing."""
    source = quantized(tmp_path, lambda: tiny_deepseek(rope=128), "fp8")
    shapes = {name: tensor.shape for name, tensor in weights(source).items() if "layers.0.self_attn.kv_a_proj" in name}
    assert set(shapes.values()) == {(192, 128), (2, 1)}
    weight = r"'model.layers.0.self_attn.kv_a_proj_with_mqa.weight', F8_E4M3 \[192, 128\]"
    refused(dequantized, source, match=f"would not dequantize all of it rightly: {weight}")
    assert not (tmp_path / "sparse.partial").exists()


@pytest.mark.skipif(TRANSFORMERS >= MERGES, reason="that version dequantizes them")
def test_experts_that_transformers_cannot_dequantize_are_refused(tmp_path):
    source = quantized(tmp_path, tiny_deepseek, "fp8")
    refused(dequantized, source, match=rf"\(fp8\), and transformers {TRANSFORMERS} .*a newer one may")


UNLIKE_THEIR_CONFIG = [
    ("llama", {"q_proj.weight_scale_inv": None}, r"'model.layers.0.self_attn.q_proj.weight', F8_E4M3"),
    ("llama", {"q_proj.weight_scale_inv": torch.ones(2, 1)}, r"q_proj.weight', F8_E4M3 \[128, 128\]; "),
    ("llama", {"q_proj.weight_scale_inv": torch.ones(1)}, r"q_proj.weight', F8_E4M3 \[128, 128\]; "),
    ("llama", {"q_proj.weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8)}, r"q_proj.weight', F8_E4M3 "),
    ("llama", {"q_proj.weight": torch.ones(128, 128, dtype=torch.int8)}, r"q_proj.weight', I8 \[128, 128\]; "),
    ("gpt-oss", {"gate_up_proj_scales": None}, r"gate_up_proj_blocks', U8 "),
    ("gpt-oss", {"gate_up_proj_blocks": None}, r"gate_up_proj_scales', U8 "),
    ("gpt-oss", {"gate_up_proj_scales": torch.ones(4, 64, 1, dtype=torch.uint8)}, "gate_up_proj_blocks', U8 "),
    ("gpt-oss", {"q_proj.weight": torch.ones(64, 64, dtype=torch.uint8)}, r"q_proj.weight', U8 \[64, 64\]; "),
]


@pytest.mark.parametrize(("name", "change", "message"), UNLIKE_THEIR_CONFIG)
def test_folders_that_do_not_hold_what_they_say_are_refused(tmp_path, name, change, message):
    source = quantized(tmp_path, *FORMATS[name])

    def changed(tensors: dict[str, Tensor]) -> None:
        for end, value in change.items():
            (key,) = [key for key in tensors if "layers.0." in key and key.endswith(end)]
            tensors.pop(key) if value is None else tensors.update({key: value})

    change_tensors(source / "model.safetensors", changed)
    refused(dequantized, source, match=message)


def test_weights_are_not_dequantized_to_codes_nor_where_they_cannot_be_looked_at(tmp_path, run):
    source = quantized(tmp_path, llama_of_whole_blocks, "fp8")
    match = r"dtype='float8_e4m3fn': weights are dequantized to torch.float16, "
    refused(dequantized, source, dtype="float8_e4m3fn", match=match)
    (source / "generation_config.json").write_text("{")
    refused(dequantized, source, match=r"generation_config\.json' is not a valid", error=OSError)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    flags = ("--method", "magnitude", "--dequantize")
    assert "instead" not in json.loads(run("plan", source, *flags, "--json").out)["notes"][0]
    done = run("sparsify", source, "--out", tmp_path / "sparse", *flags)
    done.wrong("is quantized (fp8) and does not hold all of its safetensors files")


# quantized models in memory -------------------------------------------------------------------------------------------


class CodedLinear(nn.Linear):
    """What transformers' FP8Linear is: a Linear whose weight is codes, and scales beside it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False)
        codes, scales = fp8(self.weight.detach())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


class CodedTensor(Tensor):
    """A tensor that says float32 and holds int8, as torchao's do."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> "CodedTensor":
        found = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        found.codes = codes
        return found

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> "CodedTensor":
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise AssertionError(f"{func} is called on codes")


class Coded(nn.Module):
    """What Mxfp4GptOssExperts is: a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 32, dtype=torch.uint8), requires_grad=False)


def test_a_model_of_fp8_linears_is_refused_by_name():
    model: Any = llama_of_whole_blocks()
    model.config.quantization_config = {"quant_method": "fp8"}
    model.model.layers[1].mlp.up_proj = CodedLinear(128, 256)
    codes = r"layer 'model.layers.1.mlp.up_proj' holds codes, quantized \(fp8\): load the model dequantized"
    refused(mts.sparsify, model, "magnitude", progress=False, match=codes)
    plan = mts.make_plan(model, "magnitude", exclude=["model.layers.1.mlp.up_proj"])
    assert len(plan.layers) == 13
    (scales,) = [item for item in plan.skipped if item.name.endswith("weight_scale_inv")]
    assert scales.reason == "quantized (fp8): load the model dequantized to prune it"


def test_tensors_that_hide_codes_are_refused_by_name():
    model: Any = llama_of_whole_blocks()
    codes = CodedTensor(torch.ones(128, 128, dtype=torch.int8))
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(ValueError, match=r"layer 'model.layers.0.self_attn.q_proj' holds codes"):
        mts.sparsify(model, "magnitude", progress=False)


def test_experts_of_codes_stay_as_they_are_and_the_plan_says_why():
    model: Any = tiny_gpt_oss()
    model.config.quantization_config = Mxfp4Config()
    model.model.layers[0].mlp.experts = Coded()
    skipped = {item.name: item.reason for item in mts.make_plan(model, "magnitude").skipped}
    reason = "quantized (mxfp4): load the model dequantized to prune it"
    assert skipped["model.layers.0.mlp.experts.gate_up_proj"] == reason


def test_a_model_whose_codes_are_all_buffers_is_refused_by_name():
    model: Any = llama_of_whole_blocks()
    model.config.quantization_config = {"quant_method": "gptq"}
    for block in model.model.layers:
        block.mlp, block.self_attn = nn.Identity(), nn.Identity()
    refused(mts.make_plan, model, "magnitude", match=r"nothing to prune .*: quantized \(gptq\): load the model dequant")


# verify -------------------------------------------------------------------------------------------------------------


def sparse_llama() -> nn.Module:
    return mts.export(mts.sparsify(llama_of_whole_blocks(), "magnitude", pattern="2:4", progress=False))


@needs_triton
def test_verify_refuses_a_quantized_folder_and_takes_its_model_dequantized(tmp_path):
    folder = quantized(tmp_path, sparse_llama, "fp8")
    (folder / "sparsity.json").write_text("{}")  # of the dense folder, as some tools carry it over
    refused(mts.verify, folder, "2:4", match=r"quantized' is quantized \(fp8\): load it dequantized with transformers")
    settings = hf.FineGrainedFP8Config(dequantize=True)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
    assert len(mts.verify(model, "2:4").layers) == 14
    model.model.layers[1].mlp.up_proj.weight.data[0, :4] = 1
    refused(mts.verify, model, "2:4", match="1 of 14 layers do not hold their pattern", error=mts.PatternError)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_verify_takes_what_compressed_tensors_dequantizes(tmp_path, monkeypatch):
    """Integers in 4 bits, with zero points; the packed model is refused by name."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    from quantize_compressed_tensors import quantize

    for scheme in ("W4A16", "W4A16_ASYM"):
        quantize(sparse_llama(), None, scheme, tmp_path / scheme)
        settings = hf.CompressedTensorsConfig(dequantize=True)
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / scheme, quantization_config=settings)
        layers = mts.verify(model, "2:4").layers
        assert len(layers) == 14
        assert all(layer.zeros >= layer.size // 2 for layer in layers)
    packed = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "W4A16")
    refused(mts.verify, packed, "2:4", match=r"quantized \(compressed-tensors\): load the model dequantized")


def test_verify_refuses_layers_that_hold_codes_by_name():
    """Also those of a report, quantized in place since."""
    model: Any = mts.sparsify(llama_of_whole_blocks(), "magnitude", pattern="2:4", enforce=False, progress=False)
    mts.verify(model)
    model.model.layers[1].mlp.up_proj = CodedLinear(128, 256)
    refused(mts.verify, model, match=r"layer 'model.layers.1.mlp.up_proj' holds codes")
