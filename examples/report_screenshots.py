"""HTML reports of two runs, and their screenshots in docs/images, made with headless Chromium.

The embedded model at quality="balanced" beside SparseGPT, both 2:4.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts

ROOT = Path(__file__).parent.parent
TESTBED = ROOT / "examples" / "testbed"
SWITCHES = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    "--force-device-scale-factor=0.8",
]
LIGHT = "--blink-settings=preferredColorScheme=1"


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


def photograph(page: Path, picture: Path, size: tuple[int, int], chromium: str) -> None:
    """The top of a page, ``size`` pixels wide and high, as a PNG."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        more = [
            LIGHT,
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
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(folder) / f"report-{name}.html" for name in ("balanced", "compare")]
        mts.report(balanced).to_html(pages[0], title="tiny-llama, balanced", masks=dict(mts.named_masks(balanced)))
        mts.report(sparsegpt).to_html(
            pages[1], title="sparsegpt", compare=mts.report(balanced), compare_title="balanced"
        )
        for page, height in zip(pages, (2560, 1760)):
            picture = given.out / f"{page.stem}.png"
            photograph(page, picture, (1280, height), given.chromium)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
