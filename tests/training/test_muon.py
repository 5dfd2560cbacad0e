"""Our Muon against torch's: the same updates, up to the bfloat16 of torch's products."""

import torch

from multirate.training.muon import Muon, orthogonalised
from multirate.training.optimizers import optimizers


def test_updates_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (24, 40), (16, 16)]
    ours = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    settings = {"lr": 0.05, "weight_decay": 0.1}
    mine = Muon(ours, **settings)
    reference = torch.optim.Muon(theirs, **settings, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    start = [p.detach().clone() for p in ours]
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step()
        reference.step()
    for p, q, before in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.02 * (q - before).norm()


def test_a_matrix_without_gradient_stays() -> None:
    p = torch.ones(3, 5, requires_grad=True)
    q = torch.ones(3, 5, requires_grad=True)
    q.grad = torch.eye(5)[:3]
    Muon([p, q], lr=0.1).step()
    assert torch.equal(p, torch.ones(3, 5)) and not torch.equal(q, torch.ones(3, 5))


def test_singular_values_come_close_to_one() -> None:
    x = torch.randn(4, 12, 30, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(x))
    assert values.min() > 0.5 and values.max() < 1.3


def test_a_stack_is_its_matrices() -> None:
    torch.manual_seed(0)
    for shape in ((6, 20), (20, 6)):
        stack = torch.nn.Parameter(torch.randn(3, *shape))
        alone = [torch.nn.Parameter(matrix.detach().clone()) for matrix in stack]
        gradient = torch.randn(3, *shape)
        stack.grad = gradient
        for parameter, part in zip(alone, gradient, strict=True):
            parameter.grad = part
        Muon([stack], lr=0.1).step()
        Muon(alone, lr=0.1).step()
        torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]))


def test_a_draft_head_moves_at_its_share_of_the_rate() -> None:
    """By AdamW, whose first step is the rate for every weight, however small its gradient."""
    module = torch.nn.Module()
    module.head = torch.nn.Linear(4, 6, bias=False)
    module.inner = torch.nn.Linear(4, 4)
    before = module.head.weight.detach().clone()
    rate = 0.01
    ours = optimizers(module, rate)
    held = [p for optimizer in ours for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in module.parameters()}
    assert len(held) == len(list(module.parameters()))
    for p in module.parameters():
        p.grad = torch.rand_like(p) + 0.1
    for optimizer in ours:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        optimizer.step()
    moved = (before - module.head.weight).detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.001), rtol=1e-3, atol=0)
