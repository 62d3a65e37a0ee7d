"""`twostep draft`: what it refuses, and what its exit status says."""

import json
import os
import subprocess

import numpy as np
import pytest

program = os.environ.get("TWOSTEP_PROGRAM")
pytestmark = pytest.mark.skipif(not program, reason="TWOSTEP_PROGRAM does not name the C++ program")


def run(*arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    assert run("synth", "--preset", "tiny", "--out", folder).returncode == 0
    return folder


@pytest.fixture
def draft(checkpoint):
    def draft(*arguments, folder=checkpoint):
        steps = [] if "--steps" in arguments else ["--steps", 4]
        device = [] if "--device" in arguments else ["--device", "cpu"]
        return run("draft", "--checkpoint", folder, "--draft-tokens", 3, *steps, *device, *arguments)

    return draft


def test_a_sound_run_tells_the_status_of_every_request(draft, tmp_path):
    done = draft("--requests", 2, "--json", tmp_path / "out.json")
    assert done.returncode == 0 and "status 0, fine: every request" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["status"] == [0, 0]


def test_auto_is_the_cpu_where_no_gpu_is_seen(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("draft", "--checkpoint", checkpoint, "--draft-tokens", 3, "--steps", 4, "--json", tmp_path / "out.json")
    assert done.returncode == 0 and done.stdout.startswith("cpu, ")
    assert json.loads((tmp_path / "out.json").read_text())["device"] == "cpu"


def test_nan_in_a_checkpoint_is_a_status_or_refused_by_name(checkpoint, draft, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])["final_norm.weight"]["data_offsets"]
    data[start + begin : start + end] = np.full((end - begin) // 2, 0x7FC0, np.uint16).tobytes()
    file.write_bytes(data)
    done = draft(folder=tmp_path)
    assert done.returncode == 4 and "status 2, no finite logit: every request" in done.stdout
    done = draft("--check-finite", folder=tmp_path)
    assert done.returncode == 2 and "final_norm.weight = NaN or infinity" in done.stderr


def test_a_temperature_that_counts_as_0_is_judged_as_greedy(draft):
    done = draft("--temperature", 9e-6)
    assert done.returncode == 0 and "is the target's greedy decoding" in done.stdout
    assert draft("--temperature", "nan").returncode == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "gpu"], "draft: --device = gpu; accepted: auto, cpu, cuda:0"),
        (["--method", "beam"], "draft: --method = beam; accepted: block, standard"),
        (["--steps", 1000], "draft: steps = 1000; accepted: 1 to 495"),
        (["--context", 2044], "draft: context = 2044; accepted: 2 to 2043"),
        (["--json", "/nowhere/out.json"], "draft: --json = /nowhere/out.json: open: No such file or directory"),
    ],
)
def test_what_is_wrong_is_named(draft, arguments, message):
    done = draft(*arguments)
    assert done.returncode == (1 if "--json" in arguments else 2) and message in done.stderr


def test_json_goes_behind_a_link_and_to_standard_output(draft, tmp_path):
    (tmp_path / "link").symlink_to("real")  # of a file that is not there yet
    for _ in range(2):
        assert draft("--json", tmp_path / "link").returncode == 0
        assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "real").read_text())["status"] == [0]
    done = draft("--json", "/dev/fd/1")
    text, _, result = done.stdout.partition("{\n")
    assert done.returncode == 0 and "emitted" in text and json.loads("{" + result)["status"] == [0]
