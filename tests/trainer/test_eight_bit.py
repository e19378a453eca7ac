"""AdamW in 8 bits: a quarter of the memory, nearly the same training, and states that survive being written down."""

import pytest
import torch
from torch import nn
from trainer.optimizers.eight_bit import MOMENTS, AdamW8bit, block_size_of, dynamic_map

ROWS, ROW, STEPS = 40, 600, 30
"""Rows of two whole blocks and a part of one."""


def new_parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn((ROWS, ROW), generator=torch.Generator().manual_seed(1)))


def eight_bit(parameters: list[nn.Parameter]) -> AdamW8bit:
    return AdamW8bit([{"params": parameters, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)


def train(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, rows: slice = slice(None)) -> None:
    """Steps over the same noisy gradients of a quadratic every time, of which the parameter has some rows."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        noise = torch.randn((ROWS, ROW), generator=generator)
        parameter.grad = (parameter.detach() + noise[rows]) * torch.logspace(-4, 0, ROW)
        optimizer.step()


def test_the_values_are_decades_of_the_dynamic_map() -> None:
    signed, unsigned = dynamic_map(signed=True), dynamic_map(signed=False)
    for table in (signed, unsigned):
        assert table.unique().numel() == 256
        assert torch.equal(table, table.sort().values)
    assert signed[0] == -1
    assert signed[-1] == unsigned[-1] == 1
    # As bitsandbytes makes it: the largest decade has 64 values of a sign, or 128; the smallest one, or two.
    assert [int(((signed > low) & (signed < 10 * low)).sum()) for low in (0.1, 0.01, 1e-7)] == [64, 32, 1]
    assert [int(((unsigned > low) & (unsigned < 10 * low)).sum()) for low in (0.1, 0.01, 1e-7)] == [128, 64, 2]
    assert float(unsigned[-2]) == pytest.approx(1 - 0.9 / 128 / 2)


def test_the_weights_go_where_adamw_takes_them() -> None:
    ours, theirs, start = new_parameter(), new_parameter(), new_parameter()
    train(ours, eight_bit([ours]))
    train(theirs, torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved


def test_the_averages_take_two_bytes_a_weight() -> None:
    norm = nn.Parameter(torch.ones(64))
    parameter = new_parameter()
    assert eight_bit([parameter]).state_bytes() == 2 * (ROWS * ROW + ROWS * 3 * 4)
    assert eight_bit([norm]).state_bytes() == 2 * 4 * 64  # small ones stay in float32
    assert eight_bit([nn.Parameter(torch.zeros(5000))]).state_bytes() == 2 * 4 * 5000  # and vectors: FSDP cuts rows
    wide = nn.Parameter(torch.zeros(16, 4096))
    assert eight_bit([wide]).state_bytes() / wide.numel() == 2 + 2 * 4 / 256


def test_blocks_end_where_a_row_may_be_cut() -> None:
    assert [block_size_of(row) for row in (4096, 14336, 11008, 2880, 50257)] == [256, 256, 32, 256, 256]


def test_rows_are_updated_alike_wherever_they_are() -> None:
    whole, rows = new_parameter(), slice(13, 30)
    part = nn.Parameter(whole.detach()[rows].clone())
    train(whole, eight_bit([whole]))
    train(part, eight_bit([part]), rows)
    assert torch.equal(whole[rows], part)


def test_what_is_written_down_is_read_back_to_the_bit() -> None:
    """In float32, under AdamW's names: the bytes that the next step starts from are the same."""
    parameter = new_parameter()
    optimizer = eight_bit([parameter])
    train(parameter, optimizer)
    saved = optimizer.moments(parameter)
    assert {name: tensor.dtype for name, tensor in saved.items()} == dict.fromkeys(MOMENTS, torch.float32)
    again = eight_bit([parameter])
    for name, values in saved.items():
        again.set_moment(parameter, name, values)
    state, wanted = again.state[parameter], optimizer.state[parameter]
    for name in state.keys() - {"step"}:
        assert torch.equal(state[name], wanted[name]), name


def test_a_weight_without_gradient_stays_near() -> None:
    """Its second average is far below its neighbours': rounded to zero, the first would be divided by eps."""
    parameter = nn.Parameter(torch.zeros(8, 512))
    optimizer = eight_bit([parameter])
    for step in range(3):
        gradient = torch.ones(8, 512)
        gradient[:, 0] = 1e-5 if step == 0 else 0.0
        parameter.grad = gradient
        optimizer.step()
    assert parameter.detach()[:, 0].abs().max() < 3 * 0.01


def test_a_second_average_of_zero_stays_zero() -> None:
    """Beside large ones, too: a plain AdamW's checkpoint has such, where no gradient has come yet."""
    parameter = nn.Parameter(torch.zeros(8, 512))
    optimizer = eight_bit([parameter])
    values = torch.ones(8, 512)
    values[:, ::2] = 0.0
    optimizer.set_moment(parameter, MOMENTS[1], values)
    assert torch.equal(optimizer.moments(parameter)[MOMENTS[1]], values)
