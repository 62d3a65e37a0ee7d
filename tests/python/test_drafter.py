"""DsparkDrafter on NumPy against the independent reference: drafter 13, 14."""

import json
import secrets

import numpy as np
import pytest

import twostep
from drafter_reference import Reference, errors, toy_target_logits, verify
from test_drafter_reference import make_checkpoint
from values import bf16, from_bf16, nans, to_bf16

K, PAGE_ROWS, MAX_LEN = 3, 16, 2048
# relRMS and max of drafter 13.1 for tiny.
BOUNDS = {"context_proj": (0.003, 0.03), "cache": (0.006, 0.04), "values": (0.025, 0.12), "hidden": (0.02, 0.10)}
BOUNDS["logits"] = BOUNDS["hidden"]


@pytest.fixture(scope="module")
def seed():
    value = secrets.randbits(32)
    print("seed", value)
    return value


@pytest.fixture
def random(seed):
    return np.random.default_rng(seed)


def within(name, value, reference):
    got = errors(from_bf16(value).astype(np.float64) if value.dtype == np.uint16 else value, reference)
    assert all(e <= bound for e, bound in zip(got, BOUNDS[name])), f"{name}: {got}, accepted: {BOUNDS[name]}"


class Batch:
    """Requests of given context lengths on shuffled pages, and the drafter that serves them. -1: padding."""

    def __init__(self, folder, lengths, random, *, k=K, max_len=MAX_LEN, mode="greedy", rejected=None, **options):
        self.weights = twostep.DrafterWeights(folder, overrides=options.pop("overrides", "{}"))
        self.config = json.loads(self.weights.config)
        self.lengths, self.k, self.max_len = lengths, k, max_len
        c, count = self.config, len(lengths)
        width = c["kv_lora_rank"] + c["qk_rope_head_dim"]
        per_request = -(-max_len // PAGE_ROWS)
        used = [0 if n < 0 else -(-min(n + k, max_len) // PAGE_ROWS) for n in lengths]
        pages = random.permutation(np.arange(1, sum(used) + 3)).astype(np.int32)
        self.cache = [nans(len(pages) + 1, PAGE_ROWS, width) for _ in range(c["num_hidden_layers"])]
        self.page_table = np.zeros((count, per_request), np.int32)
        for r, n in enumerate(used):
            self.page_table[r, :n], pages = pages[:n], pages[n:]
        rejected = rejected or [0] * count
        rows = [max(n, 0) + extra for n, extra in zip(lengths, rejected)]
        self.row_start = np.cumsum([0, *rows]).astype(np.int32)
        self.rejected = np.array(rejected, np.int32)
        self.request = np.array([-1 if n < 0 else r for r, n in enumerate(lengths)], np.int32)
        self.anchor = random.integers(0, c["vocab_size"], count).astype(np.int32)
        self.positions = np.concatenate([np.arange(n) for n in rows]).astype(np.int64)
        self.temperature = np.zeros(count, np.float32)
        self.seed = random.integers(0, 2**62, count)
        self.step = np.zeros(count, np.int32)
        self.taps = [to_bf16(random.standard_normal((len(self.positions), c["target_hidden_size"])))
                     for _ in c["target_layer_ids"]]
        self.drafter = twostep.DsparkDrafter(
            self.weights, cache=[bf16(layer) for layer in self.cache], tap_layers=c["target_layer_ids"],
            stream=c["aux_hidden_stream"], request_counts=[count], num_draft_tokens=k, max_len=max_len,
            max_ingest_rows=max(len(self.positions), 1), mode=mode, **options)

    def arguments(self):
        names = ("request", "row_start", "rejected", "anchor", "positions", "page_table", "temperature", "seed", "step")
        return twostep.DraftBatch(**{name: getattr(self, name) for name in names})

    def ingest(self):
        self.drafter.ingest(self.arguments(), [bf16(tap) for tap in self.taps])
        return self

    def draft(self):
        self.drafter.draft(self.arguments())
        return self

    def rows(self, r):
        """Those of request r in the taps: valid ones."""
        return slice(self.row_start[r], self.row_start[r + 1] - self.rejected[r])

    def cached(self, r, first, count):
        """[L, count, width] of request r's positions from first on."""
        at = np.arange(first, first + count)
        pages = self.page_table[r, at // PAGE_ROWS]
        return np.stack([layer[pages, at % PAGE_ROWS] for layer in self.cache])

    def block(self, name, r):
        array = getattr(self.drafter, name)
        return array[r * self.k : (r + 1) * self.k]


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": False}
VARIANTS = {
    "tiny": {},
    "tiny-causal": {"is_causal": True},
    "sliding": SLIDING,
    "output gate": {"mla_use_output_gate": True},
    "situ": {"hidden_act": "situ", "activation_situ_linear_beta": 3.0},
    "fc_norm": {"fc_norm": True},
    "neox": {"is_neox_style": True},
    "logit scale": {"logit_scale": 0.25},
    "plain rope": {"rope_parameters": {"rope_type": "default"}},
    "no rope": {"rope_parameters": {"rope_type": "default"}, "mla_use_nope": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("drafter"), **VARIANTS[name])
        return made[name]

    return folder


def compare(batch, reference):
    """Every row of drafter 13 for every request that is no padding."""
    drafter, k = batch.drafter, batch.k
    for r, length in enumerate(batch.lengths):
        if length < 0:
            continue
        taps = [from_bf16(tap[batch.rows(r)]).astype(np.float64) for tap in batch.taps]
        within("context_proj", drafter._stage_result("context_proj")[batch.rows(r)], reference.context_proj(taps))
        rows = reference.context_rows(taps, np.arange(length))
        within("cache", batch.cached(r, 0, length), rows)
        block = reference.block(int(batch.anchor[r]), length, rows, k, batch.max_len)
        within("values", drafter._stage_result("values")[r * k : (r + 1) * k], block["attention"][-1])
        within("hidden", batch.block("hidden", r), block["hidden"])
        within("logits", batch.block("base_logits", r), block["base"])
        tokens = [int(t) for t in drafter.tokens[r]]
        logits, picks = reference.markov(block["base"], int(batch.anchor[r]), k, forced=tokens)
        bound = 2 * BOUNDS["logits"][1] * np.sqrt(np.mean(np.square(logits)))
        for row, token, pick in zip(logits, tokens, picks):
            assert row[token] >= row[pick] - bound
        c, survival = reference.confidence(block["hidden"], int(batch.anchor[r]), tokens)
        assert np.abs(drafter.confidence[r] - c).max() <= 0.02
        assert np.abs(drafter.survival[r] - survival).max() <= 0.06
    assert not drafter.status.any()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_stage_is_within_its_bound(folders, random, name):
    overrides = '{"allow_nope": true}' if name == "no rope" else "{}"
    batch = Batch(folders(name), [24, -1, 5, 61], random, overrides=overrides).ingest().draft()
    compare(batch, Reference(folders(name)))


def test_k_from_1_to_8_and_up_to_8_requests(folders, random):
    for k in range(1, 9):
        lengths = random.integers(1, 40, k).tolist()
        compare(Batch(folders("tiny"), lengths, random, k=k).ingest().draft(), Reference(folders("tiny")))


def test_faults_are_out_of_bounds(folders, random):
    """Drafter 13.2: the reference with a fault is not what was computed."""
    batch = Batch(folders("tiny"), [61], random).ingest().draft()

    def faulty(change):
        reference = Reference(folders("tiny"))
        change(reference)
        rows = reference.context_rows([from_bf16(tap).astype(np.float64) for tap in batch.taps], np.arange(61))
        block = reference.block(int(batch.anchor[0]), 61, rows, K, MAX_LEN)
        return errors(from_bf16(batch.block("base_logits", 0)).astype(np.float64), block["base"])[0]

    def exchange(reference):
        for i in range(2):
            gate, up = (f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up"))
            reference.tensors[gate], reference.tensors[up] = reference.tensors[up], reference.tensors[gate]

    def set_config(name, value):
        return lambda reference: setattr(reference.config, name, value)

    assert faulty(lambda reference: None) < BOUNDS["logits"][0]
    faults = {
        "m^2 left out": lambda reference: setattr(reference, "scale", 48**-0.5),
        "half-split rope": set_config("is_neox_style", True),
        "no rope": set_config("mla_use_nope", True),
        "causal mask": set_config("is_causal", True),
        "gate and up exchanged": exchange,
    }
    for name, change in faults.items():
        assert faulty(change) > BOUNDS["logits"][0], name


def test_rejected_rows_leave_the_cache_as_it_was(folders, random):
    batch = Batch(folders("tiny"), [20, 7], random, rejected=[2, 0]).ingest()
    behind = batch.cached(0, 20, 2)
    assert (behind == 0x7FC1).all() and (batch.cached(0, 0, 20) != 0x7FC1).any()
    assert (batch.cache[0][0] == 0x7FC1).all(), "page 0 was written"
    batch.draft()
    assert batch.drafter.first_position.tolist() == [20, 7]
    compare(batch, Reference(folders("tiny")))


def test_the_edge_of_max_len(folders, random):
    for length in (45, 46, 47, 48):
        batch = Batch(folders("tiny"), [length], random, max_len=48).ingest()
        before = [layer.copy() for layer in batch.cache]
        batch.draft()
        compare(batch, Reference(folders("tiny")))
        written = sum(int((old != new).any(axis=-1).sum()) for old, new in zip(before, batch.cache))
        assert written == 2 * (min(length + K, 48) - length)


def test_padding_writes_nothing_and_has_no_tokens(folders, random):
    batch = Batch(folders("tiny"), [-1, 9], random)
    alone = [layer.copy() for layer in batch.cache]
    batch.request[1] = -1
    batch.ingest().draft()
    assert all(np.array_equal(old, new) for old, new in zip(alone, batch.cache))
    assert (batch.drafter.tokens == -1).all() and not batch.drafter.status.any()


@pytest.mark.parametrize("bad", [-5, 0, "pages", 2**31 - 1])
def test_a_bad_page_is_skipped_and_told_of(folders, random, bad):
    batch = Batch(folders("tiny"), [40, 40], random)
    guard = batch.drafter  # the same memory serves both runs
    batch.ingest().draft()
    good = guard.tokens[1].tolist(), batch.block("hidden", 1).copy()
    batch.page_table[0, 1] = len(batch.cache[0]) if bad == "pages" else bad
    before = [layer.copy() for layer in batch.cache]
    batch.ingest().draft()
    assert guard.status.tolist() == [1, 0]
    assert (guard.tokens[1].tolist(), True) == (good[0], np.array_equal(batch.block("hidden", 1), good[1]))
    assert np.isfinite(from_bf16(batch.block("hidden", 0))).all()
    assert all(np.array_equal(old[0], new[0]) for old, new in zip(before, batch.cache))
    # The rows of positions 16..31 are not visible: the reference without them.
    reference = Reference(folders("tiny"))
    taps = [from_bf16(tap[batch.rows(0)]).astype(np.float64) for tap in batch.taps]
    rows = reference.context_rows(taps, np.arange(40))
    reference.visible = lambda layer, queries, keys: np.tile((keys < 16) | (keys >= 32), (len(queries), 1))
    within("hidden", batch.block("hidden", 0), reference.block(int(batch.anchor[0]), 40, rows, K, MAX_LEN)["hidden"])


def test_bad_input_of_one_request_is_padding_with_a_status(folders, random):
    def spoil(batch, r):
        yield "row_start", lambda: batch.row_start.__setitem__(slice(r + 1, r + 2), 10**6)
        yield "rejected", lambda: batch.rejected.__setitem__(r, 100)
        yield "rejected", lambda: batch.rejected.__setitem__(r, -1)
        yield "positions", lambda: batch.positions.__setitem__(batch.row_start[r + 1] - 1, -3)
        yield "positions", lambda: batch.positions.__setitem__(batch.row_start[r + 1] - 1, MAX_LEN)
        yield "anchor", lambda: batch.anchor.__setitem__(r, 512)
        yield "anchor", lambda: batch.anchor.__setitem__(r, -1)

    for i in range(7):
        batch = Batch(folders("tiny"), [12, 30], random)
        batch.ingest().draft()
        good = batch.drafter.tokens[0].tolist()
        field, change = list(spoil(batch, 1))[i]
        change()
        batch.ingest().draft()
        assert batch.drafter.status.tolist() == [0, 4], field
        assert batch.drafter.tokens[1].tolist() == [-1] * K and batch.drafter.tokens[0].tolist() == good


def test_taps_in_one_buffer_and_apart_give_the_same_bits(folders, random):
    batch = Batch(folders("tiny"), [24, 8], random).ingest()
    apart = [layer.copy() for layer in batch.cache]
    joined = np.ascontiguousarray(np.concatenate(batch.taps, axis=1))
    for layer in batch.cache:
        layer[:] = 0x7FC1
    batch.drafter.ingest(batch.arguments(), [bf16(part) for part in np.split(joined, 2, axis=1)])
    assert all(np.array_equal(a, b) for a, b in zip(apart, batch.cache))


def test_a_request_does_not_see_place_padding_or_neighbours(folders, random):
    options = {"mode": "probabilistic"}
    first = Batch(folders("tiny"), [33, -1, 12, 7], random, **options)
    first.temperature[:] = 1
    first.ingest().draft()
    other = Batch(folders("tiny"), [5, 9, 33, -1], random, **options)
    other.temperature[:] = 1
    other.seed[2], other.anchor[2] = first.seed[0], first.anchor[0]
    for a, b in zip(other.taps, first.taps):
        a[other.rows(2)] = b[first.rows(0)]
    other.ingest().draft()
    assert other.drafter.tokens[2].tolist() == first.drafter.tokens[0].tolist()
    assert np.array_equal(other.block("hidden", 2), first.block("hidden", 0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_probabilistic_drafts_are_those_of_the_reference(folders, random, dtype):
    """Its logits are rounded, so a pick may differ where two scores are close: rare, and only by that much."""
    batch = Batch(folders("tiny"), [10, 20, 30, 40], random, mode="probabilistic", draft_logits=dtype)
    batch.temperature[:] = [0, 0.7, 1, 1.5]
    batch.step[:] = [3, 2**31 - 1, 0, 9]
    batch.ingest().draft()
    reference = Reference(folders("tiny"))
    for r in range(4):
        base = from_bf16(batch.block("base_logits", r)).astype(np.float64)
        tokens = [int(t) for t in batch.drafter.tokens[r]]
        kept, picks = reference.draft_probabilistic(
            base, int(batch.anchor[r]), K, batch.temperature[r], int(batch.seed[r]), int(batch.step[r]),
            batch.lengths[r], dtype=dtype, forced=tokens)
        logits = batch.drafter.draft_logits[r]
        logits = from_bf16(logits) if dtype == "bf16" else logits
        assert np.abs(logits - kept).max() <= (2**-7 if dtype == "bf16" else 1e-4) * np.abs(kept).max()
        assert tokens == picks or dtype == "bf16"


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_verification_is_that_of_the_reference(folders, random, method, one_hot):
    batch = Batch(folders("tiny"), [10, 20, 30, -1, 25], random, mode="probabilistic").ingest()
    batch.temperature[:] = [0.8, 0, 1, 1, 1.3]
    for step in range(20):
        batch.draft()
        ids = np.array(batch.drafter.tokens)
        ids[4, step % K] = [-1, 512, 10**9, -(2**31)][step % 4]
        noise = random.standard_normal((5, K + 1, 512)).astype(np.float32)
        logits = noise * 0.1
        logits[:, :K] += np.where(random.random((5, K, 1)) < 0.7, batch.drafter.draft_logits, noise[:, :K])
        emitted, accepted = np.full((5, K + 1), 77, np.int32), np.full(5, 77, np.int32)
        before = batch.step.copy()
        batch.drafter.verify(batch.arguments(), ids, logits, emitted, accepted, one_hot=one_hot, method=method)
        assert emitted[3].tolist() == [-1] * (K + 1) and accepted[3] == 0
        assert (batch.step - before).tolist() == [1, 1, 1, 0, 1]
        for r in (0, 1, 2, 4):
            drafts = None if one_hot else batch.drafter.draft_logits[r].astype(np.float64)
            wanted, tau = verify([int(i) for i in ids[r]], logits[r].astype(np.float64), drafts,
                                 batch.temperature[r], int(batch.seed[r]), int(before[r]), batch.lengths[r], method)
            assert accepted[r] == tau + 1 == len(wanted)
            assert emitted[r].tolist() == wanted + [-1] * (K + 1 - len(wanted))


def test_whole_loops_say_what_the_target_would(folders, random):
    """2,000 tokens by greedy drafting and verification are the toy target's own."""
    k, vocab, target_seed = 3, 512, 11
    batch = Batch(folders("tiny"), [2], random, k=k)
    batch.positions = np.zeros(k + 1, np.int64)
    said = [5, 9]

    def greedy(a, b):
        return int(np.argmax(toy_target_logits(target_seed, a, b, vocab)))

    said.append(greedy(*said))
    batch.drafter = twostep.DsparkDrafter(
        batch.weights, cache=[bf16(layer) for layer in batch.cache], tap_layers=[1, 3], num_draft_tokens=k,
        max_len=MAX_LEN, max_ingest_rows=k + 1)
    pages = np.arange(1, len(batch.cache[0]), dtype=np.int32)
    batch.page_table[0] = pages[np.arange(batch.page_table.shape[1]) % len(pages)]  # a ring: the context is not the point
    first, rows = 0, 2
    emitted, accepted = np.zeros((1, k + 1), np.int32), np.zeros(1, np.int32)
    taps = [to_bf16(random.standard_normal((k + 1, 256))) for _ in range(2)]
    while len(said) < MAX_LEN - 2 * k:
        batch.row_start[:] = [0, rows]
        batch.positions[:] = first + np.arange(k + 1)
        batch.anchor[0] = said[-1]
        arguments = batch.arguments()
        batch.drafter.ingest(arguments, [bf16(tap) for tap in taps])
        batch.drafter.draft(arguments)
        ids = np.array(batch.drafter.tokens)
        if random.random() < 0.5:  # a draft that is right, as far as it goes
            for i in range(random.integers(0, k) + 1):
                ids[0, i] = greedy(*[*said, *ids[0, :i]][-2:])
        prefix = [*said, *ids[0].tolist()]
        logits = np.stack([toy_target_logits(target_seed, *prefix[len(said) - 2 + i : len(said) + i], vocab)
                           for i in range(k + 1)])[None]
        batch.drafter.verify(arguments, ids, np.ascontiguousarray(logits), emitted, accepted, one_hot=True)
        first, rows = len(said) - 1, k + 1
        batch.rejected[0] = k + 1 - accepted[0]
        said += emitted[0, : accepted[0]].tolist()
    assert all(said[i] == greedy(said[i - 2], said[i - 1]) for i in range(3, len(said))) and len(said) > 2000


def test_verify_refuses_rows_that_meet(folders, random, refuses):
    batch = Batch(folders("tiny"), [4], random).ingest().draft()
    logits, both = np.zeros((1, K + 1, 512), np.float32), np.zeros((1, K + 1), np.int32)
    emitted, accepted = np.zeros((1, K + 1), np.int32), np.zeros(1, np.int32)
    with refuses("overlap"):
        batch.drafter.verify(batch.arguments(), both[:, :K], logits, both, accepted, one_hot=True)
    with refuses("bad_layout"):
        wide = np.broadcast_to(logits[:, :1], logits.shape)
        batch.drafter.verify(batch.arguments(), both[:, :K], wide, emitted, accepted, one_hot=True)


def test_refusals(folders, random, refuses, tmp_path):
    folder = folders("tiny")
    good = {"k": K}
    for change, code in (({"k": 0}, "invalid_argument"), ({"k": 17}, "invalid_argument"),
                         ({"max_len": 4096}, "invalid_argument"), ({"mode": "beam"}, "invalid_argument"),
                         ({"draft_logits": "f16"}, "unsupported"), ({"calibration": [1.0]}, "invalid_argument"),
                         ({"ranks": 3}, "invalid_argument")):
        with refuses(code):
            Batch(folder, [4], random, **(good | change))
    batch = Batch(folder, [4, 6], random)
    weights, cache = batch.weights, [bf16(layer) for layer in batch.cache]
    with refuses("invalid_argument"):
        twostep.DsparkDrafter(weights, cache=cache, tap_layers=[3, 1])
    with refuses("invalid_argument"):
        twostep.DsparkDrafter(weights, cache=cache, tap_layers=[1, 3], stream="attn_res")
    with refuses("invalid_argument"):
        twostep.DsparkDrafter(weights, cache=cache[:1], tap_layers=[1, 3])
    arguments = batch.arguments()
    with refuses("invalid_argument"):
        batch.drafter.ingest(arguments, [bf16(batch.taps[0])])
    with refuses("invalid_argument"):
        batch.drafter.ingest(arguments, [bf16(tap[:3]) for tap in batch.taps])
    with refuses("unsupported"):
        batch.drafter.ingest(arguments, [twostep.view(tap, "f16") for tap in batch.taps])
    batch.temperature = batch.temperature.astype(np.float64)
    with refuses("unsupported"):
        batch.drafter.draft(batch.arguments())
    batch.temperature = batch.temperature.astype(np.float32)
    for name in ("request", "rejected", "anchor", "temperature", "seed", "step"):
        setattr(batch, name, getattr(batch, name)[:1])
    batch.row_start, batch.page_table = batch.row_start[:2], batch.page_table[:1]
    with refuses("not_prepared"):
        batch.drafter.draft(batch.arguments())
    with refuses("invalid_argument"):
        twostep.DrafterWeights(folder, overrides='{"mask_token_id": 512}')
    with refuses("data_error"):
        twostep.DrafterWeights(tmp_path)
