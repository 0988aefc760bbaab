"""The benchmark's arithmetic (with a clock of our own) and its command; times themselves are never tested."""

import json

import pytest
from torch.utils.flop_counter import FlopCounterMode

from neuclip_lib.bench.steps import stepping
from neuclip_lib.bench.timing import paired_ratios
from neuclip_lib.cli.bench import main


def test_ratios_are_medians_over_the_rounds_reference():
    now = [0.0]

    def takes(seconds):
        def call():
            now[0] += seconds

        return call

    ratios = paired_ratios({"a": takes(2.0), "b": takes(0.5)}, "a", rounds=5, clock=lambda: now[0])
    assert ratios["b"].median == pytest.approx(0.25)
    assert (ratios["b"].low, ratios["b"].high) == pytest.approx((0.25, 0.25))
    assert ratios["a"].median == 1


def test_command_writes_the_rows_and_refuses_what_it_does_not_know(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["R5", "--json", str(file)]) == 0
    rows = {row["variant"]: row["ratio"] for row in json.loads(file.read_text())["R5"]}
    assert (rows["neuclip"], rows["fastclip-v3"], rows["fastclip-v2"]) == (0, 8, 32)
    assert rows["million samples where v3's state is as large"] == pytest.approx(4.19, abs=0.01)
    assert "bytes a sample" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no table 'R10'"):
        main(["R10"])
    with pytest.raises(ValueError, match="at least 4"):
        main(["R5", "--rounds", "1"])


def test_the_steps_it_times_differ_by_the_products_of_the_prototypes():
    def flops(method):
        step = stepping(method, "nano", 16, size=8)
        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops()

    # Ten updates of two products a side, and two a side for alpha with its gradient.
    assert flops("neuclip") - flops("openclip") == (10 * 4 + 4) * 2 * 8 * 16 * 64
