"""DeepSpeed ZeRO 0 to 3: gradients, optimizer state and (3) weights are split over all data-parallel ranks.

Weights and moments are read and written through flat views of DeepSpeed's own memory (`FlatShard`), so that its
checkpoints are the same as everyone's. That leans on internals of the pinned DeepSpeed (0.19.8); the parity, resume
and cross-engine tests hold them in place.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.checkpoint.base_model import FROZEN, keeps_frozen
from trainer.losses.head import choices_of, plan_loss
from trainer.losses.head import install as install_loss_head
from trainer.models.build import transformer_blocks
from trainer.models.deferred_weights import fill, fill_parameters, source_of
from trainer.models.routers import copy_noisy_inputs
from trainer.optimizers.build import (
    build_adamw,
    clip_factor,
    global_grad_norm,
    is_matrix,
    local_gradients,
    set_learning_rate,
)
from trainer.optimizers.loss_scaling import deepspeed_scaler_state, restore_deepspeed_scaler
from trainer.optimizers.router_bias import RouterBias
from trainer.runtime import Runtime
from trainer.speech import say
from trainer.strategies import deepspeed_settings
from trainer.strategies.base import Batch, Clock, OptimizerStep, Strategy
from trainer.strategies.deepspeed_import import load_deepspeed
from trainer.strategies.flat_shard import FlatShard
from trainer.strategies.host_update import use_own_cores
from trainer.strategies.nvme_offload import RankFolder
from trainer.strategies.torch_engine import MOMENTS, persistent_buffers
from trainer.tasks import task_of
from trainyard.spec.job import ResolvedJob

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # before the import, which already talks


@dataclass(frozen=True)
class _Fragment:
    """This rank's part of one parameter: a flat range, with its float32 weight and moments: live views, or copies of
    what lies on an NVMe disk."""

    name: str
    shape: tuple[int, ...]
    start: int
    weight: torch.Tensor
    moments: dict[str, torch.Tensor]


class ZeroStrategy(Strategy):
    """One DeepSpeed engine over all ranks. torch's AdamW is the inner optimizer, so no kernel has to be compiled."""

    def __init__(self, *, job: ResolvedJob, model: nn.Module, runtime: Runtime) -> None:
        self.name = f"zero{job.parallelism.zero_stage}"
        self.data_parallel_rank = runtime.rank
        self.data_parallel_size = runtime.world_size
        self._stage = job.parallelism.zero_stage
        self._job = job
        self._device = runtime.device
        self._task = task_of(job)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        plan = plan_loss(model, job)
        self.choices = choices_of(model, job, plan, runtime.device)
        optimizer = build_adamw(model, job)
        if job.parallelism.offload != "none" and runtime.device.type == "cuda":
            # On a CPU the ranks' threads are all busy with the model already, as many as the job states.
            use_own_cores(optimizer, at_least=job.spec.training.cpu_threads)
        sizes = [parameter.numel() for parameter in model.parameters()]
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        config = deepspeed_settings.configuration(job, sizes, device_type=runtime.device.type, num_trained=num_trained)
        self._disk = None
        if "nvme" in (job.parallelism.offload, job.parallelism.zero.offload_parameters):
            self._disk = RankFolder(job, runtime.rank, num_elements=sum(sizes), num_trained=num_trained)
            self._disk.use(config)
        self._engine = _initialize(model, optimizer, config, runtime)
        self._model: nn.Module = self._engine.module
        self._names = {getattr(each, "ds_id", None): name for name, each in self._model.named_parameters()}
        install_loss_head(self._model, plan)
        self._router_bias = RouterBias.of([self._model], getattr(model, "config", None), job, self._device)
        self._reached: set[str] | None = set()
        """Weights that a gradient has reached; None once it was said which none did."""
        self._watches = [self._watched(name, each) for name, each in self._model.named_parameters()]
        self._create_moments()

    def forward_backward(self, batches: Sequence[Batch], num_global_targets: int, clock: Clock) -> torch.Tensor:
        """See Strategy. DeepSpeed averages over ranks, so the loss is scaled up by their number."""
        self._engine.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        scale = self.data_parallel_size / num_global_targets
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            with clock("forward"):
                loss = self._loss_sum(batch)
            with clock("backward"):
                self._engine.backward(loss * scale, scale_wrt_gas=False)
            loss_sum += loss.detach().double()
            del loss  # as in `torch_engine`
        self._tell_of_unreached()
        return loss_sum

    def _watched(self, name: str, parameter: nn.Parameter) -> RemovableHandle | None:
        if not parameter.requires_grad:
            return None

        def note(_: torch.Tensor) -> None:
            assert self._reached is not None
            self._reached.add(name)

        watch: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        return watch

    def _tell_of_unreached(self) -> None:
        """Says once, of the first step, what differs from one process: with DeepSpeed all weights have a gradient,
        zero where none came, and AdamW's decay pulls on them all the same; torch leaves out what has none."""
        if self._reached is None:
            return
        reached, self._reached = self._reached, None
        watched = zip(self._shapes.items(), self._watches, strict=True)
        whole = {name: torch.empty(shape, device="meta") for (name, shape), watch in watched if watch is not None}
        names = [name for name, weight in whole.items() if is_matrix(name, weight)]  # others have no decay
        for watch in self._watches:
            if watch is not None:
                watch.remove()
        self._watches = []
        found = torch.tensor([name in reached for name in names], dtype=torch.float32, device=self._device)
        if self.data_parallel_size > 1 and names:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        unreached = [name for name, value in zip(names, found.tolist(), strict=True) if not value]
        if unreached and self.data_parallel_rank == 0 and self._job.spec.training.optimizer.weight_decay:
            others = ", ..." if len(unreached) > 1 else ""
            say(
                f"warning: {self.name}: no gradient reached {len(unreached)} of {len(names)} weights in the first step"
                f" ({unreached[0]}{others}): training.optimizer.weight_decay shrinks them all the same, as it would not"
                " in one process or with engine: torch; set it to 0 where they matter to you"
            )

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        return self._task.loss_sum(self._engine, batch, self._device)

    def optimizer_step(self, learning_rate: float, accepts: Callable[[float], bool] | None = None) -> OptimizerStep:
        """See Strategy. From stage 1 on, DeepSpeed measures and clips inside its step."""
        assert accepts is None, "refused by check_supported"
        set_learning_rate(self._engine.optimizer, learning_rate)
        grad_norm = self._clip_whole_gradients() if self._stage == 0 else math.nan
        self._engine.step()
        if self._stage > 0:
            grad_norm = float(self._engine.get_global_grad_norm())
        was_applied = not getattr(self._engine.optimizer, "overflow", False)
        if self._router_bias is not None:
            self._router_bias.end_step(was_applied=was_applied)
        return OptimizerStep(grad_norm=grad_norm, was_applied=was_applied)

    def _clip_whole_gradients(self) -> float:
        gradients = local_gradients(self._model.parameters())
        grad_norm = global_grad_norm(gradients, None)
        factor = clip_factor(grad_norm, self._job.spec.training.gradient_clip)
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return grad_norm

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """See Strategy."""
        self._engine.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            sums = self._task.validation_sums(self._engine, batch, self._device)
            loss_sum = loss_sum + (sums if self._task.measures else sums[0]).double()
        return loss_sum

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """See Strategy: each a FlatShard over DeepSpeed's float32 memory."""
        tensors: dict[str, torch.Tensor] = dict(persistent_buffers(self._model))
        for fragment in self._fragments():
            tensors[f"model.{fragment.name}"] = FlatShard(fragment.weight, fragment.shape, fragment.start)
            for moment, values in fragment.moments.items():
                tensors[f"optim.{fragment.name}.{moment}"] = FlatShard(values, fragment.shape, fragment.start)
        tensors |= {FROZEN + name: values for name, values in self._frozen()}
        tensors["optim.step"] = self._steps()[0].detach().clone().cpu()
        return tensors

    def after_load(self, tensors: dict[str, torch.Tensor]) -> None:
        """See Strategy. The float32 memory was read in place; the weights that compute are copied from it."""
        for step in self._steps():
            step.copy_(tensors["optim.step"])
        optimizer = self._engine.optimizer
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            optimizer._partition_all_parameters()
            for sub_group in range(len(optimizer.fp16_groups)):
                with self._resident(sub_group, is_changed=True) as is_copied:
                    if is_copied:
                        self._put_back(sub_group, tensors)
                    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
            if optimizer.persistent_parameters:
                # Small parameters stay whole on every rank between steps: their copies are stale now.
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def engine_state(self) -> dict[str, Any]:
        """See Strategy: DeepSpeed's own dynamic loss scaler, in fp16."""
        scaler = self._dynamic_scaler()
        return {} if scaler is None else deepspeed_scaler_state(scaler)

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """See Strategy."""
        scaler = self._dynamic_scaler()
        if scaler is not None:
            restore_deepspeed_scaler(scaler, state)

    def close(self) -> None:
        """See Strategy. DeepSpeed's hooks keep the model alive until its engine is destroyed."""
        self._engine.destroy()
        if self._disk is not None:
            self._disk.remove()

    def _dynamic_scaler(self) -> Any:
        """DeepSpeed's, in fp16; None otherwise."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if scaler is not None and scaler.dynamic else None

    def _inner(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        inner = optimizer if self._stage == 0 else optimizer.optimizer
        assert isinstance(inner, torch.optim.AdamW)
        return inner

    def _steps(self) -> list[torch.Tensor]:
        return [state["step"] for state in self._inner().state.values()]

    def _flat_weights(self) -> list[torch.Tensor]:
        """What the inner optimizer updates: parameters (0), or this rank's flat float32 partitions (1 to 3)."""
        optimizer = self._engine.optimizer
        if self._stage == 0:
            return [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if self._stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _create_moments(self) -> None:
        """Creates the state that AdamW makes in its first step, so that a load has something to read into."""
        for group, weight in enumerate(self._flat_weights()):
            with self._resident(group, is_changed=True):
                self._inner().state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    **{moment: torch.zeros_like(weight) for moment in MOMENTS},
                }
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    @contextmanager
    def _resident(self, sub_group: int, *, is_changed: bool = False) -> Iterator[bool]:
        """Around uses of a sub-group's float32 state: yields whether it lies on disk, and is in memory only here.

        is_changed: it is written back at the end.
        """
        optimizer = self._engine.optimizer
        if self._stage != 3 or not optimizer._swappable_optimizer_subgroup(sub_group):
            yield False
            return
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
        yield True
        if is_changed:
            optimizer._optimizer_states_and_gradient_swap_out(sub_group)
        else:
            optimizer._release_swap_buffers(sub_group)

    def _fragments(self) -> Iterator[_Fragment]:
        if self._stage == 3:
            for sub_group in range(len(self._engine.optimizer.fp16_groups)):
                with self._resident(sub_group) as is_copied:
                    yield from self._partitioned_fragments(sub_group, is_copied=is_copied)
            return
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue  # see _frozen
            if self._stage == 0:
                moments = {moment: self._inner().state[parameter][moment].flatten() for moment in MOMENTS}
                yield _Fragment(name, self._shapes[name], 0, parameter.detach().flatten(), moments)
            else:
                yield self._mapped_fragment(name, parameter)

    def _frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is not trained and no file has. Stage 3 cuts it as it cuts the rest, and where that is on an NVMe disk
        there is no memory to show: it is left out."""
        if not keeps_frozen(self._job) or self._job.parallelism.zero.offload_parameters == "nvme":
            return
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                yield name, self._own_part(name, parameter) if self._stage == 3 else parameter.detach()

    def _own_part(self, name: str, parameter: Any) -> FlatShard:
        """Stage 3: this rank's part of a weight as it computes; the last ones are padded."""
        part = parameter.ds_tensor.detach()
        start = min(self.data_parallel_rank * part.numel(), parameter.ds_numel)
        end = min(start + part.numel(), parameter.ds_numel)
        return FlatShard(part.narrow(0, 0, end - start), self._shapes[name], start)

    def _mapped_fragment(self, name: str, parameter: Any) -> _Fragment:
        """Stages 1 and 2: one flat tensor over all parameters is cut into equal parts, wherever that falls."""
        mapping = parameter._hp_mapping
        if mapping is None:  # none of it lies in this rank's part
            empty = torch.empty(0, device=self._device)
            return _Fragment(name, self._shapes[name], 0, empty, dict.fromkeys(MOMENTS, empty))
        moments = {moment: mapping.get_hp_fragment(optim_state_key=moment).detach() for moment in MOMENTS}
        return _Fragment(
            name, self._shapes[name], mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach(), moments
        )

    def _partitioned_fragments(self, sub_group: int, *, is_copied: bool) -> Iterator[_Fragment]:
        """Stage 3: each parameter is cut into equal parts, the last ones padded."""
        optimizer = self._engine.optimizer
        flat = optimizer.fp32_partitioned_groups_flat[sub_group]
        state = self._inner().state[flat]
        for parameter in optimizer.fp16_groups[sub_group]:
            _, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = min(self.data_parallel_rank * part, parameter.ds_numel)
            num_elements = min(start + part, parameter.ds_numel) - start

            def view(values: torch.Tensor, offset: int = offset, num_elements: int = num_elements) -> torch.Tensor:
                part = values.detach().narrow(0, offset, num_elements)
                return part.clone() if is_copied else part

            name = self._names[parameter.ds_id]
            moments = {moment: view(state[moment]) for moment in MOMENTS}
            yield _Fragment(name, self._shapes[name], start, view(flat), moments)

    def _put_back(self, sub_group: int, tensors: dict[str, torch.Tensor]) -> None:
        """Copies what a load read into copies (`_partitioned_fragments`) to the sub-group's memory."""
        for fragment in self._partitioned_fragments(sub_group, is_copied=False):
            fragment.weight.copy_(_values(tensors[f"model.{fragment.name}"]))
            for moment, values in fragment.moments.items():
                values.copy_(_values(tensors[f"optim.{fragment.name}.{moment}"]))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, FlatShard)
    return tensor.local


