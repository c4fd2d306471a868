"""What `nvfp4.testing.sass` sees in machine code: short programs with one fault, or none."""

import pytest
from nvfp4.testing.sass import wgmmas_in_flight

WGMMA = "HGMMA.64x16x16.F32.BF16 R24, R96, gdesc[UR12], R24, gsb0"
OPEN = WGMMA.removesuffix(", gsb0")  # its group is not yet complete
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x0"
COPY = "@!P0 LDGSTS.E.BYPASS.128 [R55+0x20000], desc[UR12][R28.64], P0"


def program(*lines):
    """Lines as nvdisasm prints them; a name that ends with a colon is a label."""
    text = [x if x.endswith(":") else f"        /*{16 * i:04x}*/                   {x} ;" for i, x in enumerate(lines)]
    return wgmmas_in_flight("\n".join(["kernel:", *text]))


@pytest.mark.parametrize(
    "write",
    [
        "MOV R96, R1",
        "@!P0 MOV R99, R1",
        "LDS.64 R98, [R4+0x26000]",
        "LDS.128 R96, [R4]",
        "IMAD.WIDE R98, R155, 0x2, R136",
        "SHFL.IDX PT, R97, R2, RZ, 0x1f",
        "IADD3 R96, P1, R4, R5, RZ",
        "FMUL R31, R1, R2",  # one of the sums: 8 for 16 columns
    ],
)
def test_a_write_to_a_register_in_flight_is_seen(write):
    clean = write.removeprefix("@!P0 ")
    assert program(WGMMA, write, WAIT).overwrites == (clean,)
    assert program(WGMMA, WAIT, write).overwrites == ()


@pytest.mark.parametrize(
    "harmless",
    [
        "STS.128 [R4], R96",
        "STG.E desc[UR4][R96.64], R24",
        "ISETP.GT.AND P0, PT, R96, 0x2, PT",
        "MOV R100, R96",
        "LDS.128 R92, [R4]",
        COPY,
    ],
)
def test_reads_and_neighbours_are_not_writes(harmless):
    assert program(WGMMA, harmless, WAIT).overwrites == ()


def test_a_wait_leaves_the_newest_groups_in_flight():
    other = WGMMA.replace("R96", "R88")
    one_left = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert program(WGMMA, other, one_left, "MOV R96, R1").overwrites == ()
    assert program(WGMMA, other, one_left, "MOV R88, R1").overwrites == ("MOV R88, R1",)
    assert program(OPEN, other, one_left, "MOV R96, R1").overwrites == ("MOV R96, R1",)  # one group of two


def test_a_loop_is_entered_again_with_what_it_left_in_flight():
    body = ("MOV R96, R1", WGMMA)
    end = ("@P0 BRA `(.L_x_1)", ".L_x_0:", WAIT)
    found = program(".L_x_1:", *body, *end)
    assert found.overwrites == ("MOV R96, R1",) and found.at_loop_end == 1 and found.wgmmas == 1
    found = program(".L_x_1:", *body, WAIT, *end)
    assert found.overwrites == () and found.at_loop_end == 0


def test_copies_begin_behind_the_wait_and_a_barrier():
    def copies(*lines):
        found = program(*lines)
        return found.at_copy, found.unsynchronised_copies

    assert copies(COPY, WGMMA, WAIT, BARRIER, COPY) == (0, 0)
    assert copies(WGMMA, WAIT, COPY) == (0, 1)
    assert copies(WGMMA, BARRIER, WAIT, COPY) == (0, 1)
    assert copies(WGMMA, BARRIER, COPY, WAIT) == (1, 1)


def test_second_operands_and_shared_first_ones_hold_no_registers():
    shared = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR12], R24, gsb0"
    assert program(shared, "MOV R96, R1", WAIT).overwrites == ()
