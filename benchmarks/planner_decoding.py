"""How many images a core decodes a second by the trainer's own code: what `trainyard plan` holds image jobs against.

Run: python benchmarks/planner_decoding.py [--images N]. Pictures are made here, of ImageNet's usual 500 x 375 pixels
and about its mean of 110 KB; what is counted is the processor's time, so that a busy machine changes little.
"""

import argparse
import io
import json
import statistics
import time

import numpy as np
from machine import describe
from PIL import Image
from trainer.tasks.images import ImageTransform

WIDTH, HEIGHT, JPEG_BYTES = 500, 375, 110_000


def picture(seed: int) -> bytes:
    """A JPEG of `JPEG_BYTES` at least: shapes of all sizes, and as much grain as it takes."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((HEIGHT, WIDTH, 3))
    for cells in (4, 12, 40, 120):
        coarse = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        pixels += np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=float) / 4
    content = b""
    for grain in range(0, 100, 4):
        noisy = np.clip(pixels + random.normal(0, grain + 1, pixels.shape), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        content = file.getvalue()
        if len(content) >= JPEG_BYTES:
            break
    return content


def images_per_cpu_second(contents: list[bytes], rounds: int) -> list[float]:
    """Of each round over all pictures, in one thread."""
    transform = ImageTransform(size=224, crop_area=(0.08, 1.0), resize_ratio=0.875)
    rates = []
    for turn in range(rounds):
        begun = time.process_time()
        for position, content in enumerate(contents):
            transform(content, seed=turn, position=position)
        rates.append(len(contents) / (time.process_time() - begun))
    return rates


def main() -> None:
    """Print the rates as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    contents = [picture(seed) for seed in range(options.images)]
    rates = images_per_cpu_second(contents, options.rounds)
    told = {
        "images_per_core_second": round(statistics.median(rates), 1),
        "lowest": round(min(rates), 1),
        "highest": round(max(rates), 1),
        "mean_jpeg_bytes": round(statistics.mean(map(len, contents))),
    }
    print(json.dumps({**told, "machine": describe()}, indent=2))


if __name__ == "__main__":
    main()