def _initialize(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], runtime: Runtime) -> Any:
    deepspeed = load_deepspeed()
    # DeepSpeed 0.19.8 calls collectives that torch 2.13 has renamed, thousands of times.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)

    # On CPU, DeepSpeed would compile a shared-memory collective here, with g++ and ninja that few machines have.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if runtime.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    if config["zero_optimization"]["stage"] == 3:
        copy_noisy_inputs(model)
        _shard_block_by_block(model, config)
    else:
        model = fill(model, device=runtime.device)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _shard_block_by_block(model: nn.Module, config: dict[str, Any]) -> None:
    """Stage 3: cuts each block's weights before the next one is touched, so that no rank holds the whole model."""
    deepspeed = load_deepspeed()
    compute_type = deepspeed_settings.compute_type(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    swapper = None
    for module in (*transformer_blocks(model), model):
        own = [parameter for parameter in module.parameters() if not hasattr(parameter, "ds_id")]
        for parameter in own:
            parameter.data = parameter.data.to(compute_type)
        # On CPU: DeepSpeed moves a block to its device when it cuts it.
        named = ((names[id(parameter)], parameter) for parameter in own)
        fill_parameters(named, source_of(model), device=torch.device("cpu"))
        cut = deepspeed.zero.Init(
            module=module, config_dict_or_path=config, mem_efficient_linear=False, param_swapper=swapper
        )
        swapper = cut.param_swapper  # one for all: each makes the folder of weights on disk anew
