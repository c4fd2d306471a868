"""What `cutedsl_mma` chooses and refuses, and who copies and reads what in it; nothing is compiled."""

import itertools

import pytest
from nvfp4.kernels.gemm import cutedsl_mma
from nvfp4.kernels.gemm._cutedsl_mma import index
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.conformance import H200

KERNEL = cutedsl_mma.CuteDslMma()
SMEM_BYTES = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
PROBLEMS = [Problem(n=n, k=k) for n in (1, 352, 4096, 28672) for k in (16, 1056, 4096, 28672)]
MS = (1, 16, 17, 32, 33, 64, 65, 96, 128, 192, 256, 257, 512, 1024, 8192)


def card(capability, units=128):
    return Device(
        kind="cuda", name="card", capability=capability, units=units, smem_bytes=SMEM_BYTES.get(capability, 65536)
    )


def shapes(device=H200):
    """All tiles that warps can share, as compiled for 64 and 128 k a stage."""
    problem = Problem(n=28672, k=8192)
    found = {}
    for config in KERNEL.space(device, problem):
        shape = config.shape(device, problem)
        if cutedsl_mma.fits(device, shape):
            found[shape.rows, shape.tokens, shape.warps, shape.block_k] = shape
    return list(found.values())


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_older_cards_are_refused_with_the_reason(capability):
    verdict = KERNEL.supports(card(capability), PROBLEMS[-1])
    assert not verdict and "sm_80" in verdict.reason and f"sm_{capability[0]}{capability[1]}" in verdict.reason


@pytest.mark.parametrize(("k", "device"), [(24, card((8, 0))), (64, Device(kind="cpu", name="cpu"))])
def test_refusals(k, device):
    assert not KERNEL.supports(device, Problem(n=64, k=k))


@pytest.mark.parametrize("capability", SMEM_BYTES, ids=str)
def test_the_default_is_valid_for_every_m(capability):
    device = card(capability)
    for problem, m in itertools.product(PROBLEMS, MS):
        config = KERNEL.default_config(device, problem, m)
        assert config in KERNEL.space(device, problem)
        verdict = KERNEL.is_valid(device, problem, config, m)
        assert verdict, (problem.label, m, config, verdict.reason)


@pytest.mark.parametrize("capability", SMEM_BYTES, ids=str)
def test_the_space_is_small(capability):
    device = card(capability)
    for problem in PROBLEMS:
        valid = [c for c in KERNEL.space(device, problem) if any(KERNEL.is_valid(device, problem, c, m) for m in MS)]
        assert 1 <= len(valid) <= 500


@pytest.mark.parametrize("capability", SMEM_BYTES, ids=str)
def test_what_is_valid_fits_a_multiprocessor(capability):
    device, problem = card(capability), Problem(n=4096, k=4096)
    for config in KERNEL.space(device, problem):
        shape = config.shape(device, problem)
        if any(KERNEL.is_valid(device, problem, config, m) for m in MS):
            assert shape.blocks_per_sm * (shape.smem_bytes + 1024) <= device.smem_bytes + 1024
            assert shape.blocks_per_sm * shape.threads * shape.launch_registers <= 65536
            assert shape.needed_registers <= shape.launch_registers


def test_splits_are_refused_where_they_cannot_help():
    device = card((8, 9))
    config = cutedsl_mma.CuteDslMmaConfig(rows=64, tokens=64, warps=4, block_k=64, stages=3, split=8)
    assert KERNEL.is_valid(device, Problem(n=4096, k=4096), config, 64)
    assert "too few for 8 blocks" in KERNEL.is_valid(device, Problem(n=4096, k=960), config, 64).reason
    assert "fill the device" in KERNEL.is_valid(device, Problem(n=28672, k=4096), config, 64).reason


def test_few_tiles_are_split_and_many_are_not():
    device = card((8, 9))
    assert KERNEL.default_config(device, Problem(n=1024, k=8192), 128).split > 1
    assert KERNEL.default_config(device, Problem(n=57344, k=8192), 512).split == 1


