"""A recorded routing: what files may hold it, what is refused, and a tuning that times it."""

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from nvfp4.cache.records import ROUTINGS
from nvfp4.cache.store import Store
from nvfp4.errors import InvalidInput
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.recorded import read_routing, recorded_ids
from nvfp4.tuner.run import tune
from safetensors.torch import save_file

IDS = [[0, 3], [2, -1], [3, 1]]
MOE = Problem(op="moe", n=48, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=40, k=64, experts=4)


def json_file(tmp_path, ids):
    path = tmp_path / "ids.json"
    path.write_bytes(msgspec.json.encode(ids))
    return path


def test_every_format_holds_the_same_routing(tmp_path):
    paths = [tmp_path / name for name in ("a.npy", "b.npy", "one.safetensors", "two.safetensors")]
    np.save(paths[0], np.array(IDS, dtype=np.int64))
    np.save(paths[1], np.array(IDS, dtype=np.int16))
    save_file({"x": torch.tensor(IDS)}, paths[2])
    save_file({"topk_ids": torch.tensor(IDS).int(), "topk_weights": torch.ones(3, 2)}, paths[3])
    found = [read_routing(path, [MOE, GROUPED]) for path in (*paths, json_file(tmp_path, IDS))]
    assert len(set(found)) == 1
    assert re.fullmatch("recorded-[0-9a-f]{12}", found[0].name)
    assert recorded_ids(found[0], MOE, 3).tolist() == IDS


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".json"])
def test_a_file_that_is_not_there_or_cannot_be_read_says_so_without_a_number(tmp_path, suffix):
    path = tmp_path / f"nope{suffix}"
    with pytest.raises(InvalidInput, match=f"^{re.escape(str(path))} cannot be read: there is no such file$"):
        read_routing(path)
    path.mkdir()
    with pytest.raises(InvalidInput) as caught:
        read_routing(path)
    assert "[Errno" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8])
def test_integers_of_every_kind_and_byte_order_are_the_same(tmp_path, dtype):
    ids = torch.tensor([[0, 3], [2, 1]])
    wanted = read_routing(json_file(tmp_path, ids.tolist()))
    save_file({"x": ids.to(dtype)}, tmp_path / "x.safetensors")
    np.save(tmp_path / "x.npy", ids.to(dtype).numpy())
    np.save(tmp_path / "big.npy", ids.numpy().astype(">i4"))
    for name in ("x.safetensors", "x.npy", "big.npy"):
        assert read_routing(tmp_path / name, [MOE]) == wanted


@pytest.mark.parametrize("most", [None, 3, 1])
def test_a_record_begins_with_a_token_that_names_an_expert(tmp_path, most):
    """On a rank with a part of the experts the first tokens may be all of others: one of them would be no work."""
    elsewhere = [-1, -1]
    recorded = read_routing(json_file(tmp_path, [elsewhere, elsewhere, [-1, 2], elsewhere, [3, 1]]), most_tokens=most)
    began = [[-1, 2], elsewhere, [3, 1], elsewhere, elsewhere][:most]
    assert recorded_ids(recorded, MOE, len(began)).tolist() == began
    assert recorded_ids(recorded, GROUPED, 1).tolist() == [[2]]


def test_another_content_has_another_name_and_a_cut_one_the_same(tmp_path):
    whole = read_routing(json_file(tmp_path, IDS))
    assert read_routing(json_file(tmp_path, [[0, 3, 2], [-1, 3, 1]])).name != whole.name
    assert read_routing(json_file(tmp_path, [*IDS[:2], [3, 2]])).name != whole.name
    cut = read_routing(json_file(tmp_path, IDS), most_tokens=2)
    assert cut.name == whole.name and recorded_ids(cut, MOE, 2).tolist() == IDS[:2]


