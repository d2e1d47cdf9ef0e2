"""HTML reports of three runs, and their screenshots in docs/images, made with headless Chromium.

The embedded model at quality="balanced" beside SparseGPT, both 2:4, and a tiny mixture of experts of random weights.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

import modelopt_sparse as mts

ROOT = Path(__file__).parent.parent
TESTBED = ROOT / "examples" / "testbed"
SWITCHES = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    "--force-device-scale-factor=0.8",
]
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


def testbed(how: dict[str, str], samples: int) -> torch.nn.Module:
    """The embedded model at 2:4, with what the held-out text says of it in its report."""
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    model, dense = (AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama", dtype=torch.float32) for _ in range(2))
    data = {"data": TESTBED / "calibration.txt", "tokenizer": tokenizer, "num_samples": samples, "seq_len": 512}
    mts.sparsify(model, pattern="2:4", progress=False, **how, **data)
    text = (TESTBED / "heldout.txt").read_text(encoding="utf-8")
    held_out = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])[: samples * 512]
    mts.report(model).evaluation = mts.evaluate(model, held_out, seq_len=512, reference=dense, progress=False)
    return model


def mixture() -> torch.nn.Module:
    """A tiny Mixtral of random weights, 60% of them pruned, shared out over the layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=256, num_hidden_layers=4, num_local_experts=8, **sizes)
    model = MixtralForCausalLM(config).eval()
    batches = list(torch.randint(3, 256, (32, 64)).split(4))
    options = {"budget": "60% zeros", "polish": 5, "data_loader": batches, "progress": False}
    return mts.sparsify(model, "sparsegpt", options)


def photograph(page: Path, picture: Path, size: tuple[int, int], scheme: str, chromium: str) -> None:
    """The top of a page, ``size`` pixels wide and high, as a PNG."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        more = [
            scheme,
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=20000",
        ]
        subprocess.run(
            [chromium, *SWITCHES, *more, f"--screenshot={picture.resolve()}", page.resolve().as_uri()],
            check=True,
            capture_output=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="windows of 512 tokens (32)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    parser.add_argument("--chromium", default="chromium", help="the browser's program (chromium)")
    given = parser.parse_args()

    given.out.mkdir(parents=True, exist_ok=True)
    balanced, sparsegpt = (
        testbed({"quality": "balanced"}, given.samples),
        testbed({"method": "sparsegpt"}, given.samples),
    )
    experts = mixture()
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(folder) / f"report-{name}.html" for name in ("balanced", "experts", "compare")]
        mts.report(balanced).to_html(pages[0], title="tiny-llama, balanced", masks=dict(mts.named_masks(balanced)))
        mts.report(experts).to_html(pages[1], title="tiny mixture of experts", masks=dict(mts.named_masks(experts)))
        mts.report(sparsegpt).to_html(
            pages[2], title="sparsegpt", compare=mts.report(balanced), compare_title="balanced"
        )
        for page, scheme, height in zip(pages, (LIGHT, DARK, LIGHT), (2560, 2640, 1760)):
            picture = given.out / f"{page.stem}.png"
            photograph(page, picture, (1280, height), scheme, given.chromium)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
        picture = given.out / "report-phone.png"
        photograph(pages[0], picture, (500, 1400), DARK, given.chromium)  # no window is narrower
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
