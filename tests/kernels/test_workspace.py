"""Counters are zero when a launch starts, and shared only where launches follow one another."""

import pytest
import torch
from nvfp4.kernels.workspace import zeroed_counters

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_cpu_counters_are_fresh():
    device = torch.device("cpu")
    first, second = zeroed_counters(device, 5), zeroed_counters(device, 5)
    first += 1
    assert first.dtype == torch.int32 and first.shape == (5,)
    assert second.tolist() == [0] * 5


@pytest.mark.gpu
@cuda
class TestCuda:
    device = torch.device("cuda")

    def test_one_buffer_per_stream(self):
        first = zeroed_counters(self.device, 10)
        assert first.numel() >= 10 and not first.any()
        assert zeroed_counters(self.device, 10) is first
        with torch.cuda.stream(torch.cuda.Stream()):
            other = zeroed_counters(self.device, 10)
        assert other.data_ptr() != first.data_ptr()

    def test_growth(self):
        small = zeroed_counters(self.device, 10)
        large = zeroed_counters(self.device, small.numel() + 1)
        assert large.numel() > small.numel() and not large.any()
        assert zeroed_counters(self.device, 10) is large

    def test_made_in_inference_mode_usable_outside(self):
        with torch.cuda.stream(torch.cuda.Stream()):
            with torch.inference_mode():
                counters = zeroed_counters(self.device, 10)
            counters.zero_()

    def test_captures_have_their_own_and_leave_no_block_in_the_pool(self):
        eager = zeroed_counters(self.device, 10)
        seen = []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                first = zeroed_counters(self.device, 10)
                assert zeroed_counters(self.device, 10) is first
                larger = zeroed_counters(self.device, first.numel() + 1)
                assert larger.numel() > first.numel()
                larger += 1  # as an aborted launch would leave them
                seen += [first, larger]
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            assert larger.unique().tolist() == [1]  # zeroed at the start of each replay
            live = torch._C._cuda_checkPoolLiveAllocations(torch.cuda.current_device(), graph.pool(), set())
            assert live
        assert len({t.data_ptr() for t in [eager, *seen]}) == 5

    def test_many_captures_outgrow_the_arena(self):
        pointers = set()
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                counters = zeroed_counters(self.device, 200_000)
            pointers.add(counters.data_ptr())
            graph.replay()
            torch.cuda.synchronize()
            assert not counters.any()
        assert len(pointers) == 3
