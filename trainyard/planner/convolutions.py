"""Convolutional image classifiers (ResNets): parameters, FLOPs, memory and time of a step, by layer.

A convolution is a product with its own roofline; normalization, activation and residual sums are bound by memory, which
for a ResNet is most of the time. Sizes follow transformers' ResNet (strides at the 3 x 3 of a bottleneck).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import InputError
from trainyard.hardware import Gpu
from trainyard.planner.communication import Fabric, all_reduce_seconds, group
from trainyard.planner.constants import DEFAULT_MEMORY, GIB
from trainyard.planner.layout import Layout
from trainyard.planner.memory import Memory, workspace_bytes
from trainyard.planner.operators import matmul_ceiling_tflops
from trainyard.planner.step import StepTime
from trainyard.planner.time_constants import DEFAULT_CONSTANTS

DEFAULTS: Mapping[str, Any] = {
    "num_channels": 3,
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "num_labels": 2,
    "downsample_in_first_stage": False,
}
"""transformers' ResNetConfig: a ResNet-50."""

REDUCTION = 4
"""Of a bottleneck's inner width."""

FORWARD_PASSES, BACKWARD_PASSES = 5.0, 8.0
"""Times that an output's bytes move beside the convolution: batch norm (2 reads, 1 write) and ReLU (1, 1); backward 5
and 3. A residual sum is in them."""

PRODUCT_SHARE = 0.5
"""Of the ceiling of plain products, what convolutions of 64 to 512 channels reach in cuDNN; assumed, no row fits it."""

SPREAD = 1.45
"""80% interval of a step's time, by factor: wider than of published runs, for none has checked it; assumed."""


@dataclass(frozen=True)
class Convolution:
    """One layer, with its batch norm and activation."""

    inputs: int
    outputs: int
    kernel: int
    size: int
    """Of the output, in pixels a side."""
    stride: int = 1

    @property
    def params(self) -> int:
        """Weights, and the norm's two vectors."""
        return self.kernel**2 * self.inputs * self.outputs + 2 * self.outputs

    @property
    def flops(self) -> float:
        """Of one image, forward."""
        return 2.0 * self.kernel**2 * self.inputs * self.outputs * self.size**2

    @property
    def output_elements(self) -> int:
        """Of one image."""
        return self.outputs * self.size**2

    @property
    def input_elements(self) -> int:
        """Of one image."""
        return self.inputs * (self.size * self.stride) ** 2


@dataclass(frozen=True)
class ConvolutionalShape:
    """A classifier: its layers in order, and the head."""

    layers: tuple[Convolution, ...]
    features: int
    classes: int

    @property
    def params(self) -> int:
        """All of them."""
        return sum(layer.params for layer in self.layers) + (self.features + 1) * self.classes

    @property
    def flops_per_image(self) -> float:
        """Forward and backward: three times the forward products."""
        return 3.0 * (sum(layer.flops for layer in self.layers) + 2.0 * self.features * self.classes)

    @property
    def activation_elements(self) -> int:
        """Outputs of all convolutions of one image."""
        return sum(layer.output_elements for layer in self.layers)


