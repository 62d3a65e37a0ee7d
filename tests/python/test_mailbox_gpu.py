"""A process per rank and per GPU: the transports between processes, eager calls and graphs, a rank that is lost."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}", allow_module_level=True)

import twostep  # noqa: E402
from ranks import fresh_path, run  # noqa: E402

RANKS, COLS = 2, 4096


def on_gpus(body, *arguments):
    """body(rank, bootstrap, *arguments) in a process per rank, on a GPU of its own; what each returned."""
    return run(_on_gpu, RANKS, fresh_path(), body, *arguments)


def _on_gpu(rank, ranks, path, body, *arguments):
    torch.cuda.set_device(rank)
    return body(rank, twostep.SocketBootstrap(path, rank, ranks, limit_s=60), *arguments)


def _mailbox(rank, bootstrap, transport, **more):
    return twostep.Mailbox(bootstrap, rank, RANKS, device=f"cuda:{rank}", max_cols=COLS, max_hidden=COLS,
                           transport=transport, **more)


def _rows(rank, rows, call):
    """Bits that tell rank, call and place apart; none is NaN."""
    at = torch.arange(rows * COLS, device="cuda", dtype=torch.int32)
    return ((at * 31 + rank * 1009 + call * 7) % 0x7f00).to(torch.int16).view(rows, COLS)


def _gathers(rank, bootstrap, transport):
    mailbox = _mailbox(rank, bootstrap, transport)
    x = torch.empty(64, COLS, dtype=torch.int16, device="cuda")
    out = torch.empty(64, RANKS * COLS, dtype=torch.int16, device="cuda")

    def call(rows):
        mailbox.all_gather(x[:rows].view(torch.bfloat16), out[:rows].view(torch.bfloat16))

    def expect(rows, number):
        torch.cuda.synchronize()
        mailbox.check()
        wanted = torch.cat([_rows(r, rows, number) for r in range(RANKS)], dim=1)
        assert torch.equal(out[:rows], wanted), (rows, number)

    for number, rows in enumerate((1, 7, 8, 33, 64, 1)):
        x[:rows] = _rows(rank, rows, number)
        call(rows)
        expect(rows, number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(8)
    for number in range(50):
        x[:8] = _rows(rank, 8, number)
        out.fill_(-1)
        graph.replay()
        expect(8, number)
    mailbox.close()
    return True


@pytest.mark.parametrize("transport", ["auto", "vmm_fd", "cuda_ipc"])
def test_gathers_between_processes_bit_for_bit(transport):
    assert on_gpus(_gathers, transport) == [True] * RANKS


def _replays(rank, bootstrap):
    """The calls whose payload arrived changed, of graphs of 1 to 5 calls: a new payload each, compared on the device."""
    mailbox = _mailbox(rank, bootstrap, "auto")
    at = torch.arange(8 * COLS, device="cuda", dtype=torch.int32).view(8, COLS)
    bases = [at * 31 + r * 1009 for r in range(RANKS)]
    base, wanted = bases[rank], torch.cat(bases, dim=1)
    number, wrong = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    x = torch.empty(8, COLS, dtype=torch.int16, device="cuda")
    out = torch.empty(8, RANKS * COLS, dtype=torch.int16, device="cuda")
    for calls in range(1, 6):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                number.add_(7)
                x.copy_((base + number) % 0x7F00)
                mailbox.all_gather(x.view(torch.bfloat16), out.view(torch.bfloat16))
                wrong.add_((out != ((wanted + number) % 0x7F00).to(torch.int16)).any())
        for _ in range(20_000):
            graph.replay()
        torch.cuda.synchronize()
        mailbox.check()
    mailbox.close()
    return wrong.item(), number.item()


def test_a_hundred_thousand_replays_between_processes():
    assert on_gpus(_replays) == [(0, 7 * 20_000 * 15)] * RANKS


def _comes_and_goes(rank, bootstrap, transport):
    x = torch.zeros(1, COLS, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, RANKS * COLS, dtype=torch.bfloat16, device="cuda")

    def once():
        mailbox = _mailbox(rank, bootstrap, transport)
        mailbox.all_gather(x, out)
        torch.cuda.synchronize()
        mailbox.check()
        mailbox.close()
        bootstrap.barrier(limit_s=60)
        return torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())

    for _ in range(3):
        before = once()  # with modules and pools of the driver
    for _ in range(100):
        after = once()
    return before, after


@pytest.mark.parametrize("transport", ["vmm_fd", "cuda_ipc"])
def test_a_hundred_mailboxes_leave_nothing(transport):
    for before, after in on_gpus(_comes_and_goes, transport):
        assert after[0] + (16 << 20) >= before[0], "memory of the GPU"
        assert after[1] <= before[1], "file descriptors"
        assert after[2] <= before[2] + 8, "mappings"


def _reduces(rank, bootstrap):
    mailbox = _mailbox(rank, bootstrap, "auto")
    torch.manual_seed(3)
    x = torch.randn(RANKS, 8, COLS, device="cuda").bfloat16()
    residual, gamma = torch.randn(8, COLS, device="cuda").bfloat16(), torch.rand(COLS, device="cuda") + 0.5
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    mailbox.all_reduce_add_norm(x[rank], residual=residual, residual_out=total, gamma=gamma, eps=1e-6, norm_out=normed)
    torch.cuda.synchronize()
    mailbox.check()
    wanted = x.float().sum(0).bfloat16().float() + residual.float()
    assert torch.equal(total, wanted.bfloat16())
    exact = total.double() * torch.rsqrt(total.double().pow(2).mean(1, keepdim=True) + 1e-6) * gamma.double()
    assert (normed.double() - exact).norm() < 4e-3 * exact.norm()
    mailbox.close()
    return normed.view(torch.int16).cpu().tolist()


def test_the_reduction_has_the_same_bits_on_both_ranks():
    first, second = on_gpus(_reduces)
    assert first == second


def _alone(rank, bootstrap):
    mailbox = _mailbox(rank, bootstrap, "auto", peer_limit_s=1.0)
    if rank == 1:
        bootstrap.barrier(limit_s=60)  # it makes no call, and stays until the other has given up
        return None
    x = torch.zeros(1, COLS, dtype=torch.bfloat16, device="cuda")
    mailbox.all_gather(x, torch.empty(1, RANKS * COLS, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    told = None
    try:
        mailbox.check()
    except twostep.Error as error:
        told = error.code, str(error)
    bootstrap.barrier(limit_s=60)
    return told


def test_a_rank_that_makes_no_call_is_named_within_the_limit():
    code, words = on_gpus(_alone)[0]
    assert code == "peer_lost" and "peer = 1" in words and "all_gather" in words
