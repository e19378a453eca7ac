"""From a picture's bytes to the pixels that a model sees: decoded by Pillow, cut and scaled, without torchvision.

Random crops follow Szegedy et al. (arXiv:1409.4842): area and aspect ratio drawn, ten attempts, else the centre. What
is drawn depends on (seed, place in the global order) alone, through a hash, so that it is the same on every machine,
at any number of ranks and after a resume.
"""

import hashlib
import io
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from trainer.data.bad_records import BadRecordError
from trainer.data.tokenizer import json_object
from trainyard.errors import InputError
from trainyard.spec.job import Channels, ImageSpec, ResolvedJob

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)

DEFAULT_SIZE = 224
_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)
_Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ImageTransform:
    """How one job's images are cut and scaled. Values stay bytes: they are normalized on the device (`Pixels`)."""

    size: int
    """Pixels a side of what comes out."""
    crop_area: tuple[float, float] | None
    """A random crop's share of the image; None: none, the centre."""
    resize_ratio: float
    resample: Image.Resampling = Image.Resampling.BILINEAR

    def __call__(self, content: bytes, *, seed: int, position: int) -> torch.Tensor:
        """(3, size, size) uint8, red first. BadRecordError says why the bytes are no picture.

        `position`: the place in the global order of all epochs, which with the seed decides what is drawn.
        """
        image = decoded(content)
        flip = False
        if self.crop_area is not None:
            box = random_box(image.size, self.crop_area, seed=seed, position=position)
            flip = _uniforms(seed, position, _ATTEMPTS)[0] < 0.5
        else:
            box = centre_box(image.size, self.resize_ratio)
        # Cut and scaled in one go, with support over all source pixels, as torchvision does on images.
        image = image.resize((self.size, self.size), self.resample, box=box)
        pixels = np.asarray(image, dtype=np.uint8)
        if flip:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def decoded(content: bytes) -> Image.Image:
    """The picture in RGB, whole; BadRecordError when it is none, is cut off or is far too large to be one."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _upright(image, _in_eight_bits(image).convert("RGB"))
    except Image.DecompressionBombError:
        raise BadRecordError("the image has more pixels than Pillow decodes") from None
    except UnidentifiedImageError:  # its own words name an object in memory
        raise BadRecordError("the image can't be decoded (it is of no format that Pillow knows)") from None
    except (OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, struct.error) as error:
        # What Pillow's decoders raise on broken files: no one kind of error.
        raise BadRecordError(f"the image can't be decoded ({_one_line(error)})") from None


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """Greys of 16 bits by their upper half, as Pillow reads colours of 16 bits: its own `convert` clips them, and what
    is above 255 of 65,535 would be white."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What EXIF's orientation asks for, as Pillow's `ImageOps.exif_transpose` does it."""


def _upright(image: Image.Image, pixels: Image.Image) -> Image.Image:
    """`pixels` of an image as its EXIF says that it is to be seen: cameras store what they hold askew. So transformers'
    own readers do, which a trained model is served with."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # of whatever kind: broken notes are no broken picture
        return pixels
    return pixels if turn is None else pixels.transpose(turn)


def random_box(
    size: tuple[int, int], area: tuple[float, float], *, seed: int, position: int
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of a crop with a share of the image in `area` and an aspect ratio of 3/4 to 4/3."""
    width, height = size
    for attempt in range(_ATTEMPTS):
        share, ratio, x, y = _uniforms(seed, position, attempt)
        pixels = width * height * (area[0] + share * (area[1] - area[0]))
        aspect = math.exp((2 * ratio - 1) * _LOG_RATIO)
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    return _centre(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))


def centre_box(size: tuple[int, int], resize_ratio: float) -> _Box:
    """What remains of an image whose shorter side is scaled to size / resize_ratio when its centre is cut out."""
    side = min(size) * resize_ratio
    return _centre(*size, side, side)


def _centre(width: int, height: int, w: float, h: float) -> _Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _uniforms(seed: int, position: int, draw: int) -> tuple[float, float, float, float]:
    """Four numbers in [0, 1) that depend on the arguments alone: numpy does not promise its streams for ever."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % 2**64, position, draw), digest_size=32).digest()
    first, second, third, fourth = (value / 2**64 for value in struct.unpack("<4Q", digest))
    return first, second, third, fourth


@dataclass(frozen=True)
class Pixels:
    """Images of one micro-batch as bytes: a quarter of what floats would take on their way to the device."""

    values: torch.Tensor
    """(B, 3, size, size) uint8."""
    mean: Channels
    std: Channels

    def on(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Normalized, (B, 3, size, size) in `dtype`: (value / 255 - mean) / std, in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        mean, std = (
            torch.tensor(channels, dtype=wide, device=device)[:, None, None] for channels in (self.mean, self.std)
        )
        return ((self.values.to(device, non_blocking=True).to(wide) / 255 - mean) / std).to(dtype)


@dataclass(frozen=True)
class Preprocessing:
    """What the job says of its images, completed by what its model says."""

    size: int
    mean: Channels
    std: Channels
    resample: Image.Resampling

    @classmethod
    def of(cls, job: ResolvedJob, *, model_size: int | None) -> "Preprocessing":
        """`model_size`: pixels a side that the model's configuration states; None where it takes any."""
        spec = job.spec.images or ImageSpec()
        stated = _preprocessor_config(job.spec.model.source)
        size = spec.size or model_size or _side(stated) or DEFAULT_SIZE
        if model_size is not None and size != model_size:
            raise InputError(f"images.size: {size}: the model takes {model_size}; leave size out, or set it to that")
        mean, std = _channels(stated.get("image_mean")) or IMAGENET_MEAN, _channels(stated.get("image_std"))
        if stated.get("do_normalize") is False:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return cls(
            size=size,
            mean=spec.mean or mean,
            std=spec.std or std or IMAGENET_STD,
            resample=_filter(stated.get("resample")),
        )


def _preprocessor_config(source: str | None) -> dict[str, Any]:
    """What the files beside the model say of its images, {} where there are none. Since transformers 5 a model that
    reads text too has it inside processor_config.json."""
    if source is None:
        return {}
    inside = json_object(Path(source) / "processor_config.json").get("image_processor")
    return inside if isinstance(inside, dict) else json_object(Path(source) / "preprocessor_config.json")


def _filter(stated: Any) -> Image.Resampling:
    """By its number, which is Pillow's."""
    try:
        return Image.Resampling(stated)
    except ValueError:
        return Image.Resampling.BILINEAR


def _side(stated: dict[str, Any]) -> int | None:
    """Of `crop_size`, else `size`: a number, or a mapping with height or shortest_edge."""
    for name in ("crop_size", "size"):
        value = stated.get(name)
        if isinstance(value, dict):
            value = value.get("height", value.get("shortest_edge"))
        if isinstance(value, int) and value > 0:
            return value
    return None


def _channels(stated: Any) -> Channels | None:
    if isinstance(stated, list) and len(stated) == 3 and all(isinstance(value, int | float) for value in stated):
        return float(stated[0]), float(stated[1]), float(stated[2])
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