def test_a_record_begins_again_where_it_ends_and_a_product_has_a_row_for_every_id(tmp_path):
    recorded = read_routing(json_file(tmp_path, IDS))
    assert recorded_ids(recorded, MOE, 5).tolist() == [*IDS, *IDS[:2]]
    assert recorded_ids(recorded, GROUPED, 7).flatten().tolist() == [0, 3, 2, 3, 1, 0, 3]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[-1, -1], [0, 4]], "got expert 4; expected ids below 4, the experts of moe 48x64"),
        ([[0, 1, 2]], "got 3 experts a token; expected top_k = 2 of moe 48x64"),
        ([[0, -2]], "got ids from -2 to 0; expected numbers of experts, or -1"),
        ([[-1, -1]], "got ids from -1 to -1"),
        ([], "got shape (0,); expected [tokens, top_k]"),
        ([[]], "got shape (1, 0); expected [tokens, top_k]"),
        ([[0, 1], [2]], "got lists of different lengths"),
        ([[0.5, 1.0]], "expected a .json file"),
        ({"ids": 3}, "expected a .json file"),
    ],
)
def test_what_is_no_routing_is_refused(tmp_path, ids, words):
    with pytest.raises(InvalidInput, match=re.escape(words)):
        read_routing(json_file(tmp_path, ids), [MOE])


def test_files_of_other_kinds_are_refused(tmp_path):
    floats, pickled, several = tmp_path / "f.npy", tmp_path / "p.npy", tmp_path / "s.safetensors"
    np.save(floats, np.ones((2, 2)))
    np.save(pickled, np.array([{}, {}]), allow_pickle=True)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, several)
    flags, huge, halves = tmp_path / "flags.npy", tmp_path / "huge.npy", tmp_path / "h.safetensors"
    np.save(flags, np.ones((2, 2), dtype=bool))
    np.save(huge, np.array([[0, 2**64 - 1]], dtype=np.uint64))  # as int64 it would be -1
    save_file({"a": torch.ones(2, 2).bfloat16()}, halves)
    for path, words in (
        (floats, "got torch.float64; expected integers"),
        (flags, "got torch.bool; expected integers"),
        (huge, "got an id of 18446744073709551615; expected numbers of experts"),
        (halves, "got torch.bfloat16; expected integers"),
        (pickled, "expected a .npy file"),
        (several, "got tensors a, b; expected one tensor, or one named 'topk_ids'"),
        (tmp_path / "ids.txt", "got .txt; expected .npy or .safetensors or .json"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(words)):
            read_routing(path)


def test_a_tuning_times_it_beside_the_others_and_later_runs_without_it_say_so(tmp_path, pace, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = {"device": "cpu", "store_path": tmp_path / "t.db", "pace": pace, "quick": True}
    path = json_file(tmp_path, IDS)
    name = read_routing(path).name
    first = tune([MOE], (3,), routing=path, **arguments)
    assert first.exit_code == 0 and first.failures == {} and first.notes == []
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        rows = store.measurements(describe("cpu"), MOE)
    assert {(row.protocol, row.routing) for row in rows} == {
        (protocol, routing) for protocol in ("screen", "final") for routing in (*ROUTINGS, name)
    }
    assert tune([MOE], (3,), routing=path, **arguments).measured == 0
    later = tune([MOE], (3,), **arguments)
    assert f"was tuned with {name}" in later.notes[0]
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        again = store.measurements(describe("cpu"), MOE)
    # Nothing is screened again; others may have to race, for three routings decide now who is in front, not four.
    assert sum(row.protocol == "screen" for row in again) == sum(row.protocol == "screen" for row in rows)
    with pytest.raises(InvalidInput, match="is for problems of experts"):
        tune([Problem(n=64, k=64)], (3,), routing=path, **arguments)
    with pytest.raises(InvalidInput, match="ids below 3"):
        tune([replace(MOE, experts=3)], (3,), routing=path, **arguments)


def test_one_token_is_tuned_with_the_record_of_a_rank_that_it_does_not_go_to(tmp_path, pace, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = json_file(tmp_path, [[-1, -1], [-1, -1], [1, -1]])
    found = tune([MOE, GROUPED], (1,), device="cpu", store_path=tmp_path / "t.db", pace=pace, quick=True, routing=path)
    assert found.exit_code == 0 and found.failures == {}