def shape_of_resnet(
    config: Mapping[str, Any], *, image_size: int, num_classes: int | None = None
) -> ConvolutionalShape:
    """The shape of transformers' ResNet configuration; InputError for a size that can't be."""
    stated = {**DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    for name in ("hidden_sizes", "depths"):
        if not isinstance(stated[name], list | tuple):
            raise InputError(f"model.config.{name}: must be a list, a number a stage (given: {stated[name]!r})")
    widths, depths = list(stated["hidden_sizes"]), list(stated["depths"])
    sizes = [stated["embedding_size"], stated["num_channels"], *widths, *depths]
    if len(widths) != len(depths) or not widths:
        raise InputError(
            f"model.config: hidden_sizes has {len(widths)} stages and depths {len(depths)}; make them equal"
        )
    if not all(_is_size(item) for item in sizes):
        raise InputError("model.config: embedding_size, num_channels, hidden_sizes and depths must be at least 1")
    if stated["layer_type"] not in ("basic", "bottleneck"):
        raise InputError(f"model.config.layer_type {stated['layer_type']!r}: must be basic or bottleneck")
    layers = tuple(_layers(stated, widths, depths, image_size))
    return ConvolutionalShape(layers, widths[-1], num_classes or _num_labels(stated))


def _num_labels(stated: Mapping[str, Any]) -> int:
    """Classes that the configuration states."""
    names = stated.get("id2label")
    if names:
        if not isinstance(names, Mapping):
            raise InputError(f"model.config.id2label: must give each class's number its name (given: {names!r})")
        return len(names)
    number = stated["num_labels"]
    if not _is_size(number):
        raise InputError(f"model.config.num_labels: must be a whole number of at least 1 (given: {number!r})")
    return int(number)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _layers(stated: Mapping[str, Any], widths: list[int], depths: list[int], image_size: int) -> Iterator[Convolution]:
    embedding = stated["embedding_size"]
    size = math.ceil(image_size / 2)
    yield Convolution(stated["num_channels"], embedding, 7, size, 2)
    size = math.ceil(size / 2)  # max-pooling
    inputs = embedding
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for block in range(depth):
            halves = block == 0 and (stage > 0 or stated["downsample_in_first_stage"])
            stride = 2 if halves else 1
            after = math.ceil(size / stride)
            if inputs != width or stride > 1:
                yield Convolution(inputs, width, 1, after, stride)
            if stated["layer_type"] == "bottleneck":
                inner = width // REDUCTION
                yield Convolution(inputs, inner, 1, size)
                yield Convolution(inner, inner, 3, after, stride)
                yield Convolution(inner, width, 1, after)
            else:
                yield Convolution(inputs, width, 3, after, stride)
                yield Convolution(width, width, 3, after)
            inputs, size = width, after


def convolutional_memory(shape: ConvolutionalShape, layout: Layout) -> Memory:
    """A rank of plain data parallelism: fp32 state; each layer's output before and after its activation."""
    images = layout.micro_batch
    moments = {"sgd": 4.0, "adamw": 8.0, "adamw_8bit": 2.1, "adafactor": 0.1, "muon": 4.0}.get(layout.optimizer, 8.0)
    gradients = 4.0 * shape.params
    copy = 0.0 if layout.precision in ("fp32", "fp64") else 2.0 * shape.params
    return Memory(
        parameters=4.0 * shape.params,
        gradients=gradients,
        optimizer=(moments + 4.0 * layout.keeps_average) * shape.params,
        activations=2.0 * images * layout.element_bytes * shape.activation_elements,
        logits=images * shape.classes * (layout.element_bytes + 12.0),
        buffers=copy,
        workspace=workspace_bytes(layout) + 0.25 * GIB,
        moving_error=DEFAULT_MEMORY.plain_moving_error,
    )


def convolutional_step(shape: ConvolutionalShape, layout: Layout, device: Gpu, links: Fabric) -> StepTime:
    """One optimizer step; gradients travel behind the backward pass of the last micro-batch."""
    constants = DEFAULT_CONSTANTS
    ceiling = matmul_ceiling_tflops(layout, device, constants) * 1e12 * PRODUCT_SHARE
    bandwidth = device.memory_tb_per_second * 1e12 * constants.bandwidth_efficiency
    images, element = layout.micro_batch, layout.element_bytes
    forward = backward = 0.0
    for layer in shape.layers:
        moved = element * images * (layer.input_elements + layer.output_elements) / bandwidth
        product = max(images * layer.flops / ceiling, moved)
        around = element * images * layer.output_elements / bandwidth
        forward += max(product + FORWARD_PASSES * around, constants.launch_seconds / 4)
        backward += max(2 * product + BACKWARD_PASSES * around, constants.launch_seconds / 4)
    count = layout.num_micro_batches
    reduced = all_reduce_seconds(4.0 * shape.params, group(layout.data_parallel, 1, links.gpus_per_node), links)
    exposed = max(constants.data_exposed * reduced, reduced - constants.data_overlap * backward)
    state = 4.0 * shape.params * (2 + {"sgd": 1, "adamw": 2}.get(layout.optimizer, 2))
    return StepTime(
        forward=forward * count,
        backward=backward * count,
        recompute=0.0,
        tensor_communication=0.0,
        data_communication=exposed,
        pipeline_communication=0.0,
        expert_communication=0.0,
        context_communication=0.0,
        bubble=0.0,
        optimizer=constants.optimizer_passes * state / bandwidth,
    )
