"""The set-up of a group between processes, without a GPU: what one rank finds wrong, all hear."""

import time

import pytest

import twostep
from ranks import fresh_path, run


def _exchange(rank, ranks, path):
    group = twostep.SocketBootstrap(path, rank, ranks, limit_s=60)
    for round_ in range(20):
        parts = group.all_gather_bytes(f"{round_} of {rank}".encode(), limit_s=60)
        assert parts == [f"{round_} of {other}".encode() for other in range(ranks)]
    group.barrier()
    return True


def test_every_rank_gets_all_bytes():
    assert run(_exchange, 3, fresh_path()) == [True] * 3


def test_a_rank_that_does_not_come_is_named(refuses):
    start = time.monotonic()
    with refuses("peer_lost") as refusal:
        twostep.SocketBootstrap(fresh_path(), 0, 2, limit_s=0.2)
    assert refusal.error.value.startswith("1,") and time.monotonic() - start < 10


class _Recorded:
    """An exchange of Python's own."""

    def __init__(self, group, path=""):
        self.group, self.socket_path = group, path

    def all_gather_bytes(self, data, limit_s):
        return self.group.all_gather_bytes(data, limit_s)


def _refused(rank, ranks, path, in_python, change):
    group = twostep.SocketBootstrap(path, rank, ranks, limit_s=60)
    config = dict(device="cpu", max_cols=64, peer_limit_s=60)
    if rank == 1:
        config.update(change)
    try:
        twostep.Mailbox(_Recorded(group) if in_python else group, rank, ranks, **config)
    except twostep.Error as error:
        return error.code, str(error)
    return None


@pytest.mark.parametrize("in_python", [False, True])
def test_what_one_rank_finds_wrong_all_raise(in_python):
    codes = run(_refused, 2, fresh_path(), in_python, {})
    assert codes[0] == codes[1] and codes[0][0] == "unavailable" and "rank 0: device = cpu" in codes[0][1]


def test_a_bad_config_of_one_rank_is_told_to_the_others():
    codes = run(_refused, 2, fresh_path(), False, dict(max_cols=12))
    assert codes[0] == codes[1]
    assert codes[0][0] == "unavailable"  # rank 0's own finding comes first


class _Broken:
    def __init__(self, answer):
        self.answer = answer

    def all_gather_bytes(self, data, limit_s):
        return self.answer(data)


def test_arguments(refuses):
    for arguments in [("", 0, 2), ("x" * 91, 0, 2), (fresh_path(), 2, 2), (fresh_path(), 0, 9), (fresh_path(), 0, 1)]:
        with refuses("invalid_argument"):
            twostep.SocketBootstrap(*arguments, limit_s=0.1)
    with refuses("invalid_argument") as refusal:
        twostep.Mailbox(_Broken(lambda data: [data]), 0, 1, device="cpu", max_cols=8)
    assert refusal.error.argument == "rank 0: size"
    with refuses("invalid_argument"):
        twostep.Mailbox(_Broken(lambda data: [data]), 0, 2, device="cpu", max_cols=8, transport="pigeon")


def test_an_exchange_that_lies_or_fails_is_told(refuses):
    with refuses("invalid_argument"):
        twostep.Mailbox(_Broken(lambda data: [data]), 0, 2, device="cpu", max_cols=8)
    with refuses("invalid_argument"):
        twostep.Mailbox(_Broken(lambda data: [data, data[:5]]), 0, 2, device="cpu", max_cols=8)

    def fail(data):
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        twostep.Mailbox(_Broken(fail), 0, 2, device="cpu", max_cols=8)


def _torch_group(rank, ranks, path):
    import torch

    import twostep.torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    bootstrap = twostep.torch.GroupBootstrap()
    assert bootstrap.all_gather_bytes(b"rank %d" % rank, 60) == [b"rank %d" % other for other in range(ranks)]
    everyone = [None] * ranks
    torch.distributed.all_gather_object(everyone, bootstrap.socket_path)
    assert len(set(everyone)) == 1
    try:
        twostep.torch.LogitsGather(None, 64, device="cpu")
    except twostep.Error as error:
        return error.code
    finally:
        torch.distributed.destroy_process_group()


def test_a_torch_group_is_an_exchange():
    pytest.importorskip("torch")
    assert run(_torch_group, 2, fresh_path()) == ["unavailable"] * 2