def test_untuned_it_runs_at_65_to_191_where_there_is_no_wgmma():
    pytest.importorskip("triton")
    from nvfp4.kernels.gemm import cutedsl_wgmma, marlin, triton_fused_fragment, two_pass_fragment

    others = [m.KERNEL for m in (cutedsl_wgmma, marlin, triton_fused_fragment, two_pass_fragment)]
    problem = Problem(n=4096, k=4096)

    def first(device, m):
        widths = [
            ((high or 1 << 31) - low, kernel.name)
            for kernel in [*others, KERNEL]
            if kernel.supports(device, problem)
            for low, high in kernel.made_for
            if low <= m <= (high or 1 << 31)
        ]
        return min(widths)[1]

    for capability in SMEM_BYTES:
        chosen = {m for m in range(1, 600) if first(card(capability), m) == "cutedsl_mma"}
        assert chosen == (set() if capability == (9, 0) else set(range(65, 192)))


def test_every_piece_of_a_stage_is_copied_once():
    for c in shapes():
        copies, together = index.x_copies(c)
        x = [
            (token + i * together, k, offset + i * together * c.x_pitch)
            for thread in range(c.threads)
            for token, k, offset in [index.x_copied(thread, c)]
            for i in range(copies)
        ]
        assert sorted((token, k) for token, k, _ in x) == [
            (t, k) for t in range(c.tokens) for k in range(0, c.block_k, 8)
        ]
        assert sorted(offset for *_, offset in x) == list(range(0, c.x_bytes, 16))
        pieces = [start + thread for start in index.weight_copies(c) for thread in range(c.threads)]
        assert sorted(piece for piece in pieces if piece < c.run_bytes // 16) == list(range(c.run_bytes // 16))


def test_ldmatrix_reads_what_was_copied_and_meets_no_bank_twice():
    for c in shapes():
        places = {}
        for thread in range(c.threads):
            token, k, offset = index.x_copied(thread, c)
            copies, together = index.x_copies(c)
            places.update({offset + i * together * c.x_pitch: (token + i * together, k) for i in range(copies)})
        for first, step in itertools.product(range(0, c.tokens, 16), range(c.steps)):
            rows = [index.x_step(index.x_read(lane, first, c), step) for lane in range(32)]
            for matrix in range(4):
                own = rows[8 * matrix : 8 * matrix + 8]
                token, k = first + matrix // 2 * 8, 16 * step + matrix % 2 * 8
                assert [places[offset] for offset in own] == [(token + row, k) for row in range(8)]
                assert len({offset % 128 for offset in own}) == 8


def test_the_way_out_turns_around_without_meeting_a_bank_twice():
    for c in shapes():
        written = {}
        for warp in range(c.warps):
            subtile, token = index.warp_place(warp, c)
            for i, octet, half in itertools.product(range(c.subtiles), range(c.octets), range(2)):
                offsets = [
                    index.out_written(lane, subtile, token, c) + octet * 8 * c.out_pitch + (i * 16 + half * 8) * 2
                    for lane in range(32)
                ]
                assert len({offset // 4 % 32 for offset in offsets}) == 32
                for lane, offset in enumerate(offsets):
                    row = (subtile + i) * 16 + half * 8 + lane % 4 * 2
                    written[offset] = (token + octet * 8 + lane // 4, row)
        assert len(written) == c.tokens * c.rows // 2
        for place in range(c.tokens * c.rows // c.store_values):
            token, row, offset = index.out_read(place, c)
            assert [written[offset + 2 * i] for i in range(0, c.store_values, 2)] == [
                (token, row + i) for i in range(0, c.store_values, 2)
            ]


def test_blocks_along_k_do_every_step_once():
    for k_tiles, split in itertools.product(range(16, 90), (2, 4, 8)):
        ranges = [index.k_range(rank, split, k_tiles) for rank in range(split)]
        assert ranges[0][0] == 0 and ranges[-1][1] == k_tiles
        assert all(first < behind for first, behind in ranges)
        assert all(ranges[i][1] == ranges[i + 1][0] for i in range(split - 1))
