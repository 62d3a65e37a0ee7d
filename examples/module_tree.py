"""A module tree whose linears run on twostep, and back."""

import sys

try:
    import torch
except ImportError:
    sys.exit(77)  # skipped

import twostep.torch

model = torch.nn.Sequential(
    torch.nn.Linear(512, 2048, bias=False), torch.nn.SiLU(), torch.nn.Linear(2048, 512, bias=False)
).to(torch.bfloat16).requires_grad_(False)  # .cuda() for a GPU
x = torch.randn(8, 512, dtype=torch.bfloat16)
before = model(x)

report = twostep.torch.install(model, rows=(8, 16))  # eager, torch.compile and CUDA graphs work as before
print(report)
torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)

assert twostep.torch.uninstall(model).count == report.count == 2
